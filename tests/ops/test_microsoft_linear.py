"""Linear attention of com.microsoft, and what stands before and behind it, as onnxruntime has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.test_microsoft import MICROSOFT, onnxruntime_says, real
from tests.support.helpers import run_op

DECAY, BETA = -abs(real(2, 5, 4)), abs(real(2, 5, 4))
PAIRS = [real(2, 5, 8), real(2, 5, 8)]
"""Queries and keys, two heads of each."""
VALUES = real(2, 5, 24)
"""Of four heads."""
SHARED = {"q_num_heads": 2, "kv_num_heads": 4}
LINE, TAPS, BIAS = real(2, 4, 5), real(4, 1, 3), real(4)

CASES: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    ("LinearAttention", [PAIRS[0], real(2, 5, 16), VALUES, None, DECAY, BETA], 2, SHARED),
    ("LinearAttention", [*PAIRS, VALUES, real(2, 4, 4, 6), DECAY, BETA[..., :1].copy()], 2, SHARED),
    ("LinearAttention", [*PAIRS, VALUES], 2, {**SHARED, "update_rule": "linear", "scale": 0.3}),
    ("LinearAttention", [*PAIRS, VALUES, None, -abs(real(2, 5, 16))], 2, {**SHARED, "update_rule": "gated"}),
    (
        "LinearAttention",
        [real(2, 5, 16), PAIRS[1], VALUES[..., :12].copy(), None, None, BETA[..., :2].copy()],
        2,
        {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": "delta"},
    ),
    ("LinearAttentionGate", [real(2, 5, 4), real(4)[:4], DECAY[0, 0].copy()], 1, {}),
    ("LinearAttentionGate", [real(2, 5, 4), real(4), DECAY[0, 0].copy(), BETA], 2, {}),
    ("CausalConvWithState", [LINE, TAPS, BIAS, real(2, 4, 2)], 2, {"activation": "silu"}),
    ("CausalConvWithState", [LINE, TAPS, None, real(2, 4, 6)], 2, {"dilation": 3}),
    (
        "CausalConvWithState",
        [real(2, 5, 2, 2), TAPS, BIAS, real(2, 4, 2, 2)],
        2,
        {"channels_last": 1, "dilation": 2, "activation": "swish"},
    ),
]


@pytest.mark.parametrize(("name", "inputs", "count", "attributes"), CASES)
def test_onnxruntime_agrees(name: str, inputs: list[Any], count: int, attributes: dict[str, Any]) -> None:
    expected = onnxruntime_says(name, inputs, count, attributes)
    results = run_op(name, *inputs, domain=MICROSOFT, n_outputs=count, **attributes)
    for result, want in zip(results if count > 1 else [results], expected, strict=True):
        assert result.shape == want.shape
        np.testing.assert_allclose(result, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "inputs", "count", "attributes", "said"),
    [
        ("LinearAttention", [*PAIRS, VALUES, None, DECAY, BETA], 2, {**SHARED, "q_num_heads": 3}, "heads"),
        ("LinearAttention", [*PAIRS, VALUES, None, DECAY, BETA], 2, {**SHARED, "state_window": 1}, "state_window"),
        ("LinearAttentionGate", [real(2, 5, 4), real(4), real(4)], 2, {}, "names 2 outputs"),
        ("LinearAttentionGate", [real(2, 5, 4), real(3), real(4)], 1, {}, r"dt_bias .*heads=4"),
        ("CausalConvWithState", [LINE, TAPS, None, real(2, 4, 2)], 2, {"dilation": 2}, r"past_state .*2, 4, 4"),
        ("CausalConvWithState", [LINE, TAPS], 2, {"dilation": 0}, "dilation"),
        ("CausalConvWithState", [LINE, TAPS], 2, {"ndim": 2}, "ndim"),
    ],
)
def test_mismatched_operands_are_rejected(
    name: str, inputs: list[Any], count: int, attributes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        onnxruntime_says(name, inputs, count, attributes)
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *inputs, domain=MICROSOFT, n_outputs=count, **attributes)
