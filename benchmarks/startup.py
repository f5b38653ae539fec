"""Processor time until models are ready: `python benchmarks/startup.py model.onnx ...`; without arguments, the demo's.

Each model has a process of its own, warm: imports are done and a small program has run. The columns are seconds of
processor time for `convert`; for the first call, less what XLA compiles (that is tracing, lowering and running); for
compiling; and for all of it. Then those of onnxruntime's session with its first run, and how many times as long ours
take. Inputs are those in an .npz file of the same name beside the model, by name, or random ones of batch 1.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime

import onnx2jax
from benchmarks.beside_onnxruntime import feeds


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(path: str) -> list[float]:
    """Seconds to convert, to trace and run, to compile, and for onnxruntime to do all that."""
    jax.jit(lambda x: x + 1)(np.zeros(3, np.float32))
    marks: list[float] = []  # processor time when lowering ends and when compiling ends, in turn
    ends = "jaxpr_to_mlir_module_duration", "backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: marks.append(time.process_time()) if event.endswith(ends) else None
    )
    convert, model = seconds(lambda: onnx2jax.convert(path))
    inputs = Path(path).with_suffix(".npz")
    x = dict(np.load(inputs)) if inputs.exists() else feeds(model)
    marks.clear()
    call, _ = seconds(lambda: model.run(None, x))
    compiling = sum(b - a for a, b in zip(marks[::2], marks[1::2], strict=True))
    theirs, _ = seconds(
        lambda: onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, dict(x))
    )
    return [convert, call - compiling, compiling, theirs]


def main() -> None:
    """Print one line a model."""
    paths = sys.argv[1:] or [str(onnx2jax.demo_model())]
    if paths[0] == "--one":
        print(*measure(paths[1]))
        return
    print(f"{'model':32} {'convert':>8} {'call':>8} {'compile':>8} {'all':>8} {'ort':>8} {'ratio':>6}")
    ratios = []
    for path in map(Path, paths):
        name = path.stem if path.stem != "model" else path.parent.name
        command = [sys.executable, "-m", "benchmarks.startup", "--one", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # random inputs do not suit every model
            print(f"{name:32} {done.stderr.strip().splitlines()[-1][:80]}", flush=True)
            continue
        *ours, theirs = map(float, done.stdout.split())
        ratios.append(sum(ours) / theirs)
        columns = " ".join(f"{t:8.3f}" for t in (*ours, sum(ours), theirs))
        print(f"{name:32} {columns} {ratios[-1]:6.1f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.1f}, largest {max(ratios):.1f}")


if __name__ == "__main__":
    main()
