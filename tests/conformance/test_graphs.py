"""Rules GR: names, order, initializers, inputs and outputs of the main graph."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from onnx2jax.errors import (
    InputNameError,
    InputShapeError,
    InputTypeError,
    KnownValueError,
    ModelError,
    UnsupportedOperatorError,
)
from tests.support.cases import (
    MAIN,
    RELU,
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

WEIGHTED = MAIN + " <float[2] w = {1, 1}> { y = Add (x, w) }"
DEFAULTED = "g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 1}> { y = Add (x, w) }"


@rule("GR-01")
def test_nodes_come_after_those_they_read() -> None:
    # onnxruntime sorts the nodes too; the checker and the reference evaluator refuse them.
    same(refused_when_strict(parse(MAIN + " { y = Neg (a)  a = Relu (x) }"), "GR-01")(X), [0, -2])
    refused(parse(MAIN + " { a = Add (x, y)  y = Neg (a) }"), "GR-01", match="cycle", error=ModelError)
    refused(parse(MAIN + " { y = Add (x, y) }"), "GR-01", match="cycle", error=ModelError)
    refused(parse(MAIN + " { y = Add (x, nope) }"), "GR-01", match="'nope'", error=ModelError)


@rule("GR-02")
@pytest.mark.parametrize(
    "text",
    [
        MAIN + " { y = Neg (x)  y = Abs (x) }",
        MAIN + " { x = Neg (x)  y = Abs (x) }",
        MAIN + " <float[2] w = {1, 1}> { w = Neg (x)  y = Abs (w) }",
    ],
)
def test_each_value_is_defined_once(text: str) -> None:
    refused(parse(text), "GR-02", match="more than once", error=ModelError)  # the reference evaluator overwrites


@rule("GR-03")
def test_a_constant_cannot_be_overridden() -> None:
    m = onnx2jax.convert(parse(WEIGHTED))
    with pytest.raises(InputNameError, match="no input 'w'"):  # the reference evaluator overrides it
        m(X, w=X)


@rule("GR-04")
def test_an_initializer_that_is_an_input_is_its_default() -> None:
    m = onnx2jax.convert(parse(DEFAULTED))
    same(m(X), [0, 3])
    same(m(X, w=F([5, 5])), [4, 7])
    same(jax.jit(m.apply)(m.params, X, w=F([5, 5])), [4, 7])
    same(jax.jit(m.apply)(m.params, X), [0, 3])


@rule("GR-05")
def test_a_default_that_decides_a_shape_can_be_overridden() -> None:
    text = "g (float[4] x, int64[2] s) => (float[A, B] y) <int64[2] s = {2, 2}> { y = Reshape (x, s) }"
    m = onnx2jax.convert(parse(text))
    x = np.arange(4, dtype=F)
    assert m(x).shape == (2, 2)
    assert m(x, s=np.array([4, 1])).shape == (4, 1)
    assert m(x).shape == (2, 2)
    with pytest.raises(KnownValueError):
        jax.jit(m.apply)(m.params, x, s=jnp.array([4, 1]))


@rule("GR-08")
def test_required_inputs_come_by_position_the_others_by_name() -> None:
    text = "g (float[2] w, float[2] x) => (float[2] y) <float[2] w = {1, 1}> { y = Sub (x, w) }"
    m = onnx2jax.convert(parse(text))
    assert [v.name for v in m.inputs] == ["x"] and list(m.optional) == ["w"]
    same(m(X), X - 1)
    same(m(X, w=X), [0, 0])
    same(m(x=X, w=X), [0, 0])
    with pytest.raises(InputNameError):
        m(X, X)


def dense(name: str = "w") -> TensorProto:
    return numpy_helper.from_array(F([1, 1]), name)


def sparse(values: Any = (3.0,), indices: Any = (1,), dims: Any = (2,), name: str = "w", code: int = 7) -> Any:
    v = helper.make_tensor(name, TensorProto.FLOAT, [len(values)], values)
    i = helper.make_tensor("", code, np.shape(indices), np.ravel(indices).tolist())
    return helper.make_sparse_tensor(v, i, dims)


@rule("GR-09")
def test_initializers_have_names_of_their_own() -> None:
    # onnxruntime and the reference evaluator tolerate two of one name.
    refused(parse(WEIGHTED, lambda m: m.graph.initializer.append(dense())), "GR-09", error=ModelError)
    refused(parse(WEIGHTED, lambda m: m.graph.initializer.append(dense(""))), "GR-09", error=ModelError)
    refused(parse(WEIGHTED, lambda m: m.graph.sparse_initializer.append(sparse())), "GR-09", error=ModelError)
    both = MAIN + " <float[2] v = {4, 4}, float[2] w = {1, 1}> { a = Add (x, w)  y = Mul (a, v) }"
    shuffled = parse(both, lambda m: m.graph.initializer.sort(key=lambda t: t.name, reverse=True))
    same(clean(shuffled, X), clean(parse(both), X))


SPARSE = MAIN + " { y = Add (x, w) }"


@rule("GR-10", "GR-11")
def test_a_sparse_initializer_is_a_dense_value() -> None:
    # The reference evaluator cannot run these; the full checker refuses them for Add.
    for tensor in (sparse(), sparse(indices=((1,),))):
        same(clean(parse(SPARSE, lambda m, t=tensor: m.graph.sparse_initializer.append(t)), X), X + F([0, 3]))
    text = "g (float[2, 2] x) => (float[2, 2] y) { y = Add (x, w) }"
    for indices in ((1, 2), ((0, 1), (1, 0))):
        tensor = sparse((3.0, 4.0), indices, (2, 2))
        proto = parse(text, lambda m, t=tensor: m.graph.sparse_initializer.append(t))
        same(clean(proto, np.zeros((2, 2), F)), [[0, 3], [4, 0]])


@rule("GR-11")
@pytest.mark.parametrize(
    "tensor",
    [
        sparse(code=6),  # onnxruntime accepts int32
        sparse((1.0, 2.0), (1, 0)),  # and unsorted indices
        sparse((1.0, 2.0), (1, 1)),
        sparse(indices=(2,)),
        sparse(indices=(-1,)),
        sparse(dims=()),
        sparse(dims=(0,)),
        sparse(indices=((0, 1),)),
        sparse((1.0, 2.0), (1,)),
    ],
    ids=["int32", "unsorted", "duplicate", "beyond", "negative", "rank 0", "empty", "coordinates", "count"],
)
def test_a_sparse_tensor_of_another_layout_is_refused(tensor: Any) -> None:
    proto = parse(SPARSE, lambda m: m.graph.sparse_initializer.append(tensor))
    refused(proto, "GR-11", match="GR-11", error=ModelError)


@rule("GR-11")
def test_a_sparse_tensor_without_values_is_all_zeros() -> None:
    proto = parse(SPARSE, lambda m: m.graph.sparse_initializer.append(sparse((), ())))
    proto.graph.sparse_initializer[0].ClearField("indices")
    same(clean(proto, X), X)
    words = parse("g () => (string[2] w) { }")
    words.graph.sparse_initializer.add(dims=[2]).values.CopyFrom(helper.make_tensor("w", TensorProto.STRING, [0], []))
    (result,) = onnx2jax.convert(words).run(None, {})
    assert result.tolist() == ["", ""]


@rule("GR-12", "GR-13", "ND-14")
def test_outputs_are_any_values_as_often_as_listed() -> None:
    text = "g (float[2] x) => (float[2] x, float[2] w, float[2] y, float[2] y) <float[2] w = {5, 6}>"
    results = clean(parse(text + " { y = Neg (x)  unused = Abs (x) }"), X)
    assert [r.tolist() for r in results] == [X.tolist(), [5, 6], (-X).tolist(), (-X).tolist()]


@rule("GR-14")
def test_an_undefined_output_is_refused() -> None:
    refused(parse(edit=lambda m: setattr(m.graph.output[0], "name", "zz")), "GR-01", match="'zz'.*GR-14")


@rule("GR-15")
def test_a_graph_without_nodes_or_outputs_is_callable() -> None:
    assert onnx2jax.convert(parse("g (float[2] x) => () { }"))(X) == ()  # onnxruntime refuses to run it
    assert onnx2jax.convert(parse("g (float[2] x) => () { y = Neg (x) }"))(X) == ()


@rule("GR-16", "SH-01")
def test_inputs_and_outputs_declare_their_type_and_rank() -> None:
    untyped = parse(edit=lambda m: m.graph.input[0].ClearField("type"))  # onnxruntime refuses it
    same(refused_when_strict(untyped, "GR-16")(X), [0, 2])

    def unrank(m: Any) -> None:
        for v in (m.graph.input[0], m.graph.output[0]):
            v.type.tensor_type.ClearField("shape")

    m = refused_when_strict(parse(edit=unrank), "GR-16")  # onnxruntime accepts this
    for rank in range(6):
        assert m(np.zeros((2,) * rank, F)).shape == (2,) * rank


@rule("GR-17", "SH-08", "SH-01")
@pytest.mark.parametrize(
    ("declared", "value", "error"),
    [
        ("float[2]", X.astype(np.float64), InputTypeError),
        ("float[2]", np.array([1, 2]), InputTypeError),
        ("float[2]", np.zeros(3, F), InputShapeError),
        ("float[2]", np.zeros((1, 2), F), InputShapeError),
        ("float[N]", F(1), InputShapeError),
        ("float", np.zeros(1, F), InputShapeError),  # onnxruntime takes it for a scalar
    ],
)
def test_a_declared_input_is_a_contract(declared: str, value: Any, error: type[Exception]) -> None:
    m = onnx2jax.convert(parse(RELU.replace("float[2] x", f"{declared} x")))
    with pytest.raises(error, match="input x"):
        m(value)


@rule("GR-19")
@pytest.mark.parametrize("declared", ["float[3] w", "double[2] w", "float[2, 1] w"])
def test_a_default_is_of_the_declared_type(declared: str) -> None:
    text = f"g (float[2] x, {declared}) => (float[2] y) <float[2] w = {{1, 1}}> {{ y = Relu (x) }}"
    refused(parse(text), "GR-19", match="GR-19", error=ModelError)


@rule("GR-20")
def test_value_info_is_a_hint() -> None:
    text = MAIN + " { t = Neg (x)  y = Relu (t) }"

    def describe(m: Any, *names: str) -> None:
        m.graph.value_info.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in names)

    same(clean(parse(text, lambda m: describe(m, "t", "stray")), X), [1, 0])
    same(warned(parse(text, lambda m: describe(m, "t", "t")), "GR-20")(X), [1, 0])
    wrong = helper.make_tensor_value_info("t", TensorProto.INT64, [7])
    same(run(parse(text, lambda m: m.graph.value_info.append(wrong)), X), [1, 0])


@rule("GR-21", "ND-12")
def test_kinds_of_names_do_not_clash() -> None:
    proto = parse("x (float[2] x) => (float[2] alpha) { alpha = Elu <alpha = 1.0> (x) }")
    proto.graph.node[0].name = "alpha"
    same(clean(proto, np.abs(X)), np.abs(X))


@rule("GR-22")
def test_names_of_nodes_may_repeat() -> None:
    def name(m: Any) -> None:
        for node in m.graph.node:
            node.name = "n"

    text = MAIN + " { a = Neg (x)  b = Abs (a)  y = Neg (b) }"
    same(warned(parse(text, name), "GR-22")(X), -np.abs(X))  # onnxruntime refuses them
    with pytest.raises(ModelError, match=r"node 'n_1' \(Softmax, opset 21\)"):  # the position tells which one
        onnx2jax.convert(parse(text.replace("Abs (a)", "Softmax <axes = 1> (a)"), name))
    same(clean(parse(text), X), -np.abs(X))


@rule("GR-23")
@pytest.mark.parametrize("names", [("x/0:1", "y"), ("мир é", "y"), ("1", "2"), ("class", "def"), ("a.b", "a_b")])
def test_any_text_is_a_name(names: tuple[str, str]) -> None:
    first, second = names
    nodes = [
        helper.make_node("Neg", ["input"], [first]),
        helper.make_node("Abs", [first], [second]),
        helper.make_node("Sub", [second, first], ["out"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("input", first, second, "out")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    a, b, c = clean(proto, X)
    same(a, -X)
    same(b, np.abs(X))
    same(c, np.abs(X) + X)


@rule("GR-23")
def test_inputs_of_any_name_are_given_by_it() -> None:
    proto = parse("g (float[2] a, float[2] b) => (float[2] y) { y = Sub (a, b) }")
    for v, name in zip(proto.graph.input, ("a.b", "a_b"), strict=True):
        v.name = name
    proto.graph.node[0].input[:] = ["a.b", "a_b"]
    same(onnx2jax.convert(proto)(**{"a_b": X, "a.b": 3 * X}), 2 * X)


@rule("GR-24")
def test_the_empty_name_defines_nothing() -> None:
    unnamed = parse("g (float[2] x, float[2] z) => (float[2] y) { y = Relu (x) }")
    unnamed.graph.input[1].name = ""
    refused(unnamed, "GR-24", error=ModelError)


@rule("GR-25")
def test_a_dead_node_changes_no_random_stream() -> None:
    text = MAIN + " { y = RandomNormalLike (x) }"
    with_dead = MAIN + " { dead = RandomNormalLike (x)  y = RandomNormalLike (x) }"
    key = jax.random.key(3)
    a, b = onnx2jax.convert(parse(text)), onnx2jax.convert(parse(with_dead))
    same(a(X, rng=key), b(X, rng=key))


@rule("GR-27")
def test_the_identity_of_a_graph() -> None:
    m = onnx2jax.convert(parse(domain="com.example", model_version=7))
    assert (m.metadata["domain"], m.metadata["model_version"], m.graph.name) == ("com.example", "7", "g")


@rule("GR-28")
@pytest.mark.parametrize("outputs", [[], [""], ["", ""]])
def test_a_node_has_an_output(outputs: list[str]) -> None:
    proto = parse(edit=lambda m: m.graph.node.append(helper.make_node("Relu", ["x"], outputs)))
    same(refused_when_strict(proto, "GR-28")(X), [0, 2])


def test_an_operator_without_a_name_is_refused() -> None:
    proto = parse(edit=lambda m: m.graph.node[0].ClearField("op_type"))
    refused(proto, "OR-08", match="no op_type")
    assert rules_of(parse()) == set()
    assert issubclass(UnsupportedOperatorError, NotImplementedError) and isinstance(proto, onnx.ModelProto)
