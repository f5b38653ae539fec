"""Operator set documents: reading, rules OD-01 to OD-06, and operators implemented by their bodies."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx2jax
from onnx2jax.errors import InputNameError, ModelError, UnsupportedError, UnsupportedOperatorError
from onnx2jax.ops import registry
from onnx2jax.proto.messages import OperatorSetProto
from onnx2jax.proto.operator_sets import read_operator_set
from tests.support.models import model, value

rule = pytest.mark.rule
X = np.float32([-1, 2])
ENDS: Any = ([value("x", np.float32, [2])], [value("y", np.float32, [2])])


def body(name: str, *operators: str, domain: str = "my", overload: str = "", opset: int = 21, **attributes: Any) -> Any:
    """A function that applies operators in sequence."""
    values = ["a", *(f"v{i}" for i in range(len(operators) - 1)), "r"]
    nodes = [
        helper.make_node(op.split(".")[-1], [values[i]], [values[i + 1]], domain="my" if op.startswith("my.") else "")
        for i, op in enumerate(operators)
    ]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
    return helper.make_function(domain, name, ["a"], ["r"], nodes, imports, overload=overload, **attributes)


def document(
    functions: Sequence[onnx.FunctionProto] = (),
    operators: Sequence[tuple[str, int, int]] = (),
    version: int = 1,
    **fields: Any,
) -> bytes:
    """The bytes of a document; an operator is (op_type, since_version, status)."""
    fields = {"magic": "ONNXOPSET", "ir_version": 10, "domain": "my", "opset_version": version} | fields
    message = OperatorSetProto(**{k: v for k, v in fields.items() if v is not None})
    for op_type, since, status in operators:
        message.operator.add(op_type=op_type, since_version=since, status=status)
    for function in functions:
        message.functions.add().ParseFromString(function.SerializeToString())
    return message.SerializeToString()


def calling(op_type: str = "F", version: int = 1, functions: Sequence[Any] = (), **kwargs: Any) -> onnx.ModelProto:
    node = helper.make_node(op_type, ["x"], ["y"], name="call", domain="my", **kwargs)
    return model([node], *ENDS, opsets={"my": version}, functions=functions)


def run(message: onnx.ModelProto, *documents: Any) -> list[float]:
    (result,) = onnx2jax.convert(message, operator_sets=documents).run(None, {"x": X})
    return result.tolist()


NEGATE, ABSOLUTE = document([body("F", "Neg")]), document([body("F", "Abs")])


# ------------------------------------------------------------------------------------------------------ bodies


@rule("OD-01", "OD-05")
def test_an_operator_runs_by_its_body(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperatorError):
        run(calling())
    path = tmp_path / "my.onnxopset"
    path.write_bytes(NEGATE)
    for source in (path, str(path), NEGATE, io.BytesIO(NEGATE), OperatorSetProto.FromString(NEGATE)):
        assert run(calling(), source) == [1, -2]
    assert onnx2jax.convert(calling(), operator_sets=str(path))(X).tolist() == [1, -2]


def test_attributes_overloads_and_calls_inside_a_document() -> None:
    elu = helper.make_node("Elu", ["a"], ["r"])
    elu.attribute.add(name="alpha", ref_attr_name="al", type=onnx.AttributeProto.FLOAT)
    default = [helper.make_attribute("al", 2.0)]
    opsets = [helper.make_opsetid("", 21)]
    function = helper.make_function("my", "E", ["a"], ["r"], [elu], opsets, attribute_protos=default)
    source = document([function, body("F", "my.E", "Neg"), body("F", "Abs", overload="b")])
    expected = np.float32([-2 * np.expm1(-1), -2])
    np.testing.assert_allclose(run(calling(), source), expected, rtol=1e-6)
    np.testing.assert_allclose(run(calling("E", al=1.0), source), [np.expm1(-1), 2], rtol=1e-6)
    assert run(calling(overload="b"), source) == [1, 2]
    with pytest.raises(UnsupportedOperatorError, match="without a body for overload 'c'"):
        run(calling(overload="c"), source)


@rule("FN-05")
def test_the_body_keeps_to_its_own_opset_imports() -> None:
    """Softmax of opset 11 flattens, that of the model's 21 does not."""
    node = helper.make_node("F", ["x"], ["y"], domain="my")
    ends: Any = ([value("x", np.float32, [1, 2, 2])], [value("y", np.float32, [1, 2, 2])])
    converted = onnx2jax.convert(
        model([node], *ends, opsets={"my": 1}), operator_sets=[document([body("F", "Softmax", opset=11)])]
    )
    np.testing.assert_allclose(converted(np.zeros((1, 2, 2), np.float32)), np.full((1, 2, 2), 0.25))
    old = body("F", "Neg")
    del old.opset_import[:]
    with pytest.raises(ModelError, match=r"function 'my:1\.F' of the bytes given.*opset_import"):
        run(calling(), document([old]))


@rule("OD-02", "OD-04", "OR-01")
@pytest.mark.parametrize(("imported", "expected"), [(1, [1, -2]), (2, [1, -2]), (3, [1, 2]), (9, [1, 2])])
def test_the_newest_document_not_above_the_import_applies(imported: int, expected: list[float]) -> None:
    first = document([body("F", "Neg")], [("F", 1, 1)], 1)
    third = document([body("F", "Abs")], [("F", 1, 1), ("F", 3, 1)], 3)
    assert run(calling(version=imported), first, third) == expected
    assert run(calling(version=imported), third, first) == expected


def test_two_versions_in_one_model() -> None:
    """A function of the model imports version 1, the model itself version 3."""
    first, third = document([body("F", "Neg")], version=1), document([body("F", "Abs")], version=3)
    nodes = [helper.make_node("G", ["x"], ["g"], domain="my"), helper.make_node("F", ["x"], ["f"], domain="my")]
    message = model(
        [*nodes, helper.make_node("Add", ["g", "f"], ["y"])], *ENDS, opsets={"my": 3}, functions=[body("G", "my.F")]
    )
    assert run(message, first, third) == [2, 0]


@rule("OD-04")
def test_a_stable_operator_may_have_its_body_in_an_older_document() -> None:
    """Stable operators keep their meaning, experimental ones may not."""
    first = document([body("F", "Neg")], [("F", 1, 1)], 1)
    assert run(calling(version=2), first, document([], [("F", 1, 1)], 2)) == [1, -2]
    for operators in ([("F", 1, 0)], [("F", 2, 1)]):
        with pytest.raises(UnsupportedOperatorError, match="without a body"):
            run(calling(version=2), first, document([], operators, 2))


def test_errors_name_why_a_document_does_not_implement_an_operator() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"F x1 .*is version 2, the model imports 1 \(rule OR-01\)"):
        run(calling(version=1), document([body("F", "Neg")], version=2))
    with pytest.raises(UnsupportedOperatorError, match=r"which is version 2, does not declare it \(rule OR-08\)"):
        run(calling(version=2), NEGATE, document([body("G", "Neg")], version=2))


def test_precedence() -> None:
    """OR-16: ONNX's operators, the model's functions, registered operators, documents."""
    assert run(calling(functions=[body("F", "Relu")]), NEGATE) == [0, 2]
    try:
        registry.op("F", domain="my", since=1)(lambda x: x * 10)
        assert run(calling(), NEGATE) == [-10, 20]
    finally:
        del registry._OPERATORS["my", "F"]
    relu = helper.make_node("Relu", ["x"], ["y"])
    assert run(model([relu], *ENDS), document([body("Relu", "Neg", domain="")], domain="")) == [0, 2]
    new = helper.make_node("New", ["x"], ["y"])
    assert run(model([new], *ENDS), document([body("New", "Neg", domain="ai.onnx")], domain="")) == [1, -2]


def test_recursion_is_refused() -> None:
    text = r"function 'my:1\.F' of the bytes given calls itself through 'my:1\.G' \(rule FN-19\)"
    with pytest.raises(ModelError, match=text):
        run(calling(), document([body("F", "my.G"), body("G", "my.F")]))


def test_weights_of_a_document(tmp_path: Path) -> None:
    """They are stored beside the document, become parameters, and are not saved into the model's file."""
    weight = onnx.TensorProto(data_type=1, dims=[2], data_location=1)
    weight.external_data.add(key="location", value="w.bin")
    nodes = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("Mul", ["a", "w"], ["r"])]
    function = helper.make_function("my", "F", ["a"], ["r"], nodes, [helper.make_opsetid("", 21)])
    folder = tmp_path / "sets"
    folder.mkdir()
    (folder / "w.bin").write_bytes(np.float32([3, 4]).tobytes())
    (folder / "my.onnxopset").write_bytes(document([function]))
    (tmp_path / "m.onnx").write_bytes(calling().SerializeToString())
    converted = onnx2jax.convert(tmp_path / "m.onnx", operator_sets=[folder / "my.onnxopset"])
    assert converted(X).tolist() == [-3, 8]
    assert list(converted.params) == ["my:1.F/w"]
    assert converted.apply({"my:1.F/w": X}, X).tolist() == [1, 4]
    assert onnx.load(onnx2jax.save(converted, tmp_path / "n.onnx")) == calling()
    with pytest.raises(InputNameError, match="my:1"):
        onnx2jax.save(converted, tmp_path / "n.onnx", params={"my:1.F/w": X})


def test_external_data_of_model_and_document_are_separate(tmp_path: Path) -> None:
    """A function of the model, called from one of a document, reads external data of the model."""

    def scale(name: str, domain: str, location: str, then: str) -> Any:
        weight = onnx.TensorProto(data_type=1, dims=[1], data_location=1)
        weight.external_data.add(key="location", value=location)
        nodes = [
            helper.make_node(then, ["a"], ["b"], domain="my" if then == "H" else ""),
            helper.make_node("Constant", [], ["w"], value=weight),
            helper.make_node("Mul", ["b", "w"], ["r"]),
        ]
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]
        return helper.make_function(domain, name, ["a"], ["r"], nodes, imports)

    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "s").write_bytes(np.float32([3]).tobytes())
    (tmp_path / "m").write_bytes(np.float32([5]).tobytes())
    (tmp_path / "sets" / "my.onnxopset").write_bytes(document([scale("F", "my", "s", "H")]))
    (tmp_path / "m.onnx").write_bytes(calling(functions=[scale("H", "my", "m", "Abs")]).SerializeToString())
    converted = onnx2jax.convert(tmp_path / "m.onnx", operator_sets=[tmp_path / "sets" / "my.onnxopset"])
    assert converted(X).tolist() == [15, 30]


# -------------------------------------------------------------------------------------------------------- rules


@rule("OD-01", "OD-04")
def test_fields_of_a_document() -> None:
    functions = [body("F", "Neg"), body("K", "Abs")]
    read = read_operator_set(document(functions, [("F", 1, 0), ("F", 2, 1), ("G", 1, 0)], 3))
    assert (read.domain, read.version, read.ir_version) == ("my", 3, 10)
    assert dict(read.stable) == {("F", 1): False, ("F", 2): True, ("G", 1): False}
    assert [read.since(name) for name in "FGKL"] == [2, 1, 3, None]


@rule("OD-06")
def test_ir_version_is_a_64_bit_number() -> None:
    """It parses, but is newer than the newest supported version."""
    source = document([body("F", "Neg")], ir_version=2**40)
    assert read_operator_set(source).ir_version == 2**40
    with pytest.raises(UnsupportedError, match=r"MV-02"):
        run(calling(), source)


@rule("OD-01", "OD-02", "OD-03")
@pytest.mark.parametrize(
    ("source", "broken"),
    [
        (document(magic=None), "OD-01"),
        (document(magic="ONNX"), "OD-01"),
        (document(ir_version=None), "OD-01"),
        (document(ir_version=0), "OD-01"),
        (document(domain=None), "OD-03"),
        (document(opset_version=None), "OD-02"),
        (document(opset_version=0), "OD-02"),
        (document(opset_version=2**31), "OD-02"),
        (document([], [("F", 5, 1)], 3), "OD-02"),
        (document([], [("F", 0, 1)], 3), "OD-02"),
        (document([], [("", 1, 1)], 3), "OD-02"),
        (document([], [("F", 1, 1), ("F", 1, 0)]), "OD-02"),
        (document([body("F", "Neg"), body("F", "Abs")]), "OD-02"),
        (document([body("F", "Neg", domain="other")]), "OD-03"),
        (document([body("", "Neg")]), "OD-03"),
        (calling().SerializeToString(), "OD-01"),
        (NEGATE[:-5], "OD-01"),
        (b"", "OD-01"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_broken_documents_are_refused(source: bytes, broken: str) -> None:
    with pytest.raises(ModelError, match=rf"the bytes given.*rule {broken}"):
        run(calling(), source)


@rule("OD-01", "OD-02", "OD-03")
def test_check_lists_all_errors_of_a_document() -> None:
    elsewhere = body("H", "Neg", domain="other")
    wrong = document([body("F", "Neg"), body("F", "Abs"), elsewhere], [("F", 9, 1), ("", 1, 1)], 2, magic="X")
    found = onnx2jax.check(OperatorSetProto.FromString(wrong)).errors
    assert sorted(f.rule for f in found) == ["FN-01", "OD-01", "OD-02", "OD-02", "OD-02", "OD-03"]
    assert all(f.path == "the OperatorSetProto given" for f in found if f.rule != "FN-01")
    assert onnx2jax.check(NEGATE).findings == ()


def test_check_validates_the_bodies_of_a_document() -> None:
    undefined = helper.make_node("Add", ["a", "b"], ["r"])
    misspelt = helper.make_node("Negg", ["a"], ["r"])
    mixed = [helper.make_node("Cast", ["a"], ["i"], to=7), helper.make_node("Cast", ["a"], ["f"], to=1)]
    bodies = [[undefined], [misspelt], [*mixed, helper.make_node("Add", ["i", "f"], ["r"])]]
    opsets = [helper.make_opsetid("", 21)]
    functions = [helper.make_function("my", f"F{i}", ["a"], ["r"], nodes, opsets) for i, nodes in enumerate(bodies)]
    found = onnx2jax.check(document([*functions, body("G", "my.F0", "Neg")])).errors
    assert {(f.rule, f.path[:13]) for f in found} == {
        ("FN-07", "function 'my."),
        ("OR-08", "node 'r'"),
        ("ND-09", "function 'F2'"),
    }


@rule("OD-02")
def test_domain_and_version_identify_a_document() -> None:
    with pytest.raises(ModelError, match=r"my 1 \(rule OD-02\)"):
        run(calling(), NEGATE, ABSOLUTE)


@rule("OR-06")
def test_a_domain_that_is_not_imported_stays_an_error() -> None:
    node = helper.make_node("F", ["x"], ["y"], domain="my")
    with pytest.raises(ModelError, match="OR-06"):
        run(model([node], *ENDS), NEGATE)


def test_constants_of_two_versions_have_different_keys() -> None:
    def scaled(by: float) -> Any:
        weight = numpy_helper.from_array(np.full(2, by, np.float32))
        nodes = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("Mul", ["a", "w"], ["r"])]
        return helper.make_function("my", "F", ["a"], ["r"], nodes, [helper.make_opsetid("", 21)])

    nodes = [helper.make_node("G", ["x"], ["g"], domain="my"), helper.make_node("F", ["x"], ["f"], domain="my")]
    message = model(
        [*nodes, helper.make_node("Add", ["g", "f"], ["y"])], *ENDS, opsets={"my": 2}, functions=[body("G", "my.F")]
    )
    converted = onnx2jax.convert(message, operator_sets=[document([scaled(2)]), document([scaled(10)], version=2)])
    assert sorted(converted.params) == ["my:1.F/w", "my:2.F/w"]
    assert converted(X).tolist() == [-12, 24]
