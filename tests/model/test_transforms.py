"""grad, vmap, jit and make_jaxpr of apply, on a convolutional, a recurrent and a transformer network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import InputValueError
from tests.support.helpers import mesh
from tests.support.models import mlp, model, value

Network = tuple[onnx.ModelProto, np.ndarray]


def weights(dtype: Any, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: (0.4 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}


def network(nodes: list[Any], dtype: Any, shape: tuple[int, ...], constants: dict[str, np.ndarray]) -> Network:
    x = np.random.default_rng(1).normal(size=shape).astype(dtype)
    proto = model(nodes, [value("x", dtype, ["batch", *shape[1:]])], [value("y", dtype, None)], constants)
    return proto, x


def convolutional(dtype: Any) -> Network:
    """Convolutions of every lowering (3x3, depthwise, 1x1, grouped), batch normalisation, pooling, a dense head."""
    constants = weights(
        dtype, w1=(4, 3, 3, 3), w2=(4, 1, 3, 3), w3=(8, 4, 1, 1), w4=(8, 4, 3, 3), scale=(4,), bias=(4,), head=(8, 5)
    )
    constants |= {"mean": np.zeros(4, dtype), "var": np.ones(4, dtype)}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c1", "scale", "bias", "mean", "var"], ["n1"]),
        helper.make_node("Softplus", ["n1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], group=4),
        helper.make_node("Conv", ["c2", "w3"], ["c3"]),
        helper.make_node("Conv", ["c3", "w4"], ["c4"], group=2),
        helper.make_node("Tanh", ["c4"], ["t"]),
        helper.make_node("AveragePool", ["t"], ["p"], kernel_shape=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "head"], ["y"]),
    ]
    return network(nodes, dtype, (2, 3, 9, 9), constants)


def recurrent(dtype: Any) -> Network:
    """A bidirectional LSTM into a GRU into an RNN, sequence first."""
    constants = weights(
        dtype, w=(2, 16, 3), r=(2, 16, 4), b=(2, 32), gw=(1, 12, 8), gr=(1, 12, 4), rw=(1, 4, 4), rr=(1, 4, 4)
    )
    constants["merged"] = np.array([0, 0, -1])
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["t", "w", "r", "b"], ["l"], hidden_size=4, direction="bidirectional"),
        helper.make_node("Transpose", ["l"], ["lt"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["lt", "merged"], ["lm"]),
        helper.make_node("GRU", ["lm", "gw", "gr"], ["g"], hidden_size=4, linear_before_reset=1),
        helper.make_node("Squeeze", ["g", "one"], ["gs"]),
        helper.make_node("RNN", ["gs", "rw", "rr"], ["", "y"], hidden_size=4),
    ]
    constants["one"] = np.array([1])
    return network(nodes, dtype, (2, 3, 3), constants)


def transformer(dtype: Any) -> Network:
    """One block as exporters write it: shapes computed, heads split by Reshape and Transpose, Gelu by Erf."""
    constants = weights(dtype, qkv=(8, 24), out=(8, 8), up=(8, 16), down=(16, 8), g=(8,), b=(8,))
    constants |= {
        "heads": np.array([0, 0, 3, 2, 4]),
        "merge": np.array([0, 0, 8]),
        "last": np.array(-1),
        "zero": np.array([0]),
        "half": np.array(0.5, dtype),
        "root2": np.array(2**0.5, dtype),
        "onef": np.array(1, dtype),
        "scale": np.array(0.5, dtype),
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "g", "b"], ["n"]),
        helper.make_node("MatMul", ["n", "qkv"], ["p"]),
        helper.make_node("Reshape", ["p", "heads"], ["h"]),
        helper.make_node("Transpose", ["h"], ["ht"], perm=[2, 0, 3, 1, 4]),
        helper.make_node("Split", ["ht"], ["q3", "k3", "v3"], num_outputs=3),
        *(helper.make_node("Squeeze", [f"{n}3", "zero"], [n]) for n in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["ss"]),
        helper.make_node("Softmax", ["ss"], ["a"]),
        helper.make_node("MatMul", ["a", "v"], ["o"]),
        helper.make_node("Transpose", ["o"], ["ot"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["ot", "merge"], ["om"]),
        helper.make_node("MatMul", ["om", "out"], ["oo"]),
        helper.make_node("Add", ["x", "oo"], ["r"]),
        helper.make_node("MatMul", ["r", "up"], ["u"]),
        helper.make_node("Div", ["u", "root2"], ["u2"]),
        helper.make_node("Erf", ["u2"], ["e"]),
        helper.make_node("Add", ["e", "onef"], ["e1"]),
        helper.make_node("Mul", ["u", "e1"], ["ue"]),
        helper.make_node("Mul", ["ue", "half"], ["gelu"]),
        helper.make_node("MatMul", ["gelu", "down"], ["d"]),
        helper.make_node("Add", ["r", "d"], ["y"]),
    ]
    return network(nodes, dtype, (2, 4, 8), constants)


NETWORKS: dict[str, Callable[[Any], Network]] = {
    "convolutional": convolutional,
    "recurrent": recurrent,
    "transformer": transformer,
}


@pytest.fixture(scope="module", params=NETWORKS)
def make(request: pytest.FixtureRequest) -> Callable[[Any], Network]:
    return NETWORKS[request.param]


@pytest.fixture(scope="module")
def difference(make: Callable[[Any], Network]) -> tuple[float, dict[str, np.ndarray]]:
    """The directional derivative of the sum of squares by finite differences in float64, and the random direction."""
    proto, x = make(np.float64)
    exact = onnx2jax.convert(proto)
    rng = np.random.default_rng(2)
    direction = {k: rng.normal(size=v.shape) for k, v in exact.params.items()}
    step = 1e-5
    values = []
    for t in (step, -step):
        moved = exact.with_params({k: v + t * direction[k] for k, v in exact.params.items()})
        values.append(float((moved.run(None, {"x": x})[0] ** 2).sum()))
    return (values[0] - values[1]) / (2 * step), direction


def along(direction: dict[str, np.ndarray], gradients: Any) -> float:
    return sum(float((np.asarray(gradients[k], np.float64) * v).sum()) for k, v in direction.items())


@pytest.fixture(scope="module")
def converted(make: Callable[[Any], Network]) -> tuple[onnx2jax.Model, np.ndarray, np.ndarray, np.ndarray]:
    """The model, its input, and onnxruntime's results for the batch and for its rows alone."""
    import onnxruntime

    proto, x = make(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    batch, *rows = (session.run(None, {"x": some})[0] for some in (x, *x[:, None]))
    return onnx2jax.convert(proto), x, batch, np.stack(rows)


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["32-bit", "64-bit"])
def test_transformations_in_one_program(converted: Any, difference: Any, x64: bool) -> None:
    m, x, batch, rows = converted
    expected, direction = difference

    @jax.jit
    def results(params: Any, x: Any) -> tuple[Any, ...]:
        # A batch of batches of one; the recurrent network's output has the batch on another axis.
        mapped = jax.vmap(lambda row: m.apply(params, row[None]))(x)
        gradients = jax.grad(lambda p: (m.apply(p, x) ** 2).sum())(params)
        each = jax.vmap(jax.grad(lambda row: (m.apply(params, row[None]) ** 2).sum()))(x)
        return m.apply(params, x), mapped, gradients, each, jax.grad(lambda x: (m.apply(params, x) ** 2).sum())(x)

    with jax.enable_x64(x64):
        plain, mapped, gradients, each, together = results(m.params, x)
        jaxpr = jax.make_jaxpr(m.apply)(m.params, x)
    np.testing.assert_allclose(plain, batch, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mapped, rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(each, together, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(along(direction, gradients), expected, rtol=1e-3)
    assert "dot_general" in str(jaxpr)
    assert [a.dtype for a in (*jaxpr.out_avals, plain, each)] == [np.float32] * 3
    assert {k: v.dtype for k, v in gradients.items()} == {k: v.dtype for k, v in m.params.items()}


@pytest.mark.extended
def test_gradients_in_float64_match_finite_differences(make: Callable[[Any], Network], difference: Any) -> None:
    expected, direction = difference
    proto, x = make(np.float64)
    m = onnx2jax.convert(proto)
    with jax.enable_x64(True):
        gradients = jax.jit(jax.grad(lambda p: (m.apply(p, x) ** 2).sum()))(m.params)
    np.testing.assert_allclose(along(direction, gradients), expected, rtol=1e-5)


def test_networks_match_onnxruntime(converted: Any) -> None:
    m, x, batch, _ = converted
    np.testing.assert_allclose(m.run(None, {"x": x})[0], batch, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op_type", ["ArgMax", "CumSum", "TopK", "NonZero", "Multinomial", "MaxPool"])
def test_operators_of_64_bit_results_lower_in_a_32_bit_jit(op_type: str) -> None:
    """JAX lowers some primitives in the caller's mode, after our x64 scope has ended."""
    x = np.random.default_rng(0).normal(size=(1, 2, 6)).astype(np.float32)
    extra: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    constants: dict[str, np.ndarray] = {}
    names, outputs = ["x"], ["y"]
    if op_type == "CumSum":
        names, constants = ["i", "axis"], {"axis": np.array(2), "i": np.arange(12).reshape(1, 2, 6)}
    if op_type == "TopK":
        names, outputs, constants = ["x", "k"], ["", "y"], {"k": np.array([3])}
    if op_type == "MaxPool":
        outputs, attributes = ["", "y"], {"kernel_shape": [2]}
    if op_type == "Multinomial":
        x, attributes, extra = x[0], {"sample_size": 4, "dtype": 7}, {"rng": jax.random.key(0)}
    node = helper.make_node(op_type, names, outputs, name="it", **attributes)
    proto = model([node], [value("x", np.float32, list(x.shape))], [value("y", np.int64, None)], constants)
    options = {"max_size": {"it": 12}} if op_type == "NonZero" else {}
    m = onnx2jax.convert(proto, **options)  # type: ignore[arg-type]
    compiled = jax.jit(lambda x: m.apply({}, x, **extra))(x)
    for ours, expected in zip(jax.tree.leaves(compiled), jax.tree.leaves(m(x, **extra)), strict=True):
        assert ours.dtype == np.int64
        np.testing.assert_array_equal(ours, expected)


def test_tangents_may_be_python_numbers() -> None:
    square = model(
        [helper.make_node("Mul", ["x", "x"], ["y"])], [value("x", np.float32, [])], [value("y", np.float32, [])]
    )
    slope = jax.jvp(lambda x: onnx2jax.convert(square).apply({}, x), (3.0,), (1.0,))[1]
    assert slope == 6 and slope.dtype == np.float32


# ---------------------------------------------------------------------------------------------- used first inside


def transformed(how: str, f: Any, x: Any) -> Any:
    match how:
        case "jit":
            return jax.jit(f)(x)
        case "vmap":
            return jax.vmap(lambda row: f(row[None])[0])(x)
        case "scan":
            return jax.lax.scan(lambda carry, row: (carry, f(row[None])[0]), 0, x)[1]
        case "checkpoint":
            return jax.checkpoint(f)(x)
        case "eval_shape":
            return jax.eval_shape(f, x)
        case "shard_map":
            spec = jax.sharding.PartitionSpec("data")
            return jax.shard_map(f, mesh=compat.auto(mesh(data=4)), in_specs=spec, out_specs=spec)(x)
        case _:
            return jax.jvp(f, (x,), (x,))[0]


IMAGES = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)


def converted_and_called(x: Any) -> tuple[Any, tuple[Any, ...]]:
    """Results of new models, and the models."""
    m = onnx2jax.convert(mlp())
    t = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    tuned = onnx2jax.finetune(m, lambda logits, _: (logits**2).mean(), optax.sgd(1e-3))
    return called(m, t, x), (m, t, tuned)


def called(m: Any, t: Any, x: Any) -> Any:
    return m(x[:, :4]).sum(-1, keepdims=True) + t.infer(image=x)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return np.asarray(converted_and_called(IMAGES)[0])


MORE = [pytest.param(how, marks=pytest.mark.extended) for how in ("vmap", "scan", "checkpoint", "jvp")]


@pytest.mark.parametrize("how", ["jit", "eval_shape", "shard_map", *MORE])
def test_first_use_inside_a_transformation_leaks_no_tracers(how: str, expected: np.ndarray) -> None:
    kept: list[Any] = []

    def inside(x: Any) -> Any:
        result, kept[:] = converted_and_called(x)
        return result

    assert transformed(how, inside, IMAGES).shape == (4, 10)
    m, t, tuned = kept
    np.testing.assert_allclose(called(m, t, IMAGES), expected, rtol=1e-4, atol=1e-4)
    state, metrics = tuned.step(tuned.init(), {"x": IMAGES[:, :4]})
    assert np.isfinite(metrics["loss"]) and state.step == 1


def test_programs_for_one_platform_have_no_branches_by_platform() -> None:
    """``make_jaxpr`` of a model shows primitives that every interpreter of jaxprs knows."""
    model = onnx2jax.convert(onnx2jax.demo_model())
    x = np.random.default_rng(0).normal(size=(2, 1, 8, 8)).astype(np.float32)
    here = model.with_options(platform="cpu")
    with jax.enable_x64(True):
        texts = [str(jax.make_jaxpr(m)(x)) for m in (model, here)]
    assert ["platform_index" in text for text in texts] == [True, False]
    np.testing.assert_allclose(here(x), model(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.with_options(platform="tpu")(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputValueError, match="platform is 'gpu'; it is one of cpu, cuda, rocm, tpu"):
        model.with_options(platform="gpu")
