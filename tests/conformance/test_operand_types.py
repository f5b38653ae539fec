"""Rules ND-07 to ND-09, GR-18 and GR-20: types of operands against each version's schema, inferred through graphs."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper

import onnx2jax
from onnx2jax.errors import DeclarationWarning, DeviationWarning
from onnx2jax.ops import registry
from tests.support.cases import MAIN, F, X, clean, parse, refused, refused_when_strict, rule, rules_of, same, warned
from tests.tables import types

L = '\n<domain: "l", opset_import: ["" : 21, "l" : 1]> '


def typed(text: str, version: int = 21) -> onnx.ModelProto:
    return parse(text, lambda m: setattr(m.opset_import[0], "version", version))


def mismatches(text: str, version: int = 21) -> list[str]:
    """The findings of check for type mismatches."""
    return [f.message for f in onnx2jax.check(typed(text, version)).findings if f.rule == "ND-09"]


def test_the_table_of_types_is_current() -> None:
    assert types.FILE.read_text(encoding="utf-8") == types.text(), "run python -m tests.tables.types"


@rule("ND-09")
def test_operands_are_of_the_types_of_the_operators_version() -> None:
    text = "g (int64[2] x) => (int64[2] y) { y = Relu (x) }"
    with pytest.warns(DeviationWarning, match="node 'y': input 'x' is int64, but Relu of opset 13 takes"):
        refused_when_strict(typed(text, 13), "ND-09")
    assert mismatches(text, 13) == [
        "input 'x' is int64, but Relu of opset 13 takes one of bfloat16, double, float, float16"
    ]
    assert clean(typed(text, 14), X.astype(int)).tolist() == [0, 2]


@rule("ND-09")
def test_operands_of_one_type_variable_are_of_one_type() -> None:
    text = "g (float[2] x, int64[2] z) => (float[2] y) { y = Add (x, z) }"
    assert mismatches(text) == ["input 'z' is int64 and 'x' is float, but Add takes one type"]
    with pytest.raises(onnx2jax.errors.ModelError, match="ND-09"):
        onnx2jax.convert(parse(text), strict=True)
    refused(parse(text), "ND-09", match="put a Cast before it", error=onnx2jax.errors.ModelError)


MEANINGLESS = {
    "not of a number": "g (int32[2] x) => (int32[2] y) { y = Not (x) }",
    "mean of integers": "g (int32[2] x) => (int32[2] y) { y = Mean (x, x) }",
    "mean of one float8": "g (float8e4m3fn[1, 1, 8] x) => (float8e4m3fn[1, 1, 1] y) { y = GlobalAveragePool (x) }",
    "in a branch": """g (bool c, int32[2] x) => (int32[2] y) { y = If (c)
      <then_branch = t () => (int32[2] u) { u = Not (x) }, else_branch = e () => (int32[2] v) { v = Neg (x) }> }""",
    "in a function": "g (int32[2] x) => (int32[2] y) { y = l.f (x) }" + L + "f (a) => (r) { r = Not (a) }",
    "beside 100 that are plain": "g (int8[2, 2] x) => (bool[2, 2] y) { z = MatMul (x, x)  y = Not (z) }",
}


@rule("ND-09")
@pytest.mark.parametrize("case", MEANINGLESS)
def test_types_without_a_meaning_are_refused(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviationWarning)
        refused(parse(MEANINGLESS[case]), "ND-09", match="put a Cast before it", error=onnx2jax.errors.ModelError)


@rule("ND-09")
def test_an_operator_of_the_users_own_takes_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OPERATORS, ("", "Not"), [])
    onnx2jax.ops.op("Not", replace=True)(lambda X: ~X)
    assert onnx2jax.convert(parse(MEANINGLESS["not of a number"]))(np.int32([0, 1])).tolist() == [-1, -2]


@rule("ND-09")
def test_operators_that_move_elements_take_any_type() -> None:
    text = "g (int4[2] x) => (int4[1] y) { i = Constant <value_ints = [0]> ()  z = Gather (x, i)  y = Identity (z) }"
    proto = typed(text, 13)
    assert "ND-09" in rules_of(proto)
    onnx2jax.convert(proto)


@rule("ND-09")
def test_one_warning_for_each_type_whose_meaning_is_plain() -> None:
    """Exporters of other runtimes write these; some version of the operator takes a type of the same class."""
    ends = "g (int8[2, 2] x, float[2] z) => (int8[2, 2] y, bool[2] w)"
    text = ends + " { a = MatMul (x, x)  y = MatMul (a, x)  w = Equal (z, z) }"
    with pytest.warns(DeviationWarning) as said:
        model = onnx2jax.convert(typed(text, 9))
    assert len(said) == 2 and all("put a Cast before it" in str(w.message) for w in said)
    results = model(np.int8([[1, 2], [3, 4]]), F([1, np.nan]))
    assert [np.asarray(r).tolist() for r in results] == [[[37, 54], [81, 118]], [True, False]]


@rule("ND-07")
def test_variadic_operands_of_one_type_and_of_any() -> None:
    refused(parse("g (float[2] x, double[2] z) => (float[2] y) { y = Sum (x, x, z) }"), "ND-09")
    assert mismatches("g (float[2] x, float[2] z) => (float[2] y) { y = Sum (x, z) }") == []
    body = "b (int64 i, bool k, float[2] v, int64[2] n) => (bool k, float[2] u, int64[2] o)"
    text = f'{{ y, z = Loop (m, "", x, j) <body = {body} {{ u = Neg (v)  o = Neg (n) }}> }}'
    assert mismatches(f"g (int64 m, float[2] x, int64[2] j) => (float[2] y, int64[2] z) {text}") == []


@rule("ND-08")
def test_outputs_that_an_operator_does_not_have() -> None:
    proto = parse(MAIN + " { y, z = Relu (x) }")
    assert rules_of(proto) == {"ND-08"}
    with pytest.raises(onnx2jax.errors.OnnxError, match="ND-08"):
        onnx2jax.convert(proto, strict=True)
    with pytest.raises(onnx2jax.errors.OperatorError, match="ND-08"):
        onnx2jax.convert(proto)(X)
    assert rules_of(parse(MAIN + ' { y, "" = Relu (x) }')) == set()


FOLLOWED = {
    "initializer": MAIN + " <int64[2] w = {1, 2}> { y = Add (x, w) }",
    "constant": MAIN + " { w = Constant <value_ints = [1, 2]> ()  y = Add (x, w) }",
    "cast": MAIN + " { w = Cast <to = 7> (x)  y = Add (x, w) }",
    "result of a known type": MAIN + " { w = Shape (x)  y = Add (x, w) }",
    "element of a list": MAIN
    + " { s = Shape (x)  i = Size (x)  q = SequenceConstruct (s)  w = SequenceAt (q, i)  y = Add (x, w) }",
    "value_info": MAIN + " <int64[2] w> { w = l.Unknown (x)  y = Add (x, w) }",
    "sequence": MAIN
    + " { s = Shape (x)  q = SequenceConstruct (s)  w = ConcatFromSequence <axis = 0> (q)  y = Add (x, w) }",
    "branch": "g (bool c, float[2] x) => (float[2] y) { w = If (c) <then_branch = t () => (a) { a = Shape (x) }, "
    "else_branch = e () => (b) { b = Shape (x) }>  y = Add (x, w) }",
    "inside a branch": "g (bool c, float[2] x) => (float[2] y) { w = Shape (x)  y = If (c) <then_branch = t () => (a) "
    "{ a = Add (x, w) }, else_branch = e () => (b) { b = Neg (x) }> }",
    "state of a loop": 'g (int64 m, float[2] x) => (float[2] y) { s = Shape (x)  w = Loop (m, "", s) <body = '
    "b (int64 i, bool k, v) => (bool k, u) { u = Neg (v) }>  y = Add (x, w) }",
    "counter of a loop": 'g (int64 m, float[2] x) => (float[2] y) { y = Loop (m, "", x) <body = '
    "b (i, k, v) => (k, u) { u = Add (v, i) }> }",
    "scan": "g (float[2] x) => (float[2] y) { s = Shape (x)  w = Scan <num_scan_inputs = 1, body = "
    "b (v) => (u) { u = Neg (v) }> (s)  y = Add (x, w) }",
    "function": MAIN + " { s = Shape (x)  w = l.f (s)  y = Add (x, w) }" + L + "f (a) => (r) { r = Neg (a) }",
    "inside a function": MAIN + " { s = Shape (x)  y = l.f (x, s) }" + L + "f (a, b) => (r) { r = Add (a, b) }",
}
"""Models in which the type of an operand has to be inferred; in each an int64 meets a float."""


@rule("ND-09")
@pytest.mark.parametrize("way", FOLLOWED)
def test_types_are_inferred_through_the_graph(way: str) -> None:
    (message,) = mismatches(FOLLOWED[way])
    assert "is int64 and" in message and "is float, but Add takes one type" in message


@rule("ND-09")
def test_unknown_types_are_not_guessed() -> None:
    free = MAIN + " { w = l.f (x)  y = Add (x, w) }"
    assert mismatches(free) == mismatches(free + L + "f <to> (a) => (r) { r = Cast <to: int = @to> (a) }") == []
    polymorphic = "g (float[2] x, int64[2] i) => (float[2] y, int64[2] z) { y = l.f (x)  z = l.f (i) }"
    assert mismatches(polymorphic + L + "f (a) => (r) { r = Add (a, a) }") == []
    doubling = "".join(L + f"f{i} (a) => (r) {{ s = l.f{i - 1} (a)  r = l.f{i - 1} (s) }}" for i in range(1, 40))
    assert mismatches(MAIN + " { y = l.f39 (x) }" + L + "f0 (a) => (r) { r = Neg (a) }" + doubling) == []


def _judged(proto: onnx.ModelProto) -> bool:
    """Whether the onnx package's own inference takes the types of the operands."""
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True)
    except onnx.shape_inference.InferenceError:
        return False
    return True


@rule("ND-09")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_agreement_with_the_onnx_package(seed: int) -> None:
    """Operators of one to three inputs, each version with operands of random element types."""
    rng, agreed = random.Random(seed), {True: 0, False: 0}
    schemas = [s for s in defs.get_all_schemas_with_history() if not s.deprecated and s.domain == "" and _plain(s)]
    for schema in schemas:
        codes = range(1, 24 if schema.since_version < 25 else 27)
        for _ in range(4 if seed == 0 else 40):
            kinds = [rng.choice(codes) for _ in schema.inputs]
            if rng.random() < 0.7:
                kinds = [kinds[0] for _ in kinds]
            names = [f"x{i}" for i in range(len(kinds))]
            outputs = [f"y{i}" for i in range(schema.min_output)]
            ends = [helper.make_tensor_value_info(n, k, None) for n, k in zip(names, kinds, strict=True)]
            made = helper.make_node(schema.name, names, outputs)
            graph = helper.make_graph([made], "g", ends, [onnx.ValueInfoProto(name=n) for n in outputs])
            proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", schema.since_version)])
            fits = "ND-09" not in rules_of(proto)
            assert fits == _judged(proto), (schema.name, schema.since_version, kinds, onnx2jax.check(proto))
            agreed[fits] += 1
    assert min(agreed.values()) > 100


def _plain(schema: Any) -> bool:
    """Whether a schema has only single tensors as inputs, and no attribute decides over types or is needed."""
    single = defs.OpSchema.FormalParameterOption.Single
    return (
        0 < len(schema.inputs) <= 3
        and not (schema.has_function or schema.has_context_dependent_function)  # not checked there
        and all(p.option == single for p in schema.inputs)
        and all(t.startswith("tensor(") for c in schema.type_constraints for t in c.allowed_type_strs)
        and not any(a.required or a.name == "dtype" for a in schema.attributes.values())
    )


# -------------------------------------------------------------------------------------------- declarations


@rule("GR-18")
def test_the_computed_output_type_overrides_the_declared_one() -> None:
    proto = parse("g (float[2] x) => (double[2] y) { y = Relu (x) }")
    m = warned(proto, "GR-18")
    with pytest.warns(DeclarationWarning, match=r"GR-18"):
        same(m(X), [0, 2])


@rule("GR-20", "FN-22")
def test_contradicting_value_info_is_a_warning() -> None:
    text = MAIN + " { t = Neg (x)  y = Relu (t) }"
    wrong = helper.make_tensor_value_info("t", TensorProto.INT64, [7])
    same(warned(parse(text, lambda m: m.graph.value_info.append(wrong)), "GR-20")(X), [1, 0])
    called = parse(MAIN + " { y = l.f (x) }" + L + "f (a) => (t) { t = Neg (a) }")
    called.functions[0].value_info.append(wrong)
    same(warned(called, "GR-20")(X), [1, -2])
