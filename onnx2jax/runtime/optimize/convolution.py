"""Convolutions of images that lie channels last, as XLA:CPU computes them fastest.

Throughout x is (N, spatial..., C), w is (kernel..., C / groups, O), and the result (N, spatial..., O).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...ops.arrays import accumulator
from ...ops.conv import MAX_TAPS, Window, count_blocks
from ...ops.quant import FEW_CHANNELS
from .vnni import convolution as by_onednn
from .winograd import is_served, winograd

FEW_PIXELS: Final = 64
"""Results up to this many pixels are computed from columns: 512 channels of 7x7 pixels in 3.5 ms rather than 5.5."""
FEW_PIXELS_OF_8_BITS: Final = 512
"""The same for int8: 14x14 pixels of 256 channels in 0.8 ms of processor time rather than 1.5, 7x7 of 512 for 8 images
in 5.3 rather than 7.0."""
FEW_COLUMNS: Final = 32
"""Windows that hold up to this many numbers too: a 3x3 kernel over 3 channels in 0.75 ms rather than 1.8, 7x7 in 5.8
rather than 2.8."""
FEW_COLUMNS_OF_8_BITS: Final = 256
"""The same for int8: XLA takes an image that it has to transpose first, such as an input, by a slow kernel: 7x7 over 3
channels in 79 ms."""
MANY_NARROW_PRODUCTS: Final = 1_000_000
"""Narrow images are packed from this many products: 208x208 pixels, 16 channels to 16, in 3.0 ms rather than 3.9;
720x720, 16 to 3 by 9x9, in 64 rather than 226."""
ENOUGH_CHANNELS_OF_8_BITS: Final = 8
"""Images of int8 are packed to so many: 7x7 by 2 over 3 channels with jax 0.12 in 1.5 ms rather than 3.0 by columns,
5x5 over 3 in 0.46 rather than 1.17, 3x3 over 3 for 64 in 2.5 rather than 3.1; with jax 0.10 in as long."""
LONG_SIDE, MANY_CHANNELS, MANY_PRODUCTS = 24, 64, 100_000_000
"""3x3 kernels go by Winograd's way, which takes longer to compile, over images from this side, this many channels and
products: 56x56 pixels of 64 channels in 1.7 ms rather than 2.6; 14x14 of 256 in 4.6 rather than 4.0."""


class Narrow(NamedTuple):
    """Convolutions that oneDNN serves: of so many channels at most, and so many pixels at least."""

    inputs: int
    pixels: int


OF_ONE_ELEMENT, OF_MORE = Narrow(32, 8192), Narrow(48, 1024)
"""By the size of the kernel: 3x3 over 224x224 pixels of 3 channels in 0.21 ms rather than 0.42, 16 channels of 208x208
in 1.3 rather than 2.8, 7x7 over 3 in 1.4 rather than 2.7, 1x1 from 16 channels of 160x160 in 0.15 rather than 0.24. Of
int8 those that would go by columns: 7x7 over 3 for 8 images in 9.6 ms rather than 20.9, 3x3 over 16 channels of 112x112
in 0.32 rather than 1.09."""
FEW_OUTPUTS: Final = 16
"""Results of fewer channels it takes twice as long for: one from 32 in 6.6 ms rather than 3.2."""

Lowering = Callable[[Any, Any, Window, int], Any]


def convolve(
    x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...] = (), *, onednn: bool = False
) -> Any:
    """The convolution, in the way that measured as the fastest for its shape.

    Half precision is summed in float32, int8 in int32.

    Args:
        x, w, window, groups: as above.
        stretch: how far pixels are drawn apart before, zeros between them, along each axis.
        onednn: whether oneDNN may serve.
    """
    wide = accumulator(x.dtype)
    x, w = x.astype(wide), w.astype(wide)
    if any(d > 1 for d in stretch):
        return transposed(x, w, window, stretch)
    if onednn and groups == 1 and _is_narrow(x, w, window):
        return by_onednn(x, w, window.strides, window.pads)
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
    if pixels * w.size >= MANY_NARROW_PRODUCTS and _pack(x, w, window) > 1:
        return packed
    few, held = (FEW_PIXELS, FEW_COLUMNS) if x.dtype == np.float32 else (FEW_PIXELS_OF_8_BITS, FEW_COLUMNS_OF_8_BITS)
    if count <= MAX_TAPS and (pixels <= few or count * channels <= held):
        return columns
    large = min(blocks) >= LONG_SIDE and min(w.shape[-2:]) >= MANY_CHANNELS
    return winograd if large and pixels * w.size >= MANY_PRODUCTS and is_served(x, window) else native


def _is_narrow(x: Any, w: Any, window: Window) -> bool:
    """Whether oneDNN is the faster one for an image of few channels."""
    if x.dtype not in (np.float32, np.int8) or x.ndim != 4 or set(window.dilations) != {1}:
        return False
    count, pixels = math.prod(window.kernel), x.shape[0] * math.prod(count_blocks(x.shape[1:-1], window))
    most, least = OF_ONE_ELEMENT if count == 1 else OF_MORE
    if x.dtype == np.int8:
        return 1 < count <= FEW_COLUMNS_OF_8_BITS // w.shape[-2] and pixels >= least
    return w.shape[-2] <= most and pixels >= least and w.shape[-1] >= FEW_OUTPUTS


def native(x: Any, w: Any, window: Window, groups: int) -> Any:
    """By lax.conv_general_dilated. What has one spatial axis gets a second: only then XLA has a fast kernel for it.

    XLA decides how it computes one of int8 before it takes the padding around the image into it, and writes nothing, or
    fails, where the kernel that it has chosen does not serve so much padding: a barrier keeps that outside.
    """
    if x.ndim == 3:
        flat = Window((1, *window.kernel), (1, *window.strides), ((0, 0), *window.pads), (1, *window.dilations))
        return lax.squeeze(native(lax.expand_dims(x, (1,)), lax.expand_dims(w, (0,)), flat, groups), (1,))
    spatial = "".join(map(str, range(x.ndim - 2)))
    x = lax.optimization_barrier(x) if x.dtype == np.int8 else x
    return lax.conv_general_dilated(
        x, w, window.strides, window.pads, rhs_dilation=window.dilations, feature_group_count=groups,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"), preferred_element_type=_summed(x.dtype),
    )  # fmt: skip


def pointwise(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """A kernel of one element: a product of the pixels and the weights."""
    x = padded(x, window)
    x = lax.slice(x, (0,) * x.ndim, x.shape, (1, *window.strides, 1))
    return product(x, lax.reshape(w, w.shape[-2:]))


def columns(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """One product of the weights and, for each pixel of the result, all that its window holds (im2col).

    Axis by axis: XLA compiles a loop for every slice, in 12 ms, and 5x5 taps are 10 slices rather than 25.
    """
    for alone in reversed([*window.by_axis()]):
        x = lax.concatenate([*taps(padded(x, alone), alone)], x.ndim - 1)
    return product(x, lax.reshape(w, (math.prod(w.shape[:-1]), w.shape[-1])))


def _pack(x: Any, w: Any, window: Window) -> int:
    """How many neighbours along the last axis become one, so that there are channels enough; 1 where there are."""
    (inputs, outputs), stride = w.shape[-2:], window.strides[-1]
    if window.dilations[-1] > 1 or window.kernel[-1] == 1:
        return 1
    if x.dtype == np.int8:
        sizes = (stride << i for i in range(8))
        enough = (n for n in sizes if n * inputs >= ENOUGH_CHANNELS_OF_8_BITS and n // stride * outputs > FEW_CHANNELS)
        return next(enough) if inputs < FEW_CHANNELS else 1
    if x.dtype != np.float32 or stride > 1 or max(inputs, outputs) > FEW_CHANNELS:
        return 1
    return next(n for n in (2, 4, 8, 16, 32) if n * max(inputs, outputs) > FEW_CHANNELS)


def packed(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """Neighbours along the last axis as channels, in the image and in the result: so there are enough of them.

    A window over n neighbours reaches over at most one pack more than it takes; what it does not meet has weight zero.
    """
    size, stride = _pack(x, w, window), window.strides[-1]
    kernel, (before, after) = window.kernel[-1], window.pads[-1]
    extent = (x.shape[-2] + before + after - kernel) // stride + 1
    made = size // stride  # results of a pack
    packs, reach = -(-extent // made), -(-(kernel + size - stride) // size)
    x = _along_last(x, 1, before, (packs + reach - 1) * size - x.shape[-2] - before)
    x = lax.reshape(x, (*x.shape[:-2], packs + reach - 1, size * x.shape[-1]))
    shifted = [_along_last(w, 2, at, reach * size - kernel - at) for at in range(0, size, stride)]
    shifted = [lax.reshape(v, (*v.shape[:-3], reach, size * v.shape[-2], v.shape[-1])) for v in shifted]
    wide = lax.reshape(jnp.stack(shifted, -2), (*shifted[0].shape[:-1], made * w.shape[-1]))
    plain = Window(wide.shape[:-2], (*window.strides[:-1], 1), (*window.pads[:-1], (0, 0)), window.dilations)
    y = native(x, wide, plain, 1)
    y = lax.reshape(y, (*y.shape[:-2], packs * made, w.shape[-1]))
    return lax.slice(y, (0,) * y.ndim, (*y.shape[:-2], extent, y.shape[-1]))


def _along_last(x: Any, behind: int, before: int, after: int) -> Any:
    """x with zeros around its last spatial axis, behind which so many others come."""
    pads = [(0, 0, 0)] * x.ndim
    pads[-1 - behind] = (before, after, 0)
    return lax.pad(x, np.zeros((), x.dtype), pads)


def depthwise(x: Any, w: Any, window: Window, groups: int) -> Any:
    """One channel a group: shifted multiply-adds.

    One column more than needed is padded and summed: no part is then just the unpadded image, which XLA would compute
    a second time for it, activation and all (MobileNetV2 takes 3 to 8 % longer).
    """
    if w.shape[-1] != groups:
        x = jnp.repeat(x, w.shape[-1] // groups, axis=-1)
    blocks = count_blocks(x.shape[1:-1], window)
    if any(map(any, window.pads)):
        before, after = window.pads[-1]
        window = window._replace(pads=(*window.pads[:-1], (before, after + window.strides[-1])))
    weights = lax.reshape(w, (math.prod(window.kernel), w.shape[-1]))
    products = (
        part * lax.broadcast_in_dim(lax.index_in_dim(weights, i, 0, keepdims=False), part.shape, (part.ndim - 1,))
        for i, part in enumerate(taps(padded(x, window), window))
    )
    y = functools.reduce(lax.add, products)
    return lax.slice(y, (0,) * y.ndim, (y.shape[0], *blocks, y.shape[-1]))


def piecewise(x: Any, w: Any, window: Window, groups: int) -> Any:
    """Group by group."""
    pieces = zip(jnp.split(x, groups, -1), jnp.split(w, groups, -1), strict=True)
    return lax.concatenate([chosen(a, b, window, 1)(a, b, window, 1) for a, b in pieces], x.ndim - 1)


def transposed(x: Any, w: Any, window: Window, stretch: tuple[int, ...]) -> Any:
    """The convolution of stretched x, of strides and dilations 1: each residue of its pixels meets taps of its own.

    So no zero is multiplied: a result at ``stretch * q + r`` sums over every ``stretch``-th tap, and those of one ``r``
    are a plain convolution.
    """
    rows = list(zip(x.shape[1:-1], window.kernel, window.pads, stretch, strict=True))
    extents = [(n - 1) * d + 2 + sum(pads) - k for n, k, pads, d in rows]

    def residue(at: tuple[int, ...]) -> Any:
        first = [(before - r) % d for (*_, (before, _), d), r in zip(rows, at, strict=True)]
        part = w[tuple(slice(t, None, d) for t, d in zip(first, stretch, strict=True))]
        counts = [-(-m // d) for m, d in zip(extents, stretch, strict=True)]
        if 0 in part.shape:
            return jnp.zeros((x.shape[0], *counts, w.shape[-1]), x.dtype)
        starts = [(r + t - before) // d for (*_, (before, _), d), r, t in zip(rows, at, first, strict=True)]
        pads = tuple(
            (-start, start + count + k - 1 - n)
            for start, count, k, n in zip(starts, counts, part.shape, x.shape[1:], strict=False)
        )
        plain = Window(part.shape[:-2], (1,) * len(at), pads, (1,) * len(at))
        return chosen(x, part, plain, 1)(x, part, plain, 1)

    def woven(at: tuple[int, ...]) -> Any:
        """All results of these residues along the first axes."""
        if len(at) == len(stretch):
            return residue(at)
        axis = len(at) + 1
        y = jnp.stack([woven((*at, r)) for r in range(stretch[len(at)])], axis + 1)
        return lax.reshape(y, (*y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :]))

    return lax.slice(woven(()), (0,) * x.ndim, (x.shape[0], *extents, w.shape[-1]))


def product(x: Any, w: Any) -> Any:
    """x (N, spatial..., C) by w (C, O)."""
    rows = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    y = lax.dot_general(rows, w, (((1,), (0,)), ((), ())), preferred_element_type=_summed(x.dtype))
    return lax.reshape(y, (*x.shape[:-1], w.shape[-1]))


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


def _summed(dtype: Any) -> Any:
    return np.int32 if dtype == np.int8 else dtype


def padded(x: Any, window: Window) -> Any:
    """The image with its padding around."""
    if all(p == (0, 0) for p in window.pads):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*p, 0) for p in window.pads), (0, 0, 0)))


def taps(x: Any, window: Window) -> Iterator[Any]:
    """The part of a padded image that each element of the kernel meets, in row-major order of the kernel."""
    blocks = count_blocks(x.shape[1:-1], window.unpadded)
    spans = [(b - 1) * s + 1 for b, s in zip(blocks, window.strides, strict=True)]
    for tap in itertools.product(*map(range, window.kernel)):
        starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        ends = [a + n for a, n in zip(starts, spans, strict=True)]
        yield lax.slice(x, (0, *starts, 0), (x.shape[0], *ends, x.shape[-1]), (1, *window.strides, 1))
