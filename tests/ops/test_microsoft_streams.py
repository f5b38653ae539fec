"""com.microsoft: gates, branches and streams of hidden states, hashes of n-grams, paths; onnxruntime is the judge."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.ops.test_microsoft import F32, I32, MICROSOFT, onnxruntime_says, scalar
from tests.support.helpers import run_op
from tests.support.joined import check_gradients_of, derived, results_of

RNG = np.random.default_rng(8)  # its own: the operands do not depend on what else was imported


def real(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.7).astype(F32)


IDS = np.array([[1, 7, 3, 4, 5], [9, 8, 7, 7, 1]])
PRIMES, SIZES = np.array([3, 5, 7]), np.array([11, 13])
PAST, SEGMENTS = np.array([[7, 4], [7, 7]]), I32([[0, 0, 1, 1, 1], [0] * 5])
HASHED = {"max_ngram_size": 3, "n_head_per_ngram": 1, "pad_id": 2}
ENGRAM = [real(1, 2, 2, 3), real(1, 2, 2, 3), real(1, 2, 3), *(real(2, 3) for _ in range(3))]
STREAMS, FLAT = real(4, 2, 3), real(4, 6)

# operator, inputs, outputs, attributes; the first row of an operator is run in every type too
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    ("ScaledSiLU", [real(2, 3), scalar(0.7)], 1, {"alpha": 0.5}),
    ("ScaledSiLU", [real(2, 3)], 1, {"alpha": 0.5}),
    ("GatedAdd", [real(2, 3), real(2, 3), real(2, 1)], 1, {}),
    ("GatedRMSNorm", [real(2, 6), real(3), real(2, 6)], 1, {}),
    ("GatedRMSNorm", [real(2, 6), real(6), real(2, 6)], 1, {"activation": "sigmoid", "epsilon": 0.1}),
    ("BranchwiseRMSNorm", [STREAMS, real(3)], 1, {}),
    ("BranchwiseRMSNorm", [FLAT, real(6)], 1, {"num_branches": 2}),
    ("BranchwiseRMSNorm", [STREAMS, real(2, 3)], 1, {"epsilon": 0.1}),
    ("BranchwiseRMSNorm", [FLAT], 1, {"num_branches": 3}),
    ("HyperConnectionPreMix", [STREAMS, real(4, 2)], 1, {"reduction_scale": 0.5}),
    ("HyperConnectionPreMix", [STREAMS, real(4, 2, 1)], 1, {}),
    ("HyperConnectionPreMix", [STREAMS, real(4, 2, 3)], 1, {}),
    ("HyperConnectionPreMix", [FLAT, real(4, 6)], 1, {"num_branches": 2}),
    ("HyperConnectionPostMix", [STREAMS, real(4, 3), real(4, 2), real(4, 2, 2)], 1, {}),
    ("HyperConnectionPostMix", [FLAT, real(4, 3), real(4, 2, 1)], 1, {"num_branches": 2}),
    ("HyperConnectionPostMix", [STREAMS, real(4, 3), real(4, 2, 3)], 1, {}),
    ("EngramGate", ENGRAM, 2, {}),
    ("NGramHashMapping", [IDS, PRIMES, np.array([11, 13, 17, 19])], 2, {**HASHED, "n_head_per_ngram": 2}),
    ("NGramHashMapping", [IDS, PRIMES, SIZES, PAST, np.array([0, 11]), np.array(7)], 2, HASHED),
    ("NGramHashMapping", [IDS, PRIMES, SIZES, PAST, None, np.array(7)], 2, {**HASHED, "reset_on_eos": 1}),
    ("NGramHashMapping", [IDS, -PRIMES, SIZES, PAST, None, np.array(7), SEGMENTS], 2, {**HASHED, "reset_on_eos": 1}),
    ("NGramHashMapping", [IDS[:, :1], PRIMES, SIZES, PAST, None, None, SEGMENTS[:, :1]], 2, HASHED),
    (
        "NGramHashMapping",
        [I32([[1, 2, 3]]), I32([2**30 + 1, 2**29 + 3]), I32([11])],
        2,
        {**HASHED, "max_ngram_size": 2},
    ),
    ("DynamicTimeWarping", [real(4, 6)], 1, {}),
    ("DynamicTimeWarping", [real(1, 7, 3)], 1, {}),
]


def test_results_match_the_definition(subtests: pytest.Subtests) -> None:
    for case, (name, inputs, count, attributes), results in results_of(ROWS):
        with subtests.test(msg=case):
            for result, want in zip(results, onnxruntime_says(name, inputs, count, attributes), strict=True):
                assert result.dtype == want.dtype and result.shape == want.shape
                np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "said"),
    [
        ("GatedAdd", [real(2, 3), real(2, 3), real(3)], {}, r"gate .*\[2, 1\]"),
        ("GatedAdd", [real(2, 3), real(1, 3), real(2, 1)], {}, "Y must"),
        ("GatedRMSNorm", [real(2, 6), real(3), real(6)], {}, "gate must"),
        ("GatedRMSNorm", [real(2, 6), real(3), real(2, 6)], {"activation": "tanh"}, "'tanh'"),
        ("BranchwiseRMSNorm", [STREAMS, real(2)], {}, "H=3"),
        ("HyperConnectionPreMix", [STREAMS, real(4, 3)], {}, "C=2"),
        ("HyperConnectionPostMix", [STREAMS, real(4, 3), real(4, 3)], {}, "C=2"),
        ("HyperConnectionPostMix", [STREAMS, real(1, 3), real(4, 2)], {}, "block_output"),
        ("EngramGate", [*ENGRAM[:3], real(3), real(2, 3)], {}, "key_norm_scale"),
        ("NGramHashMapping", [IDS, PRIMES, np.array([11, 0])], HASHED, "positive"),
        ("NGramHashMapping", [IDS, PRIMES, SIZES[:0]], {**HASHED, "max_ngram_size": 1}, "at least 2"),
        ("EngramGate", [real(1, 2, 2, 3), real(1, 2, 2, 3), real(1, 2, 4), real(2, 3), real(2, 3)], {}, "H=3"),
        (
            "EngramGate",
            [real(1, 2, 2, 3), real(1, 2, 2, 3), real(1, 2, 3), real(2, 3), real(2, 3)],
            {"n_outputs": 2},
            "conv_norm_scale",
        ),
        ("NGramHashMapping", [IDS, PRIMES, SIZES[:1]], HASHED, "heads=2"),
        ("NGramHashMapping", [IDS, PRIMES, SIZES, PAST[:1]], HASHED, "batch=2"),
        ("DynamicTimeWarping", [real(2, 3, 4)], {}, r"\[1, M, N\]"),
    ],
)
def test_unsupported_options_are_rejected(name: str, inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)


def test_shortest_path_with_equal_costs() -> None:
    for rows, columns in itertools.product((1, 3, 4), (1, 2, 4)):
        cost = RNG.integers(0, 3, (rows, columns)).astype(F32)
        least = np.full((rows + 1, columns + 1), np.inf)
        least[0, 0] = 0
        for i, j in np.ndindex(rows, columns):
            least[i + 1, j + 1] = cost[i, j] + min(least[i, j], least[i, j + 1], least[i + 1, j])
        path = run_op("DynamicTimeWarping", cost, domain=MICROSOFT)
        assert cost[tuple(path)].sum() == least[-1, -1]
        assert path[:, 0].tolist() == [0, 0] and path[:, -1].tolist() == [rows - 1, columns - 1]
        assert {tuple(step) for step in np.diff(path).T.tolist()} <= {(0, 1), (1, 0), (1, 1)}


def test_hashes_of_chunks_match_the_whole() -> None:
    options = {**HASHED, "reset_on_eos": 1, "domain": MICROSOFT, "n_outputs": 2}
    whole, end = run_op("NGramHashMapping", IDS, PRIMES, SIZES, None, None, np.array(7), **options)
    first, past = run_op("NGramHashMapping", IDS[:, :2], PRIMES, SIZES, None, None, np.array(7), **options)
    second, last = run_op("NGramHashMapping", IDS[:, 2:], PRIMES, SIZES, past, None, np.array(7), **options)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(last, end)


DIFFERENTIABLE = ["ScaledSiLU", "GatedAdd", "GatedRMSNorm", "BranchwiseRMSNorm", "EngramGate"]
DIFFERENTIABLE += ["HyperConnectionPreMix", "HyperConnectionPostMix"]


def test_gradients() -> None:
    check_gradients_of({name: derived(next(row for row in ROWS if row[0] == name)) for name in DIFFERENTIABLE})
