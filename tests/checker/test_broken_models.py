"""Table of invalid models: each is refused in strict mode, by the rule that it violates.

The kinds are those of the negative tests of the onnx package's checker, restated, and those that it lets pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from onnx import AttributeProto, SparseTensorProto, TensorProto, TypeProto, ValueInfoProto, helper

import onnx2jax
from onnx2jax.errors import ModelError
from tests.support.cases import MAIN, RELU, parse, rules_of

CALL = MAIN + " { y = l.f (x) }"
L = '\n<domain: "l", opset_import: ["" : 21, "l" : 1]> '
IF = "g (bool c, float[2] x) => (float[2] y) { y = If (c) <then_branch = t () => (float[2] e) { e = Abs (x) }, "
LOOP = 'g (int64 m, float[2] x) => (float[2] y) { y = Loop (m, "", x) <body = '

Edit = Callable[[Any], Any]
Row = tuple[str, str] | tuple[str, str, Edit]


def first(m: Any) -> Any:
    return m.graph.node[0]


def weight(**fields: Any) -> Edit:
    """Adds an initializer."""
    return lambda m: m.graph.initializer.append(TensorProto(**{"name": "w", "data_type": 1, "dims": [1]} | fields))


def attribute(**fields: Any) -> Edit:
    """Replaces the attributes of the first node."""

    def edit(m: Any) -> None:
        del first(m).attribute[:]
        first(m).attribute.add(**fields)

    return edit


def opset(version: int, domain: str = "") -> Edit:
    def edit(m: Any) -> None:
        del m.opset_import[:]
        m.opset_import.append(helper.make_opsetid(domain, version))

    return edit


def external(**entries: str) -> Edit:
    def edit(m: Any) -> None:
        weight(data_location=TensorProto.EXTERNAL)(m)
        for key, value in entries.items():
            m.graph.initializer[0].external_data.add(key=key, value=value)

    return edit


def sparse(indices: Any, dims: Any = (3,), code: int = TensorProto.INT64, values: int = 1) -> Edit:
    def edit(m: Any) -> None:
        message = SparseTensorProto(dims=dims)
        message.values.CopyFrom(helper.make_tensor("s", 1, [values], [1.0] * values))
        message.indices.CopyFrom(helper.make_tensor("", code, [len(indices)], indices))
        m.graph.sparse_initializer.append(message)

    return edit


def kind(**fields: Any) -> Edit:
    return lambda m: m.graph.input.append(ValueInfoProto(name="z", type=TypeProto(**fields)))


ELU = MAIN + " { y = Elu (x) }"
BROKEN: dict[str, Row] = {
    # the model
    "no ir_version": ("MV-01", RELU, lambda m: m.ClearField("ir_version")),
    "ir_version 0": ("MV-01", RELU, lambda m: setattr(m, "ir_version", 0)),
    "ir_version of the future": ("MV-02", RELU, lambda m: setattr(m, "ir_version", 1000)),
    "no operator sets": ("MV-03", RELU, lambda m: m.ClearField("opset_import")),
    "no graph": ("MV-04", RELU, lambda m: m.ClearField("graph")),
    "graph without a name": ("MV-04", RELU, lambda m: m.graph.ClearField("name")),
    "metadata key twice": ("ME-02", RELU, lambda m: [m.metadata_props.add(key="k") for _ in "ab"]),
    # operator sets
    "opset 0": ("OR-11", RELU, opset(0)),
    "negative opset": ("OR-11", RELU, opset(-3)),
    "opset beyond 32 bits": ("OR-11", RELU, opset(2**33)),
    "opset of the future": ("OR-12", RELU, opset(999)),
    "default domain not imported": ("OR-04", RELU, opset(3, "ai.onnx.ml")),
    "custom domain not imported": ("OR-06", MAIN + " { y = foo.bar.Op (x) }"),
    "unknown operator": ("OR-08", MAIN + " { y = Wuff (x) }"),
    "operator in the wrong case": ("OR-08", MAIN + " { y = ReLU (x) }"),
    "operator without a name": ("OR-08", RELU, lambda m: first(m).ClearField("op_type")),
    "operator newer than the opset": ("OR-09", MAIN + " { y = Gelu (x) }", opset(19)),
    "operator that was deprecated": ("OR-10", MAIN + " { y = Upsample (x, x) }"),
    # graphs
    "value from nowhere": ("GR-01", MAIN + " { y = Add (x, w) }"),
    "nodes in the wrong order": ("GR-01", MAIN + " { y = Neg (a)  a = Abs (x) }"),
    "cycle of two nodes": ("GR-01", MAIN + " { a = Add (x, y)  y = Neg (a) }"),
    "node that reads itself": ("GR-01", MAIN + " { y = Add (x, y) }"),
    "output from nowhere": ("GR-01", RELU, lambda m: setattr(m.graph.output[0], "name", "zz")),
    "two nodes of one output": ("GR-02", MAIN + " { y = Neg (x)  y = Abs (x) }"),
    "one node with an output twice": ("GR-02", MAIN + " { y, y = Split <axis = 0, num_outputs = 2> (x) }"),
    "input computed again": ("GR-02", MAIN + " { x = Neg (x)  y = Abs (x) }"),
    "initializer computed again": ("GR-02", MAIN + " <float[2] w = {1, 2}> { w = Neg (x)  y = Abs (w) }"),
    "two inputs of one name": ("GR-02", "g (float[2] x, float[2] x) => (float[2] y) { y = Relu (x) }"),
    "IR 3 initializer that is no input": (
        "GR-06",
        MAIN + " <float[2] w = {1, 2}> { y = Add (x, w) }",
        lambda m: setattr(m, "ir_version", 3),
    ),
    "two initializers of one name": ("GR-09", MAIN + " <float w = {1}, float w = {2}> { y = Add (x, w) }"),
    "initializer without a name": ("GR-09", RELU, weight(name="", float_data=[1])),
    "input without a type": ("GR-16", RELU, lambda m: m.graph.input[0].ClearField("type")),
    "output without a type": ("GR-16", RELU, lambda m: m.graph.output[0].ClearField("type")),
    "input without a shape": ("GR-16", RELU, lambda m: m.graph.input[0].type.tensor_type.ClearField("shape")),
    "default of another type": (
        "GR-19",
        "g (float[2] x, float[2] w) => (float[2] y) <float[3] w = {1, 2, 3}> { y = Add (x, w) }",
    ),
    "input without a name": ("GR-24", RELU, lambda m: setattr(m.graph.input[0], "name", "")),
    "node without outputs": ("GR-28", RELU, lambda m: m.graph.node.add(op_type="Neg", input=["x"])),
    # nodes
    "operand missing": ("ND-03", MAIN + " { y = Add (x) }"),
    "operand empty": ("ND-03", MAIN + ' { y = Add (x, "") }'),
    "no operands for a list": ("ND-05", MAIN + " { y = Sum () }"),
    "hole in a list": ("ND-06", MAIN + ' { y = Sum (x, "", x) }'),
    "operand too many": ("ND-08", MAIN + " { y = Relu (x, x) }"),
    "unknown attribute": ("ND-10", MAIN + " { y = Relu <slope = 1> (x) }"),
    "attribute missing": ("ND-10", MAIN + " { y = Cast (x) }"),
    "attribute twice": ("ND-10", MAIN + " { y = Elu <alpha = 1.0, alpha = 2.0> (x) }"),
    # attributes
    "attribute without a name": ("AT-01", ELU, attribute(name="", f=1.0, type=1)),
    "attribute of two values": ("AT-01", ELU, attribute(name="alpha", f=1.0, i=1, type=1)),
    "attribute of another type": ("AT-01", ELU, attribute(name="alpha", i=1, type=1)),
    "attribute without a type": ("AT-02", ELU, attribute(name="alpha", f=1.0)),
    "attribute without type and value": ("AT-02", ELU, attribute(name="alpha")),
    "reference with a value": (
        "AT-01",
        CALL + L + "f <al> (a) => (r) { r = Elu <alpha: float = @al> (a) }",
        lambda m: setattr(m.functions[0].node[0].attribute[0], "f", 1.0),
    ),
    "reference in the main graph": (
        "FN-16",
        ELU,
        attribute(name="alpha", ref_attr_name="al", type=AttributeProto.FLOAT),
    ),
    # tensors
    "element type 0": ("TY-01", RELU, weight(data_type=0, raw_data=bytes(4))),
    "unknown element type": ("TY-01", RELU, weight(data_type=77, raw_data=bytes(4))),
    "negative extent": ("TY-24", RELU, weight(dims=[-1])),
    "no data": ("TD-13", RELU, weight()),
    "too little data": ("TD-13", RELU, weight(dims=[3], float_data=[1, 2])),
    "too much data": ("TD-13", RELU, weight(float_data=[1, 2])),
    "data of no elements": ("TD-13", RELU, weight(dims=[0], float_data=[1])),
    "data twice": ("TD-01", RELU, weight(float_data=[1], raw_data=bytes(4))),
    "data in the field of another type": ("TD-13", RELU, weight(data_type=7, float_data=[1])),
    "strings in raw_data": ("TD-12", RELU, weight(data_type=8, raw_data=b"a")),
    "strings in a file": ("TD-12", RELU, weight(data_type=8, data_location=1)),
    "numbers out of range": ("TD-05", RELU, weight(data_type=2, int32_data=[300])),
    "segment": ("TD-14", RELU, weight(float_data=[1], segment=TensorProto.Segment(begin=0, end=1))),
    "external data without a location": ("EX-02", RELU, external(offset="0")),
    "external data at an absolute path": ("EX-03", RELU, external(location="/etc/passwd")),
    "external data above the folder": ("EX-03", RELU, external(location="../../etc/passwd")),
    "external data nowhere": ("EX-19", RELU, external(location="nope")),
    "external data with a bad offset": ("EX-09", RELU, external(location="w.bin", offset="-1")),
    "external data of another length": ("EX-11", RELU, external(location="w.bin", length="9")),
    "external data beyond the file": ("EX-10", RELU, external(location="w.bin", offset="99")),
    "location twice": (
        "EX-15",
        RELU,
        lambda m: (
            external(location="w.bin")(m),
            m.graph.initializer[0].external_data.add(key="location", value="w.bin"),
        ),
    ),
    # sparse tensors
    "sparse indices out of order": ("GR-11", RELU, sparse([1, 0], values=2)),
    "sparse indices twice": ("GR-11", RELU, sparse([1, 1], values=2)),
    "sparse index out of range": ("GR-11", RELU, sparse([3])),
    "negative sparse index": ("GR-11", RELU, sparse([-1])),
    "sparse indices of int32": ("GR-11", RELU, sparse([1], code=TensorProto.INT32)),
    "more sparse values than indices": ("GR-11", RELU, sparse([1], values=2)),
    "sparse scalar": ("GR-11", RELU, sparse([0], dims=())),
    # types
    "tensor type without elements": ("TY-01", RELU, kind(tensor_type=TypeProto.Tensor())),
    "sequence type without elements": ("TY-14", RELU, kind(sequence_type=TypeProto.Sequence())),
    "optional type without elements": ("TY-14", RELU, kind(optional_type=TypeProto.Optional())),
    "map with float keys": (
        "TY-16",
        RELU,
        kind(map_type=TypeProto.Map(key_type=1, value_type=helper.make_tensor_type_proto(1, [2]))),
    ),
    "opaque type without a name": ("TY-20", RELU, kind(opaque_type=TypeProto.Opaque(domain="d"))),
    "negative dim_value": (
        "SH-13",
        RELU,
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
    ),
    # subgraphs
    "branch that reads what comes later": (
        "GR-01",
        IF + "else_branch = s () => (float[2] n) { n = Neg (q) }>  q = Neg (x) }",
    ),
    "branch that defines an outer name": ("SC-03", IF + "else_branch = s () => (float[2] x) { x = Neg (c) }> }"),
    "branch that returns an outer value": ("SC-06", IF + "else_branch = s () => (float[2] x) { }> }"),
    "branches of unlike counts": (
        "SC-12",
        IF + "else_branch = s () => (float[2] n, float[2] o) { n = Neg (x)  o = Neg (x) }> }",
    ),
    "body with an operand too few": ("SC-11", LOOP + "b (int64 i, bool k) => (bool k, float[2] u) { u = Neg (x) }> }"),
    "body with an output too few": ("SC-13", LOOP + "b (int64 i, bool k, float[2] v) => (bool k) { }> }"),
    "body with an input and initializer of one name": (
        "SC-08",
        LOOP + "b (int64 i, bool k, float[2] v) => (bool k, float[2] u) <float[2] v = {1, 2}> { u = Neg (v) }> }",
    ),
    # functions
    "function twice": ("FN-01", CALL + L + "f (a) => (r) { r = Neg (a) }" + L + "f (a) => (r) { r = Abs (a) }"),
    "function without this overload": (
        "FN-02",
        CALL + L + "f (a) => (r) { r = Neg (a) }",
        lambda m: setattr(first(m), "overload", "other"),
    ),
    "function of a domain not imported": (
        "FN-04",
        MAIN + " { y = k.f (x) }" + L.replace('"l"', '"k"', 1) + "f (a) => (r) { r = Neg (a) }",
    ),
    "function with another version's meaning": (
        "FN-06",
        CALL + '\n<domain: "l", opset_import: ["" : 11]> f (a) => (r) { r = Softmax (a) }',
    ),
    "function without an import it needs": (
        "OR-04",
        CALL + '\n<domain: "l", opset_import: ["l" : 1]> f (a) => (r) { r = Neg (a) }',
    ),
    "function that reads an outer value": ("FN-07", CALL + L + "f (a) => (r) { r = Add (a, x) }"),
    "function with nodes out of order": ("GR-01", CALL + L + "f (a) => (r) { r = Neg (t)  t = Abs (a) }"),
    "call with operands too many": ("FN-09", MAIN + " { y = l.f (x, x) }" + L + "f (a) => (r) { r = Neg (a) }"),
    "call with an unknown attribute": ("FN-12", MAIN + " { y = l.f <k = 1> (x) }" + L + "f (a) => (r) { r = Neg (a) }"),
    "call without an attribute needed inside": (
        "FN-14",
        CALL + L + "f <to> (a) => (r) { r = Cast <to: int = @to> (a) }",
    ),
    "call with an attribute of another type": (
        "FN-15",
        MAIN + " { y = l.f <al = 1> (x) }" + L + "f <al> (a) => (r) { r = Elu <alpha: float = @al> (a) }",
    ),
    "function with an output twice": ("FN-11", CALL + L + "f (a) => (r, r) { r = Neg (a) }"),
    "reference to no parameter": ("FN-16", CALL + L + "f (a) => (r) { r = Elu <alpha: float = @al> (a) }"),
    "function that calls itself": ("FN-19", CALL + L + "f (a) => (r) { r = l.f (a) }"),
    "functions that call each other": (
        "FN-19",
        CALL + L + "f (a) => (r) { r = l.h (a) }" + L + "h (a) => (r) { r = l.f (a) }",
    ),
    "function without a name": (
        "FN-28",
        CALL + L + "f (a) => (r) { r = Neg (a) }",
        lambda m: m.functions[0].ClearField("name"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_by_its_rule(case: str, tmp_path: Any) -> None:
    rule, text, *edit = BROKEN[case]
    (tmp_path / "w.bin").write_bytes(bytes(4))
    proto = parse(text, edit[0] if edit else None)
    report = onnx2jax.check(proto, external_data_dir=tmp_path)
    assert rule in {f.rule for f in report.errors}, report
    with pytest.raises(ModelError):
        onnx2jax.convert(proto, strict=True, external_data_dir=tmp_path)


def test_the_table_covers_at_least_fifty_rules() -> None:
    assert len(BROKEN) >= 60
    assert len({rule for rule, *_ in BROKEN.values()}) >= 50
    assert rules_of(parse()) == set()


def test_all_violations_are_reported_at_once() -> None:
    text = MAIN + " <float w = {1}> { a = Wuff (x)  b = Cast (a)  c = Add (b)  y = Add (nope, c) }"
    proto = parse(text, lambda m: weight(float_data=[1, 2])(m))
    assert rules_of(proto) >= {"OR-08", "ND-10", "ND-03", "GR-01", "GR-09"}
