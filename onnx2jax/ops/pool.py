"""Pooling: one window, several reductions."""

from __future__ import annotations

import functools
import math
from inspect import Parameter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import HALF, argmax, dims, is_known
from .cast import is_float
from .conv import MAX_TAPS, WINDOW, count_blocks, taps, window_of
from .indexing import in_32_bits
from .norm import root
from .registry import Static, op, taking

POOL = {name: WINDOW[name] for name in ("auto_pad", "pads", "strides")} | {"kernel_shape": Parameter.empty}


def _pool_window(x, *, kernel_shape, auto_pad, ceil_mode=0, **attributes):
    """(window, window as given): ceil_mode adds to the pads of the first."""
    given = window_of(x.shape[2:], kernel_shape or (), auto_pad=auto_pad, **attributes)
    count_blocks(x.shape[2:], given)  # does the window fit?
    around = list(given.pads)
    if ceil_mode and auto_pad in ("NOTSET", ""):
        for i, (n, span, _, s, (before, after), _) in enumerate(given.along(x.shape[2:], given.spans)):
            room = n + before + after - span
            # a window that would start in the padding behind the input does not exist
            if -(-room // s) * s < n + before:
                around[i] = before, after + -room % s
    return given._replace(pads=tuple(around)), given


FEW_TAPS = 9
"""Windows of float16 up to this size are reduced at once; 5x5 take 0.07 ms axis by axis, and 0.4 at once."""


def _reduce(x, init, combine, window):
    ones = (1, 1)
    return lax.reduce_window(
        x, np.array(init, x.dtype), combine, (*ones, *window.kernel), (*ones, *window.strides),
        ((0, 0), (0, 0), *window.pads), window_dilation=(*ones, *window.dilations),
    )  # fmt: skip


def _reduce_by_axis(x, init, combine, window):
    """The same, one axis after the other, by shifted operands: on the CPU 2 to 30 times as fast."""
    for alone in window.by_axis():
        x = functools.reduce(combine, taps(x, alone, init))
    return x


def _pool(x, init, combine, window):
    if sum(window.kernel) > MAX_TAPS:
        return _reduce(x, init, combine, window)
    default, cpu = (lambda v, f=f: f(v, init, combine, window) for f in (_reduce, _reduce_by_axis))
    if combine is lax.max and x.dtype in HALF:
        cpu = functools.partial(_maxima_of_halves, init=init, window=window)
    return lax.platform_dependent(x, cpu=cpu, default=default)


def _maxima_of_halves(x, init, window):
    """In float32, which is as exact, and spares conversions at each comparison. Shifted float16 would be converted
    anew for every tap: behind a convolution 3x3 maxima of 111x111 pixels and 64 channels take 1.3 ms rather than 3.4,
    and 0.6 rather than 1.1 of bfloat16."""
    few = x.dtype == np.float16 and math.prod(window.kernel) <= FEW_TAPS
    return (_reduce if few else _reduce_by_axis)(x.astype(np.float32), init, lax.max, window).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _maxima(x, window):
    return _pool(x, _least(x.dtype), lax.max, window)


@_maxima.defjvp
def _maxima_jvp(window, primals, tangents):
    """The derivative goes to the first of equal maxima, as ``reduce_window`` has it."""
    by_axis = functools.partial(_first_by_axis, window=window)
    whole = functools.partial(_reduce, init=_least(primals[0].dtype), combine=lax.max, window=window)
    if max(window.dilations) > 1:  # JAX cannot transpose such a reduce_window
        form = by_axis
    elif sum(window.kernel) > MAX_TAPS:
        form = whole
    else:
        form = functools.partial(lax.platform_dependent, cpu=by_axis, default=whole)
    return jax.jvp(form, primals, tangents)


def _first_by_axis(x, window):
    """The maxima by selections, whose derivative XLA:CPU computes up to 20 times as fast as that of reduce_window.

    The last axis comes first, so that of equal maxima it is the first in row-major order that is selected.
    """
    for alone in reversed([*window.by_axis()]):
        x = functools.reduce(lambda y, tap: jnp.where((y >= tap) | (y != y), y, tap), taps(x, alone, _least(x.dtype)))
    return x


def _least(dtype):
    return -np.inf if is_float(dtype) else jnp.iinfo(dtype).min


def _counts(extents, window, given, include_pad):
    """How many elements each window holds (outputs...): of the input, or of the input and its explicit padding."""
    result = np.ones(())
    for n, b, (before, after), k, s, _, d in window.along(extents, count_blocks(extents, window), given.pads):
        place = np.arange(b)[:, None] * s - before + np.arange(k) * d
        low, high = (-before, n + after) if include_pad else (0, n)
        result = np.multiply.outer(result, ((place >= low) & (place < high)).sum(1))
    return result


@op("AveragePool", heavy=True, unsharded=True, half="float32")
@taking(**POOL, ceil_mode=0, dilations=None)
def average_pool(X, *, count_include_pad=0, **attributes):
    window, given = _pool_window(X, **attributes)
    total = _pool(jnp.asarray(X), 0, lax.add, window)
    counts = _counts(X.shape[2:], window, given, count_include_pad)
    return total / jnp.asarray(np.maximum(counts, 1), total.dtype)


def _norm(X, p, total):
    """The p-norm by a function that sums: of a window, or of the whole image."""
    return root(total(X * X if p == 2 else abs(X) ** p), p)


@op("LpPool", since=2, heavy=True, unsharded=True, half="float32")
@taking(**POOL, ceil_mode=0, dilations=None)
def lp_pool(X, *, p=2, **attributes):
    window, _ = _pool_window(X, **attributes)
    return _norm(X, p, lambda x: _pool(jnp.asarray(x), 0, lax.add, window))


@op("LpPool", half="float32")
@taking(**POOL | {"kernel_shape": None, "p": 2.0})
def lp_pool_1(X, **attributes):
    return lp_pool(X, **attributes)


@op("MaxPool", heavy=True, unsharded=True)
@taking(**POOL, ceil_mode=0, dilations=None)
def max_pool(X, *, storage_order=0, n_outputs=1, **attributes):
    (window, _), x = _pool_window(X, **attributes), jnp.asarray(X)
    y = _maxima(x, window)
    return (y, _places(lax.stop_gradient(x), y, window, "F" if storage_order else "C")) if n_outputs > 1 else y


def _places(x, y, window, order):
    """The index of the first maximum of each window in the flat input; columns first within a channel if order is F."""
    extents = x.shape[2:]
    index = np.arange(math.prod(extents)).reshape((1, 1, *extents), order=order)
    place, seen = (jnp.stack(list(taps(v, window, fill)), axis=2) for v, fill in ((index, -1), (x, _least(x.dtype))))
    hit = ((seen == y[:, :, None]) | (seen != seen)) & (place >= 0)
    first = argmax(hit.astype(np.int8), 2)[:, :, None]
    local = jnp.take_along_axis(jnp.broadcast_to(place, seen.shape), first, axis=2)[:, :, 0]
    row, column = (lax.broadcasted_iota(np.int64, local.shape, i) for i in (0, 1))
    return local + (row * x.shape[1] + column) * math.prod(extents)


@op("MaxUnpool", since=9)
def max_unpool(X, I, output_shape: Static = None, *, kernel_shape, pads=None, strides=None):  # noqa: E741
    """Put every maximum back where its index says, zeros elsewhere; a larger output_shape adds zeros behind."""
    window, x = window_of(X.shape[2:], kernel_shape, strides, pads), jnp.asarray(X)
    image = [(n - 1) * s - sum(p) + k for n, k, s, p, _ in window.along(X.shape[2:])]
    flat = jnp.zeros(math.prod((*x.shape[:2], *image)), x.dtype)
    y = (
        flat.at[in_32_bits(jnp.asarray(I).reshape(-1), flat.size)]
        .set(x.reshape(-1), mode="drop")
        .reshape(*x.shape[:2], *image)
    )
    target = y.shape if output_shape is None else dims(output_shape)
    return lax.pad(y, np.zeros((), x.dtype), [(0, n - m, 0) for n, m in zip(target, y.shape, strict=True)])


def _over_image(x):
    return tuple(range(2, x.ndim))


@op("GlobalAveragePool", unsharded=True, half="float32")
def global_average_pool(X):
    """The mean as a product, which XLA computes once. A plain sum it may fuse into several readers, each with roundings
    of its own, and a Softmax behind it then subtracts a maximum that is none (NaN at activations of 1e10)."""
    axes = _over_image(X)
    if is_known(X) or 0 in X.shape[2:]:
        return X.mean(axis=axes, keepdims=True)
    ones = jnp.ones(X.shape[2:], X.dtype)
    return lax.expand_dims(lax.dot_general(X, ones / ones.sum(), ((axes, range(len(axes))), ((), ()))), axes)


@op("GlobalMaxPool", unsharded=True)
def global_max_pool(X):
    return X.max(axis=_over_image(X), keepdims=True)


@op("GlobalLpPool", since=2, unsharded=True, half="float32")
def global_lp_pool(X, *, p=2):
    return _norm(X, p, lambda x: x.sum(axis=_over_image(x), keepdims=True))


op("GlobalLpPool", half="float32")(taking(p=2.0)(global_lp_pool))
