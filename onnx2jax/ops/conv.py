"""Convolution and its relatives: Conv, ConvTranspose, DeformConv, Col2Im."""

from __future__ import annotations

import functools
import itertools
import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import dims
from .norm import wide_dtype
from .registry import Static, op
from .vision import sample_linear

# What XLA:CPU does well (measured on 2 cores, float32, against lax.conv_general_dilated): 1x1 as a matrix product,
# depthwise as shifted multiply-adds, im2col where the result has few pixels (or, grouped, while the columns stay in
# cache), grouped convolution piece by piece.
# All of it stays channels-first: the products then need no transpose, neither of activations nor of weights.
MAX_TAPS = 64
FEW_PIXELS = 256
CACHED_COLUMNS = 2**22


def window(extents, kernel, strides=None, pads=None, dilations=None, auto_pad="NOTSET"):
    """ONNX's window attributes spelt out: (strides, dilations, ((before, after), ...)), one entry an axis."""
    rank = len(kernel)
    strides, dilations = (tuple(map(int, v)) if v is not None and len(v) else (1,) * rank for v in (strides, dilations))
    pads = tuple(map(int, pads)) if pads is not None and len(pads) else (0,) * (2 * rank)
    if not len(strides) == len(dilations) == len(pads) // 2 == len(extents) == rank:
        raise ValueError(
            f"{len(extents)} spatial axes need as many entries of kernel_shape ({rank}), strides {strides} "
            f"and dilations {dilations}, and twice as many pads {pads}"
        )
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            for n, k, s, d in zip(extents, kernel, strides, dilations, strict=True)
        ]
        return strides, dilations, split_pads(totals, auto_pad == "SAME_UPPER")
    if auto_pad not in ("NOTSET", "VALID", ""):
        raise ValueError(f"auto_pad ({auto_pad!r}) is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID")
    if auto_pad == "VALID":
        return strides, dilations, ((0, 0),) * rank
    return strides, dilations, tuple(zip(pads[:rank], pads[rank:], strict=True))


def split_pads(totals, more_at_end):
    """Padding shared between the two sides; what is odd goes to the end or to the beginning."""
    return tuple((t // 2, t - t // 2) if more_at_end else (t - t // 2, t // 2) for t in totals)


def count_blocks(extents, kernel, strides, pads, dilations):
    """How often a window fits along each axis."""
    rooms = [n + sum(p) - (k - 1) * d - 1 for n, k, p, d in zip(extents, kernel, pads, dilations, strict=True)]
    if any(isinstance(room, int) and room < 0 for room in rooms):
        raise ValueError(
            f"a window of {tuple(kernel)} elements, {tuple(dilations)} apart, does not fit into an input of "
            f"{tuple(extents)} with pads {tuple(pads)}"
        )
    return [room // s + 1 for room, s in zip(rooms, strides, strict=True)]


def taps(x, kernel, strides, pads, dilations, fill=0):
    """The part of ``x`` (N, C, spatial...) that each tap of the kernel meets, in row-major order of the taps."""
    spans = [
        (b - 1) * s + 1
        for b, s in zip(count_blocks(x.shape[2:], kernel, strides, pads, dilations), strides, strict=True)
    ]
    if any(p != (0, 0) for p in pads):
        x = lax.pad(x, jnp.array(fill, x.dtype), ((0, 0, 0), (0, 0, 0), *((*p, 0) for p in pads)))
    for tap in itertools.product(*map(range, kernel)):
        starts = [t * d for t, d in zip(tap, dilations, strict=True)]
        ends = [a + n for a, n in zip(starts, spans, strict=True)]
        yield lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *strides))


def fold(columns, image, strides, pads, dilations):
    """Add (N, C, kernel..., blocks...) into an image (N, C, image...): the transpose of ``taps``."""
    rank = len(image)
    kernel, blocks = columns.shape[2 : 2 + rank], columns.shape[2 + rank :]
    result = jnp.zeros((*columns.shape[:2], *image), columns.dtype)
    for tap in itertools.product(*map(range, kernel)):
        config = [(0, 0, 0), (0, 0, 0)]
        for t, n, b, s, (before, _), d in zip(tap, image, blocks, strides, pads, dilations, strict=True):
            start = t * d - before
            config.append((start, n - start - (b - 1) * s - 1, s - 1))
        result = result + lax.pad(columns[(slice(None), slice(None), *tap)], jnp.zeros((), columns.dtype), config)
    return result


def conv(x, w, *, strides, pads, dilations, groups=1):
    """Cross-correlation of x (N, C, spatial...) with w (O, C / groups, kernel...), pads as (before, after) pairs.

    The result has the dtype of ``x``; integers are accumulated and returned in int32 (int64 from int64).
    """
    if x.ndim != w.ndim or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(
            f"input {x.shape} and weights {w.shape} do not fit with group={groups}: weights are "
            f"(M, C / group, kernel...), and group divides M"
        )
    options = {"strides": tuple(strides), "pads": tuple(pads), "dilations": tuple(dilations), "groups": groups}
    if jnp.issubdtype(x.dtype, jnp.integer):
        wide = jnp.int64 if x.dtype.itemsize == 8 else jnp.int32
        return _conv_columns(x.astype(wide), w.astype(wide), **options)
    cpu, default = partial(_conv_cpu, **options), partial(_conv_native, **options)
    return lax.platform_dependent(x, w, cpu=cpu, default=default)


def _conv_native(x, w, *, strides, pads, dilations, groups):
    return lax.conv_general_dilated(x, w, strides, pads, rhs_dilation=dilations, feature_group_count=groups)


def _conv_cpu(x, w, *, groups, **options):
    if x.dtype.itemsize < 4:  # the CPU has no half-precision arithmetic: sum in float32, round once
        return _conv_cpu(x.astype(jnp.float32), w.astype(jnp.float32), groups=groups, **options).astype(x.dtype)
    count = math.prod(w.shape[2:])
    if groups > 1 and w.shape[1] == 1 and count <= MAX_TAPS:
        return _conv_depthwise(x, w, **options)
    blocks = [n for n in (x.shape[0], *count_blocks(x.shape[2:], w.shape[2:], **options)) if isinstance(n, int)]
    pixels = math.prod(blocks) if len(blocks) == x.ndim - 1 else math.inf
    small = pixels * x.shape[1] * count <= CACHED_COLUMNS if groups > 1 else pixels <= FEW_PIXELS and w.shape[1] > 3
    if count == 1 or (count <= MAX_TAPS and small):
        return _conv_columns(x, w, groups=groups, **options)
    if 1 < groups <= MAX_TAPS:
        pieces = zip(jnp.split(x, groups, 1), jnp.split(w, groups, 0), strict=True)
        return lax.concatenate([_conv_native(a, b, groups=1, **options) for a, b in pieces], 1)
    return _conv_native(x, w, groups=groups, **options)


def _conv_depthwise(x, w, *, strides, pads, dilations):
    """One channel a group: shifted multiply-adds."""
    if w.shape[0] != x.shape[1]:
        x = jnp.repeat(x, w.shape[0] // x.shape[1], axis=1)
    weights = lax.reshape(w, (w.shape[0], math.prod(w.shape[2:])))
    products = (
        lax.mul(part, lax.broadcast_in_dim(lax.index_in_dim(weights, i, 1, keepdims=False), part.shape, (1,)))
        for i, part in enumerate(taps(x, w.shape[2:], strides, pads, dilations))
    )
    return functools.reduce(lax.add, products)


def _conv_columns(x, w, *, strides, pads, dilations, groups):
    """One matrix product over the columns (im2col); with a kernel of one tap these are the image itself."""
    parts = [lax.expand_dims(part, (2,)) for part in taps(x, w.shape[2:], strides, pads, dilations)]
    columns = lax.concatenate(parts, 2) if len(parts) > 1 else parts[0]
    batch, _, _, *spatial = columns.shape
    out, depth = w.shape[0] // groups, math.prod(w.shape[1:])
    if groups == 1:
        w, columns = lax.reshape(w, (out, depth)), lax.reshape(columns, (batch, depth, math.prod(spatial)))
        y = lax.dot_general(w, columns, (((1,), (1,)), ((), ())))
    else:
        w = lax.reshape(w, (groups, out, depth))
        columns = lax.reshape(columns, (batch, groups, depth, math.prod(spatial)))
        y = lax.dot_general(w, columns, (((2,), (2,)), ((0,), (1,))))
    y = lax.reshape(y, (groups * out, batch, *spatial))
    return lax.transpose(y, (1, 0, *range(2, y.ndim)))


def _add_bias(y, bias):
    return y if bias is None else lax.add(y, lax.broadcast_in_dim(jnp.asarray(bias), y.shape, (1,)))


def _check_kernel(kernel_shape, w):
    if kernel_shape is not None and tuple(kernel_shape) != tuple(w.shape[2:]):
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} differs from the weights' {tuple(w.shape[2:])}")


@op("Conv", heavy=True)
def conv_op(X, W, B=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None):
    _check_kernel(kernel_shape, W)
    strides, dilations, pads = window(X.shape[2:], W.shape[2:], strides, pads, dilations, auto_pad)
    y = conv(jnp.asarray(X), jnp.asarray(W), strides=strides, pads=pads, dilations=dilations, groups=group)
    return _add_bias(y, B)


@op("ConvTranspose", heavy=True)
def conv_transpose(
    X, W, B=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, output_padding=None,
    output_shape=None, pads=None, strides=None,
):  # fmt: skip
    _check_kernel(kernel_shape, W)
    X, W, extents, kernel = jnp.asarray(X), jnp.asarray(W), X.shape[2:], W.shape[2:]
    same = auto_pad in ("SAME_UPPER", "SAME_LOWER")
    strides, dilations, pads = window(extents, kernel, strides, pads, dilations, "NOTSET" if same else auto_pad)
    extra = tuple(output_padding) if output_padding is not None and len(output_padding) else (0,) * len(kernel)
    full = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, k, s, d, e in zip(extents, kernel, strides, dilations, extra, strict=True)
    ]
    if output_shape is not None and len(output_shape):
        image = tuple(output_shape)[-len(kernel) :]
    elif same:
        image = tuple(n * s for n, s in zip(extents, strides, strict=True))
    else:
        image = tuple(f - sum(p) for f, p in zip(full, pads, strict=True))
    if same or output_shape is not None:
        # odd padding as opset 11 words it: the formula of opset 1 contradicts its own auto_pad
        pads = split_pads([max(f - n, 0) for f, n in zip(full, image, strict=True)], auto_pad == "SAME_UPPER")
    return _add_bias(_conv_transpose(X, W, image, strides, pads, dilations, group), B)


def _conv_transpose(x, w, image, strides, pads, dilations, groups):
    options = {"image": image, "strides": strides, "pads": pads, "dilations": dilations, "groups": groups}
    cpu, default = partial(_transpose_cpu, **options), partial(_transpose_native, **options)
    return lax.platform_dependent(x, w, cpu=cpu, default=default)


def _transpose_native(x, w, *, image, strides, pads, dilations, groups):
    """Convolution of the stretched input with the mirrored kernel."""
    kernel, rank = w.shape[2:], len(image)
    w = w.reshape(groups, -1, *w.shape[1:]).swapaxes(1, 2).reshape(-1, w.shape[0] // groups, *kernel)
    around = []
    for n, m, k, s, (before, _), d in zip(image, x.shape[2:], kernel, strides, pads, dilations, strict=True):
        start = (k - 1) * d - before
        around.append((start, n + (k - 1) * d - start - (m - 1) * s - 1))
    return lax.conv_general_dilated(
        x, lax.rev(w, tuple(range(2, 2 + rank))), (1,) * rank, around,
        lhs_dilation=strides, rhs_dilation=dilations, feature_group_count=groups,
    )  # fmt: skip


def _transpose_cpu(x, w, *, image, strides, pads, dilations, groups):
    """One matrix product, then the overlapping columns added up."""
    if math.prod(w.shape[2:]) > MAX_TAPS:
        return _transpose_native(x, w, image=image, strides=strides, pads=pads, dilations=dilations, groups=groups)
    if x.dtype.itemsize < 4:
        wide = _transpose_cpu(
            x.astype(jnp.float32), w.astype(jnp.float32), image=image, strides=strides, pads=pads,
            dilations=dilations, groups=groups,
        )  # fmt: skip
        return wide.astype(x.dtype)
    batch, channels, *spatial = x.shape
    depth = channels // groups
    columns = lax.dot_general(
        w.reshape(groups, depth, -1), x.reshape(batch, groups, depth, -1), (((1,), (2,)), ((0,), (1,)))
    )
    columns = jnp.moveaxis(columns, 2, 0).reshape(batch, groups * w.shape[1], *w.shape[2:], *spatial)
    return fold(columns, image, strides, pads, dilations)


@op("Col2Im", heavy=True)
def col2im(input, image_shape: Static, block_shape: Static, *, dilations=None, pads=None, strides=None):
    image, block = dims(image_shape), dims(block_shape)
    strides, dilations, pads = window(image, block, strides, pads, dilations)
    blocks = count_blocks(image, block, strides, pads, dilations)
    if input.shape[1] % math.prod(block) or input.shape[2] != math.prod(blocks):
        raise ValueError(
            f"input {input.shape} must be (N, C * {math.prod(block)}, {math.prod(blocks)}): blocks of {block}, "
            f"{tuple(blocks)} of them in an image of {image}"
        )
    columns = jnp.asarray(input).reshape(input.shape[0], -1, *block, *blocks)
    return fold(columns, image, strides, pads, dilations)


@op("DeformConv", since=19, heavy=True)
def deform_conv(
    X, W, offset, B=None, mask=None, *, dilations=None, group=1, kernel_shape=None, offset_group=1, pads=None,
    strides=None,
):  # fmt: skip
    """Every tap reads the input where its offset points; what it read is weighted as in a convolution."""
    _check_kernel(kernel_shape, W)
    X, W, offset = (jnp.asarray(v) for v in (X, W, offset))
    kernel, (batch, channels, *extents), spatial = W.shape[2:], X.shape, offset.shape[2:]
    strides, dilations, pads = window(extents, kernel, strides, pads, dilations)
    rank, count = len(kernel), math.prod(kernel)
    wide = wide_dtype(X)
    shifts = offset.astype(wide).reshape(batch * offset_group, count, rank, *spatial)
    coordinates = []
    for axis in range(rank):
        ticks = np.arange(kernel[axis])[:, None] * dilations[axis] + np.arange(spatial[axis]) * strides[axis]
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = ticks.shape
        grid = np.broadcast_to((ticks - pads[axis][0]).reshape(shape), (*kernel, *spatial))
        coordinates.append(shifts[:, :, axis] + jnp.asarray(grid.reshape(count, *spatial), wide))
    images = X.astype(wide).reshape(batch * offset_group, channels // offset_group, *extents)
    columns = sample_linear(images, coordinates)
    if mask is not None:
        columns = columns * jnp.asarray(mask).astype(wide).reshape(batch * offset_group, 1, count, *spatial)
    columns = columns.reshape(batch, group, -1, *spatial)
    weights = W.astype(wide).reshape(group, W.shape[0] // group, -1)
    y = lax.dot_general(weights, columns, (((2,), (2,)), ((0,), (1,))))
    y = jnp.moveaxis(y, 2, 0).reshape(batch, W.shape[0], *spatial).astype(X.dtype)
    return _add_bias(y, B)
