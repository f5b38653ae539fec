"""Speculative decoding returns the large decoder's greedy text, whatever the draft."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from onnx2jax.errors import InputTypeError, InputValueError, UnsupportedError
from tests.support import decoders

PROMPTS = [[5, 17, 3, 40, 8], [9, 2, 31]]
FILES = {
    "shared": decoders.group_query,
    "int4": lambda: decoders.group_query(bits="symmetric"),
    "appended": decoders.appending,
    "places": lambda: decoders.static(64, positions=False),
    "state": decoders.convolving,
}


@cache
def decoder(name: str) -> Decoder:
    return onnx2jax.decoder(onnx2jax.convert(FILES[name]().proto))


@pytest.mark.parametrize(
    ("large", "small", "count"),
    [
        ("shared", "int4", 3),
        ("appended", "shared", 1),
        ("appended", "shared", 3),
        ("shared", "shared", 3),
        ("places", "int4", 3),
    ],
)
def test_matches_the_large_decoder(large: str, small: str, count: int) -> None:
    own, draft = decoder(large), decoder(small)
    want = own.generate(PROMPTS, 12, stop=())
    found = own.speculate(PROMPTS, 12, draft, count=count, stop=())
    assert found.texts() == want.texts()
    assert found.rounds is not None
    assert -(-11 // (count + 1)) <= found.rounds <= 11
    if large == small:
        assert found.rounds == -(-11 // (count + 1))


def test_stops_within_a_round() -> None:
    own = decoder("shared")
    tokens = own.generate(PROMPTS, 12, stop=()).tokens
    for stop in ([int(tokens[0, 4]), int(tokens[1, 7])], [tokens[0, 4:6].tolist()]):
        want = own.generate(PROMPTS, 12, stop=stop)
        found = own.speculate(PROMPTS, 12, own, count=3, stop=stop)
        assert found.texts() == want.texts()
        np.testing.assert_array_equal(found.last, want.last)


def test_rows_with_different_acceptance_stay_within_the_cache() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n).tolist() for n in (2, 8, 3, 5, 4, 6)]
    own = decoder("appended")
    found = own.speculate(prompts, 30, decoder("int4"), count=3, stop=(), length=8 + 30 + 4)
    assert found.texts() == own.generate(prompts, 30, stop=()).texts()
    assert int(found.cache.end) <= found.cache.length


def test_generate_continues_a_speculation() -> None:
    own = decoder("appended")
    found, want = own.speculate(PROMPTS, 6, own, count=3, length=64), own.generate(PROMPTS, 6, length=64)
    after = [own.generate([[1, 4]], 5, after=each).texts() for each in (found, want)]
    assert after[0] == after[1]


def test_invalid_arguments_raise() -> None:
    own = decoder("shared")
    with pytest.raises(
        UnsupportedError, match=r"the cache 'past_conv.0' is a recurrent state, which cannot be rolled back"
    ):
        own.speculate(PROMPTS, 3, decoder("state"))
    with pytest.raises(InputValueError, match="count is 0; it is a whole number, 1 or more"):
        own.speculate(PROMPTS, 3, own, count=0)
    with pytest.raises(InputValueError, match="max_new_tokens is 'x'; it is a whole number, 1 or more"):
        own.speculate(PROMPTS, "x", own)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="draft is Model, not a Decoder"):
        own.speculate(PROMPTS, 3, own.model)  # type: ignore[arg-type]
