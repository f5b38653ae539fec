"""Mixtures of experts of com.microsoft."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from jax.test_util import check_grads

from onnx2jax import compat
from onnx2jax.eval.node_errors import DeviationWarning
from tests.ops.test_microsoft import MICROSOFT, onnxruntime_says, real
from tests.support.helpers import run_op

EXPERTS, TOKENS, HIDDEN, INNER = 4, 5, 16, 32
RNG = np.random.default_rng(4)
X, ROUTER = real(TOKENS, HIDDEN), 2 * real(TOKENS, EXPERTS)
FC1, FC2 = (real(EXPERTS, INNER, HIDDEN), real(EXPERTS, INNER)), (real(EXPERTS, HIDDEN, INNER), real(EXPERTS, HIDDEN))
FC3 = real(EXPERTS, INNER, HIDDEN), real(EXPERTS, INNER)
JOINED = real(EXPERTS, 2 * INNER, HIDDEN), real(EXPERTS, 2 * INNER)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def gelu(x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def swiglu(gate: Any, up: Any, alpha: float = 1.0, beta: float = 0.0, limit: float = np.inf) -> Any:
    gate = np.minimum(gate, limit)
    return gate * sigmoid(alpha * gate) * (np.clip(up, -limit, limit) + beta)


def routed(router: Any, k: int, normalized: int, given: Any = None) -> Any:
    """The weight of each expert for each token."""
    shares = np.exp(router) / np.exp(router).sum(axis=1, keepdims=True) if given is None else given
    shares = np.where(router >= np.sort(router, axis=1)[:, -k, None], shares, 0)
    return shares / shares.sum(axis=1, keepdims=True) if normalized else shares


def mixture(shares: Any, act: Any, fc1: Any, fc2: Any, fc3: Any = None) -> Any:
    y = 0
    for e in range(EXPERTS):
        hidden = [X @ w[e].T + b[e] for w, b in (fc1, fc3) if w is not None] if fc3 else [X @ fc1[0][e].T + fc1[1][e]]
        y = y + shares[:, e, None] * (act(*hidden) @ fc2[0][e].T + fc2[1][e])
    return y


def interleaved(hidden: Any) -> Any:
    return hidden[:, 0::2], hidden[:, 1::2]


def checked(name: str, inputs: list[Any], **attributes: Any) -> Any:
    """The result for all tokens, checked against that for the first token alone, which gathers its experts."""
    alone = [x[:1] if x is not None and len(x) == TOKENS else x for x in inputs]
    run = jax.jit(lambda *each: [run_op(name, *given, domain=MICROSOFT, **attributes) for given in each])
    y, first = run(inputs, alone)
    np.testing.assert_allclose(first, y[:1], rtol=1e-4, atol=1e-5)
    return np.asarray(y)


SIMPLE = {"relu": lambda x: np.maximum(x, 0), "gelu": gelu, "silu": lambda x: x * sigmoid(x), "identity": lambda x: x}
SHAPED = {"activation_alpha": 1.3, "activation_beta": 0.7, "swiglu_limit": 0.5}


@pytest.mark.parametrize(
    ("attributes", "fc1"),
    [
        *(({"activation_type": name, "k": 2}, FC1) for name in SIMPLE),
        ({"k": 1}, FC1),
        ({"k": 3, "normalize_routing_weights": 1}, FC1),
        ({"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2}, JOINED),
        ({"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2, **SHAPED}, JOINED),
    ],
)
def test_experts_match_onnxruntime(attributes: dict[str, Any], fc1: Any) -> None:
    inputs = [X, ROUTER, *fc1, *FC2]
    (expected,) = onnxruntime_says("MoE", inputs, 1, attributes)
    np.testing.assert_allclose(checked("MoE", inputs, **attributes), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("attributes", "act", "fc1", "fc3"),
    [
        ({"activation_type": "swiglu", **SHAPED}, lambda g, u: swiglu(g, u, 1.3, 0.7, 0.5), FC1, FC3),
        ({"activation_type": "silu"}, lambda g, u: g * sigmoid(g) * u, FC1, FC3),
        ({"activation_type": "swiglu", "swiglu_fusion": 2}, lambda h: swiglu(*np.split(h, 2, axis=1)), JOINED, None),
    ],
)
def test_experts_without_a_cpu_kernel_in_onnxruntime(attributes: Any, act: Any, fc1: Any, fc3: Any) -> None:
    """As the schema writes them out."""
    inputs = [X, ROUTER, *fc1, *FC2, *(fc3 or ())]
    expected = mixture(routed(ROUTER, 2, 0), act, fc1, FC2, fc3)
    np.testing.assert_allclose(checked("MoE", inputs, k=2, **attributes), expected, rtol=2e-4, atol=2e-5)


def packed(values: Any, bits: int) -> Any:
    """The first value of a byte in its low bits; the last byte may be part empty."""
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % (8 // bits))])
    parts = values.reshape(*values.shape[:-1], -1, 8 // bits) << bits * np.arange(8 // bits)
    return parts.sum(axis=-1).astype(np.uint8)


def quantized(rows: int, size: int, bits: int, block: int, zeros: bool) -> tuple[Any, Any, Any, Any]:
    """Random packed weights, scales and zero points, and the real weights."""
    blocks = size // block if block else 1
    values = RNG.integers(0, 2**bits, (EXPERTS, rows, blocks, size // blocks))
    scale = (RNG.uniform(0.5, 1, (EXPERTS, rows, blocks)) / 2**bits).astype(np.float32)
    zero = RNG.integers(0, 2**bits, scale.shape) if zeros else np.full(scale.shape, 2 ** (bits - 1))
    real_weight = ((values - zero[..., None]) * scale[..., None]).reshape(EXPERTS, rows, size).astype(np.float32)
    shape = scale.shape if block else scale.shape[:2]
    points = packed(zero.reshape(shape), bits) if zeros else None
    return packed(values.reshape(EXPERTS, rows, size), bits), scale.reshape(shape), points, real_weight


PAIRED = [(2, 0, False), (4, 0, True), (8, 0, False), (2, 16, True), (4, 16, False), (8, 16, True)]
"""Each number of bits, and each size of a block, without zero points and with them."""
OTHERS = [pytest.param(bits, block, not zeros, marks=pytest.mark.extended) for bits, block, zeros in PAIRED]


@pytest.mark.parametrize(("bits", "block", "zeros"), [*PAIRED, *OTHERS])
def test_experts_with_packed_weights(bits: int, block: int, zeros: bool) -> None:
    w1, s1, z1, real1 = quantized(2 * INNER, HIDDEN, bits, block, zeros)
    w2, s2, z2, real2 = quantized(HIDDEN, INNER, bits, block, zeros)
    inputs = [X, ROUTER, w1, s1, JOINED[1], w2, s2, FC2[1], None, None, None, z1, z2]
    attributes = {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2, "normalize_routing_weights": 1}
    attributes |= {"expert_weight_bits": bits} | ({"block_size": block} if block else {})
    y = checked("QMoE", inputs, **attributes)
    exact = mixture(routed(ROUTER, 2, 1), lambda h: swiglu(*interleaved(h)), (real1, JOINED[1]), (real2, FC2[1]))
    np.testing.assert_allclose(y, exact, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(y, onnxruntime_says("QMoE", inputs, 1, attributes)[0], rtol=2e-3, atol=2e-3)


WIDE, NARROW = quantized(INNER, HIDDEN, 8, 16, True), quantized(HIDDEN, INNER, 4, 16, True)
MIXED = [X, ROUTER, *WIDE[:2], FC1[1], *NARROW[:2], FC2[1], None, None, None, WIDE[2], NARROW[2]]
BITS = {"fc1_expert_weight_bits": 8, "block_size": 16, "k": 2, "normalize_routing_weights": 1}


@pytest.mark.parametrize("normalized", [0, 1])
def test_router_weights_as_an_input(normalized: int) -> None:
    """The router chooses, what is given weighs; without it, the softmax does, normalized on request alone."""
    given = abs(real(TOKENS, EXPERTS))
    layers = (WIDE[3], FC1[1]), (NARROW[3], FC2[1])
    for more, weights in ((None, None), (given, given)):
        warned = more is None and not normalized  # onnxruntime's CPU provider does otherwise
        with pytest.warns(DeviationWarning, match="does") if warned else nullcontext():
            y = checked("QMoE", [*MIXED, None, more], **BITS | {"normalize_routing_weights": normalized})
        expected = mixture(routed(ROUTER, 2, normalized, weights), SIMPLE["relu"], *layers)
        np.testing.assert_allclose(y, expected, rtol=2e-4, atol=2e-5)


def test_ties_between_experts_go_to_the_last() -> None:
    router = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [2, 2, 1, 2], [0, 0, 0, 0], [3, 0, 0, 0]], np.float32)
    inputs = [X, router, *FC1, *FC2]
    (expected,) = onnxruntime_says("MoE", inputs, 1, {"k": 2})
    np.testing.assert_allclose(checked("MoE", inputs, k=2), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "said"),
    [
        ("MoE", [X, ROUTER, *FC1, *FC2], {"k": 5}, "has 4 experts, .* and k is 5"),
        ("MoE", [X, ROUTER, *JOINED, *FC2], {}, r"A must have the shape \[rows, K=32\]"),
        ("MoE", [X, ROUTER[:3], *FC1, *FC2], {}, "router_probs .*tokens=5"),
        ("MoE", [X, ROUTER, *FC1, *FC2], {"activation_type": "swiglu"}, "either fc3_experts_weights or swiglu_fusion"),
        ("MoE", [X, ROUTER, *FC1, *FC2], {"use_sparse_mixer": 1, "k": 2}, "CPU provider ignores"),
        ("QMoE", MIXED, {**BITS, "quant_type": "fp4"}, "quant_type .* must be 'int'"),
        ("QMoE", MIXED, {**BITS, "block_size": 32}, "fc1_scales must be given, one per"),
        ("QMoE", MIXED, {**BITS, "block_size": 8}, r"fc1_scales must have .*blocks=2"),
        (
            "QMoE",
            MIXED,
            {**BITS, "fc1_expert_weight_bits": 4},
            "rows of 32 4-bit values, the input 16",
        ),
        ("QMoE", [*MIXED[:12], MIXED[12][..., :0]], BITS, r"fc2_zero_points must have .*bytes=1"),
        ("QMoE", [*MIXED, *[None] * 2, real(4)], BITS, "fp4 and fp8"),
    ],
)
def test_mismatched_experts_are_rejected(name: str, inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_expert_gradients(tokens: int) -> None:
    """The gathered and the dense form, against differences."""
    x, router = X[:tokens].astype(np.float64), ROUTER[:tokens].astype(np.float64)
    weights = [w.astype(np.float64) for w in (*JOINED, *FC2)]
    options = {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2, "domain": MICROSOFT}

    def loss(x: Any, router: Any, first: Any) -> Any:
        return (run_op("MoE", x, router, first, *weights[1:], **options) ** 2).sum()

    with compat.enable_x64():
        check_grads(jax.jit(loss), (x, router, weights[0]), order=1, modes=["rev"], rtol=1e-4, atol=1e-4)
