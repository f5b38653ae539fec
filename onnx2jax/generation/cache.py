"""The caches of a decoder while it generates: arrays of fixed extents, written in place."""

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
from .prompts import whole

Kind = Literal["shared", "appended", "fixed", "state", "crossed"]
"""How a model treats one of its caches:

- shared: the operator writes new tokens behind those that a sequence has, into the array it is given;
- appended: the model puts new tokens behind the array, which so grows;
- fixed: the file itself says how many tokens the array has room for, and writes them where ``cache_position`` says;
- state: it holds no tokens, as the state of a convolution or of linear attention;
- crossed: it holds what attention to an encoder needs, made by the first call.
"""

SHARED: Final = frozenset({"GroupQueryAttention"})
"""Operators that write into the cache they are given."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What a decoder remembers of sequences. A pytree; hand it from call to call, best donated.

    Attributes:
        values: the model's caches, by the name of its input.
        live: bool[batch, length], the places that hold a token.
        end: int32, the places that are taken in every sequence, with or without a token.
        aligned: whether tokens lie at the end of their arrays, rather than behind each other from the first place on:
            so models want it that let a token see so many places back.
        apart: whether each sequence runs for itself, its tokens in its own first places: so models want it that take
            positions from places or extents, or have no mask, where sequences are not equally long.
    """

    values: dict[str, Any]
    live: Any
    end: Any
    aligned: bool = field(default=False, metadata={"static": True})
    apart: bool = field(default=False, metadata={"static": True})

    @property
    def length(self) -> int:
        """The tokens that there is room for."""
        return int(self.live.shape[1])

    @property
    def lengths(self) -> Any:
        """int32[batch], the tokens of each sequence."""
        return jnp.sum(self.live, axis=1, dtype=np.int32)


def kind_of(pair: Pair) -> Kind:
    """How the model treats a cache."""
    if ".encoder." in pair.past.name or "cross" in pair.past.name:
        return "crossed"
    if pair.axis is None:
        return "state"
    if pair.maker is not None and pair.maker.op_type in SHARED:
        return "shared"
    return "fixed" if isinstance(pair.dims[pair.axis], int) else "appended"


def own_length(pair: Pair) -> int | None:
    """The tokens for which the file itself says that a cache has room; None where it leaves that open, or it slides."""
    room = None if pair.axis is None or pair.window else pair.dims[pair.axis]
    return room if isinstance(room, int) else None


def empty(
    pairs: Mapping[str, Pair],
    kinds: Mapping[str, Kind],
    batch: int,
    length: int,
    *,
    aligned: bool = False,
    apart: bool = False,
) -> Cache:
    """A cache without tokens, for so many sequences of at most so many tokens.

    Raises:
        InputValueError: there is no sequence, or room for no token; or the cache would be both.
        UnsupportedError: the extents of an array do not follow from the model.
    """
    if aligned and apart:
        raise InputValueError("a cache is aligned or apart, not both")
    batch, length = whole("batch", batch), whole("length", length)
    values = {}
    for name, pair in pairs.items():
        kind, own = kinds[name], own_length(pair)
        if kind != "crossed" and own is not None and length != own:
            raise UnsupportedError(f"the file's own caches have room for {own} tokens, not {length}: length={own}")
        room = 0 if kind == "crossed" else max(length, pair.window)
        values[name] = jnp.zeros(extents(pair, batch, room), pair.dtype)
    return Cache(values, jnp.zeros((batch, length), bool), jnp.zeros((), np.int32), aligned, apart)


def filled(cache: Cache, lengths: Any, end: Any) -> Cache:
    """The marks of a cache whose sequences have so many tokens each, in their first places."""
    live = jnp.arange(cache.length, dtype=np.int32) < jnp.reshape(lengths, (-1, 1))
    return replace(cache, live=live, end=jnp.asarray(end, np.int32))


def advanced(cache: Cache, new: int, *, side_by_side: bool = False) -> Cache:
    """The marks of a cache to which every sequence has added so many tokens.

    They are at its end, or ``side_by_side`` with those that the sequence had; or the places move on (``aligned``).
    """
    end = cache.end + new
    if cache.aligned:
        live = jnp.pad(cache.live[:, new:], ((0, 0), (0, new)), constant_values=True)
        return replace(cache, live=live, end=end)
    if side_by_side:
        return filled(cache, cache.lengths + new, end)
    places = jnp.arange(cache.length, dtype=np.int32)
    return replace(cache, live=cache.live | ((places >= cache.end) & (places < end)), end=end)


def to_the_end(buffer: Any, lengths: Any, axis: Any, batch: Any) -> Any:
    """A cache whose sequences have these many tokens in its first places, with them in its last ones."""
    shifts = buffer.shape[axis] - lengths
    turn = jax.vmap(lambda row, shift: jnp.roll(row, shift, axis - (batch < axis)), in_axes=(batch, 0), out_axes=batch)
    return turn(buffer, shifts)


def write(buffer: Any, new: Any, start: Any, *, axis: int) -> Any:
    """A cache with new tokens written from ``start`` on."""
    return lax.dynamic_update_slice_in_dim(buffer, jnp.asarray(new, buffer.dtype), start, axis)


def tail(present: Any, count: int, axis: int) -> Any:
    """The last tokens of what a model gives."""
    return lax.slice_in_dim(present, present.shape[axis] - count, present.shape[axis], axis=axis)
