"""Sampling draws exactly the tokens that its limits leave, with their renormalised probabilities."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder, Sampling
from onnx2jax.generation.sampling import as_arrays, greedy
from tests.support import decoders

DRAWS = 4000
LOGITS = np.log(np.array([0.02, 0.3, 0.08, 0.25, 0.15, 0.2], np.float32))


draw = jax.jit(lambda sampling, logits, key: sampling(logits, key))
"""Compiled once for all limits given as arrays."""


def kept(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[int, float]:
    """The remaining tokens and their probabilities."""
    left = dict(enumerate(np.exp(LOGITS.astype(np.float64) / temperature)))
    ranked = sorted(left, key=lambda t: -left[t])
    if top_k:
        ranked = ranked[:top_k]
    total, chosen, together = sum(left[t] for t in ranked), [], 0.0
    for token in ranked:
        if together / total < top_p - 1e-9:
            chosen.append(token)
        together += left[token]
    chosen = [t for t in chosen if left[t] >= min_p * left[chosen[0]]]
    return {t: left[t] / sum(left[c] for c in chosen) for t in chosen}


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.01},
        {"top_p": 0.54},
        {"top_p": 0.56},
        {"top_p": 0.97},
        {"min_p": 0.26},
        {"min_p": 0.6},
        {"min_p": 1.0},
        {"top_k": 4, "top_p": 0.6},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.6, "temperature": 1.3},
        {"temperature": 0.2, "min_p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("checked", [True, False], ids=["arrays", "numbers"])
def test_draws_follow_the_limits(limits: dict[str, float], checked: bool) -> None:
    sampling = Sampling(**limits)  # type: ignore[arg-type]
    operands = np.tile(LOGITS, (DRAWS, 1)), jax.random.key(7)
    drawn = draw(as_arrays(sampling), *operands) if checked else jax.jit(sampling)(*operands)
    counts = np.bincount(drawn, minlength=len(LOGITS)) / DRAWS
    wanted = kept(**limits)  # type: ignore[arg-type]
    assert set(np.flatnonzero(counts)) == set(wanted)
    np.testing.assert_allclose([counts[t] for t in wanted], list(wanted.values()), atol=4.5 * 0.5 / DRAWS**0.5)


@pytest.mark.parametrize("sampling", [greedy, Sampling(temperature=0.0), Sampling(top_k=1)], ids=["greedy", "0", "k=1"])
def test_ties_take_the_first_token(sampling: Sampling) -> None:
    logits = np.array([[0, 3, 1, 3], [-np.inf, -np.inf, -1, -np.inf]], np.float32)
    assert jax.jit(sampling)(logits, jax.random.key(0)).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = np.array([[-np.inf, 5, 9, -np.inf]] * 50, np.float32)
    drawn = set(draw(as_arrays(Sampling(temperature=temperature)), logits, jax.random.key(0)).tolist())
    assert drawn == ({2} if temperature < 1 else {1, 2})


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return onnx2jax.decoder(onnx2jax.convert(decoders.group_query().proto))


def test_draws_depend_on_the_seed_and_differ_by_row(decoder: Decoder) -> None:
    warm = Sampling(temperature=2.0)

    def texts(rng: object) -> list[list[int]]:
        return decoder.generate([[5, 17]] * 3, 12, sampling=warm, rng=rng).texts()

    first = texts(3)
    assert texts(3) == texts(jax.random.key(3)) == first
    assert len({*map(tuple, first), *map(tuple, texts(4))}) == 6
    assert texts(None) == texts(0)


def test_limits_that_leave_one_token_are_greedy(decoder: Decoder) -> None:
    greedy_texts = decoder.generate([[5, 17], [1, 2], [3, 4]], 12).texts()
    for cold in (Sampling(temperature=0), Sampling(temperature=5.0, top_k=1), Sampling(min_p=1.0)):
        assert decoder.generate([[5, 17], [1, 2], [3, 4]], 12, sampling=cold).texts() == greedy_texts
