"""Several texts in a row of a batch, so that little of it is padding: attention is kept apart by a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import InputShapeError, UnsupportedError
from ..model.caches import caches
from ..model.model import Model
from ..proto.types import TensorType, ValueInfo
from .decoders import IGNORED


def pack_texts(model: Model, texts: Sequence[Sequence[int]], tokens: int) -> dict[str, np.ndarray]:
    """A batch for ``finetune(model, "next_token", ...)`` with several texts in each row, one behind the other.

    Each text goes into the first row that has room. A token attends to those before it in its own text, positions count
    from the beginning of each text, and its first token is foretold by none: the loss is that of texts in rows of their
    own.

    Args:
        model: a decoder with ``position_ids`` and an ``attention_mask`` [batch, 1, tokens, total], of bool or floating
            numbers that are added to scores.
        texts: the tokens of each.
        tokens: the length of the rows.

    Returns:
        By the names of the model's inputs, the tokens [rows, tokens], positions and mask; and ``labels``, which are
        -100 for the first token of each text and for padding.

    Raises:
        UnsupportedError: the model has no such inputs, or a state that runs on from one text into the next.
        InputShapeError: a text without tokens, or with more than there is room for.

    >>> rows_of_texts([3, 2, 1], 4)
    [[0, 2], [1]]
    """
    roles = _roles(model)
    rows = rows_of_texts([len(text) for text in texts], tokens)
    ids, which, places = (np.zeros((len(rows), tokens), np.int64) for _ in range(3))
    labels = np.full_like(ids, IGNORED)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            text = np.asarray(texts[member], np.int64)
            own = slice(start, start := start + len(text))
            ids[row, own], which[row, own], places[row, own] = text, number, np.arange(len(text))
            labels[row, own] = [IGNORED, *text[1:]]
    seen = (which[:, :, None] == which[:, None, :]) & np.tri(tokens, dtype=bool)
    types = {role: _dtype(roles[role]) for role in roles}
    heads = (roles["mask"].shape or ())[1]
    mask = np.repeat(seen[:, None], heads, axis=1) if isinstance(heads, int) else seen[:, None]
    if types["mask"] != bool:
        mask = np.where(mask, 0, jnp.finfo(types["mask"]).min).astype(types["mask"])
    return {
        roles["tokens"].name: ids.astype(types["tokens"]),
        roles["positions"].name: places.astype(types["positions"]),
        roles["mask"].name: mask,
        "labels": labels,
    }


def rows_of_texts(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Which texts go into which row, each into the first that has room."""
    rows, rooms = list[list[int]](), list[int]()
    for text, length in enumerate(lengths):
        if not 0 < length <= tokens:
            raise InputShapeError(f"text {text} has {length} tokens; rows of {tokens} take 1 to {tokens}")
        row = next((i for i, room in enumerate(rooms) if room >= length), len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append(tokens)
        rows[row].append(text)
        rooms[row] -= length
    return rows


def _roles(model: Model) -> dict[str, ValueInfo]:
    """The inputs for tokens, positions and the mask."""
    found = caches(model)
    roles = {role: found.roles[role] for role in ("tokens", "positions", "mask") if role in found.roles}
    ranks = {role: len(v.shape or ()) for role, v in roles.items()}
    kind: Any = _dtype(roles["mask"]) if "mask" in roles else np.dtype(object)
    if ranks != {"tokens": 2, "positions": 2, "mask": 4} or not (kind == bool or jnp.issubdtype(kind, jnp.floating)):
        raise UnsupportedError(
            f"model {model.graph.name!r} cannot keep texts of one row apart: that takes position_ids [batch, tokens] "
            "and a mask [batch, 1, tokens, total], bool or floating, and its inputs are "
            f"({', '.join(map(str, model.inputs))}). Export it with these, or give each text a row: "
            "batch = {'input_ids': texts}"
        )
    if states := [p.past.name for p in found.pairs if p.axis is None]:
        raise UnsupportedError(f"the state {states[0]!r} runs on from one text of a row into the next: give each a row")
    return roles


def _dtype(value: ValueInfo) -> np.dtype[Any]:
    assert isinstance(value.type, TensorType)
    return value.type.dtype
