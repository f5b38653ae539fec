"""Convolutions of a channels-last program: the operators' lowering, or oneDNN where it is faster; sums over pixels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from ....ops import conv_cpu
from ....ops.window import Window, count_blocks
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
FEW_OUTPUTS, MANY_OF_FEW_OUTPUTS, MANY_PRODUCTS = 24, 10_000_000, 400_000_000
"""And, from so many products, what has so few output channels: 384x384 pixels, 3 to 8 by 9x9, in 3.3 ms rather than 6.3
by Eigen and 43 by YNNPACK, 16 to 3 in 14 rather than 39 and 231; 160x160, 96 to 8 by 3x3, in 4.3 rather than 9.8 and
50.

Large convolutions of any channels, where neither columns nor Winograd serve: 224x224 of 64 in 17.5 ms rather than 22.6
by Eigen and 33 by YNNPACK, of 128 in 68 rather than 81 and 229, 900x160, 128 to 64, in 120 rather than 147 and 401."""


def convolve(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...], onednn: bool, dtype: Any) -> Any:
    """The convolution of x (N, spatial..., C) with w (O, C / groups, kernel...), in a type."""
    if onednn and groups == 1 and max(stretch) == 1 and _takes_onednn(x, w, window):
        return conv_cpu.in_packs(x, w, window, groups, _pack(x, w, window), _by_onednn).astype(dtype)
    return conv_cpu.convolve(x, w, window, groups, stretch).astype(dtype)


def _by_onednn(x: Any, w: Any, window: Window, _groups: int) -> Any:
    return by_onednn(x, conv_cpu.kernel_first(w), window.strides, window.pads)


def _pack(x: Any, w: Any, window: Window) -> int:
    """How many neighbours along the last axis become one: results of fewer than 16 channels waste oneDNN's registers.

    224x224 pixels, 16 to 1 by 9x9, by packs of 1, 2, 4 and 8 in 9.9, 5.9, 3.7 and 2.6 ms; 16 to 3 by 3x3, of 1, 2 and 4
    in 1.5, 1.1 and 1.6.
    """
    if x.dtype != np.float32 or window.strides[-1] > 1:
        return 1
    return max(n for n in (1, 2, 4, 8) if n == 1 or (n * w.shape[0] <= conv_cpu.NARROW and n < window.kernel[-1]))


def _takes_onednn(x: Any, w: Any, window: Window) -> bool:
    """Whether oneDNN computes it faster."""
    if x.dtype not in (np.float32, np.int8) or x.ndim != 4 or set(window.dilations) != {1}:
        return False
    count, pixels = math.prod(window.kernel), x.shape[0] * math.prod(count_blocks(x.shape[1:-1], window))
    most, least = OF_ONE_ELEMENT if count == 1 else OF_MORE
    if x.dtype == np.int8:
        return 1 < count <= conv_cpu.HELD_OF_8_BITS // w.shape[1] and pixels >= least
    (outputs, channels), products = w.shape[:2], pixels * w.size
    if channels <= most and pixels >= least and outputs >= conv_cpu.NARROW:
        return True
    if count > 1 and outputs <= FEW_OUTPUTS and products >= MANY_OF_FEW_OUTPUTS:
        return True
    return products >= MANY_PRODUCTS and conv_cpu.chosen(x, w, window, groups=1) is conv_cpu.native


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
