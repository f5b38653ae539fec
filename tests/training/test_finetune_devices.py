"""Fine-tuning over eight devices matches one device, with parameters and moments sharded by rule."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from onnx2jax.errors import ShardingError
from tests.conformance.test_devices import annotate
from tests.support.cases import rule
from tests.support.helpers import bytes_per_device, mesh
from tests.support.models import mlp
from tests.support.tiers import extended
from tests.support.training import cross_entropy, trained

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RULES = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 2}
WEIGHTS, HEAD = (4 * 8 + 8 + 8 * 2) * 4, 2 * 4
REST = 4 + 4 + 8
"""Bytes of Adam's count, the step, and the PRNG key."""
MESHES: Any = {
    "data": ({"data": 8}, {}, 3 * (WEIGHTS + HEAD) + REST),
    "data and model": ({"data": 4, "model": 2}, RULES, 3 * (WEIGHTS // 2 + HEAD) + REST),
    "one": ({"data": 1}, {}, 3 * (WEIGHTS + HEAD) + REST),
}
"""Axes of the mesh, rules, and the bytes of the state on each device: parameters and two moments."""


def tuning(**options: Any) -> onnx2jax.training.FineTuning:
    return onnx2jax.finetune(onnx2jax.convert(mlp()), cross_entropy, optax.adam(0.05), trainable="*", **options)


def losses(tuned: onnx2jax.training.FineTuning, steps: int = 5) -> tuple[Any, list[float]]:
    return trained(tuned, BATCH, steps)


@pytest.mark.parametrize("accumulate", [2, extended(1)])
def test_losses_over_data_and_model(accumulate: int) -> None:
    agrees(*MESHES["data and model"], accumulate=accumulate)


@pytest.mark.parametrize("name", ["data", extended("one")])
def test_losses_over_data(name: str) -> None:
    agrees(*MESHES[name])


def agrees(axes: dict[str, int], rules: Any, size: int, **options: Any) -> None:
    """Losses match one device, and the state is sharded by rule."""
    tuned = tuning(mesh=mesh(**axes), shardings=rules, **options)
    state, seen = losses(tuned)
    alone, expected = losses(tuning(**options))
    assert expected[4] < expected[0]
    assert tuned.compilations == 1
    assert len(state.step.sharding.device_set) == math.prod(axes.values())
    np.testing.assert_allclose(seen, expected, rtol=1e-4)
    for name, value in state.params.items():
        np.testing.assert_allclose(value, alone.params[name], rtol=1e-3, atol=1e-5)
        assert value.sharding.spec == rules.get(name, P())
        assert state.opt_state[0].mu[name].sharding.spec == rules.get(name, P())
    assert set(bytes_per_device(state).values()) == {size}
    np.testing.assert_allclose(tuned.evaluate(state, BATCH)["loss"], tuned.step(state, BATCH)[1]["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        extended({}, id="rules"),
        pytest.param({"device_configuration": "c"}, id="configuration"),
    ],
)
@rule("DV-26")
def test_a_sharded_model_is_tuned_on_its_devices(options: dict[str, Any]) -> None:
    proto = mlp()
    proto.ir_version = 11
    proto.configuration.add(name="c", num_devices=2)
    for node, name, axis in ((0, "w1", 1), (0, "b1", 0), (2, "w2", 0)):
        annotate(proto.graph.node[node], name, [(axis, 2)])
    axis = "d0" if options else "model"
    options = options or {"mesh": mesh(data=4, model=2), "shardings": RULES}
    tuned = onnx2jax.finetune(onnx2jax.convert(proto, **options), cross_entropy, optax.adam(0.05), trainable="*")
    state, seen = losses(tuned)
    np.testing.assert_allclose(seen, losses(tuning())[1], rtol=1e-4)
    assert state.params["w1"].sharding.spec == state.opt_state[0].mu["w1"].sharding.spec == P(None, axis)
    assert set(bytes_per_device(state).values()) == {3 * (WEIGHTS // 2 + HEAD) + REST}
    assert tuned.to_model(state).placement is not None


def test_the_state_is_donated() -> None:
    tuned = tuning(mesh=mesh(data=4, model=2), shardings=RULES)
    state = tuned.init()
    jax.make_jaxpr(tuned.step)(state, BATCH)  # not by a caller's trace
    tuned.step(state, BATCH)
    assert all(v.is_deleted() for v in state.params.values())


def test_a_batch_that_cannot_be_divided_raises() -> None:
    tuned = tuning(mesh=mesh(data=8))
    with pytest.raises(ShardingError, match=r"'x' of shape \[3, 4\], the batch: .* over 8 devices\. Pad it to 8"):
        tuned.step(tuned.init(), {"x": BATCH["x"][:3], "label": BATCH["label"][:3]})
