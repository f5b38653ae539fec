"""Shapes, layout and constants: operators that move or create elements without arithmetic."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..errors import KnownValueError
from ..limits import TPU_APPENDED
from ..proto.types import ELEMENT_TYPES, to_code, to_dtype
from .arrays import FIX, axes_of, axis_of, check_room, check_shape, counting, dims, is_known, is_string, xp
from .registry import Relative, Shaped, Static, op, taking
from .traced import TracedIntegers, difference, shape_vector, terms
from .window import pad_numpy


def reshaped(data, shape):
    """The data reshaped; every extent of ``shape`` is explicit."""
    return np.reshape(data, shape) if is_known(data) else lax.reshape(data, shape)


@op("Identity")
def identity(input):
    return input


@op("Shape")
def shape(data: Shaped, *, start=0, end=None):
    return shape_vector(data.shape[start:end])


@op("Size")
def size(data: Shaped):
    return shape_vector((math.prod(data.shape),)).reshape(())


@op("Reshape")
def reshape(data, shape: Static, *, allowzero=0):
    target = list(dims(shape))
    if target.count(-1) > 1 or (allowzero and -1 in target and 0 in target):
        raise ValueError(f"shape {tuple(target)} leaves several extents to infer (-1, or 0 with allowzero=1)")
    source = list(data.shape)
    copied = [i for i, d in enumerate(target) if d == 0 and not allowzero]
    if copied and copied[-1] >= len(source):
        raise ValueError(f"shape {tuple(target)} copies axis {copied[-1]} (0), but the data have rank {len(source)}")
    if -1 in target:  # copied extents cancel out, so that -1 can be inferred even for an empty batch
        rest = math.prod(d for i, d in enumerate(source) if i not in copied)
        known = math.prod(d for i, d in enumerate(target) if i not in copied and d != -1)
        if known == 0 or (isinstance(rest, int) and isinstance(known, int) and rest % known):
            raise ValueError(f"data of shape {tuple(source)} cannot be reshaped to {tuple(target)}")
        target[target.index(-1)] = rest // known
    new = tuple(source[i] if i in copied else d for i, d in enumerate(target))
    # lax.reshape leaves this check to XLA.
    if all(isinstance(d, int) for d in (*source, *new)) and math.prod(new) != math.prod(source):
        raise ValueError(
            f"data of shape {tuple(source)} cannot be reshaped to {new}; if that contains the exporter's batch size, "
            "make it variable: convert(..., rebatch=True)"
        )
    return reshaped(data, new)


@op("Flatten")
def flatten(input, *, axis=1):
    axis = axis if axis == input.ndim else axis_of(axis, input.ndim)
    return reshaped(input, (math.prod(input.shape[:axis]), math.prod(input.shape[axis:])))


@op("Squeeze")
def squeeze(data, axes: Static = None):
    drop = [i for i, d in enumerate(data.shape) if d == 1] if axes is None else axes_of(axes, data.ndim)
    return np.squeeze(data, tuple(drop)) if is_known(data) else lax.squeeze(data, drop)


@op("Unsqueeze")
def unsqueeze(data, axes: Static):
    new = axes_of(axes, data.ndim + np.size(axes))
    old = iter(data.shape)
    return reshaped(data, tuple(1 if i in new else next(old) for i in range(data.ndim + len(new))))


@op("Transpose")
def transpose(data, *, perm=None):
    perm = tuple(range(data.ndim))[::-1] if perm is None else perm
    return np.transpose(data, perm) if is_known(data) else lax.transpose(data, perm)


@op("Expand")
def expand(input, shape: Static):
    # Both ways: a 1 in `shape` keeps the input's extent.
    return xp.broadcast_to(input, lax.broadcast_shapes(input.shape, dims(shape)))


@op("Tile", since=6)
def tile(input, repeats: Static):
    repeats = dims(repeats)
    if len(repeats) != input.ndim:
        raise ValueError(f"repeats {repeats} must have one entry for each of the input's {input.ndim} axes")
    shape = [n * count for n, count in zip(input.shape, repeats, strict=True)]
    if is_known(input):
        check_room(shape, input.dtype)
    elif all(n == 1 or count == 1 for n, count in zip(input.shape, repeats, strict=True)):
        return jnp.broadcast_to(input, shape)
    return xp.tile(input, repeats)


@op("Tile")
def tile_along_axis(input, tiles: Static, axis: Static):
    """Tile-1: repeats along one axis; ``tiles`` and ``axis`` have the element type of the input."""
    tiled = axis_of(np.ravel(axis)[0], input.ndim)
    return tile(input, [int(np.ravel(tiles)[0]) if i == tiled else 1 for i in range(input.ndim)])


@op("Concat", since=4)
def concat(*inputs, axis):
    axis = axis_of(axis, inputs[0].ndim)
    if len(ranks := {x.ndim for x in inputs}) > 1:
        raise ValueError(f"inputs must have one rank (they have {sorted(ranks)})")
    if is_known(inputs):
        return np.concatenate(inputs, axis)
    if not _is_appended(*inputs, axis=axis):
        return lax.concatenate(inputs, axis)
    append = partial(_append, axis=axis)
    return compat.platform_dependent(*inputs, tpu=append, default=lambda *inputs: lax.concatenate(inputs, axis))


op("Concat")(taking(axis=1)(concat))  # the only version in which the axis is optional


def _is_appended(first, second=None, *others, axis):
    """Whether one element follows many, as in the caches of a decoder."""
    if second is None or others or first.ndim != 4 or first.dtype != second.dtype:
        return False
    many, one = first.shape[axis], second.shape[axis]
    return isinstance(many, int) and isinstance(one, int) and many >= TPU_APPENDED and one == 1


def _append(first, second, axis):
    shape = tuple(n + (i == axis) for i, n in enumerate(first.shape))
    padding = [(0, int(i == axis), 0) for i in range(first.ndim)]
    is_old = lax.broadcasted_iota(np.int32, shape, axis) < first.shape[axis]
    return lax.select(is_old, lax.pad(first, np.zeros((), first.dtype), padding), jnp.broadcast_to(second, shape))


@op("Split")
def split(input, split: Static = None, *, axis=0, num_outputs=None, n_outputs):
    """The input split into given lengths, or evenly; with num_outputs (opset 18) the last part may be smaller."""
    axis = axis_of(axis, input.ndim)
    extent, parts = input.shape[axis], n_outputs
    if num_outputs not in (None, n_outputs):
        raise ValueError(f"num_outputs ({num_outputs}) is not the number of the node's outputs ({n_outputs})")
    if split is not None:
        if num_outputs is not None:
            raise ValueError("give either the input split or the attribute num_outputs, not both")
        sizes = dims(split.astype(np.int64) if split.dtype.kind == "f" else split)  # Split-1: of the input's dtype
    else:
        length = -(-extent // parts)
        sizes = (length,) * (parts - 1) + (extent - length * (parts - 1),)
        if sizes[-1] != length and (num_outputs is None or sizes[-1] < 0):
            raise ValueError(f"axis {axis} of extent {extent} does not split evenly into {parts}: give the input split")
    if sum(sizes) != extent or any(isinstance(s, int) and s < 0 for s in sizes):
        raise ValueError(f"split {sizes} must be non-negative and sum to the extent {extent} of axis {axis}")
    if is_known(input):
        return tuple(np.split(input, np.cumsum(sizes)[:-1], axis))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(lax.slice_in_dim(input, i, i + n, axis=axis) for i, n in zip(starts, sizes, strict=True))


@op("DepthToSpace")
def depth_to_space(input, *, blocksize, mode: Literal["DCR", "CRD"] = "DCR"):
    check_shape("input", input, "batch", "channels", "height", "width")
    n, c, h, w = input.shape
    if c % blocksize**2:
        raise ValueError(f"the channels ({c}) must be a multiple of blocksize ** 2 ({blocksize**2})")
    b, depth = blocksize, c // blocksize**2
    shape, perm = (n, b, b, depth, h, w), (0, 3, 4, 1, 5, 2)
    if mode == "CRD":
        shape, perm = (n, depth, b, b, h, w), (0, 1, 4, 2, 5, 3)
    return reshaped(transpose(reshaped(input, shape), perm=perm), (n, depth, h * b, w * b))


@op("SpaceToDepth")
def space_to_depth(input, *, blocksize, mode: Literal["DCR", "CRD"] = "DCR"):
    check_shape("input", input, "batch", "channels", "height", "width")
    n, c, h, w = input.shape
    if any(isinstance(d, int) and d % blocksize for d in (h, w)):  # symbolic ones are constrained by the caller
        raise ValueError(f"height ({h}) and width ({w}) must be multiples of blocksize ({blocksize})")
    b, h, w = blocksize, h // blocksize, w // blocksize
    perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return reshaped(transpose(reshaped(input, (n, c, h, b, w, b)), perm=perm), (n, c * b * b, h, w))


Mode = Literal["constant", "reflect", "edge", "wrap"]


def padded(data, low, high, value=None):
    """The data padded with a constant by ``low`` and ``high`` elements per axis; negative counts crop."""
    rows = tuple(zip(data.shape, low, high, strict=True))
    for axis, (n, *ends) in enumerate(rows):
        removed = -sum(d for d in ends if isinstance(d, int) and d < 0)
        if isinstance(n, int) and removed > n:
            raise ValueError(f"pads remove {removed} elements of axis {axis}, which has extent {n}")
    if is_known([data, value, *low, *high]):
        check_room([n + a + b for n, a, b in rows], data.dtype)
        fill = ("" if is_string(data) else np.zeros((), data.dtype)) if value is None else np.reshape(value, ())
        return pad_numpy(data, fill, [(a, b, 0) for _, a, b in rows])
    config = [(a, b, 0) for _, a, b in rows]
    if value is None or is_known(value):
        return lax.pad(data, np.zeros((), data.dtype) if value is None else np.reshape(value, ()), config)
    # JAX cannot differentiate lax.pad with respect to the padding value.
    inside = lax.pad(jnp.ones(data.shape, bool), np.False_, config)
    return jnp.where(inside, lax.pad(data, np.zeros((), data.dtype), config), jnp.reshape(value, ()))


@op("Pad", since=11, limits="float8e8m0, which has no 0, is padded with 2^-127 by default")
def pad(data, pads: Static, constant_value=None, axes: Static = None, *, mode: Mode = "constant"):
    pads = dims(pads)
    axes = tuple(range(data.ndim)) if axes is None else axes_of(axes, data.ndim)
    if len(pads) != 2 * len(axes):
        raise ValueError(f"pads {pads} must have a begin and an end for each of the axes {axes}")
    low, high = np.zeros((2, data.ndim), object)
    low[list(axes)], high[list(axes)] = pads[: len(axes)], pads[len(axes) :]
    if mode == "constant":
        return padded(data, low, high, constant_value)
    # Crop first, because reflect and wrap must only see the remaining elements.
    data = padded(data, [min(d, 0) for d in low], [min(d, 0) for d in high])
    widths = [(max(a, 0), max(b, 0)) for a, b in zip(low, high, strict=True)]
    if is_known(data):
        check_room([n + a + b for n, (a, b) in zip(data.shape, widths, strict=True)], data.dtype)
    if is_known(data) or ELEMENT_TYPES[to_code(data.dtype)].bits >= 8:
        return xp.pad(data, widths, mode=mode)
    # XLA on CPU cannot concatenate elements of two bits.
    return jnp.pad(data.astype(np.float32), widths, mode=mode).astype(data.dtype)


@op("Pad", since=2)
def pad_2(data, *, pads, mode: Mode = "constant", value=0.0):
    """Pad-2, where pads and value are attributes."""
    return pad(data, pads, np.asarray(value, data.dtype), mode=mode)


@op("Pad")
def pad_1(data, *, paddings, mode: Mode = "constant", value=0.0):
    """Pad-1, where pads are called paddings."""
    return pad_2(data, pads=paddings, mode=mode, value=value)


@op("CenterCropPad")
def center_crop_pad(input_data, shape: Static, *, axes=None):
    axes, shape = tuple(range(input_data.ndim)) if axes is None else axes_of(axes, input_data.ndim), dims(shape)
    if len(shape) != len(axes) or any(isinstance(n, int) and n < 0 for n in shape):
        raise ValueError(f"shape {shape} must have a non-negative extent for each of the axes {axes}")
    low, high = ([0] * input_data.ndim for _ in range(2))
    for axis, target in zip(axes, shape, strict=True):
        missing = target - input_data.shape[axis]
        low[axis] = missing // 2 if missing >= 0 else -(-missing // 2)  # an odd element is added or removed at the end
        high[axis] = missing - low[axis]
    return padded(input_data, low, high)


VALUES = {
    "value": None, "sparse_value": None, "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64,
    "value_ints": np.int64, "value_string": object, "value_strings": object,
}  # fmt: skip


@op("Constant")
@taking(**dict.fromkeys(VALUES))
def constant(**values):
    arrays = [np.asarray(value, VALUES[name]) for name, value in values.items() if value is not None]
    if len(arrays) != 1:
        raise ValueError(f"exactly one of value, sparse_value and value_* must be given, not {len(arrays)}")
    return arrays[0]


@op("ConstantOfShape")
def constant_of_shape(input: Static, *, value=None):
    value = np.zeros((), np.float32) if value is None else np.reshape(value, ())
    check_room(shape := dims(input), value.dtype)
    return xp.broadcast_to(value, shape)


@op("EyeLike")
def eye_like(input: Shaped, *, dtype=None, k=0):
    check_shape("input", input, "rows", "columns")
    rows, columns = input.shape
    return xp.eye(rows, columns, k, input.dtype if dtype is None else to_dtype(dtype, "dtype"))


@op("Range", limits="under jit, a traced start needs a known distance to its limit")
def range_(start: Relative, limit: Relative, delta: Static, *, stash_type=1):
    """start + i * delta up to limit, exclusive; half precision is computed in ``stash_type`` (opset 27)."""
    if isinstance(start, TracedIntegers) or isinstance(limit, TracedIntegers):
        ((low,), first), ((high,), _) = terms(start), terms(limit)
        if not isinstance(distance := difference(high, low), int):
            raise KnownValueError(f"its length depends on traced values; {FIX}")
        return first + range_(np.int64(0), np.int64(distance), delta).astype(first.dtype)
    dtype = start.dtype
    start, limit, delta = (np.ravel(v)[0] for v in (start, limit, delta))
    if delta == 0:
        raise ValueError("delta must not be 0")
    if not is_known([start, limit, delta]):  # symbolic dimensions
        return jnp.arange(start, limit, delta, np.int64)
    if dtype.kind == "i":
        start, limit, delta = int(start), int(limit), int(delta)
        count = -((start - limit) // delta)
        return (start + counting(max(count, 0)) * delta).astype(dtype)
    steps = (float(limit) - float(start)) / float(delta)  # in double: in float32 0.3 is three steps of 0.1, not more
    if not math.isfinite(steps):
        raise ValueError(f"from {start} to {limit} by {delta} has no number of elements; the three must be finite")
    count = max(math.ceil(steps), 0)
    work = to_dtype(stash_type, "stash_type") if dtype.itemsize == 2 else dtype
    start, delta = work.type(start), work.type(delta)
    return (start + counting(count).astype(work) * delta).astype(dtype)
