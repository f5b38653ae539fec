"""Fine-tuning through rounding: zero gradients warn, straight_through=True estimates them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import TrainingFormError
from tests.support.models import model, value

RNG = np.random.default_rng(3)
X = RNG.normal(size=(3, 4)).astype(np.float32)
W = np.concatenate([RNG.normal(size=(4, 1)), [[0.7], [-0.3], [1.27], [5.0]]], axis=1).astype(np.float32)
SCALE = np.array([0.01, 0.01], np.float32)
"""Quantised by it, the last weight saturates, and the one before is exactly at the end of the range."""


def quantized(inside: bool = False, back: str = "DequantizeLinear") -> onnx.ModelProto:
    """x times a weight quantised to int8 per column; in a branch of an If if ``inside``."""
    rounded = [
        helper.make_node("QuantizeLinear", ["w", "scale", "zero"], ["q"], axis=1),
        helper.make_node(back, ["q", "scale", "zero"] if back == "DequantizeLinear" else ["q"], ["v"],
                         **({"axis": 1} if back == "DequantizeLinear" else {"to": 1})),
    ]  # fmt: skip
    constants = {"w": W, "scale": SCALE, "zero": np.zeros(2, np.int8)}
    product = helper.make_node("MatMul", ["x", "v"], ["y"])
    if inside:
        body = helper.make_graph(rounded, "body", [], [value("v", np.float32, (4, 2))])
        constants["yes"] = np.array(True)
        rounded = [helper.make_node("If", ["yes"], ["v"], then_branch=body, else_branch=body)]
    return model([*rounded, product], [value("x", np.float32, (3, 4))], [value("y", np.float32, (3, 2))], constants)


def gradients(proto: onnx.ModelProto, trainable: Any = None, **options: Any) -> tuple[Any, Any]:
    """The gradients, as the parameter changes of an SGD step of rate 1, and the loss before it."""
    tuned = onnx2jax.finetune(
        onnx2jax.convert(proto), lambda y, _: (y**2).sum() / 2, optax.sgd(1.0), trainable=trainable, **options
    )
    state, metrics = tuned.step(tuned.init(), {"x": X})
    constants = {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}
    return {n: constants[n] - np.asarray(v) for n, v in state.params.items()}, metrics["loss"]


def test_a_rounded_weight_has_zero_gradient_and_warns() -> None:
    with pytest.warns(
        onnx2jax.errors.ZeroGradientWarning, match=r"1 of 1 .*'w' .*QuantizeLinear.*straight_through=True"
    ):
        down, _ = gradients(quantized())
    np.testing.assert_array_equal(down["w"], 0)


@pytest.mark.parametrize("inside", [False, True])
def test_straight_through(inside: bool) -> None:
    """Gradients as without rounding, zero where values saturate; the loss is that of the rounded weight."""
    steps = np.rint(W / SCALE).clip(-128, 127)
    y = X @ (steps * SCALE)
    down, loss = gradients(quantized(inside), ["w", "scale"], straight_through=True)
    by_weight = X.T @ y
    np.testing.assert_allclose(loss, (y**2).sum() / 2, rtol=1e-5)
    inside_range = abs(np.rint(W / SCALE)) < 128
    assert not inside_range[3, 1] and inside_range[2, 1]
    np.testing.assert_allclose(down["w"], np.where(inside_range, by_weight, 0), rtol=1e-4, atol=1e-4)
    of_scale = np.where(inside_range, steps - W / SCALE, steps)
    np.testing.assert_allclose(down["scale"], (by_weight * of_scale).sum(0), rtol=1e-3, atol=1e-2)


def test_without_a_pair_raises() -> None:
    with pytest.raises(TrainingFormError, match="has no such pair"):
        gradients(quantized(back="Cast"), straight_through=True)


def test_a_weight_with_an_unrounded_path_is_not_listed() -> None:
    """The inner bias is added before rounding, the outer one after it."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "inner"], ["g"]),
        helper.make_node("Round", ["g"], ["r"]),
        helper.make_node("Add", ["r", "outer"], ["y"]),
    ]
    constants = {"w": W, "inner": np.ones(2, np.float32), "outer": np.ones(2, np.float32)}
    proto = model(nodes, [value("x", np.float32, (3, 4))], [value("y", np.float32, (3, 2))], constants)
    with pytest.warns(onnx2jax.errors.ZeroGradientWarning, match=r"2 of 3 .*'w' .*'inner' .*Round"):
        down, _ = gradients(proto)
    assert down["outer"].all() and not down["w"].any() and not down["inner"].any()
