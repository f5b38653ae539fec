"""Convolutions of a channels-last program: the operators' lowering, or oneDNN where it is faster; sums over pixels."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from jax import lax

from ...ops import conv_cpu
from ...ops.window import Window, count_blocks
from .onednn import convolution as by_onednn


class Narrow(NamedTuple):
    """Convolutions for which oneDNN is used: at most this many input channels, at least this many pixels."""

    inputs: int
    pixels: int


OF_ONE_ELEMENT, OF_MORE = Narrow(32, 8192), Narrow(48, 1024)
"""By the size of the kernel: 3x3 over 224x224 pixels of 3 channels in 0.21 ms rather than 0.42, 16 channels of 208x208
in 1.3 rather than 2.8, 7x7 over 3 in 1.4 rather than 2.7, 1x1 from 16 channels of 160x160 in 0.15 rather than 0.24. Of
int8 those that would go by columns: 7x7 over 3 for 8 images in 9.6 ms rather than 20.9, 3x3 over 16 channels of 112x112
in 0.32 rather than 1.09."""
FEW_OUTPUTS: Final = 16
"""Results of fewer channels it takes twice as long for: one from 32 in 6.6 ms rather than 3.2."""


def convolve(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...], onednn: bool, dtype: Any) -> Any:
    """The convolution of x (N, spatial..., C) with w (O, C / groups, kernel...), in a type."""
    if onednn and groups == 1 and max(stretch) == 1 and _is_narrow(x, w, window):
        return by_onednn(x, conv_cpu.kernel_first(w), window.strides, window.pads).astype(dtype)
    return conv_cpu.convolve(x, w, window, groups, stretch).astype(dtype)


def _is_narrow(x: Any, w: Any, window: Window) -> bool:
    """Whether oneDNN is the faster one for an image of few channels."""
    if x.dtype not in (np.float32, np.int8) or x.ndim != 4 or set(window.dilations) != {1}:
        return False
    count, pixels = math.prod(window.kernel), x.shape[0] * math.prod(count_blocks(x.shape[1:-1], window))
    most, least = OF_ONE_ELEMENT if count == 1 else OF_MORE
    if x.dtype == np.int8:
        return 1 < count <= conv_cpu.HELD_OF_8_BITS // w.shape[1] and pixels >= least
    return w.shape[1] <= most and pixels >= least and w.shape[0] >= FEW_OUTPUTS


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
