"""Beam search against a plain reference that runs the whole text for every candidate."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from onnx2jax.errors import InputShapeError, InputValueError
from tests.support import decoders

PROMPTS = ((5, 17, 3, 40, 8), (9, 2, 31))
FILES = {"shared": decoders.group_query, "appended": decoders.appending}


@cache
def decoder(name: str) -> Decoder:
    return onnx2jax.decoder(onnx2jax.convert(FILES[name]().proto))


@cache
def first_call(name: str) -> Any:
    return jax.jit(decoder(name).prefill)


@cache
def likely(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the next token, by one call with the whole text."""
    given = np.zeros((1, 16), np.int64)
    given[0, : len(tokens)] = tokens
    own = decoder(name)
    logits = first_call(name)(own.params, own.empty_cache(1, 16), given, np.array([len(tokens)]))[0]
    row = np.asarray(logits[0], np.float64)
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


def reference(
    name: str, prompt: tuple[int, ...], count: int, beams: int, penalty: float, early: bool, stop: Iterable[int]
) -> list[tuple[float, tuple[int, ...]]]:
    """Scores and tokens of the texts that a plain beam search finds."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, count + 1):
        every = [(s + p, (*text, t)) for s, text in live for t, p in enumerate(likely(name, (*prompt, *text)))]
        candidates = sorted(every, reverse=True)[: 2 * beams]
        ended += [(s / length**penalty, t) for s, t in candidates[:beams] if t[-1] in stop]
        ended = sorted(ended, reverse=True)[:beams]
        live = [(s, t) for s, t in candidates if t[-1] not in stop][:beams]
        if len(ended) == beams and (early or ended[-1][0] >= live[0][0] / length**penalty):
            return ended
    return sorted([*ended, *((s / count**penalty, t) for s, t in live)], reverse=True)[:beams]


CASES = {
    "stop tokens are rare": (3, 1.0, False, (2,)),
    "no penalty": (4, 0.0, False, range(0, 61, 7)),
    "long texts favoured, early stopping": (4, 2.0, True, range(0, 61, 5)),
    "no stop tokens": (2, 1.0, False, ()),
    "one beam": (1, 1.0, False, (2,)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("case", CASES)
def test_matches_a_plain_search(name: str, case: str) -> None:
    beams, penalty, early, stop = CASES[case]
    found = decoder(name).beam_search(
        list(map(list, PROMPTS)), 5, beams=beams, length_penalty=penalty, early_stopping=early, stop=list(stop)
    )
    for i, prompt in enumerate(PROMPTS):
        want = reference(name, prompt, 5, beams, penalty, early, stop)
        texts = [row[:n].tolist() for row, n in zip(found.tokens[i], found.lengths[i], strict=True)]
        assert texts == [list(t) for _, t in want]
        np.testing.assert_allclose(found.scores[i], [s for s, _ in want], rtol=1e-5)


def test_one_beam_is_greedy() -> None:
    own = decoder("shared")
    greedy = own.generate([list(p) for p in PROMPTS], 6, stop=())
    assert own.beam_search([list(p) for p in PROMPTS], 6, beams=1, stop=()).texts() == greedy.texts()


def test_fewer_texts_than_beams() -> None:
    found = decoder("shared").beam_search([1], 1, beams=decoders.VOCABULARY + 3)
    assert found.lengths[0, -4:].tolist() == [1, 0, 0, 0]
    assert np.isneginf(found.scores[0]).tolist() == [False] * decoders.VOCABULARY + [True] * 3


def test_invalid_arguments_raise() -> None:
    for beams in (0, 2.5, True):
        with pytest.raises(InputValueError, match=f"beams is {beams}; it is a whole number, 1 or more"):
            decoder("shared").beam_search([1], 3, beams=beams)  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="length_penalty is nan"):
        decoder("shared").beam_search([1], 3, length_penalty=float("nan"))
    with pytest.raises(InputValueError, match="length_penalty is 'long'"):
        decoder("shared").beam_search([1], 3, length_penalty="long")  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="max_new_tokens is '3'; it is a whole number"):
        decoder("shared").beam_search([1], "3")  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="early_stopping is 'never', not True or False"):
        decoder("shared").beam_search([1], 3, early_stopping="never")  # type: ignore[arg-type]
    with pytest.raises(InputShapeError, match=r"are 23 tokens, and the cache has room for 16: length=23"):
        decoder("shared").beam_search([1] * 20, 3, length=16)
