"""Model-local functions (rules FN-01 to FN-22) and scopes of subgraphs (SC-*)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, parser

import onnx2jax
from onnx2jax.errors import ModelError, UnsupportedOperatorError
from tests.support.models import model, value

X = np.float32([-1, 2])
ENDS: Any = ([value("x", np.float32, [2])], [value("y", np.float32, [2])])
OPSETS = [helper.make_opsetid("", 21)]


def function(name: str, nodes: list[Any], inputs: Any = ("a",), outputs: Any = ("r",), **kwargs: Any) -> Any:
    imports = [*kwargs.pop("opsets", OPSETS), helper.make_opsetid("my", 1)]
    return helper.make_function("my", name, list(inputs), list(outputs), nodes, imports, **kwargs)


def run(node: Any, *functions: Any, x: np.ndarray = X, **kwargs: Any) -> np.ndarray:
    m = onnx2jax.convert(model([node], *ENDS, opsets={"my": 1}, functions=functions, **kwargs))
    (result,) = m.run(None, {"x": x})
    return np.asarray(result)


def call(name: str, inputs: Any = ("x",), outputs: Any = ("y",), **attributes: Any) -> Any:
    return helper.make_node(name, list(inputs), list(outputs), domain="my", **attributes)


def elu(**kwargs: Any) -> Any:
    node = helper.make_node("Elu", ["a"], ["r"])
    node.attribute.add(name="alpha", ref_attr_name="al", type=onnx.AttributeProto.FLOAT)
    return function("F", [node], **kwargs)


def expected_elu(alpha: float) -> np.ndarray:
    return np.where(X > 0, X, alpha * np.expm1(X)).astype(np.float32)


def test_attribute_given_defaulted_and_omitted() -> None:
    default = elu(attribute_protos=[helper.make_attribute("al", 3.0)])
    np.testing.assert_allclose(run(call("F", al=2.0), elu(attributes=["al"])), expected_elu(2), rtol=1e-6)
    np.testing.assert_allclose(run(call("F"), default), expected_elu(3), rtol=1e-6)
    np.testing.assert_allclose(run(call("F", al=2.0), default), expected_elu(2), rtol=1e-6)
    np.testing.assert_allclose(run(call("F"), elu(attributes=["al"])), expected_elu(1), rtol=1e-6)


@pytest.mark.parametrize(("given", "alpha"), [({"al": 2.0}, 2), ({}, 1)])
def test_a_reference_passes_through_nested_calls(given: dict[str, float], alpha: float) -> None:
    inner = call("F", ["b"], ["q"])
    inner.attribute.add(name="al", ref_attr_name="al", type=onnx.AttributeProto.FLOAT)
    outer = function("G", [inner], ["b"], ["q"], attributes=["al"])
    # The caller is declared before the function it calls (rule FN-19).
    np.testing.assert_allclose(run(call("G", **given), outer, elu(attributes=["al"])), expected_elu(alpha), rtol=1e-6)


def test_a_reference_in_the_main_graph_is_refused() -> None:
    node = helper.make_node("Elu", ["x"], ["y"])
    node.attribute.add(name="alpha", ref_attr_name="al", type=onnx.AttributeProto.FLOAT)
    with pytest.raises(ModelError, match="FN-16"):
        run(node)


def test_overloads() -> None:
    negate = function("F", [helper.make_node("Neg", ["a"], ["r"])], overload="A")
    rectify = function("F", [helper.make_node("Relu", ["a"], ["r"])], overload="B")
    np.testing.assert_array_equal(run(call("F", overload="A"), negate, rectify), -X)
    np.testing.assert_array_equal(run(call("F", overload="B"), negate, rectify), [0, 2])
    for overload in ("C", ""):
        with pytest.raises(UnsupportedOperatorError):
            run(call("F", overload=overload), negate, rectify)


def test_missing_operands_are_absent_optionals() -> None:
    clip = function("F", [helper.make_node("Clip", ["a", "low"], ["r"])], ["a", "low"])
    np.testing.assert_array_equal(run(call("F", ["x"]), clip), X)
    np.testing.assert_array_equal(run(call("F", ["x", ""]), clip), X)


def test_the_body_binds_with_its_own_opset() -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
    body = function("F", [helper.make_node("Softmax", ["a"], ["r"])], opsets=[helper.make_opsetid("", 11)])
    ends = [value("x", np.float32, [1, 2, 2])], [value("y", np.float32, [1, 2, 2])]
    with pytest.warns(onnx2jax.errors.DeviationWarning, match="as in opset 11, by onnxruntime as in opset 13"):
        m = onnx2jax.convert(model([call("F")], *ends, opset=13, opsets={"my": 1}, functions=[body]))
    flat = np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # opset 11 flattens from axis 1 on
    np.testing.assert_allclose(m(x), flat, rtol=1e-6)


def test_recursion_is_refused() -> None:
    with pytest.raises(ModelError, match="calls itself"):
        run(call("F"), function("F", [call("F", ["a"], ["r"])]))
    with pytest.raises(ModelError, match="calls itself"):
        run(call("F"), function("F", [call("G", ["a"], ["r"])]), function("G", [call("F", ["a"], ["r"])]))


def test_a_body_sees_no_names_of_the_caller() -> None:
    with pytest.raises(ModelError, match="FN-07"):
        run(call("F"), function("F", [helper.make_node("Add", ["a", "x"], ["r"])]))


def test_exponential_expansion_is_refused_at_import() -> None:
    functions = [function("F0", [helper.make_node("Neg", ["a"], ["r"])])]
    for i in range(1, 40):
        twice = [call(f"F{i - 1}", ["a"], ["b"]), call(f"F{i - 1}", ["b"], ["r"])]
        functions.append(function(f"F{i}", twice))
    with pytest.raises(ModelError, match="FN-20"):
        run(call("F39"), *functions)


def test_a_function_is_traced_once_per_signature() -> None:
    chain = [call("F", ["x"], ["b"]), call("F", ["b"], ["c"]), call("F", ["c"], ["y"])]
    body = function("F", [helper.make_node("Sin", ["a"], ["s"]), helper.make_node("Cos", ["s"], ["r"])])
    m = onnx2jax.convert(model(chain, *ENDS, opsets={"my": 1}, functions=[body]))
    text = str(jax.make_jaxpr(m.apply)({}, X))
    assert text.count("= sin ") == 1, text  # one body, three calls
    np.testing.assert_allclose(m(X), np.cos(np.sin(np.cos(np.sin(np.cos(np.sin(X)))))), rtol=1e-5)


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0)], ids=str)
def test_a_function_is_traced_for_each_sign_of_zero(values: tuple[float, float]) -> None:
    constant = helper.make_node("Constant", [], ["c"])
    constant.attribute.add(name="value_float", type=onnx.AttributeProto.FLOAT, ref_attr_name="k")
    body = function("F", [constant, helper.make_node("Div", ["a", "c"], ["r"])], attributes=["k"])
    nodes = [call("F", ["x"], [name], k=value) for name, value in zip(("a", "b"), values, strict=True)]
    nodes.append(helper.make_node("Concat", ["a", "b"], ["y"], axis=0))
    m = onnx2jax.convert(model(nodes, *ENDS, opsets={"my": 1}, functions=[body]))
    wanted = [np.copysign(np.inf, v) for v in values for _ in X]
    np.testing.assert_array_equal(m(np.ones_like(X)), wanted)
    np.testing.assert_array_equal(jax.jit(m.apply)({}, np.ones_like(X)), wanted)


def test_shape_arithmetic_stays_known_through_a_function() -> None:
    body = function("F", [helper.make_node("Shape", ["a"], ["r"])])
    nodes = [call("F", ["x"], ["s"]), helper.make_node("Expand", ["one", "s"], ["y"])]
    m = onnx2jax.convert(model(nodes, *ENDS, {"one": np.float32([7])}, opsets={"my": 1}, functions=[body]))
    assert jax.jit(lambda x: m.apply({}, x))(X).tolist() == [7, 7]


def test_an_operator_of_onnx_wins_over_a_function_of_its_name() -> None:
    body = helper.make_function("", "Relu", ["a"], ["r"], [helper.make_node("Neg", ["a"], ["r"])], OPSETS)
    np.testing.assert_array_equal(run(helper.make_node("Relu", ["x"], ["y"]), body), [0, 2])


def test_inner_names_do_not_leak() -> None:
    """The body's internal name equals a name of the caller's graph."""
    body = function("F", [helper.make_node("Neg", ["a"], ["t"]), helper.make_node("Neg", ["t"], ["r"])])
    nodes = [
        helper.make_node("Abs", ["x"], ["t"]),
        call("F", ["x"], ["z"]),
        helper.make_node("Add", ["t", "z"], ["y"]),
    ]
    m = onnx2jax.convert(model(nodes, *ENDS, opsets={"my": 1}, functions=[body]))
    np.testing.assert_array_equal(m(X), np.abs(X) + X)


def branch(node: Any, output: str) -> onnx.GraphProto:
    return helper.make_graph([node], output, [], [value(output, np.float32, None)])


def test_a_subgraph_reads_outer_names_at_any_depth() -> None:
    inner = helper.make_node(
        "If",
        ["c"],
        ["i"],
        then_branch=branch(helper.make_node("Add", ["x", "late"], ["t"]), "t"),
        else_branch=branch(helper.make_node("Neg", ["x"], ["t"]), "t"),
    )
    outer = helper.make_node(
        "If",
        ["c"],
        ["y"],
        then_branch=branch(inner, "i"),
        else_branch=branch(helper.make_node("Identity", ["x"], ["e"]), "e"),
    )
    nodes = [helper.make_node("Abs", ["x"], ["late"]), outer]
    m = onnx2jax.convert(model(nodes, [value("c", bool, []), *ENDS[0]], ENDS[1]))
    np.testing.assert_array_equal(m(np.bool_(True), X), X + np.abs(X))
    np.testing.assert_array_equal(m(np.bool_(False), X), X)
    np.testing.assert_array_equal(jax.jit(m.apply)({}, np.bool_(True), X), X + np.abs(X))


def test_random_streams_differ_between_two_calls_of_a_function() -> None:
    body = function("F", [helper.make_node("RandomNormalLike", ["a"], ["r"])])
    nodes = [
        helper.make_node("F", ["x"], ["p"], name="first", domain="my"),
        helper.make_node("F", ["x"], ["q"], name="second", domain="my"),
        helper.make_node("Sub", ["p", "q"], ["y"]),
    ]
    m = onnx2jax.convert(model(nodes, *ENDS, opsets={"my": 1}, functions=[body]))
    assert np.all(m(X, rng=jax.random.key(0)) != 0)


def test_inputs_need_not_be_in_alphabetical_order() -> None:
    """jax.jit sorts arguments by name; outputs that are constants must still come in their own order."""
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "l" : 1]> g (float[2] b, float[2] a) => (float[2] y, int64[1] s) {
            y, s = l.f(b, a) }
        <domain: "l", opset_import: ["" : 21]> f (z, c) => (y, s) { y = Sub(z, c)  s = Shape(c) }"""
    )
    y, s = onnx2jax.convert(proto)(np.float32([3, 4]), np.float32([1, 1]))
    np.testing.assert_array_equal(y, [2, 3])
    np.testing.assert_array_equal(s, [2])
