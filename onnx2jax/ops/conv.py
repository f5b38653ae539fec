"""Convolution and its relatives: Conv, ConvTranspose, DeformConv, Col2Im."""

from __future__ import annotations

import itertools
import math
from functools import partial, reduce
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from .arrays import accumulator, check_shape, dims, is_known, xp
from .conv_cpu import channels_last, convolve, kernel_first, multiply_adds
from .conv_rules import Problem, lowering
from .registry import Static, op, taking
from .traced import finite_or, unfolded
from .vision import sample_linear
from .window import WINDOW, Window, count_blocks, padded, split_pads, taps, window_of

CACHED: Final = 2**20
"""Elements of the columns, or of the results of a depthwise convolution, that are computed at once."""
EXACT: Final = 2**53
"""float64, for which NumPy has fast products, holds integers up to this."""


def convolve_numpy(
    x: np.ndarray, w: np.ndarray, window: Window, groups: int, stretch: tuple[int, ...] = ()
) -> np.ndarray:
    """The convolution as products of the weights with columns, rows of the image after rows.

    Half precision is summed in float32 and rounded once; integers are summed exactly.

    Args:
        x: (N, C, spatial...).
        w: (O, C / groups, kernel...).
        window: its kernel, strides, padding and dilations.
        groups: the number of groups of channels.
        stretch: the dilation of the image along each axis, zeros between its pixels; then strides are 1.
    """
    dtype, wide = x.dtype, accumulator(x.dtype)
    if dtype.kind in "iu":
        largest = _magnitude(x) * _magnitude(w) * math.prod(w.shape[1:])
        wide = np.dtype(np.float64) if largest <= EXACT else dtype
    form = partial(_transposed, stretch=stretch) if any(d > 1 for d in stretch) else _convolved
    y = form(x.astype(wide, copy=False), w.astype(wide, copy=False), window, groups)
    if dtype.kind in "iu" and wide != dtype:
        y = y.astype(np.int64)  # from which int32 wraps around, as sums of int32 do
    return y.astype(dtype, copy=False)


def _magnitude(x: np.ndarray) -> int:
    return max(int(x.max()), -int(x.min())) if x.size else 0


def _convolved(x: np.ndarray, w: np.ndarray, window: Window, groups: int) -> np.ndarray:
    x, window = padded(x, window), window.unpadded
    (outputs, depth), blocks = w.shape[:2], count_blocks(x.shape[2:], window)
    filters = w.reshape(groups, outputs // groups, math.prod(w.shape[1:]))
    product = _by_taps if depth == 1 and groups > 1 else _by_columns
    y = np.empty((x.shape[0], outputs, *blocks), x.dtype)
    step = max(CACHED // max(x.shape[0] * x.shape[1] * math.prod((*window.kernel, *blocks[1:])), 1), 1)
    for first in range(0, blocks[0], step):
        rows = slice(first, min(first + step, blocks[0]))
        start, end = rows.start * window.strides[0], (rows.stop - 1) * window.strides[0] + window.spans[0]
        y[:, :, rows] = product(x[:, :, start:end], filters, window).reshape(y[:, :, rows].shape)
    return y


def _transposed(x: np.ndarray, w: np.ndarray, window: Window, groups: int, stretch: tuple[int, ...]) -> np.ndarray:
    """The products of pixels with every tap, added where they belong: zeros between pixels are not multiplied."""
    (outputs, depth), rows = w.shape[:2], zip(x.shape[2:], stretch, strict=True)
    image = [(n - 1) * d + 1 if n else 0 for n, d in rows]
    filters = w.reshape(groups, outputs // groups, depth, math.prod(window.kernel))
    pixels = x.reshape(x.shape[0], groups, depth, math.prod(x.shape[2:]))
    y = np.zeros((x.shape[0], outputs, *count_blocks(image, window)), x.dtype)
    for i, tap in enumerate(itertools.product(*map(range, window.kernel))):
        axes = zip(tap, window.dilations, window.pads, x.shape[2:], stretch, y.shape[2:], strict=True)
        met: list[Any] = [_met(before - t * d, n, apart, count) for t, d, (before, _), n, apart, count in axes]
        products = (filters[..., i] @ pixels).reshape(*y.shape[:2], *x.shape[2:])
        to: Any = (Ellipsis, *(s for _, s in met))
        of: Any = (Ellipsis, *(s for s, _ in met))
        y[to] += products[of]
    return y


def _met(start: int, pixels: int, apart: int, count: int) -> tuple[slice, slice]:
    """Of pixels ``apart``, the first at ``start``, those among ``count`` results, and these results."""
    first, last = max(-(start // apart), 0), min((count - 1 - start) // apart, pixels - 1)
    if last < first:
        return slice(0), slice(0)
    return slice(first, last + 1), slice(start + first * apart, start + last * apart + 1, apart)


def _by_columns(x: np.ndarray, filters: np.ndarray, window: Window) -> np.ndarray:
    """The filters (groups, O / groups, C / groups * taps) by the columns (N, groups, C / groups * taps, pixels)."""
    parts = list(taps(x, window))
    columns = parts[0] if len(parts) == 1 else np.stack(parts, 2)
    return filters @ columns.reshape(x.shape[0], *filters.shape[::2], math.prod(parts[0].shape[2:]))


def _by_taps(x: np.ndarray, filters: np.ndarray, window: Window) -> np.ndarray:
    """One channel a group: the sum of shifted images, each by a weight of the filters (groups, O / groups, taps)."""
    filters = filters.reshape(*filters.shape, *[1] * len(window.kernel))
    products = (tap[:, :, None] * filters[:, :, i] for i, tap in enumerate(taps(x, window)))
    return reduce(lambda total, product: np.add(total, product, out=total), products)


ROW = 128
"""Results in a row of a product with a Toeplitz matrix."""


def conv(x, w, window, groups=1, stretch=()):
    """Cross-correlation of x (N, C, spatial...), its pixels ``stretch`` apart, with w (O, C / groups, kernel...).

    The result has the dtype of ``x``; integers are accumulated and returned in int32 (int64 from int64).
    """
    if x.ndim != w.ndim or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"weights must be (M, C / group, kernel...), where group ({groups}) divides M")
    if is_known((x, w)) and x.ndim > 2 and x.dtype == w.dtype:
        return convolve_numpy(*_widened(x, w), window, groups, stretch)
    x, w = jnp.asarray(x), jnp.asarray(w)
    forms = {"cpu": on_cpu, "cuda": _on_cuda, "default": _native}
    problem = Problem(x.dtype, (x.shape[0], *x.shape[2:]), w.shape, window, groups, stretch)
    if (name := lowering(problem, "tpu")) != "native":
        forms["tpu"] = {"patches": _patches, "toeplitz": _finite_toeplitz, "rows": _by_rows}[name]
    chosen = {n: partial(form, window=window, groups=groups, stretch=stretch) for n, form in forms.items()}
    if jnp.issubdtype(x.dtype, jnp.integer):
        return chosen["cpu"](*_widened(x, w))
    if compat.keeps_convolutions():
        return chosen["default"](x, w)
    return compat.platform_dependent(x, w, **chosen)


def _widened(*operands):
    """Integers in the type in which they are summed."""
    dtype = operands[0].dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        return operands
    return tuple(v.astype(np.int64 if dtype.itemsize == 8 else np.int32) for v in operands)


def _native(x, w, window, groups, stretch=()):
    return lax.conv_general_dilated(x, w, window.strides, window.pads, stretch or None, window.dilations, None, groups)


def _toeplitz(x, w, window, **_):
    """Overlapping rows of samples by the matrix in whose columns the filter moves down by its stride."""
    axis = 2 + window.kernel.index(max(window.kernel))
    taps, stride, out = w.shape[axis], window.strides[axis - 2], w.shape[0]
    count, x = count_blocks(x.shape[2:], window)[axis - 2], jnp.moveaxis(padded(x, window)[:, 0], axis - 1, -1)
    rows, step = -(-count // ROW), ROW * stride
    pieces = -(-(step - stride + taps) // step)  # of `step` samples that a row reads
    room = (rows + pieces - 1) * step
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, max(room - x.shape[-1], 0))])[..., :room]
    x = x.reshape(*x.shape[:-1], rows + pieces - 1, step)
    x = jnp.concatenate([x[..., i : i + rows, :] for i in range(pieces)], axis=-1)
    # Rows a stride too long, read as rows of `length`: each filter starts a stride later than the one above.
    length = pieces * step
    w = jnp.pad(w.reshape(out, 1, taps), ((0, 0), (0, 0), (0, length + stride - taps)))
    w = jnp.broadcast_to(w, (out, ROW, length + stride)).reshape(out, -1)[:, : ROW * length]
    y = jnp.einsum("n...j,otj->no...t", x, w.reshape(out, ROW, length), preferred_element_type=accumulator(x.dtype))
    y = y.reshape(*y.shape[:-2], rows * ROW)[..., :count].astype(x.dtype)
    return jnp.moveaxis(y, -1, axis)


def _finite_toeplitz(x, w, window, **options):
    return finite_or(_toeplitz(x, w, window), partial(_native, window=window, **options), x, w)


def _by_rows(x, w, window, **_):
    """One convolution along the longer axis of the kernel: rows of the image are its batch, rows of the kernel are
    filters of their own, whose results are added."""
    turned = window.kernel[0] > window.kernel[1]
    if turned:
        x, w, window = x.swapaxes(2, 3), w.swapaxes(2, 3), Window(*(v[::-1] for v in window))
    wide, (rows, columns), (out, depth, high, _) = accumulator(x.dtype), count_blocks(x.shape[2:], window), w.shape
    image = lax.transpose(padded(x.astype(wide), window), (0, 2, 1, 3))
    filters = lax.transpose(w.astype(wide), (2, 0, 1, 3)).reshape(high * out, depth, -1)
    y = lax.conv_general_dilated(
        image.reshape(-1, *image.shape[2:]), filters, window.strides[1:], ((0, 0),), rhs_dilation=window.dilations[1:]
    )
    y = y.reshape(*image.shape[:2], high, out, columns)
    (stride, _), (dilation, _) = window.strides, window.dilations
    ends = [i * dilation + (rows - 1) * stride + 1 for i in range(high)]
    y = sum(y[:, i * dilation : end : stride, i] for i, end in enumerate(ends))
    y = lax.transpose(y.astype(x.dtype), (0, 2, 1, 3))
    return y.swapaxes(2, 3) if turned else y


def _patches(x, w, window, **_):
    """Each patch by the weights, as one product."""
    blocks = count_blocks(x.shape[2:], window)
    whole = [n * k for n, k in zip(blocks, window.kernel, strict=True)]
    x = lax.slice(x, (0,) * x.ndim, (*x.shape[:2], *whole))
    x = lax.reshape(x, (*x.shape[:2], *itertools.chain(*zip(blocks, window.kernel, strict=True))))
    inside = range(3, x.ndim, 2)
    y = lax.dot_general(x, w, (((1, *inside), tuple(range(1, w.ndim))), ((), ())), preferred_element_type=x.dtype)
    return lax.transpose(y, (0, y.ndim - 1, *range(1, y.ndim - 1)))


def _on_cuda(x, w, window, groups, stretch=()):
    """Channels last: filters of one pixel as products, one channel a group as shifted multiply-adds in float32.

    Eight images through MobileNetV2 take an H200 0.37 ms in bfloat16, and 0.50 with channels first; by cuDNN's
    convolutions alone an H100 takes 0.74. XLA 0.10 and 0.11 end the process on gradients of some products of every
    second pixel behind a BatchNormalization (ResNet-50's), so those stay convolutions.
    """
    how = lowering(Problem(x.dtype, (x.shape[0], *x.shape[2:]), w.shape, window, groups, stretch), "cuda")
    if how == "patches":
        return _patches(x, w, window)
    y, wide = lax.transpose(x, (0, *range(2, x.ndim), 1)), accumulator(x.dtype)
    if how == "depthwise":
        y = multiply_adds(y.astype(wide), w.astype(wide), window, axis=1).astype(x.dtype)
    elif how == "pointwise":
        contracted = (((x.ndim - 1,), (1,)), ((), ()))
        y = lax.dot_general(y, w.reshape(w.shape[:2]), contracted, preferred_element_type=x.dtype)
    else:
        y = lax.conv_general_dilated(
            y, kernel_first(w), window.strides, window.pads, stretch or None, window.dilations,
            channels_last(x.ndim), groups,
        )  # fmt: skip
    return lax.transpose(y, (0, y.ndim - 1, *range(1, y.ndim - 1)))


def on_cpu(x, w, window, groups, stretch=(), dtype=None):
    """Channels last; half precision is summed in float32 and rounded once, to a dtype or that of x."""
    y = convolve(lax.transpose(x, (0, *range(2, x.ndim), 1)), w, window, groups, stretch).astype(dtype or x.dtype)
    return lax.transpose(y, (0, y.ndim - 1, *range(1, y.ndim - 1)))


def _add_bias(y, bias):
    if bias is None:
        return y
    if is_known((y, bias)) and y.dtype == bias.dtype and y.shape[1:2] == bias.shape:
        return y + bias.reshape(-1, *[1] * (y.ndim - 2))
    check_shape("B", bias, y.shape[1])  # broadcast_in_dim would repeat a single element
    return lax.add(y, lax.broadcast_in_dim(jnp.asarray(bias), y.shape, (1,)))


@op("Conv", product=True, unsharded=True)
@taking(**WINDOW)
def conv_op(X, W, B=None, *, group=1, **attributes):
    return _add_bias(conv(X, W, window_of(X.shape[2:], W.shape[2:], **attributes), group), B)


@taking(**WINDOW)
def native_conv(X, W, *, group=1, **attributes):
    """Conv without bias as one operation of XLA, which is traced in a tenth of the time: for shapes."""
    return _native(X, W, window_of(X.shape[2:], W.shape[2:], **attributes), group)


_BEYOND = (
    "auto_pad={!r} with strides {} larger than the kernel's span {} appends zeros; onnxruntime omits them, and "
    "onnx.reference may insert them in front. To choose, set pads and output_padding and leave out auto_pad"
)


@op(
    "ConvTranspose", product=True, unsharded=True,
    limits="auto_pad=SAME with strides larger than the kernel appends zeros, with a DeviationWarning",
)  # fmt: skip
@taking(**WINDOW)
def conv_transpose(X, W, B=None, *, auto_pad, group=1, output_padding=None, output_shape=None, warn=None, **attributes):
    extents, rank, same = X.shape[2:], X.ndim - 2, auto_pad in ("SAME_UPPER", "SAME_LOWER")
    window = window_of(extents, W.shape[2:], auto_pad="NOTSET" if same else auto_pad, **attributes)
    rows = list(zip(extents, window.strides, window.spans, output_padding or (0,) * rank, strict=True))
    full = [s * (n - 1) + e + span for n, s, span, e in rows]
    whole = zip(rows, full, window.pads, strict=True)
    image = tuple(output_shape or ())[-rank:] or tuple(n * s if same else f - sum(p) for (n, s, *_), f, p in whole)
    if same or output_shape:
        # odd padding as opset 11 words it: the formula of opset 1 contradicts its own auto_pad
        totals = [max(f - n, 0) for f, n in zip(full, image, strict=True)]
        if warn and same and not output_shape and any(f < n for f, n in zip(full, image, strict=True)):
            warn(_BEYOND.format(auto_pad, list(window.strides), window.spans))
        window = window._replace(pads=split_pads(totals, auto_pad == "SAME_UPPER"))
    return _add_bias(conv(X, *_mirrored(W, X.shape[2:], image, window, group)), B)


def _mirrored(w, extents, image, window, groups):
    """The weights, window, groups and stretch of the convolution that is the transposed one: the kernel mirrored."""
    size = w.shape[0] // groups
    w = w.reshape(groups, size, *w.shape[1:]).swapaxes(1, 2).reshape(groups * w.shape[1], size, *window.kernel)
    around = []
    for n, m, span, s, (before, _) in zip(image, extents, window.spans, window.strides, window.pads, strict=True):
        start, stretched = span - 1 - before, (m - 1) * s + 1 if m else 0
        around.append((start, n + span - 1 - start - stretched))
    plain = window._replace(pads=tuple(around), strides=(1,) * len(around))
    return xp.flip(w, tuple(range(2, w.ndim))), plain, groups, window.strides


@op("Col2Im", heavy=True, limits="no strings, although the schema lists them")
def col2im(input, image_shape: Static, block_shape: Static, *, dilations=None, pads=None, strides=None):
    """Adds the columns of all blocks into an image: the transpose of ``taps``."""
    image, block = dims(image_shape), dims(block_shape)
    window = window_of(image, block, strides, pads, dilations)
    blocks = count_blocks(image, window)
    check_shape("input", input, "N", "C * block", math.prod(blocks))
    lead = input.shape[0], input.shape[1] // max(math.prod(block), 1)
    columns, y = jnp.asarray(input).reshape(*lead, *block, *blocks), jnp.zeros((*lead, *image), input.dtype)
    for tap in itertools.product(*map(range, block)):
        config = [(0, 0, 0), (0, 0, 0)]
        for t, n, b, _, s, (before, _), d in window.along(tap, image, blocks):
            start = t * d - before
            config.append((start, n - start - (b - 1) * s - 1, s - 1))
        y = y + lax.pad(columns[:, :, *tap], jnp.zeros((), y.dtype), config)
    return y


@op("DeformConv", since=19, half="float32", heavy=True, unsharded=True)
@taking(**{name: None for name in WINDOW if name != "auto_pad"})
def deform_conv(X, W, offset, B=None, mask=None, *, group=1, offset_group=1, **attributes):
    """Every tap reads the input where its offset points; what it read is weighted as in a convolution."""
    kernel, (batch, channels, *extents), spatial = W.shape[2:], X.shape, offset.shape[2:]
    window = window_of(extents, kernel, **attributes)
    rank, count = len(kernel), math.prod(kernel)
    X, W, offset = (jnp.asarray(v, X.dtype) for v in (X, W, unfolded(offset)))
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
    columns = columns.reshape(batch, group, depth, math.prod(spatial))
    y = lax.dot_general(W.reshape(group, -1, depth), columns, (((2,), (2,)), ((0,), (1,))))
    return _add_bias(y.transpose(2, 0, 1, 3).reshape(batch, W.shape[0], *spatial), B)
