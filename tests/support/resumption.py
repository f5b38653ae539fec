"""Training interrupted in the middle of an epoch; as a script, the process that resumes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import onnx
import optax
from jax.sharding import PartitionSpec as P
from onnx import numpy_helper, parser

import onnx2jax
from tests.support.helpers import mesh
from tests.support.training import cross_entropy, info, training

STOP, END = 7, 12
BATCHES = 5
"""Of an epoch; after 7 of them the second epoch has begun."""

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.normal(size=(BATCHES * 8, 6)).astype(np.float32), RNG.integers(0, 4, BATCHES * 8)

NETWORK = """<ir_version: 10, opset_import: ["" : 21]>
network (float[n,6] x) => (float[n,4] logits) {
    a = MatMul(x, w1)  h = Add(a, b1)
    c = BatchNormalization(h, scale, shift, mean, var)
    r = Relu(c)  d = Dropout(r)  logits = MatMul(d, w2) }"""


class Training(NamedTuple):
    init: Callable[[], Any]
    step: Callable[[Any, dict[str, Any]], tuple[Any, Any]]


def network() -> onnx.ModelProto:
    model, rng = parser.parse_model(NETWORK), np.random.default_rng(1)
    shapes = {"w1": (6, 16), "b1": 16, "scale": 16, "shift": 16, "mean": 16, "var": 16, "w2": (16, 4)}
    for name, shape in shapes.items():
        values = rng.uniform(0.1, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def finetuning(**options: Any) -> Training:
    """Adam with averages, batch statistics and dropout: every changing part of a state."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, END)))
    tuned = onnx2jax.finetune(
        onnx2jax.convert(network()), cross_entropy, optimizer, dropout=0.3, batchnorm="train", **options
    )
    return Training(lambda: tuned.init(jax.random.key(3)), tuned.step)


CLASSIFIER = "classifier (float[n,6] x) => (float[n,4] logits) { p = MatMul(x, w)  logits = Add(p, b) }"
ADAM = """adam (int64[n] label) => (float loss, float[6,4] w1, float[4] b1, float[6,4] v1, float[4] bv1, float[6,4] h1,
                                  float[4] bh1, int64 t1) <float rate = {0.05}, int64 t = {0}, int64 one = {1}> {
    loss = SoftmaxCrossEntropyLoss(logits, label)
    dw, db = Gradient <xs = ["w", "b"], zs = ["x", "label"], y = "loss"> (w, b, x, label)
    noise = RandomNormalLike <scale = 0.01> (dw)  gw = Add(dw, noise)
    w1, b1, v1, bv1, h1, bh1 = Adam(rate, t, w, b, gw, db, v, bv, h, bh)  t1 = Add(t, one) }"""
UPDATES = {"w": "w1", "b": "b1", "v": "v1", "bv": "bv1", "h": "h1", "bh": "bh1", "t": "t1"}


def classifier() -> onnx.ModelProto:
    """Adam, with noise on a gradient; its averages and its count are the algorithm's own."""
    model = training(CLASSIFIER, info(ADAM, UPDATES))
    weight = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    for graph, values in (
        (model.graph, {"w": weight, "b": np.zeros(4, np.float32)}),
        (
            model.training_info[0].algorithm,
            {"v": weight * 0, "h": weight * 0, "bv": weight[0] * 0, "bh": weight[0] * 0},
        ),
    ):
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    return model


def training_model(**options: Any) -> Training:
    trainer = onnx2jax.TrainingModel(classifier(), rng=5, **options)
    return Training(trainer.init, trainer.step)


TRAININGS: dict[str, Callable[[], Training]] = {
    "finetune": finetuning,
    "finetune on 8 devices": lambda: finetuning(mesh=mesh(data=4, model=2), shardings={"w*": P(None, "model")}),
    "training_info": training_model,
    "training_info on 8 devices": lambda: training_model(mesh=mesh(data=4, model=2), shardings={"w": P(None, "model")}),
}


def batches(position: dict[str, int]) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Batches from a position on, each with the position after it; every epoch is in another order."""
    epoch, first = position["epoch"], position["batch"]
    while True:
        order = np.random.default_rng(epoch).permutation(len(IMAGES)).reshape(BATCHES, 8)
        for i in range(first, BATCHES):
            yield {"x": IMAGES[order[i]], "label": LABELS[order[i]]}, {"epoch": epoch, "batch": i + 1}
        epoch, first = epoch + 1, 0


def run(training: Training, state: Any, position: dict[str, int], steps: int) -> tuple[Any, dict[str, int]]:
    """Runs a number of steps from a position."""
    after = position
    for batch, after in islice(batches(position), steps):  # noqa: B007
        state, _ = training.step(state, batch)
    return state, after


def marked(step: int) -> dict[str, np.ndarray]:
    """A state that tells its step, and takes a while to write."""
    return {"w": np.full(1_000_000, step, np.float32)}


def main(folder: Path, *names: str) -> None:
    """Resumes some trainings from both their checkpoints, to the end; is killed while it writes a last checkpoint."""
    jax.config.update("jax_num_cpu_devices", 8)
    for name in names:
        training = TRAININGS[name]()
        with onnx2jax.training.Checkpoints(folder / name / "series") as checkpoints:
            taken_up = {
                "file": onnx2jax.training.load_checkpoint(folder / name / "file", training.init()),
                "series": checkpoints.load(training.init()),
            }
        for form, (state, position) in taken_up.items():
            state, position = run(training, state, position, END - STOP)
            onnx2jax.training.save_checkpoint(folder / name / f"end of {form}", state, position=position)
    checkpoints = onnx2jax.training.Checkpoints(folder / "killed")
    checkpoints.save(1, marked(1), position=1)
    checkpoints.wait()
    checkpoints.save(2, marked(2), position=2)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
