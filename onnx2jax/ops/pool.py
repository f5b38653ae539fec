"""Pooling: one window, several reductions."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import argmax, dims, is_known
from .conv import MAX_TAPS, count_blocks, taps, window
from .norm import root, wide_dtype
from .registry import Static, op


def _pool_window(x, kernel, strides, pads, dilations, auto_pad, ceil_mode):
    """((kernel, strides, dilations, pads), pads as given): ceil_mode adds to the first pads, not to the others."""
    if kernel is None or not len(kernel):
        raise ValueError("kernel_shape is missing; give the size of the window along each spatial axis")
    strides, dilations, pads = window(x.shape[2:], kernel, strides, pads, dilations, auto_pad)
    count_blocks(x.shape[2:], kernel, strides, pads, dilations)  # does the window fit?
    around = list(pads)
    if ceil_mode and auto_pad in ("NOTSET", ""):
        for i, (n, k, s, d, (before, after)) in enumerate(
            zip(x.shape[2:], kernel, strides, dilations, pads, strict=True)
        ):
            rest = n + before + after - (k - 1) * d - 1
            # a window that would start in the padding behind the input does not exist
            if -(-rest // s) * s < n + before:
                around[i] = before, after + -rest % s
    return (tuple(kernel), strides, dilations, tuple(around)), pads


def _reduce(x, init, combine, kernel, strides, dilations, pads):
    ones = (1, 1)
    return lax.reduce_window(
        x, np.array(init, x.dtype), combine, (*ones, *kernel), (*ones, *strides), ((0, 0), (0, 0), *pads),
        window_dilation=(*ones, *dilations),
    )  # fmt: skip


def _reduce_by_axis(x, init, combine, kernel, strides, dilations, pads):
    """The same, one axis after the other, by shifted operands: on the CPU 2 to 30 times as fast."""
    for i, chosen in enumerate(zip(kernel, strides, pads, dilations, strict=True)):
        alone = [chosen if i == j else (1, 1, (0, 0), 1) for j in range(len(kernel))]
        x = functools.reduce(combine, taps(x, *zip(*alone, strict=True), init))
    return x


def _pool(x, init, combine, *geometry):
    if sum(geometry[0]) > MAX_TAPS:
        return _reduce(x, init, combine, *geometry)
    default, cpu = (lambda v, f=f: f(v, init, combine, *geometry) for f in (_reduce, _reduce_by_axis))
    return lax.platform_dependent(x, cpu=cpu, default=default)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _maxima(x, geometry):
    return _pool(x, _least(x.dtype), lax.max, *geometry)


@_maxima.defjvp
def _maxima_jvp(geometry, primals, tangents):
    """The derivative goes to the first of equal maxima, as ``reduce_window`` has it."""
    dilated = max(geometry[2]) > 1  # which JAX cannot transpose: there it goes to equal maxima in equal parts
    form = _reduce_by_axis if dilated else _reduce
    return jax.jvp(lambda x: form(x, _least(x.dtype), lax.max, *geometry), primals, tangents)


def _least(dtype):
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _counts(extents, geometry, pads, include_pad):
    """How many elements each window holds (outputs...): of the input, or of the input and its explicit padding."""
    result = np.ones(())
    for n, k, s, d, around, (before, after) in zip(extents, *geometry, pads, strict=True):
        starts = np.arange((n + sum(around) - (k - 1) * d - 1) // s + 1) * s - before
        place = starts[:, None] + np.arange(k) * d
        low, high = (-before, n + after) if include_pad else (0, n)
        result = np.multiply.outer(result, ((place >= low) & (place < high)).sum(1))
    return result


@op("AveragePool", heavy=True)
def average_pool(
    X, *, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, kernel_shape, pads=None, strides=None
):
    geometry, pads = _pool_window(X, kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    total = _pool(jnp.asarray(X, wide_dtype(X)), 0, lax.add, *geometry)
    counts = _counts(X.shape[2:], geometry, pads, count_include_pad)
    return (total / jnp.asarray(np.maximum(counts, 1), total.dtype)).astype(X.dtype)


def _power(x, p):
    return x * x if p == 2 else x**p


def _lp_pool(X, p, geometry):
    total = _pool(_power(jnp.abs(jnp.asarray(X, wide_dtype(X))), p), 0, lax.add, *geometry)
    return root(total, p).astype(X.dtype)


@op("LpPool", heavy=True)
def lp_pool_1(X, *, auto_pad="NOTSET", kernel_shape=None, p=2.0, pads=None, strides=None):
    return _lp_pool(X, p, _pool_window(X, kernel_shape, strides, pads, None, auto_pad, 0)[0])


@op("LpPool", since=2, heavy=True)
def lp_pool(X, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, p=2, pads=None, strides=None):
    return _lp_pool(X, p, _pool_window(X, kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)[0])


@op("MaxPool", heavy=True)
def max_pool(
    X, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, pads=None, storage_order=0, strides=None,
    n_outputs=1,
):  # fmt: skip
    geometry, _ = _pool_window(X, kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    x = jnp.asarray(X)
    y = _maxima(x, geometry)
    return (y, _places(lax.stop_gradient(x), y, geometry, "F" if storage_order else "C")) if n_outputs > 1 else y


def _places(x, y, geometry, order):
    """The index of the first maximum of each window in the flat input; columns first within a channel if order is F."""
    kernel, strides, dilations, pads = geometry
    extents = x.shape[2:]
    index = np.arange(math.prod(extents)).reshape((1, 1, *extents), order=order)
    place, seen = (
        jnp.stack(list(taps(v, kernel, strides, pads, dilations, fill)), axis=2)
        for v, fill in ((index, -1), (x, _least(x.dtype)))
    )
    hit = ((seen == y[:, :, None]) | (seen != seen)) & (place >= 0)
    first = argmax(hit.astype(np.int8), 2)[:, :, None]
    local = jnp.take_along_axis(jnp.broadcast_to(place, seen.shape), first, axis=2)[:, :, 0]
    row, column = (lax.broadcasted_iota(np.int64, local.shape, i) for i in (0, 1))
    return local + (row * x.shape[1] + column) * math.prod(extents)


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
    """The sum as a product, which XLA computes once. A plain sum it may fuse into several readers, each with roundings
    of its own, and a Softmax behind it then subtracts a maximum that is none (NaN at activations of 1e10)."""
    x, axes = X.astype(wide_dtype(X)), _spatial(X)
    if is_known(x):
        return x.mean(axis=axes, keepdims=True).astype(X.dtype)
    ones = jnp.ones(X.shape[2:], x.dtype)
    mean = lax.dot_general(x, ones, ((axes, range(len(axes))), ((), ()))) / ones.sum()
    return lax.expand_dims(mean, axes).astype(X.dtype)


@op("GlobalMaxPool")
def global_max_pool(X):
    return X.max(axis=_spatial(X), keepdims=True)


def _global_lp_pool(X, p):
    total = _power(abs(X.astype(wide_dtype(X))), p).sum(axis=_spatial(X), keepdims=True)
    return root(total, p).astype(X.dtype)


@op("GlobalLpPool")
def global_lp_pool_1(X, *, p=2.0):
    return _global_lp_pool(X, p)


@op("GlobalLpPool", since=2)
def global_lp_pool(X, *, p=2):
    return _global_lp_pool(X, p)
