"""Copies and pickles of trainers continue like the original, with the same shardings; and their reprs."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onnx2jax
from tests.support import resumption
from tests.support.helpers import mesh
from tests.support.tiers import canaries
from tests.support.training import cross_entropy

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

BATCH = {"x": resumption.IMAGES[:8], "label": resumption.LABELS[:8]}
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
DEVICES: dict[str, Any] = {
    "1 device": {},
    "8 devices": {"mesh": mesh(data=2, model=4), "shardings": {"w*": P(None, "model")}},
}
CASES = [*itertools.product(WAYS, DEVICES)]


def shardings(state: Any) -> Any:
    return jax.tree.map(lambda v: v.sharding, state)


def sgd_update(grads: Any, state: Any, *_: Any, **__: Any) -> Any:
    return jax.tree.map(lambda g: -0.1 * g, grads), state


def sgd_init(_: Any) -> Any:
    return optax.EmptyState()


SGD = optax.GradientTransformationExtraArgs(sgd_init, sgd_update)


@pytest.mark.usefixtures("in_32_bits")
@pytest.mark.parametrize(("way", "over"), canaries(CASES, [("deepcopy", "1 device"), ("pickle", "8 devices")]))
def test_a_copy_of_a_training_model_continues(way: str, over: str) -> None:
    trainer = onnx2jax.TrainingModel(resumption.classifier(), rng=5, **DEVICES[over])
    trainer.train_step(BATCH)
    other = WAYS[way](trainer)
    assert shardings(other.state) == shardings(trainer.state) and other.compilations == 0
    assert other.state.own[0]["t"].dtype == np.int64
    outputs = trainer.train_step(BATCH)  # donates its own state, not the copy's
    assert other.train_step(BATCH)["loss"] == outputs["loss"]
    assert other.state.key == trainer.state.key
    for name, value in trainer.changed().items():
        np.testing.assert_array_equal(other.changed()[name], value)
    np.testing.assert_array_equal(other.init().variables["w"], trainer.init().variables["w"])


@pytest.mark.parametrize(("way", "over"), canaries(CASES, [("pickle", "1 device"), ("copy", "8 devices")]))
def test_a_copy_of_a_fine_tuning_continues(way: str, over: str) -> None:
    model = onnx2jax.convert(resumption.network())
    tuned = onnx2jax.finetune(
        model, cross_entropy, SGD, dropout=0.3, compute_dtype="bfloat16", remat="*", **DEVICES[over]
    )
    state, _ = tuned.step(tuned.init(), BATCH)
    other, taken = WAYS[way](tuned), WAYS[way](state) if over == "1 device" else jax.tree.map(jax.numpy.copy, state)
    assert shardings(other.init()) == shardings(tuned.init()) and other.compilations == 0
    (state, metrics), (taken, again) = tuned.step(state, BATCH), other.step(taken, BATCH)
    assert metrics["loss"] == again["loss"]
    jax.tree.map(np.testing.assert_array_equal, taken.params, state.params)


def test_an_optimizer_that_cannot_be_pickled_is_named() -> None:
    model = onnx2jax.convert(resumption.network())
    with pytest.raises((AttributeError, pickle.PicklingError), match="chain"):
        pickle.dumps(onnx2jax.finetune(model, cross_entropy, optax.adam(0.1)))


def test_repr() -> None:
    assert repr(onnx2jax.TrainingModel(resumption.classifier())) == (
        "TrainingModel of 'classifier'\n"
        "  infer takes: x: float32[n, 6]\n"
        "  variables: w, b: 28 numbers\n"
        "  adam takes: x: float32[n, 6], label: int64[n]\n"
        "  adam has: t, v, h, bv, bh: 57 numbers\n"
        "  devices: cpu:0"
    )
    model = onnx2jax.convert(resumption.network(), mesh=mesh(data=2, model=4))
    assert repr(onnx2jax.finetune(model, cross_entropy, SGD, trainable=["w1", "b1"])) == (
        "FineTuning of 'network'\n"
        "  inputs: x: float32[n, 6]\n"
        "  trains: w1, b1: 112 numbers\n"
        "  of: w1, b1, scale, shift, mean, var, ... (7 in all): 240 numbers\n"
        "  devices: mesh data: 2 x model: 4 over devices 0, 1, 2, 3, 4, 5, 6, 7"
    )
