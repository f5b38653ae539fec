"""Rules ND and AT: operands and attributes of nodes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import AttributeProto, TensorProto, TypeProto, helper, numpy_helper

import onnx2jax
from onnx2jax.errors import ModelError, OnnxError, OperatorError
from tests.support.cases import MAIN, F, X, clean, parse, refused, refused_when_strict, rule, rules_of, run, same

ELU = MAIN + " { y = Elu <alpha = 2.0> (x) }"


def node(call: str, ends: str = "float[2] x", out: str = "float[2] y") -> Any:
    return parse(f"g ({ends}) => ({out}) {{ {call} }}")


@rule("ND-01")
def test_attributes_are_known_by_name() -> None:
    text = "y = Gemm <alpha = 2.0, transB = 1> (x, w)"
    swapped = "y = Gemm <transB = 1, alpha = 2.0> (x, w)"
    x, w = np.eye(2, dtype=F), F([[1, 2], [3, 4]])
    ends = ("float[2, 2] x, float[2, 2] w", "float[2, 2] y")
    same(clean(node(text, *ends), x, w), 2 * w.T)
    same(clean(node(swapped, *ends), x, w), 2 * w.T)


@rule("ND-02")
@pytest.mark.parametrize(
    ("inputs", "expected"), [('x, "", h', [-1, 1]), ('x, ""', X), ('x, "", ""', X), ("x", X), ("x, h", [1, 2])]
)
def test_optional_operands_are_omitted_by_empty_names(inputs: str, expected: Any) -> None:
    proto = node(f"h = Constant <value = float {{1}}> () y = Clip ({inputs})")
    same(clean(proto, X), expected)


@rule("ND-03", "ND-17")
@pytest.mark.parametrize("call", ['Add (x, "")', 'Add ("", x)', "Add (x)", 'Relu ("")'])
def test_a_required_operand_is_not_empty(call: str) -> None:
    refused(node(f"y = {call}"), "ND-03", match=r"node 'y' \((Add|Relu), opset 21\) lacks input '", error=ModelError)


@rule("ND-04")
def test_optional_outputs_are_omitted_by_empty_names() -> None:
    x = np.arange(4, dtype=F).reshape(1, 1, 4)
    pool = node('y, "" = MaxPool <kernel_shape = [2]> (x)', "float[1, 1, 4] x", "float[1, 1, 3] y")
    same(clean(pool, x), [[[1, 2, 3]]])
    top = node('"", i = TopK (x, k)', "float[2] x, int64[1] k", "int64[1] i")
    same(clean(top, X, np.array([1])), [1])
    lstm = node(
        '"", h = LSTM <hidden_size = 1> (x, w, r)',
        "float[1, 1, 1] x, float[1, 4, 1] w, float[1, 4, 1] r",
        "float[1, 1, 1] h",
    )
    result = clean(lstm, np.ones((1, 1, 1), F), np.zeros((1, 4, 1), F), np.zeros((1, 4, 1), F))
    assert result.shape == (1, 1, 1)
    assert all("" not in g.initializers for g in onnx2jax.convert(lstm).graph.walk())
    norm = "BatchNormalization <training_mode = 1, momentum = 0.5> (x, s, b, m, v)"
    ends = "float[2, 1] x, float[1] s, float[1] b, float[1] m, float[1] v"
    one, zero, batch = np.ones(1, F), np.zeros(1, F), F([[1], [3]])
    mean = clean(node(f'"", mean = {norm}', ends, "float[1] mean"), batch, one, zero, zero, one)
    same(mean, [1])  # half of the batch's mean 2, and nothing called ""
    same(clean(node(f'"", "", var = {norm}', ends, "float[1] var"), batch, one, zero, zero, one), [1])


@rule("ND-05")
def test_a_variadic_operand_has_at_least_one_entry() -> None:
    for op_type in ("Max", "Min", "Sum", "Mean", "Concat <axis = 0>"):
        refused(node(f"y = {op_type} ()"), "ND-05", match="at least one", error=ModelError)
    same(clean(node("y = Max (x)"), X), X)
    same(clean(node("y = Sum (x, x, x, x, x)"), X), 5 * X)


@rule("ND-06")
def test_an_empty_name_in_a_variadic_list_is_refused() -> None:
    # The checker lets it pass, and onnxruntime 1.31 crashes.
    refused(node('y = Max (x, "", x)'), "ND-06", match="empty name", error=ModelError)


@rule("ND-07")
def test_a_loop_carries_values_of_several_types() -> None:
    text = 'g (int64 m, float[2] x, int64[1] j) => (float[2] y, int64[1] z) { y, z = Loop (m, "", x, j) <body = ' + (
        "b (int64 i, bool k, float[2] v, int64[1] n) => (bool k, float[2] u, int64[1] o) "
        "{ u = Neg (v)  o = Add (n, n) }> }"
    )
    y, z = clean(parse(text), np.int64(3), X, np.array([1]))
    same(y, -X)
    same(z, [8])


@rule("ND-08", "ND-17")
def test_surplus_operands_are_refused() -> None:
    refused(node("y = Relu (x, x)"), "ND-08", match=r"'y' \(Relu, opset 21\) has 2 inputs", error=ModelError)


@rule("ND-10", "ND-17")
@pytest.mark.parametrize("call", ["Elu <foo = 1> (x)", "Cast (x)", "Elu <alpha = 1.0, alpha = 2.0> (x)"])
def test_attributes_are_those_of_the_operator(call: str) -> None:
    refused(node(f"y = {call}"), "ND-10", match="node 'y'", error=ModelError)  # the reference evaluator ignores foo


@rule("ND-13")
def test_an_overload_of_an_operator_is_ignored() -> None:
    proto = node("y = Relu (x)")
    proto.graph.node[0].overload = "q"
    same(run(proto, X), [0, 2])
    assert rules_of(proto, "warning") == {"ND-13"}


def old(call: str, version: int = 6, ends: str = "float[2, 3, 4] x, float[3] b") -> Any:
    proto = node(call, ends, "float[2, 3, 4] y")
    proto.opset_import[0].version = version
    return proto


@rule("ND-15")
def test_broadcasting_before_opset_7_needs_the_attribute() -> None:
    x, b = np.zeros((2, 3, 4), F), F([1, 2, 3])
    same(clean(old("y = Add <broadcast = 1, axis = 1> (x, b)"), x, b), np.broadcast_to(b[:, None], (2, 3, 4)))
    with pytest.raises(OperatorError):
        run(old("y = Add (x, b)"), x, b)
    same(clean(old("y = Add (x, b)", 7, "float[2, 3, 4] x, float[4] b"), x, F([1, 2, 3, 4]))[0, 0], [1, 2, 3, 4])


@rule("ND-16", "ND-17")
def test_unidirectional_broadcasting_does_not_enlarge_the_first_operand() -> None:
    with pytest.raises(OperatorError, match=r"(?s)'y' \(PRelu, opset 21\).*x: float32\[2\], s: float32\[3, 2\]"):
        run(node("y = PRelu (x, s)", "float[2] x, float[3, 2] s", "float[3, 2] y"), X, np.ones((3, 2), F))
    gemm = node("y = Gemm (a, b, c)", "float[1, 2] a, float[2, 2] b, float[3, 2] c", "float[3, 2] y")
    with pytest.raises(OperatorError, match=r"(?s)'y' \(Gemm, opset 21\).*c: float32\[3, 2\]"):
        run(gemm, np.ones((1, 2), F), np.ones((2, 2), F), np.ones((3, 2), F))


# ---------------------------------------------------------------------------------------------- attributes


def with_attribute(**fields: Any) -> Any:
    """Elu whose alpha is made of the given fields."""

    def edit(m: Any) -> None:
        del m.graph.node[0].attribute[:]
        m.graph.node[0].attribute.add(**fields)

    return parse(ELU, edit)


def elu(alpha: float) -> np.ndarray:
    return np.where(X > 0, X, F(alpha) * np.expm1(X)).astype(F)


@rule("AT-01")
def test_an_attribute_has_a_name_and_one_value() -> None:
    refused(with_attribute(name="alpha", f=1, i=2, type=1), "AT-01", match="AT-01", error=ModelError)
    refused(with_attribute(name="", f=1, type=1), "AT-01", error=ModelError)


@rule("AT-02")
def test_the_type_of_an_attribute_is_set_and_that_of_its_value() -> None:
    refused(with_attribute(name="alpha", i=2, type=1), "AT-01", match="AT-02", error=ModelError)
    untyped = refused_when_strict(with_attribute(name="alpha", f=2), "AT-02")
    np.testing.assert_allclose(untyped(X), elu(2), rtol=1e-6)


@rule("AT-03")
def test_in_ir_1_the_type_follows_from_the_value() -> None:
    proto = with_attribute(name="alpha", f=2)
    proto.ir_version = 1
    del proto.opset_import[:]
    np.testing.assert_allclose(clean(proto, X), elu(2), rtol=1e-6)  # the checker refuses it
    del proto.graph.node[0].attribute[:]
    proto.graph.node[0].attribute.add(name="alpha", f=1, i=2)
    refused(proto, "AT-01", match="AT-03", error=ModelError)


@rule("AT-04")
def test_a_typed_attribute_without_a_value_is_zero() -> None:
    np.testing.assert_allclose(clean(with_attribute(name="alpha", type=1), X), elu(0))


GRAPH = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], "s", [], [helper.make_empty_tensor_value_info("n")])
TENSOR = numpy_helper.from_array(F([1]), "t")
SPARSE = helper.make_sparse_tensor(TENSOR, numpy_helper.from_array(np.array([1])), [2])
TYPE = helper.make_tensor_type_proto(1, [2])
KINDS: dict[str, tuple[str, Any, Any]] = {
    "FLOAT": ("f", 0.5, 0.5),
    "INT": ("i", 3, 3),
    "STRING": ("s", "ü".encode(), "ü"),
    "TENSOR": ("t", TENSOR, [1]),
    "GRAPH": ("g", GRAPH, "Closure"),
    "FLOATS": ("floats", [0.5], (0.5,)),
    "INTS": ("ints", [3], (3,)),
    "STRINGS": ("strings", [b"a"], ("a",)),
    "TENSORS": ("tensors", [TENSOR], ([1],)),
    "GRAPHS": ("graphs", [GRAPH], ("Closure",)),
    "SPARSE_TENSOR": ("sparse_tensor", SPARSE, [0, 1]),
    "SPARSE_TENSORS": ("sparse_tensors", [SPARSE], ([0, 1],)),
    "TYPE_PROTO": ("tp", TYPE, "float32[2]"),
    "TYPE_PROTOS": ("type_protos", [TYPE], ("float32[2]",)),
}


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    known = isinstance(value, int | float | str)
    return value if known else "Closure" if callable(value) else str(value)


@rule("AT-05", "AT-13")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attribute(kind: str) -> None:
    seen = []

    @onnx2jax.ops.op("Look", domain="l")
    def look(x, *, a):  # type: ignore[no-untyped-def]
        seen.append(a)
        return x

    field, value, expected = KINDS[kind]
    attribute = AttributeProto(name="a", type=AttributeProto.AttributeType.Value(kind), **{field: value})
    proto = parse(MAIN + " { y = l.Look (x) }", lambda m: m.graph.node[0].attribute.append(attribute))
    assert onnx2jax.check(proto).ok
    m = onnx2jax.convert(proto)
    jax.jit(m.apply)({}, X)  # an attribute is a constant, also inside a jit
    assert plain(seen[0]) == expected


@rule("AT-06")
def test_a_float_is_binary32() -> None:
    proto = parse(ELU.replace("float[2]", "double[2]").replace("2.0", "0.1"))
    result = clean(proto, np.array([-1.0, 2.0]))
    np.testing.assert_allclose(result, [float(F(0.1)) * np.expm1(-1.0), 2], rtol=1e-15)


@rule("AT-07")
def test_strings_are_bytes() -> None:
    def keys(m: Any) -> None:
        m.graph.node[0].attribute.append(helper.make_attribute("keys_strings", [b"\xff", "ü".encode()]))
        m.graph.node[0].attribute.append(helper.make_attribute("values_floats", [1.0, 2.0]))

    proto = parse("g (string[2] x) => (float[2] y) { y = ai.onnx.ml.LabelEncoder (x) }", keys)
    words = np.array([b"\xff".decode("utf-8", "surrogateescape"), "ü"], object)
    same(clean(proto, words), [1, 2])


@rule("AT-08")
def test_an_empty_list_is_not_a_missing_one() -> None:
    x = np.ones((1, 2, 1), F)
    ends = "float[1, 2, 1] x, int64[A] a"
    for noop, expected in ((1, (1, 2, 1)), (0, (1, 1, 1))):
        proto = node(f"y = ReduceSum <noop_with_empty_axes = {noop}> (x, a)", ends, "float[A1, B, C] y")
        assert clean(proto, x, np.zeros(0, np.int64)).shape == expected
    for axes, expected in (("", (2,)), ("<axes: ints = []>", (1, 2, 1))):
        proto = node(f"y = Squeeze {axes} (x)", "float[1, 2, 1] x", "float y")
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        proto.opset_import[0].version = 11
        assert run(proto, x).shape == expected


@rule("AT-09", "AT-11")
def test_the_values_that_a_constant_may_have() -> None:
    def constant(attribute: Any) -> np.ndarray:
        proto = parse("g () => (float y) { y = Constant () }", lambda m: m.graph.node[0].attribute.append(attribute))
        proto.graph.output[0].ClearField("type")
        return run(proto)

    for attribute, expected in (
        (AttributeProto(name="sparse_value", type=11, sparse_tensor=SPARSE), F([0, 1])),
        (AttributeProto(name="value", type=4, t=TENSOR), F([1])),
        (AttributeProto(name="value_float", type=1, f=2), F(2)),
        (AttributeProto(name="value_floats", type=6, floats=[1, 2]), F([1, 2])),
        (AttributeProto(name="value_int", type=2, i=2), np.int64(2)),
        (AttributeProto(name="value_ints", type=7), np.zeros(0, np.int64)),
        (AttributeProto(name="value_string", type=3, s=b"a"), np.array("a", object)),
        (AttributeProto(name="value_strings", type=8, strings=[b"a"]), np.array(["a"], object)),
    ):
        result = constant(attribute)
        same(result, expected)
        assert (result.dtype, result.shape) == (np.asarray(expected).dtype, np.shape(expected))


@rule("AT-11")
@pytest.mark.parametrize("attributes", ["", "<value_int = 1, value_float = 2.0>"])
def test_a_constant_has_one_value(attributes: str) -> None:
    with pytest.raises(OnnxError):
        run(parse(f"g () => (float y) {{ y = Constant {attributes} () }}"))


@rule("AT-10", "TY-17")
def test_a_type_as_an_attribute() -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))

    def give(m: Any) -> None:
        m.graph.node[0].attribute.append(
            AttributeProto(name="type", type=13, tp=TypeProto.FromString(kind.SerializeToString()))
        )

    proto = parse("g () => (bool y) { o = Optional () y = OptionalHasElement (o) }", give)
    same(clean(proto), False)


@rule("AT-12", "EX-18")
def test_the_tensor_of_an_attribute_may_be_external(tmp_path: Any) -> None:
    def externalise(m: Any) -> None:
        t = m.graph.node[0].attribute[0].t
        t.ClearField("float_data")
        t.data_location = TensorProto.EXTERNAL
        t.external_data.add(key="location", value="w.bin")

    (tmp_path / "w.bin").write_bytes(F([3, 4]).tobytes())
    proto = parse(MAIN + " { w = Constant <value = float[2] {1, 1}> () y = Add (x, w) }", externalise)
    same(onnx2jax.convert(proto, external_data_dir=tmp_path)(X), [2, 6])
