"""Beam search against a plain reference that runs the whole text for every candidate."""

from __future__ import annotations

import numpy as np
import pytest

from onnx2jax.errors import InputShapeError, InputValueError
from tests.generation.shared import P, Q, decoder, greedy, searched
from tests.support import decoders

LIKELY = (57, 24, 49, 15)
"""Tokens that end texts of these prompts early; four, as the arrays of stop sequences of other tests have."""
CASES = {
    "stop tokens are rare": (3, 1.0, False, (2,)),
    "no penalty": (3, 0.0, False, LIKELY),
    "long texts favoured, early stopping": (3, 2.0, True, LIKELY),
    "no stop tokens": (3, 1.0, False, ()),
    "one beam": (1, 1.0, False, (2,)),
}


@pytest.mark.parametrize("name", ["group query", pytest.param("Concat", marks=pytest.mark.extended)])
@pytest.mark.parametrize("case", CASES)
def test_matches_a_plain_search(name: str, case: str) -> None:
    beams, penalty, early, stop = CASES[case]
    found = decoder(name).beam_search(
        [P, Q], 5, beams=beams, length_penalty=penalty, early_stopping=early, stop=list(stop)
    )
    for i, prompt in enumerate((P, Q)):
        want = searched(name, prompt, 5, beams, penalty, early, stop)
        texts = [row[:n].tolist() for row, n in zip(found.tokens[i], found.lengths[i], strict=True)]
        assert texts == [list(t) for _, t in want]
        np.testing.assert_allclose(found.scores[i], [s for s, _ in want], rtol=1e-5)


def test_one_beam_is_greedy() -> None:
    found = decoder("group query").beam_search([P, Q], 6, beams=1, stop=())
    assert found.texts() == [greedy("group query", p, 6) for p in (P, Q)]


def test_fewer_texts_than_beams() -> None:
    found = decoder("group query").beam_search([P, Q], 1, beams=decoders.VOCABULARY + 3)
    assert found.lengths[0, -4:].tolist() == [1, 0, 0, 0]
    assert np.isneginf(found.scores[0]).tolist() == [False] * decoders.VOCABULARY + [True] * 3


def test_invalid_arguments_raise() -> None:
    own = decoder("group query")
    for beams in (0, 2.5, True):
        with pytest.raises(InputValueError, match=f"beams is {beams}; it is a whole number, 1 or more"):
            own.beam_search([1], 3, beams=beams)  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="length_penalty is nan"):
        own.beam_search([1], 3, length_penalty=float("nan"))
    with pytest.raises(InputValueError, match="length_penalty is 'long'"):
        own.beam_search([1], 3, length_penalty="long")  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="max_new_tokens is '3'; it is a whole number"):
        own.beam_search([1], "3")  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="early_stopping is 'never', not True or False"):
        own.beam_search([1], 3, early_stopping="never")  # type: ignore[arg-type]
    with pytest.raises(InputShapeError, match=r"are 23 tokens, and the cache has room for 16: length=23"):
        own.beam_search([1] * 20, 3, length=16)
