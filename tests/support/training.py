"""Training models for tests, from onnx's text form, and a small network to fine-tune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import optax
from onnx import helper, parser

from tests.support import models

HEAD = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>'
PREVIEW = ("Gradient", "Adam", "Adagrad", "Momentum", "GraphCall")


def parse(text: str) -> onnx.ModelProto:
    """Parses a model; operators of ai.onnx.preview.training may omit their domain."""
    for name in PREVIEW:
        text = text.replace(f"= {name}", f"= ai.onnx.preview.training.{name}")
    return parser.parse_model(HEAD + text)


def info(
    algorithm: str | None,
    updates: Mapping[str, str] | None = None,
    initialization: str | None = None,
    starts: Mapping[str, str] | None = None,
) -> onnx.TrainingInfoProto:
    """A training_info: its graphs as text, its bindings as variable -> output."""
    result = onnx.TrainingInfoProto()
    if algorithm is not None:
        result.algorithm.CopyFrom(parse(algorithm).graph)
    if initialization is not None:
        result.initialization.CopyFrom(parse(initialization).graph)
    for entries, binding in ((result.update_binding, updates), (result.initialization_binding, starts)):
        for key, value in (binding or {}).items():
            entries.add(key=key, value=value)
    return result


def training(main: str, *infos: onnx.TrainingInfoProto, **fields: Any) -> onnx.ModelProto:
    """A model with training."""
    model = parse(main)
    model.training_info.extend(infos)
    for name, value in fields.items():
        setattr(model, name, value)
    return model


LINEAR = """linear (float[n,2] x) => (float[n,1] y) <float[2,1] w = {0.5, -1.0}, float[1] b = {0.25}> {
    p = MatMul(x, w)  y = Add(p, b) }"""
SGD = """sgd (float[n,1] z) => (float loss, float[2,1] w1, float[1] b1, int64 t1)
    <float rate = {0.1}, int64 t = {0}, int64 one = {1}> {
    d = Sub(y, z)  q = Mul(d, d)  loss = ReduceMean <keepdims = 0> (q)
    dw, db = Gradient <xs = ["w", "b"], zs = ["x", "z"], y = "loss"> (w, b, x, z)
    uw = Mul(dw, rate)  w1 = Sub(w, uw)  ub = Mul(db, rate)  b1 = Sub(b, ub)  t1 = Add(t, one) }"""
UPDATES = {"w": "w1", "b": "b1", "t": "t1"}
START = "start () => (float[2,1] w0) { w0 = RandomNormal <shape = [2, 1], scale = 0.1> () }"


def linear() -> onnx.ModelProto:
    """Linear regression by gradient descent; w starts at random, b at 0.25, t counts the steps."""
    return training(LINEAR, info(SGD, UPDATES, START, {"w": "w0"}))


def cross_entropy(logits: Any, batch: Mapping[str, Any]) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def trained(tuned: Any, batch: Any, steps: int, key: Any = 0) -> tuple[Any, list[float]]:
    """The state of a fine-tuning after some steps with one batch, and their losses."""
    state, losses = tuned.init(key), []
    for _ in range(steps):
        state, metrics = tuned.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


CLASSES = 3


def image_classifier() -> onnx.ModelProto:
    """image [n, 1, 4, 4] -> logits [n, 3]: a convolution, BatchNormalization, Relu, a pool, and a linear layer."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 1, 3, 3), "shift": 4, "mean": 4, "fc": (16, CLASSES), "bias": CLASSES}
    weights = {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    weights |= {name: rng.uniform(0.5, 2, 4).astype(np.float32) for name in ("scale", "var")}
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["b"], name="norm"),
        helper.make_node("Relu", ["b"], ["r"], name="relu"),
        helper.make_node("MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "fc", "bias"], ["logits"], name="fc"),
    ]
    ends = [models.value("image", np.float32, ["n", 1, 4, 4])], [models.value("logits", np.float32, ["n", CLASSES])]
    return models.model(nodes, *ends, weights)
