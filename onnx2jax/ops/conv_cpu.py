"""Convolutions channels-last, each in the form in which XLA:CPU computes it fastest: under any jit, and in the passes.

x is (N, spatial..., C), w is (O, C / groups, kernel...) as ONNX stores it, and the result (N, spatial..., O). Each form
transposes w to the order that it reads. The passes hoist that; under a caller's own jit weights are arguments and it is
part of every call, except that XLA folds the transpose of a matrix into its product.

Milliseconds of one core of an AMD EPYC (Zen 4), jax 0.10.2, float32, 3x3 kernels; weights transposed beforehand, and in
the call:

    pixels, channels           native          columns
    7x7, 512 to 512            5.3 / 8.4       4.2 / 4.5
    4 of 7x7, 512 to 512      14.3 / 17.0     12.1 / 13.2
    10x10, 256 to 256          1.76 / 2.27     1.85 / 1.84
    14x14, 512 to 512         13.3 / 15.8     12.5 / 12.8
    14x14, 256 to 256          3.4 / 4.1       3.5 / 3.6
    14x14, 64 to 64            0.22 / 0.23     0.27 / 0.28
    16x16, 256 to 256          4.2 / 4.7       4.4 / 4.5
    20x20, 128 to 128          1.34 / 1.40     1.69 / 1.70
    28x28, 64 to 1024         11.1 / 11.8     11.1 / 11.0

So columns win while the result has no more pixels than channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..limits import CONV_SHORT_ROWS, UNROLLED_TAPS
from .arrays import accumulator
from .conv_rules import Problem, lowering
from .traced import finite_or
from .window import Window, count_blocks, padded, taps

SIZE: Final = 4
"""Results along a side of a tile. Tiles of 2 gain little: 28x28 pixels of 128 channels take 2.6 ms plain, 1.9 by tiles
of 2, and 1.5 by tiles of 4."""
POINTS: Final = (0.0, 0.75, -0.75, 1.5, -1.5)
"""Where the polynomials are evaluated, beside infinity. The largest error over the largest value, against float64, is
2e-6 for 128 channels; with 0, 1, -1, 2, -2 it is 8e-6, and 5e-7 for a plain convolution."""


def winograd(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """The convolution of x (N, H, W, C) with w (O, C, 3, 3), of strides and dilations 1."""
    w = lax.transpose(w, (2, 3, 1, 0))
    after, filtering, before = matrices(POINTS)
    batch, size, side = x.shape[0], SIZE, SIZE + 2
    height, width = count_blocks(x.shape[1:3], window)
    down, across = -(-height // size), -(-width // size)
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *_whole_tiles(x, window, (down, across)), (0, 0, 0)])
    # Tiles of `size` rows; a tile's last two are the first of the next one
    rows = lax.reshape(x, (batch, down + 1, size, (across + 1) * size, x.shape[-1]))
    parts = [rows[:, :down, i] for i in range(size)] + [rows[:, 1:, i] for i in range(2)]
    columns = lax.reshape(_times(before, parts), (side, batch * down, across + 1, size, x.shape[-1]))
    parts = [columns[:, :, :across, i] for i in range(size)] + [columns[:, :, 1:, i] for i in range(2)]
    tiles = batch * down * across
    transformed = lax.reshape(_times(before, parts), (side * side, tiles, x.shape[-1]))
    kernels = _times(filtering, [_times(filtering, [w[i, j] for i in range(3)]) for j in range(3)])
    kernels = lax.reshape(kernels, (side * side, *w.shape[2:]))
    products = lax.dot_general(transformed, kernels, (((2,), (1,)), ((0,), (0,))))
    products = lax.reshape(products, (side, side, tiles, w.shape[-1]))
    y = _times(after, [products[i] for i in range(side)])
    y = _times(after, [y[:, i] for i in range(side)])
    y = lax.reshape(y, (size, size, batch, down, across, w.shape[-1]))
    y = lax.reshape(lax.transpose(y, (2, 3, 0, 4, 1, 5)), (batch, down * size, across * size, w.shape[-1]))
    return y[:, :height, :width]


def _whole_tiles(x: Any, window: Window, tiles: Sequence[int]) -> list[tuple[int, int, int]]:
    """The padding of height and width, up to one tile more than there are."""
    extents = zip(x.shape[1:3], window.pads, tiles, strict=True)
    return [(before, (count + 1) * SIZE - n - before, 0) for n, (before, _), count in extents]


def _times(matrix: np.ndarray, parts: Sequence[Any]) -> Any:
    """A matrix by a vector of arrays, as one array with a new first axis."""
    rows = []
    for factors in matrix:
        terms = [part if f == 1 else part * part.dtype.type(f) for f, part in zip(factors, parts, strict=True) if f]
        rows.append(functools.reduce(jnp.add, terms))
    return jnp.stack(rows)


@functools.cache
def matrices(points: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A.T (n - 1, n + 1), G (n + 1, 3) and B.T (n + 1, n + 1) for n points and infinity.

    Row i of G evaluates the kernel at point i, over the product of that point's distances from the others; a row of B.T
    is the polynomial whose zeros are the other points. The last rows stand for infinity.
    """
    size = len(points) - 1
    others = [[q for q in points if q != p] for p in points]
    distances = [math.prod(p - q for q in rest) for p, rest in zip(points, others, strict=True)]
    filtering = [[p**j / d for j in range(3)] for p, d in zip(points, distances, strict=True)]
    before = [[*np.poly(rest)[::-1], 0.0] for rest in others]
    after = [[*(p**i for p in points), float(i == size - 1)] for i in range(size)]
    return np.array(after), np.array([*filtering, [0.0, 0.0, 1.0]]), np.array([*before, np.poly(points)[::-1]])


Form = Callable[[Any, Any, Window, int], Any]


def convolve(x: Any, w: Any, window: Window, groups: int = 1, stretch: tuple[int, ...] = ()) -> Any:
    """The convolution, in the form that measured as the fastest for its shapes.

    Half precision is summed in float32, int8 in int32.

    Args:
        x, w, window, groups: as above.
        stretch: the dilation of the image along each axis, zeros between its pixels.
    """
    wide = accumulator(x.dtype)
    x, w = x.astype(wide), w.astype(wide)
    if any(d > 1 for d in stretch):
        return transposed(x, w, window, groups, stretch)
    return chosen(x, w, window, groups)(x, w, window, groups)


def chosen(x: Any, w: Any, window: Window, groups: int) -> Form:
    """The fastest form for the shapes of an image and of weights."""
    return FORMS[lowering(Problem(x.dtype, x.shape[:-1], w.shape, window, groups), "cpu")]


def tiled(x: Any, w: Any, window: Window, groups: int) -> Any:
    """By Winograd's tiles."""
    return _or_native(winograd(x, w, window, groups), x, w, window, groups)


def _or_native(y: Any, x: Any, w: Any, window: Window, groups: int) -> Any:
    """y, or ``native`` where it is not finite: the form multiplied by zero what a window does not hold."""
    return finite_or(y, functools.partial(native, window=window, groups=groups), x, w)


def native(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...] = ()) -> Any:
    """By lax.conv_general_dilated. What has one spatial axis gets a second: only then XLA has a fast kernel for it.

    XLA decides how it computes one of int8 before it takes the padding around the image into it, and writes nothing, or
    fails, where the kernel that it has chosen does not support so much padding: a barrier keeps the padding apart.
    """
    if x.ndim == 3:
        flat = Window((1, *window.kernel), (1, *window.strides), ((0, 0), *window.pads), (1, *window.dilations))
        y = native(lax.expand_dims(x, (1,)), lax.expand_dims(w, (2,)), flat, groups, stretch and (1, *stretch))
        return lax.squeeze(y, (1,))
    x = lax.optimization_barrier(x) if x.dtype == np.int8 else x
    return lax.conv_general_dilated(
        x, kernel_first(w), window.strides, window.pads, stretch or None, window.dilations, feature_group_count=groups,
        dimension_numbers=channels_last(x.ndim), preferred_element_type=_summed(x.dtype),
    )  # fmt: skip


def pointwise(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """A kernel of one element: a product of the pixels and the weights."""
    if _has_short_rows(x, window):
        return _pixels_last(x, w, window, 1)
    x = padded(x, window, axis=1)
    x = lax.slice(x, (0,) * x.ndim, x.shape, (1, *window.strides, 1))
    return product(x, lax.reshape(w, w.shape[:2]))


def columns(x: Any, w: Any, window: Window, groups: int) -> Any:
    """One product of the weights and, for each pixel of the result, all that its window holds (im2col).

    Axis by axis: XLA compiles a loop for every slice, in 12 ms, and 5x5 taps are 10 slices rather than 25.
    """
    if groups > 1 or _has_short_rows(x, window):
        return _pixels_last(x, w, window, groups)
    for alone in window.by_axis():
        x = lax.concatenate([lax.expand_dims(part, (x.ndim,)) for part in taps(x, alone, axis=1)], x.ndim)
    image, depth = x.shape[: 1 + len(window.kernel)], math.prod(w.shape[1:])
    return product(lax.reshape(x, (*image, depth)), lax.reshape(w, (w.shape[0], depth)))


def _has_short_rows(x: Any, window: Window) -> bool:
    pixels = math.prod((x.shape[0], *count_blocks(x.shape[1:-1], window)))
    return x.dtype != np.int8 and isinstance(pixels, int) and pixels <= CONV_SHORT_ROWS


def _pixels_last(x: Any, w: Any, window: Window, groups: int) -> Any:
    """``columns`` that are (N, groups, C / groups and taps, pixels)."""
    x = lax.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))
    for alone in window.by_axis():
        x = lax.concatenate([lax.expand_dims(part, (2,)) for part in taps(x, alone)], 2)
        x = lax.reshape(x, (x.shape[0], math.prod(x.shape[1:3]), *x.shape[3:]))
    (batch, _, *image), (outputs, depth) = x.shape, (w.shape[0], math.prod(w.shape[1:]))
    x = lax.reshape(x, (batch, groups, depth, math.prod(image)))
    w = lax.reshape(w, (groups, outputs // groups, depth))
    y = lax.dot_general(w, x, (((2,), (2,)), ((0,), (1,))), preferred_element_type=_summed(x.dtype))
    y = lax.reshape(y, (outputs, batch, *image))
    return lax.transpose(y, (*range(1, y.ndim), 0))


def packed(x: Any, w: Any, window: Window, groups: int) -> Any:
    """``in_packs`` of as many pixels as give XLA enough channels."""
    return in_packs(x, w, window, groups, Problem(x.dtype, x.shape[:-1], w.shape, window).pack, native)


def in_packs(x: Any, w: Any, window: Window, groups: int, size: int, form: Form) -> Any:
    """Neighbours along the last axis as channels, in the image and in the result.

    A window over n neighbours reaches over at most one pack more than it takes; what it does not meet has weight zero.

    Args:
        x, w, window, groups: as above; one group.
        size: of a pack, in pixels; 1, or a multiple of the stride.
        form: the convolution of the packs.
    """
    if size == 1:
        return form(x, w, window, groups)
    operands, stride, w = (x, w), window.strides[-1], kernel_first(w)
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
    y = form(x, lax.transpose(wide, (wide.ndim - 1, wide.ndim - 2, *range(wide.ndim - 2))), plain, groups)
    y = lax.reshape(y, (*y.shape[:-2], packs * made, w.shape[-1]))
    y = lax.slice(y, (0,) * y.ndim, (*y.shape[:-2], extent, y.shape[-1]))
    return y if x.dtype == np.int8 else _or_native(y, *operands, window, groups)


def _along_last(x: Any, behind: int, before: int, after: int) -> Any:
    """x with zeros around its last spatial axis, which ``behind`` other axes follow."""
    pads = [(0, 0, 0)] * x.ndim
    pads[-1 - behind] = (before, after, 0)
    return lax.pad(x, np.zeros((), x.dtype), pads)


def depthwise(x: Any, w: Any, window: Window, groups: int) -> Any:
    """One channel a group: shifted multiply-adds.

    One column more than needed is padded and summed: no part is then just the unpadded image, which XLA would compute
    a second time for it, activation and all (MobileNetV2 takes 3 to 8 % longer).
    """
    x, w = (v.astype(_summed(v.dtype)) for v in (x, w))
    if w.shape[0] != groups:
        x = jnp.repeat(x, w.shape[0] // groups, axis=-1)
    blocks = count_blocks(x.shape[1:-1], window)
    if any(map(any, window.pads)):
        before, after = window.pads[-1]
        window = window._replace(pads=(*window.pads[:-1], (before, after + window.strides[-1])))
    y = multiply_adds(x, w, window, axis=1)
    return lax.slice(y, (0,) * y.ndim, (y.shape[0], *blocks, y.shape[-1]))


def multiply_adds(x: Any, w: Any, window: Window, axis: int) -> Any:
    """Each channel of x by its kernel in w (C, 1, kernel...), tap by tap; spatial axes start at ``axis``."""
    weights = lax.reshape(kernel_first(w), (math.prod(window.kernel), w.shape[0]))  # each tap's are adjacent
    channels = (1 if axis == 2 else x.ndim - 1,)
    products = (
        lax.mul(part, lax.broadcast_in_dim(lax.index_in_dim(weights, i, 0, keepdims=False), part.shape, channels))
        for i, part in enumerate(taps(x, window, axis=axis))
    )
    return functools.reduce(lax.add, products)


def piecewise(x: Any, w: Any, window: Window, groups: int) -> Any:
    """Group by group."""
    pieces = zip(jnp.split(x, groups, -1), jnp.split(w, groups), strict=True)
    return lax.concatenate([chosen(a, b, window, 1)(a, b, window, 1) for a, b in pieces], x.ndim - 1)


def transposed(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...]) -> Any:
    """The convolution of stretched x by residues: those taps alone that meet pixels, so no zero is multiplied.

    The results at ``stretch * q + r`` of one ``r`` are a plain convolution of x by some of the taps.
    """
    rows = zip(x.shape[1:-1], stretch, window.pads, window.spans, strict=True)
    extents = [(n - 1) * s + 2 + sum(pads) - span for n, s, pads, span in rows]
    few = max(window.strides) == 1 and math.prod(stretch) <= UNROLLED_TAPS
    if not few or 0 in x.shape or not all(isinstance(n, int) for n in extents):
        return native(x, w, window, groups, stretch)
    counts = [-(-n // s) for n, s in zip(extents, stretch, strict=True)]

    def along(axis: int, r: int) -> tuple[slice, tuple[int, int], int]:
        """The taps that results at ``r`` read along an axis, their padding, and how far apart they read."""
        s, d, k, (before, _) = stretch[axis], window.dilations[axis], window.kernel[axis], window.pads[axis]
        step = s // math.gcd(s, d)
        first = next((t for t in range(min(step, k)) if (r + t * d - before) % s == 0), k)
        start, reach, apart = (r + first * d - before) // s, len(range(first, k, step)) - 1, d * step // s
        end = start + reach * apart + counts[axis]
        return slice(first, None, step), (-start, end - x.shape[axis + 1]), apart

    def residue(at: tuple[int, ...]) -> Any:
        some, pads, dilations = zip(*map(along, range(len(at)), at), strict=True)
        part = w[(slice(None), slice(None), *some)]
        if 0 in part.shape[2:]:
            return jnp.zeros((x.shape[0], *counts, w.shape[0]), x.dtype)
        plain = Window(part.shape[2:], (1,) * len(at), pads, dilations)
        return chosen(x, part, plain, groups)(x, part, plain, groups)

    def woven(at: tuple[int, ...]) -> Any:
        """All results of these residues along the first axes."""
        if len(at) == len(stretch):
            return residue(at)
        axis = len(at) + 1
        y = jnp.stack([woven((*at, r)) for r in range(stretch[len(at)])], axis + 1)
        return lax.reshape(y, (*y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :]))

    return lax.slice(woven(()), (0,) * x.ndim, (x.shape[0], *extents, w.shape[0]))


def product(x: Any, w: Any) -> Any:
    """x (N, spatial..., C) by w (O, C)."""
    rows = lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    contracted = (((1,), (0,)), ((), ()))
    y = lax.dot_general(rows, lax.transpose(w, (1, 0)), contracted, preferred_element_type=_summed(x.dtype))
    return lax.reshape(y, (*x.shape[:-1], w.shape[0]))


def channels_last(rank: int) -> tuple[str, str, str]:
    """The dimension numbers of images (N, spatial..., C) and of weights that are ``kernel_first``."""
    spatial = "".join(map(str, range(rank - 2)))
    return f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"


def kernel_first(w: Any) -> Any:
    """Weights as (kernel..., C, O)."""
    return lax.transpose(w, (*range(2, w.ndim), 1, 0))


def _summed(dtype: Any) -> Any:
    return np.int32 if dtype == np.int8 else dtype


FORMS: Final = {f.__name__: f for f in (columns, depthwise, native, packed, piecewise, pointwise, tiled)}
"""By the names of conv_rules.py."""
