"""Decoders, and onnxruntime's greedy tokens, that the tests of a process share: each program is compiled once.

Prompts in batches of two and caches of the default length meet the same programs. Files and decoders stay as they are:
a test that changes a file, or that counts compilations from none, makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, Final

import numpy as np

import onnx2jax
from onnx2jax import Decoder
from tests.support.decoders import (
    File,
    Run,
    appending,
    by_hand,
    by_onnxruntime,
    convolving,
    group_query,
    multi_head,
    onnx_attention,
    static,
)

P, Q = [5, 17, 3, 40, 8], [9, 2, 31]
FILES: Final[dict[str, Callable[[], File]]] = {
    "group query": group_query,
    "group query, two layers": partial(group_query, layers=2),
    "group query, three layers": partial(group_query, layers=3),
    "group query, float16": partial(group_query, np.float16),
    "group query, float16, three layers": partial(group_query, np.float16, layers=3),
    "group query, 4 bits": partial(group_query, bits="symmetric"),
    "group query, 4 bits, three layers": partial(group_query, bits="symmetric", layers=3),
    "group query, 4 bits with zero points": partial(group_query, bits="asymmetric"),
    "Concat": appending,
    "Concat, two layers": partial(appending, layers=2),
    "Concat, three layers": partial(appending, layers=3),
    "Concat, three layers with a window": partial(appending, window=4, layers=3),
    **{f"Concat, window of {n}": partial(appending, window=n) for n in (4, 63, 64)},
    "Concat, positions from extents": partial(appending, positions=False),
    "Concat, positions from extents in each of two layers": partial(appending, positions=False, layers=2),
    "Concat, positions from extents in each of three layers": partial(appending, positions=False, layers=3),
    "Concat, custom names": partial(appending, names=("cache_{1}_{0}", "cache_{1}_{0}_out")),
    "Concat, uninformative names": partial(appending, names=("a{1}{0}", "b{1}{0}")),
    "ScatterElements": partial(static, 32),
    "ScatterElements, mask of rank 4": partial(static, 32, mask_rank=4),
    "ScatterElements, positions from slots": partial(static, 32, positions=False),
    "TensorScatter": partial(static, 32, writer="TensorScatter"),
    "Attention": onnx_attention,
    "Attention, opset 24": partial(onnx_attention, 24),
    "MultiHeadAttention": multi_head,
    "convolution": convolving,
}


@cache
def file(style: str) -> File:
    return FILES[style]()


@cache
def decoder(style: str, **converting: Any) -> Decoder:
    return onnx2jax.decoder(file(style).proto, **converting)


@cache
def session(style: str) -> Run:
    return by_onnxruntime(file(style))


@cache
def _greedy(style: str, prompt: tuple[int, ...], count: int) -> tuple[list[int], np.ndarray]:
    return by_hand(file(style), prompt, count, session(style))


def greedy(style: str, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens after a prompt, by onnxruntime with growing caches."""
    return _greedy(style, tuple(prompt), count)[0]


def logits(style: str, prompt: Sequence[int], count: int) -> np.ndarray:
    """The logits of each of these tokens."""
    return _greedy(style, tuple(prompt), count)[1]


@cache
def _likely(style: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the next token, by one call with the whole text."""
    row = logits(style, tokens, 1)[0].astype(np.float64)
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


def searched(
    style: str, prompt: Sequence[int], count: int, beams: int, penalty: float = 1.0, early: bool = False,
    stop: Collection[int] = (),
) -> list[tuple[float, tuple[int, ...]]]:  # fmt: skip
    """Scores and tokens of the texts that a plain beam search finds, which runs the whole text for every candidate."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, count + 1):
        every = [(s + p, (*text, t)) for s, text in live for t, p in enumerate(_likely(style, (*prompt, *text)))]
        candidates = sorted(every, reverse=True)[: 2 * beams]
        ended += [(s / length**penalty, t) for s, t in candidates[:beams] if t[-1] in stop]
        ended = sorted(ended, reverse=True)[:beams]
        live = [(s, t) for s, t in candidates if t[-1] not in stop][:beams]
        if len(ended) == beams and (early or ended[-1][0] >= live[0][0] / length**penalty):
            return ended
    return sorted([*ended, *((s / count**penalty, t) for s, t in live)], reverse=True)[:beams]
