"""A user's mesh with Explicit axes, the default of ``jax.make_mesh``: results equal those of one device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from onnx import TensorProto, helper

import onnx2jax
from tests.support import resumption
from tests.support.helpers import mesh
from tests.support.models import cut_in_the_middle, mlp, model, one_node, value
from tests.support.tiers import canaries, extended
from tests.support.training import CLASSES, cross_entropy, image_classifier, linear

DATA, BOTH = mesh(data=8), mesh(data=4, model=2)
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(16, 1, 4, 4)).astype(np.float32)
BATCH = {"x": resumption.IMAGES[:16], "label": resumption.LABELS[:16]}
STEPS = 3

Scope = Callable[[jax.sharding.Mesh], Any]
SCOPES: dict[str, Scope] = {"alone": contextlib.nullcontext, "in set_mesh": jax.set_mesh}
in_or_out = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)


def put(tree: Any, over: jax.sharding.Mesh, spec: P) -> Any:
    with jax.enable_x64(True):
        return jax.device_put(tree, NamedSharding(over, spec))


@pytest.fixture(scope="module")
def classifier() -> onnx2jax.Model:
    return onnx2jax.convert(image_classifier())


def results_and_gradients(m: onnx2jax.Model) -> Any:
    """A function of parameters and images: the logits and the gradients with respect to the parameters."""

    def both(params: Any, images: Any) -> Any:
        return m.apply(params, images), jax.grad(lambda p: m.apply(p, images)[:, 1].sum())(params)

    return jax.jit(both)


@in_or_out
def test_a_sharded_batch(scope: Scope, classifier: onnx2jax.Model) -> None:
    m = classifier
    compute = results_and_gradients(m)
    expected, by_weight = compute(m.params, IMAGES)
    images, params = put(IMAGES, DATA, P("data")), put(m.params, DATA, P())
    with scope(DATA):
        result, gradients = compute(params, images)
        calls = {
            "call": m(images),
            "jit": result,
            "jit, weights of NumPy": jax.jit(m.apply)(m.params, images),
            "vmap": jax.jit(jax.vmap(lambda image: m.apply(params, image[None])[0]))(images),
        }
        for how, result in calls.items():
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4, err_msg=how)
            assert result.sharding.mesh.axis_types == (AxisType.Explicit,)
            assert result.sharding.shard_shape(result.shape) == (2, CLASSES)
        for name, g in gradients.items():
            np.testing.assert_allclose(g, by_weight[name], rtol=1e-3, atol=1e-3)
            assert g.sharding.is_fully_replicated


def test_each_device_computes_its_shard_only(classifier: onnx2jax.Model) -> None:
    images, params = put(IMAGES, DATA, P("data")), put(classifier.params, DATA, P())
    np.testing.assert_allclose(classifier.apply(params, images), classifier(IMAGES), rtol=1e-4, atol=1e-4)
    text = jax.jit(classifier.apply).lower(params, images).compile().as_text()
    assert f"f32[2,{CLASSES}]" in text and "all-gather" not in text


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


def test_inside_a_shard_map(classifier: onnx2jax.Model) -> None:
    m = classifier
    shard = jax.jit(jax.shard_map(lambda x: m.apply(m.params, x), mesh=DATA, out_specs=P("data")))
    np.testing.assert_allclose(shard(put(IMAGES, DATA, P("data"))), m(IMAGES), rtol=1e-4, atol=1e-4)


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
    for _ in range(STEPS):
        state, outputs = trainer.step(state, batch)
        seen.append(float(outputs["loss"]))
    return state, seen


@pytest.fixture(scope="module")
def on_one_device() -> tuple[onnx2jax.TrainingModel, Any, list[float]]:
    """A training model, its initial state, and its losses."""
    trainer = onnx2jax.TrainingModel(resumption.classifier(), donate=False, rng=5)
    start = trainer.init()
    return trainer, start, trained(trainer, start, BATCH)[1]


def test_a_mesh_of_the_models_inside_set_mesh(classifier: onnx2jax.Model, on_one_device: Any) -> None:
    m = onnx2jax.convert(image_classifier(), mesh=DATA)
    with jax.set_mesh(DATA):
        np.testing.assert_allclose(m(IMAGES), classifier(IMAGES), rtol=1e-4, atol=1e-4)
        spread = onnx2jax.TrainingModel(resumption.classifier(), mesh=DATA, rng=5)
        inside = [float(spread.train_step(BATCH)["loss"]) for _ in range(STEPS)]
        drawn = onnx2jax.TrainingModel(linear(), mesh=DATA)
        drawn.initialize(rng=0)
    np.testing.assert_allclose(inside, on_one_device[2], rtol=1e-5)
    assert np.asarray(drawn.state.variables["w"]).all()


@pytest.mark.parametrize(
    ("scope", "whole"), canaries(itertools.product(SCOPES, (True, False)), [("alone", False), ("in set_mesh", True)])
)
def test_training_by_training_info(scope: str, whole: bool, on_one_device: Any) -> None:
    """``whole``: the state is on every device, rather than on one."""
    trainer, start, expected = on_one_device
    batch = put(BATCH, DATA, P("data"))
    with SCOPES[scope](DATA):
        given = put(start, DATA, P()) if whole else start
        state, seen = trained(trainer, given, batch)
        np.testing.assert_allclose(seen, expected, rtol=1e-5)
        assert not whole or {v.sharding.mesh for v in state.variables.values()} == {DATA}

        def body(state: Any, _: Any) -> Any:  # the state keeps its type, as scan requires
            state, outputs = trainer.step(state, batch)
            return state, outputs["loss"]

        if whole:
            with jax.enable_x64(True):
                _, scanned = jax.jit(lambda s: jax.lax.scan(body, s, None, length=STEPS))(given)
            np.testing.assert_allclose(scanned, expected, rtol=1e-5)


def fine_tuned(batch: Any, start: Callable[[Any], Any], options: dict[str, Any]) -> list[float]:
    """The losses of two steps, and the loss afterwards."""

    tuned = onnx2jax.finetune(onnx2jax.convert(image_classifier()), cross_entropy, optax.sgd(0.1), **options)
    state, seen = start(tuned.init()), []
    for _ in range(2):
        state, metrics = tuned.step(state, batch)
        seen.append(float(metrics["loss"]))
    assert tuned.compilations == 1
    return [*seen, float(tuned.evaluate(state, batch)["loss"])]


@pytest.mark.parametrize(
    ("options", "scopes"),
    [
        ({"batchnorm": "train"}, ["in set_mesh"]),
        ({"accumulate": 2}, ["alone"]),
        extended({"batchnorm": "train"}, ["alone"]),
        extended({"accumulate": 2}, ["in set_mesh"]),
        extended({}, [*SCOPES]),
    ],
    ids=str,
)
def test_fine_tuning(options: dict[str, Any], scopes: Collection[str]) -> None:
    batch = {"image": IMAGES, "label": np.arange(16, dtype=np.int32) % CLASSES}
    expected = fine_tuned(batch, lambda state: state, options)
    assert expected[-1] < expected[0]
    divided = put(batch, DATA, P("data"))
    for scope in scopes:
        with SCOPES[scope](DATA):
            found = fine_tuned(divided, lambda state: put(state, DATA, P()), options)
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=scope)
