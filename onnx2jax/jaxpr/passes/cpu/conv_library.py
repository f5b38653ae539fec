"""Which library XLA:CPU computes a program's convolutions with: YNNPACK, as it chooses itself, or Eigen.

XLA has one setting for all convolutions of a program, so their FLOPs vote. What is faster differs between releases:
in jaxlib 0.10 YNNPACK runs most convolutions on one thread, in 0.12 it hands those of a few microseconds to others.

Whole networks on two cores (AMD, Zen 4), YNNPACK's time over Eigen's. jaxlib 0.10: an EEG classifier 1.45, PLCMOS 1.4,
basic_pitch 1.35, DenseNet-121 1.24, Inception v2 1.18, VGG-19 1.06. jaxlib 0.12: Silero 1.2, the EEG classifier 1.14;
where it keeps YNNPACK: DNSMOS 0.88, basic_pitch 0.85.

Eigen has no kernels for integers: a 3x3 convolution of int8 over 28x28 pixels of 64 channels takes 4.4 ms, by YNNPACK
0.1, so a program with one keeps YNNPACK.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax.numpy as jnp

from .... import compat
from ...program import Equation, Program, branch_for, convolution_flops

NAME: Final = "conv_library"
"""For ``Passes.skip``."""


class Range(NamedTuple):
    """Convolutions that Eigen computes faster.

    Attributes:
        least, most: FLOPs.
        length: of the kernel, from which it is faster in any case.
        one_row: whether it is for images of one row.
    """

    least: float
    most: float = math.inf
    length: float = math.inf
    one_row: bool = False


RANGES: Final[Mapping[tuple[int, int], Range]] = {
    (0, 10): Range(least=2e7, length=64),
    (0, 11): Range(least=0, most=1e6),
    (0, 12): Range(least=0, most=1e6, one_row=True),
}
"""By release of jaxlib, measured one by one from 0.4 to 230 MFLOP; newer ones keep what XLA chooses.

3x3 over 56x56 pixels of 64 channels: 2.5 and 1.6 ms in 0.10, 1.3 and 1.45 in 0.12; over 8x8 of 16, to 32: 24 and 28 us
in 0.10, 75 and 25 in 0.12; over 160x160 of 96, to 8: 50.7 and 9.8 ms in 0.10; over 56x56 of 64, to 24: 2.1 and 1.1.
Of 100 from 3 to 96 channels to 1 to 24, from 20 MFLOP, one took YNNPACK less than 0.9 times as long."""


def compiler_options(main: Any) -> dict[str, bool | str] | None:
    """The compiler's options for a program, a ClosedJaxpr; None for XLA's own."""
    mine, program = RANGES.get(compat.jaxlib_release()), Program.of(main)
    if mine is None or not program.has("conv_general_dilated"):
        return None
    votes = {True: 0, False: 0}
    for equation in program.inlined(branch_for("cpu")).equations:
        if equation.name == "conv_general_dilated":
            if jnp.issubdtype(equation.inputs[0].aval.dtype, jnp.integer):
                return None
            flops = convolution_flops(equation)
            votes[_is_in(mine, equation, flops)] += flops
    return compat.eigen_convolutions() if votes[True] > votes[False] else None


def _is_in(mine: Range, equation: Equation, flops: int) -> bool:
    numbers = equation.params["dimension_numbers"]
    shape, weights = equation.outputs[0].aval.shape, equation.inputs[1].aval.shape
    spatial = [shape[axis] for axis in numbers.out_spec[2:]]
    kernel = [weights[axis] for axis in numbers.rhs_spec[2:]]
    is_row = math.prod(spatial) == max(spatial, default=1)
    by_flops = mine.least <= flops <= mine.most
    return by_flops or max(kernel, default=0) >= mine.length or (mine.one_row and is_row)
