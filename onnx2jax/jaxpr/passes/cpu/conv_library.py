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

from collections import Counter
from typing import Any

import jax.numpy as jnp

from .... import compat
from ....ops.conv_rules import RULES, lowering
from ...program import Program, branch_for


def compiler_options(main: Any) -> dict[str, bool | str] | None:
    """The compiler's options for a program, a ClosedJaxpr; None for XLA's own, which newer releases keep."""
    target, program = "jaxlib {}.{}".format(*compat.jaxlib_release()), Program.of(main)
    if target not in RULES or not program.has("conv_general_dilated"):
        return None
    votes = Counter[str]()
    for equation in program.inlined(branch_for("cpu")).equations:
        if equation.name == "conv_general_dilated":
            if jnp.issubdtype(equation.inputs[0].aval.dtype, jnp.integer):
                return None
            votes[lowering(equation.convolution, target)] += equation.convolution.products
    return compat.eigen_convolutions() if votes["eigen"] > votes["native"] else None
