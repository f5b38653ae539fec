"""Resize and Upsample: one axis at a time, with coordinates computed at trace time."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..limits import LARGEST_ARRAY, LARGEST_TRACED, RESIZE_GATHERS, RESIZE_SCATTERS, UNROLLED_TAPS
from .arrays import axes_of, check_room, dims, is_known, is_string, xp
from .registry import Static, deprecated, op, taking
from .traced import finite_or, with_unfolded_cotangent

F32 = np.float32
Coordinates13 = Literal["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]
Coordinates11 = Literal[Coordinates13, "tf_half_pixel_for_nn"]
Coordinates = Literal[Coordinates13, "half_pixel_symmetric"]
Policy = Literal["stretch", "not_larger", "not_smaller"]
Mode = Literal["nearest", "linear", "cubic"]
Nearest = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


class Axis(NamedTuple):
    """An axis of n elements, resized to ``out`` by a scale; ``start`` and ``end`` crop it."""

    n: Any
    out: Any
    scale: Any
    start: Any = F32(0)
    end: Any = F32(1)


def _symmetric(_, a):
    # the two terms cancel: ties are exact only in double precision
    n, out, scale = a.n, a.out, float(a.scale)
    return (n / 2 * (1 - out / (scale * n)) + (np.arange(out) + 0.5) / scale - 0.5).astype(F32)


def _corners(x, a):
    # ONNX's length_resized is fractional if a scale was given, although the extent is an integer
    resized = F32(a.out) if abs(a.scale * F32(a.n) - a.out) < 1e-4 else a.scale * F32(a.n)
    return x * F32(a.n - 1) / (resized - 1) if a.out > 1 else x


def _cropped(x, a):
    start, end, last = a.start, a.end, F32(a.n - 1)
    return start * last + x * (end - start) * last / F32(a.out - 1) if a.out > 1 else HALF * (start + end) * last + x


HALF = F32(0.5)
_ORIGINAL = {
    "align_corners": _corners,
    "asymmetric": lambda x, a: x / a.scale,
    "half_pixel": lambda x, a: (x + HALF) / a.scale - HALF,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda x, a: (x + HALF) / a.scale - HALF if a.out > 1 else x,
    "tf_crop_and_resize": _cropped,
    "tf_half_pixel_for_nn": lambda x, a: (x + HALF) / a.scale,
}
"""Mode -> the coordinate on the input axis of each output element x, in float32 as in other implementations."""


def _original(mode, a):
    return _ORIGINAL[mode](np.arange(a.out, dtype=F32), a)


_NEAREST = {
    "round_prefer_floor": lambda x, _: np.ceil(x - F32(0.5)),
    "round_prefer_ceil": lambda x, _: np.floor(x + F32(0.5)),
    "floor": lambda x, _: np.floor(x),
    "ceil": lambda x, _: np.ceil(x),
    "before opset 11": lambda x, scale: np.ceil(x) if scale < 1 else np.floor(x),
}


def hat(distance):
    """The weight of a neighbour in linear interpolation."""
    return xp.maximum(1 - abs(distance), 0)


def cubic(distance, a=-0.75):
    """The weight of a neighbour in cubic interpolation."""
    d = abs(distance)
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return xp.where(d <= 1, near, xp.where(d < 2, far, 0))


def _neighbours(x, n, scale, mode, a, exclude_outside, antialias):
    """(index, weight), both (out, neighbours), of linear and cubic interpolation at the coordinates x.

    Neighbours that a result does not read repeat one that it reads, and neighbours that are the same share their
    weights: the product of weight 0 and an infinite pixel would be NaN. Plain cubic interpolation multiplies the pixel
    at an edge once for each neighbour beyond it, as other implementations do.
    """
    stretch = max(1.0, 1.0 / float(scale)) if antialias and scale else 1.0
    support, before = 1 if mode == "linear" else 2, np.zeros(x.shape, bool)
    if mode == "linear" and not antialias:
        before, x = x < 0, np.clip(x, 0, n - 1)
    reach = int(np.ceil(support * stretch))
    low = np.floor(x).astype(np.int64)
    index = low[:, None] + np.arange(1 - reach, reach + 1)
    distance = (index - x.astype(np.float64)[:, None]) / stretch
    weight = hat(distance) if mode == "linear" else cubic(distance, a)
    unread = (abs(distance) >= support) & bool(antialias)
    if exclude_outside:
        unread |= (index < 0) | (index >= n)
    weight = np.where(unread, 0, weight)
    if exclude_outside or antialias:
        total = weight.sum(1, keepdims=True)
        weight = weight / np.where(total == 0, 1, total)
    index = np.clip(index, 0, n - 1)
    index = np.where(unread, np.take_along_axis(index, weight.argmax(1)[:, None], 1), index)
    if mode == "linear" or exclude_outside or antialias:
        rows, place = np.arange(len(x))[:, None], index - index.min(1, keepdims=True)
        total, count = np.zeros((2, *index.shape))
        np.add.at(total, (rows, place), weight)
        np.add.at(count, (rows, place), 1)
        weight = (total / np.maximum(count, 1))[rows, place]
    order = np.arange(index.shape[1])
    order = np.where(before[:, None], -1 - order, order)  # before the first pixel: the second, then the first
    return np.take_along_axis(index, order, 1), np.take_along_axis(weight, order, 1)


def _interpolate(x, axis, index, weight):
    """Weighted sum of neighbours along an axis: slices, gathers, or a product where these are many."""
    if len(index) and index.shape[1] <= RESIZE_GATHERS:
        rows = _sliced(x, axis, index)
        return _gathered(x, axis, index, weight) if rows is None else _weighted(rows, axis, weight)
    return finite_or(_product(x, axis, index, weight), lambda x: _gathered(x, axis, index, weight), x)


def _weighted(rows, axis, weight):
    """The sum of arrays, the neighbours tap by tap, by weights (out, neighbours)."""
    pairs = zip(rows, weight.T, strict=True)
    return functools.reduce(jnp.add, [row * _along(jnp.asarray(w, row.dtype), row.ndim - axis) for row, w in pairs])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _gathered(x, axis, index, weight):
    if index.shape[1] <= UNROLLED_TAPS:
        return _weighted([jnp.take(x, i, axis) for i in index.T], axis, weight)

    def add(total, tap):
        return total + jnp.take(x, tap[0], axis) * _along(tap[1], x.ndim - axis), None

    total = jnp.zeros((*x.shape[:axis], len(index), *x.shape[axis + 1 :]), x.dtype)
    return lax.scan(add, total, (jnp.asarray(index.T), jnp.asarray(weight.T, x.dtype)))[0]


@_gathered.defjvp
def _gathered_jvp(axis, index, weight, primals, tangents):
    (x,), (dx,) = primals, tangents
    y = _gathered(x, axis, index, weight)
    if index.shape[1] <= RESIZE_SCATTERS:
        return y, _weighted([lax.optimization_barrier(jnp.take(dx, i, axis)) for i in index.T], axis, weight)
    return y, _product(dx, axis, index, weight)


def _product(x, axis, index, weight):
    matrix = np.zeros((len(index), x.shape[axis]))
    np.add.at(matrix, (np.arange(len(index))[:, None], index), weight)
    y = jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ((axis,), (1,)), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(y, -1, axis)


def _along(weight, rank):
    return weight.reshape(*weight.shape, *(1,) * (rank - weight.ndim))


def _sliced(x, axis, index):
    """The neighbours of all results, tap by tap, as slices of x repeated, where the ratio of extents is whole, or None.

    XLA:CPU takes 0.5 ms rather than 1.2 by gathers from 56x56 to 112x112 pixels of 64 channels; 1.6 rather than 3.9
    from 300x512 to 600x1024 of 3 channels, and its derivative 9 rather than 67.
    """
    n, (out, taps) = x.shape[axis], index.shape
    times, stride = max(out // n, 1), max(n // out, 1)
    shift = -int((index[:, 0] != index[0, 0]).argmax()) % times
    slots = (np.arange(out)[:, None] + shift) // times * stride + np.arange(taps)
    slots += index[out // 2, 0] - slots[out // 2, 0]
    start, end = int(slots[0, 0]), int(slots[-1, -1])
    source = np.clip(np.arange(start, end + 1), 0, n - 1)
    source[slots - start] = index
    first, last = max(-start, 0), min(n - 1 - start, end - start) + 1
    inside = np.array_equal(source[first:last], np.arange(start + first, start + last)) and first < last
    if n * times != out * stride or not inside or not np.array_equal(source[slots - start], index):
        return None
    edges = [[lax.slice_in_dim(x, i, i + 1, axis=axis) for i in e.tolist()] for e in (source[:first], source[last:])]
    x = lax.slice_in_dim(x, start + first, start + last, axis=axis)
    x = lax.concatenate([*edges[0], x, *edges[1]], axis)
    if times > 1:
        shape = list(x.shape)
        shape.insert(axis + 1, times)
        x = lax.broadcast_in_dim(x, shape, tuple(i for i in range(len(shape)) if i != axis + 1))
        x = lax.reshape(x, (*shape[:axis], shape[axis] * times, *shape[axis + 2 :]))
    starts = [shift + tap * times for tap in range(taps)]
    return [lax.slice_in_dim(x, i, i + (out - 1) * stride + 1, stride, axis) for i in starts]


def _extents(inputs, scales, sizes, policy, crop):
    """(output extents, scales) of the axes; an axis that keeps its extent may be symbolic."""
    if sizes is None:
        cropped = [F32(scale) * share for scale, share in zip(scales, crop, strict=True)]
        return [n if s == 1 else _scaled(n, s) for n, s in zip(inputs, cropped, strict=True)], scales.astype(F32)
    sizes = dims(sizes)
    if any(n == 0 != m for m, n in zip(sizes, inputs, strict=True)):
        raise ValueError(f"an empty axis cannot be resized: input {tuple(inputs)}, sizes {sizes}")
    if policy == "stretch":
        return sizes, [F32(1) if m == n else _ratio(m, n) for m, n in zip(sizes, inputs, strict=True)]
    ratio = (min if policy == "not_larger" else max)(m / n for m, n in zip(sizes, inputs, strict=True) if n)
    return [int(np.floor(ratio * n + 0.5)) for n in inputs], [F32(ratio)] * len(inputs)


def _scaled(n, scale):
    """An extent times a scale; a symbolic one times a whole number only."""
    if isinstance(n, int):
        return int(F32(n) * scale)
    if scale != int(scale):
        raise ValueError(f"{_SYMBOLIC}; the scale is {scale}")
    return n * int(scale)


def _ratio(m, n):
    if isinstance(m, int) and isinstance(n, int):
        return F32(m) / F32(n)
    ratio = next((k for k in range(2, LARGEST_RATIO + 1) if m == k * n), None)
    if ratio is None:
        raise ValueError(f"{_SYMBOLIC}; the extents are {n} and {m}")
    return F32(ratio)


def _repeats(mode, nearest_mode, scale):
    """Whether the nearest element of each output is its own number divided by the scale, whatever the extent."""
    times = int(scale)
    for n in (1, 2, 3, 5):
        x = _NEAREST[nearest_mode](_original(mode, Axis(n, n * times, scale)), scale)
        if not np.array_equal(np.clip(x, 0, n - 1), np.arange(n * times) // times):
            return False
    return True


_SYMBOLIC = "a symbolic extent can be multiplied by a whole number only"
LARGEST_RATIO = 64
"""The largest ratio of symbolic extents that is looked for."""
COORDINATE_NUMBERS = 16
"""Numbers that NumPy holds for each coordinate of an axis, with temporary values: neighbours and their weights."""
_CORNERS = "align_corners does not round extent * scale, as in ONNX's test cases; onnxruntime and PyTorch round it down"


def _resized(y, axis, a, coordinates, nearest, weights, warn):
    """The image with one axis resized: by its ``nearest`` elements, or else by weighted sums of neighbours."""
    if not (isinstance(a.n, int) and isinstance(a.out, int)):
        if not nearest or coordinates == "tf_crop_and_resize" or not _repeats(coordinates, nearest, a.scale):
            raise ValueError(
                f"axis {axis} has the symbolic extent {a.n}, of which nearest elements can be repeated, and nothing "
                f"interpolated (mode={weights[0]!r}, coordinate_transformation_mode={coordinates!r})"
            )
        return jnp.repeat(y, int(a.scale), axis)
    x = _original(coordinates, a)
    if a.n == a.out and np.array_equal(x, np.arange(a.n)):
        return y
    if warn and coordinates == "align_corners" and min(a.n, a.out) > 1 and abs(a.scale * a.n - a.out) >= 1e-4:
        warn(f"{_CORNERS} ({a.n} * {a.scale:g} to {a.out}); for their results give the node sizes instead of scales")
    if not nearest:
        return _interpolate(y, axis, *_neighbours(x, a.n, a.scale, *weights))
    index = np.clip(_NEAREST[nearest](x, a.scale), 0, a.n - 1).astype(np.int64)
    return np.take(y, index, axis) if is_known(y) else with_unfolded_cotangent(jnp.take(y, index, axis))


@op("Resize", since=19, heavy=True, limits=f"strings on the host, in mode nearest only; {_CORNERS}")
def resize(
    X, roi: Static = None, scales: Static = None, sizes: Static = None, *, antialias=0, axes=None,
    coordinate_transformation_mode: Coordinates = "half_pixel", cubic_coeff_a=-0.75, exclude_outside=0,
    extrapolation_value=0.0, keep_aspect_ratio_policy: Policy = "stretch", mode: Mode = "nearest",
    nearest_mode: Nearest = "round_prefer_floor", warn=None,
):  # fmt: skip
    """Resize: along each axis a gather of the nearest elements, or a weighted sum of neighbours."""
    if antialias and mode == "nearest":
        raise ValueError("antialias=1 is defined for the modes linear and cubic, not nearest")
    axes = tuple(range(X.ndim)) if axes is None else axes_of(axes, X.ndim)
    scales, sizes = (None if v is None or not v.size else v for v in (scales, sizes))
    if (scales is None) == (sizes is None):
        raise ValueError("exactly one of the inputs scales and sizes must be given")
    values = scales if sizes is None else sizes
    if values.size != len(axes):
        raise ValueError(f"{values.size} scales or sizes for {len(axes)} axes {axes}")
    if values.dtype != object and not (values >= 0 if scales is None else values > 0).all():
        raise ValueError(f"scales must be positive and sizes non-negative (they are {values})")
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    if crop and (roi is None or roi.size != 2 * len(axes)):
        raise ValueError(f"tf_crop_and_resize needs a roi of {2 * len(axes)} entries: starts, then ends")
    starts, ends = roi.astype(F32).reshape(2, -1) if crop else np.array([[0], [1]], F32).repeat(len(axes), 1)
    extents, scales = _extents([X.shape[i] for i in axes], scales, sizes, keep_aspect_ratio_policy, ends - starts)
    dtype, y = X.dtype, X
    shape = [dict(zip(axes, extents, strict=True)).get(i, n) for i, n in enumerate(X.shape)]
    check_room(shape, dtype, LARGEST_ARRAY if is_known(X) else LARGEST_TRACED)
    for n in extents:
        check_room((n, COORDINATE_NUMBERS), np.float64)
    if mode != "nearest":
        if is_string(X) or dtype.kind == "b":
            raise ValueError(f"mode ({mode!r}) interpolates numbers, not {dtype}; nearest takes any element type")
        exact = dtype.itemsize > (2 if dtype.kind in "iu" else 4)  # more significant digits than float32
        y = jnp.asarray(X, dtype if dtype.kind == "c" else np.float64 if exact else F32)
    nearest, outside = nearest_mode if mode == "nearest" else "", np.zeros((1,) * X.ndim, bool)
    spans = zip(axes, map(Axis, (X.shape[i] for i in axes), extents, scales, starts, ends), strict=True)
    for axis, a in sorted(spans, reverse=True):
        if a.n == a.out and a.scale == 1 and not crop:
            continue
        weights = mode, cubic_coeff_a, exclude_outside, antialias
        y = _resized(y, axis, a, coordinate_transformation_mode, nearest, weights, warn)
        if crop:
            x = _original(coordinate_transformation_mode, a)
            outside = outside | ((x < 0) | (x > a.n - 1)).reshape(-1, *(1,) * (X.ndim - 1 - axis))
    if y.dtype != dtype and dtype.kind in "iu":
        y = jnp.clip(jnp.round(y) if antialias else jnp.trunc(y), np.iinfo(dtype).min, np.iinfo(dtype).max)
    y = y.astype(dtype)
    return xp.where(outside, np.array(extrapolation_value).astype(dtype), y) if outside.any() else y


op("Resize", since=13)(taking(coordinate_transformation_mode=Coordinates13)(resize))
op("Resize", since=11)(taking(coordinate_transformation_mode=Coordinates11)(resize))


@op("Resize", since=10)
@op("Upsample", since=7, heavy=True)
def resize_10(X, scales: Static, *, mode: Literal["nearest", "linear"] = "nearest"):
    fixed: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "before opset 11"}
    return resize(X, None, scales, mode=mode, **fixed)


@op("Upsample")
def upsample_1(X, *, height_scale, mode: Literal["nearest", "bilinear"] = "nearest", width_scale):
    kernel: Any = mode.removeprefix("bi")
    return resize_10(X, np.array([1, 1, height_scale, width_scale], F32), mode=kernel)


deprecated("Upsample", since=10, instead="Resize")
