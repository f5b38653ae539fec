"""Symbolic shapes by abstract evaluation of a graph's own operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.eval.abstract import Extents, primes
from onnx2jax.ir import analysis
from onnx2jax.sharding.propagation import ValueFacts
from tests.support.models import model, value


def facts(proto: onnx.ModelProto) -> ValueFacts:
    graph = onnx2jax.convert(proto).graph
    return ValueFacts(graph, analysis.parameters(graph))


def graph(nodes: list[Any], inputs: dict[str, list[Any]], weights: dict[str, np.ndarray], **outputs: Any) -> ValueFacts:
    ends = [value(n, np.float32, shape) for n, shape in inputs.items()]
    return facts(model(nodes, ends, [value(n, np.float32, s) for n, s in outputs.items()], weights))


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


def test_extents_are_distinct_primes_by_name() -> None:
    first, second = Extents(primes(0)), Extents(primes(1))
    assert first.shape("x", ["batch", 3, None, "batch"]) == (11, 3, 13, 11)
    assert second.shape("x", ["batch", 3, None, "batch"]) == (23, 3, 29, 23)
    assert set(first) == {"batch", "x, axis 2"}


def test_extents_that_depend_on_dimension_variables_have_names() -> None:
    nodes = [
        node("ReduceMean", "x last", "mean", keepdims=1),
        node("Sub", "x mean", "centred"),
        node("Reshape", "centred heads", "apart"),
        node("Concat", "x x", "twice", axis=1),
        node("Reshape", "twice flat", "y"),
    ]
    weights = {"last": np.array([2]), "heads": np.array([0, 0, 4, 8]), "flat": np.array([-1])}
    found = graph(nodes, {"x": ["batch", "length", 32]}, weights, y=["n"])
    assert found.of("mean").shape == ("batch", "length", 1)
    assert found.of("centred").shape == ("batch", "length", 32)
    assert found.of("apart").shape == ("batch", "length", 4, 8)
    twice = found.of("twice").shape
    assert twice is not None
    assert (twice[0], twice[2]) == ("batch", 32) and twice[1] not in ("batch", "length")
    assert isinstance(twice[1], str) and found.of("y").shape not in (("batch",), ("length",), (twice[1],), None)


def test_a_mask_over_past_and_new_tokens_has_a_symbolic_extent() -> None:
    nodes = [
        node("Concat", "past x", "keys", axis=1),
        node("Add", "keys mask", "masked"),
        node("Identity", "masked", "y"),
    ]
    inputs: dict[str, list[Any]] = {"past": ["batch", "past"], "x": ["batch", "new"], "mask": ["batch", "total"]}
    found = graph(nodes, inputs, {}, y=["batch", "all"])
    assert found.of("masked").shape == found.of("keys").shape == found.of("y").shape


def test_a_value_that_cannot_be_evaluated_has_the_declared_shape_or_none() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"], name="places"),
        helper.make_node("Cast", ["places"], ["z"], name="z", to=TensorProto.FLOAT),
        node("Add", "x bias", "kept"),
        node("Add", "kept column", "y"),
        helper.make_node("Transpose", ["places"], ["declared"], name="declared"),
        helper.make_node("Cast", ["declared"], ["u"], name="u", to=TensorProto.FLOAT),
    ]
    proto = model(
        nodes,
        [value("x", np.float32, ["n", 3])],
        [value("y", np.float32, None), value("z", np.float32, None), value("u", np.float32, None)],
        {"bias": np.ones(3, np.float32), "column": np.ones((1, 3), np.float32)},
    )
    proto.graph.value_info.append(value("declared", np.int64, ["found", 2]))
    found = facts(proto)
    assert found.of("places").shape is None and found.of("z").shape is None
    assert found.of("declared").shape == ("found", 2) == found.of("u").shape
    assert found.of("y").shape == ("n", 3)


def test_weights_are_tracked_through_computed_values() -> None:
    nodes = [
        node("Transpose", "w", "turned", perm=[1, 0]),
        node("Mul", "turned scale", "scaled"),
        node("MatMul", "x scaled", "product"),
        node("Identity", "product", "y"),
    ]
    weights = {"w": np.ones((5, 4), np.float32), "scale": np.ones((1, 5), np.float32)}
    found = graph(nodes, {"x": ["n", 4]}, weights, y=["n", 5])
    assert found.of("scaled").weights == {"w": (1, 0), "scale": (0, 1)}
    assert found.of("product").weights is None
    assert found.of("x").weights is None
