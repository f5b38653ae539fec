"""Rules SC: names and scopes of subgraphs."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from onnx import AttributeProto

import onnx2jax
from onnx2jax.errors import InputShapeError, KnownValueError, ModelError, OnnxError
from tests.support.cases import MAIN, F, X, clean, parse, refused, refused_when_strict, rule, rules_of, same, warned

COND = "g (bool c, float[2] x) => (float[2] y)"
TRUE, FALSE = np.bool_(True), np.bool_(False)


def branches(then: str, other: str = "s () => (float[2] n) { n = Neg (x) }", before: str = "", after: str = "") -> str:
    node = f"y = If (c) <then_branch = {then}, else_branch = {other}>"
    return f"{COND} <float[2] w = {{1, 1}}> {{ {before} {node} {after} }}"


def loop(body: str, inputs: str = "m, c, x", outputs: str = "y", head: str = "float[2] y", more: str = "") -> str:
    return f"g (int64 m, bool c, float[2] x) => ({head}) {{ {more} {outputs} = Loop ({inputs}) <body = {body}> }}"


ADD_ONE = "b (int64 i, bool k, float[2] v) => (bool k, float[2] u) <float one = {1}> { u = Add (v, one) }"


@rule("SC-01")
def test_a_branch_reads_outer_values_at_any_depth() -> None:
    inner = "If (c) <then_branch = p () => (float[2] q) { s1 = Add (x, t1)  q = Mul (s1, w) }, " + (
        "else_branch = r () => (float[2] v) { v = Neg (x) }>"
    )
    text = branches(f"t () => (float[2] e) {{ t1 = Abs (x)  e = {inner} }}")
    same(clean(parse(text), TRUE, X), X + np.abs(X))
    same(clean(parse(text), FALSE, X), -X)
    m = onnx2jax.convert(parse(text))
    gradient = jax.grad(lambda p, x: m.apply(p, TRUE, x).sum())(m.params, X)
    same(gradient["w"], X + np.abs(X))


@rule("SC-02")
def test_a_branch_does_not_see_what_comes_later() -> None:
    text = branches("t () => (float[2] e) { e = Neg (q) }", after="q = Abs (x)")
    # onnxruntime reorders, as we do unless strict: the values are the same. The reference evaluator refuses it.
    same(refused_when_strict(parse(text), "GR-01")(TRUE, X), -np.abs(X))
    circular = branches("t () => (float[2] e) { e = Neg (q) }", after="q = Abs (y)")
    refused(parse(circular), "GR-01", match="cycle", error=ModelError)


@rule("SC-03")
def test_no_name_is_defined_again_inside() -> None:
    output = branches("t () => (float[2] p) { p = Abs (x) }", before="p = Neg (x)")
    same(refused_when_strict(parse(output), "SC-03")(TRUE, X), np.abs(X))
    weight = branches("t () => (float[2] e) <float[2] w = {7, 7}> { e = Add (x, w) }")
    # onnxruntime takes the inner w, as we do, the reference evaluator the outer one.
    same(refused_when_strict(parse(weight), "SC-03")(TRUE, X), X + 7)
    body = loop("b (int64 i, bool k, float[2] x) => (bool k, float[2] u) { u = Neg (x) }")
    same(refused_when_strict(parse(body), "SC-03")(np.int64(1), TRUE, X), -X)


@rule("SC-04")
def test_siblings_are_scopes_of_their_own() -> None:
    other = "s () => (float[2] t) { t = Neg (x) }"
    same(clean(parse(branches("t () => (float[2] t) { t = Abs (x) }", other)), TRUE, X), np.abs(X))
    leaked = branches("t () => (float[2] e) { t1 = Abs (x)  e = Neg (t1) }", after="z = Neg (t1)")
    refused(parse(leaked), "GR-01", match="'t1'", error=ModelError)


@rule("SC-05")
def test_a_name_of_a_subgraph_may_be_defined_later_outside() -> None:
    text = branches("t () => (float[2] q) { q = Abs (x) }", after="q = Neg (x)")
    same(clean(parse(text), TRUE, X), np.abs(X))
    same(clean(parse(branches("t () => (float[2] y) { y = Abs (x) }")), TRUE, X), np.abs(X))  # by the If itself


@rule("SC-06")
def test_a_subgraph_returns_its_own_values() -> None:
    # onnxruntime and the checker refuse it, the reference evaluator accepts it, as old exporters relied on.
    same(refused_when_strict(parse(branches("t () => (float[2] x) { }")), "SC-06")(TRUE, X), X)


@rule("SC-07")
def test_a_subgraph_may_return_its_inputs_and_initializers() -> None:
    same(clean(parse(branches("t () => (float[2] z) <float[2] z = {5, 6}> { }")), TRUE, X), [5, 6])
    same(clean(parse(loop(ADD_ONE)), np.int64(3), TRUE, X), X + 3)


@rule("SC-08")
def test_from_ir_4_on_no_initializer_has_the_name_of_a_subgraphs_input() -> None:
    body = "b (int64 i, bool k, float[2] v) => (bool k, float[2] u) <float[2] v = {1, 1}> { u = Neg (v) }"
    same(refused_when_strict(parse(loop(body)), "SC-08")(np.int64(1), TRUE, X), -X)


@rule("SC-09")
def test_below_ir_4_initializers_of_a_subgraph_are_trailing_inputs() -> None:
    body = "b (int64 i, bool k, float[2] v, float one) => (bool k, float[2] u) <float one = {1}> { u = Add (v, one) }"
    old = parse(loop(body), ir_version=3)
    same(clean(old, np.int64(3), TRUE, X), X + 3)
    same(refused_when_strict(parse(loop(ADD_ONE), ir_version=3), "SC-09")(np.int64(3), TRUE, X), X + 3)
    # Of the inputs that the operator supplies none may be an initializer.
    clash = body.replace("<float one = {1}>", "<float one = {1}, float[2] v = {7, 7}>")
    refused_when_strict(parse(loop(clash), ir_version=3), "SC-09")


@rule("SC-10")
def test_types_of_a_subgraphs_ends_may_be_missing_names_may_not() -> None:
    def strip(m: Any) -> None:
        body = m.graph.node[0].attribute[0].g
        for v in [*body.input, *body.output]:
            v.ClearField("type")

    same(clean(parse(loop(ADD_ONE), strip), np.int64(2), TRUE, X), X + 2)  # onnxruntime refuses them

    def unname(m: Any) -> None:
        m.graph.node[0].attribute[0].g.input[2].name = ""

    refused(parse(loop(ADD_ONE.replace("(v, one)", "(x, one)")), unname), "GR-24", error=ModelError)
    unnamed = parse(loop(ADD_ONE), lambda m: setattr(m.graph.node[0].attribute[0].g.output[1], "name", ""))
    assert "SC-10" in rules_of(unnamed)


SCAN = """g (float[2] x, float[2, 2] xs) => (float[2] last, float[2, 2] all) {{ last, all = Scan
  <num_scan_inputs = 1, body = b (float[2] {0}, float[2] {1}) => (float[2] {2}, float[2] {3})
    {{ {2} = Add ({0}, {1})  {3} = Identity ({2}) }}> (x, xs) }}"""


@rule("SC-11")
def test_operands_bind_by_position() -> None:
    renamed = ADD_ONE.replace("int64 i", "int64 v9").replace("bool k", "bool i").replace("bool k", "bool i")
    same(clean(parse(loop(renamed)), np.int64(3), TRUE, X), X + 3)
    for names in (("s", "e", "o", "c"), ("e", "s", "c", "o")):
        last, every = clean(parse(SCAN.format(*names)), F([10, 20]), np.stack([X, X]))
        same(last, [8, 24])
        same(every, [[9, 22], [8, 24]])
    short = SCAN.replace(", float[2] {1})", ")").format("s", "e", "o", "c")
    assert "SC-11" in rules_of(parse(short))


@rule("SC-12")
def test_if_takes_one_condition_and_two_branches_of_the_same_outputs() -> None:
    one = COND.replace("bool c", "bool[1] c") + branches("t () => (float[2] e) { e = Abs (x) }")[len(COND) :]
    same(clean(parse(one), np.array([True]), X), np.abs(X))
    uneven = branches("t () => (float[2] e, float[2] f) { e = Abs (x)  f = Neg (x) }")
    same(refused_when_strict(parse(uneven), "SC-12")(TRUE, X), np.abs(X))
    kinds = branches("t () => (int64[1] e) { e = Shape (x) }")
    refused_when_strict(parse(kinds), "SC-12")
    shapes = "g (float[2] x) => (float[N] y) <bool c = {1}> { y = If (c) <then_branch = t () => (float[4] e) " + (
        "{ e = Concat <axis = 0> (x, x) }, else_branch = s () => (float[2] n) { n = Neg (x) }> }"
    )
    same(clean(parse(shapes), X), [*X, *X])
    traced = onnx2jax.convert(
        parse(shapes.replace("(float[2] x)", "(bool c, float[2] x)").replace("<bool c = {1}>", ""))
    )
    with pytest.raises(OnnxError, match=r"(?s)float32\[4\].*float32\[2\]"):
        jax.jit(traced.apply)({}, TRUE, X)
    same(traced(TRUE, X), [*X, *X])  # a plain call finds the condition by itself


@rule("SC-13")
def test_the_modes_of_loop() -> None:
    counted = parse(loop(ADD_ONE))
    for m, c, trips in ((3, True, 3), (0, True, 0), (3, False, 0)):
        same(clean(counted, np.int64(m), np.bool_(c), X), X + trips)
    same(clean(parse(loop(ADD_ONE, inputs='m, "", x')), np.int64(4), FALSE, X), X + 4)
    stop = ADD_ONE.replace("k, float[2] u)", "g1, float[2] u)").replace(
        "{ u", "{ two = Constant <value = int64 {1}> ()  g1 = Less (i, two)  u"
    )
    same(clean(parse(loop(stop)), np.int64(5), TRUE, X), X + 2)
    same(clean(parse(loop(stop, inputs='"", c, x')), np.int64(5), TRUE, X), X + 2)
    # Without a condition going in, the one coming out is ignored.
    with pytest.warns(onnx2jax.errors.DeviationWarning, match="onnxruntime ends the loop"):
        same(warned(parse(loop(stop, inputs='m, "", x')), "SC-13")(np.int64(5), TRUE, X), X + 5)
    endless = onnx2jax.convert(parse(loop(ADD_ONE, inputs='"", "", x')))
    with pytest.raises(OnnxError, match="without trip count and without condition never ends"):
        endless(np.int64(5), TRUE, X)


SCANNED = "b (int64 i, bool k, float[2] v) => (bool k, float[2] u, float[2] s) { u = Neg (v)  s = Abs (v) }"


@rule("SC-14")
def test_outputs_of_loop_are_states_then_stacks() -> None:
    text = loop(SCANNED, outputs="y, z", head="float[2] y, float[N, 2] z")
    y, z = clean(parse(text), np.int64(3), TRUE, X)
    same(y, -X)
    same(z, [np.abs(X)] * 3)
    y, z = clean(parse(text), np.int64(0), TRUE, X)  # the reference evaluator crashes
    same(y, X)
    assert z.shape == (0, 2) and z.dtype == np.float32
    last, every = clean(parse(SCAN.replace("[2, 2]", "[N, 2]").format("s", "e", "o", "c")), X, np.zeros((0, 2), F))
    same(last, X)
    assert every.shape == (0, 2) and every.dtype == np.float32
    few = SCAN.replace("(float[2] {2}, float[2] {3})", "(float[2] {2})").format("s", "e", "o", "c")
    assert "SC-14" in rules_of(parse(few))


@rule("SC-15")
def test_a_growing_state_needs_a_known_number_of_trips() -> None:
    body = "b (int64 i, bool k, float[A] v) => (bool k, float[B] u) { u = Concat <axis = 0> (v, x) }"
    text = loop(body, head="float[N] y")
    same(clean(parse(text), np.int64(2), TRUE, X), [*X, *X, *X])
    m = onnx2jax.convert(parse(text))
    with pytest.raises(KnownValueError):
        jax.jit(m.apply)({}, np.int64(2), TRUE, X)
    known = onnx2jax.convert(parse(text), static={"m": np.int64(2), "c": TRUE})
    same(jax.jit(known.apply)({}, X), [*X, *X, *X])


@rule("SC-16")
def test_functions_are_called_from_branches_and_capture_their_own_scope() -> None:
    f = '\n<domain: "l", opset_import: ["" : 21]> f (a) => (r) { w2 = Abs (a)  k = Constant <value = bool {1}> ()  ' + (
        "r = If (k) <then_branch = p () => (q) { q = Neg (w2) }, else_branch = o () => (n) { n = Neg (a) }> }"
    )
    same(clean(parse(branches("t () => (float[2] e) { e = l.f (x) }") + f), TRUE, X), -np.abs(X))
    refused(parse(branches("t () => (float[2] e) { e = l.f (x) }") + f.replace("Neg (w2)", "Neg (w)")), "FN-07")


@rule("SC-17")
def test_lists_of_graphs_are_closures_too() -> None:
    @onnx2jax.ops.op("Both", domain="l")
    def both(x, *, graphs):  # type: ignore[no-untyped-def]
        return sum((g()[0] for g in graphs), x)

    def give(m: Any) -> None:
        attribute = m.graph.node[1].attribute[0]
        attribute.graphs.append(attribute.g)
        attribute.graphs.append(attribute.g)
        attribute.ClearField("g")
        attribute.type = AttributeProto.GRAPHS

    text = MAIN + " { t = Abs (x)  y = l.Both <graphs = q () => (float[2] e) { e = Neg (t) }> (x) }"
    same(clean(parse(text, give), X), X - 2 * np.abs(X))


@rule("SC-18")
def test_captured_weights_are_operands() -> None:
    m = onnx2jax.convert(parse(branches("t () => (float[2] e) { e = Add (x, w) }")))
    text = str(jax.make_jaxpr(lambda p, c, x: m.apply(p, c, x))(m.params, TRUE, X))
    branch_of_add = re.search(r"\{ lambda ; (\w+):f32\[2\] (\w+):f32\[2\]\. let \w+:f32\[2\] = add \1 \2", text)
    assert branch_of_add, text


@rule("SC-18")
def test_random_numbers_in_a_branch_come_from_the_key_of_the_call() -> None:
    m = onnx2jax.convert(parse(branches("t () => (float[2] e) { e = RandomNormalLike (x) }")))
    first, again, other = (np.asarray(m(TRUE, X, rng=jax.random.key(k))) for k in (0, 0, 1))
    same(first, again)
    assert (first != other).all()
    same(jax.jit(m.apply)(m.params, TRUE, X, rng=jax.random.key(0)), first)


@rule("SC-19", "SH-03")
def test_a_dimension_variable_is_one_name_in_all_graphs() -> None:
    body = "b (int64 i, bool k, float[N] v) => (bool k, float[N] u, float[N] s) { u = Neg (v)  s = Neg (v) }"
    text = loop(body, outputs="y, z", head="float[N] y, float[M, N] z").replace("float[2]", "float[N]")
    for n, trips in ((2, 1), (5, 1), (5, 0)):
        y, z = clean(parse(text), np.int64(trips), TRUE, np.ones(n, F))
        same(y, (-1) ** trips * np.ones(n))
        assert z.shape == (trips, n)  # with no trips, N of the body is still that of the input
    fixed = onnx2jax.convert(parse(text), dims={"N": 2})
    with pytest.raises(InputShapeError, match="extent 2 on axis 0"):
        fixed(np.int64(1), TRUE, np.ones(3, F))
