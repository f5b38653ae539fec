"""Resize and Upsample: one axis after the other, the coordinates worked out while tracing."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import axes_of, dims, is_string, xp
from .registry import Static, op, withdrawn

F32 = np.float32


def _original(mode, n, out, scale, start, end):
    """Where each output element lies on an input axis of n elements. In float32, as ONNX's implementations do."""
    x, scale, width = np.arange(out, dtype=F32), F32(scale), F32(n)
    # ONNX's length_resized is fractional when a scale was given, whatever the extent became
    resized = F32(out) if abs(scale * width - out) < 1e-4 else scale * width
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        return x * F32(n - 1) / (resized - 1) if out > 1 else x
    if mode == "tf_crop_and_resize":
        if out == 1:
            return F32(0.5) * (start + end) * F32(n - 1) + x
        return start * F32(n - 1) + x * (end - start) * F32(n - 1) / F32(out - 1)
    half = (x + F32(0.5)) / scale - F32(0.5)
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and out > 1):
        return half
    if mode == "pytorch_half_pixel":
        return np.zeros(out, F32)
    if mode == "half_pixel_symmetric":
        # the two terms cancel: exact ties survive only in double precision
        exact = n / 2 * (1 - out / (float(scale) * n)) + (np.arange(out) + 0.5) / float(scale) - 0.5
        return exact.astype(F32)
    raise ValueError(
        f"coordinate_transformation_mode ({mode!r}) is none of half_pixel, half_pixel_symmetric, pytorch_half_pixel, "
        f"align_corners, asymmetric, tf_crop_and_resize"
    )


_NEAREST = {
    "round_prefer_floor": lambda x: np.ceil(x - F32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + F32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _kernel(mode, distance, a):
    """The weight of a neighbour at a distance, measured in (stretched) elements."""
    d = np.abs(distance)
    if mode == "linear":
        return np.maximum(1 - d, 0)
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _neighbours(mode, x, n, scale, a, exclude_outside, antialias):
    """(index, weight), both (out, neighbours), of linear and cubic interpolation at the coordinates x."""
    stretch = max(1.0, 1.0 / float(scale)) if antialias else 1.0
    reach = int(np.ceil((1 if mode == "linear" else 2) * stretch))
    low = np.floor(x).astype(np.int64)
    index = low[:, None] + np.arange(1 - reach, reach + 1)
    weight = _kernel(mode, (index - x.astype(np.float64)[:, None]) / stretch, a)
    if exclude_outside:
        weight = np.where((index >= 0) & (index < n), weight, 0)
    if exclude_outside or antialias:
        total = weight.sum(1, keepdims=True)
        weight = weight / np.where(total == 0, 1, total)
    return np.clip(index, 0, n - 1), weight


def _interpolate(x, axis, index, weight):
    """Weighted sum of neighbours along an axis: whole rows gathered, but a product where rows are single numbers."""
    n, out = x.shape[axis], len(index)
    if index.shape[1] > 4 or (axis == x.ndim - 1 and n <= 256):
        matrix = np.zeros((out, n))
        np.add.at(matrix, (np.arange(out)[:, None], index), weight)
        y = lax.dot_general(
            x, jnp.asarray(matrix, x.dtype), (((axis,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        return jnp.moveaxis(y, -1, axis)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    parts = [
        jnp.take(x, i, axis=axis) * jnp.asarray(w, x.dtype).reshape(shape)
        for i, w in zip(index.T, weight.T, strict=True)
    ]
    return functools.reduce(jnp.add, parts)


def _extents(inputs, scales, sizes, policy, crop):
    """(output extent, scale) of each axis. One that keeps its extent may be symbolic."""
    if sizes is None:
        shrunk = [F32(scale) * share for scale, share in zip(scales, crop, strict=True)]
        return [n if s == 1 else int(F32(n) * s) for n, s in zip(inputs, shrunk, strict=True)], scales.astype(F32)
    sizes = dims(sizes)
    if policy == "stretch":
        return sizes, [F32(1) if m == n else F32(m) / F32(n) for m, n in zip(sizes, inputs, strict=True)]
    ratio = (min if policy == "not_larger" else max)(m / n for m, n in zip(sizes, inputs, strict=True))
    return [int(np.floor(ratio * n + 0.5)) for n in inputs], [F32(ratio)] * len(inputs)


def _resize(
    x, roi, scales, sizes, *, mode, coordinates="half_pixel", nearest=_NEAREST["round_prefer_floor"], a=-0.75,
    exclude_outside=0, extrapolation_value=0.0, antialias=0, axes=None, policy="stretch",
):  # fmt: skip
    axes = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    scales, sizes = (None if v is None or not v.size else v for v in (scales, sizes))
    if (scales is None) == (sizes is None):
        raise ValueError("exactly one of scales and sizes must be given; leave the other empty")
    given = scales if sizes is None else sizes
    if given.size != len(axes):
        raise ValueError(f"{given.size} scales or sizes for {len(axes)} axes {axes}")
    crop = coordinates == "tf_crop_and_resize"
    if crop and (roi is None or roi.size != 2 * len(axes)):
        raise ValueError(f"tf_crop_and_resize needs a roi of {2 * len(axes)} entries: starts, then ends")
    starts, ends = roi.astype(F32).reshape(2, -1) if crop else np.repeat(F32([[0], [1]]), len(axes), axis=1)
    extents, scales = _extents([x.shape[i] for i in axes], scales, sizes, policy, ends - starts)
    dtype, y, outside = x.dtype, x, []
    if mode != "nearest":
        if is_string(x) or dtype.kind == "b":
            raise TypeError(f"mode ({mode!r}) interpolates numbers, not {dtype}; nearest takes any element type")
        exact = dtype.itemsize > (2 if dtype.kind in "iu" else 4)  # more digits than float32 holds
        y = jnp.asarray(x, dtype if dtype.kind == "c" else np.float64 if exact else F32)
    for axis, out, scale, start, end in sorted(zip(axes, extents, scales, starts, ends, strict=True), reverse=True):
        n = x.shape[axis]
        if n == out and scale == 1 and not crop:
            continue
        at = _original(coordinates, n, out, scale, start, end)
        if crop:
            outside.append((axis, (at < 0) | (at > n - 1)))
        if n == out and np.array_equal(at, np.arange(n)):
            continue
        if mode == "nearest":
            chosen = np.clip(nearest(at, scale) if nearest is _simple else nearest(at), 0, n - 1)
            y = xp(y).take(y, chosen.astype(np.int64), axis=axis)
        else:
            if mode == "linear" and not antialias:
                at = np.clip(at, 0, n - 1)
            y = _interpolate(y, axis, *_neighbours(mode, at, n, scale, a, exclude_outside, antialias))
    if y.dtype != dtype and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        y = jnp.clip(jnp.round(y) if antialias else jnp.trunc(y), bounds.min, bounds.max)
    y = y.astype(dtype)
    for axis, beyond in outside:
        shape = [-1 if i == axis else 1 for i in range(y.ndim)]
        y = xp(y).where(beyond.reshape(shape), np.array(extrapolation_value).astype(dtype), y)
    return y


def _simple(x, scale):
    """Before opset 11: rounded up when shrinking, down when growing."""
    return np.ceil(x) if scale < 1 else np.floor(x)


def _choice(name, value, *choices):
    if value not in choices:
        raise ValueError(f"{name} ({value!r}) is none of {', '.join(choices)}")


@op("Upsample", since=1, heavy=True)
def upsample_1(X, *, height_scale, mode="nearest", width_scale):
    scales = np.array([1, 1, height_scale, width_scale], F32)
    _choice("mode", mode, "nearest", "bilinear")
    return _resize(X, None, scales, None, mode=mode.removeprefix("bi"), coordinates="asymmetric", nearest=_simple)


@op("Resize", since=10, heavy=True)
@op("Upsample", since=7, heavy=True)
def resize_10(X, scales: Static, *, mode="nearest"):
    _choice("mode", mode, "nearest", "linear")
    return _resize(X, None, scales, None, mode=mode, coordinates="asymmetric", nearest=_simple)


withdrawn("Upsample", since=10, instead="Resize")


@op("Resize", since=11, heavy=True)
def resize(
    X, roi: Static = None, scales: Static = None, sizes: Static = None, *, antialias=0, axes=None,
    coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.75, exclude_outside=0, extrapolation_value=0.0,
    keep_aspect_ratio_policy="stretch", mode="nearest", nearest_mode="round_prefer_floor",
):  # fmt: skip
    _choice("mode", mode, "nearest", "linear", "cubic")
    _choice("nearest_mode", nearest_mode, *_NEAREST)
    _choice("keep_aspect_ratio_policy", keep_aspect_ratio_policy, "stretch", "not_larger", "not_smaller")
    if antialias and mode == "nearest":
        raise ValueError("antialias=1 belongs to the modes linear and cubic, not nearest")
    return _resize(
        X, roi, scales, sizes, mode=mode, coordinates=coordinate_transformation_mode, nearest=_NEAREST[nearest_mode],
        a=cubic_coeff_a, exclude_outside=exclude_outside, extrapolation_value=extrapolation_value,
        antialias=antialias, axes=axes, policy=keep_aspect_ratio_policy,
    )  # fmt: skip
