"""Pooling: reductions over sliding windows, and over whole images."""

from __future__ import annotations

import functools
import math
from inspect import Parameter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..limits import POOL_TAPS, UNROLLED_TAPS
from .arrays import HALF, argmax, dims, is_known, xp
from .cast import is_float
from .indexing import WRITES, check_indices, in_32_bits
from .norm import root
from .registry import Static, op, taking
from .traced import unfolded
from .window import WINDOW, count_blocks, taps, window_of

POOL = {name: WINDOW[name] for name in ("auto_pad", "pads", "strides")} | {"kernel_shape": Parameter.empty}


def _pool_window(x, *, kernel_shape, auto_pad, ceil_mode=0, **attributes):
    """(window with the padding of ceil_mode, window as given)."""
    declared = window_of(x.shape[2:], kernel_shape or (), auto_pad=auto_pad, **attributes)
    pads = list(declared.pads)
    if ceil_mode and auto_pad in ("NOTSET", ""):
        for i, (n, span, _, s, (before, after), _) in enumerate(declared.along(x.shape[2:], declared.spans)):
            room = n + before + after - span
            # a window must not start in the padding after the input
            if -(-room // s) * s < n + before:
                pads[i] = before, after + -room % s
    window = declared._replace(pads=tuple(pads))
    count_blocks(x.shape[2:], window)  # raises if the window does not fit; with ceil_mode it may exceed the image
    return window, declared


def _reduce(x, init, combine, window):
    ones = (1, 1)
    return lax.reduce_window(
        x, np.array(init, x.dtype), combine, (*ones, *window.kernel), (*ones, *window.strides),
        ((0, 0), (0, 0), *window.pads), window_dilation=(*ones, *window.dilations),
    )  # fmt: skip


def _reduce_by_axis(x, init, combine, window):
    """`_reduce` one axis at a time, by shifted operands: 2 to 30 times as fast on CPUs."""
    for axis_window in window.by_axis():
        x = functools.reduce(combine, taps(x, axis_window, init))
    return x


def _pool(x, init, combine, window):
    if is_known(x):
        return _reduce_by_axis(x, init, {lax.add: np.add, lax.max: np.maximum}[combine], window)
    if sum(window.kernel) > UNROLLED_TAPS:
        return _reduce(x, init, combine, window)
    default, cpu = (lambda v, f=f: f(v, init, combine, window) for f in (_reduce, _reduce_by_axis))
    if combine is lax.max and x.dtype in HALF:
        cpu = functools.partial(_maxima_of_halves, init=init, window=window)
    try:
        return compat.platform_dependent(x, cpu=cpu, default=default)
    except jax.errors.InconclusiveDimensionOperation:  # of symbolic extents: which end of a slice comes first
        return _reduce(x, init, combine, window)


def _maxima_of_halves(x, init, window):
    """Maxima of half precision, computed in float32: exact, and without a conversion for every tap.

    After a convolution, 3x3 maxima of 64 channels of 111x111 pixels take 1.3 ms instead of 3.4 (bfloat16: 0.6 instead
    of 1.1).
    """
    few = x.dtype == np.float16 and math.prod(window.kernel) <= POOL_TAPS
    return (_reduce if few else _reduce_by_axis)(x.astype(np.float32), init, lax.max, window).astype(x.dtype)


def _maxima(x, window):
    return _pool(x, _lowest(x.dtype), lax.max, window) if is_known(x) else _differentiable_maxima(x, window)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _differentiable_maxima(x, window):
    return _pool(x, _lowest(x.dtype), lax.max, window)


@_differentiable_maxima.defjvp
def _maxima_jvp(window, primals, tangents):
    """The derivative of the maxima; the first of equal maxima receives it, as with ``reduce_window``."""
    by_axis = functools.partial(_first_by_axis, window=window)
    whole = functools.partial(_reduce, init=_lowest(primals[0].dtype), combine=lax.max, window=window)
    if max(window.dilations) > 1:  # JAX cannot transpose such a reduce_window
        form = by_axis
    elif sum(window.kernel) > UNROLLED_TAPS:
        form = whole
    else:
        form = functools.partial(compat.platform_dependent, cpu=by_axis, default=whole)
    return jax.jvp(form, primals, tangents)


def _first_by_axis(x, window):
    """The maxima by selection; on XLA:CPU its derivative is up to 20 times as fast as that of reduce_window.

    Reduces the last axis first, so that the first of equal maxima in row-major order is selected.
    """
    for axis_window in reversed([*window.by_axis()]):
        operands = taps(x, axis_window, _lowest(x.dtype))
        x = functools.reduce(lambda y, tap: jnp.where((y >= tap) | (y != y), y, tap), operands)
    return x


def _lowest(dtype):
    return -np.inf if is_float(dtype) else jnp.iinfo(dtype).min


def _counts(extents, window, declared, include_pad):
    """The number of elements per window [outputs...]: of the input, or of the input and its explicit padding."""
    numbers = np if all(isinstance(n, int) for n in extents) else jnp  # symbolic extents are not known
    result = numbers.ones((), int)
    for n, b, (before, after), k, s, _, d in window.along(extents, count_blocks(extents, window), declared.pads):
        index = numbers.arange(b)[:, None] * s - before + np.arange(k) * d
        low, high = (-before, numbers.asarray(n + after)) if include_pad else (0, numbers.asarray(n))
        result = numbers.multiply.outer(result, ((index >= low) & (index < high)).sum(1))
    return result


@op("AveragePool", heavy=True, unsharded=True, half="float32")
@taking(**POOL, ceil_mode=0, dilations=None)
def average_pool(X, *, count_include_pad=0, **attributes):
    window, declared = _pool_window(X, **attributes)
    total = _pool(X, 0, lax.add, window)
    counts = _counts(X.shape[2:], window, declared, count_include_pad)
    return total / xp.asarray(xp.maximum(counts, 1), dtype=total.dtype)


def _norm(X, p, total):
    """The p-norm, where ``total`` sums over windows or over the whole image."""
    return root(total(X * X if p == 2 else abs(X) ** p), p)


@op("LpPool", since=2, heavy=True, unsharded=True, half="float32", wide=True)
@taking(**POOL, ceil_mode=0, dilations=None)
def lp_pool(X, *, p=2, **attributes):
    window, _ = _pool_window(X, **attributes)
    return _norm(X, p, lambda x: _pool(x, 0, lax.add, window))


@op("LpPool", half="float32")
@taking(**POOL | {"kernel_shape": None, "p": 2.0})
def lp_pool_1(X, **attributes):
    return lp_pool(X, **attributes)


@op("MaxPool", heavy=True, unsharded=True)
@taking(**POOL, ceil_mode=0, dilations=None)
def max_pool(X, *, storage_order=0, n_outputs=1, **attributes):
    window, _ = _pool_window(X, **attributes)
    y = _maxima(X, window)
    return (y, _argmax_indices(lax.stop_gradient(X), y, window, "F" if storage_order else "C")) if n_outputs > 1 else y


def _argmax_indices(x, y, window, order):
    """The flat index of the first maximum per window; within a channel in row-major (C) or column-major (F) order."""
    extents = x.shape[2:]
    flat = np.arange(math.prod(extents)).reshape((1, 1, *extents), order=order)
    index, value = (jnp.stack(list(taps(v, window, fill)), axis=2) for v, fill in ((flat, -1), (x, _lowest(x.dtype))))
    hit = ((value == y[:, :, None]) | (value != value)) & (index >= 0)
    first = argmax(hit.astype(np.int8), 2)[:, :, None]
    local = jnp.take_along_axis(jnp.broadcast_to(index, value.shape), first, axis=2)[:, :, 0]
    row, column = (lax.broadcasted_iota(np.int64, local.shape, i) for i in (0, 1))
    return local + (row * x.shape[1] + column) * math.prod(extents)


@op("MaxUnpool", since=9, limits=WRITES)
def max_unpool(X, I, output_shape: Static = None, *, kernel_shape, pads=None, strides=None):  # noqa: E741
    """Scatters each maximum to its index in an array of zeros; a larger output_shape adds zeros at the end."""
    window, x = window_of(X.shape[2:], kernel_shape, strides, pads), jnp.asarray(X)
    image = [(n - 1) * s - sum(p) + k for n, k, s, p, _ in window.along(X.shape[2:])]
    flat = jnp.zeros(math.prod((*x.shape[:2], *image)), x.dtype)
    check_indices(I, flat.size, "the flattened output", least=0)
    index = jnp.asarray(unfolded(I)).reshape(-1)
    index = in_32_bits(jnp.where(index < 0, flat.size, index), flat.size)  # from the end in JAX, invalid in ONNX
    y = flat.at[index].set(x.reshape(-1), mode="drop").reshape(*x.shape[:2], *image)
    target = y.shape if output_shape is None else dims(output_shape)
    return lax.pad(y, np.zeros((), x.dtype), [(0, n - m, 0) for n, m in zip(target, y.shape, strict=True)])


def _spatial_axes(x):
    return tuple(range(2, x.ndim))


@op("GlobalAveragePool", unsharded=True, half="float32")
def global_average_pool(X):
    """The mean over spatial axes; as a matrix product on a CPU.

    A CPU may recompute a sum in each consumer that XLA fuses it into, with different rounding: a Softmax after it then
    subtracts a value that is not the maximum (NaN for activations of 1e10). It does not recompute a product. On a GPU
    and a TPU a product rounds the image to TF32 or bfloat16, and stores it in another layout first.
    """
    axes = _spatial_axes(X)

    def mean(X):
        return X.mean(axis=axes, keepdims=True)

    def product(X):
        ones = jnp.ones(X.shape[2:], X.dtype)
        return lax.expand_dims(lax.dot_general(X, ones / ones.sum(), ((axes, range(len(axes))), ((), ()))), axes)

    return mean(X) if is_known(X) or 0 in X.shape[2:] else compat.platform_dependent(X, cpu=product, default=mean)


@op("GlobalMaxPool", unsharded=True)
def global_max_pool(X):
    return X.max(axis=_spatial_axes(X), keepdims=True)


@op("GlobalLpPool", since=2, unsharded=True, half="float32", wide=True)
def global_lp_pool(X, *, p=2):
    return _norm(X, p, lambda x: x.sum(axis=_spatial_axes(x), keepdims=True))


op("GlobalLpPool", half="float32")(taking(p=2.0)(global_lp_pool))
