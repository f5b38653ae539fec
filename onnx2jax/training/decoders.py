"""Training of token decoders: the next-token loss, and batches of texts, padded or packed.

Packed texts share a row of a batch, separated by a block-diagonal attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputShapeError, InputValueError, LossError, UnsupportedError
from ..model.caches import caches, dtype_of
from ..model.model import Model
from ..proto.types import TensorType, ValueInfo

IGNORED: Final = -100
"""The label of a position that the loss ignores."""


class NextTokenLoss:
    """Mean cross-entropy of each token given the preceding ones: ``loss="next_token"`` of ``finetune``.

    Labels are ``batch["labels"]`` or else ``batch["input_ids"]``, int[batch, tokens]. They are shifted here:
    ``logits[:, i]`` of [batch, tokens, vocabulary] predict token ``i + 1``. Positions are ignored if their label is
    -100, or if they or the position before are masked by ``batch["attention_mask"]`` [batch, tokens]. The mean is a
    float32 scalar, float64 of such logits, over the remaining positions of all microbatches of a step; 0 if there are
    none.

    Args:
        outputs: the outputs of a model with one named ``logits``, or the logits alone.
        batch: ``input_ids`` or ``labels``, and optionally ``attention_mask``.

    Raises:
        LossError: there are no logits or labels, or their shapes do not match. A label outside the vocabulary gives
            NaN.

    >>> import numpy as np, onnx2jax
    >>> logits = np.zeros((1, 3, 8), np.float32)
    >>> round(float(onnx2jax.training.next_token_loss(logits, {"input_ids": np.array([[1, 5, 2]])})), 4)  # log(8)
    2.0794
    """

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        logits, (labels, counts) = _logits(outputs), _targets(batch)
        if logits.ndim != 3 or (logits.shape[0], logits.shape[1] - 1) != labels.shape:
            raise LossError(
                f"the shapes of logits {list(logits.shape)} and labels {[labels.shape[0], labels.shape[1] + 1]} do not "
                "match: expected [batch, tokens, vocabulary] and [batch, tokens]"
            )
        # Ignored logits may be NaN, which would enter the gradient.
        dtype = jnp.promote_types(jnp.float32, logits.dtype)
        logits = jnp.where(counts[..., None], jnp.asarray(logits[:, :-1], dtype), 0)
        vocabulary = logits.shape[-1]
        labels = jnp.where(counts, labels, 0)
        indices = jnp.where(labels < 0, vocabulary, labels)[..., None]
        target_logits = jnp.take_along_axis(logits, indices, -1, mode="fill", fill_value=jnp.nan)[..., 0]
        entropy = jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - target_logits, 0)
        return entropy.sum() / jnp.maximum(counts.sum(), 1).astype(dtype)

    def weight(self, batch: Mapping[str, Any]) -> Any:
        """The number of positions that count: the weight of a microbatch in the mean."""
        return _targets(batch)[1].sum()

    def __repr__(self) -> str:
        return "next_token_loss"


next_token_loss: Final = NextTokenLoss()
"""``next_token_loss(outputs, batch)``: see NextTokenLoss."""


def _logits(outputs: Any) -> Any:
    logits = getattr(outputs, "logits", None if isinstance(outputs, tuple) else outputs)
    if logits is None:
        raise LossError(
            f"none of the outputs {list(outputs._asdict())} is named 'logits'; name the one that holds them: "
            "finetune(..., outputs=['name'])"
        )
    return logits


def _targets(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The shifted labels, int[batch, tokens - 1], and a mask of those that count."""
    name = "labels" if "labels" in batch else "input_ids"
    if name not in batch:
        raise LossError(f"the batch has neither 'labels' nor 'input_ids', only {list(batch)}")
    ids = batch[name]
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise LossError(f"{name!r} is {ids.dtype}{list(ids.shape)}, not integers [batch, tokens]")
    labels = jnp.asarray(ids)[:, 1:]
    counts, mask, tokens = labels != IGNORED, batch.get("attention_mask"), ids.shape[1]
    # With a mask of 4 axes, labels alone determine what counts.
    if mask is not None and not (mask.ndim == 4 and name == "labels"):
        if mask.ndim != 2 or mask.shape[1] < tokens:
            raise LossError(f"'attention_mask' {list(mask.shape)} does not cover the {tokens} tokens of {name!r}")
        real = jnp.asarray(mask)[:, mask.shape[1] - tokens :] != 0
        counts &= real[:, :-1] & real[:, 1:]
    return labels, counts


def check_targets(outputs: Sequence[ValueInfo], batch: Mapping[str, Any]) -> None:
    """Check that the labels of a batch that count, where they are NumPy arrays, are in the vocabulary of the logits.

    Raises:
        InputValueError: one is not: the loss would be NaN.
    """
    shape = next((v.shape for v in outputs if v.name == "logits" or len(outputs) == 1), None)
    name = "labels" if "labels" in batch else "input_ids"
    labels, mask = batch.get(name), batch.get("attention_mask")
    if not shape or not isinstance(shape[-1], int) or not isinstance(labels, np.ndarray) or labels.ndim != 2:
        return
    counts = labels != IGNORED
    if mask is not None:
        if not isinstance(mask, np.ndarray) or mask.shape != labels.shape:
            return
        counts &= mask != 0
    if name == "labels":
        counts[:, :1] = False  # predicted from nothing
    labels = labels[counts]
    if labels.size and not 0 <= labels.min() <= labels.max() < shape[-1]:
        raise InputValueError(
            f"{name!r} has tokens from {labels.min()} to {labels.max()}; tokens are 0 to {shape[-1] - 1}"
        )


def pad_ragged(model: Model, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with ragged lists padded on the right to arrays, and an attention mask over the tokens.

    Raises:
        InputShapeError: the lengths of a ragged entry differ from those of ``input_ids``.
    """
    ragged = {n: list(map(len, v)) for n, v in batch.items() if _is_ragged(v)}
    if not ragged:
        return dict(batch)
    lengths: Any = ragged.get("input_ids")
    if wrong := {n: other for n, other in ragged.items() if other != lengths}:
        raise InputShapeError(f"ragged lists need the lengths of 'input_ids', {lengths}, but have {wrong}")
    real = np.arange(max(lengths)) < np.array(lengths)[:, None]
    padded: dict[str, np.ndarray] = {"attention_mask": real}
    for name in ragged:
        padded[name] = np.full(real.shape, IGNORED if name == "labels" else 0, np.int64)
        padded[name][real] = np.concatenate([np.asarray(row, np.int64) for row in batch[name]])
    dtypes = {v.name: v.type.dtype for v in model.inputs if isinstance(v.type, TensorType)}
    padded = {n: v.astype(dtypes.get(n, np.int64)) for n, v in padded.items()}
    return padded | {n: v for n, v in batch.items() if n not in ragged}


def _is_ragged(value: Any) -> bool:
    rows = isinstance(value, list | tuple) and all(isinstance(row, Sequence | np.ndarray) for row in value)
    return rows and len({len(row) for row in value}) > 1


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
            place = row, slice(start, start := start + len(text))
            ids[place], segments[place], positions[place] = text, number, np.arange(len(text))
            labels[place] = [IGNORED, *text[1:]]
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
    decoder = caches(model)
    roles = {role: decoder.roles[role] for role in ("tokens", "positions", "mask") if role in decoder.roles}
    ranks = {role: len(v.shape or ()) for role, v in roles.items()}
    dtype: Any = dtype_of(roles["mask"]) if "mask" in roles else np.dtype(object)
    if ranks != {"tokens": 2, "positions": 2, "mask": 4} or not (dtype == bool or jnp.issubdtype(dtype, jnp.floating)):
        raise UnsupportedError(
            f"model {model.graph.name!r} cannot separate texts in one row: this needs position_ids [batch, tokens] "
            "and a mask [batch, 1, tokens, total], bool or floating, and its inputs are "
            f"({', '.join(map(str, model.inputs))}). Export it with these, or put each text into its own row: "
            "batch = {'input_ids': texts}"
        )
    if states := [p.past.name for p in decoder.pairs if p.axis is None]:
        raise UnsupportedError(f"the recurrent state {states[0]!r} would pass from text to text: give each its own row")
    return roles
