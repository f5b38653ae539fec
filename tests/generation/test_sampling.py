"""Sampling draws exactly the tokens that its limits leave, with their renormalised probabilities."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
import pytest

from onnx2jax import Sampling
from onnx2jax.errors import InputNameError, InputValueError
from onnx2jax.generation.sampling import as_arrays, greedy
from tests.generation.shared import decoder

DRAWS = 4000
LOGITS = np.log(np.array([0.02, 0.3, 0.08, 0.25, 0.15, 0.2], np.float32))


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


LIMITS: list[dict[str, Any]] = [
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
]


def drawn(samplings: list[Any], rows: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    """The tokens that each draws from equal logits with an equal key, in one program."""
    return jax.jit(lambda each, rows, key: [s(rows, key) for s in each])(samplings, rows, jax.random.key(seed))


def in_one_program(functions: list[Any], rows: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    """As ``drawn``, for samplings whose limits are constants of the program."""
    return jax.jit(lambda rows, key: [f(rows, key) for f in functions])(rows, jax.random.key(seed))


def test_draws_follow_the_limits(subtests: pytest.Subtests) -> None:
    samplings, rows = [Sampling(**limits) for limits in LIMITS], np.tile(LOGITS, (DRAWS, 1))
    traced, fixed = drawn([as_arrays(s) for s in samplings], rows, 7), in_one_program(samplings, rows, 7)
    for kind, results in (("arrays", traced), ("numbers", fixed)):
        for limits, tokens in zip(LIMITS, results, strict=True):
            with subtests.test(kind, **limits):
                counts, wanted = np.bincount(tokens, minlength=len(LOGITS)) / DRAWS, kept(**limits)
                assert set(np.flatnonzero(counts)) == set(wanted)
                tolerance = 4.5 * 0.5 / DRAWS**0.5
                np.testing.assert_allclose([counts[t] for t in wanted], list(wanted.values()), atol=tolerance)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1}, "temperature is -1; it is a number, 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan; it is"),
        ({"temperature": "0.7"}, "temperature is '0.7'; it is a number"),
        ({"temperature": None}, "temperature is None; it is a number"),
        ({"temperature": [0.7]}, r"temperature is \[0\.7\]; it is a number"),
        ({"temperature": True}, "temperature is True; it is a number"),
        ({"top_k": -1}, "top_k is -1; it is a whole number"),
        ({"top_k": 2.5}, r"top_k is 2\.5; it is a whole number"),
        ({"top_k": float("inf")}, "top_k is inf; it is a whole number"),
        ({"top_p": 1.5}, r"top_p is 1\.5; it is a number above 0, at most 1"),
        ({"top_p": 0}, "top_p is 0; .*temperature 0 takes the likeliest token"),
        ({"min_p": np.float32(2)}, "min_p is .*2.*; it is a number from 0 to 1"),
    ],
)
def test_invalid_values_are_rejected_at_construction(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputValueError, match=said):
        Sampling(**values)


def test_misspelt_keywords_are_answered() -> None:
    with pytest.raises(InputNameError, match=r"Sampling: unknown keyword temp; .*'temperature'"):
        Sampling(temp=0.7)  # type: ignore[call-arg]


def test_a_sampling_is_a_pytree_of_any_leaves() -> None:
    warm = Sampling(temperature=0.5, top_k=np.int64(3))  # type: ignore[arg-type]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(warm)]
    assert names == [".temperature", ".top_k", ".top_p", ".min_p"]
    assert jax.tree.map(lambda v: v, warm) == warm == pickle.loads(pickle.dumps(warm))
    assert jax.tree.map(lambda _: "any", warm).top_p == "any"
    with pytest.raises(InputValueError, match=r"top_p is 2\.0"):
        as_arrays(jax.tree.map(lambda v: 2 * v, warm))


def test_ties_take_the_first_token() -> None:
    rows = np.array([[0, 3, 1, 3], [-np.inf, -np.inf, -1, -np.inf]], np.float32)
    for tokens in in_one_program([greedy, Sampling(temperature=0.0), Sampling(top_k=1)], rows):
        assert tokens.tolist() == [1, 2]


def test_extreme_temperatures() -> None:
    rows = np.array([[-np.inf, 5, 9, -np.inf]] * 50, np.float32)
    cold, hot = drawn([as_arrays(Sampling(temperature=t)) for t in (1e-30, 1e30)], rows)
    assert (set(cold.tolist()), set(hot.tolist())) == ({2}, {1, 2})


def test_draws_depend_on_the_seed_and_differ_by_row() -> None:
    own, warm = decoder("group query"), Sampling(temperature=2.0)

    def texts(rng: object) -> list[list[int]]:
        return own.generate([[5, 17]] * 2, 12, sampling=warm, rng=rng).texts()

    first = texts(3)
    assert texts(3) == texts(jax.random.key(3)) == first
    assert len({*map(tuple, first), *map(tuple, texts(4))}) == 4
    assert texts(None) == texts(0)


def test_each_token_has_its_own_random_numbers() -> None:
    def uniform(rows: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.randint(key, rows.shape[:1], 0, rows.shape[1])

    (text,) = decoder("group query").generate([[5, 17]], 12, sampling=uniform, rng=3).texts()
    assert len({*text}) > 4


def test_limits_that_leave_one_token_are_greedy() -> None:
    own = decoder("group query")
    wanted = own.generate([[5, 17], [1, 2]], 12).texts()
    for cold in (Sampling(temperature=0), Sampling(temperature=5.0, top_k=1), Sampling(min_p=1.0)):
        assert own.generate([[5, 17], [1, 2]], 12, sampling=cold).texts() == wanted
