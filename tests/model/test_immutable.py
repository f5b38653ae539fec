"""A Model is immutable: its results, its attributes and its saved file never change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import ExternalDataError, InputTypeError, RandomKeyError
from onnx2jax.ops import registry
from tests.support.models import mlp, model, value

X = np.ones((2, 4), np.float32)


def product() -> onnx.ModelProto:
    """x @ w, with a weight so large that it is read on first use."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    inputs, outputs = [value("x", np.float32, ["n", 256])], [value("y", np.float32, None)]
    return model([node], inputs, outputs, {"w": np.ones((256, 256), np.float32)})


def scaled(*, raw: bool) -> onnx.ModelProto:
    """x * w + c, with w a weight and c a constant, in raw_data or in the typed fields."""
    nodes = [helper.make_node("Mul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "c"], ["y"])]
    proto = model(nodes, [value("x", np.float32, [2])], [value("y", np.float32, [2])], {})
    for name, numbers in (("w", [2.0, 3.0]), ("c", [10.0, 20.0])):
        made = helper.make_tensor(name, onnx.TensorProto.FLOAT, [2], numbers)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(numbers), name) if raw else made)
    return proto


@pytest.mark.parametrize("raw", [True, False], ids=["raw_data", "float_data"])
def test_arrays_of_a_model_are_read_only(raw: bool) -> None:
    m = onnx2jax.convert(scaled(raw=raw))
    for array in (m.params["w"], m.graph.initializers["w"], m.graph.initializers["c"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    np.testing.assert_array_equal(m(np.ones(2, np.float32)), [12, 23])


def test_params_and_attributes_cannot_be_assigned() -> None:
    m = onnx2jax.convert(mlp())
    m.params["w1"] = np.zeros((4, 8), np.float32)  # a dict of the caller's
    assert m.params["w1"].any()
    for name in ("params", "graph", "inputs", "settings"):
        with pytest.raises(AttributeError, match=r"a Model is immutable.*with_params"):
            setattr(m, name, None)
    for mapping in (m.opsets, m.metadata, m.static, m.optional):
        with pytest.raises(TypeError, match="item assignment"):
            mapping["x"] = 1  # type: ignore[index]


def test_editing_a_source_array_has_no_effect(tmp_path: Path) -> None:
    m = onnx2jax.convert(scaled(raw=True))
    mine = np.float32([5, 6])
    new = m.with_params({"w": mine})
    mine[:] = 0
    np.testing.assert_array_equal(new(np.ones(2, np.float32)), [15, 26])
    np.testing.assert_array_equal(new.params["w"], [5, 6])
    assert new.changed().keys() == {"w"} and not m.changed()
    saved = onnx2jax.convert(onnx2jax.save(new, tmp_path / "m.onnx"))
    np.testing.assert_array_equal(saved.params["w"], [5, 6])


BUFFERS: dict[str, Callable[[np.ndarray], Any]] = {
    "an array": lambda a: a,
    "a read-only view": lambda a: np.broadcast_to(a, a.shape),
    "a bytearray": lambda a: a.data.cast("B"),
    "a read-only memoryview": lambda a: a.data.toreadonly().cast("B"),
    "an array over a read-only memoryview": lambda a: np.frombuffer(a.data.toreadonly(), np.uint8),
}


def in_memory() -> onnx.ModelProto:
    """``scaled`` with its weight in the buffer #w."""
    proto = scaled(raw=True)
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="#w")
    return proto


@pytest.mark.parametrize("name", BUFFERS)
def test_editing_a_source_buffer_has_no_effect(name: str) -> None:
    mine = np.frombuffer(bytearray(np.float32([5, 6]).tobytes()), np.float32)
    m = onnx2jax.convert(in_memory(), buffers={"#w": BUFFERS[name](mine)})
    mine[:] = 0
    np.testing.assert_array_equal(m(np.ones(2, np.float32)), [15, 26])
    np.testing.assert_array_equal(m.params["w"], [5, 6])


def test_a_masked_buffer_is_rejected() -> None:
    masked = np.ma.masked_array(np.float32([5, 6]), [True, False])
    with pytest.raises(InputTypeError, match=r"buffers\['#w'\] is a masked array.*buffer.filled"):
        onnx2jax.convert(in_memory(), buffers={"#w": masked})


def test_params_are_a_dict() -> None:
    m = onnx2jax.convert(mlp())
    gradients = jax.jit(jax.grad(lambda p: m.apply(p, X).sum()))(m.params)
    new = jax.tree.map(lambda p, g: p - g, m.params, gradients)
    assert type(new) is type(m.params) is dict and new.keys() == m.params.keys()
    both = m.params | {"b1": np.ones(8, np.float32)}
    np.testing.assert_allclose(m.apply(both, X), m.with_params({"b1": both["b1"]})(X), rtol=1e-6)


def test_apply_with_all_weights_reads_no_external_data(tmp_path: Path) -> None:
    m = onnx2jax.convert(onnx2jax.save(product(), tmp_path / "m.onnx", external_data=True))
    (tmp_path / "m.onnx.data").write_bytes(b"")
    x = np.ones((1, 256), np.float32)
    np.testing.assert_array_equal(m.apply({"w": np.ones((256, 256), np.float32)}, x), np.full((1, 256), 256))
    with pytest.raises(ExternalDataError, match="was changed after"):
        m.apply({}, x)


# -------------------------------------------------------------------------------------------- random numbers


def noise() -> onnx.ModelProto:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["y"], name="noise")]
    return model(nodes, [value("x", np.float32, [3])], [value("y", np.float32, [3])], {})


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.jacfwd], ids=lambda t: t.__name__)
def test_random_numbers_inside_a_transformation_need_a_key(transform: Any) -> None:
    m = onnx2jax.convert(noise())
    x = np.zeros((3, 3) if transform is jax.vmap else 3, np.float32)
    with pytest.raises(RandomKeyError, match=r"pass a key, model\(\.\.\., rng=jax\.random\.key\(0\)\)"):
        transform(lambda x: m(x))(x)
    with pytest.raises(RandomKeyError):
        jax.jit(lambda: m(np.zeros(3, np.float32)))()
    drawn = jax.jit(lambda x, key: m(x, rng=key))
    a, b = (drawn(x[..., :3].reshape(-1)[:3], jax.random.key(seed)) for seed in (0, 1))
    assert (np.asarray(a) != np.asarray(b)).all()


# ------------------------------------------------------------------------------------------ names of inputs


@pytest.mark.usefixtures("in_32_bits")
def test_calls_and_apply_widen_32_bit_integers() -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    m = onnx2jax.convert(model([node], [value("x", np.int64, [3])], [value("y", np.int64, [3])], {}))
    for y in (m(jnp.arange(3)), m.apply({}, jnp.arange(3))):
        assert y.dtype == np.int64
    (y,) = m.run(None, {"x": jnp.arange(3)})
    np.testing.assert_array_equal(y, [0, 1, 2])


NAMES = ["self", "params", "rng", "args", "named", "feeds", "output_names"]


def test_inputs_may_have_any_name() -> None:
    node = helper.make_node("Sum", NAMES, ["y"])
    m = onnx2jax.convert(model([node], [value(n, np.float32, [2]) for n in NAMES], [value("y", np.float32, [2])], {}))
    feeds = {n: np.full(2, 10.0**i, np.float32) for i, n in enumerate(NAMES)}
    for y in (m(**feeds), m.apply({}, **feeds), m.run(None, feeds)[0], jax.jit(lambda f: m.apply({}, **f))(feeds)):
        np.testing.assert_array_equal(y, [1111111, 1111111])


def test_an_input_named_rng_and_a_key() -> None:
    nodes = [helper.make_node("RandomNormalLike", ["rng"], ["n"]), helper.make_node("Add", ["rng", "n"], ["y"])]
    m = onnx2jax.convert(model(nodes, [value("rng", np.float32, [2])], [value("y", np.float32, [2])], {}))
    x, key = np.float32([100, 200]), jax.random.key(3)
    np.testing.assert_array_equal(m(x, rng=key), m.apply({}, x, rng=key))
    assert (np.abs(np.asarray(m(rng=x)) - x) < 50).all()


# ----------------------------------------------------------------------------------------- copies and pickles


def test_a_model_can_be_pickled_and_copied(tmp_path: Path) -> None:
    path = onnx2jax.save(mlp(), tmp_path / "m.onnx", external_data=True, size_threshold=0)
    m = onnx2jax.convert(path, dims={"batch": 2}).with_params({"b2": np.float32([5, 6])})
    assert copy.deepcopy(m) is m
    again = pickle.loads(pickle.dumps(m))
    for other in (copy.copy(m), again):
        np.testing.assert_array_equal(other(X), m(X))
        assert repr(other) == repr(m) and other.changed().keys() == {"b2"}
    with pytest.raises(ValueError, match="read-only"):
        again.params["w1"][0] = 0
    saved = onnx2jax.convert(onnx2jax.save(again, tmp_path / "again.onnx"))
    np.testing.assert_array_equal(saved(X), m(X))


def test_a_pickled_model_contains_its_weights_once() -> None:
    m = onnx2jax.convert(product())
    size = m.params["w"].nbytes
    assert size < len(pickle.dumps(m)) < 2.2 * size  # once as an array, once in its file


def test_unpickling_rejects_changed_files(tmp_path: Path) -> None:
    path = onnx2jax.save(mlp(), tmp_path / "m.onnx", external_data=True, size_threshold=0)
    again = pickle.loads(pickle.dumps(onnx2jax.convert(path)))
    data = tmp_path / "m.onnx.data"
    data.write_bytes(bytes(data.stat().st_size + 1))
    np.testing.assert_array_equal(again(X), onnx2jax.convert(mlp())(X))
    with pytest.raises(ExternalDataError, match="was changed after the model was pickled"):
        onnx2jax.save(again, tmp_path / "again.onnx")


def test_repr_shows_inputs_and_outputs() -> None:
    lines = repr(onnx2jax.convert(onnx2jax.demo_model())).splitlines()
    assert lines == [
        "Model 'digits': (image: float32[batch, 1, 8, 8]) -> (logits: float32[batch, 10])",
        "  17 parameters, 135,528 bytes; 12 nodes; ai.onnx 22",
    ]


def test_custom_operators_are_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPERATORS", {**registry._OPERATORS})
    onnx2jax.ops.op("Twice", domain="test.immutable")(lambda x: x * 2)
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="test.immutable")]
    proto = model(nodes, [value("x", np.float32, [2])], [value("y", np.float32, [2])], {})
    proto.opset_import.add(domain="test.immutable", version=1)
    data = pickle.dumps(onnx2jax.convert(proto))
    np.testing.assert_array_equal(pickle.loads(data)(np.ones(2, np.float32)), [2, 2])
    del registry._OPERATORS["test.immutable", "Twice"]
    with pytest.raises(ValueError, match=r"test\.immutable\.Twice since opset 1.*register it with onnx2jax\.op"):
        pickle.loads(data)


def test_writing_to_results_does_not_change_later_results() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y, float[3] c, int64[1] s)
        { y = Neg(x)  c = Constant<value_floats=[1.0, 2.0, 3.0]>()  s = Shape(x) }"""
    )
    m = onnx2jax.convert(proto)
    for _ in range(3):  # the first call, and bound calls
        for result, expected in zip(m.run(None, {"x": X[0]}), ([-1] * 4, [1, 2, 3], [4]), strict=True):
            np.testing.assert_array_equal(result, expected)
            with suppress(ValueError):  # read-only arrays cannot be written
                result += 1


@pytest.mark.parametrize("node", ["y = Neg(x)", "y = Unique(x)"], ids=["compiled", "on the host"])
def test_results_of_run_do_not_alias_the_inputs(node: str) -> None:
    """Covers an output that is an input, and a view of x computed on the host."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[n, m] x) => (float[n, m] x, float y, float[m, n] z)
        {{ z = Transpose<perm = [1, 0]>(x)  {node} }}"""
    )
    proto.graph.output[1].type.tensor_type.ClearField("shape")
    m = onnx2jax.convert(proto)
    for _ in range(2):
        x = X.copy()
        passed, _, view = m.run(None, {"x": x})
        x += 5
        assert passed.max() == view.max() == 1
