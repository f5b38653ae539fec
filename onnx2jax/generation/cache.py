"""KV caches of fixed length, updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import UnsupportedError
from ..model.caches import extents
from ..model.calls.cache_pairs import Pair
from ..ops.indexing import write_slot

Kind = Literal["shared", "appended", "fixed", "state", "cross"]
"""How a model updates one of its caches:

- shared: the operator writes new tokens into the buffer it receives, after those of each sequence;
- appended: the model concatenates new tokens, so the array grows;
- fixed: the file declares the length, and the model writes at ``cache_position``;
- state: a recurrent state without a token axis, as of a convolution or of linear attention;
- cross: keys and values of cross-attention, computed by the first call.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """A decoder's KV caches. A pytree that each call returns updated; donate it.

    Attributes:
        values: the cache arrays, by the name of the model's input.
        live: bool[batch, length], the slots that hold a token; the others are empty or padding.
        end: int32, the number of slots used so far, padding included; the next token is written there.
        aligned: whether tokens are right-aligned in their buffers, for models with a sliding window measured in slots.
        apart: whether each sequence is run separately (``vmap``) with its tokens in its own first slots, for sequences
            of different lengths in models that derive positions from slots or extents, or that have no mask.
    """

    values: dict[str, Any] = field(repr=False)
    live: Any = field(repr=False)
    end: Any
    aligned: bool = field(default=False, metadata={"static": True})
    apart: bool = field(default=False, metadata={"static": True})

    @property
    def length(self) -> int:
        """The number of slots."""
        return int(self.live.shape[1])

    @property
    def lengths(self) -> Any:
        """int32[batch], the number of tokens of each sequence."""
        return jnp.sum(self.live, axis=1, dtype=np.int32)


@dataclass(frozen=True)
class Buffer(Pair):
    """A KV cache as a buffer of fixed length, whose model receives all of it and returns it updated."""

    kind: Kind = "shared"

    @property
    def declared_length(self) -> int | None:
        """The length that the file declares; None if it is dynamic, or the cache is a sliding window."""
        length = None if self.axis is None or self.window else self.dims[self.axis]
        return length if isinstance(length, int) else None

    def zeros(self, batch: int, length: int) -> Any:
        """Zeros for ``batch`` sequences of at most ``length`` tokens, 0 for what the model computes or appends to.

        Raises:
            UnsupportedError: the file does not determine the shape.
        """
        return jnp.zeros(extents(self, batch, max(length, self.window)), self.dtype)

    def empty(self, batch: int, length: int) -> Any:
        """The buffer before the first token.

        Raises:
            UnsupportedError: the file declares another length, or does not determine the shape.
        """
        if self.declared_length not in (None, length):
            raise UnsupportedError(
                f"the file declares caches of length {self.declared_length}, not {length}: "
                f"length={self.declared_length}"
            )
        return self.zeros(batch, length)

    def first_input(self, buffer: Any, _batch: int, _sizes: Mapping[str, int]) -> Any:
        """The model's input in the first call; ``sizes`` are extents by dimension name, for cross-attention."""
        return buffer

    def input(self, buffer: Any, _length: int) -> Any:
        """The model's input in a later call that returns as many tokens as the buffer has; here, the buffer."""
        return buffer

    def filled(self, _buffer: Any, present: Any) -> Any:
        """The buffer after the first call, whose output is ``present``."""
        return present

    def extended(self, _buffer: Any, present: Any, _start: Any, _count: int) -> Any:
        """The buffer after a later call, whose output ends with ``count`` tokens to be written at ``start``."""
        return present


@dataclass(frozen=True)
class Appended(Buffer):
    """A buffer of a cache to which the model appends: it returns its input and the new tokens."""

    kind: Kind = "appended"

    def first_input(self, _buffer: Any, batch: int, sizes: Mapping[str, int]) -> Any:
        """No token yet."""
        return self.zeros(batch, sizes.get(str(self.dims[self.axis or 0]), 0))

    def input(self, buffer: Any, length: int) -> Any:
        """The last ``length`` tokens, so that the model returns as many as the buffer has."""
        return tail(buffer, length, self.axis or 0)

    def filled(self, buffer: Any, present: Any) -> Any:
        """The tokens in the first slots."""
        return write(buffer, present, 0, axis=self.axis or 0)

    def extended(self, buffer: Any, present: Any, start: Any, count: int) -> Any:
        """The new tokens in their slots, unless the model returned the buffer."""
        if present.shape[self.axis] == buffer.shape[self.axis]:
            return present
        return write(buffer, tail(present, count, self.axis or 0), start, axis=self.axis or 0)


@dataclass(frozen=True)
class Cross(Buffer):
    """Keys or values of cross-attention, which the first call computes and later ones read."""

    kind: Kind = "cross"

    def empty(self, batch: int, _length: int) -> Any:
        """No token of the encoder yet."""
        return self.zeros(batch, 0)

    def first_input(self, _buffer: Any, batch: int, sizes: Mapping[str, int]) -> Any:
        """Zeros as long as the encoder's outputs."""
        return self.zeros(batch, 0 if self.axis is None else sizes.get(str(self.dims[self.axis]), 0))

    def extended(self, buffer: Any, _present: Any, _start: Any, _count: int) -> Any:
        """As it was."""
        return buffer


def buffer_of(pair: Pair) -> Buffer:
    """A cache as the buffer of its kind."""
    fields = pair.past, pair.present, pair.axis, pair.producer
    if ".encoder." in pair.past.name or "cross" in pair.past.name:
        return Cross(*fields)
    if pair.axis is None:
        return Buffer(*fields, "state")
    if pair.producer is not None and pair.producer.op_type == "GroupQueryAttention":
        return Buffer(*fields, "shared")
    return Buffer(*fields, "fixed") if isinstance(pair.dims[pair.axis], int) else Appended(*fields)


def with_lengths(cache: Cache, lengths: Any, end: Any) -> Cache:
    """The cache with ``live`` set to the first ``lengths`` slots of each sequence, and this ``end``."""
    live = jnp.arange(cache.length, dtype=np.int32) < jnp.reshape(lengths, (-1, 1))
    return replace(cache, live=live, end=jnp.asarray(end, np.int32))


def advance(cache: Cache, new: int, *, side_by_side: bool = False) -> Cache:
    """The cache with ``live`` and ``end`` updated for ``new`` more tokens of every sequence.

    The tokens are at ``end``; with ``side_by_side`` directly after those of each sequence; in an aligned cache, at the
    end of the buffer.
    """
    end = cache.end + new
    if cache.aligned:
        live = jnp.pad(cache.live[:, new:], ((0, 0), (0, new)), constant_values=True)
        return replace(cache, live=live, end=end)
    if side_by_side:
        return with_lengths(cache, cache.lengths + new, end)
    slots = jnp.arange(cache.length, dtype=np.int32)
    return replace(cache, live=cache.live | ((slots >= cache.end) & (slots < end)), end=end)


def right_align(buffer: Any, lengths: Any, axis: Any, batch: Any) -> Any:
    """The buffer with the first ``lengths`` tokens of each sequence moved to its end."""
    shifts = buffer.shape[axis] - lengths
    roll = jax.vmap(lambda row, shift: jnp.roll(row, shift, axis - (batch < axis)), in_axes=(batch, 0), out_axes=batch)
    return roll(buffer, shifts)


def write(buffer: Any, new: Any, start: Any, *, axis: int) -> Any:
    """The buffer with new tokens written at ``start``."""
    new = jnp.asarray(new, buffer.dtype)

    def update(buffer: Any, new: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(buffer, new, start, axis)

    if new.shape[axis] != 1 or not all(isinstance(n, int) for n in buffer.shape):
        return update(buffer, new)
    return write_slot(buffer, new, start, axis, update)


def tail(present: Any, count: int, axis: int) -> Any:
    """The last ``count`` tokens along ``axis``."""
    return lax.slice_in_dim(present, present.shape[axis] - count, present.shape[axis], axis=axis)
