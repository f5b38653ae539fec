"""Convolutions of images that lie channels last, as XLA:CPU computes them fastest.

Throughout x is (N, spatial..., C), w is (kernel..., C / groups, O), and the result (N, spatial..., O).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...ops.arrays import accumulator
from ...ops.conv import MAX_TAPS, Window, count_blocks
from .winograd import is_served, winograd

FEW_PIXELS: Final = 64
"""Results up to this many pixels are computed from columns: 512 channels of 7x7 pixels in 3.5 ms rather than 5.5."""
FEW_COLUMNS: Final = 32
"""Windows that hold up to this many numbers too: a 3x3 kernel over 3 channels in 0.75 ms rather than 1.8, 7x7 in 5.8
rather than 2.8."""
FEW_COLUMNS_OF_8_BITS: Final = 256
"""The same for int8: XLA takes an image that it has to transpose first, such as an input, by a slow kernel: 7x7 over 3
channels in 79 ms."""
LONG_SIDE, MANY_CHANNELS, MANY_PRODUCTS = 24, 64, 100_000_000
"""3x3 kernels go by Winograd's way, which takes longer to compile, over images from this side, this many channels and
products: 56x56 pixels of 64 channels in 1.7 ms rather than 2.6; 14x14 of 256 in 4.6 rather than 4.0."""

Lowering = Callable[[Any, Any, Window, int], Any]


def convolve(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int) -> Any:
    """The convolution, in the way that measured as the fastest for its shape.

    Half precision is summed in float32, int8 in int32.
    """
    wide = accumulator(x.dtype)
    window = Window(w.shape[:-2], tuple(strides), tuple(map(tuple, pads)), tuple(dilations))
    x, w = x.astype(wide), w.astype(wide)
    return chosen(x, w, window, groups)(x, w, window, groups)


def chosen(x: Any, w: Any, window: Window, groups: int) -> Lowering:
    """The fastest way for the shapes of an image and of weights."""
    count, channels = math.prod(window.kernel), w.shape[-2]
    if groups > 1:
        small = count <= MAX_TAPS and channels == 1
        return depthwise if small else piecewise if groups <= MAX_TAPS else native
    if count == 1:
        return pointwise
    blocks = count_blocks(x.shape[1:-1], window)
    pixels = x.shape[0] * math.prod(blocks)
    few = FEW_COLUMNS if x.dtype == np.float32 else FEW_COLUMNS_OF_8_BITS
    if count <= MAX_TAPS and (pixels <= FEW_PIXELS or count * channels <= few):
        return columns
    large = min(blocks) >= LONG_SIDE and min(w.shape[-2:]) >= MANY_CHANNELS
    return winograd if large and pixels * w.size >= MANY_PRODUCTS and is_served(x, window) else native


def native(x: Any, w: Any, window: Window, groups: int) -> Any:
    """By lax.conv_general_dilated. What has one spatial axis gets a second: only then XLA has a fast kernel for it."""
    if x.ndim == 3:
        flat = Window((1, *window.kernel), (1, *window.strides), ((0, 0), *window.pads), (1, *window.dilations))
        return lax.squeeze(native(lax.expand_dims(x, (1,)), lax.expand_dims(w, (0,)), flat, groups), (1,))
    spatial = "".join(map(str, range(x.ndim - 2)))
    return lax.conv_general_dilated(
        x, w, window.strides, window.pads, rhs_dilation=window.dilations, feature_group_count=groups,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"), preferred_element_type=_summed(x.dtype),
    )  # fmt: skip


def pointwise(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """A kernel of one element: a product of the pixels and the weights."""
    x = _padded(x, window)
    x = lax.slice(x, (0,) * x.ndim, x.shape, (1, *window.strides, 1))
    return _product(x, lax.reshape(w, w.shape[-2:]))


def columns(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """One product of the weights and, for each pixel of the result, all that its window holds (im2col).

    Axis by axis: XLA compiles a loop for every slice, in 12 ms, and 5x5 taps are 10 slices rather than 25.
    """
    for alone in reversed([*window.by_axis()]):
        x = lax.concatenate([*_taps(_padded(x, alone), alone)], x.ndim - 1)
    return _product(x, lax.reshape(w, (math.prod(w.shape[:-1]), w.shape[-1])))


def depthwise(x: Any, w: Any, window: Window, groups: int) -> Any:
    """One channel a group: shifted multiply-adds."""
    if w.shape[-1] != groups:
        x = jnp.repeat(x, w.shape[-1] // groups, axis=-1)
    weights = lax.reshape(w, (math.prod(window.kernel), w.shape[-1]))
    products = (
        part * lax.broadcast_in_dim(lax.index_in_dim(weights, i, 0, keepdims=False), part.shape, (part.ndim - 1,))
        for i, part in enumerate(_taps(_padded(x, window), window))
    )
    return functools.reduce(lax.add, products)


def piecewise(x: Any, w: Any, window: Window, groups: int) -> Any:
    """Group by group."""
    pieces = zip(jnp.split(x, groups, -1), jnp.split(w, groups, -1), strict=True)
    return lax.concatenate([chosen(a, b, window, 1)(a, b, window, 1) for a, b in pieces], x.ndim - 1)


def _product(x: Any, w: Any) -> Any:
    """x (N, spatial..., C) by w (C, O)."""
    rows = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = lax.dot_general(rows, w, (((1,), (0,)), ((), ())), preferred_element_type=_summed(x.dtype))
    return lax.reshape(y, (*x.shape[:-1], w.shape[-1]))


def _summed(dtype: Any) -> Any:
    return np.int32 if dtype == np.int8 else dtype


def _padded(x: Any, window: Window) -> Any:
    if all(p == (0, 0) for p in window.pads):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*p, 0) for p in window.pads), (0, 0, 0)))


def _taps(x: Any, window: Window) -> Iterator[Any]:
    """The part of a padded image that each element of the kernel meets, in row-major order of the kernel."""
    blocks = count_blocks(x.shape[1:-1], window._replace(pads=((0, 0),) * len(window.pads)))
    spans = [(b - 1) * s + 1 for b, s in zip(blocks, window.strides, strict=True)]
    for tap in itertools.product(*map(range, window.kernel)):
        starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        ends = [a + n for a, n in zip(starts, spans, strict=True)]
        yield lax.slice(x, (0, *starts, 0), (x.shape[0], *ends, x.shape[-1]), (1, *window.strides, 1))
