"""Start-up time and memory of a model, each measured in a separate process.

``python -m benchmarks.startup ours|background|onnxruntime MODEL INPUTS.npz`` measures one and prints JSON;
``measured`` runs several and returns medians. Imports and a small program run before the clock starts, so only the
time of the model itself is measured; ``whole`` measures a process with its imports. The cache is ``convert``'s
``cache_dir`` if it has one, and JAX's own otherwise.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np


def measured(kind: str, model: Path, inputs: Path, repeats: int, cache: Path | None = None) -> dict[str, float]:
    """Medians over processes, by quantity.

    Raises:
        RuntimeError: a process failed; with the last line of its output.
    """
    command = [sys.executable, "-m", "benchmarks.startup", kind, str(model), str(inputs)]
    command += [str(cache)] if cache else []
    rows = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{kind}: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: float(np.median([row[key] for row in rows])) for key in rows[0]}


WHOLE: Final = {
    "ours": "import sys, numpy, onnx2jax; onnx2jax.convert(sys.argv[1]).run(None, dict(numpy.load(sys.argv[2])))",
    "onnxruntime": "import sys, numpy, onnxruntime as ort; ort.InferenceSession(sys.argv[1], "
    "providers=['CPUExecutionProvider']).run(None, dict(numpy.load(sys.argv[2])))",
}
"""Programs from the start of Python to the first result."""


def whole(kind: str, model: Path, inputs: Path, cache: Path) -> float:
    """Wall seconds of a process from the start of Python to the first result, with imports.

    Raises:
        subprocess.CalledProcessError: the process failed.
    """
    command = [sys.executable, "-c", WHOLE[kind], str(model), str(inputs)]
    environment = os.environ | {"ONNX2JAX_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # which would compile every module in every process
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def timed(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Wall and processor time in seconds, and the result of a call."""
    start, working = time.perf_counter(), time.process_time()
    result = call()
    return {"wall": time.perf_counter() - start, "work": time.process_time() - working}, result


def ours(path: str, feeds: dict[str, np.ndarray], cache: str | None, background: bool = False) -> dict[str, float]:
    """Seconds of convert, of the first call, and of its compilation in processor time; bytes before and at the peak."""
    import jax

    from onnx2jax import convert  # the package imports what is asked for

    options: dict[str, Any] = {"background_compile": True} if background else {}
    if cache and "cache_dir" in inspect.signature(convert).parameters:
        options["cache_dir"] = cache
    elif cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: x + 1)(np.zeros(3, np.float32))
    marks: list[float] = []  # processor time at the end of lowering and of compiling, alternately
    ends = "jaxpr_to_mlir_module_duration", "backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: marks.append(time.process_time()) if event.endswith(ends) else None
    )
    before = resident()
    made, model = timed(lambda: convert(path, **options))
    marks.clear()
    call, _ = timed(lambda: model.run(None, feeds))
    compiling = sum(b - a for a, b in zip(marks[::2], marks[1::2], strict=False))
    result = {f"convert {k}": v for k, v in made.items()} | {f"call {k}": v for k, v in call.items()}
    most = peak()  # before the next line reads all weights
    weights = float(sum(v.nbytes for v in model.params.values()))
    return result | {"compile work": compiling, "before": before, "peak": most, "weights": weights}


def theirs(path: str, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    """onnxruntime's session and its first run."""
    from benchmarks.rivals import session

    before = resident()
    made, runtime = timed(lambda: session(path))
    call, _ = timed(lambda: runtime.run(None, feeds))
    result = {f"convert {k}": v for k, v in made.items()} | {f"call {k}": v for k, v in call.items()}
    return result | {"before": before, "peak": peak()}


def resident() -> float:
    """The process's present resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))


def peak() -> float:
    """The process's peak resident bytes. (``getrusage`` would include the parent's, from before exec.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(kind: str, path: str, inputs: str, cache: str | None = None) -> None:
    """Measure one."""
    with np.load(inputs) as arrays:
        feeds = dict(arrays)
    result = theirs(path, feeds) if kind == "onnxruntime" else ours(path, feeds, cache, kind == "background")
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
