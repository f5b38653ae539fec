"""Reductions along axes, arg-extrema, cumulative sums, top-k and unique values.

NaN sorts above any number in TopK and Unique. ReduceMax and ReduceMin propagate NaN; ArgMax and ArgMin return its
index.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import accumulator, argmax, axes_of, axis_of, dims, flatten_or_axis, is_known, is_traced, xp
from .cast import cast_to, is_float
from .indexing import gather_elements
from .norm import root
from .registry import Static, StaticIfKnown, op
from .shape import padded, reshaped
from .traced import with_unfolded_cotangent


def _folding(numpy_function, lax_function, start):
    """A reduction over axes with keepdims; ``start(dtype)`` is the result for an empty array."""

    def fold(x, axes):
        if is_known(x):
            initial = {} if x.size else {"initial": start(x.dtype)}
            return numpy_function.reduce(x, axes, keepdims=True, dtype=x.dtype, **initial)
        return lax.expand_dims(lax_function(x, axes), axes)

    return fold


def _extreme(dtype, largest):
    """The greatest (or least) value of a dtype."""
    if is_float(dtype):
        return dtype.type(np.inf if largest else -np.inf)
    return largest if dtype.kind == "b" else getattr(np.iinfo(dtype), "max" if largest else "min")


_sum = _folding(np.add, lax.reduce_sum, lambda _: 0)

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
        raise ValueError(f"the integer mean of no elements is undefined (axes {axes} of shape {x.shape})")
    count = total.dtype.type(count)
    return (total - xp.fmod(total, count)) // count  # integer division truncates


def _log(x):
    """The logarithm; its derivative at 0, which is infinite, is taken as 0 to avoid NaN."""
    return xp.where(x == 0, -np.inf, xp.log(xp.where(x == 0, 1, x)))


def _log_sum_exp(x, axes):
    top = _max(x if is_known(x) else lax.stop_gradient(x), axes)
    top = xp.where(xp.isfinite(top), top, 0)
    return _log(_sum(xp.exp(x - top), axes)) + top


REDUCTIONS = {  # name: (function of data and axes, whether integers are computed in float64, limits)
    "ReduceSum": (_sum, False, ""),
    "ReduceProd": (_folding(np.multiply, lax.reduce_prod, lambda _: 1), False, ""),
    "ReduceMax": (_max, False, "of no elements: the least value of the dtype (-inf for floats)"),
    "ReduceMin": (_min, False, "of no elements: the greatest value of the dtype (inf for floats)"),
    "ReduceMean": (_mean, False, "of no elements: NaN for floats, integers raise"),
    "ReduceL1": (lambda x, axes: _sum(abs(x), axes), False, ""),
    "ReduceSumSquare": (lambda x, axes: _sum(x * x, axes), False, ""),
    "ReduceL2": (lambda x, axes: root(_sum(x * x, axes)), True, ""),
    "ReduceLogSum": (lambda x, axes: _log(_sum(x, axes)), True, ""),
    "ReduceLogSumExp": (_log_sum_exp, True, ""),
}


def _reduction(body, in_float):
    def reduction(data, axes: Static = None, *, keepdims=1, noop_with_empty_axes=0):
        has_axes = axes is not None and np.size(axes)
        default = () if noop_with_empty_axes else tuple(range(data.ndim))
        axes = tuple(sorted(axes_of(axes, data.ndim))) if has_axes else default
        work = data.astype(np.float64) if in_float and not is_float(data.dtype) else data
        result = body(work, axes)
        # Of floats -inf and NaN, too, become the same integer in NumPy and XLA; others may be symbolic dimensions.
        result = result.astype(data.dtype) if work is data else cast_to(result, data.dtype)
        return result if keepdims else reshaped(result, [n for i, n in enumerate(data.shape) if i not in axes])

    return reduction


for _name, (_body, _in_float, _limits) in REDUCTIONS.items():
    op(_name, half="float32", wide=_body not in (_max, _min), limits=_limits)(_reduction(_body, _in_float))


def _arg_extremum(*, least):
    def arg_extremum(data, *, axis=0, keepdims=1, select_last_index=0):
        axis = axis_of(axis, data.ndim)
        data = xp.flip(data, axis) if select_last_index else data
        index = xp.expand_dims(argmax(data, axis, least=least), axis)
        index = data.shape[axis] - 1 - index if select_last_index else index
        return index if keepdims else reshaped(index, data.shape[:axis] + data.shape[axis + 1 :])

    return arg_extremum


op("ArgMax", half="float32", exact=("data",))(_arg_extremum(least=False))
op("ArgMin", half="float32", exact=("data",))(_arg_extremum(least=True))


def _cumulative(name, start):
    def cumulative(x, axis: Static, *, exclusive=0, reverse=0):
        axis = axis_of(np.ravel(axis)[0], x.ndim)
        if is_known(x):
            y = getattr(np, name)(np.flip(x, axis) if reverse else x, axis, dtype=x.dtype)
            y = np.flip(y, axis) if reverse else y
        else:
            y = with_unfolded_cotangent(getattr(lax, name)(x, axis, reverse=bool(reverse)))
        if exclusive and y.shape[axis]:  # shifted by one, starting with the neutral element
            shift = np.eye(y.ndim, dtype=int)[axis]
            y = padded(y, *((-shift, shift) if reverse else (shift, -shift)), value=np.asarray(start, y.dtype))
        return y

    return cumulative


op("CumSum", since=11, half="float32", wide=True)(_cumulative("cumsum", 0))
op("CumProd", since=26, half="float32", wide=True)(_cumulative("cumprod", 1))


def _rank_key(x, largest):
    """A key whose descending order is TopK's: -0 equals 0, and NaN is greater than infinity.

    ``lax.top_k`` orders floats by IEEE 754's total order, in which a negative NaN is the least.
    """
    if not is_float(x.dtype):
        return x if largest else ~x
    x = x if largest else -x
    x = xp.where(x == 0, x.dtype.type(0), x)
    return xp.where(x != x, x.dtype.type(np.nan if largest else -np.nan), x)


def _order(x, largest):
    """The stable order of NumPy's elements along the last axis; NumPy, too, sorts NaN as the greatest."""
    if not largest:
        return np.argsort(x, -1, kind="stable")
    return x.shape[-1] - 1 - np.flip(np.argsort(np.flip(x, -1), -1, kind="stable"), -1)


@op("TopK", since=10, exact=("X",), limits="sorted=0 also sorts; NaN sorts as the greatest value")
def top_k(X, K: Static, *, axis=-1, largest=1, sorted=1):
    """(values, indices) of the k greatest or least elements; ties are ordered by index."""
    del sorted  # sorted=0 permits any order
    if K.size != 1:
        raise ValueError(f"K must have one element, not the shape {[*K.shape]}")
    axis, (k,) = axis_of(axis, X.ndim), dims(K.reshape(1))
    if not 0 <= k <= X.shape[axis]:
        raise ValueError(f"K ({k}) must be between 0 and the extent {X.shape[axis]} of axis {axis}")
    if is_known(X):
        indices = _order(np.moveaxis(X.astype(accumulator(X.dtype)), axis, -1), largest)[..., :k]
    else:
        key = jnp.moveaxis(_rank_key(X, largest), axis, -1)
        indices = lax.top_k(lax.stop_gradient(key), k)[1].astype(np.int64)
    indices = xp.moveaxis(indices, -1, axis)
    return gather_elements(X, indices, axis=axis), indices


@op("TopK")
def top_k_1(X, *, k, axis=-1):
    """TopK-1, where k is an attribute."""
    return top_k(X, np.asarray(k), axis=axis)


_PADDED = (
    "data-dependent output shape; under jit padded to the size of X, if scatters alone read what is gathered by it"
)


@op("NonZero", since=9, exact=("X",), limits=_PADDED)
def non_zero(X: StaticIfKnown, *, dropped):
    """The indices of what is not zero; of a traced X padded with indices out of range, if scatters drop them."""
    if is_traced(X):
        dropped()
        flat = jnp.nonzero(jnp.ravel(X), size=X.size, fill_value=X.size)[0].astype(np.int64)
        indices = jnp.stack(jnp.unravel_index(flat, X.shape))
        return jnp.where(flat == X.size, np.iinfo(np.int64).max, indices)
    if X.ndim == 0:  # no axes: shape (0, N)
        return np.zeros((0, int(bool(X))), np.int64)
    return np.array(np.nonzero(X), np.int64)


@op("Unique", since=11, limits="data-dependent output shape; NaNs are equal to each other")
def unique(X: Static, *, axis=None, sorted=1):
    """(unique elements or slices along an axis, first indices, inverse indices, counts)."""
    X, axis = flatten_or_axis(X, axis)
    # Integer ranks make rows of any element type (strings, NaN, bfloat16) sortable.
    codes = np.unique(X.astype(accumulator(X.dtype)), return_inverse=True)[1].reshape(X.shape)
    rows = np.moveaxis(codes, axis, 0).reshape(X.shape[axis], math.prod(codes.shape) // max(X.shape[axis], 1))
    _, first, inverse, counts = np.unique(rows, return_index=True, return_inverse=True, return_counts=True, axis=0)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return np.take(X, first, axis), first, inverse, counts
