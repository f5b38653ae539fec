"""Speculative decoding returns the large decoder's greedy text, whatever the draft."""

from __future__ import annotations

import numpy as np
import pytest

from onnx2jax.errors import InputTypeError, InputValueError, UnsupportedError
from tests.generation.shared import P, Q, decoder, greedy

GROUP, INT4 = "group query", "group query, 4 bits"
SLOTS = "ScatterElements, positions from slots"


@pytest.mark.parametrize(
    ("large", "small", "count"),
    [
        pytest.param(GROUP, INT4, 3, marks=pytest.mark.extended),
        pytest.param("Concat", GROUP, 1, marks=pytest.mark.extended),
        ("Concat", INT4, 3),
        (GROUP, GROUP, 3),
        (SLOTS, INT4, 3),
    ],
)
def test_matches_the_large_decoder(large: str, small: str, count: int) -> None:
    found = decoder(large).speculate([P, Q], 12, decoder(small), count=count, stop=())
    assert found.texts() == [greedy(large, p, 12) for p in (P, Q)]
    assert found.rounds is not None
    assert -(-11 // (count + 1)) <= found.rounds <= 11
    if large == small:
        assert found.rounds == -(-11 // (count + 1))


def test_stops_within_a_round() -> None:
    own = decoder(GROUP)
    one, two = (greedy(GROUP, p, 12) for p in (P, Q))
    for stop in ([one[4], two[7]], [one[4:6]]):
        want = own.generate([P, Q], 12, stop=stop)
        found = own.speculate([P, Q], 12, own, count=3, stop=stop)
        assert found.texts() == want.texts()
        np.testing.assert_array_equal(found.last, want.last)


def test_rows_with_different_acceptance_stay_within_the_cache() -> None:
    """The last round fills it."""
    prompts = [[1, 60, 4, 9, 33, 2, 50, 7], [44, 3]]
    found = decoder("Concat").speculate(prompts, 52, decoder(INT4), count=3, stop=(), length=8 + 52 + 4)
    assert found.texts() == [greedy("Concat", p, 52) for p in prompts]
    assert int(found.cache.end) <= found.cache.length


def test_generate_continues_a_speculation() -> None:
    own = decoder("Concat")
    found = own.speculate([P, Q], 6, decoder(INT4), count=3, length=64)
    texts = own.generate([[1, 4]] * 2, 5, after=found).texts()
    assert texts == [greedy("Concat", [*p, *greedy("Concat", p, 6), 1, 4], 5) for p in (P, Q)]


def test_invalid_arguments_raise() -> None:
    own = decoder(GROUP)
    with pytest.raises(
        UnsupportedError, match=r"the cache 'past_conv.0' is a recurrent state, which cannot be rolled back"
    ):
        own.speculate([P, Q], 3, decoder("convolution"))
    with pytest.raises(InputValueError, match="count is 0; it is a whole number, 1 or more"):
        own.speculate([P, Q], 3, own, count=0)
    with pytest.raises(InputValueError, match="max_new_tokens is 'x'; it is a whole number, 1 or more"):
        own.speculate([P, Q], "x", own)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="draft is Model, not a Decoder"):
        own.speculate([P, Q], 3, own.model)  # type: ignore[arg-type]
