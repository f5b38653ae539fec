"""The roles of a decoder's inputs and outputs: tokens, masks, positions, KV caches and logits.

Tokens, masks and positions are recognised by name, which differs between exporters; a cache by the graph: an input
from which an output of the same type is computed, by appending to it or by writing into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, cast

import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedError
from ..eval.known_values import symbolic_types
from ..ir.graph import Graph
from ..proto.types import TensorType, ValueInfo
from .calls.cache_pairs import Pair, pairs_of
from .calls.dims import named_dims

ROLES: Final = {
    "tokens": r"(decoder_)?(input_ids|input_tokens|tokens)",
    "embeddings": r"(decoder_)?inputs?_embeds?",
    "mask": r"(decoder_)?(attention_mask|attn_mask)",
    "positions": r"(decoder_)?position_ids",
    "places": r"cache_position",
    "lengths": r"seqlens_k",
    "total": r"total_seq(uence)?_len(gth)?",
    "past": r"past_seq(uence)?_len(gth)?",
    "has_past": r"use_cache_branch",
}
"""The role of an input -> its names, as a regular expression."""


@dataclass(frozen=True)
class Caches:
    """A decoder's inputs and outputs by role.

    Attributes:
        roles: inputs by role, one of ROLES.
        pairs: the caches.
        others: the other inputs, such as an encoder's outputs.
        logits: the output with a score for each token of the vocabulary; None if no output has rank 3.
    """

    roles: Mapping[str, ValueInfo]
    pairs: Sequence[Pair]
    others: Sequence[ValueInfo]
    logits: str | None

    def empty(self, batch: int) -> dict[str, np.ndarray]:
        """The caches before the first token, by input name: length 0, or zeros for states and sliding windows."""
        return {p.past.name: np.zeros(extents(p, batch, p.window), p.dtype) for p in self.pairs}


def caches(model: Any, *, sized: bool = True) -> Caches:
    """A decoder's inputs and outputs by role.

    ``sized``: extents that the file leaves free are inferred, which evaluates the model abstractly.

    >>> import onnx2jax
    >>> found = caches(onnx2jax.convert(onnx2jax.demo_decoder()))
    >>> sorted(found.roles), [p.past.name for p in found.pairs][:2], found.pairs[0].axis, found.logits
    (['mask', 'tokens'], ['past_key_values.0.key', 'past_key_values.0.value'], 2, 'logits')
    """
    roles: dict[str, ValueInfo] = {}
    for role, pattern in ROLES.items():
        matches = [v for v in model.inputs if re.fullmatch(pattern, v.name)]
        if matches:
            roles[role] = matches[0]
    taken = {v.name for v in roles.values()}
    pairs = tuple(pairs_of(model.graph, [v for v in model.inputs if v.name not in taken]))
    sizes: dict[str, int] = {}
    types = cache(lambda: symbolic_types(model.spec.with_static))
    pairs = tuple(_with_sizes(pair, sizes, types) for pair in pairs) if sized else pairs
    taken |= {p.past.name for p in pairs}
    others = tuple(v for v in model.inputs if v.name not in taken)
    return Caches(roles, pairs, others, _logits(model.graph, pairs))


def derived_inputs(decoder: Caches, batch: Mapping[str, Any]) -> set[str]:
    """The inputs that ``complete_feeds`` adds: none if the batch has no tokens, or has KV caches."""
    tokens, pasts = decoder.roles.get("tokens"), {p.past.name for p in decoder.pairs}
    if tokens is None or np.ndim(batch.get(tokens.name, 0)) != 2 or not pasts.isdisjoint(batch):
        return set()
    rows = {v.name for r, v in decoder.roles.items() if r in ("mask", "positions") and len(v.shape or ()) == 2}
    flags = {v.name for r, v in decoder.roles.items() if r == "has_past"}
    return (rows | flags | pasts) - batch.keys()


def complete_feeds(decoder: Caches, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The feeds of a batch, with defaults for missing inputs: a mask of ones, positions from 0, and empty caches."""
    missing, roles = derived_inputs(decoder, feeds), decoder.roles
    if not missing:
        return dict(feeds)
    shape = batch, length = feeds[roles["tokens"].name].shape
    mask = feeds.get(roles["mask"].name) if "mask" in roles else None
    values: dict[str, Any] = {"mask": np.ones(shape), "has_past": np.zeros(1)}
    if mask is None:
        values["positions"] = np.broadcast_to(np.arange(length), shape)
    else:  # masked tokens take no position
        values["positions"] = jnp.maximum(jnp.cumsum(jnp.asarray(mask), axis=1) - 1, 0)
    known = {roles[r].name: v.astype(dtype_of(roles[r])) for r, v in values.items() if r in roles}
    return {n: v for n, v in (known | decoder.empty(batch)).items() if n in missing} | dict(feeds)


def dtype_of(value: ValueInfo) -> np.dtype:
    """The element type of an input that is a tensor."""
    assert isinstance(value.type, TensorType)
    return value.type.dtype


def extents(pair: Pair, batch: int, length: int) -> tuple[int, ...]:
    """The shape of a cache for ``batch`` sequences of ``length`` tokens, where the file leaves these extents free."""
    free = {pair.axis: length, pair.batch: batch}
    shape = [d if isinstance(d, int) else free.get(i, d) for i, d in enumerate(pair.dims)]
    if unknown := [d for d in shape if not isinstance(d, int)]:
        raise UnsupportedError(
            f"the extents {unknown} of the cache {pair.past} cannot be inferred from the model: pass them, "
            "convert(..., dims={name: extent})"
        )
    return cast(tuple[int, ...], tuple(shape))


def step_extents(model: Any, dims: Mapping[str, int]) -> dict[str, int]:
    """The extents of a decoder's dimension variables that others decide: ``dims``, or else 1; {} for other models.

    Caches have the extents that the model computes, a sliding window its length, and others the longest of such
    lengths; a mask covers the past and the tokens.

    >>> import onnx2jax
    >>> step_extents(onnx2jax.convert(onnx2jax.demo_decoder()), {"past_sequence_length": 7})
    {'total_sequence_length': 8}
    """
    named = {v.name: v.shape or () for v in named_dims(model.inputs)}
    declared = caches(model)
    sizes = {
        name: extent
        for pair in declared.pairs
        for name, extent in zip(named[pair.past.name], pair.dims, strict=True)
        if isinstance(name, str) and isinstance(extent, int)
    }
    pasts = {named[p.past.name][axis]: p.window for p in declared.pairs if (axis := p.axis) is not None}
    sizes |= {d: window for d, window in pasts.items() if window and isinstance(d, str)}
    mask, tokens = (named[declared.roles[r].name] if r in declared.roles else () for r in ("mask", "tokens"))
    if pasts and len(tokens) > 1 and mask and mask[-1] != tokens[1]:

        def length(d: int | str | None) -> int:
            return d if isinstance(d, int) else dims.get(str(d), sizes.get(str(d), 1))

        longest, total = max(pasts.values()) or 1, mask[-1]
        past = next((d for d, window in pasts.items() if not window), longest)
        if isinstance(total, str) and total not in dims:
            if isinstance(past, str) and longest > 1:
                sizes[past] = longest
            sizes[total] = length(past) + length(tokens[1])
        elif isinstance(past, str):
            sizes[past] = max(length(total) - length(tokens[1]), 0)
    return {n: size for n, size in sizes.items() if n not in dims}


def _with_sizes(pair: Pair, sizes: dict[str, int], types: Callable[[], Mapping[str, TensorType]]) -> Pair:
    """The pair with extents for axes other than batch and tokens: from ``sizes``, or inferred and added to it."""
    free = {i: d for i, d in enumerate(pair.dims) if i not in (pair.axis, pair.batch) and not isinstance(d, int)}
    known = {i: sizes[d] for i, d in free.items() if d in sizes}
    if known.keys() != free.keys():
        known |= {i: d for i, d in enumerate(_update_shape(pair, types())) if i in free and isinstance(d, int)}
        sizes |= {d: known[i] for i, d in free.items() if d is not None and i in known}
    return replace(pair, past=pair.past.reshaped([known.get(i, d) for i, d in enumerate(pair.dims)]))


def _update_shape(pair: Pair, types: Mapping[str, TensorType]) -> Sequence[int | str | None]:
    """The shape of a cache's update; () if it cannot be inferred."""
    node = pair.producer
    if node is None:
        return ()
    place = 1 if len(node.inputs) > 1 and node.inputs[1] else 0  # a packed query contains keys and values
    kind = types.get(node.inputs[place])
    shape = kind.shape if kind is not None and kind.shape is not None else ()
    if len(shape) == 3 and isinstance(shape[2], int) and (heads := node.attributes.get("num_heads")):
        keys = node.attributes.get("kv_num_heads", heads)
        return (shape[0], keys, shape[1], shape[2] // (keys if place else heads + 2 * keys))
    return shape


def _logits(graph: Graph, pairs: Sequence[Pair]) -> str | None:
    caches = {p.present for p in pairs}
    floats = [
        v
        for v in graph.outputs
        if v.name not in caches
        and isinstance(v.type, TensorType)
        and jnp.issubdtype(v.type.dtype, np.floating)
        and len(v.shape or (0, 0, 0)) == 3
    ]
    named = [v for v in floats if "logits" in v.name]
    return next((v.name for v in (*named, *floats)), None)
