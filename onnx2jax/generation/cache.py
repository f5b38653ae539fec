"""KV caches of fixed length, updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import InputValueError, UnsupportedError
from ..model.caches import extents
from ..model.calls.cache_pairs import Pair
from ..ops.indexing import write_slot
from .prompts import whole_number

Kind = Literal["shared", "appended", "fixed", "state", "cross"]
"""How a model updates one of its caches:

- shared: the operator writes new tokens into the buffer it receives, after those of each sequence;
- appended: the model concatenates new tokens, so the array grows;
- fixed: the file declares the length, and the model writes at ``cache_position``;
- state: a recurrent state without a token axis, as of a convolution or of linear attention;
- cross: keys and values of cross-attention, computed by the first call.
"""

SHARED_OPERATORS: Final = frozenset({"GroupQueryAttention"})
"""Operators that write into the cache buffer they receive."""


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


def cache_kind(pair: Pair) -> Kind:
    """How the model updates a cache."""
    if ".encoder." in pair.past.name or "cross" in pair.past.name:
        return "cross"
    if pair.axis is None:
        return "state"
    if pair.producer is not None and pair.producer.op_type in SHARED_OPERATORS:
        return "shared"
    return "fixed" if isinstance(pair.dims[pair.axis], int) else "appended"


def declared_length(pair: Pair) -> int | None:
    """The cache length that the file declares; None if it is dynamic, or the cache is a sliding window."""
    room = None if pair.axis is None or pair.window else pair.dims[pair.axis]
    return room if isinstance(room, int) else None


def zeros(
    pairs: Mapping[str, Pair],
    kinds: Mapping[str, Kind],
    batch: int,
    length: int,
    *,
    aligned: bool = False,
    apart: bool = False,
) -> Cache:
    """An empty cache of zeros for ``batch`` sequences of at most ``length`` tokens.

    Raises:
        InputValueError: ``batch`` or ``length`` is below 1, or the cache would be both aligned and apart.
        UnsupportedError: the file declares another length, or does not determine the shape of a cache.
    """
    if aligned and apart:
        raise InputValueError("aligned=True and apart=True exclude each other: a cache has one layout, not both")
    batch, length = whole_number("batch", batch), whole_number("length", length)
    values = {}
    for name, pair in pairs.items():
        kind, declared = kinds[name], declared_length(pair)
        if kind != "cross" and declared is not None and length != declared:
            raise UnsupportedError(f"the file declares caches of length {declared}, not {length}: length={declared}")
        size = 0 if kind == "cross" else max(length, pair.window)
        values[name] = jnp.zeros(extents(pair, batch, size), pair.dtype)
    return Cache(values, jnp.zeros((batch, length), bool), jnp.zeros((), np.int32), aligned, apart)


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
