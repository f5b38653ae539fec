"""Sequences and optionals: a sequence is a Python list and an empty optional None; their tensors may be traced."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..errors import KnownValueError
from ..proto.dtypes import to_dtype
from .arrays import FIX, axis_of, dims, is_traced, xp
from .indexing import in_32_bits
from .registry import Shaped, Static, op


@op("SequenceEmpty", since=11, unsharded=True)
def sequence_empty(*, dtype=None):
    """SequenceEmpty: an empty list; the attribute dtype is only validated."""
    to_dtype(1 if dtype is None else dtype, "dtype")
    return []


@op("SequenceConstruct", since=11, unsharded=True)
def sequence_construct(*inputs):
    if len({v.dtype for v in inputs}) > 1:
        raise ValueError(f"the tensors of a sequence must have one element type (got {[str(v.dtype) for v in inputs]})")
    return list(inputs)


@op("SequenceLength", since=11, unsharded=True)
def sequence_length(input_sequence: Shaped):
    return np.array(len(input_sequence), np.int64)


def _position(position, default, low, high):
    position = default if position is None else int(position.reshape(()))
    if not low <= position <= high:
        raise ValueError(f"position {position} is outside [{low}, {high}]")
    return position


@op("SequenceAt", since=11, unsharded=True, limits="a traced position requires elements of one shape")
def sequence_at(input_sequence, position):
    """SequenceAt: a traced position requires elements of one shape and dtype, and yields NaN if out of range."""
    n = len(input_sequence)
    if not is_traced(position):
        return input_sequence[_position(np.asarray(position), None, -n, n - 1)]
    shapes = {(v.shape, v.dtype) for v in input_sequence}
    if len(shapes) != 1 or np.dtype(object) in {d for _, d in shapes}:
        raise KnownValueError(f"the position is traced and the elements differ in shape or dtype; make it known: {FIX}")
    return jnp.take(jnp.stack(input_sequence), in_32_bits(position.reshape(()), n), axis=0, mode="fill")


@op("SequenceInsert", since=11, unsharded=True)
def sequence_insert(input_sequence, tensor, position: Static = None):
    if input_sequence and input_sequence[0].dtype != tensor.dtype:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be inserted into a sequence of {input_sequence[0].dtype}")
    n = len(input_sequence)
    at = _position(position, n, -n, n)
    return [*input_sequence[:at], tensor, *input_sequence[at:]]


@op("SequenceErase", since=11, unsharded=True)
def sequence_erase(input_sequence, position: Static = None):
    n = len(input_sequence)
    at = _position(position, n - 1, -n, n - 1) % n
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


@op("ConcatFromSequence", since=11, unsharded=True)
def concat_from_sequence(input_sequence, *, axis, new_axis=0):
    return (xp.stack if new_axis else xp.concatenate)(input_sequence, axis=axis)


@op("SplitToSequence", since=11, unsharded=True)
def split_to_sequence(input, split: Static = None, *, axis=0, keepdims=1):
    """SplitToSequence: ``split`` is the length of each piece (the last may be shorter), a vector of lengths, or 1."""
    axis = axis_of(axis, input.ndim)
    extent, sizes = input.shape[axis], (1,) if split is None else dims(split)
    if split is None or split.ndim == 0:
        if sizes[0] <= 0:
            raise ValueError(f"split must be positive (got {sizes[0]})")
        ends = [*range(sizes[0], extent, sizes[0]), extent] if extent else []
    else:
        if min(sizes, default=0) < 0 or sum(sizes) != extent:
            raise ValueError(f"split {sizes} does not add up to the extent {extent} of axis {axis}")
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
    *pieces, _ = xp.split(input, ends, axis)  # the piece after the last end is empty
    return [p.squeeze(axis) for p in pieces] if split is None and not keepdims else pieces


@op("Optional", since=15, unsharded=True)
def optional(input=None, *, type=None):
    if input is None and type is None:
        raise ValueError("an empty Optional needs the attribute 'type'")
    return input


@op("OptionalHasElement", since=15, unsharded=True)
def optional_has_element(input: Shaped = None):
    return np.array(input is not None)


@op("OptionalGetElement", since=15, unsharded=True)
def optional_get_element(input):
    if input is None:
        raise ValueError("the optional is empty; check OptionalHasElement first")
    return input
