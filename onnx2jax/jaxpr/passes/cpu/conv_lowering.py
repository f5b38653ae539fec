"""Convolutions of a channels-last program: the operators' lowering, or oneDNN where it is faster; sums over pixels."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import compat
from ....limits import CONV_FEW_CHANNELS
from ....ops import conv_cpu
from ....ops.conv_rules import RULES, Problem, lowering
from ....ops.window import Window
from ...program import Program
from .onednn import convolution as by_onednn


def convolve(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...], onednn: bool, dtype: Any) -> Any:
    """The convolution of x (N, spatial..., C) with w (O, C / groups, kernel...), in a type."""
    if onednn and lowering(Problem(x.dtype, x.shape[:-1], w.shape, window, groups, stretch), "onednn") == "onednn":
        return conv_cpu.in_packs(x, w, window, groups, _pack(x, w, window), _by_onednn).astype(dtype)
    return conv_cpu.convolve(x, w, window, groups, stretch).astype(dtype)


def _by_onednn(x: Any, w: Any, window: Window, _groups: int) -> Any:
    return by_onednn(x, conv_cpu.kernel_first(w), window.strides, window.pads)


def _pack(x: Any, w: Any, window: Window) -> int:
    """How many neighbours along the last axis become one: results of few channels waste oneDNN's registers.

    224x224 pixels, 16 to 1 by 9x9, by packs of 1, 2, 4 and 8 in 9.9, 5.9, 3.7 and 2.6 ms; 16 to 3 by 3x3, of 1, 2 and 4
    in 1.5, 1.1 and 1.6.
    """
    if x.dtype != np.float32 or window.strides[-1] > 1:
        return 1
    return max(n for n in (1, 2, 4, 8) if n == 1 or (n * w.shape[0] <= CONV_FEW_CHANNELS and n < window.kernel[-1]))


def weighted(x: Any, weights: Any, first: int, dtype: Any) -> Any:
    """The sum over axes of x from ``first`` on by weights of their shape, axes left behind them.

    One row by a matrix, along the last of these axes and then along the others: a plain product would be handed x
    transposed, and long sums are less exact. The mean of 56x56 pixels of 96 channels, 8 images, takes 0.9 ms rather
    than 3.
    """
    lead, tail = math.prod(x.shape[:first]), math.prod(x.shape[first + weights.ndim :])
    width = weights.shape[-1]
    y = lax.reshape(x, (lead, weights.size // width, width, tail))
    lines = lax.reshape(weights, (y.shape[1], 1, width))
    y = _along_rows(lax.broadcast_in_dim(lines, (lead, *lines.shape), (1, 2, 3)), y, dtype)
    if y.shape[1] > 1:
        y = _along_rows(lax.full((lead, 1, y.shape[1]), 1, y.dtype), y, dtype)
    return lax.reshape(y, (*x.shape[:first], *x.shape[first + weights.ndim :]))


def _along_rows(weights: Any, x: Any, dtype: Any) -> Any:
    """The sum of x (batch..., K, C) by weights (batch..., 1, K), of the shape (batch..., C)."""
    batch = tuple(range(x.ndim - 2))
    numbers = ((x.ndim - 1,), (x.ndim - 2,)), (batch, batch)
    y = lax.dot_general(weights, x, numbers, preferred_element_type=dtype)
    return lax.squeeze(y, (x.ndim - 2,))


def library_options(main: Any) -> dict[str, bool | str] | None:
    """The compiler's options for a program, a ClosedJaxpr; None for XLA's own, which newer releases keep.

    Which library XLA:CPU computes a program's convolutions with: YNNPACK, as it chooses itself, or Eigen.

    XLA has one setting for all convolutions of a program, so their FLOPs vote. What is faster differs between
    releases: in jaxlib 0.10 YNNPACK runs most convolutions on one thread, in 0.12 it hands those of a few
    microseconds to others.

    Whole networks on two cores (AMD, Zen 4), YNNPACK's time over Eigen's. jaxlib 0.10: an EEG classifier 1.45,
    PLCMOS 1.4, basic_pitch 1.35, DenseNet-121 1.24, Inception v2 1.18, VGG-19 1.06. jaxlib 0.12: Silero 1.2, the
    EEG classifier 1.14; where it keeps YNNPACK: DNSMOS 0.88, basic_pitch 0.85.

    Eigen has no kernels for integers: a 3x3 convolution of int8 over 28x28 pixels of 64 channels takes 4.4 ms, by
    YNNPACK 0.1, so a program with one keeps YNNPACK.
    """
    target, program = "jaxlib {}.{}".format(*compat.jaxlib_release()), Program.of(main)
    if target not in RULES or not program.has("conv_general_dilated"):
        return None
    votes = Counter[str]()
    for equation in program.inlined().equations:
        if equation.name == "conv_general_dilated":
            if jnp.issubdtype(equation.inputs[0].aval.dtype, jnp.integer):
                return None
            votes[lowering(equation.convolution, target)] += equation.convolution.products
    return compat.eigen_convolutions() if votes["eigen"] > votes["native"] else None
