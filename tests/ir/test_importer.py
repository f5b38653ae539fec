"""Importing invalid models, and unusual but valid ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputValueError, ModelError, OperatorError, UnsupportedError, UnsupportedOperatorError
from tests.support.models import mlp, model, one_node, value

X = np.float32([-1, 2])
ENDS: Any = ([value("x", np.float32, [2])], [value("y", np.float32, [2])])


def relu(op_type: str = "Relu", **kwargs: Any) -> onnx.ModelProto:
    return model([helper.make_node(op_type, ["x"], ["y"], name="only")], *ENDS, **kwargs)


def edited(edit: Callable[[onnx.ModelProto], Any], proto: onnx.ModelProto | None = None) -> onnx.ModelProto:
    proto = proto or relu()
    edit(proto)
    return proto


def test_all_unsupported_operators_are_listed_at_once() -> None:
    nodes = [
        helper.make_node("relu", ["x"], ["a"], name="n1"),
        helper.make_node("Frob", ["a"], ["b"], name="n2", domain="com.example"),
        helper.make_node("Frob", ["b"], ["c"], name="n3", domain="com.example"),
        helper.make_node("Mish", ["c"], ["y"], name="n4"),
    ]
    with pytest.raises(UnsupportedOperatorError) as caught:
        onnx2jax.convert(model(nodes, *ENDS, opset=16, opsets={"com.example": 2}))
    text = str(caught.value)
    assert "3 operators of the model are unsupported" in text
    assert "com.example 2: Frob x2 (nodes 'n2', 'n3')" in text
    assert "did you mean Relu?" in text
    assert "Mish exists from opset 18 on, the model imports 16" in text
    assert "@onnx2jax.ops.op('Frob', domain='com.example', since=2)" in text
    assert isinstance(caught.value, NotImplementedError)


def test_an_operator_that_is_newer_than_the_import_runs_as_the_error_advises(tmp_path: Path) -> None:
    proto, path = relu("Mish", opset=7), tmp_path / "m.onnx"
    onnx.save(proto, path)
    with pytest.raises(UnsupportedOperatorError) as caught:
        onnx2jax.convert(path)
    assert "ops.op(" not in str(caught.value)
    _, _, advice = str(caught.value).partition("there:\n")
    lines = [line.strip() for line in advice.splitlines() if line.startswith("  ")]
    exec("\n".join(lines), {"onnx": onnx, "onnx2jax": onnx2jax, "path": path})


def test_all_nodes_with_rejected_attributes_are_listed_at_once() -> None:
    """At import, because attributes can be checked without operands."""
    weight = {"domain": "com.microsoft", "K": 1, "N": 1, "block_size": 16}
    nodes = [
        helper.make_node("Attention", ["x", "x"], ["a"], "n1", domain="com.microsoft", num_heads=1, do_rotary=1),
        helper.make_node("MatMulNBits", ["x", "n", "x"], ["b"], "n2", weight_prepacked=1, **weight),
        helper.make_node("MatMulNBits", ["x", "n", "x"], ["c"], "n3", **weight),
        helper.make_node("ScatterND", ["c", "i", "x"], ["y"], "n4", reduction="mean"),
    ]
    proto = model(nodes, *ENDS, {"n": np.array([0]), "t": np.array(1), "i": np.array([[0]])}, 21, {"com.microsoft": 1})
    with pytest.raises(UnsupportedError, match="must be 0") as caught:
        onnx2jax.convert(proto)
    lines = str(caught.value).splitlines()
    assert [line.split("'")[1] for line in lines] == ["n1", "n2", "n4"]
    assert "do_rotary (1) must be 0" in lines[0] and "weight_prepacked (1) must be 0" in lines[1]
    assert "reduction ('mean') must be one of 'none', 'add'" in lines[2]
    del proto.graph.node[:2]
    with pytest.raises(OperatorError, match="'n4'"):
        onnx2jax.convert(proto)


def test_users_add_operators_by_version() -> None:
    @onnx2jax.ops.op("Scaled", domain="com.example.test", since=1)
    def one(x, *, factor=2.0):  # type: ignore[no-untyped-def]
        return x * factor

    @onnx2jax.ops.op("Scaled", domain="com.example.test", since=3)
    def three(x, *, factor=2.0):  # type: ignore[no-untyped-def]
        return x * factor + 1

    def result(version: int) -> list[float]:
        node = helper.make_node("Scaled", ["x"], ["y"], domain="com.example.test", factor=3.0)
        return onnx2jax.convert(model([node], *ENDS, opsets={"com.example.test": version}))(X).tolist()

    assert result(1) == result(2) == [-3, 6]
    assert result(3) == result(5) == [-2, 7]
    assert onnx2jax.supported()["com.example.test"]["Scaled"] == (1, 3)
    with pytest.raises(ValueError, match="registered already"):
        onnx2jax.ops.op("Scaled", domain="com.example.test", since=3)(one)


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], type[Exception], str]] = {
    "no ir_version": (lambda: edited(lambda m: m.ClearField("ir_version")), ModelError, "MV-01"),
    "ir_version 0": (lambda: edited(lambda m: setattr(m, "ir_version", 0)), ModelError, "MV-01"),
    "newer ir_version": (lambda: edited(lambda m: setattr(m, "ir_version", 99)), UnsupportedError, "MV-02"),
    "no graph": (lambda: edited(lambda m: m.ClearField("graph")), ModelError, "no graph"),
    "no opset": (lambda: edited(lambda m: m.ClearField("opset_import")), ModelError, "MV-03"),
    "opset 0": (lambda: relu(opset=0), ModelError, "OR-11"),
    "newer opset": (lambda: relu(opset=99), UnsupportedError, "allow_newer_opset=True"),
    "domain not imported": (
        lambda: edited(lambda m: setattr(m.graph.node[0], "domain", "foo.bar")),
        ModelError,
        "'only'.*'foo.bar'.*OR-06",
    ),
    "deprecated operator": (
        lambda: model([helper.make_node("Scatter", ["x", "x", "x"], ["y"])], *ENDS, opset=11),
        ModelError,
        "ScatterElements",
    ),
    "undefined input": (lambda: edited(lambda m: m.graph.node[0].input.__setitem__(0, "nope")), ModelError, "'nope'"),
    "undefined output": (lambda: edited(lambda m: setattr(m.graph.output[0], "name", "nope")), ModelError, "'nope'"),
    "value defined twice": (
        lambda: edited(lambda m: m.graph.node.append(helper.make_node("Neg", ["x"], ["y"]))),
        ModelError,
        "'y' is defined more than once",
    ),
    "cycle": (
        lambda: model([helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])], *ENDS),
        ModelError,
        "cycle",
    ),
    "two initializers of one name": (
        lambda: edited(lambda m: m.graph.initializer.append(m.graph.initializer[0]), mlp()),
        ModelError,
        "GR-09",
    ),
    "too many inputs": (
        lambda: edited(lambda m: m.graph.node[0].input.append("x")),
        ModelError,
        r"has 2 inputs; Relu takes inputs \(X\)",
    ),
    "missing input": (lambda: edited(lambda m: m.graph.node[0].ClearField("input")), ModelError, "lacks input 'X'"),
    "unknown attribute": (
        lambda: edited(lambda m: m.graph.node[0].attribute.append(helper.make_attribute("slope", 1.0))),
        ModelError,
        r"\['slope'\].*ND-10",
    ),
    "missing attribute": (
        lambda: one_node("Cast", {"x": (np.float32, [2])}),
        ModelError,
        "lacks attribute 'to'",
    ),
    "attribute twice": (
        lambda: edited(
            lambda m: m.graph.node[0].attribute.extend([helper.make_attribute("alpha", 1.0)] * 2), relu("Elu")
        ),
        ModelError,
        "attribute twice",
    ),
    "unknown element type": (
        lambda: edited(lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77)),
        ModelError,
        "TY-01",
    ),
    "unnamed input": (lambda: edited(lambda m: setattr(m.graph.input[0], "name", "")), ModelError, "GR-24|defined"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_model_is_refused(case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        onnx2jax.convert(make())


def test_newer_opsets_run_when_allowed() -> None:
    assert onnx2jax.convert(relu(opset=99), allow_newer_opset=True)(X).tolist() == [0, 2]


def test_the_default_domain_has_two_names() -> None:
    for imported in ("", "ai.onnx"):
        for used in ("", "ai.onnx"):
            proto = relu()
            proto.opset_import[0].domain = imported
            proto.graph.node[0].domain = used
            assert onnx2jax.convert(proto)(X).tolist() == [0, 2]


@pytest.mark.parametrize("versions", [[11, 13], [13, 11]])
def test_the_higher_of_two_imports_of_a_domain_applies(versions: list[int]) -> None:
    ends = [value("x", np.float32, [1, 2, 2])], [value("y", np.float32, [1, 2, 2])]
    proto = model([helper.make_node("Softmax", ["x"], ["y"])], *ends)
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid("", v) for v in versions)
    np.testing.assert_allclose(onnx2jax.convert(proto)(np.zeros((1, 2, 2), np.float32)), np.full((1, 2, 2), 0.5))


def test_nodes_out_of_order_are_sorted_unless_strict() -> None:
    nodes = [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Relu", ["x"], ["a"])]
    assert onnx2jax.convert(model(nodes, *ENDS))(X).tolist() == [0, -2]
    with pytest.raises(ModelError, match="GR-01"):
        onnx2jax.convert(model(nodes, *ENDS), strict=True)


def test_before_ir_3_the_operator_set_is_version_1() -> None:
    node = helper.make_node("Add", ["x", "b"], ["y"], axis=0, broadcast=1)
    proto = model([node], *ENDS, {"b": np.float32([1])}, ir_version=2)
    proto.graph.input.append(value("b", np.float32, [1]))
    del proto.opset_import[:]
    assert onnx2jax.convert(proto)(X).tolist() == [0, 3]


def test_an_output_may_be_an_input_an_initializer_or_listed_twice() -> None:
    outputs = [value(n, np.float32, [2]) for n in ("x", "w", "y", "y")]
    proto = model([helper.make_node("Neg", ["x"], ["y"])], ENDS[0], outputs, {"w": np.float32([5, 6])})
    results = [np.asarray(r).tolist() for r in onnx2jax.convert(proto)(X)]
    assert results == [[-1, 2], [5, 6], [1, -2], [1, -2]]


def test_a_model_without_nodes_or_outputs_is_callable() -> None:
    assert onnx2jax.convert(model([], ENDS[0], []))(X) == ()


def test_unknown_fields_are_skipped() -> None:
    data = relu().SerializeToString() + b"\xba\x3e\x03abc"  # field 999
    assert onnx2jax.convert(data)(X).tolist() == [0, 2]


def test_sparse_initializers_are_dense_values() -> None:
    values = helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [3.0])
    indices = helper.make_tensor("i", onnx.TensorProto.INT64, [1], [1])
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], *ENDS)
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2]))
    assert onnx2jax.convert(proto)(X).tolist() == [-1, 5]


def test_operator_errors_name_the_node_and_its_operands() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("MatMul", ["a", "b"], ["y"], name="product")]
    inputs = [value("x", np.float32, ["n", "k"]), value("b", np.float32, ["m", "j"])]
    m = onnx2jax.convert(model(nodes, inputs, [value("y", np.float32, None)]))
    with pytest.raises(
        OperatorError, match=r"(?s)node 'product' \(MatMul, opset 21\).*float32\[2, 3\].*float32\[4, 5\]"
    ):
        m(np.zeros((2, 3), np.float32), np.zeros((4, 5), np.float32))
    with pytest.raises(ValueError):
        m(np.zeros((2, 3), np.float32), np.zeros((4, 5), np.float32))


def test_training_info_does_not_affect_inference() -> None:
    proto = relu()
    proto.training_info.add().algorithm.node.add(op_type="Unknown", domain="nowhere")
    assert onnx2jax.convert(proto)(X).tolist() == [0, 2]


def test_branches_of_if_declare_no_inputs() -> None:
    """Nothing supplies them: onnxruntime refuses the file, and others bind them by name."""
    text = """g (bool c, float[2] x) => (float[2] y) { y = If (c) <
      then_branch = t (float[2] x) => (float[2] u) { u = Neg (x) },
      else_branch = e () => (float[2] v) { v = Abs (x) }> }"""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> ' + text)
    with pytest.raises(ModelError, match=r"then_branch declares the inputs \['x'\].*SC-11"):
        onnx2jax.convert(proto)


def test_paths_and_extents_that_no_system_has() -> None:
    with pytest.raises(InputValueError, match="contains a NUL"):
        onnx2jax.convert("model\0.onnx")
    weight = onnx.TensorProto(name="w", data_type=1, dims=[0, 2**62])
    graph = helper.make_graph([helper.make_node("Neg", ["w"], ["y"])], "g", [], [ENDS[1][0]], [weight])
    with pytest.raises(ModelError, match="'w' has extents beyond any memory"):
        onnx2jax.convert(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
