"""Rules FN: a model's own functions."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax.errors import ModelError, UnsupportedOperatorError
from tests.support.cases import (
    MAIN,
    F,
    X,
    clean,
    parse,
    refused,
    refused_when_strict,
    rule,
    rules_of,
    run,
    same,
    warned,
)

L = '\n<domain: "l", opset_import: ["" : 21, "l" : 1]> '
CALL = MAIN + " { y = l.f (x) }"
NEG = L + "f (a) => (r) { r = Neg (a) }"
ELU = L + "f <al> (a) => (r) { r = Elu <alpha: float = @al> (a) }"
ELU3 = L + "f <al: float = 3.0> (a) => (r) { r = Elu <alpha: float = @al> (a) }"


def elu(alpha: float) -> np.ndarray:
    return np.where(X > 0, X, alpha * np.expm1(X)).astype(F)


def overloads(m: Any) -> None:
    m.functions[0].overload, m.functions[1].overload = "A", "B"


@rule("FN-01")
def test_functions_are_unique_by_domain_name_and_overload() -> None:
    refused(parse(CALL + NEG + NEG), "FN-01", match="defined twice", error=ModelError)
    same(clean(parse(CALL + NEG + NEG, lambda m: setattr(m.functions[1], "overload", "B")), X), -X)


@rule("FN-02")
def test_a_node_selects_the_function_of_its_own_overload() -> None:
    relu = L + "f (a) => (r) { r = Relu (a) }"

    def called(overload: str) -> onnx.ModelProto:
        proto = parse(CALL + NEG + relu, overloads)
        proto.graph.node[0].overload = overload
        return proto

    same(clean(called("A"), X), -X)
    same(clean(called("B"), X), [0, 2])
    for overload in ("C", ""):  # the reference evaluator ignores overloads
        refused(called(overload), "FN-02", error=UnsupportedOperatorError)


@rule("FN-03")
def test_functions_of_the_default_domain_are_found_under_both_names() -> None:
    body = '\n<domain: "ai.onnx", opset_import: ["" : 21]> Own (a) => (r) { r = Neg (a) }'
    same(clean(parse(MAIN + " { y = Own (x) }" + body), X), -X)


@rule("FN-04")
def test_the_domain_of_a_function_has_to_be_imported() -> None:
    proto = parse(MAIN + " { y = k.f (x) }" + NEG.replace('domain: "l"', 'domain: "k"'))
    refused(proto, "FN-04", match="opset_import", error=ModelError)


@rule("FN-05")
def test_a_body_may_import_domains_that_the_model_does_not() -> None:
    proto = parse(
        CALL + '\n<domain: "l", opset_import: ["ai.onnx.ml" : 5]> f (a) => (r) { r = ai.onnx.ml.Binarizer (a) }'
    )
    del proto.opset_import[2]
    same(clean(proto, X), [0, 1])


@rule("FN-06")
def test_versions_of_function_and_model() -> None:
    agreeing = CALL + '\n<domain: "l", opset_import: ["" : 14]> f (a) => (r) { r = Relu (a) }'
    same(clean(parse(agreeing), X), [0, 2])
    text = "g (float[1, 2, 2] x) => (float[1, 2, 2] y) { y = l.f (x) }"
    old = parse(text + '\n<domain: "l", opset_import: ["" : 11]> f (a) => (r) { r = Softmax (a) }')
    # onnxruntime and the reference evaluator silently use the model's version.
    with pytest.warns(onnx2jax.errors.DeviationWarning, match="Softmax of opset 21, which the model imports"):
        function = refused_when_strict(old, "FN-06")
    np.testing.assert_allclose(function(np.ones((1, 2, 2), F)), np.full((1, 2, 2), 0.25))


@rule("FN-06")
@pytest.mark.parametrize(
    ("operator", "version", "deviates"),
    [
        ("ReduceSum <axes = [1]> (a)", 11, True),  # axes are an input since 13
        ("ReduceSum (a)", 11, False),
        ("Clip <max = 1.0> (a)", 10, True),
        ("Clip (a, low)", 11, False),
        ("Relu (a)", 13, False),  # 14 only widens its types
        ("If (c) <then_branch = t () => (e) { e = Softmax (a) }, else_branch = s () => (n) { n = Abs (a) }>", 11, True),
    ],
)
def test_a_function_of_another_version(operator: str, version: int, deviates: bool) -> None:
    """Another schema is an error of ``check``, as it is onnx.checker's; another meaning is a DeviationWarning, too."""
    values = "low = Constant <value = float {0}> ()  c = Constant <value = bool {1}> ()"
    body = f'\n<domain: "l", opset_import: ["" : {version}]> f (a) => (r) {{ {values}  r = {operator} }}'
    proto = parse("g (float[N, M] x) => (float[K, L] y) { y = l.f (x) }" + body)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        refused_when_strict(proto, "FN-06")
    assert [w.category for w in given] == [onnx2jax.errors.DeviationWarning] * deviates
    with pytest.raises(onnx.checker.ValidationError, match="FunctionOp imports version"):
        onnx.checker.check_model(proto)


@rule("FN-07")
def test_a_body_is_a_scope_of_its_own() -> None:
    outer = MAIN + " <float[2] w = {1, 1}> { t = Abs (x)  z = l.f (x)  q = l.f (z)  y = Add (t, q) }"
    refused(parse(outer + L + "f (a) => (r) { r = Add (a, w) }"), "FN-07", match="'w'", error=ModelError)
    same(clean(parse(outer + L + "f (a) => (r) { t = Neg (a)  w = Neg (t)  r = Neg (w) }"), X), np.abs(X) + X)
    unordered = parse(CALL + L + "f (a) => (r) { r = Neg (t)  t = Abs (a) }")
    same(refused_when_strict(unordered, "GR-01")(X), -np.abs(X))
    refused(parse(CALL + L + "f (a) => (r) { r = Neg (a)  r = Abs (a) }"), "GR-02", error=ModelError)


@rule("FN-08")
@pytest.mark.parametrize("inputs", ["x", 'x, ""'])
def test_missing_operands_are_absent_inside(inputs: str) -> None:
    clip = L + "f (a, b) => (r) { r = Clip (a, b) }"
    same(clean(parse(MAIN + f" {{ y = l.f ({inputs}) }}" + clip), X), X)  # the reference evaluator fails on the first


@rule("FN-09")
@pytest.mark.parametrize("call", ["y = l.f (x, x)", "y, z = l.f (x)"])
def test_surplus_operands_are_refused(call: str) -> None:
    refused(parse(MAIN + f" {{ {call} }}" + NEG), "FN-09", error=ModelError)  # the checker does not notice


@rule("FN-10")
@pytest.mark.parametrize(("outputs", "expected"), [("y", -X), ('"", y', np.abs(X))])
def test_outputs_of_a_call_may_be_omitted(outputs: str, expected: np.ndarray) -> None:
    # onnxruntime and the full checker refuse the first form.
    two = L + "f (a) => (r, s) { r = Neg (a)  s = Abs (a) }"
    same(clean(parse(MAIN + f" {{ {outputs} = l.f (x) }}" + two), X), expected)


@rule("FN-11")
def test_outputs_of_a_function() -> None:
    same(clean(parse(CALL + L + "f (a) => (a) { }"), X), X)  # onnxruntime fails on this one
    refused(parse(CALL + L + "f (a) => (r, r) { r = Neg (a) }"), "FN-11", match="twice", error=ModelError)


@rule("FN-12")
def test_names_of_attributes_are_unique_over_both_lists() -> None:
    overlap = parse(CALL + ELU3, lambda m: m.functions[0].attribute.append("al"))
    refused(overlap, "FN-12", match="twice", error=ModelError)  # the checker misses it
    unknown = parse(MAIN + " { y = l.f <nope = 1.0> (x) }" + ELU)
    refused(unknown, "FN-12", match="nope", error=ModelError)


@rule("FN-13", "FN-14")
@pytest.mark.parametrize(
    ("given", "body", "alpha"), [("<al = 2.0>", ELU, 2), ("", ELU3, 3), ("<al = 2.0>", ELU3, 2), ("", ELU, 1)]
)
def test_attributes_given_defaulted_and_omitted(given: str, body: str, alpha: float) -> None:
    # The reference evaluator fails on such bodies.
    np.testing.assert_allclose(clean(parse(MAIN + f" {{ y = l.f {given} (x) }}" + body), X), elu(alpha), rtol=1e-6)


@rule("FN-14")
def test_an_attribute_that_the_operator_requires_cannot_be_omitted() -> None:
    cast = L + "f <to> (a) => (r) { r = Cast <to: int = @to> (a) }"
    refused(parse(CALL + cast), "FN-14", match=r"\['to'\]", error=ModelError)
    nested = CALL.replace("l.f", "l.g") + L + "g <to> (a) => (r) { r = l.f <to: int = @to> (a) }" + cast
    refused(parse(nested), "FN-14", match=r"\['to'\]", error=ModelError)
    same(clean(parse(MAIN.replace("float[2] y", "int32[2] y") + " { y = l.f <to = 6> (x) }" + cast), X), [-1, 2])


@rule("FN-15")
def test_a_reference_has_its_own_name_and_the_type_of_the_parameter() -> None:
    refused(parse(MAIN + " { y = l.f <al = 2> (x) }" + ELU), "FN-15", error=ModelError)
    refused(parse(CALL + ELU.replace("<al>", "<al: int = 3>")), "FN-15", error=ModelError)


INNER_IF = (
    L
    + """f <al> (a) => (r) { c = Constant <value = bool {1}> ()  r = If (c)
  <then_branch = t () => (e) { e = Elu <alpha: float = @al> (a) }, else_branch = s () => (n) { n = Neg (a) }> }"""
)


@rule("FN-16")
def test_references_are_legal_in_function_bodies_at_any_depth_only() -> None:
    proto = parse(MAIN + " { y = l.f <al = 2.0> (x) }" + INNER_IF)
    np.testing.assert_allclose(clean(proto, X), elu(2), rtol=1e-6)

    def refer(m: Any) -> None:
        m.graph.node[0].attribute.add(name="alpha", ref_attr_name="al", type=onnx.AttributeProto.FLOAT)

    # onnxruntime runs it with zero.
    refused(parse(MAIN + " { y = Elu (x) }", refer), "FN-16", error=ModelError)


@rule("FN-17")
@pytest.mark.parametrize(("given", "body", "alpha"), [("<al = 2.0>", ELU, 2), ("", ELU3, 3), ("", ELU, 1)])
def test_references_pass_through_nested_calls(given: str, body: str, alpha: float) -> None:
    outer = L + "g <al> (a) => (r) { r = l.f <al: float = @al> (a) }"
    proto = parse(MAIN + f" {{ y = l.g {given} (x) }}" + outer + body)
    np.testing.assert_allclose(clean(proto, X), elu(alpha), rtol=1e-6)


@rule("FN-18")
def test_parameters_of_any_kind() -> None:
    text = (
        MAIN
        + """ { y = l.f <t = float[2] {5, 7}, b = h () => (q) { q = Constant <value = float[2] {1, 1}> () }> (x) }"""
    )
    body = (
        L
        + """f <t, b> (a) => (r) { w = Constant <value: tensor = @t> ()  c = Constant <value = bool {1}> ()
      p = If (c) <then_branch: graph = @b, else_branch: graph = @b>  s = Add (w, p)  r = Add (s, a) }"""
    )
    same(clean(parse(text + body), X), X + F([6, 8]))


@rule("FN-19")
def test_any_order_of_declaration_and_no_recursion() -> None:
    g = L + "g (a) => (r) { r = l.f (a) }"
    same(clean(parse(CALL.replace("l.f", "l.g") + g + NEG), X), -X)  # the reference evaluator needs callees first
    for body, cycle in (
        (L + "f (a) => (r) { r = l.f (a) }", r"'l\.f' calls itself \("),
        (L + "f (a) => (r) { r = l.g (a) }" + g, r"'l\.f' calls itself through 'l\.g' \("),
        (INNER_IF.replace("Neg (a)", "l.f (a)"), r"'l\.f' calls itself \("),
    ):
        refused(parse(CALL + body), "FN-19", match=cycle, error=ModelError)


def chain(length: int, twice: bool = False) -> str:
    second = " s = l.f{0} (r0)" if twice else " s = Neg (r0)"
    bodies = [L + f"f{i} (a) => (s) {{ r0 = l.f{i - 1} (a) {second.format(i - 1)} }}" for i in range(1, length)]
    return MAIN + f" {{ y = l.f{length - 1} (x) }}" + L + "f0 (a) => (r) { r = Neg (a) }" + "".join(bodies)


@rule("FN-20")
def test_chains_of_calls_are_bounded() -> None:
    same(clean(parse(chain(100)), X), X)
    refused(parse(chain(150)), "FN-20", match="deep", error=ModelError)
    refused(parse(chain(40, twice=True)), "FN-20", match="expands", error=ModelError)
    same(onnx2jax.convert(parse(chain(8, twice=True)))(X), X)


@rule("FN-21")
def test_each_call_is_traced_with_its_own_types() -> None:
    text = "g (float[2] x, int64[3, 3] i) => (float[2] y, int64[3, 3] z) { y = l.f (x)  z = l.f (i) }"
    y, z = clean(parse(text + NEG), X, np.eye(3, dtype=np.int64))
    same(y, -X)
    same(z, -np.eye(3))
    assert z.dtype == np.int64


@rule("FN-22")
def test_value_info_of_a_function_is_a_hint() -> None:
    for kind, shape in (
        (onnx.TensorProto.FLOAT, [2]),
        (onnx.TensorProto.FLOAT, [7, 7]),
        (onnx.TensorProto.STRING, [2]),
    ):
        hint = onnx.helper.make_tensor_value_info("r", kind, shape)
        proto = parse(CALL + NEG, lambda m, hint=hint: m.functions[0].value_info.append(hint))
        same((warned(proto, "GR-20") if kind == onnx.TensorProto.STRING else onnx2jax.convert(proto))(X), -X)


@rule("FN-23")
def test_the_body_of_a_function_is_what_runs() -> None:
    onnx2jax.ops.op("f", domain="l", replace=True)(lambda x: x * 100)
    same(run(parse(CALL + NEG), X), -X)


@rule("FN-27")
def test_random_numbers_of_two_calls() -> None:
    text = MAIN + " { p = l.f (x)  q = l.f (x)  y = Sub (p, q) }"
    drawn = L + "f (a) => (r) { r = RandomNormalLike (a) }"
    assert np.all(onnx2jax.convert(parse(text + drawn))(X, rng=jax.random.key(0)) != 0)
    seeded = drawn.replace("RandomNormalLike (a)", "RandomNormalLike <seed = 1.0> (a)")
    same(clean(parse(text + seeded), X), [0, 0])


@rule("FN-28")
def test_a_function_has_a_name_and_a_domain() -> None:
    refused_when_strict(parse(MAIN + " { y = Neg (x) }" + NEG, lambda m: m.functions[0].ClearField("name")), "FN-28")
    refused_when_strict(parse(MAIN + " { y = Neg (x) }" + NEG, lambda m: m.functions[0].ClearField("domain")), "FN-28")


@rule("FN-29")
def test_fields_that_functions_once_had_are_harmless() -> None:
    proto = parse(CALL + NEG)
    data = proto.functions[0].SerializeToString() + b"\x10\x05\x18\x01"  # since_version 5, status 1
    proto.ClearField("functions")
    raw = proto.SerializeToString() + b"\xca\x01" + bytes([len(data)]) + data
    assert len(data) < 128
    same(clean(raw, X), -X)


def test_uncalled_functions_are_checked() -> None:
    assert rules_of(parse(MAIN + " { y = Neg (x) }" + L + "f (a) => (r) { r = Neg (b) }")) == {"FN-07"}


def test_an_overload_of_an_operator_has_no_meaning() -> None:
    proto = parse(MAIN + " { y = Relu (x) }", lambda m: setattr(m.graph.node[0], "overload", "q"))
    same(warned(proto, "ND-13")(X), [0, 2])
