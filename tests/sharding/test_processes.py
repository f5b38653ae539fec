"""Two processes of four devices: results equal those of one device; differences raise on both, without a hang."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx2jax
from onnx2jax.proto.mapped import SAMPLE
from tests.support import processes as script
from tests.support import resumption
from tests.support.helpers import ROOT, mesh
from tests.support.loading import written
from tests.support.models import mlp

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

PATIENCE = 300
"""Seconds after which a process counts as hanging."""


def run(task: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run two processes until both have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.processes", task]
    begun = [
        subprocess.Popen(
            [*command, str(i), "2", str(port), str(folder)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in begun]
    finally:
        for process in begun:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, None, text)
        for process, text in zip(begun, errors, strict=True)
    ]


def found(task: str, folder: Path) -> list[dict[str, Any]]:
    """The results of both processes."""
    ended = run(task, folder)
    assert [p.returncode for p in ended] == [0, 0], "\n".join(p.stderr[-3000:] for p in ended)
    return [pickle.loads((folder / f"{task}{i}.pickle").read_bytes()) for i in range(2)]


def close(ours: Any, want: Any) -> None:
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


def agrees(each: dict[str, Any]) -> None:
    """Asserts that what a process computed with rows of its own, and by training, is what one device computes."""
    rows, mine = each["own rows"]
    close(rows, onnx2jax.convert(mlp())(script.X[0])[mine])
    tuned = script.tuning()
    close(each["first losses"], script.trained(tuned, tuned.init(), range(2))[1])


@pytest.mark.extended
def test_two_processes_give_the_results_of_one_even_after_a_kill(tmp_path: Path) -> None:
    """One test, since each start of two processes takes seconds."""
    first, second = run("die", tmp_path)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode != 0 and "another task died" in first.stderr
    size = written(tmp_path / "wide.onnx")
    both = found("compute", tmp_path)  # resumes from the files of the killed processes

    outputs = onnx2jax.convert(mlp())(script.X[0])
    for each in both:
        for plan in script.PLANS:
            close(each[plan], outputs)
        agrees(each)
        for plan in ("fsdp", "tensor"):
            x, wide, read = each[f"wide, {plan}"]
            close(wide, onnx2jax.convert(tmp_path / "wide.onnx")(x))
            assert read == size // 2 + 16 * SAMPLE, "each process reads the parts of its own devices"

    tuned = script.tuning()
    state, losses = script.trained(tuned, tuned.init(), range(script.STEPS))
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    for options in ({"mesh": mesh(data=4, model=2), "shardings": script.RULES}, {}):
        alone = script.tuning(**options)
        close(script.trained(alone, alone.init(), range(script.STEPS))[1], losses)
        with onnx2jax.training.Checkpoints(tmp_path / "series") as checkpoints:
            assert checkpoints.steps == [script.EVERY, script.SAVED]
            saved, position = checkpoints.load(alone.init())
        close(script.trained(alone, saved, range(position, script.STEPS))[1], losses[script.SAVED :])
    trainer = script.described(onnx2jax.TrainingModel(resumption.classifier(), rng=5))
    after, first_loss = tuned.to_model(state)(script.X[0]), tuned.evaluate(state, script.batch(0))["loss"]
    for each in both:
        close(each["losses"], losses)
        close(each["resumed"], losses[script.SAVED :])
        close(each["a step on own rows"], losses[:1])
        close(each["tuned"], after)
        close(each["from a file"], first_loss)
        close(each["trainer"], trainer)
        assert each["bars"] == (each is both[0]), "the first process draws"
    close(onnx2jax.convert(tmp_path / "tuned.onnx")(script.X[0]), after)
    assert onnx2jax.training.load_checkpoint(tmp_path / "state.safetensors", tuned.init())[1] == script.STEPS


DIFFER = "process {me} and process {other} differ at "
ERRORS = {
    "an axis that is not there": "ShardingError: 'w1' of shape [4, 8], rule 'w1': P('x',) over mesh data: 4 x model: 2",
    "an extent": "ShardingError: 'b2' of shape [2], rule 'b2': P('data',) over mesh data: 4 x model: 2: axis 0 of 2",
    "another file": f"ProcessError: {DIFFER}convert: the file is ",
    "another plan": f"ProcessError: {DIFFER}convert: mesh= or shardings= is ",
    "another argument": f"ProcessError: {DIFFER}convert: dims= is ",
    "another type": f"ProcessError: {DIFFER}convert: dtype= is ",
    "other values": f"ProcessError: {DIFFER}a call of the model: x is float32[8, 4] ",
    "other rows": f"ProcessError: {DIFFER}arrays from processes: x is ",
    "another batch": f"ProcessError: {DIFFER}a training step: x is float32[8, 4] ",
    "other rules": f"ProcessError: {DIFFER}finetune: mesh= or shardings= is ",
    "another order of calls": "ProcessError: process {me} is at a ",
}
"""The start of the error on each process."""
OF_ONE = {
    "an axis of a plan": (
        "ShardingError: plan 'tensor' shards over axis 'model', the mesh has ['data']",
        "ProcessError: the mesh {'data': 4} has devices of process 0 only, and this is process 1 of 2",
    ),
    "a file that is not there": (
        "FileNotFoundError: ",
        "ProcessError: process 0 stopped at convert: FileNotFoundError: ",
    ),
    "another shape": (
        "ProcessError: process 1 stopped at a call of the model: InputShapeError: input x",
        "InputShapeError: input x: float32[batch, 4] has extent 4 on axis 1, but 3 is given",
    ),
}
"""How the errors begin where one process is wrong."""


def test_two_processes_compute_as_one_and_raise_errors_on_both_where_they_differ(tmp_path: Path) -> None:
    both = found("disagree", tmp_path)
    assert both[0]["errors"].pop("one that ends") == "ProcessError: process 1 ended before a call of the model"
    for me, each in enumerate(both):
        agrees(each)
        errors = each["errors"]
        wanted = {n: text.format(me=me, other=1 - me) for n, text in ERRORS.items()}
        wanted |= {n: texts[me] for n, texts in OF_ONE.items()}
        assert errors.keys() == wanted.keys()
        assert {n: e for n, e in errors.items() if not e.startswith(wanted[n])} == {}
