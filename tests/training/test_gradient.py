"""Gradient of ai.onnx.preview.training: values, evaluation points, and the number of forward passes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import parser

import onnx2jax
from onnx2jax.errors import KnownValueError, ModelError, OperatorError

rule = pytest.mark.rule
HEAD = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1, "l" : 1]>'


def model(text: str) -> onnx.ModelProto:
    text = text.replace("Gradient", "ai.onnx.preview.training.Gradient")
    return parser.parse_model(HEAD + text)


def run(text: str, *args: Any, **named: Any) -> Any:
    results = onnx2jax.convert(model(text))(*map(np.float32, args), **named)
    return [np.asarray(r) for r in results] if isinstance(results, tuple) else np.asarray(results)


def count(text: str, primitive: str, *args: Any) -> int:
    """The number of occurrences of a primitive in the model's jaxpr, nested ones included."""
    converted = onnx2jax.convert(model(text))
    return str(jax.make_jaxpr(lambda *x: converted.apply({}, *x))(*map(np.float32, args))).count(f" {primitive} ")


@rule("TR-30", "TR-37")
def test_with_respect_to_two_values() -> None:
    text = """g (float a, float b) => (float c, float da, float db) {
        s = Mul(a, b)  c = Sin(s)  da, db = Gradient <xs = ["a", "b"], y = "c"> (a, b) }"""
    c, da, db = run(text, 2, 3)
    np.testing.assert_allclose([c, da, db], [np.sin(6), 3 * np.cos(6), 2 * np.cos(6)], rtol=1e-6)


@rule("TR-30")
def test_zs_are_held_constant() -> None:
    text = """g (float a, float b) => (float da) {
        c = Mul(a, b)  da = Gradient <xs = ["a"], zs = ["b"], y = "c"> (a, b) }"""
    assert run(text, 2, 3) == 3


@rule("TR-30")
def test_convolution_and_gemm_match_jax() -> None:
    text = """g (float[2,1,6,6] x, float[3,1,3,3] w, float[48,5] v) => (float y, float[3,1,3,3] dw, float[48,5] dv) {
        h = Conv(x, w)  r = Relu(h)  f = Flatten(r)  p = Gemm(f, v)  q = Mul(p, p)
        y = ReduceSum <keepdims = 0> (q)
        dw, dv = Gradient <xs = ["w", "v"], zs = ["x"], y = "y"> (w, v, x) }"""
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=s).astype(np.float32) for s in [(2, 1, 6, 6), (3, 1, 3, 3), (48, 5)])

    def loss(w: Any, v: Any) -> Any:
        hidden = jax.nn.relu(jax.lax.conv(x, w, (1, 1), "VALID")).reshape(2, -1)
        return ((hidden @ v) ** 2).sum()

    y, dw, dv = run(text, x, w, v)
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(w, v)
    for result, wanted in zip((y, dw, dv), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


@rule("TR-31")
def test_an_intermediate_value_as_independent_variable() -> None:
    text = """g (float x, float z) => (float dh) {
        h = Exp(x)  p = Mul(h, h)  y = Mul(p, z)  dh = Gradient <xs = ["h"], zs = ["z"], y = "y"> (h, z) }"""
    np.testing.assert_allclose(run(text, 1, 5), 2 * np.exp(1) * 5, rtol=1e-6)


@rule("TR-31")
@pytest.mark.parametrize("names", ['xs = ["w", "h"]', 'xs = ["h"], zs = ["w"]', 'xs = ["w", "w"]'])
def test_dependent_values_raise(names: str) -> None:
    text = f"""g (float w) => (float d) {{
        h = Exp(w)  y = Mul(h, w)  d = Gradient <{names}, y = "y"> (h, w) }}"""
    with pytest.raises(ModelError, match=r"no independent variables.*TR-31"):
        onnx2jax.convert(model(text))
    assert "TR-31" in {f.rule for f in onnx2jax.check(model(text)).findings}


@rule("TR-31")
def test_other_inputs_are_constants() -> None:
    text = """g (float w, float k) => (float d) {
        y = Mul(w, k)  d = Gradient <xs = ["w"], y = "y"> (w) }"""
    assert run(text, 2, 7) == 7


@rule("TR-32")
def test_evaluated_at_another_point_than_the_forward_pass() -> None:
    text = """g (float h, float z, float h1, float z1) => (float y, float dh) {
        p = Mul(h, h)  y = Mul(p, z)  dh = Gradient <xs = ["h"], zs = ["z"], y = "y"> (h1, z1) }"""
    assert run(text, 1, 1, 3, 5) == [1, 30]


@rule("TR-33")
def test_outputs_may_be_omitted() -> None:
    text = """g (float a, float b) => (float db) {
        c = Mul(a, b)  e, db = Gradient <xs = ["a", "b"], y = "c"> (a, b) }"""
    proto = model(text)
    proto.graph.node[1].output[0] = ""
    assert onnx2jax.convert(proto)(np.float32(2), np.float32(3)) == 2


SECOND = """g (float w) => (float y, float d1, float d2) {
    s = Mul(w, w)  y = Mul(s, w)
    d1 = Gradient <xs = ["w"], y = "y"> (w)  d2 = Gradient <xs = ["w"], y = "d1"> (w) }"""


@rule("TR-33")
def test_the_second_derivative_of_a_cube() -> None:
    assert run(SECOND, 2) == [8, 12, 12]


@rule("TR-33")
def test_third_order_at_another_point() -> None:
    text = """g (float w, float v) => (float d3) {
        s = Mul(w, w)  y = Mul(s, s)
        d1 = Gradient <xs = ["w"], y = "y"> (w)  d2 = Gradient <xs = ["w"], y = "d1"> (w)
        d3 = Gradient <xs = ["w"], y = "d2"> (v) }"""
    assert run(text, 2, 10) == 240


@rule("TR-33")
def test_second_derivative_with_respect_to_an_unnamed_value() -> None:
    text = """g (float w, float k) => (float m) {
        s = Mul(w, w)  y = Mul(s, k)
        d = Gradient <xs = ["w"], y = "y"> (w)  m = Gradient <xs = ["k"], y = "d"> (k) }"""
    assert run(text, 3, 5) == 6  # d/dk of 2 w k


@rule("TR-34")
def test_the_gradient_is_of_the_sum_of_y() -> None:
    text = """g (float[3] x, float[3] v) => (float[3] d) {
        y = Mul(x, v)  d = Gradient <xs = ["x"], y = "y"> (x) }"""
    np.testing.assert_array_equal(run(text, [1, 2, 3], [4, 5, 6]), [4, 5, 6])


@rule("TR-35")
def test_integers_raise() -> None:
    text = """g (int64[2] x) => (int64[2] d) { y = Mul(x, x)  d = Gradient <xs = ["x"], y = "y"> (x) }"""
    with pytest.raises(OperatorError, match=r"int64; only tensors of floating type.*TR-35"):
        onnx2jax.convert(model(text))(np.int64([1, 2]))
    text = """g (float[2] x) => (int64[2] y, float[2] d) {
        y = Cast <to = 7> (x)  d = Gradient <xs = ["x"], y = "y"> (x) }"""
    with pytest.raises(OperatorError, match=r"'y' is int64.*TR-35"):
        run(text, [1, 2])


@rule("TR-35")
def test_integers_among_zs_are_constants() -> None:
    text = """g (float[3] w, int64[2] i) => (float[3] d) {
        p = Gather(w, i)  y = Mul(p, p)  d = Gradient <xs = ["w"], zs = ["i"], y = "y"> (w, i) }"""
    result = onnx2jax.convert(model(text))(np.float32([1, 2, 3]), np.int64([2, 2]))
    np.testing.assert_array_equal(result, [0, 0, 12])


@rule("TR-36")
@pytest.mark.parametrize("operand", ["x", "x1"])
def test_the_random_numbers_of_the_forward_pass_are_reused(operand: str) -> None:
    text = f"""g (float[64] x) => (float[64] y, float[64] d)
        <float half = {{0.5}}, bool on = {{1}}> {{
        x1 = Identity(x)  y = Dropout(x, half, on)  d = Gradient <xs = ["x"], y = "y"> ({operand}) }}"""
    converted = onnx2jax.convert(model(text))
    y, d = converted(np.ones(64, np.float32), rng=jax.random.key(3))
    np.testing.assert_array_equal(y, d)
    assert 0 < np.count_nonzero(y) < 64


def test_one_forward_pass() -> None:
    text = """g (float x, float w) => (float y, float dw) {
        h = Sin(w)  t = Tanh(h)  y = Mul(t, x)  dw = Gradient <xs = ["w"], zs = ["x"], y = "y"> (w, x) }"""
    assert count(text, "sin", 1, 2) == 1
    assert count(text, "tanh", 1, 2) == 1
    assert count(text.replace("(w, x)", "(v, x)").replace("h = Sin", "v = Neg(w)  h = Sin"), "tanh", 1, 2) == 2


def test_two_gradients_share_the_forward_pass() -> None:
    text = """g (float a, float b) => (float da, float db, float dh) {
        h = Sin(a)  t = Tanh(h)  y = Mul(t, b)  z = Mul(y, t)
        da = Gradient <xs = ["a"], y = "y"> (a)  db = Gradient <xs = ["b"], y = "z"> (b)
        dh = Gradient <xs = ["h"], y = "z"> (h) }"""
    assert count(text, "tanh", 1, 2) == 1
    t = np.tanh(np.sin(1))
    expected = [2 * (1 - t * t) * np.cos(1), t * t, 4 * t * (1 - t * t)]
    np.testing.assert_allclose(run(text, 1, 2), expected, rtol=1e-5)


@rule("TR-37")
def test_inside_a_function() -> None:
    text = """g (float a) => (float d) { d = l.slope(a) }
        <domain: "l", opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>
        slope (x) => (d) { s = Mul(x, x)  y = Mul(s, x)  d = Gradient <xs = ["x"], y = "y"> (x) }"""
    assert run(text, 2) == 12


@rule("TR-37")
def test_inside_a_branch_with_respect_to_outer_values() -> None:
    text = """g (float a, bool c) => (float d) {
        s = Mul(a, a)  y = Mul(s, a)
        d = If (c) <
            then_branch = t () => (float d1) { d1 = Gradient <xs = ["a"], y = "y"> (a) },
            else_branch = e () => (float d2) { d2 = Gradient <xs = ["s"], y = "y"> (s) }> }"""
    converted = onnx2jax.convert(model(text))
    assert converted(np.float32(2), np.bool_(True)) == 12
    assert converted(np.float32(2), np.bool_(False)) == 2


def test_through_a_scan_and_a_branch() -> None:
    text = """g (float[4] x, float a, bool c) => (float y, float da) {
        last, all = Scan <num_scan_inputs = 1, body = b (float s, float v) => (float t, float o) {
            p = Mul(s, a)  t = Add(p, v)  o = Identity(t) }> (a, x)
        y = If (c) <then_branch = t () => (float y1) { y1 = Mul(last, a) },
                    else_branch = e () => (float y2) { y2 = Neg(last) }>
        da = Gradient <xs = ["a"], y = "y"> (a) }"""
    x = np.float32([1, 2, 3, 4])

    def reference(a: Any) -> Any:
        state = a
        for v in x:
            state = state * a + v
        return state * a

    converted = onnx2jax.convert(model(text))
    y, da = converted(x, np.float32(0.5), np.bool_(True))
    np.testing.assert_allclose([y, da], jax.jit(jax.value_and_grad(reference))(np.float32(0.5)), rtol=1e-6)


def test_static_shapes_and_integers_in_the_differentiated_graph() -> None:
    text = """g (float[2,3] x) => (float[6] y, float[2,3] d, int64 i) <int64[1] one = {1}> {
        s = Shape(x)  n = ReduceProd <keepdims = 1> (s)  f = Reshape(x, n)  y = Mul(f, f)
        i = ArgMax <keepdims = 0> (f)  d = Gradient <xs = ["x"], y = "y"> (x) }"""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    _, d, i = onnx2jax.convert(model(text))(x)
    np.testing.assert_array_equal(d, 2 * x)
    assert np.asarray(i) == 5


def test_a_gradient_in_a_partitioned_graph() -> None:
    text = """g (float[n] x, float[3,3] w) => (float[m] p, float[3,3] dw) {
        h = MatMul(w, w)  y = Mul(h, h)  dw = Gradient <xs = ["w"], y = "y"> (w)
        i = NonZero(x)  j = Squeeze(i)  p = Gather(x, j) }"""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(3, 3)).astype(np.float32)
    p, dw = run(text, [0, 1, 0, 2], w)
    np.testing.assert_array_equal(p, [1, 2])
    np.testing.assert_allclose(dw, jax.jit(jax.grad(lambda w: ((w @ w) ** 2).sum()))(w), rtol=1e-5)


def test_a_target_of_an_earlier_subprogram() -> None:
    """The subprogram with the Gradient recomputes values of an earlier one."""
    text = """g (float[3] x, float[3] w) => (float[3] dw) {
        y = Mul(x, w)  i = NonZero(x)  n = ReduceMax(i)  f = CastLike(n, w)  z = Mul(y, f)
        dw = Gradient <xs = ["w"], y = "z"> (w) }"""
    np.testing.assert_array_equal(np.ravel(run(text, [1, 2, 0], [1, 1, 0])), [1, 2, 0])


def test_through_a_data_dependent_operator_raises() -> None:
    text = """g (float[3] x) => (float[3] dx) {
        i = NonZero(x)  n = ReduceMax(i)  f = CastLike(n, x)  z = Mul(x, f)
        dx = Gradient <xs = ["x"], y = "z"> (x) }"""
    with pytest.raises(OperatorError, match=r"Gradient.*no derivative\n.*NonZero"):
        run(text, [1, 2, 0])


def test_transformations_of_the_caller() -> None:
    converted = onnx2jax.convert(model(SECOND))

    def slope(w: Any) -> Any:
        return converted.apply({}, w)[1]

    assert jax.jit(jax.grad(slope))(2.0) == 12
    np.testing.assert_array_equal(jax.vmap(slope)(np.float32([1, 2, 3])), [3, 12, 27])


@rule("TR-30")
@pytest.mark.parametrize("text", ['xs = ["a"], y = "later"', 'xs = ["nowhere"], y = "y"', 'xs = ["a", "b"], y = "y"'])
def test_invalid_names_and_operands_raise(text: str) -> None:
    text = f"""g (float a, float b) => (float later) {{
        y = Mul(a, b)  d = Gradient <{text}> (a)  later = Identity(d) }}"""
    with pytest.raises(ModelError, match=r"TR-30"):
        onnx2jax.convert(model(text))


def looping(condition: str) -> onnx.ModelProto:
    """The derivative of the last of x, x^2, x^3, ..., computed while ``condition`` holds for the next power w."""
    text = f"""g (float x, bool c) => (float d) {{
        limit = Constant <value_float = 0.1> ()
        y = Loop (c, c, x) <body = b (int64 i, bool k, float v) => (bool k1, float w) {{
            w = Mul(v, x)  k1 = {condition} }}>
        d = Gradient <xs = ["x"], y = "y"> (x) }}"""
    proto = model(text)
    proto.graph.node[1].input[0] = ""
    return proto


def test_a_loop_with_a_data_dependent_trip_count() -> None:
    assert onnx2jax.convert(looping("Less(limit, w)"))(np.float32(0.5), np.bool_(True)) == 4 * 0.5**3


def test_a_loop_that_cannot_be_differentiated_is_named() -> None:
    apply = onnx2jax.convert(looping("Less(limit, w)")).apply
    with pytest.raises(KnownValueError, match=r"(?s)Loop.*in reverse.*inside node 'd'"):
        jax.jit(apply)({}, np.float32(0.5), np.bool_(True))
    with pytest.raises(OperatorError, match=r"max_trips \(9\)"):
        onnx2jax.convert(looping("Less(w, x)"), max_trips=9)(np.float32(0.5), np.bool_(True))
