"""Saving trained models: other runtimes run them, and training resumes from the file exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax.errors import InputError, InputNameError, InputShapeError
from tests.support import resumption
from tests.support.helpers import mesh
from tests.support.training import cross_entropy, info, trained, training

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

BATCH = {"x": resumption.IMAGES[:32], "label": resumption.LABELS[:32]}
OWN = "training_info[0].algorithm"


def stepped(model: onnx2jax.TrainingModel, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = model.step(state, BATCH)
    return state


def assert_same(state: Any, other: Any) -> None:
    state, other = (replace(s, key=jax.random.key_data(s.key)) for s in (state, other))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), state, other)


def test_an_untrained_model_is_written_unchanged(tmp_path: Path) -> None:
    message = resumption.classifier()
    path = onnx2jax.save(onnx2jax.TrainingModel(message), tmp_path / "copy.onnx")
    assert onnx.load(path) == message


def test_training_resumes_from_the_file(tmp_path: Path) -> None:
    model = onnx2jax.TrainingModel(resumption.classifier(), donate=False)
    state = stepped(model, model.init(), 7)
    path = onnx2jax.save(model, tmp_path / "trained.onnx", state=state)
    again = onnx2jax.TrainingModel(path, donate=False)
    assert int(again.state.own[0]["t"]) == 7
    resumed = replace(again.init(), key=state.key)
    assert_same(resumed, state)
    assert_same(stepped(again, resumed, 5), stepped(model, state, 5))
    # All but the values is unchanged, with each tensor in the same field as before.
    before, after = resumption.classifier(), onnx.load(path)
    for message in (before, after):
        for graph in (message.graph, message.training_info[0].algorithm):
            for tensor in graph.initializer:
                assert tensor.HasField("raw_data") == (tensor.name not in ("t", "rate", "one"))
                tensor.CopyFrom(onnx.TensorProto(name=tensor.name, dims=tensor.dims))
    assert after == before


def test_equivalent_ways_to_save(tmp_path: Path) -> None:
    model = onnx2jax.TrainingModel(resumption.classifier())
    model.train_step(BATCH)
    own = onnx2jax.save(model, tmp_path / "own")
    given = onnx2jax.save(model, tmp_path / "given", state=model.state)
    params = onnx2jax.save(resumption.classifier(), tmp_path / "params", params=model.changed())
    assert onnx.load(own) == onnx.load(given) == onnx.load(params) != resumption.classifier()


def test_onnxruntime_runs_the_trained_model(tmp_path: Path) -> None:
    model = onnx2jax.TrainingModel(resumption.classifier())
    for _ in range(20):
        model.train_step(BATCH)
    ours = np.asarray(model.infer(x=BATCH["x"]))
    untrained = onnx2jax.convert(resumption.classifier())(BATCH["x"])
    assert (ours.argmax(-1) != untrained.argmax(-1)).any()
    for i, source in enumerate((model, model.to_model(), model.to_model(model.state))):
        path = onnx2jax.save(source, tmp_path / f"{i}.onnx")
        (theirs,) = onnxruntime.InferenceSession(path).run(None, {"x": BATCH["x"]})
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(theirs.argmax(-1), ours.argmax(-1))
        np.testing.assert_array_equal(onnx2jax.convert(path)(BATCH["x"]), ours)


def test_integer_variables_are_saved(tmp_path: Path) -> None:
    count = training(
        "g (int64[k] x) => (int64[k] y) <int64 n = {3}> { y = Add(x, n) }",
        info("a () => (int64 m) <int64 one = {1}> { m = Add(n, one) }", {"n": "m"}),
    )
    model = onnx2jax.TrainingModel(count)
    x = np.array([10])
    model.train_step(x=x)
    assert int(model.to_model()(x)[0]) == 14
    for source in (model, model.to_model()):
        assert onnx2jax.convert(onnx2jax.save(source, tmp_path / "n.onnx"))(x).tolist() == [14]


def test_finetuned_models(tmp_path: Path) -> None:
    model = onnx2jax.convert(resumption.network())

    tuned = onnx2jax.finetune(model, cross_entropy, optax.adam(0.1), batchnorm="train")
    state, _ = trained(tuned, BATCH, 5)
    ours = np.asarray(tuned.to_model(state)(BATCH["x"]))
    assert np.abs(ours - model(BATCH["x"])).max() > 0.1
    for i, (source, params) in enumerate(((tuned.to_model(state), None), (model, tuned.params(state)))):
        path = onnx2jax.save(source, tmp_path / f"{i}.onnx", params=params)
        (theirs,) = onnxruntime.InferenceSession(path).run(None, {"x": BATCH["x"]})
        np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(onnx2jax.convert(path)(BATCH["x"]), ours)


def test_constants_of_an_algorithm_can_be_changed(tmp_path: Path) -> None:
    path = onnx2jax.save(resumption.classifier(), tmp_path / "m", params={f"{OWN}/rate": np.float32(0)})
    model = onnx2jax.TrainingModel(path)
    before = model.infer(x=BATCH["x"])
    model.train_step(BATCH)
    np.testing.assert_array_equal(model.infer(x=BATCH["x"]), before)
    assert int(model.state.own[0]["t"]) == 1


def test_a_sharded_state_with_external_data(tmp_path: Path) -> None:
    model = onnx2jax.TrainingModel(
        resumption.classifier(), donate=False, mesh=mesh(data=2, model=4), shardings={"w": P(None, "model")}
    )
    state = stepped(model, model.init(), 3)
    path = onnx2jax.save(model, tmp_path / "m.onnx", state=state, external_data=True, size_threshold=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    algorithm = onnx.load(path, load_external_data=False).training_info[0].algorithm
    assert all(t.data_location == onnx.TensorProto.EXTERNAL for t in algorithm.initializer)
    assert_same(replace(onnx2jax.TrainingModel(path).init(), key=state.key), state)


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    model = onnx2jax.TrainingModel(resumption.classifier())
    path = tmp_path / "m.onnx"
    with pytest.raises(InputError, match=r"model\.init\(\) returns one that fits"):
        onnx2jax.save(model, path, state=replace(model.init(), own=()))
    with pytest.raises(InputShapeError, match=r"params\['w'\] must have shape \[6, 4\], not \[2\]\. .*new_shapes"):
        onnx2jax.save(model, path, params={"w": np.zeros(2, np.float32)})
    with pytest.raises(InputNameError, match=r"there are \['training_info\[0\]\.algorithm/"):
        onnx2jax.save(model, path, params={f"{OWN}/vv": np.zeros(2)})
    with pytest.raises(TypeError, match=r"save\(tuned\.to_model\(state\), path\)"):
        onnx2jax.save(resumption.classifier(), path, state=model.state)
    assert not path.exists()
