"""The public object: calls, parameters, dtypes, shapes, transformations."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import (
    InputNameError,
    InputShapeError,
    InputTypeError,
    InputValueError,
    KnownValueError,
    OperatorError,
    RandomKeyError,
    UnsupportedError,
)
from tests.support.models import mlp, mlp_reference, model, one_node, text_model, value

X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)


def two_outputs() -> onnx.ModelProto:
    nodes = [helper.make_node("Neg", ["a"], ["out:0"]), helper.make_node("Add", ["a", "b"], ["total"])]
    ends = [value("a", np.float32, ["n"]), value("b", np.float32, ["n"])]
    return model(nodes, ends, [value("out:0", np.float32, ["n"]), value("total", np.float32, ["n"])])


# ------------------------------------------------------------------------------------------------ calls


def test_positional_named_and_run_agree() -> None:
    m = onnx2jax.convert(mlp())
    expected = mlp_reference(m.params, X)
    np.testing.assert_allclose(m(X), expected, rtol=1e-5)
    np.testing.assert_array_equal(m(x=X), m(X))
    (ran,) = m.run(None, {"x": X})
    assert isinstance(ran, np.ndarray)
    np.testing.assert_allclose(ran, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"b1": np.zeros(8)}, r"params\['b1'\]: float32\[8\] is given as float64\[8\].*astype\('float32'\)"),
        ({"b1": jnp.zeros(8, jnp.bfloat16)}, "is given as bfloat16"),
        ({"b1": "weights"}, "cannot be converted from str"),
        ([1], "params must be a dict of arrays by name, like model.params, not list"),
    ],
    ids=str,
)
def test_parameters_of_other_types_are_rejected(params: Any, match: str) -> None:
    m = onnx2jax.convert(mlp())
    for call in (lambda: m.apply(params, X), lambda: m.with_params(params)(X)):
        with pytest.raises(InputTypeError, match=match):
            call()


def test_unknown_parameter_names_are_rejected() -> None:
    m = onnx2jax.convert(mlp())
    params = {"b3": np.zeros(2, np.float32)}
    for call in (lambda: m.with_params(params), lambda: m.apply(params, X)):
        with pytest.raises(InputNameError, match=r"unknown parameters \['b3'\]"):
            call()


def test_tensors_of_other_libraries_are_accepted() -> None:
    class Tensor:
        """Like a PyTorch tensor: no NumPy array, but has ``__array__``."""

        def __init__(self, array: np.ndarray) -> None:
            self.array, self.dtype = array, f"torch.{array.dtype}"

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.array(self.array, dtype, copy=copy)

    m = onnx2jax.convert(mlp())
    np.testing.assert_array_equal(m(Tensor(X)), m(X))
    with pytest.raises(InputTypeError, match="is given as float64"):
        m(Tensor(X.astype(np.float64)))


def test_several_outputs_are_a_named_tuple_in_graph_order() -> None:
    m = onnx2jax.convert(two_outputs())
    result = m(np.float32([1, 2]), b=np.float32([3, 4]))
    np.testing.assert_array_equal(result[0], [-1, -2])
    np.testing.assert_array_equal(result.total, [4, 6])
    np.testing.assert_array_equal(result.out_0, [-1, -2])  # not an identifier: cleaned


def test_outputs_whose_names_become_equal_are_told_apart() -> None:
    nodes = [helper.make_node("Abs", ["x"], ["y.0"]), helper.make_node("Neg", ["x"], ["y_0"])]
    outputs = [value(n, np.float32, ["n"]) for n in ("y.0", "y_0")]
    result = onnx2jax.convert(model(nodes, [value("x", np.float32, ["n"])], outputs))(np.float32([1]))
    assert result._asdict() == {"y_0": 1, "_1": -1}


def test_outputs_named_like_tuple_methods() -> None:
    nodes = [helper.make_node("Abs", ["x"], ["count"]), helper.make_node("Neg", ["x"], ["index"])]
    outputs = [value(n, np.float32, ["n"]) for n in ("count", "index")]
    result = onnx2jax.convert(model(nodes, [value("x", np.float32, ["n"])], outputs))(np.float32([1]))
    assert (result.count, result.index) == (1, -1)
    with pytest.raises(AttributeError, match="cannot be set: count"):
        result.count = 0
    assert result._asdict() == {"count": 1, "index": -1}
    assert str(jax.tree_util.tree_flatten_with_path(result)[0][0][0][0]) == ".count"


def test_outputs_can_be_pickled_copied_and_exported() -> None:
    m = onnx2jax.convert(two_outputs())
    feeds = np.float32([1, 2]), np.float32([3, 4])
    result = m(*feeds)
    exported = jax.export.export(jax.jit(lambda a, b: m.apply({}, a, b)))(*feeds).serialize()
    others = pickle.loads(pickle.dumps(result)), copy.deepcopy(result), jax.export.deserialize(exported).call(*feeds)
    for other in (*others, jax.tree.map(lambda x: x, result)):
        assert jax.tree.structure(other) == jax.tree.structure(result)
        np.testing.assert_array_equal(other.total, result.total)
    assert jax.tree.structure(onnx2jax.convert(two_outputs())(*feeds)) == jax.tree.structure(result)


def test_run_selects_and_orders_outputs() -> None:
    m = onnx2jax.convert(two_outputs())
    feeds = {"a": np.float32([1]), "b": np.float32([2])}
    total, negative = m.run(["total", "out:0"], feeds)
    assert (total, negative) == (3, -1)
    with pytest.raises(InputNameError, match="no output 'nope'"):
        m.run(["nope"], feeds)


def test_attributes_of_a_model() -> None:
    proto = mlp()
    proto.producer_name = "tests"
    helper.set_model_props(proto, {"author": "me"})
    m = onnx2jax.convert(proto)
    assert [v.name for v in m.inputs] == ["x"]
    assert m.inputs[0].type.dtype == np.float32  # type: ignore[union-attr]
    assert m.inputs[0].type.shape == ("batch", 4)  # type: ignore[union-attr]
    assert str(m.outputs[0]) == "y: float32[batch, 2]"
    assert m.opsets == {"": 21}
    assert m.metadata["author"] == "me" and m.metadata["producer_name"] == "tests"
    assert list(m.params) == ["w1", "b1", "w2", "b2"]


def test_python_numbers_and_lists_take_the_declared_type() -> None:
    m = onnx2jax.convert(one_node("Abs", {"x": (np.int64, ["n"])}))
    assert m([-1, 2]).dtype == jnp.int64
    with pytest.raises(InputTypeError, match="cannot be converted from list"):
        m([1.5, 2])


@pytest.mark.parametrize(("dtype", "number"), [(np.int32, 2**31), (np.uint8, -1), (np.int64, 2**63), (bool, 2)])
def test_numbers_outside_the_declared_type_are_rejected(dtype: Any, number: int) -> None:
    m = onnx2jax.convert(one_node("Identity", {"x": (dtype, ["n"])}))
    with pytest.raises(InputTypeError, match="cannot be converted from list"):
        m([number])


def test_python_numbers_are_weakly_typed() -> None:
    m = onnx2jax.convert(one_node("Abs", {"x": (np.float32, [])}))
    with jax.enable_x64(True):
        assert jax.jit(jax.grad(m))(-2.0) == -1


# ------------------------------------------------------------------------------------------ parameters


def test_with_params_changes_a_scalar_parameter() -> None:
    node = helper.make_node("Mul", ["x", "scale"], ["y"])
    m = onnx2jax.convert(
        model([node], [value("x", np.float32, [2])], [value("y", np.float32, [2])], {"scale": np.float32(2)})
    )
    x = np.float32([1, 2])
    np.testing.assert_array_equal(m(x), [2, 4])
    np.testing.assert_array_equal(m.with_params({"scale": np.float32(3)})(x), [3, 6])
    np.testing.assert_array_equal(m(x), [2, 4])


def test_with_params_shares_compiled_programs() -> None:
    first = onnx2jax.convert(mlp())
    y = np.asarray(first(X))
    second = first.with_params({"b2": first.params["b2"] + 1})
    np.testing.assert_allclose(second(X), y + 1, rtol=1e-5)
    np.testing.assert_array_equal(first(X), y)
    assert second.compilations == 1
    with pytest.raises(InputNameError, match="w9"):
        first.with_params({"w9": np.zeros(2)})


def test_apply_accepts_a_subset_of_the_parameters() -> None:
    m = onnx2jax.convert(mlp())
    np.testing.assert_allclose(m.apply({"b2": np.zeros(2, np.float32)}, X), m(X) - m.params["b2"], rtol=1e-4, atol=1e-6)
    with pytest.raises(InputNameError, match="params has"):
        m.apply({"w9": np.zeros(2)}, X)


def test_arrays_of_constant_nodes_are_parameters_but_scalars_are_not() -> None:
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1, 2])
    half = helper.make_tensor("h", onnx.TensorProto.FLOAT, [], [0.5])
    nodes = [
        helper.make_node("Constant", [], ["w"], value=weight),
        helper.make_node("Constant", [], ["h"], value=half),
        helper.make_node("Mul", ["x", "w"], ["p"]),
        helper.make_node("Mul", ["p", "h"], ["y"]),
    ]
    m = onnx2jax.convert(model(nodes, [value("x", np.float32, [2])], [value("y", np.float32, [2])]))
    assert list(m.params) == ["w"]
    np.testing.assert_array_equal(m(np.float32([2, 2])), [1, 2])


def test_weights_that_determine_shapes_are_constants() -> None:
    scales = np.float32([1, 1, 2, 2])
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest")
    ends = [value("x", np.float32, [1, 1, 2, 2])], [value("y", np.float32, [1, 1, 4, 4])]
    m = onnx2jax.convert(model([node], *ends, {"scales": scales}))
    assert m.params == {} and m(np.ones((1, 1, 2, 2), np.float32)).shape == (1, 1, 4, 4)


def test_weights_of_subgraphs_are_parameters() -> None:
    def branch(name: str, number: float) -> onnx.GraphProto:
        w = onnx.numpy_helper.from_array(np.float32([number, number]), "w")  # the same name in both branches
        node = helper.make_node("Mul", ["x", "w"], [name])
        return helper.make_graph([node], name, [], [value(name, np.float32, [2])], [w])

    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch("t", 2), else_branch=branch("e", 3))
    m = onnx2jax.convert(
        model([node], [value("c", bool, []), value("x", np.float32, [2])], [value("y", np.float32, [2])])
    )
    assert sorted(m.params) == ["if.else_branch/w", "if.then_branch/w"]
    x = np.float32([1, 1])
    np.testing.assert_array_equal(m(np.bool_(True), x), [2, 2])
    np.testing.assert_array_equal(m(np.bool_(False), x), [3, 3])
    gradient = jax.grad(lambda p: m.apply(p, jnp.bool_(True), x).sum())(m.params)
    np.testing.assert_array_equal(gradient["if.then_branch/w"], [1, 1])


def test_overridable_initializer_is_an_optional_input_and_a_parameter() -> None:
    node = helper.make_node("Add", ["x", "b"], ["y"])
    ends = [value("x", np.float32, [2]), value("b", np.float32, [2])], [value("y", np.float32, [2])]
    m = onnx2jax.convert(model([node], *ends, {"b": np.float32([1, 2])}))
    x = np.zeros(2, np.float32)
    assert [v.name for v in m.inputs] == ["x"] and list(m.optional) == ["b"]
    np.testing.assert_array_equal(m(x), [1, 2])
    np.testing.assert_array_equal(m(x, b=np.float32([5, 5])), [5, 5])
    np.testing.assert_array_equal(m(x), [1, 2])


def test_below_ir_4_weights_among_the_inputs_are_constants() -> None:
    node = helper.make_node("Add", ["x", "b"], ["y"])
    ends = [value("x", np.float32, [2]), value("b", np.float32, [2])], [value("y", np.float32, [2])]
    m = onnx2jax.convert(model([node], *ends, {"b": np.float32([1, 2])}, ir_version=3, opset=7))
    assert list(m.params) == ["b"] and not m.optional
    with pytest.raises(InputNameError, match="no input 'b'"):
        m(np.zeros(2, np.float32), b=np.zeros(2, np.float32))


# --------------------------------------------------------------------------------- transformations, modes


@pytest.mark.parametrize("x64", [False, True])
def test_transformations_of_apply(x64: bool) -> None:
    m = onnx2jax.convert(mlp())

    @jax.jit
    def results(params: Any, x: Any) -> Any:
        rows = jax.vmap(lambda x: m.apply(params, x[None])[0])(x)
        losses = [lambda p, f=f: (f(p, x) ** 2).sum() for f in (m.apply, mlp_reference)]
        return m.apply(params, x), rows, mlp_reference(params, x), *(jax.grad(loss)(params) for loss in losses)

    with jax.enable_x64(x64):
        found, rows, expected, ours, theirs = results(m.params, X)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
        for name in m.params:
            assert ours[name].dtype == np.float32
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
        assert "dot_general" in str(jax.make_jaxpr(m.apply)(m.params, X))
        jax.jit(m.apply).lower(m.params, X).compile()


def test_calls_inside_transformations() -> None:
    m = onnx2jax.convert(mlp())
    gradient = jax.grad(lambda x: m(x).sum())(X)
    theirs = jax.grad(lambda x: mlp_reference(m.params, x).sum())(X)
    np.testing.assert_allclose(gradient, theirs, rtol=1e-5)


@pytest.mark.usefixtures("in_32_bits")
def test_64_bit_results_are_exact_in_a_32_bit_process() -> None:
    big = np.array([2**53 + 1, -(2**62) - 1], np.int64)
    m = onnx2jax.convert(one_node("Neg", {"x": (np.int64, ["n"])}))
    assert m(big).dtype == np.int64
    np.testing.assert_array_equal(m(big), -big)
    d = onnx2jax.convert(one_node("Sqrt", {"x": (np.float64, ["n"])}))
    x = np.array([2.0, 3.0])
    assert d(x).dtype == np.float64
    np.testing.assert_allclose(d(x), np.sqrt(x), rtol=1e-15)
    assert jnp.zeros(1).dtype == np.float32


@pytest.mark.usefixtures("in_32_bits")
def test_64_bit_inside_a_32_bit_jit() -> None:
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=7), helper.make_node("Mul", ["i", "k"], ["y"])]
    ends = [value("x", np.float32, ["n"])], [value("y", np.int64, ["n"])]
    m = onnx2jax.convert(model(nodes, *ends, {"k": np.array(2**40 + 1)}))
    result = jax.jit(lambda x: m.apply(m.params, x))(np.float32([3]))
    assert int(result[0]) == 3 * (2**40 + 1)


@pytest.mark.usefixtures("in_32_bits")
def test_32_bit_arrays_are_widened_without_x64() -> None:
    m = onnx2jax.convert(one_node("Neg", {"x": (np.int64, ["n"])}))
    np.testing.assert_array_equal(jax.jit(lambda x: m.apply({}, x))(jnp.arange(3)), [0, -1, -2])


def test_symbolic_export() -> None:
    m = onnx2jax.convert(mlp())
    (batch,) = jax.export.symbolic_shape("batch")
    spec = jax.ShapeDtypeStruct((batch, 4), np.float32)
    params = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in m.params.items()}
    exported = jax.export.export(jax.jit(m.apply))(params, spec)
    for n in (1, 5):
        x = np.ones((n, 4), np.float32)
        np.testing.assert_allclose(exported.call(dict(m.params), x), mlp_reference(m.params, x), rtol=1e-5)


def test_symbolic_shape_arithmetic_exports() -> None:
    """Shape -> Gather -> Mul -> Concat -> Reshape with a symbolic batch and sequence."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
        helper.make_node("Gather", ["s", "one"], ["t"], axis=0),
        helper.make_node("Mul", ["b", "t"], ["n"]),
        helper.make_node("Concat", ["n", "minus"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "one": np.array([1]), "minus": np.array([-1])}
    m = onnx2jax.convert(
        model(nodes, [value("x", np.float32, ["b", "t", 6])], [value("y", np.float32, None)], constants)
    )
    b, t = jax.export.symbolic_shape("b, t")
    exported = jax.export.export(jax.jit(lambda x: m.apply({}, x)))(jax.ShapeDtypeStruct((b, t, 6), np.float32))
    assert exported.call(np.zeros((2, 3, 6), np.float32)).shape == (6, 6)


def test_node_names_are_named_scopes() -> None:
    m = onnx2jax.convert(mlp())
    text = jax.jit(m.apply).lower(m.params, X).as_text(debug_info=True)
    assert "hidden" in text and "head" in text


# ---------------------------------------------------------------------------------- values known and traced


def reshape_by_input() -> onnx.ModelProto:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="to")
    return model(
        [node], [value("x", np.float32, ["n"]), value("shape", np.int64, ["r"])], [value("y", np.float32, None)]
    )


def test_calls_specialise_on_shape_inputs() -> None:
    m = onnx2jax.convert(reshape_by_input())
    x = np.arange(6, dtype=np.float32)
    assert m(x, np.array([2, 3])).shape == (2, 3)
    assert m(x, np.array([3, -1])).shape == (3, 2)
    assert m.jitted


def test_a_traced_shape_raises_with_node_value_and_fix() -> None:
    m = onnx2jax.convert(reshape_by_input())
    with pytest.raises(KnownValueError, match=r"(?s)node 'to' \(Reshape, opset 21\).*'shape'.*static="):
        jax.jit(m.apply)({}, jnp.zeros(6, jnp.float32), jnp.array([2, 3]))
    pinned = onnx2jax.convert(reshape_by_input(), static={"shape": [2, 3]})
    assert [v.name for v in pinned.inputs] == ["x"]
    assert jax.jit(pinned.apply)({}, jnp.zeros(6, jnp.float32)).shape == (2, 3)


def test_a_numpy_shape_inside_a_jit_is_constant() -> None:
    m = onnx2jax.convert(reshape_by_input())
    assert jax.jit(lambda x: m.apply({}, x, np.array([2, 3])))(jnp.zeros(6, jnp.float32)).shape == (2, 3)


def test_data_dependent_shapes_run_on_the_host() -> None:
    m = onnx2jax.convert(one_node("NonZero", {"x": (np.float32, ["n", "k"])}))
    x = np.float32([[0, 1] * 20, [2, 0] * 20])
    np.testing.assert_array_equal(m(x), np.stack(np.nonzero(x)))
    assert not m.jitted


def test_dims_fix_dimensions() -> None:
    m = onnx2jax.convert(mlp(), dims={"batch": 3})
    assert m.inputs[0].type.shape == (3, 4)  # type: ignore[union-attr]
    with pytest.raises(InputShapeError, match="extent 3 on axis 0"):
        m(X[:2])
    with pytest.raises(InputNameError, match=r"dimension variables are \['batch'\]"):
        onnx2jax.convert(mlp(), dims={"seq": 3})


def test_dimensions_without_a_name_are_called_by_input_and_axis(tmp_path: Path) -> None:
    """``dims``, ``bucket``, ``summary``, ``compile``, ``cost`` and ``export`` take the same names."""
    proto = one_node("Neg", {"x": (np.float32, [None, "x_0", None, 2])})  # x_0 is a name of the file
    m = onnx2jax.convert(proto)
    assert m.inputs[0].shape == (None, "x_0", None, 2)
    assert onnx2jax.convert(proto, dims={"x_2": 3}).inputs[0].shape == (None, "x_0", 3, 2)
    dims = {"x_0_": 4, "x_0": 5, "x_2": 3}
    assert m.summary(dims=dims).inputs == {"x": "float32[4, 5, 3, 2]"}
    assert m.compile(dims=dims).compilations == 1
    onnx.save(proto, tmp_path / "m.onnx")
    assert onnx2jax.cost(tmp_path / "m.onnx", {"data": 2}).dims == {"x_0_": 2, "x_0": 1, "x_2": 1}
    exported = onnx2jax.load_exported(m.export(tmp_path / "exported", dims={"x_2": 3}))
    assert exported.inputs[0].shape == ("x_0_", "x_0", 3, 2)
    with pytest.raises(InputNameError, match=r"\['x_0_', 'x_0', 'x_2'\]"):
        onnx2jax.convert(proto, dims={"x_1": 3})
    with pytest.raises(InputNameError, match=r"bucket names \['x_1'\]"):
        onnx2jax.convert(proto, bucket={"x_1": [4]})
    padded = onnx2jax.convert(proto, bucket={"x_2": [4]})  # the output declares no shape
    assert padded(np.ones((1, 1, 3, 2), np.float32)).shape == (1, 1, 3, 2)


def test_seeds_and_key_data_are_keys() -> None:
    m = onnx2jax.convert(one_node("RandomNormalLike", {"x": (np.float32, ["n"])}))
    expected = m(X[0], rng=jax.random.key(7))
    for rng in (7, np.int64(7), jax.random.PRNGKey(7), np.uint32([0, 7])):
        np.testing.assert_array_equal(m(X[0], rng=rng), expected)
        np.testing.assert_array_equal(jax.jit(m.apply)({}, X[0], rng=rng), expected)


def test_invalid_keys_are_rejected() -> None:
    m = onnx2jax.convert(one_node("RandomNormalLike", {"x": (np.float32, ["n"])}))
    for rng, match in (
        ("a", "must be a random key.*, not 'a'"),
        (1.5, "must be a random key.*, not 1.5"),
        (jax.random.split(jax.random.key(0)), r"jax\.vmap"),
    ):
        for call in (lambda rng=rng: m(X[0], rng=rng), lambda rng=rng: m.apply({}, X[0], rng=rng)):
            with pytest.raises(InputTypeError, match=match):
                call()


def test_only_apply_requires_a_key() -> None:
    node = helper.make_node("RandomNormalLike", ["x"], ["y"], name="noise")
    m = onnx2jax.convert(model([node], [value("x", np.float32, [64])], [value("y", np.float32, [64])]))
    x = np.zeros(64, np.float32)
    with pytest.raises(RandomKeyError, match=r"'noise'.*rng=jax\.random\.key"):
        m.apply({}, x)
    key = jax.random.key(0)
    np.testing.assert_array_equal(m.apply({}, x, rng=key), m(x, rng=key))
    assert not np.array_equal(m(x), m(x))


def test_random_numbers_inside_a_branch_take_a_key() -> None:
    branches = [
        helper.make_graph([helper.make_node(op, ["x"], [op])], op, [], [value(op, np.float32, [64])])
        for op in ("RandomNormalLike", "Neg")
    ]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    ends = [value("c", np.bool_, []), value("x", np.float32, [64])], [value("y", np.float32, [64])]
    m, x = onnx2jax.convert(model([node], *ends)), np.zeros(64, np.float32)
    assert not np.array_equal(m(np.True_, x), m(np.True_, x))


# -------------------------------------------------------------------------------------------- bad calls


@pytest.mark.parametrize(
    ("args", "named", "error", "message"),
    [
        ((X, X), {}, InputNameError, "2 positional arguments"),
        ((), {}, InputNameError, "input 'x' not given"),
        ((X,), {"x": X}, InputNameError, "by position and by name"),
        ((), {"z": X}, InputNameError, "no input 'z'"),
        ((X.astype(np.float64),), {}, InputTypeError, r"x: float32\[batch, 4\].*float64.*astype\('float32'\)"),
        ((X.astype(np.float16),), {}, InputTypeError, "nothing is cast silently"),
        ((X[0],), {}, InputShapeError, "rank 2, not 1"),
        ((X[:, :3],), {}, InputShapeError, "extent 4 on axis 1, but 3"),
        ((None,), {}, InputTypeError, "not None"),
    ],
)
def test_invalid_arguments_are_rejected(args: Any, named: Any, error: type[Exception], message: str) -> None:
    m = onnx2jax.convert(mlp())
    with pytest.raises(error, match=message):
        m(*args, **named)


def test_conflicting_dimension_variables() -> None:
    m = onnx2jax.convert(two_outputs())
    with pytest.raises(InputShapeError, match="'n' is 2 in input 'a' but 1 in input 'b'"):
        m(np.float32([1, 2]), np.float32([1]))


def test_zero_size_batch() -> None:
    assert onnx2jax.convert(mlp())(np.zeros((0, 4), np.float32)).shape == (0, 2)


@pytest.mark.parametrize(("declared", "given"), [("n, 3, h, 5", (2, 4, 5, 3)), ("n, h, 5, 3", (2, 3, 4, 5))])
def test_images_of_another_layout_are_moved_as_the_error_advises(declared: str, given: tuple[int, ...]) -> None:
    m = onnx2jax.convert(text_model(f"g (float[{declared}] image) => (float[{declared}] y) {{ y = Neg(image) }}"))
    for image in (np.ones(given, np.float32), jnp.ones(given, jnp.float32)):
        with pytest.raises(InputShapeError, match=r"the channels are (last|first), move them: np\.moveaxis") as e:
            m(image)
        moved = eval(str(e.value).partition("move them: ")[2], {"np": np, "image": image})
        with pytest.raises(InputShapeError, match=r"as a batch of one: image\[None\]$"):
            m(moved[0])
        assert (m(moved).shape, m(moved[0][None]).shape) == (moved.shape, (1, *moved.shape[1:]))


def test_a_declared_extent_of_0_admits_no_other() -> None:
    m = onnx2jax.convert(one_node("Neg", {"x": (np.float32, [0, 4])}))
    assert m(np.zeros((0, 4), np.float32)).shape == (0, 4)
    with pytest.raises(InputShapeError, match="extent 0 on axis 0, but 3"):
        m(X)


@pytest.mark.parametrize(
    ("node", "operands"),
    [
        ("Tile", [np.float32([1, 2]), np.int64([-1])]),
        ("ConstantOfShape", [np.int64([-1])]),
        ("Expand", [np.float32([1]), np.int64([-1])]),
        ("OneHot", [np.int64([1]), np.int64(-3), np.float32([0, 1])]),
        ("HannWindow", [np.int64(-3)]),
        ("Resize", [np.float32([1, 2]), np.float32([]), np.float32([-1])]),
        ("Resize", [np.float32([1, 2]), np.float32([]), np.float32([0])]),
        ("Resize", [np.float32([1, 2]), np.float32([]), np.float32([]), np.int64([-1])]),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_negative_extents_are_rejected(node: str, operands: list[Any], known: bool) -> None:
    names = [f"x{i}" for i in range(len(operands))]
    inputs = [value(n, v.dtype, v.shape) for n, v in zip(names, operands, strict=True)]
    constants = dict(zip(names, operands, strict=True)) if known else {}
    proto = model(
        [helper.make_node(node, names, ["y"])], [] if known else inputs, [value("y", np.float32, None)], constants
    )
    with pytest.raises(OperatorError, match=node):
        onnx2jax.convert(proto)(*([] if known else operands))


def test_batch_norm_statistics_must_match_the_channels() -> None:
    names = ["scale", "bias", "mean", "var"]
    constants = {n: np.ones(4, np.float32) for n in names}
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"])
    m = onnx2jax.convert(model([node], [value("x", np.float32, None)], [value("y", np.float32, None)], constants))
    with pytest.raises(OperatorError, match=r"(?s)BatchNormalization.*reshape.*scale: float32\[4\]"):
        m(np.ones((2, 1, 3), np.float32))


def test_invalid_feeds_and_extents_are_rejected() -> None:
    m = onnx2jax.convert(mlp())
    with pytest.raises(InputTypeError, match="a dict of arrays by name"):
        m.run(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("extent", [-1, [4, 8], "4", 4.5, None, True])
def test_invalid_extents_are_rejected(extent: Any) -> None:
    """Of each keyword that takes extents."""
    m = onnx2jax.convert(mlp())
    given: dict[str, Any] = {"batch": extent}
    calls = [
        lambda: onnx2jax.convert(mlp(), dims=given),
        lambda: m.with_options(dims=given),
        lambda: m.compile(dims=given),
        lambda: m.summary(dims=given),
        lambda: onnx2jax.cost(onnx2jax.demo_model(), {"data": 1}, dims=given),
        lambda: onnx2jax.convert(mlp(), bucket={"batch": [extent]}),
    ]
    fix = r".*for n in \(4, 8\): model.compile\(dims=\{'batch': n\}\)" if extent == [4, 8] else ""
    for call in calls:
        with pytest.raises(InputValueError, match=rf"'batch': {re.escape(repr(extent))}; an extent is an integer{fix}"):
            call()


@pytest.mark.parametrize("shape", [[-1, 2], [2, -1]])
def test_random_arrays_of_negative_extents_are_rejected(shape: list[int]) -> None:
    proto = model([helper.make_node("RandomNormal", [], ["y"], shape=shape)], [], [value("y", np.float32, None)])
    with pytest.raises(OperatorError, match=r"shape \("):
        onnx2jax.convert(proto)()


def test_lists_for_an_input_of_undeclared_type() -> None:
    """A list of arrays is a sequence; numbers have no dtype, and a wrong guess would be cast in silence."""
    nodes = [helper.make_node("SequenceAt", ["xs", "i"], ["h"]), helper.make_node("Neg", ["h"], ["y"], name="y")]
    xs = helper.make_tensor_sequence_value_info("xs", onnx.TensorProto.FLOAT, [3])
    file = model(nodes, [xs, value("i", np.int64, [])], [value("y", np.float32, [3])])
    cut = onnx2jax.convert(file).cut(inputs=["h"])
    assert cut.inputs[0].type is None
    np.testing.assert_array_equal(cut(np.ones(3, np.float32)), [-1, -1, -1])
    with pytest.raises(InputTypeError, match=r"float \(1\.0\).*np.float32"):
        cut([1.0, 2.0, 3.0])
    with pytest.raises(OperatorError, match=r"node 'y'.*(?s:.*)input 0 is seq\(float\).*give one array"):
        cut([np.ones(3, np.float32)])


def test_options_change_on_a_model_that_is_there() -> None:
    tuned = onnx2jax.convert(mlp(), dims={"batch": 3}).with_params({"b2": np.float32([5, 6])})
    x = np.ones((3, 4), np.float32)
    half = tuned.with_options(dtype="bfloat16", dims=None)
    assert half.inputs[0].shape[0] == "batch"
    np.testing.assert_allclose(half(x), tuned(x), rtol=2e-2)  # with the tuned bias
    plain = half.with_options(dtype=None, optimize=False)
    np.testing.assert_allclose(plain(x), tuned(x), rtol=1e-6)
    assert plain.options.optimize is False and tuned.options.optimize is True
    with pytest.raises(TypeError, match="with_options: unknown keyword dim_overrides; the nearest are 'dims'"):
        tuned.with_options(dim_overrides={"batch": 2})


def test_options_that_rewrote_a_graph_stay_once_it_is_changed() -> None:
    half = onnx2jax.convert(mlp(), dtype="bfloat16")
    part = half.cut(outputs=[half.graph.nodes[0].outputs[0]])
    assert part.with_options(optimize=False).options.optimize is False
    with pytest.raises(UnsupportedError, match=r"change it before, model.with_options\(dtype="):
        part.with_options(dtype=None)
    late = onnx2jax.convert(mlp()).cut(outputs=[half.graph.nodes[0].outputs[0]]).with_options(dtype="bfloat16")
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(late(x), np.asarray(part(x), np.float32), rtol=1e-2)


def test_an_index_beyond_a_table_is_named_in_the_first_call_of_a_signature() -> None:
    """As ONNX requires. Later calls read NaN, as traced indices do: a check would cost each of them."""
    tables = {"w": np.ones((100, 64), np.float32), "v": np.ones((64, 400), np.float32)}
    text = """g (int64[b, s] ids) => (float[b, s, m] y) {
        i = Unsqueeze(ids, last)
        j = Squeeze(i, last)
        rows = Gather(w, j)
        y = MatMul(rows, v)
    }"""
    found = onnx2jax.convert(text_model(text, last=np.int64([-1]), **tables))
    beyond = np.array([[1, 100]])
    for ids in (beyond, jnp.asarray(beyond), -beyond - 1):
        with pytest.raises(InputValueError, match=r"'ids' has -?10\d, and node 'rows' .*100 rows"):
            found(ids)
    assert found(beyond - 1).shape == (1, 2, 400)
    assert np.isnan(found(beyond)[0, 1]).all() and found.compilations == 1


def test_the_representation_of_a_value_is_what_its_declaration_says() -> None:
    assert repr(onnx2jax.convert(onnx2jax.demo_model()).inputs) == "(<image: float32[batch, 1, 8, 8]>,)"


def test_a_model_is_made_by_convert() -> None:
    with pytest.raises(TypeError, match=r"onnx2jax\.convert makes a Model: onnx2jax\.convert\('m\.onnx'\)"):
        onnx2jax.Model("m.onnx")  # type: ignore[arg-type]
