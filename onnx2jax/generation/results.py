"""``Generation``: generated tokens, and the KV cache to continue them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from .cache import Cache

SHOWN = 6
"""Texts, and tokens of each, in a repr."""


@dataclass(frozen=True)
class CacheSource:
    """What a KV cache was computed by, whatever the values of its weights.

    Attributes:
        name: the name of the decoder's graph.
        caches: name, dtype and extents of each cache.
        graphs: digests of the graphs of prefill and step, equal in all processes; None with a user's operators.
    """

    name: str
    caches: tuple[tuple[str, str, tuple[Any, ...]], ...]
    graphs: tuple[bytes | None, ...]

    def difference(self, other: CacheSource) -> str:
        """How another decoder differs from this one, as the end of a sentence; empty if its caches serve this one."""
        if self.name != other.name:
            return f"its graph is {other.name!r}, and this one is {self.name!r}"
        if self.caches != other.caches:
            theirs, ours = next(pair for pair in zip_longest(other.caches, self.caches) if pair[0] != pair[1])
            return f"it has {_cache(theirs)} where this one has {_cache(ours)}"
        return "" if self.graphs == other.graphs else f"its graph, {other.name!r} too, has other nodes"


def _cache(cache: tuple[str, str, tuple[Any, ...]] | None) -> str:
    return "no cache" if cache is None else f"cache {cache[0]!r} of {cache[1]}[{', '.join(map(str, cache[2]))}]"


@dataclass(frozen=True, repr=False)
class Generation:
    """Generated texts as tokens, and the KV cache to continue them with.

    Attributes:
        tokens: int64[batch, count], without the prompts, padded with ``pad`` after the end of a text; includes the stop
            token that ended it.
        lengths: int64[batch], the number of tokens of each text.
        cache: the KV cache of prompts and texts, except the last token of each text. Pass this object as
            ``generate(..., after=)`` to continue, by a decoder of the same graph. Its weights may be others, such as
            those of a later training step: the cache keeps what the earlier ones computed.
        last: int64[batch, 1], those last tokens; [batch, 0] after ``read``.
        rounds: for ``speculate``, the number of calls of the large decoder; else None.
        logprobs: float32[batch, count], the log-probability of each token in the model's distribution, before
            ``repetition_penalty``, ``logits_processors`` and ``sampling``, and 0 at the padding; None without
            ``generate(..., logprobs=True)``.
        prompts: the tokens before the text of each, int64[count].
        source: the decoder that computed the cache, without its weights.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    cache: Cache
    last: np.ndarray
    rounds: int | None = None
    logprobs: np.ndarray | None = None
    prompts: Sequence[np.ndarray] = ()
    source: CacheSource | None = None

    def texts(self) -> list[list[int]]:
        """The tokens of each text, as lists without padding."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]

    @property
    def sequences(self) -> list[np.ndarray]:
        """The tokens of each prompt and text, int64[count]."""
        return [np.array([*p, *t], np.int64) for p, t in zip(self.prompts, self.texts(), strict=True)]

    def __repr__(self) -> str:
        texts = self.texts()
        plural = "s" * (len(texts) != 1)
        rows = [f"Generation of {len(texts)} text{plural}, cache of {self.cache.length} tokens", *lines(texts)]
        if self.rounds is not None:
            rows.append(f"  rounds: {self.rounds}")
        return "\n".join(rows)


def lines(texts: Sequence[Sequence[int]], scores: Any = None) -> list[str]:
    """Lines of a repr: the first tokens of the first texts.

    >>> lines([[5, 6], list(range(100, 120))])
    ['  0: 2 tokens: 5, 6', '  1: 20 tokens: 100, 101, 102, 103, 104, 105, ...']
    """
    rows = []
    for i, text in enumerate(texts[:SHOWN]):
        tokens = ", ".join([*map(str, text[:SHOWN]), *["..."] * (len(text) > SHOWN)])
        score = "" if scores is None else f", score {scores[i]:.4g}"
        rows.append(f"  {i}: {len(text)} token{'s' * (len(text) != 1)}{score}: {tokens}")
    return [*rows, *[f"  ... {len(texts) - SHOWN} more"] * (len(texts) > SHOWN)]
