"""Reductions along axes, and what orders elements: arg-extrema, running sums, top k, unique values.

NaN counts as greater than any number where elements are put in order (TopK, Unique). ReduceMax and ReduceMin return
a NaN that they meet, and ArgMax and ArgMin its place.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import accumulator, argmax, axes_of, axis_of, is_known, row_or_axis, xp
from .cast import is_float
from .indexing import gather_elements
from .norm import root
from .registry import Static, op
from .shape import padded, reshaped


def _folding(numpy_function, lax_function, start):
    """A reducer that keeps the axes it reduces, so that its result broadcasts against what it was given."""

    def fold(x, axes):
        if is_known(x):
            of_nothing = {} if x.size else {"initial": start(x.dtype)}
            return numpy_function.reduce(x, axes, keepdims=True, dtype=x.dtype, **of_nothing)
        return lax.expand_dims(lax_function(x, axes), axes)

    return fold


def _extreme(dtype, largest):
    """What is above (or below) every other value of the type."""
    if is_float(dtype):
        return dtype.type(np.inf if largest else -np.inf)
    return largest if dtype.kind == "b" else getattr(np.iinfo(dtype), "max" if largest else "min")


_sum = _folding(np.add, lax.reduce_sum, lambda _: 0)
_prod = _folding(np.multiply, lax.reduce_prod, lambda _: 1)
_max = _folding(np.maximum, lax.reduce_max, lambda dtype: _extreme(dtype, largest=False))
_min = _folding(np.minimum, lax.reduce_min, lambda dtype: _extreme(dtype, largest=True))


def _mean(x, axes):
    count = math.prod(x.shape[a] for a in axes)
    if not isinstance(count, int):
        count = jnp.asarray(count).astype(x.dtype)
    if is_float(x.dtype):
        return _sum(x, axes) / count
    total = _sum(x.astype(np.uint64 if x.dtype.kind == "u" else np.int64), axes)
    if count == 0:
        raise ValueError(f"the mean of no elements is undefined for integers (axes {axes} of shape {x.shape})")
    count = total.dtype.type(count)
    return (total - xp.fmod(total, count)) // count  # integers divide towards zero


def _log(x):
    """The slope at 0, which is not finite, is taken as 0, instead of one that ends in NaN."""
    return xp.where(x == 0, -np.inf, xp.log(xp.where(x == 0, 1, x)))


def _log_sum_exp(x, axes):
    top = _max(x if is_known(x) else lax.stop_gradient(x), axes)
    top = xp.where(xp.isfinite(top), top, 0)
    return _log(_sum(xp.exp(x - top), axes)) + top


REDUCTIONS = {  # name: (function of data and axes, whether integers are reduced in float64, limits)
    "ReduceSum": (_sum, False, ""),
    "ReduceProd": (_prod, False, ""),
    "ReduceMax": (_max, False, "of nothing: the least of the type, -inf for floats"),
    "ReduceMin": (_min, False, "of nothing: the greatest of the type, inf for floats"),
    "ReduceMean": (_mean, False, "of nothing: NaN; of no integers it raises"),
    "ReduceL1": (lambda x, axes: _sum(abs(x), axes), False, ""),
    "ReduceSumSquare": (lambda x, axes: _sum(x * x, axes), False, ""),
    "ReduceL2": (lambda x, axes: root(_sum(x * x, axes)), True, ""),
    "ReduceLogSum": (lambda x, axes: _log(_sum(x, axes)), True, ""),
    "ReduceLogSumExp": (_log_sum_exp, True, ""),
}


def _reduction(body, in_float):
    def reduction(data, axes: Static = None, *, keepdims=1, noop_with_empty_axes=0):
        given = axes is not None and np.size(axes)
        everything = () if noop_with_empty_axes else tuple(range(data.ndim))
        axes = tuple(sorted(axes_of(axes, data.ndim))) if given else everything
        work = data.astype(np.float64) if in_float and not is_float(data.dtype) else data
        result = body(work, axes).astype(data.dtype)
        return result if keepdims else reshaped(result, [n for i, n in enumerate(data.shape) if i not in axes])

    return reduction


for _name, (_body, _in_float, _limits) in REDUCTIONS.items():
    op(_name, half="float32", limits=_limits)(_reduction(_body, _in_float))


def _arg_extremum(*, least):
    def arg_extremum(data, *, axis=0, keepdims=1, select_last_index=0):
        axis = axis_of(axis, data.ndim)
        data = xp.flip(data, axis) if select_last_index else data
        index = xp.expand_dims(argmax(data, axis, least=least), axis)
        index = data.shape[axis] - 1 - index if select_last_index else index
        return index if keepdims else reshaped(index, data.shape[:axis] + data.shape[axis + 1 :])

    return arg_extremum


op("ArgMax", half="float32")(_arg_extremum(least=False))
op("ArgMin", half="float32")(_arg_extremum(least=True))


def _cumulative(name, start):
    def cumulative(x, axis: Static, *, exclusive=0, reverse=0):
        axis = axis_of(np.ravel(axis)[0], x.ndim)
        if is_known(x):
            y = getattr(np, name)(np.flip(x, axis) if reverse else x, axis, dtype=x.dtype)
            y = np.flip(y, axis) if reverse else y
        else:
            y = getattr(lax, name)(x, axis, reverse=bool(reverse))
        if exclusive and y.shape[axis]:  # one step later, beginning with the neutral element
            shift = np.eye(y.ndim, dtype=int)[axis]
            y = padded(y, *((-shift, shift) if reverse else (shift, -shift)), value=np.asarray(start, y.dtype))
        return y

    return cumulative


op("CumSum", since=11, half="float32")(_cumulative("cumsum", 0))
op("CumProd", since=26, half="float32")(_cumulative("cumprod", 1))


def _rank_key(x, largest):
    """What orders elements with the first ones greatest: -0 equals 0, and NaN is above infinity."""
    if not is_float(x.dtype):
        return x if largest else ~x
    x = x if largest else -x
    x = xp.where(x == 0, x.dtype.type(0), x)
    return xp.where(x != x, x.dtype.type(np.nan if largest else -np.inf), x)


@op("TopK", since=10, limits="sorted=0 sorts as well; NaN counts as greatest")
def top_k(X, K: Static, *, axis=-1, largest=1, sorted=1):
    """Of equal elements the one with the lower index comes first."""
    del sorted  # 0 leaves the order open, so the sorted one serves
    axis, k = axis_of(axis, X.ndim), int(K.item())
    if not 0 <= k <= X.shape[axis]:
        raise ValueError(f"K ({k}) must be between 0 and the extent {X.shape[axis]} of axis {axis}")
    key = xp.moveaxis(_rank_key(X, largest), axis, -1)
    if is_known(X):
        key = np.flip(key.astype(accumulator(X.dtype)), -1)  # a stable ascending sort, read from its end
        indices = (X.shape[axis] - 1 - np.flip(np.argsort(key, -1, kind="stable"), -1))[..., :k]
    else:
        indices = lax.top_k(lax.stop_gradient(key), k)[1].astype(np.int64)
    indices = xp.moveaxis(indices, -1, axis)
    return gather_elements(X, indices, axis=axis), indices


@op("TopK")
def top_k_1(X, *, k, axis=-1):
    """TopK-1, with k in an attribute."""
    return top_k(X, np.asarray(k), axis=axis)


@op("NonZero", since=9, limits="its output's shape depends on data")
def non_zero(X: Static):
    if X.ndim == 0:  # no axes, so no coordinates: shape (0, N)
        return np.zeros((0, int(bool(X))), np.int64)
    return np.array(np.nonzero(X), np.int64)


@op("Unique", since=11, limits="its output's shape depends on data; NaN are equal to each other")
def unique(X: Static, *, axis=None, sorted=1):
    """Unique elements or, along an axis, subtensors; with where they first are, where each went, and how many."""
    X, axis = row_or_axis(X, axis)
    # Codes that rank the elements make all types (strings, NaN, bfloat16) sortable as rows of integers.
    codes = np.unique(X.astype(accumulator(X.dtype)), return_inverse=True)[1].reshape(X.shape)
    rows = np.moveaxis(codes, axis, 0).reshape(X.shape[axis], math.prod(codes.shape) // max(X.shape[axis], 1))
    _, first, inverse, counts = np.unique(rows, return_index=True, return_inverse=True, return_counts=True, axis=0)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return np.take(X, first, axis), first, inverse, counts
