"""Fine-tuning of models that compute in bfloat16 or float16: float32 masters, and scaling of float16's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax.errors import InputTypeError
from onnx2jax.training import objective
from tests.support.helpers import mesh
from tests.support.models import mlp
from tests.support.tiers import extended
from tests.support.training import CLASSES, cross_entropy, image_classifier, trained
from tests.training.test_decoders import IDS, decoder

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

DTYPES = ("bfloat16", "float16")
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 2}
IMAGES = RNG.normal(size=(32, 1, 4, 4)).astype(np.float32)
DIGITS = {"image": IMAGES, "label": IMAGES.reshape(32, -1)[:, 4 : 4 + CLASSES].argmax(1)}


def tuning(
    dtype: str | None, source: Any = None, optimizer: Any = None, loss: Any = cross_entropy, **options: Any
) -> Any:
    model = onnx2jax.convert(mlp() if source is None else source, dtype=dtype, **options.pop("convert", {}))
    return onnx2jax.finetune(model, loss, optimizer or optax.sgd(0.1), **options)


def losses(tuned: Any, batch: Any, steps: int) -> list[float]:
    return trained(tuned, batch, steps)[1]


def types(tree: Any) -> set[Any]:
    return {v.dtype for v in jax.tree.leaves(tree) if jnp.issubdtype(v.dtype, jnp.floating)}


@pytest.mark.parametrize(("dtype", "batchnorm"), [("bfloat16", "train"), ("float16", "frozen")])
def test_the_loss_follows_that_of_float32(dtype: str, batchnorm: str) -> None:
    """Within 2 % of the first loss over 20 steps of Adam, in which it falls to less than half; and the statistics."""
    (state, plain), (narrow, half) = (
        trained(tuning(d, image_classifier(), optax.adam(0.05), batchnorm=batchnorm), DIGITS, 20) for d in (None, dtype)
    )
    assert plain[-1] < plain[0] / 2
    # A step whose gradients overflow is repeated with half the scale.
    skipped = 0 if dtype == "bfloat16" else round(np.log2(objective.FIRST_SCALE / narrow.loss_scale))
    np.testing.assert_allclose(half[skipped:], plain[: 20 - skipped], atol=0.02 * plain[0])
    assert types(narrow) == {np.dtype(np.float32)}
    assert set(narrow.stats) == ({"mean", "var"} if batchnorm == "train" else set())
    for name, value in state.stats.items():
        np.testing.assert_allclose(narrow.stats[name], value, atol=2e-2 * abs(value).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_gradients_and_moments_are_float32(dtype: str, tmp_path: Path) -> None:
    tuned = tuning(dtype, optimizer=optax.adam(0.1))
    state, metrics = tuned.step(tuned.init(), BATCH)
    assert types(state) == types(metrics) == types(tuned.params(state)) == {np.dtype(np.float32)}
    text = str(jax.make_jaxpr(tuned._train_step)(state, tuned._frozen, BATCH))
    assert {"bfloat16": "bf16[8,4]", "float16": "f16[8,4]"}[dtype] in text
    result = tuned.to_model(state)
    assert result.params["w1"].dtype == dtype
    saved = onnx2jax.convert(onnx2jax.save(result, tmp_path / "trained.onnx"))
    np.testing.assert_array_equal(saved.params["w1"], state.params["w1"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_smaller_than_its_resolution_are_not_lost(dtype: str) -> None:
    """A hundred steps of a fiftieth of the distance between neighbours of bfloat16, or a sixth of float16's."""
    step = {"bfloat16": 2.0**-7 / 50, "float16": 2.0**-10 / 6}[dtype]
    tuned = tuning(dtype, optimizer=optax.sgd(step), loss=lambda y, _: -y.sum(), trainable="b2")
    state = tuned.init()
    first, rows = np.asarray(state.params["b2"]), {"x": BATCH["x"][:1]}
    for _ in range(100):
        state, _ = tuned.step(state, rows)
    np.testing.assert_allclose(state.params["b2"] - first, 100 * step, rtol=1e-3)


OPTIONS: dict[str, dict[str, Any]] = {
    "microbatches": {"accumulate": 2},
    "remat": {"remat": ["hidden", "[ah]*"]},
    "mesh": {"mesh": mesh(data=4, model=2), "shardings": {"w1": P(None, "model")}},
    "stages": {"convert": {"stages": 2, "microbatches": 2}},
}


@pytest.mark.parametrize("name", ["microbatches", "mesh", extended("remat"), extended("stages")])
def test_other_options(name: str) -> None:
    """With float16, which has the state of bfloat16 and a scale."""
    plain = losses(tuning(None), BATCH, 3)
    np.testing.assert_allclose(losses(tuning("float16", **OPTIONS[name]), BATCH, 3), plain, atol=0.02)


def test_adapters() -> None:
    half, plain = tuning("float16", lora=2), tuning(None, lora=2)
    state, found = trained(half, BATCH, 3)
    np.testing.assert_allclose(found, losses(plain, BATCH, 3), atol=0.02)
    assert types(state) == {np.dtype(np.float32)}
    assert half._frozen["w1"].dtype == np.float16  # what is not trained takes half the memory
    np.testing.assert_allclose(half.to_model(state)(BATCH["x"]), plain.to_model(state)(BATCH["x"]), atol=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", extended("float16")])
def test_a_decoder_learns(dtype: str) -> None:
    plain, half = (
        losses(tuning(d, decoder(), optax.sgd(0.5), loss="next_token"), {"input_ids": IDS}, 3) for d in (None, dtype)
    )
    assert plain[-1] < plain[0]
    np.testing.assert_allclose(half, plain, rtol=0.05)


def test_small_gradients_of_float16_do_not_underflow() -> None:
    """A loss of which float16's gradients would be zero."""
    tuned = tuning("float16", loss=lambda y, _: 1e-7 * y.sum())
    _, metrics = tuned.step(tuned.init(), BATCH)
    _, exact = (plain := tuning(None, loss=lambda y, _: 1e-7 * y.sum())).step(plain.init(), BATCH)
    np.testing.assert_allclose(metrics["grad_norm"], exact["grad_norm"], rtol=1e-2)


def test_an_overflow_of_float16s_gradients_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    tuned = tuning("float16", optimizer=optax.adam(0.1), loss=lambda y, _: 100 * y.sum())
    state = tuned.init()
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = tuned.step(state, BATCH)
    assert not np.isfinite(metrics["grad_norm"])
    assert metrics["loss_scale"] == 2 * state.loss_scale == objective.FIRST_SCALE
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    path = onnx2jax.training.save_checkpoint(tmp_path / "s.safetensors", state)
    again, _ = onnx2jax.training.load_checkpoint(path, tuned.init())
    assert again.loss_scale == state.loss_scale
    for _ in range(12):
        state, metrics = tuned.step(state, BATCH)
    assert np.isfinite(metrics["grad_norm"])
    assert not np.array_equal(state.params["b2"], before[0]["b2"])


def test_the_scale_doubles_after_many_steps() -> None:
    scale, every = objective.initial_scale(np.float16), objective.DOUBLES_EVERY
    found = [float(objective.next_scale(scale, np.array(True), np.int32(i))) for i in (0, every - 2, every - 1)]
    assert found == [objective.FIRST_SCALE, objective.FIRST_SCALE, 2 * objective.FIRST_SCALE]
    largest = jnp.float32(objective.LARGEST_SCALE)
    assert objective.next_scale(largest, np.array(True), np.int32(every - 1)) == largest
    assert objective.initial_scale(np.dtype(jnp.bfloat16)) is None


def test_compute_dtype_of_such_a_model_is_refused() -> None:
    with pytest.raises(InputTypeError, match="leave out compute_dtype="):
        tuning("bfloat16", compute_dtype="bfloat16")
