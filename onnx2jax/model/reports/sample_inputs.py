"""Sample inputs for a model: random numbers, and what a decoder's step needs of masks, positions and lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ...proto.types import TensorType
from ..caches import ROLES, Caches, caches, step_extents
from ..calls.dims import named_dims, with_dims
from .samples import random_values

MASK: Final = re.compile(r"(\w+_)?(attention_mask|attn_mask)")
"""Names of masks, an encoder's too."""


def sample_extents(model: Any, given: Mapping[str, Any]) -> dict[str, int]:
    """Extents of dimension variables: of given inputs, and those that a decoder's other inputs need; others are 1."""
    extents = {
        d: n
        for v in named_dims(model.inputs)
        if v.name in given
        for d, n in zip(v.shape or (), np.shape(given[v.name]), strict=False)
        if isinstance(d, str)
    }
    return step_extents(model, extents) | extents


def sample_inputs(model: Any, given: Mapping[str, Any], seed: int, extents: Mapping[str, int]) -> dict[str, Any]:
    """All inputs of a model: those that are given, and samples for the others.

    A mask attends to everything; the tokens of a decoder follow a past as long as its caches: positions and lengths
    agree with that. All else is random, see ``random_values``.

    Args:
        model: a Model.
        given: inputs by name.
        seed: of random numbers.
        extents: of dimension variables, ``sample_extents``; others are 1.

    Raises:
        InputTypeError: an input is no tensor of a declared rank, or they have too many elements in all.
    """
    absent = [v for v in with_dims(model.inputs, extents) if v.name not in given]
    values = {**given, **random_values(absent, np.random.default_rng(seed))}
    found = caches(model, sized=False)
    roles = {v.name: role for role, v in found.roles.items()}
    past, total = _lengths(found, {n: np.shape(v) for n, v in values.items()})
    for info in absent:
        role = "mask" if MASK.fullmatch(info.name) else roles.get(info.name, "")
        if isinstance(info.type, TensorType) and role in ROLES.keys() - {"tokens", "embeddings"}:
            values[info.name] = _of_role(role, values[info.name], past, total)
    return values


def _lengths(found: Caches, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Tokens in the caches, and with those of the call."""
    tokens, mask = (
        next((shapes[found.roles[r].name] for r in roles if r in found.roles), ())
        for roles in (("tokens", "embeddings"), ("mask",))
    )
    count = tokens[1] if len(tokens) > 1 else 1
    grows = [p for p in found.pairs if p.axis is not None]
    if not grows:
        return 0, count
    if mask:
        return max(mask[-1] - count, 0), mask[-1]
    past = max(shapes[p.past.name][p.axis] for p in grows if p.axis is not None)
    return past, past + count


def _of_role(role: str, like: np.ndarray, past: int, total: int) -> np.ndarray:
    """The value of an input in a step: total tokens of which so many are past; in the shape and type of an array."""
    if role in ("positions", "places"):
        count = like.shape[-1] if like.ndim else 1
        return np.broadcast_to(np.arange(past, past + count), like.shape or (1,)).reshape(like.shape).astype(like.dtype)
    additive = role == "mask" and like.dtype.kind not in "biu"
    value = {"mask": not additive, "lengths": total - 1, "total": total, "past": past, "has_past": past > 0}[role]
    return np.full(like.shape, value, like.dtype)
