"""What ``finetune`` trains by default: weights of layers, but no tables, masks, scales or constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import optax
import pytest
from onnx import helper, numpy_helper

import onnx2jax
from onnx2jax.errors import TrainingFormError
from tests.support.models import model, value

RNG = np.random.default_rng(0)
F = np.float32
MICROSOFT = {"com.microsoft": 1}


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F)


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(" "), outputs.split(), **attributes)


def constant(name: str, array: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))


def tuned(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    trainable: Any = None,
    straight_through: bool = False,
    **options: Any,
) -> Any:
    """x [n, 4, 8] -> y."""
    proto = model(nodes, [value("x", F, ["n", 4, 8])], [value("y", F, None)], weights, 24, **options)
    source = onnx2jax.convert(proto)
    return onnx2jax.finetune(
        source, lambda y, _: (y**2).mean(), optax.sgd(0.1), trainable=trainable, straight_through=straight_through
    )


ANGLES = np.arange(4)[:, None] * np.float32([1, 0.1, 0.01, 0.001])
COS, SIN = np.cos(ANGLES).astype(F), np.sin(ANGLES).astype(F)
P4 = np.arange(4)
LINEAR = node("MatMul", "x w", "h")
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], set[str], dict[str, Any]]] = {
    "rotary tables as operands": (
        [
            LINEAR,
            node("Unsqueeze", "h one", "q"),
            node("RotaryEmbedding", "q cos sin p", "r"),
            node("ReduceSum", "r", "y"),
        ],
        {"w": real(8, 8), "cos": COS, "sin": SIN, "p": P4[None], "one": np.array([1])},
        {"w"},
        {},
    ),
    "rotary frequencies": (
        [
            LINEAR,
            node("ReduceSum", "x last", "s", keepdims=1),
            node("Mul", "s frequencies", "a"),
            node("Cos", "a", "c"),
            node("Sin", "a", "d"),
            node("Mul", "h c", "m"),
            node("Add", "m d", "y"),
        ],
        {"w": real(8, 8), "frequencies": real(8), "last": np.array([2])},
        {"w"},
        {},
    ),
    "gathered rotary tables": (
        [
            LINEAR,
            node("Gather", "cos p", "c"),
            node("Gather", "sin p", "d"),
            node("Concat", "c d", "t", axis=1),
            node("Mul", "h t", "m"),
            node("Gather", "table p", "e"),
            node("Add", "m e", "y"),
        ],
        {"w": real(8, 8), "cos": COS, "sin": SIN, "p": P4, "table": real(4, 8)},
        {"w", "table"},
        {},
    ),
    "Constant nodes": (
        [constant("w", real(8, 8)), constant("mean", real(8)), LINEAR, node("Mul", "h mean", "y")],
        {},
        {"w"},
        {},
    ),
    "masks": (
        [
            LINEAR,
            node("Add", "h bias", "b"),
            node("Add", "b far", "s"),
            node("Softmax", "s", "p"),
            node("Mul", "p low", "y"),
        ],
        {
            "w": real(8, 8),
            "bias": real(8),
            "far": np.triu(np.full((4, 8), -1e9, F)),
            "low": np.tril(np.ones((4, 8), F)),
        },
        {"w", "bias"},
        {},
    ),
    "a decomposed normalisation": (
        [
            node("ReduceMean", "x last", "m"),
            node("Sub", "x m", "c"),
            node("Mul", "c c", "v"),
            node("Add", "v epsilon", "e"),
            node("Sqrt", "e", "s"),
            node("Div", "c s", "n"),
            node("Mul", "n gamma", "g"),
            node("Add", "g beta", "b"),
            node("Mul", "b half", "y"),
        ],
        {"last": np.array([2]), **{n: real(8) for n in ("gamma", "beta")}, "epsilon": F([1e-5]), "half": F([0.5])},
        {"gamma", "beta"},
        {},
    ),
    "scales of quantization": (
        [
            node("DequantizeLinear", "w scale", "f", axis=1),
            node("MatMul", "x f", "h"),
            node("QuantizeLinear", "v scale", "q", axis=1),
            node("DequantizeLinear", "q scale", "g", axis=1),
            node("MatMul", "h g", "y"),
        ],
        {"w": RNG.integers(-9, 9, (8, 8)).astype(np.int8), "scale": F([0.1] * 8), "v": real(8, 8)},
        {"v"},
        {"straight_through": True},
    ),
    "scales of integer products": (
        [
            node("DynamicQuantizeLinear", "x", "q s z"),
            node("MatMulInteger", "q w z", "i"),
            node("Cast", "i", "c", to=1),
            node("Mul", "c scale", "m"),
            node("Add", "m bias", "y"),
        ],
        {"w": RNG.integers(-9, 9, (8, 8)).astype(np.int8), "scale": F([0.1] * 8), "bias": real(8)},
        {"bias"},
        {},
    ),
    "scales of packed int4 weights": (
        [
            helper.make_node(
                "MatMulNBits", ["x", "w", "scales"], ["h"], domain="com.microsoft", K=8, N=8, block_size=16, bits=4
            ),
            node("MatMul", "h v", "y"),
        ],
        {"w": RNG.integers(0, 255, (8, 1, 8)).astype(np.uint8), "scales": real(8, 1), "v": real(8, 8)},
        {"v"},
        {"opsets": MICROSOFT},
    ),
    "a fused router and gate": (
        [
            helper.make_node("RouterGateUpProj", ["x", "w"], ["r", "g"], domain="com.microsoft", router_size=2),
            helper.make_node("MatMul", ["g", "v"], ["y"]),
        ],
        {"w": real(8, 8), "v": real(3, 8)},
        {"w", "v"},
        {"opsets": MICROSOFT},
    ),
    "expressions of weights": (
        [
            node("Add", "w ones", "o"),
            node("Transpose", "o", "t"),
            node("MatMul", "x t", "h"),
            node("Sub", "h mean", "y"),
        ],
        {"w": real(8, 8), "ones": np.ones((8, 8), F), "mean": real(8)},
        {"w", "ones"},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "weights", "trained", "options"), CASES.values(), ids=CASES)
def test_layer_weights_are_trained_and_the_others_listed(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], trained: set[str], options: dict[str, Any]
) -> None:
    tuning = tuned(nodes, weights, **options)
    assert set(tuning.trainable) == trained
    assert trained.isdisjoint(tuning.left_out()) and all(tuning.left_out().values())
    floating = {n for n, v in weights.items() if v.dtype == F}
    assert floating <= trained | tuning.left_out().keys()


def test_left_out_gives_reasons() -> None:
    nodes, weights, _, _ = CASES["rotary tables as operands"]
    left = tuned(nodes, weights).left_out()
    assert "angles by position" in left["cos"] and "angles by position" in left["sin"]
    assert tuned(nodes, weights, "cos").left_out()["w"] == "not selected by trainable="


def test_a_named_table_is_trained() -> None:
    nodes, weights, _, _ = CASES["rotary tables as operands"]
    assert tuned(nodes, weights, ["cos", "w"]).trainable == ("w", "cos")
    assert set(tuned(nodes, weights, lambda name, _: name != "w").trainable) == {"cos", "sin"}


def test_a_model_without_weights_raises() -> None:
    frozen = [node("Sub", "x mean", "y")]
    with pytest.raises(TrainingFormError, match=r"must be named: .'mean': 'not a weight of a linear map"):
        tuned(frozen, {"mean": real(8)})


def test_weights_inside_functions_and_branches() -> None:
    imports = [helper.make_opsetid("", 24)]
    body = [node("MatMul", "a k", "b"), node("Mul", "b s", "c"), node("Sub", "c z", "d")]
    layer = helper.make_function("here", "Layer", ["a", "k", "s", "z"], ["d"], body, imports)
    then, other = (
        helper.make_graph([node(op, f"h {w}", "o")], op, [], [value("o", F, None)])
        for op, w in (("MatMul", "u"), ("Sub", "m"))
    )
    nodes = [
        helper.make_node("Layer", ["x", "w", "scale", "zero"], ["h"], domain="here"),
        node("ReduceMax", "x", "t", keepdims=0),
        node("Cast", "t", "p", to=9),
        helper.make_node("If", ["p"], ["y"], then_branch=then, else_branch=other),
    ]
    weights = {"w": real(8, 8), "scale": real(8), "zero": real(8), "u": real(8, 8), "m": real(8)}
    tuning = tuned(nodes, weights, opsets={"here": 1}, functions=[layer])
    assert set(tuning.trainable) == {"w", "scale", "u"} and set(tuning.left_out()) == {"zero", "m"}
