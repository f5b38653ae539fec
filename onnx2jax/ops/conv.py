"""Convolution and its relatives: Conv, ConvTranspose, DeformConv, Col2Im."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import accumulator, check_shape, dims
from .registry import Static, op, taking
from .vision import sample_linear

# What XLA:CPU does well (measured on 2 cores, float32, against lax.conv_general_dilated): 1x1 as a matrix product,
# depthwise as shifted multiply-adds, im2col where the result has few pixels (or, grouped, while the columns stay in
# cache), grouped convolution piece by piece.
# All of it stays channels-first: the products then need no transpose, neither of activations nor of weights.
MAX_TAPS = 64
FEW_PIXELS = 256
CACHED_COLUMNS = 2**22

WINDOW = {"auto_pad": "NOTSET", "dilations": None, "kernel_shape": None, "pads": None, "strides": None}


class Window(NamedTuple):
    """ONNX's window attributes spelt out, one entry an axis; pads are pairs (before, after)."""

    kernel: tuple[Any, ...]
    strides: tuple[int, ...]
    pads: tuple[tuple[Any, Any], ...]
    dilations: tuple[int, ...]

    @property
    def spans(self):
        """How far the window reaches along each axis."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def unpadded(self):
        """The same over an image that is padded already."""
        return self._replace(pads=((0, 0),) * len(self.pads))

    def along(self, *extents):
        """(extent, ..., kernel, stride, pads, dilation) of every axis."""
        return zip(*extents, *self, strict=True)

    def by_axis(self):
        """For each axis the window along it, of one element along the others."""
        for i, chosen in enumerate(self.along()):
            yield Window(*zip(*(chosen if i == j else (1, 1, (0, 0), 1) for j in range(len(self.kernel))), strict=True))


def window_of(extents, kernel, strides=None, pads=None, dilations=None, auto_pad="NOTSET", kernel_shape=None):
    """The window of ``kernel`` elements, which an attribute kernel_shape must repeat, over an image of ``extents``."""
    kernel, rank = tuple(kernel), len(kernel)
    if kernel_shape is not None and tuple(kernel_shape) != kernel:
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} differs from the weights' {kernel}")
    strides, dilations = (tuple(map(int, v)) if v is not None and len(v) else (1,) * rank for v in (strides, dilations))
    pads = tuple(map(int, pads)) if pads is not None and len(pads) else (0,) * (2 * rank)
    if not len(strides) == len(dilations) == len(pads) // 2 == len(extents) == rank:
        raise ValueError(f"kernel_shape {kernel}, {strides=}, {dilations=}, {pads=}: not for {len(extents)} axes")
    if auto_pad not in ("NOTSET", "VALID", "", "SAME_UPPER", "SAME_LOWER"):
        raise ValueError(f"auto_pad ({auto_pad!r}) is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID")
    around = tuple(zip(pads[:rank], pads[rank:], strict=True)) if auto_pad != "VALID" else ((0, 0),) * rank
    window = Window(kernel, strides, around, dilations)
    if not auto_pad.startswith("SAME"):
        return window
    axes = zip(extents, strides, window.spans, strict=True)
    totals = [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in axes]
    return window._replace(pads=split_pads(totals, auto_pad == "SAME_UPPER"))


def split_pads(totals, more_at_end):
    """Padding shared between the two sides; what is odd goes to the end or to the beginning."""
    return tuple((t // 2, t - t // 2) if more_at_end else (t - t // 2, t // 2) for t in totals)


def count_blocks(extents, window):
    """How often a window fits along each axis."""
    rooms = [n + sum(p) - span for n, p, span in zip(extents, window.pads, window.spans, strict=True)]
    if any(isinstance(room, int) and room < 0 for room in rooms):
        raise ValueError(f"a window {window} does not fit into an input of {tuple(extents)}")
    return [room // s + 1 for room, s in zip(rooms, window.strides, strict=True)]


def taps(x, window, fill=0):
    """The part of ``x`` (N, C, spatial...) that each tap of the kernel meets, in row-major order of the taps."""
    spans = [(b - 1) * s + 1 for b, s in zip(count_blocks(x.shape[2:], window), window.strides, strict=True)]
    if any(p != (0, 0) for p in window.pads):
        x = lax.pad(x, jnp.array(fill, x.dtype), ((0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.pads)))
    for tap in itertools.product(*map(range, window.kernel)):
        starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        ends = [a + n for a, n in zip(starts, spans, strict=True)]
        yield lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *window.strides))


def fold(columns, image, window):
    """Add (N, C, kernel..., blocks...) into an image (N, C, image...): the transpose of ``taps``."""
    blocks, zero = columns.shape[2 + len(image) :], jnp.zeros((), columns.dtype)
    result = jnp.zeros((*columns.shape[:2], *image), columns.dtype)
    for tap in itertools.product(*map(range, window.kernel)):
        config = [(0, 0, 0), (0, 0, 0)]
        for t, n, b, _, s, (before, _), d in window.along(tap, image, blocks):
            start = t * d - before
            config.append((start, n - start - (b - 1) * s - 1, s - 1))
        result = result + lax.pad(columns[(slice(None), slice(None), *tap)], zero, config)
    return result


def _by_platform(x, w, cpu, native, *geometry):
    def on_cpu(x, w):  # without half-precision arithmetic: sum in float32, round once
        wide = accumulator(x.dtype)
        return cpu(x.astype(wide), w.astype(wide), *geometry).astype(x.dtype)

    return lax.platform_dependent(x, w, cpu=on_cpu, default=lambda x, w: native(x, w, *geometry))


def conv(x, w, window, groups=1):
    """Cross-correlation of x (N, C, spatial...) with w (O, C / groups, kernel...).

    The result has the dtype of ``x``; integers are accumulated and returned in int32 (int64 from int64).
    """
    if x.ndim != w.ndim or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"weights must be (M, C / group, kernel...), where group ({groups}) divides M")
    if jnp.issubdtype(x.dtype, jnp.integer):
        wide = jnp.int64 if x.dtype.itemsize == 8 else jnp.int32
        return _conv_columns(x.astype(wide), w.astype(wide), window, groups)
    return _by_platform(x, w, _conv_cpu, _conv_native, window, groups)


def _conv_native(x, w, window, groups):
    return lax.conv_general_dilated(
        x, w, window.strides, window.pads, rhs_dilation=window.dilations, feature_group_count=groups
    )


def _conv_cpu(x, w, window, groups):
    count = math.prod(window.kernel)
    if groups > 1 and w.shape[1] == 1 and count <= MAX_TAPS:
        return _conv_depthwise(x, w, window)
    blocks = [n for n in (x.shape[0], *count_blocks(x.shape[2:], window)) if isinstance(n, int)]
    pixels = math.prod(blocks) if len(blocks) == x.ndim - 1 else math.inf
    small = pixels * x.shape[1] * count <= CACHED_COLUMNS if groups > 1 else pixels <= FEW_PIXELS and w.shape[1] > 3
    if count == 1 or (count <= MAX_TAPS and small):
        return _conv_columns(x, w, window, groups)
    if 1 < groups <= MAX_TAPS:
        pieces = zip(jnp.split(x, groups, 1), jnp.split(w, groups, 0), strict=True)
        return lax.concatenate([_conv_native(a, b, window, 1) for a, b in pieces], 1)
    return _conv_native(x, w, window, groups)


def _conv_depthwise(x, w, window):
    """One channel a group: shifted multiply-adds."""
    if w.shape[0] != x.shape[1]:
        x = jnp.repeat(x, w.shape[0] // x.shape[1], axis=1)
    weights = lax.reshape(w, (w.shape[0], math.prod(w.shape[2:])))
    products = (
        lax.mul(part, lax.broadcast_in_dim(lax.index_in_dim(weights, i, 1, keepdims=False), part.shape, (1,)))
        for i, part in enumerate(taps(x, window))
    )
    return functools.reduce(lax.add, products)


def _product(w, columns, contract):
    """Weights (groups, ...) by columns (N, groups, depth, pixels...), group by group: (N, channels, pixels...)."""
    groups, (batch, _, depth, *pixels) = w.shape[0], columns.shape
    columns = lax.reshape(columns, (batch, groups, depth, math.prod(pixels)))
    y = lax.dot_general(w, columns, (((contract,), (2,)), ((0,), (1,))))
    y = lax.reshape(y, (groups * y.shape[1], batch, *pixels))
    return lax.transpose(y, (1, 0, *range(2, y.ndim)))


def _conv_columns(x, w, window, groups):
    """One matrix product over the columns (im2col); with a kernel of one tap these are the image itself."""
    # Axis by axis: XLA compiles a loop for every slice, in 12 ms, and 5x5 taps are 10 slices rather than 25.
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.pads)))
    for alone in window.unpadded.by_axis():
        x = lax.concatenate([lax.expand_dims(part, (2,)) for part in taps(x, alone)], 2)
        x = lax.reshape(x, (x.shape[0], math.prod(x.shape[1:3]), *x.shape[3:]))
    columns = lax.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return _product(lax.reshape(w, (groups, w.shape[0] // groups, columns.shape[2])), columns, 2)


def _add_bias(y, bias):
    return y if bias is None else lax.add(y, lax.broadcast_in_dim(jnp.asarray(bias), y.shape, (1,)))


@op("Conv", product=True, unsharded=True)
@taking(**WINDOW)
def conv_op(X, W, B=None, *, group=1, **attributes):
    window = window_of(X.shape[2:], W.shape[2:], **attributes)
    return _add_bias(conv(jnp.asarray(X), jnp.asarray(W), window, group), B)


@op("ConvTranspose", product=True, unsharded=True)
@taking(**WINDOW)
def conv_transpose(X, W, B=None, *, auto_pad, group=1, output_padding=None, output_shape=None, **attributes):
    extents, rank, same = X.shape[2:], X.ndim - 2, auto_pad in ("SAME_UPPER", "SAME_LOWER")
    window = window_of(extents, W.shape[2:], auto_pad="NOTSET" if same else auto_pad, **attributes)
    rows = list(zip(extents, window.strides, window.spans, output_padding or (0,) * rank, strict=True))
    full = [s * (n - 1) + e + span for n, s, span, e in rows]
    image = tuple(output_shape or ())[-rank:] or tuple(
        n * s if same else f - sum(p) for (n, s, *_), f, p in zip(rows, full, window.pads, strict=True)
    )
    if same or output_shape:
        # odd padding as opset 11 words it: the formula of opset 1 contradicts its own auto_pad
        totals = [max(f - n, 0) for f, n in zip(full, image, strict=True)]
        window = window._replace(pads=split_pads(totals, auto_pad == "SAME_UPPER"))
    y = _by_platform(jnp.asarray(X), jnp.asarray(W), _transpose_cpu, _transpose_native, image, window, group)
    return _add_bias(y, B)


def _transpose_native(x, w, image, window, groups):
    """Convolution of the stretched input with the mirrored kernel."""
    size = w.shape[0] // groups
    w = w.reshape(groups, size, *w.shape[1:]).swapaxes(1, 2).reshape(groups * w.shape[1], size, *window.kernel)
    around = []
    for n, m, span, s, (before, _) in zip(image, x.shape[2:], window.spans, window.strides, window.pads, strict=True):
        start = span - 1 - before
        around.append((start, n + span - 1 - start - (m - 1) * s - 1))
    return lax.conv_general_dilated(
        x, lax.rev(w, tuple(range(2, w.ndim))), (1,) * len(image), around,
        lhs_dilation=window.strides, rhs_dilation=window.dilations, feature_group_count=groups,
    )  # fmt: skip


def _transpose_cpu(x, w, image, window, groups):
    """One matrix product, then the overlapping columns added up."""
    if math.prod(window.kernel) > MAX_TAPS:
        return _transpose_native(x, w, image, window, groups)
    (batch, channels, *extents), out = x.shape, groups * w.shape[1]
    weights = w.reshape(groups, channels // groups, w.shape[1] * math.prod(window.kernel))
    columns = _product(weights, x.reshape(batch, groups, channels // groups, *extents), 1)
    return fold(columns.reshape(batch, out, *window.kernel, *extents), image, window)


@op("Col2Im", heavy=True, limits="no strings, although the schema lists them")
def col2im(input, image_shape: Static, block_shape: Static, *, dilations=None, pads=None, strides=None):
    image, block = dims(image_shape), dims(block_shape)
    window = window_of(image, block, strides, pads, dilations)
    blocks = count_blocks(image, window)
    check_shape("input", input, "N", "C * block", math.prod(blocks))
    channels = input.shape[1] // max(math.prod(block), 1)
    return fold(jnp.asarray(input).reshape(input.shape[0], channels, *block, *blocks), image, window)


@op("DeformConv", since=19, half="float32", heavy=True, unsharded=True)
@taking(**{name: None for name in WINDOW if name != "auto_pad"})
def deform_conv(X, W, offset, B=None, mask=None, *, group=1, offset_group=1, **attributes):
    """Every tap reads the input where its offset points; what it read is weighted as in a convolution."""
    kernel, (batch, channels, *extents), spatial = W.shape[2:], X.shape, offset.shape[2:]
    window = window_of(extents, kernel, **attributes)
    rank, count = len(kernel), math.prod(kernel)
    X, W, offset = (jnp.asarray(v, X.dtype) for v in (X, W, offset))
    shifts = offset.reshape(batch * offset_group, count, rank, *spatial)
    coordinates = []
    for axis, (n, k, s, (before, _), d) in enumerate(window.along(spatial)):
        ticks = np.arange(k)[:, None] * d + np.arange(n) * s - before
        ticks = np.expand_dims(ticks, [i for i in range(2 * rank) if i % rank != axis])
        grid = np.broadcast_to(ticks, (*kernel, *spatial))
        coordinates.append(shifts[:, :, axis] + jnp.asarray(grid.reshape(count, *spatial), X.dtype))
    columns = sample_linear(X.reshape(batch * offset_group, channels // offset_group, *extents), coordinates)
    if mask is not None:
        columns = columns * jnp.asarray(mask, X.dtype).reshape(batch * offset_group, 1, count, *spatial)
    depth = channels // group * count
    y = _product(W.reshape(group, W.shape[0] // group, depth), columns.reshape(batch, group, depth, *spatial), 2)
    return _add_bias(y, B)
