"""What people give to a decoder: prompts, what ends a text, and how to choose tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputShapeError, InputTypeError, InputValueError
from ..model.calls.arguments import as_key
from .sampling import BY_NAME, Chooser, Sampling, as_arrays, greedy

Prompts = Any
"""Token ids: of one prompt, of several (lists of different lengths, too), or an array [batch, count]."""


def check_outside(given: Any) -> None:
    """Refuse to be part of another program: what is compiled here are programs of their own.

    Raises:
        InputTypeError: something given is traced, or a ``jit`` is around.
    """
    if any(isinstance(v, jax.core.Tracer) for v in (*jax.tree.leaves(given), jnp.zeros(()))):
        raise InputTypeError(
            "generate is no part of another program (a jit, vmap or grad around it): call it outside; or write the "
            "loop with decoder.prefill and decoder.step, which are pure functions"
        )


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number that somebody gave by name.

    >>> whole("beams", 4.0)
    4
    """
    number = value.item() if hasattr(value, "item") and np.size(value) == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number // 1 or number < least:
        raise InputValueError(f"{name} is {value!r}; it is a whole number, {least} or more")
    return int(number)


def rows_of(tokens: Prompts, mask: Any, vocabulary: int | None) -> list[np.ndarray]:
    """The prompts, each without padding."""
    if not hasattr(tokens, "ndim") and not isinstance(tokens, Iterable):
        raise InputValueError(f"tokens is {tokens!r}: token ids of a prompt, [5, 17, 3], or of several, [[5, 17], [3]]")
    if hasattr(tokens, "ndim") or not any(isinstance(t, Sequence) or np.ndim(t) for t in tokens):
        tokens = np.atleast_2d(np.asarray(tokens))
    rows = [np.asarray(row) for row in tokens]
    if mask is not None:
        live, lengths = np.atleast_2d(np.asarray(mask)) > 0, sorted({r.size for r in rows})
        if live.shape != (len(rows), *lengths):
            shape = (len(rows), *lengths) if len(lengths) == 1 else f"{len(rows)} lists of {lengths} tokens"
            raise InputShapeError(f"attention_mask {live.shape} is not of the tokens' shape {shape}")
        rows = [row[m] for row, m in zip(rows, live, strict=True)]
    for i, row in enumerate(rows):
        if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
            raise InputValueError(f"prompt {i} is {row.dtype} {row.shape}; it is one token id or more, as integers")
        if vocabulary is not None and not (row.min() >= 0 and row.max() < vocabulary):
            raise InputValueError(
                f"prompt {i} has tokens from {row.min()} to {row.max()}; they are 0 to {vocabulary - 1}"
            )
    if not rows:
        raise InputValueError("there is no prompt")
    return [row.astype(np.int32) for row in rows]


def even(
    rows: list[np.ndarray], batch: int | None = None, *, why: str = "what comes after texts is not padded"
) -> np.ndarray:
    """Prompts of one length as an array; one prompt stands for all of a batch.

    Raises:
        InputShapeError: they differ in length, which cannot be because of ``why``; or there are too many of them.
    """
    lengths = sorted({len(r) for r in rows})
    if len(lengths) > 1:
        raise InputShapeError(
            f"prompts of {lengths} tokens: {why}, so they have to be equally long; generate from them one by one: "
            "[decoder.generate(prompt, max_new_tokens) for prompt in prompts]"
        )
    if batch is not None and len(rows) not in (1, batch):
        raise InputShapeError(f"{len(rows)} prompts come after {batch} texts")
    return np.stack(rows if batch in (None, len(rows)) else rows * batch)


def as_endings(stop: Any) -> list[list[int]]:
    """What ends a text, each as a list of tokens.

    >>> as_endings([2, [5, 6]])
    [[2], [5, 6]]
    """
    stop = stop.tolist() if hasattr(stop, "tolist") else stop
    several = [s.tolist() if hasattr(s, "tolist") else s for s in (stop if isinstance(stop, Sequence) else [stop])]
    found = [s if isinstance(s, Sequence) else [s] for s in several]
    if any(not s or not all(isinstance(t, int | np.integer) and t is not True and t >= 0 for t in s) for s in found):
        raise InputValueError(f"stop is {stop!r}: a token, or several, each a token or a list of tokens, 0 or more")
    return [[int(t) for t in s] for s in found]


def choice(sampling: Any, rng: Any) -> tuple[Chooser, dict[str, Any]]:
    """The function that chooses tokens, and what it is told in each call."""
    key = jax.random.key(0) if rng is None else as_key(rng)
    if isinstance(sampling, str):
        if sampling not in BY_NAME:
            raise InputValueError(f"sampling is {sampling!r}; by name there are {', '.join(map(repr, BY_NAME))}")
        sampling = BY_NAME[sampling]
    if isinstance(sampling, Sampling):
        return greedy, {"key": key, "sampling": as_arrays(sampling)}
    if not callable(sampling) or isinstance(sampling, type):
        raise InputValueError(f"sampling is {sampling!r}: a name, Sampling(...), or a function of logits and a key")
    return sampling, {"key": key}
