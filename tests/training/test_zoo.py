"""The models of benchmarks/zoo.py: loss curves match plain JAX, and training reaches its accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import onnx2jax
from benchmarks import zoo
from benchmarks.zoo_by_hand import PLAIN, digits
from onnx2jax import compat
from tests.support.tiers import extended

STEPS = 25


def test_every_model_has_a_plain_jax_reference() -> None:
    assert PLAIN.keys() == zoo.ZOO.keys()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        extended(np.float32, 1e-4, id="float32"),
        pytest.param(np.float64, 1e-10, id="float64"),
    ],
)
@pytest.mark.parametrize("name", PLAIN)
def test_losses_match_plain_jax(name: str, dtype: Any, tolerance: float) -> None:
    trainer = onnx2jax.TrainingModel(zoo.ZOO[name](dtype))
    trainer.initialize()
    plain = PLAIN[name]()
    with compat.enable_x64():
        params = jax.tree.map(jnp.array, trainer.state.variables)
        state = plain.state(params)
        step = jax.jit(plain.step)
    losses = []
    for batch, _ in zip(plain.batches(dtype), range(STEPS), strict=False):
        outputs = trainer.train_step(batch)
        (loss,) = [v for n, v in outputs.items() if n in ("loss", "loss_right", "L")]
        with compat.enable_x64():
            params, state, expected = step(params, state, batch)
        losses.append((float(loss), float(expected)))
    ours, theirs = np.transpose(losses)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    assert ours[-5:].mean() < ours[:5].mean()
    assert trainer.compilations == 1
    for variable, value in params.items():
        np.testing.assert_allclose(trainer.state.variables[variable], value, rtol=100 * tolerance, atol=100 * tolerance)


def test_digits_trained_from_scratch_run_in_onnxruntime(tmp_path: Path) -> None:
    trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    trainer.initialize()
    images, tests, labels, answers = digits()
    rng = np.random.default_rng(0)
    for _ in range(30):
        order = rng.permutation(len(images))
        for rows in np.split(order[: len(order) // 128 * 128], len(order) // 128):
            trainer.train_step(image=images[rows].astype(np.float32), label=labels[rows])
    tests = tests.astype(np.float32)
    logits = np.asarray(trainer.infer(image=tests))
    accuracy = np.mean(logits.argmax(1) == answers)
    assert accuracy > 0.97
    onnx2jax.save(trainer.to_model(), tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (results,) = session.run(None, {"image": tests})
    np.testing.assert_allclose(results, logits, rtol=1e-3, atol=1e-3)
    assert np.mean(results.argmax(1) == answers) == accuracy
