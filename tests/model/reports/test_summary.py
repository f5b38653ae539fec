"""``Model.summary``: shapes, parameters, FLOPs and bytes of nodes, against counts by hand."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax import errors
from tests.support import models


def model_of(text: str) -> onnx2jax.Model:
    return onnx2jax.convert(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]>\n{text}'))


@pytest.fixture(scope="module")
def plain() -> onnx2jax.Model:
    return model_of(
        """g (float[n, 3] x, float[1, 2, k, k] image) => (float[n, 5] y, float[1, 4, a, b] z, float s)
        <float[3, 5] w, float[4, 2, 3, 3] filters>
        { h = MatMul(x, w)
          y = Relu(h)
          z = Conv(image, filters)
          s = ReduceSum<keepdims = 0>(y) }"""
        .replace("float[3, 5] w", "float[3, 5] w = {" + ", ".join("1" * 15) + "}")
        .replace("float[4, 2, 3, 3] filters", "float[4, 2, 3, 3] filters = {" + ", ".join("1" * 72) + "}")
    )  # fmt: skip


def test_node_costs(plain: onnx2jax.Model) -> None:
    found = plain.summary(dims={"n": 2, "k": 6})
    nodes = {n.operator: n for n in found.nodes}
    assert [n.operator for n in found.nodes] == ["MatMul", "Relu", "Conv", "ReduceSum"]
    assert nodes["MatMul"].outputs == {"h": "float32[2, 5]"}
    assert (nodes["MatMul"].flops, nodes["MatMul"].parameters) == (2 * 2 * 3 * 5, 15)
    assert nodes["MatMul"].bytes == 4 * (2 * 3 + 3 * 5 + 2 * 5)
    assert (nodes["Relu"].flops, nodes["Relu"].parameters) == (10, 0)
    assert nodes["Conv"].outputs == {"z": "float32[1, 4, 4, 4]"}
    assert nodes["Conv"].parameters == 72
    assert nodes["Conv"].flops == pytest.approx(2 * 4 * 16 * 2 * 9, rel=0.01)  # and a number of its own arithmetic
    assert nodes["ReduceSum"].outputs == {"s": "float32[]"}
    assert nodes["ReduceSum"].flops == 10
    assert (found.parameters, found.parameter_bytes) == (87, 348)
    assert found.flops == sum(n.flops or 0 for n in found.nodes)


@pytest.mark.parametrize("given", [np.ones((7, 3), np.float32), (7, 3), jax.ShapeDtypeStruct((7, 3), np.float32)])
def test_inputs_are_arrays_or_shapes(plain: onnx2jax.Model, given: Any) -> None:
    found = plain.summary({"x": given}, dims={"k": 3})
    assert found.inputs == {"x": "float32[7, 3]", "image": "float32[1, 2, 3, 3]"}
    assert found.nodes[0].flops == 2 * 7 * 15


def test_inputs_without_declared_type_take_the_given_shape() -> None:
    text = "g (float[n] x) => (float[k] y) { u, h = Unique (x)  y = Neg(h) }"
    part = model_of(text).cut(inputs="h")
    assert part.summary({"h": jax.ShapeDtypeStruct((10,), np.float32)}).flops == 10
    with pytest.raises(errors.InputTypeError, match="h: None has no shape"):
        part.summary()


def test_flops_of_loops() -> None:
    found = model_of(
        """g (float[3] x) => (float[3] y) { m = Constant<value = int64 {4}>()
        y = Loop(m, , x) <body = b (int64 i, bool c, float[3] s) => (bool o, float[3] t) { o = Identity(c)
        t = Exp(s) }> }"""
    ).summary()
    assert 12 <= (found.nodes[0].flops or 0) <= 20  # and the loop counter


def test_costs_of_a_partitioned_model() -> None:
    model = model_of(
        """g (float[n] x) => (float[m] y) <int64[1] flat = {-1}>
        { big = Mul(x, x)\n at = NonZero(big)\n i = Reshape(at, flat)\n some = Gather(x, i)\n y = Exp(some) }"""
    )
    x = np.zeros(5000, np.float32)
    x[:7] = 1
    found = model.summary({"x": x})
    nodes = {n.operator: n for n in found.nodes}
    assert (nodes["Mul"].flops, nodes["Exp"].flops, nodes["NonZero"].flops) == (5000, 7, None)
    assert nodes["Exp"].outputs == {"y": "float32[7]"}
    assert "host" in str(found)


def test_types_of_lists_and_strings() -> None:
    found = model_of(
        "g (float[2, 3] x, string[2] s) => (seq(float) y, string[2] t) { y = SplitToSequence(x)\n t = Identity(s) }"
    )
    outputs = [dict(n.outputs) for n in found.summary().nodes]
    assert outputs == [{"y": "list of 2: float32[1, 3]"}, {"t": "string[2]"}]


def test_a_summary_is_a_table_and_json(plain: onnx2jax.Model) -> None:
    found = plain.summary(dims={"n": 2, "k": 6})
    assert "MatMul" in str(found) and "87 parameters, 348 bytes" in str(found)
    assert json.loads(found.to_json())["nodes"][0]["flops"] == 60


def test_mismatched_inputs_raise(plain: onnx2jax.Model) -> None:
    with pytest.raises(errors.InputNameError, match="there is no input 'w'"):
        plain.summary({"w": (1,)})
    with pytest.raises(errors.InputNameError, match=r"dimension variables are \['n', 'k'\]"):
        plain.summary(dims={"batch": 1})
    with pytest.raises(errors.InputShapeError):
        plain.summary({"x": (7, 4)}, dims={"k": 3})


def test_extents_that_fit_are_named() -> None:
    """Nameless extents are taken as 1, which a window may not fit; a batch, or a state, may fit no other."""
    nodes = [
        onnx.helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=[100]),
        onnx.helper.make_node("Concat", ["p", "s"], ["y"], axis=2),
    ]
    inputs = [models.value("x", "f4", [None, 1, None]), models.value("s", "f4", [1, None, 1])]
    model = onnx2jax.convert(models.model(nodes, inputs, [models.value("y", "f4", [1, 1, None])]))
    with pytest.raises(errors.OperatorError) as caught:
        model.summary()
    assert "node 'p' (MaxPool" in str(caught.value), caught.value
    _, _, fix = str(caught.value).partition("Extents of 1 may be too small: ")
    assert fix == "model.summary(dims={'x_2': 128})"
    assert eval(fix).nodes[0].outputs == {"p": "float32[1, 1, 29]"}
    assert model.summary({"x": (1, 1, 102)}).nodes[0].outputs == {"p": "float32[1, 1, 3]"}
    with pytest.raises(errors.OperatorError) as caught:
        model.summary({"x": (1, 1, 4)})
    assert "Extents of 1" not in str(caught.value), "s is free, and no extent of it helps"


def test_types_of_computed_strings() -> None:
    model = model_of("g (float[2] x, string[2] s) => (string[2] t, float[2] y) { t = StringConcat(s, s)\n y = Exp(x) }")
    found = model.summary({"s": np.array(["a", "b"], object)})
    assert [dict(n.outputs) for n in found.nodes] == [{"t": "string[2]"}, {"y": "float32[2]"}]
    assert found.nodes[1].flops == 2
