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
from onnx2jax.training import loss_scale
from tests.support.helpers import mesh
from tests.support.models import mlp

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

DTYPES = ("bfloat16", "float16")
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 2}
IMAGES = RNG.normal(size=(64, 1, 8, 8)).astype(np.float32)
DIGITS = {"image": IMAGES, "label": IMAGES.reshape(64, -1)[:, :10].argmax(1)}


def entropy(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def tuning(dtype: str | None, source: Any = None, optimizer: Any = None, loss: Any = entropy, **options: Any) -> Any:
    model = onnx2jax.convert(mlp() if source is None else source, dtype=dtype, **options.pop("convert", {}))
    return onnx2jax.finetune(model, loss, optimizer or optax.sgd(0.1), **options)


def losses(tuned: Any, batch: Any, steps: int) -> list[float]:
    state, found = tuned.init(), []
    for _ in range(steps):
        state, metrics = tuned.step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def types(tree: Any) -> set[Any]:
    return {v.dtype for v in jax.tree.leaves(tree) if jnp.issubdtype(v.dtype, jnp.floating)}


@pytest.mark.parametrize(("dtype", "batchnorm"), [("bfloat16", "train"), ("float16", "frozen")])
def test_the_loss_follows_that_of_float32(dtype: str, batchnorm: str) -> None:
    """Within 2 % of the first loss over 20 steps of Adam, in which it falls to less than half."""
    plain, half = (
        losses(tuning(d, onnx2jax.demo_model(), optax.adam(3e-3), batchnorm=batchnorm), DIGITS, 20)
        for d in (None, dtype)
    )
    assert plain[-1] < plain[0] / 2
    skipped = 1 if dtype == "float16" else 0  # the first scale overflows
    np.testing.assert_allclose(half[skipped:], plain[: 20 - skipped], atol=0.02 * plain[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_gradients_and_moments_are_float32(dtype: str, tmp_path: Path) -> None:
    tuned = tuning(dtype, optimizer=optax.adam(0.1))
    state, metrics = tuned.step(tuned.init(), BATCH)
    assert types(state) == types(metrics) == types(tuned.params(state)) == {np.dtype(np.float32)}
    text = str(jax.make_jaxpr(tuned._train_step)(state, tuned._frozen, BATCH))
    assert {"bfloat16": "bf16[8,4]", "float16": "f16[8,4]"}[dtype] in text
    trained = tuned.to_model(state)
    assert trained.params["w1"].dtype == dtype
    saved = onnx2jax.convert(onnx2jax.save(trained, tmp_path / "trained.onnx"))
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


def test_statistics_of_batchnorm_are_float32() -> None:
    found = []
    for d in (None, "bfloat16"):
        tuned = tuning(d, onnx2jax.demo_model(), batchnorm="train")
        state, _ = tuned.step(tuned.init(), DIGITS)
        found.append(state.stats)
    assert types(found[1]) == {np.dtype(np.float32)}
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, atol=2e-2 * abs(value).max())


def test_adapters_microbatches_remat_and_a_mesh() -> None:
    dtype = "float16"  # which has the state of bfloat16 and a scale
    plain = losses(tuning(None), BATCH, 3)
    for options in (
        {"accumulate": 2},
        {"remat": ["hidden", "[ah]*"]},
        {"mesh": mesh(data=4, model=2), "shardings": {"w1": P(None, "model")}},
        {"convert": {"stages": 2, "microbatches": 2}},
    ):
        np.testing.assert_allclose(losses(tuning(dtype, **options), BATCH, 3), plain, atol=0.02)
    with_adapters = tuning(dtype, lora=2)
    exact = losses(tuning(None, lora=2), BATCH, 3)
    np.testing.assert_allclose(losses(with_adapters, BATCH, 3), exact, atol=0.02)
    state, _ = with_adapters.step(with_adapters.init(), BATCH)
    assert types(state) == {np.dtype(np.float32)}
    assert with_adapters._frozen["w1"].dtype == dtype  # what is not trained takes half the memory
    np.testing.assert_allclose(
        with_adapters.to_model(state)(BATCH["x"]), tuning(None, lora=2).to_model(state)(BATCH["x"]), atol=0.1
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_learns(dtype: str) -> None:
    ids = {"input_ids": [list(b"one two three "), list(b"nine ten ")]}
    plain, half = (losses(tuning(d, onnx2jax.demo_decoder(), loss="next_token"), ids, 3) for d in (None, dtype))
    np.testing.assert_allclose(half, plain, rtol=0.05)


def test_small_gradients_of_float16_do_not_underflow() -> None:
    """A loss of which float16's gradients would be zero."""
    tuned = tuning("float16", loss=lambda y, _: 1e-7 * y.sum())
    _, metrics = tuned.step(tuned.init(), BATCH)
    _, exact = (plain := tuning(None, loss=lambda y, _: 1e-7 * y.sum())).step(plain.init(), BATCH)
    np.testing.assert_allclose(metrics["grad_norm"], exact["grad_norm"], rtol=1e-2)


def test_an_overflow_of_float16s_gradients_is_reported_and_changes_nothing() -> None:
    tuned = tuning("float16", optimizer=optax.adam(0.1), loss=lambda y, _: 100 * y.sum())
    state = tuned.init()
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = tuned.step(state, BATCH)
    assert not np.isfinite(metrics["grad_norm"])
    assert metrics["loss_scale"] == 2 * state.loss_scale == loss_scale.FIRST
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    for _ in range(12):
        state, metrics = tuned.step(state, BATCH)
    assert np.isfinite(metrics["grad_norm"])
    assert not np.array_equal(state.params["b2"], before[0]["b2"])


def test_the_scale_doubles_after_many_steps() -> None:
    scale, every = loss_scale.initial(np.float16), loss_scale.DOUBLES_EVERY
    found = [float(loss_scale.updated(scale, np.array(True), np.int32(i))) for i in (0, every - 2, every - 1)]
    assert found == [loss_scale.FIRST, loss_scale.FIRST, 2 * loss_scale.FIRST]
    assert loss_scale.initial(np.dtype(jnp.bfloat16)) is None


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    tuned = tuning("float16", loss=lambda y, _: 100 * y.sum())
    state, _ = tuned.step(tuned.init(), BATCH)
    path = onnx2jax.save_checkpoint(tmp_path / "s.safetensors", state)
    again, _ = onnx2jax.load_checkpoint(path, tuned.init())
    assert again.loss_scale == state.loss_scale == loss_scale.FIRST / 2


def test_compute_dtype_of_such_a_model_is_refused() -> None:
    with pytest.raises(InputTypeError, match="leave out compute_dtype="):
        tuning("bfloat16", compute_dtype="bfloat16")
