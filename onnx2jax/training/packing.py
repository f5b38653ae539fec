"""Sequence packing: several texts per row of a batch, separated by a block-diagonal attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import InputShapeError, UnsupportedError
from ..model.caches import caches
from ..model.model import Model
from ..proto.types import ValueInfo
from .decoders import IGNORED, dtype_of


def pack_texts(model: Model, texts: Sequence[Sequence[int]], tokens: int) -> dict[str, np.ndarray]:
    """A batch for ``finetune(model, "next_token", ...)`` with several texts packed into each row.

    Each text goes into the first row with enough space. A token attends to preceding tokens of its own text only,
    positions restart at each text, and the first token of a text is not predicted, so the loss equals that of one text
    per row.

    Args:
        model: a decoder with ``position_ids`` and an ``attention_mask`` [batch, 1, tokens, total], of bool or of
            floating numbers that are added to attention scores.
        texts: the token ids of each text.
        tokens: the length of the rows.

    Returns:
        A dict by input name: tokens and positions [rows, tokens], the mask [rows, 1, tokens, tokens], and ``labels``
        int64[rows, tokens], -100 for the first token of each text and for padding.

    Raises:
        UnsupportedError: the model has no such inputs, or it has a recurrent state.
        InputShapeError: a text is empty, or longer than a row.

    >>> rows_of_texts([3, 2, 1], 4)
    [[0, 2], [1]]
    """
    roles = _roles(model)
    rows = rows_of_texts([len(text) for text in texts], tokens)
    ids, segments, positions = (np.zeros((len(rows), tokens), np.int64) for _ in range(3))
    labels = np.full_like(ids, IGNORED)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            text = np.asarray(texts[member], np.int64)
            own = slice(start, start := start + len(text))
            ids[row, own], segments[row, own], positions[row, own] = text, number, np.arange(len(text))
            labels[row, own] = [IGNORED, *text[1:]]
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tri(tokens, dtype=bool)
    types = {role: dtype_of(roles[role]) for role in roles}
    heads = (roles["mask"].shape or ())[1]
    mask = np.repeat(seen[:, None], heads, axis=1) if isinstance(heads, int) else seen[:, None]
    if types["mask"] != bool:
        mask = np.where(mask, 0, jnp.finfo(types["mask"]).min).astype(types["mask"])
    return {
        roles["tokens"].name: ids.astype(types["tokens"]),
        roles["positions"].name: positions.astype(types["positions"]),
        roles["mask"].name: mask,
        "labels": labels,
    }


def rows_of_texts(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The indices of the texts of each row, by first fit."""
    rows, free = list[list[int]](), list[int]()
    for text, length in enumerate(lengths):
        if not 0 < length <= tokens:
            raise InputShapeError(f"text {text} has {length} tokens; rows of {tokens} take 1 to {tokens}")
        row = next((i for i, space in enumerate(free) if space >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(tokens)
        rows[row].append(text)
        free[row] -= length
    return rows


def _roles(model: Model) -> dict[str, ValueInfo]:
    """The inputs for tokens, positions and the mask."""
    found = caches(model)
    roles = {role: found.roles[role] for role in ("tokens", "positions", "mask") if role in found.roles}
    ranks = {role: len(v.shape or ()) for role, v in roles.items()}
    dtype: Any = dtype_of(roles["mask"]) if "mask" in roles else np.dtype(object)
    if ranks != {"tokens": 2, "positions": 2, "mask": 4} or not (dtype == bool or jnp.issubdtype(dtype, jnp.floating)):
        raise UnsupportedError(
            f"model {model.graph.name!r} cannot separate texts in one row: this needs position_ids [batch, tokens] "
            "and a mask [batch, 1, tokens, total], bool or floating, and its inputs are "
            f"({', '.join(map(str, model.inputs))}). Export it with these, or put each text into its own row: "
            "batch = {'input_ids': texts}"
        )
    if states := [p.past.name for p in found.pairs if p.axis is None]:
        raise UnsupportedError(f"the recurrent state {states[0]!r} would pass from text to text: give each its own row")
    return roles
