"""Slices, gathers, scatters and masks.

Known indices are checked and raise ValueError when out of range, as ONNX requires. A compiled function cannot raise:
an out-of-range gather reads NaN (for integers the extreme of their dtype), and an out-of-range scatter writes nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..errors import KnownValueError
from .arrays import FIX, axes_of, axis_of, check_shape, dims, flatten_or_axis, is_known, is_string, is_traced, xp
from .elementwise import WITHDRAWN
from .registry import Relative, Static, deprecated, op
from .traced import difference, holds, terms, unfolded

BOUNDS = "out-of-range indices raise if known; traced ones read NaN (integers: the extreme of their dtype)"
WRITES = "out-of-range indices raise if known; traced ones write nothing"
_LENGTHS = "lengths beyond the extent raise if known; traced ones read NaN; negative ones raise, or reverse nothing"

INT32_MAX = 2**31 - 1


def check_indices(indices, extent, axis, least=None):
    """Raise ValueError for known indices outside [-extent, extent), or [least, extent), of an axis or a named array."""
    if isinstance(extent, int) and isinstance(indices, np.ndarray) and indices.dtype != object and indices.size:
        low, high, least = int(indices.min()), int(indices.max()), -extent if least is None else least
        if low < least or high >= extent:
            where = axis if isinstance(axis, str) else f"axis {axis}"
            raise ValueError(f"indices ({low} to {high}) are outside [{least}, {extent - 1}] of {where}")


def in_32_bits(indices, extent):
    """Traced int64 indices clamped to int32, out of range where they were: XLA would truncate them to 32 bits."""
    if is_known(indices) or indices.dtype.itemsize < 8 or (isinstance(extent, int) and extent >= INT32_MAX):
        return indices
    return jnp.clip(indices, -extent - 1, extent).astype(np.int32)


def _mesh(shape):
    """The indices along every axis, shaped to broadcast against each other (an open mesh grid)."""
    ranges = [(np if isinstance(n, int) else jnp).arange(n) for n in shape]
    return [r.reshape([-1 if i == j else 1 for j in range(len(shape))]) for i, r in enumerate(ranges)]


@op("Slice", limits="under jit, a traced start needs a known distance to its end, and bounds or a declared shape")
def slice_(data, starts: Relative, ends: Relative, axes: Static = None, steps: Static = None, *, extents):
    (starts, first), (ends, last) = terms(starts), terms(ends)
    axes = axes_of(range(len(starts)) if axes is None else axes, data.ndim)
    steps = (1,) * len(starts) if steps is None else dims(steps)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ValueError(f"starts {starts}, ends {ends}, axes {axes} and steps {steps} must have one length")
    whole, bounds = data, {}
    for k, (axis, *bound) in enumerate(zip(axes, starts, ends, steps, strict=True)):
        if is_traced(first, last) and not is_known(bound):
            declared = extents[axis] if extents is not None and len(extents) == whole.ndim else None
            data = _dynamic_slice(data, axis, bound, (first[k], last[k]), declared)
        else:
            bounds[axis] = _bounds(whole.shape[axis], *bound)
    if type(data) is not np.ndarray or not all(type(e) is int for b in bounds.values() for e in b):
        static = all(is_known([data.shape[a], *b]) for a, b in bounds.items())
        if static and not is_known(data):
            return _lax_slice(data, bounds)
        data = data if static else jnp.asarray(data)
    return data[tuple(slice(*bounds.get(i, (None,))) for i in range(data.ndim))]


@op("DynamicSlice", limits=WITHDRAWN)
def dynamic_slice(data, starts: Relative, ends: Relative, axes: Static = None, *, extents):
    return slice_(data, starts, ends, axes, extents=extents)


def _dynamic_slice(data, axis, bound, traced, declared):
    """The elements of one axis between two traced ends, whose distance is known.

    ``bound`` has the start and end as terms, and the step. Where they may be out of range, ONNX has fewer elements;
    then their number must be ``declared``, and those that are missing read NaN, as in gathers.
    """
    n, (start, end, step), (first, last) = data.shape[axis], bound, traced
    if not isinstance(distance := difference(end, start), int) or step < 1:
        raise KnownValueError(f"the extent of axis {axis} depends on traced ends; {FIX}")
    count = max(-(-distance // step), 0)
    from_start = holds(lambda: start >= 0 and end >= 0 and end <= n)
    if from_start or holds(lambda: start >= -n and start < 0 and end >= -n and end < 0):
        rows = lax.dynamic_slice_in_dim(data, first if from_start else first + n, max(distance, 0), axis)
        return rows if step == 1 else lax.slice_in_dim(rows, 0, None, step, axis)
    if declared != count:
        raise KnownValueError(
            f"axis {axis} of the result has {count} elements only if its traced start is in [0, {n - distance}], which "
            f"nothing in the model shows; {FIX}; or change the model: let Clip bound the start, or declare the shape "
            "of the result, onnx.helper.make_tensor_value_info(name, type, shape), in graph.value_info"
        )
    first, last = (jnp.where(v < 0, v + n, v) for v in traced)
    index = jnp.maximum(first, 0) + np.arange(count, dtype=first.dtype) * step
    return jnp.take(data, in_32_bits(jnp.where(index < last, index, n), n), axis, mode="fill")


def _bounds(n, start, end, step):
    """(start, end, step) of one axis for Python's slice, clamped by ONNX's rules."""
    if type(n) is type(start) is type(end) is int or is_known([n, start, end]):
        last = n if step > 0 else n - 1
        start, end = (min(d + n if d < 0 else d, last) for d in (start, end))
        step = max(min(step, max(n, 1)), -max(n, 1))  # a longer step selects as much, and may not fit XLA's int64
        return max(start, min(last, 0)), end if end >= 0 else (0 if step > 0 else -n - 1), step
    # With symbolic extents jax.numpy clamps; the INT_MAX sentinels of an open end become None.
    sign = 1 if step > 0 else -1
    start = None if isinstance(start, int) and start * sign <= -INT32_MAX else start
    return start, None if isinstance(end, int) and end * sign >= INT32_MAX else end, step


def _lax_slice(data, bounds):
    starts, stops, strides = [0] * data.ndim, list(data.shape), [1] * data.ndim
    for axis, (start, end, step) in bounds.items():
        if step < 0:  # the forward slice that lax.rev then reverses
            count = max(-((max(end, -1) - start) // -step), 0)
            start, end = (start + (count - 1) * step, start + 1) if count else (0, 0)
        starts[axis], stops[axis], strides[axis] = start, max(start, end), abs(step)
    result = lax.slice(data, starts, stops, strides)
    reverse = [axis for axis, (*_, step) in bounds.items() if step < 0]
    return lax.rev(result, reverse) if reverse else result


@op("Gather", limits=BOUNDS)
def gather(data, indices, *, axis=0):
    axis = axis_of(axis, data.ndim)
    extent = data.shape[axis]
    check_indices(indices, extent, axis)
    if is_known([data, indices]):
        return data[(slice(None),) * axis + (indices, ...)]
    if is_known(indices) and isinstance(extent, int):
        if indices.ndim == 0:
            return lax.index_in_dim(data, int(indices), axis, keepdims=False)
        indices = unfolded(indices % max(extent, 1), indices.size * data.size // max(extent, 1))
        return jnp.take(data, indices, axis, mode="clip")
    return jnp.take(data, in_32_bits(indices, extent), axis, mode="fill")


def _take(data, index):
    """``data`` at a tuple of broadcasting index arrays."""
    if is_known([data, *index]):
        return data[(*index, ...)]
    size = math.prod((*lax.broadcast_shapes(*(i.shape for i in index)), *data.shape[len(index) :]))
    index = tuple(unfolded(in_32_bits(i, n), size) for i, n in zip(index, data.shape, strict=False))
    return jnp.asarray(data).at[index].get(mode="fill")


def _positions(data, indices, axis):
    """The index arrays of GatherElements and ScatterElements: each element's own position except along one axis."""
    axis = axis_of(axis, data.ndim)
    sides = [pair for i, pair in enumerate(zip(indices.shape, data.shape, strict=False)) if i != axis]
    if indices.ndim != data.ndim or any(is_known(pair) and pair[0] > pair[1] for pair in sides):
        raise ValueError(f"indices {indices.shape} must not exceed data {data.shape} on axes other than {axis}")
    check_indices(indices, data.shape[axis], axis)
    mesh = _mesh(indices.shape)
    mesh[axis] = indices
    return mesh


def _rows(data, indices, axis):
    """(index arrays, axes in order) of GatherElements and ScatterElements on data transposed to these axes.

    Axes along which the indices repeat come last, without an index array: what is read or written are rows. On a TPU
    v5e, 10000 rows of 64 with one index each are added in 19 thousand cycles rather than 67, and read in 45 rather
    than 148.
    """
    positions, axis = _positions(data, indices, axis), axis_of(axis, data.ndim)
    repeated = () if is_known([data, indices]) else _repeated(indices)
    rows = [i for i in repeated if i != axis and indices.shape[i] == data.shape[i]]
    order = [i for i in range(data.ndim) if i not in rows]
    positions[axis] = indices[tuple(slice(0, 1) if i in rows else slice(None) for i in range(data.ndim))]
    return [positions[i].reshape([positions[i].shape[j] for j in order]) for i in order], (*order, *rows)


def _repeated(indices):
    """The axes along which indices are known to repeat."""
    if not is_known(indices):
        return compat.repeated_axes(indices)
    return [i for i, n in enumerate(indices.shape) if n > 1 and (indices == indices.take([0], i)).all()]


def _ordered_back(x, order):
    return xp.transpose(x, np.argsort(order).tolist())


@op("GatherElements", limits=BOUNDS)
def gather_elements(data, indices, *, axis=0):
    index, order = _rows(data, indices, axis)
    return _ordered_back(_take(xp.transpose(data, order), index), order)


def _tuples(data, indices, batch_dims=0):
    """The index arrays of GatherND and ScatterND: the last axis of ``indices`` holds one index per axis of data."""
    depth = indices.shape[-1] if indices.ndim else 0
    match = indices.shape[:batch_dims] == data.shape[:batch_dims] and depth <= data.ndim - batch_dims
    if not match or not 0 <= batch_dims < min(data.ndim, indices.ndim):
        raise ValueError(f"indices {indices.shape} with batch_dims {batch_dims} do not match data {data.shape}")
    for i in range(depth):
        check_indices(indices[..., i], data.shape[batch_dims + i], batch_dims + i)
    return [*_mesh(indices.shape[:-1])[:batch_dims], *(indices[..., i] for i in range(depth))]


@op("GatherND", limits=BOUNDS)
def gather_nd(data, indices, *, batch_dims=0):
    return _take(data, _tuples(data, indices, batch_dims))


Reduction = Literal["none", "add", "mul", "max", "min"]
NUMPY_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _put(data, index, updates, reduction):
    """``data`` updated at a tuple of broadcasting index arrays; duplicates are reduced, with "none" the last wins."""
    index = tuple(index)
    if is_known([data, updates, *index]):
        result = data.copy()
        if reduction == "none":
            result[index] = updates
        else:
            NUMPY_REDUCTIONS[reduction].at(result, index, updates)
        return result
    index = tuple(unfolded(in_32_bits(i, n), updates.size) for i, n in zip(index, data.shape, strict=False))
    names = {"add": "max", "mul": "min"} if data.dtype == bool else {"mul": "multiply"}  # bool: or, and
    write = "set" if reduction == "none" else names.get(reduction, reduction)
    if write == "multiply" and updates.size and jnp.issubdtype(data.dtype, jnp.inexact):
        return _multiplied(data, index, updates)
    return getattr(jnp.asarray(data).at[index], write)(updates, mode="drop")


def _multiplied(data, index, updates):
    """``data`` times the product of the updates per index; JAX differentiates scatter-mul only for unique indices."""
    extents, tail, updates = data.shape[: len(index)], data.shape[len(index) :], jnp.asarray(updates)
    index, size = [jnp.asarray(i, np.int64) for i in index], math.prod(extents)
    in_range = functools.reduce(jnp.logical_and, [(i >= -n) & (i < n) for i, n in zip(index, extents, strict=True)])
    flat = jnp.where(in_range, jnp.ravel_multi_index(index, extents, mode="wrap"), size).reshape(-1)
    updates = jnp.where(in_range.reshape(*in_range.shape, *(1 for _ in tail)), updates, updates.dtype.type(1))
    order = jnp.argsort(flat)
    flat, updates = flat[order], updates.reshape(-1, *tail)[order]
    first = jnp.append(True, flat[1:] != flat[:-1])
    starts = first.reshape(-1, *(1 for _ in tail))
    _, products = lax.associative_scan(
        lambda a, b: (a[0] | b[0], jnp.where(b[0], b[1], a[1] * b[1])), (starts, updates)
    )
    # The last update per index holds the whole product; the others are moved out of range and dropped.
    last = jnp.roll(first, -1) & (flat < size)
    flat = jnp.where(last, flat, size + jnp.arange(flat.size, dtype=np.int64))
    rows = jnp.asarray(data).reshape(size, *tail).at[flat]
    return rows.multiply(products, mode="drop", unique_indices=True).reshape(data.shape)


def write_slot(cache, new, at, axis, otherwise):
    """A cache with the slice of extent 1 at ``at`` along ``axis`` replaced, except on a CPU by ``otherwise``."""
    on_cpu = functools.partial(with_slot, axis=axis)
    return compat.platform_dependent(cache, new, at, cpu=on_cpu, default=lambda cache, new, _: otherwise(cache, new))


def with_slot(cache, new, at, axis):
    """``write_slot`` on a CPU; the cache as it is where ``at`` is out of range.

    XLA:CPU writes a scatter of two or more rows into a donated buffer. The update of a single slice it fuses into each
    consumer, with copies of the whole buffer: 6 layers of 4 heads, 2048 slots and 64 entries take 17 ms instead of 1.7.
    """
    shape, outer, inner = cache.shape, math.prod(cache.shape[:axis]), math.prod(cache.shape[axis + 1 :])
    parts = 2 if outer == 1 and inner % 2 == 0 else 1
    rows = cache.reshape(outer, shape[axis], parts, inner // parts)
    index = np.arange(outer, dtype=np.int32)[:, None], at, np.arange(parts, dtype=np.int32)
    new = jnp.asarray(new, cache.dtype).reshape(outer, parts, -1)
    return rows.at[index].set(new, mode="drop", unique_indices=True).reshape(shape)


def _is_slot(data, indices, axis, reduction):
    """Whether traced indices select one slice along an axis, as a decoder's step writes its cache."""
    if reduction != "none" or is_known(indices) or indices.shape != (*data.shape[:axis], 1, *data.shape[axis + 1 :]):
        return False
    if not all(isinstance(n, int) for n in data.shape):
        return False
    return indices.size > 1 and {i for i, n in enumerate(indices.shape) if n > 1} <= set(_repeated(indices))


@op("ScatterElements", since=11, limits=WRITES)
def scatter_elements(data, indices, updates, *, axis=0, reduction: Reduction = "none"):
    check_shape("updates", updates, *indices.shape)
    axis = axis_of(axis, data.ndim)

    def by_rows(data, indices, updates):
        index, order = _rows(data, indices, axis)
        return _ordered_back(_put(xp.transpose(data, order), index, xp.transpose(updates, order), reduction), order)

    if not _is_slot(data, indices, axis, reduction):
        return by_rows(data, indices, updates)
    at = in_32_bits(indices.reshape(-1)[0], data.shape[axis])
    return write_slot(data, updates, at, axis, lambda data, updates: by_rows(data, indices, updates))


@op("Scatter", since=9, limits=WRITES)
def scatter(data, indices, updates, *, axis=0):
    return scatter_elements(data, indices, updates, axis=axis)


deprecated("Scatter", since=11, instead="ScatterElements")


@op("ScatterND", since=11, limits=WRITES)
def scatter_nd(data, indices, updates, *, reduction: Reduction = "none"):
    index = _tuples(data, indices)
    check_shape("updates", updates, *indices.shape[:-1], *data.shape[len(index) :])
    return _put(data, index, updates, reduction)


@op("TensorScatter", since=24, limits=WRITES)
def tensor_scatter(past_cache, update, write_indices=None, *, axis=-2, mode: Literal["linear", "circular"] = "linear"):
    """The cache with ``update`` written along ``axis``, each batch entry from its own write index on."""
    axis = axis_of(axis, past_cache.ndim)
    if axis == 0:
        raise ValueError(f"axis ({axis}) must not be the batch axis 0")
    extent, batch = past_cache.shape[axis], past_cache.shape[0]
    check_shape("write_indices", write_indices, batch)
    check_shape("update", update, *past_cache.shape[:axis], "length", *past_cache.shape[axis + 1 :])
    start = np.zeros(1, np.int64) if write_indices is None else write_indices
    positions = start[:, None] + _mesh((update.shape[axis],))[0]
    positions = positions % extent if mode == "circular" else positions
    check_indices(positions, extent, axis)

    def by_rows(cache, update):
        cache, update = (xp.moveaxis(t, axis, 1) for t in (cache, update))
        return xp.moveaxis(_put(cache, (_mesh((batch, 1))[0], positions), update, "none"), 1, axis)

    if update.shape[axis] != 1 or is_known(positions) or not all(isinstance(n, int) for n in past_cache.shape):
        return by_rows(past_cache, update)
    at = jnp.repeat(in_32_bits(positions, extent), math.prod(past_cache.shape[1:axis]), axis=0)
    return write_slot(past_cache, update, at, axis, by_rows)


@op("Compress", since=9, limits="data-dependent output shape: `condition` must be known")
def compress(input, condition: Static, *, axis=None):
    """The slices where ``condition`` is true; only the condition must be known."""
    input, axis = flatten_or_axis(input, axis)
    return gather(input, np.flatnonzero(condition), axis=axis)


@op("OneHot", since=9, exact=("indices",))
def one_hot(indices, depth: Static, values, *, axis=-1, opset):
    """One-hot vectors of [off, on] ``values``; a negative index counts from the end since opset 11."""
    check_shape("values", values, 2)
    depth = depth.item() if depth.dtype == object else int(depth.item())
    if isinstance(depth, int) and depth < 0:
        raise ValueError(f"depth ({depth}) must not be negative")
    axis, indices = axis_of(axis, indices.ndim + 1), indices.astype(np.int64)
    if opset >= 11:
        indices = xp.where(indices < 0, indices + depth, indices)
    hit = xp.expand_dims(indices, axis) == _mesh((depth, *[1] * (indices.ndim - axis)))[0]
    return xp.where(hit, values[1, ...], values[0, ...])  # `...` keeps a string an array


@op("ReverseSequence", since=10, limits=_LENGTHS)
def reverse_sequence(input, sequence_lens, *, batch_axis=1, time_axis=0):
    if {batch_axis, time_axis} != {0, 1} or input.ndim < 2:
        raise ValueError(f"batch_axis ({batch_axis}) and time_axis ({time_axis}) must be 0 and 1, or 1 and 0")
    check_shape("sequence_lens", sequence_lens, input.shape[batch_axis])
    check_indices(sequence_lens, input.shape[time_axis] + 1, time_axis, least=0)
    batch, time = _mesh((input.shape[batch_axis], input.shape[time_axis]))
    lens = sequence_lens[:, None]
    time = xp.where(time < lens, lens - 1 - time, time)
    return _take(input, (batch, time) if batch_axis == 0 else (time.T, batch.T))


@op("Trilu", since=14)
def trilu(input, k=None, *, upper=1):
    if input.ndim < 2 or (k is not None and k.size != 1):
        raise ValueError(f"input {input.shape} must have at least two axes, and k one element")
    rows, columns = _mesh(input.shape[-2:])
    k = 0 if k is None else k.reshape(())
    mask = columns - rows >= k if upper else columns - rows <= k
    return xp.where(mask, input, "" if is_string(input) else np.zeros((), input.dtype))
