"""A user's mesh with Explicit axes, the default of ``jax.make_mesh``: results equal those of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from onnx import TensorProto, helper

import onnx2jax
from tests.support.helpers import mesh
from tests.support.models import cut_in_the_middle, mlp, model, one_node, value

DATA, BOTH = mesh(data=8), mesh(data=4, model=2)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(16, 1, 8, 8)).astype(np.float32)
BATCH = {"image": RNG.normal(size=(32, 64)).astype(np.float32), "label": RNG.integers(0, 10, 32)}

Scope = Callable[[jax.sharding.Mesh], Any]
SCOPES: dict[str, Scope] = {"alone": contextlib.nullcontext, "in set_mesh": jax.set_mesh}
in_or_out = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)


def put(tree: Any, over: jax.sharding.Mesh, spec: P) -> Any:
    with jax.enable_x64(True):
        return jax.device_put(tree, NamedSharding(over, spec))


@in_or_out
def test_a_sharded_batch(scope: Scope) -> None:
    m = onnx2jax.convert(onnx2jax.demo_model())
    expected = m(IMAGES)
    gradient = jax.jit(jax.grad(lambda p, x: m.apply(p, x)[:, 3].sum()))
    by_weight = gradient(m.params, IMAGES)
    images, params = put(IMAGES, DATA, P("data")), put(m.params, DATA, P())
    with scope(DATA):
        calls = {
            "call": m(images),
            "apply": m.apply(params, images),
            "jit": jax.jit(m.apply)(params, images),
            "jit, weights of NumPy": jax.jit(m.apply)(m.params, images),
            "vmap": jax.jit(jax.vmap(lambda image: m.apply(params, image[None])[0]))(images),
        }
        for how, result in calls.items():
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4, err_msg=how)
            assert result.sharding.mesh.axis_types == (AxisType.Explicit,)
            assert result.sharding.shard_shape(result.shape) == (2, 10)
        for name, g in gradient(params, images).items():
            np.testing.assert_allclose(g, by_weight[name], rtol=1e-3, atol=1e-3)
            assert g.sharding.is_fully_replicated
    text = jax.jit(m.apply).lower(params, images).compile().as_text()
    assert "f32[2,10]" in text and "all-gather" not in text  # each device computes its shard only


@in_or_out
def test_sharded_weights(scope: Scope) -> None:
    m = onnx2jax.convert(mlp())
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    specs = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}
    params = {n: put(v, BOTH, specs[n]) for n, v in m.params.items()}
    gradient = jax.jit(jax.grad(lambda p, x: (m.apply(p, x) ** 2).sum()))
    expected = gradient(m.params, x)
    with scope(BOTH):
        gradients = gradient(params, put(x, BOTH, P("data")))
    for name, g in gradients.items():
        np.testing.assert_allclose(g, expected[name], rtol=1e-4)
        assert g.sharding.is_equivalent_to(params[name].sharding, g.ndim)


def test_a_mesh_of_the_models_inside_set_mesh() -> None:
    m = onnx2jax.convert(onnx2jax.demo_model(), mesh=DATA)
    alone = onnx2jax.convert(onnx2jax.demo_model())(IMAGES)
    trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    trainer.initialize(rng=0)
    with jax.set_mesh(DATA):
        np.testing.assert_allclose(m(IMAGES), alone, rtol=1e-4, atol=1e-4)
        spread = onnx2jax.TrainingModel(onnx2jax.demo_training_model(), mesh=DATA)
        spread.initialize(rng=0)
        inside = [float(spread.train_step(BATCH)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(inside, [float(trainer.train_step(BATCH)["loss"]) for _ in range(3)], rtol=1e-5)


def test_inside_a_shard_map() -> None:
    m = onnx2jax.convert(onnx2jax.demo_model())
    result = jax.shard_map(lambda x: m.apply(m.params, x), mesh=DATA, out_specs=P("data"))(put(IMAGES, DATA, P("data")))
    np.testing.assert_allclose(result, m(IMAGES), rtol=1e-4, atol=1e-4)


@in_or_out
def test_stages_on_the_host_between(scope: Scope) -> None:
    m = onnx2jax.convert(cut_in_the_middle())
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    expected = m(x)
    with scope(DATA):
        for result, e in zip(m(put(x, DATA, P("data"))), expected, strict=True):
            np.testing.assert_allclose(result, e, rtol=1e-5)


def test_results_that_depend_on_no_argument() -> None:
    m = onnx2jax.convert(one_node("Shape", {"x": (np.float32, ["n", 4])}))
    assert m(put(np.zeros((8, 4), np.float32), DATA, P("data"))).tolist() == [8, 4]


def test_results_without_elements() -> None:
    proto = one_node("Slice", {"x": (np.float32, ["n", 4]), **{n: (np.int64, [2]) for n in ("starts", "ends")}})
    m = onnx2jax.convert(proto, static={"starts": [0, 4], "ends": [8, 4]})
    assert np.asarray(m(put(np.zeros((8, 4), np.float32), DATA, P("data")))).shape == (8, 0)


def test_sequences() -> None:
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["k", 4])
    node = helper.make_node("SplitToSequence", ["x"], ["s"], axis=0)
    m = onnx2jax.convert(model([node], [value("x", np.float32, ["n", 4])], [sequence]))
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    np.testing.assert_array_equal(np.concatenate(m(put(x, DATA, P("data")))), x)


def trained(trainer: onnx2jax.TrainingModel, state: Any, batch: Any) -> tuple[Any, list[float]]:
    seen = []
    for _ in range(4):
        state, outputs = trainer.step(state, batch)
        seen.append(float(outputs["loss"]))
    return state, seen


@pytest.fixture(scope="module")
def on_one_device() -> tuple[onnx2jax.TrainingModel, Any, list[float]]:
    """A training model, its initial state, and its losses."""
    trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model(), donate=False)
    start: Any = trainer.initialize(trainer.init(), 0)
    return trainer, start, trained(trainer, start, BATCH)[1]


@in_or_out
@pytest.mark.parametrize("whole", [True, False], ids=["state on every device", "state on one"])
def test_training_by_training_info(scope: Scope, whole: bool, on_one_device: Any) -> None:
    trainer, start, expected = on_one_device
    batch = put(BATCH, DATA, P("data"))
    with scope(DATA):
        given = put(start, DATA, P()) if whole else start
        state, seen = trained(trainer, given, batch)
        np.testing.assert_allclose(seen, expected, rtol=1e-5)
        assert not whole or {v.sharding.mesh for v in state.variables.values()} == {DATA}

        def body(state: Any, _: Any) -> Any:  # the state keeps its type, as scan requires
            state, outputs = trainer.step(state, batch)
            return state, outputs["loss"]

        if whole:
            with jax.enable_x64(True):
                _, scanned = jax.jit(lambda s: jax.lax.scan(body, s, None, length=4))(given)
            np.testing.assert_allclose(scanned, expected, rtol=1e-5)


def fine_tuned(batch: Any, start: Callable[[Any], Any], options: dict[str, Any]) -> list[float]:
    """The losses of three steps, and the loss afterwards."""

    def loss(logits: Any, batch: dict[str, Any]) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    tuned = onnx2jax.finetune(onnx2jax.convert(onnx2jax.demo_model()), loss, optax.sgd(1e-3), **options)
    state, seen = start(tuned.init()), []
    for _ in range(3):
        state, metrics = tuned.step(state, batch)
        seen.append(float(metrics["loss"]))
    assert tuned.compilations == 1
    return [*seen, float(tuned.evaluate(state, batch)["loss"])]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"batchnorm": "train"}], ids=str)
def test_fine_tuning(options: dict[str, Any]) -> None:
    batch = {"image": IMAGES, "label": np.arange(16, dtype=np.int32) % 10}
    expected = fine_tuned(batch, lambda state: state, options)
    divided = put(batch, DATA, P("data"))
    for scope in SCOPES.values():
        with scope(DATA):
            found = fine_tuned(divided, lambda state: put(state, DATA, P()), options)
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=str(scope))
    assert np.isfinite(expected).all()
