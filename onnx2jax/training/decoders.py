"""Decoders of tokens in training: the loss of next tokens, and the inputs that follow from ``input_ids``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputShapeError, LossError
from ..model.caches import Caches
from ..model.model import Model
from ..proto.types import TensorType, ValueInfo

IGNORED: Final = -100
"""The label of a token that does not count."""


class NextTokenLoss:
    """The mean entropy of each token after those before it: ``loss="next_token"`` of ``finetune``.

    Labels are ``batch["labels"]``, or ``batch["input_ids"]`` itself, both [batch, tokens]; they are shifted here, as
    ``logits[:, i]`` of shape [batch, tokens, words] speak of token ``i + 1``. A label of -100 does not count, nor does
    a token that ``batch["attention_mask"]`` [batch, tokens] masks, or one after such a token. The mean is over those
    that count, in float32, and over all micro-batches of a step; 0 when there are none.

    Args:
        outputs: those of a model: ``logits`` among them, or logits alone.
        batch: ``input_ids`` or ``labels``, and perhaps ``attention_mask``.

    Raises:
        LossError: there are no logits or labels, or their shapes do not fit. A label that is none of the words gives
            NaN.

    >>> import numpy as np, onnx2jax
    >>> logits = np.zeros((1, 3, 8), np.float32)
    >>> round(float(onnx2jax.next_token_loss(logits, {"input_ids": np.array([[1, 5, 2]])})), 4)  # the logarithm of 8
    2.0794
    """

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        logits, (labels, counts) = _logits(outputs), _targets(batch)
        if logits.ndim != 3 or (logits.shape[0], logits.shape[1] - 1) != labels.shape:
            raise LossError(
                f"logits {list(logits.shape)} and labels {[labels.shape[0], labels.shape[1] + 1]} do not fit: they are "
                "[batch, tokens, words] and [batch, tokens]"
            )
        # What does not count may be NaN, which would come back through the gradient.
        logits = jnp.where(counts[..., None], jnp.asarray(logits[:, :-1], jnp.float32), 0)
        words = logits.shape[-1]
        labels = jnp.where(counts, labels, 0)
        places = jnp.where(labels < 0, words, labels)[..., None]
        said = jnp.take_along_axis(logits, places, -1, mode="fill", fill_value=jnp.nan)[..., 0]
        entropy = jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - said, 0)
        return entropy.sum() / jnp.maximum(counts.sum(), 1).astype(jnp.float32)

    def weight(self, batch: Mapping[str, Any]) -> Any:
        """How many tokens count: what a micro-batch weighs."""
        return _targets(batch)[1].sum()

    def __repr__(self) -> str:
        return "next_token_loss"


next_token_loss = NextTokenLoss()
"""``next_token_loss(outputs, batch)``: see NextTokenLoss."""


def _logits(outputs: Any) -> Any:
    logits = getattr(outputs, "logits", None if isinstance(outputs, tuple) else outputs)
    if logits is None:
        raise LossError(
            f"none of the outputs {list(outputs._asdict())} is named 'logits'; say which they are: "
            "finetune(..., outputs=['name'])"
        )
    return logits


def _targets(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The next tokens, and which of them count."""
    name = "labels" if "labels" in batch else "input_ids"
    if name not in batch:
        raise LossError(f"the batch has neither 'labels' nor 'input_ids', only {list(batch)}")
    given = batch[name]
    if given.ndim != 2 or not jnp.issubdtype(given.dtype, jnp.integer):
        raise LossError(f"{name!r} is {given.dtype}{list(given.shape)}; it is integers [batch, tokens]")
    labels = jnp.asarray(given)[:, 1:]
    counts, mask, tokens = labels != IGNORED, batch.get("attention_mask"), given.shape[1]
    if mask is not None and not (
        mask.ndim == 4 and name == "labels"
    ):  # one of 4 axes says who sees whom, labels the rest
        if mask.ndim != 2 or mask.shape[1] < tokens:
            raise LossError(f"'attention_mask' {list(mask.shape)} does not cover {name!r} of {tokens}")
        real = jnp.asarray(mask)[:, mask.shape[1] - tokens :] != 0
        counts &= real[:, :-1] & real[:, 1:]
    return labels, counts


def made(decoder: Caches, batch: Mapping[str, Any]) -> set[str]:
    """The inputs that ``completed`` makes for a batch that has tokens, but not them, nor caches that hold some."""
    tokens, caches = decoder.roles.get("tokens"), {p.past.name for p in decoder.pairs}
    if tokens is None or np.ndim(batch.get(tokens.name, 0)) != 2 or not caches.isdisjoint(batch):
        return set()
    rows = {v.name for r, v in decoder.roles.items() if r in ("mask", "positions") and len(v.shape or ()) == 2}
    flags = {v.name for r, v in decoder.roles.items() if r == "has_past"}
    return (rows | flags | caches) - batch.keys()


def completed(decoder: Caches, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """What a batch feeds, with a mask of ones, positions from 0 on, and empty caches where it has none."""
    missing, roles = made(decoder, feeds), decoder.roles
    if not missing:
        return dict(feeds)
    shape = batch, length = feeds[roles["tokens"].name].shape
    mask = feeds.get(roles["mask"].name) if "mask" in roles else None
    values: dict[str, Any] = {"mask": np.ones(shape), "has_past": np.zeros(1)}
    if mask is None:
        values["positions"] = np.broadcast_to(np.arange(length), shape)
    else:  # as many tokens are before each as the mask has
        values["positions"] = jnp.maximum(jnp.cumsum(jnp.asarray(mask), axis=1) - 1, 0)
    known = {roles[r].name: v.astype(_dtype(roles[r])) for r, v in values.items() if r in roles}
    return {n: v for n, v in (known | decoder.empty(batch)).items() if n in missing} | dict(feeds)


def padded(model: Model, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose lists of lists of unequal lengths are arrays, with a mask of what is real.

    Raises:
        InputShapeError: an entry whose lists are not as long as those of ``input_ids``.
    """
    ragged = {n: list(map(len, v)) for n, v in batch.items() if _is_ragged(v)}
    if not ragged:
        return dict(batch)
    lengths, types = ragged.get("input_ids"), {v.name: v.type for v in model.inputs}
    if wrong := {n: found for n, found in ragged.items() if found != lengths}:
        raise InputShapeError(f"lists of unequal lengths are padded as 'input_ids' is, {lengths}, not as {wrong}")
    assert lengths is not None
    real = np.arange(max(lengths)) < np.array(lengths)[:, None]
    result = dict(batch)
    for name in ragged:
        declared = types.get(name)
        whole = np.full(real.shape, IGNORED if name == "labels" else 0, np.int64)
        whole[real] = np.concatenate([np.asarray(row, np.int64) for row in batch[name]])
        result[name] = whole.astype(declared.dtype) if isinstance(declared, TensorType) else whole
    declared = types.get("attention_mask")
    dtype = declared.dtype if isinstance(declared, TensorType) else np.dtype(np.int64)
    return {"attention_mask": real.astype(dtype)} | result


def _is_ragged(value: Any) -> bool:
    rows = isinstance(value, list | tuple) and all(isinstance(row, Sequence | np.ndarray) for row in value)
    return rows and len({len(row) for row in value}) > 1


def _dtype(value: ValueInfo) -> np.dtype:
    assert isinstance(value.type, TensorType)
    return value.type.dtype
