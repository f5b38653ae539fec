"""Pooling: one window, several reductions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import dims, xp
from .conv import taps, window
from .registry import Static, op


def _pool_window(x, kernel, strides, pads, dilations, auto_pad, ceil_mode):
    """(strides, dilations, pads, overhang): the overhang is what ceil_mode adds to the end of each axis."""
    if kernel is None or not len(kernel):
        raise ValueError("kernel_shape is missing; give the size of the window along each spatial axis")
    strides, dilations, pads = window(x.shape[2:], kernel, strides, pads, dilations, auto_pad)
    overhang = [0] * len(kernel)
    if ceil_mode and auto_pad in ("NOTSET", ""):
        for i, (n, k, s, d, p) in enumerate(zip(x.shape[2:], kernel, strides, dilations, pads, strict=True)):
            rest = -(n + sum(p) - (k - 1) * d - 1) % s
            count = (n + sum(p) + rest - (k - 1) * d - 1) // s + 1
            # a window that would start in the padding behind the input does not exist
            overhang[i] = rest if (count - 1) * s < n + p[0] else 0
    return strides, dilations, pads, overhang


def _reduce(x, init, combine, kernel, strides, dilations, pads, overhang):
    around = ((0, 0), (0, 0), *((a, b + o) for (a, b), o in zip(pads, overhang, strict=True)))
    ones = (1, 1)
    init = np.array(init, x.dtype)
    return lax.reduce_window(
        x, init, combine, (*ones, *kernel), (*ones, *strides), around, window_dilation=(*ones, *dilations)
    )


def _counts(extents, kernel, strides, dilations, pads, overhang, include_pad):
    """How many elements each window holds (outputs...): of the input, or of the input and its explicit padding."""
    result = np.ones(())
    for n, k, s, d, (before, after), o in zip(extents, kernel, strides, dilations, pads, overhang, strict=True):
        starts = np.arange((n + before + after + o - (k - 1) * d - 1) // s + 1) * s - before
        place = starts[:, None] + np.arange(k) * d
        low, high = (-before, n + after) if include_pad else (0, n)
        result = np.multiply.outer(result, ((place >= low) & (place < high)).sum(1))
    return result


@op("AveragePool")
def average_pool(
    X, *, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, kernel_shape, pads=None, strides=None
):
    geometry = _pool_window(X, kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    x = jnp.asarray(X, jnp.promote_types(X.dtype, jnp.float32))
    total = _reduce(x, 0, lax.add, kernel_shape, *geometry)
    counts = _counts(X.shape[2:], kernel_shape, *geometry, count_include_pad)
    return (total / jnp.asarray(np.maximum(counts, 1), x.dtype)).astype(X.dtype)


def _lp_pool(X, p, kernel_shape, *geometry):
    x = jnp.abs(jnp.asarray(X, jnp.promote_types(X.dtype, jnp.float32)))
    total = _reduce(_power(x, p), 0, lax.add, kernel_shape, *geometry)
    return _root(total, p).astype(X.dtype)


def _power(x, p):
    return x * x if p == 2 else x**p


def _root(total, p):
    """The p-th root, whose gradient at zero is zero."""
    positive = total > 0
    return jnp.where(positive, jnp.where(positive, total, 1) ** (1 / p), 0)


@op("LpPool")
def lp_pool_1(X, *, auto_pad="NOTSET", kernel_shape=None, p=2.0, pads=None, strides=None):
    return _lp_pool(X, p, kernel_shape, *_pool_window(X, kernel_shape, strides, pads, None, auto_pad, 0))


@op("LpPool", since=2)
def lp_pool(X, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, p=2, pads=None, strides=None):
    geometry = _pool_window(X, kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    return _lp_pool(X, p, kernel_shape, *geometry)


@op("MaxPool")
def max_pool(
    X, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, pads=None, storage_order=0, strides=None,
    n_outputs=1,
):  # fmt: skip
    strides, dilations, pads, overhang = geometry = _pool_window(
        X, kernel_shape, strides, pads, dilations, auto_pad, ceil_mode
    )
    x = jnp.asarray(X)
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    y = _reduce(x, least, lax.max, kernel_shape, *geometry)
    if n_outputs < 2:
        return y
    extents = x.shape[2:]
    place = np.zeros((1,), np.int64)  # of every tap in every window, counted within one channel
    inside = np.ones((1,), bool)
    unit = [math.prod(extents[:i]) if storage_order else math.prod(extents[i + 1 :]) for i in range(len(extents))]
    rank = len(extents)
    for i, (k, s, d) in enumerate(zip(kernel_shape, strides, dilations, strict=True)):
        at = np.arange(k)[:, None] * d + np.arange(y.shape[2 + i]) * s - pads[i][0]
        at = at.reshape(
            *(k if j == i else 1 for j in range(rank)), *(at.shape[1] if j == i else 1 for j in range(rank))
        )
        place = place + at * unit[i]
        inside = inside & (at >= 0) & (at < extents[i])
    place, inside = (v.reshape(-1, *y.shape[2:]) for v in (place, inside))
    padding = tuple((a, b + o) for (a, b), o in zip(pads, overhang, strict=True))
    seen = jnp.stack(list(taps(lax.stop_gradient(x), kernel_shape, strides, padding, dilations, least)), axis=2)
    hit = ((seen == y[:, :, None]) | (seen != seen)) & inside
    first = jnp.argmax(hit, axis=2)[:, :, None]
    local = jnp.take_along_axis(jnp.broadcast_to(place, seen.shape), first, axis=2)[:, :, 0]
    channel = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * rank)
    return y, local + channel * math.prod(extents)


@op("MaxUnpool", since=9)
def max_unpool(X, I, output_shape: Static = None, *, kernel_shape, pads=None, strides=None):  # noqa: E741
    """Put every maximum back where its index says, zeros elsewhere; a larger output_shape adds zeros behind."""
    strides, _, pads = window(X.shape[2:], kernel_shape, strides, pads)
    image = [(n - 1) * s - sum(p) + k for n, s, p, k in zip(X.shape[2:], strides, pads, kernel_shape, strict=True)]
    x = jnp.asarray(X)
    flat = jnp.zeros(math.prod((*x.shape[:2], *image)), x.dtype)
    y = flat.at[jnp.asarray(I).reshape(-1)].set(x.reshape(-1), mode="drop").reshape(*x.shape[:2], *image)
    if output_shape is None:
        return y
    return lax.pad(y, np.zeros((), x.dtype), [(0, n - m, 0) for n, m in zip(dims(output_shape), y.shape, strict=True)])


def _spatial(x):
    return tuple(range(2, x.ndim))


@op("GlobalAveragePool")
def global_average_pool(X):
    x = X.astype(jnp.promote_types(X.dtype, jnp.float32))
    return x.mean(axis=_spatial(X), keepdims=True).astype(X.dtype)


@op("GlobalMaxPool")
def global_max_pool(X):
    return X.max(axis=_spatial(X), keepdims=True)


def _global_lp_pool(X, p):
    x = abs(X.astype(jnp.promote_types(X.dtype, jnp.float32)))
    return xp(X).asarray(_root(_power(x, p).sum(axis=_spatial(X), keepdims=True), p)).astype(X.dtype)


@op("GlobalLpPool")
def global_lp_pool_1(X, *, p=2.0):
    return _global_lp_pool(X, p)


@op("GlobalLpPool", since=2)
def global_lp_pool(X, *, p=2):
    return _global_lp_pool(X, p)
