"""Steps that are optimised for a CPU give the numbers of those that are not."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.runtime.optimize import step as passes
from tests.support.models import model, value

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def sequence_model() -> Any:
    """Two matrices over a batch of sequences."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="second"),
    ]
    weights = {"a": normal(4, 6), "b": normal(6, 3)}
    return model(nodes, [value("x", np.float32, ["n", 5, 4])], [value("y", np.float32, None)], weights)


def squares(y: Any, batch: dict[str, Any]) -> Any:
    return ((y - batch["target"]) ** 2).mean()


def steps(proto: Any, batch: dict[str, Any], optimize: bool, count: int = 3, **options: Any) -> tuple[Any, Any]:
    """State and metrics after some steps."""
    tuned = onnx2jax.finetune(onnx2jax.convert(proto, optimize=optimize), squares, optax.adam(1e-2), **options)
    state = tuned.init()
    for _ in range(count):
        state, metrics = tuned.step(state, batch)
    return state, metrics


def alike(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    def compare(a: Any, b: Any) -> None:
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-3, float(np.abs(b).max(initial=0))))

    jax.tree.map(compare, ours, theirs)


def test_products() -> None:
    batch = {"x": normal(2, 5, 4), "target": normal(2, 5, 3)}
    proto = sequence_model()
    (state, metrics), (plain, said) = (steps(proto, batch, optimize) for optimize in (True, False))
    alike(state.params, plain.params)
    alike(state.opt_state, plain.opt_state)
    alike(metrics, said)


def test_a_call_that_is_transformed_keeps_the_plain_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    improved = passes._improved
    monkeypatch.setattr(passes, "_improved", lambda *args: seen.append(args) or improved(*args))
    batch = {"x": normal(2, 5, 4), "target": normal(2, 5, 3)}
    tuned = onnx2jax.finetune(onnx2jax.convert(sequence_model()), squares, optax.sgd(0.1))
    _, metrics = jax.jit(tuned.step)(tuned.init(), batch)
    assert not seen
    _, own = tuned.step(tuned.init(), batch)
    assert seen
    alike(own, metrics)
