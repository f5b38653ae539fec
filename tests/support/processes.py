"""One of several processes of a distributed run, started by ``tests/sharding/test_processes.py``.

``python -m tests.support.processes TASK PROCESS PROCESSES PORT FOLDER``: what it finds goes to a file of the folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import onnx2jax
from tests.support import resumption
from tests.support.helpers import bytes_per_device
from tests.support.loading import counted
from tests.support.models import mlp
from tests.support.training import cross_entropy

STEPS, EVERY, KILLED, SAVED = 12, 4, 10, 8
"""Number of steps, those between checkpoints, the step at which a process is killed, and its last checkpoint."""
RULES = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, 8, 4)).astype(np.float32)
LABELS = (X[..., 0] > 0).astype(np.int64)
PLANS = ("data", "fsdp", "tensor", "fsdp+tensor")


def batch(i: int) -> dict[str, np.ndarray]:
    return {"x": X[i], "label": LABELS[i]}


def tuning(**options: Any) -> onnx2jax.training.FineTuning:
    return onnx2jax.finetune(onnx2jax.convert(mlp()), cross_entropy, optax.adam(0.05), trainable="*", **options)


def trained(
    tuned: onnx2jax.training.FineTuning, state: Any, steps: Iterable[int], of: Any = batch
) -> tuple[Any, list[float]]:
    """The state after some steps, and their losses."""
    losses = []
    for i in steps:
        state, metrics = tuned.step(state, of(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def described(trainer: onnx2jax.TrainingModel) -> list[float]:
    """The losses of the training that the file defines."""
    rows = [slice(8 * i, 8 * i + 8) for i in range(5)]
    batches = [{"x": resumption.IMAGES[r], "label": resumption.LABELS[r]} for r in rows]
    return [float(trainer.train_step(b)["loss"]) for b in batches]


def refused(call: Callable[[], Any]) -> str:
    """The error of a call, in words."""
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def agree(mesh: jax.sharding.Mesh, process: int) -> dict[str, Any]:
    """The results of processes with rows of their own, and the first losses of a training with equal batches."""
    mine = slice(4 * process, 4 * process + 4)
    model = onnx2jax.convert(mlp(), mesh=mesh, shardings="data")
    rows = model.placement.from_process({"x": X[0][mine]})
    tuned = tuning(mesh=mesh, shardings=RULES)
    return {
        "own rows": (model.placement.to_process(model(**rows)), mine),
        "first losses": trained(tuned, tuned.init(), range(2))[1],
    }


def compute(mesh: jax.sharding.Mesh, process: int, folder: Path) -> dict[str, Any]:
    """The results of processes with equal inputs; the folder has a checkpoint of other processes."""
    found = agree(mesh, process)
    for plan in PLANS:
        model = onnx2jax.convert(mlp(), mesh=mesh, shardings=plan)
        found[plan] = model.run(None, {"x": X[0]})[0]
    x = RNG.normal(size=(8, 256)).astype(np.float32)
    for plan, axis in (("fsdp", "data"), ("tensor", "model")):
        with counted() as reads:
            wide = onnx2jax.convert(folder / "wide.onnx", mesh=jax.make_mesh((8,), (axis,)), shardings=plan)
            found[f"wide, {plan}"] = x, wide.run(None, {"x": x})[0], reads.bytes

    tuned = tuning(mesh=mesh, shardings=RULES)
    state, found["losses"] = trained(tuned, tuned.init(), range(STEPS))
    found["state"] = sorted(set(bytes_per_device(state).values()))
    tuned_rows = {n: v[4 * process : 4 * process + 4] for n, v in batch(0).items()}
    found["a step on own rows"] = trained(tuned, tuned.init(), [0], lambda _: tuned.from_process(tuned_rows))[1]
    found["tuned"] = tuned.to_model(state).run(None, {"x": X[0]})[0]
    onnx2jax.save(onnx2jax.convert(mlp(), mesh=mesh).with_params(tuned.params(state)), folder / "tuned.onnx")
    path = onnx2jax.training.save_checkpoint(folder / "state.safetensors", state, position=STEPS)
    again, _ = onnx2jax.training.load_checkpoint(path, tuned.init())
    found["from a file"] = float(tuned.evaluate(again, batch(0))["loss"])
    found["trainer"] = described(onnx2jax.TrainingModel(resumption.classifier(), rng=5, mesh=mesh))

    planned = onnx2jax.convert(mlp(), mesh=mesh, shardings="fsdp+tensor")
    other = onnx2jax.finetune(planned, cross_entropy, optax.adam(0.05), trainable="*")
    with onnx2jax.training.Checkpoints(folder / "series") as checkpoints:
        state, position = checkpoints.load(other.init(), step=SAVED)
    found["resumed"] = trained(other, state, range(position, STEPS))[1]
    with contextlib.redirect_stderr(io.StringIO()) as drawn:
        list(other.fit([batch(0)], progress=True))
    found["bars"] = "step 1/1" in drawn.getvalue()
    return found


def disagree(mesh: jax.sharding.Mesh, process: int, folder: Path) -> dict[str, Any]:
    """The results of processes with equal inputs, and the errors of those with different ones."""
    agreed = agree(mesh, process)
    model, tuned = onnx2jax.convert(mlp(), mesh=mesh), tuning(mesh=mesh)
    other = mlp()
    other.graph.node[0].name = f"node {process}"
    half = jax.make_mesh((4,), ("data",), devices=jax.local_devices(process_index=0))
    found = {
        "an axis that is not there": refused(lambda: onnx2jax.convert(mlp(), mesh=mesh, shardings={"w1": P("x")})),
        "an axis of a plan": refused(lambda: onnx2jax.convert(mlp(), mesh=half, shardings="tensor")),
        "an extent": refused(lambda: onnx2jax.convert(mlp(), mesh=mesh, shardings={"b2": P("data")})),
        "another file": refused(lambda: onnx2jax.convert(other, mesh=mesh)),
        "a file that is not there": refused(
            lambda: onnx2jax.convert(mlp() if process else folder / "none.onnx", mesh=mesh)
        ),
        "another plan": refused(lambda: onnx2jax.convert(mlp(), mesh=mesh, shardings="tensor" if process else "data")),
        "another argument": refused(lambda: onnx2jax.convert(mlp(), mesh=mesh, dims={"batch": 8 + process})),
        "another type": refused(lambda: onnx2jax.convert(mlp(), mesh=mesh, dtype=[None, "bfloat16"][process])),
        "other values": refused(lambda: model(X[process])),
        "another shape": refused(lambda: model(X[0][:, : 4 - process])),
        "other rows": refused(lambda: model.placement.from_process({"x": X[0][: 8 - 4 * process]})),
        "another batch": refused(lambda: tuned.step(tuned.init(), batch(process))),
        "other rules": refused(lambda: tuning(mesh=mesh, shardings=RULES if process else {})),
        "another order of calls": refused(lambda: model(X[0]) if process else tuned.step(tuned.init(), batch(0))),
    }
    assert model.run(None, {"x": X[0]})[0].shape == (8, 2)  # it can continue
    if process == 0:
        found["one that ends"] = refused(lambda: model(X[0]))
    return {**agreed, "errors": found}


def die(mesh: jax.sharding.Mesh, process: int, folder: Path) -> dict[str, Any]:
    """Training during which the second process is killed."""
    tuned = tuning(mesh=mesh, shardings=RULES)
    state, losses = tuned.init(), []
    with onnx2jax.training.Checkpoints(folder / "series") as checkpoints:
        for i in range(STEPS):
            if i and i % EVERY == 0:
                checkpoints.save(i, state, position=i)
                checkpoints.wait()
            if i == KILLED and process == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state, more = trained(tuned, state, [i])
            losses += more
    return {"losses": losses}


def main(task: str, process: str, processes: str, port: str, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8 // int(processes))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(processes),
        int(process),
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
        initialization_timeout=120,
    )
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    found = {"compute": compute, "disagree": disagree, "die": die}[task](mesh, int(process), Path(folder))
    (Path(folder) / f"{task}{process}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
