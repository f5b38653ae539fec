"""What ``finetune`` trains by default: weights of layers, but no tables, masks, scales or constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest
from onnx import helper, numpy_helper, parser

import onnx2jax
from onnx2jax.errors import TrainingFormError
from tests.support.models import model, value

RNG = np.random.default_rng(0)
F = np.float32


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F)


def tuned(
    body: str, weights: dict[str, np.ndarray], trainable: Any = None, straight_through: bool = False, after: str = ""
) -> Any:
    """x [n, 4, 8] -> y, with nodes in ONNX's text form; ``after`` are functions of the domain ``here``."""
    opsets = '["" : 24, "com.microsoft" : 1, "here" : 1]'
    text = f"<ir_version: 10, opset_import: {opsets}> g (float[n,4,8] x) => (float[] y) {{ {body} }} {after}"
    proto = parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in weights.items())
    return onnx2jax.finetune(
        onnx2jax.convert(proto),
        lambda y, _: (y**2).mean(),
        optax.sgd(0.1),
        trainable=trainable,
        straight_through=straight_through,
    )


ANGLES = np.arange(4)[:, None] * np.float32([1, 0.1, 0.01, 0.001])
COS, SIN = np.cos(ANGLES).astype(F), np.sin(ANGLES).astype(F)
P4 = np.arange(4)
CONSTANTS = {"w": real(8, 8), "mean": real(8)}
ROTARY = "h = MatMul(x, w)  q = Unsqueeze(h, one)  r = RotaryEmbedding(q, cos, sin, p)  y = ReduceSum(r)"
OPERANDS = {"w": real(8, 8), "cos": COS, "sin": SIN, "p": P4[None], "one": np.array([1])}
INT8 = RNG.integers(-9, 9, (8, 8)).astype(np.int8)
MIXED = {"n": real(8), "d": real(8, 3), "u": real(3, 8), "i": real(8, 2), "w": real(4, 8), "k": real(8)}
CASES: dict[str, tuple[str, dict[str, np.ndarray], set[str]]] = {
    "rotary tables as operands": (ROTARY, OPERANDS, {"w"}),
    "rotary frequencies": (
        """h = MatMul(x, w)  s = ReduceSum <keepdims = 1> (x, last)  a = Mul(s, frequencies)
        c = Cos(a)  d = Sin(a)  m = Mul(h, c)  y = Add(m, d)""",
        {"w": real(8, 8), "frequencies": real(8), "last": np.array([2])},
        {"w"},
    ),
    "gathered rotary tables": (
        """h = MatMul(x, w)  c = Gather(cos, p)  d = Gather(sin, p)  t = Concat <axis = 1> (c, d)
        m = Mul(h, t)  e = Gather(table, p)  y = Add(m, e)""",
        {"w": real(8, 8), "cos": COS, "sin": SIN, "p": P4, "table": real(4, 8)},
        {"w", "table"},
    ),
    "masks": (
        "h = MatMul(x, w)  b = Add(h, bias)  s = Add(b, far)  p = Softmax(s)  y = Mul(p, low)",
        {
            "w": real(8, 8),
            "bias": real(8),
            "far": np.triu(np.full((4, 8), -1e9, F)),
            "low": np.tril(np.ones((4, 8), F)),
        },
        {"w", "bias"},
    ),
    "a decomposed normalisation": (
        """m = ReduceMean(x, last)  c = Sub(x, m)  v = Mul(c, c)  e = Add(v, epsilon)  s = Sqrt(e)  n = Div(c, s)
        g = Mul(n, gamma)  b = Add(g, beta)  y = Mul(b, half)""",
        {"last": np.array([2]), "gamma": real(8), "beta": real(8), "epsilon": F([1e-5]), "half": F([0.5])},
        {"gamma", "beta"},
    ),
    "scales of quantization": (
        """f = DequantizeLinear <axis = 1> (w, scale)  h = MatMul(x, f)  q = QuantizeLinear <axis = 1> (v, scale)
        g = DequantizeLinear <axis = 1> (q, scale)  y = MatMul(h, g)""",
        {"w": INT8, "scale": F([0.1] * 8), "v": real(8, 8)},
        {"v"},
    ),
    "scales of integer products": (
        """q, s, z = DynamicQuantizeLinear(x)  i = MatMulInteger(q, w, z)  c = Cast <to = 1> (i)
        m = Mul(c, scale)  y = Add(m, bias)""",
        {"w": INT8, "scale": F([0.1] * 8), "bias": real(8)},
        {"bias"},
    ),
    "scales of packed int4 weights": (
        """h = com.microsoft.MatMulNBits <K = 8, N = 8, block_size = 16, bits = 4> (x, w, scales)
        y = MatMul(h, v)""",
        {"w": RNG.integers(0, 255, (8, 1, 8)).astype(np.uint8), "scales": real(8, 1), "v": real(8, 8)},
        {"v"},
    ),
    "a fused router and gate": (
        "r, g = com.microsoft.RouterGateUpProj <router_size = 2> (x, w)  y = MatMul(g, v)",
        {"w": real(8, 8), "v": real(3, 8)},
        {"w", "v"},
    ),
    "hyper-connections and normalised heads": (
        """m, g, s = com.microsoft.HyperConnectionLowRankMix <num_branches = 2> (x, n, d, u, i)
        h = MatMul(m, w)  r = Unsqueeze(h, two)
        y = com.microsoft.RMSNormRotary <rotary_embedding_dim = 8> (r, k, p, cos, sin)""",
        MIXED | {"two": np.array([2]), "p": P4[None], "cos": COS, "sin": SIN},
        {*MIXED},
    ),
    "expressions of weights": (
        "o = Add(w, ones)  t = Transpose(o)  h = MatMul(x, t)  y = Sub(h, mean)",
        {"w": real(8, 8), "ones": np.ones((8, 8), F), "mean": real(8)},
        {"w", "ones"},
    ),
}


def check(tuning: Any, weights: dict[str, np.ndarray], trained: set[str]) -> None:
    """Asserts that some weights are trained, and that the others are listed with reasons."""
    assert set(tuning.trainable) == trained
    assert trained.isdisjoint(tuning.left_out()) and all(tuning.left_out().values())
    assert {n for n, v in weights.items() if v.dtype == F} <= trained | tuning.left_out().keys()


@pytest.mark.parametrize("name", CASES)
def test_layer_weights_are_trained_and_the_others_listed(name: str) -> None:
    body, weights, trained = CASES[name]
    check(tuned(body, weights, straight_through=name == "scales of quantization"), weights, trained)


def test_constant_nodes_are_weights_too() -> None:
    nodes = [helper.make_node("Constant", [], [n], value=numpy_helper.from_array(v)) for n, v in CONSTANTS.items()]
    nodes += [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Mul", ["h", "mean"], ["y"])]
    proto = model(nodes, [value("x", F, ["n", 4, 8])], [value("y", F, None)])
    check(onnx2jax.finetune(onnx2jax.convert(proto), lambda y, _: y.sum(), optax.sgd(0.1)), {}, {"w"})


def test_left_out_gives_reasons() -> None:
    left = tuned(ROTARY, OPERANDS).left_out()
    assert "angles by position" in left["cos"] and "angles by position" in left["sin"]
    assert tuned(ROTARY, OPERANDS, "cos").left_out()["w"] == "not selected by trainable="


def test_a_statistic_that_is_also_a_weight_is_explained() -> None:
    """Exporters merge equal tensors: in an untrained network scales and running variances are ones."""
    body = "h = LayerNormalization(x, one, zero)  y = BatchNormalization(h, s, zero, zero, one)"
    left = tuned(body, {"one": np.ones(8, F), "zero": np.zeros(8, F), "s": real(8)}).left_out()
    assert left.keys() == {"one", "zero"} and "the exporter merged equal tensors" in left["one"]


def test_a_named_table_is_trained() -> None:
    assert tuned(ROTARY, OPERANDS, ["cos", "w"]).trainable == ("w", "cos")
    assert set(tuned(ROTARY, OPERANDS, lambda name, _: name != "w").trainable) == {"cos", "sin"}


def test_a_model_without_weights_raises() -> None:
    with pytest.raises(TrainingFormError, match=r"must be named: .'mean': 'not a weight of a linear map"):
        tuned("y = Sub(x, mean)", {"mean": real(8)})


def test_weights_inside_functions_and_branches() -> None:
    body = """h = here.Layer(x, w, scale, zero)  t = ReduceMax <keepdims = 0> (x)  p = Cast <to = 9> (t)
        y = If (p) <then_branch = then () => (float[] a) { a = MatMul(h, u) },
                    else_branch = other () => (float[] b) { b = Sub(h, m) }>"""
    layer = """<domain: "here", opset_import: ["" : 24]> Layer (a, k, s, z) => (d) {
        b = MatMul(a, k)  c = Mul(b, s)  d = Sub(c, z) }"""
    weights = {"w": real(8, 8), "scale": real(8), "zero": real(8), "u": real(8, 8), "m": real(8)}
    tuning = tuned(body, weights, after=layer)
    assert set(tuning.trainable) == {"w", "scale", "u"} and set(tuning.left_out()) == {"zero", "m"}
