"""Time models beside onnxruntime, in one process: `python benchmarks/beside_onnxruntime.py model.onnx ...`.

Without arguments: the light networks that the onnx package ships (their weights are constant, their shapes real) and
the demo's classifier. Each line gives the median times of a call and their ratio; above 1 is faster than onnxruntime.

Both runtimes work in blocks of at least 0.1 s, alternating, the order rotating: onnxruntime's threads spin on for about
40 ms after a call, and XLA's first calls after a pause are slow, so single calls in turn would measure each other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnx2jax

BLOCK = 0.1
ROUNDS = 9


def feeds(model: onnx2jax.Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; dimensions that are free are 1."""
    rng = np.random.default_rng(seed)
    result = {}
    for value in model.inputs:
        kind: Any = value.type
        shape = [d if isinstance(d, int) else 1 for d in kind.shape]
        integer = kind.dtype.kind in "iub"
        array = rng.integers(0, 2, shape) if integer else rng.normal(size=shape)
        result[value.name] = np.asarray(array).astype(kind.dtype)
    return result


def block(call: Callable[[], Any]) -> float:
    """Seconds a call, over a block of calls."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < BLOCK or count < 3:
        call()
        count += 1
    return passed / count


def compare(path: Path) -> tuple[float, float, float, float]:
    """Seconds to convert and compile, seconds a call here, there, and the largest difference over the scale."""
    start = time.perf_counter()
    model = onnx2jax.convert(path)
    x = feeds(model)
    first = model.run(None, x)
    ready = time.perf_counter() - start
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    theirs = session.run(None, x)
    calls = [lambda: model.run(None, x), lambda: session.run(None, x)]
    times: list[list[float]] = [[], []]
    for i in range(ROUNDS):
        for k in (i % 2, 1 - i % 2):
            times[k].append(block(calls[k]))
    ours, other = (statistics.median(t) for t in times)
    scale = max(float(np.max(np.abs(t))) for t in theirs) or 1.0
    difference = max(float(np.max(np.abs(a - b))) for a, b in zip(first, theirs, strict=True)) / scale
    return ready, ours, other, difference


def main() -> None:
    """Print one line a model."""
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    paths = [Path(p) for p in sys.argv[1:]] or [onnx2jax.demo_model(), *sorted(light.glob("*.onnx"))]
    print(f"{'model':32} {'ready s':>8} {'call ms':>9} {'ort ms':>9} {'ratio':>6} {'difference':>10}")
    ratios = []
    for path in paths:
        name = path.stem if path.stem != "model" else path.parent.name
        ready, ours, other, difference = compare(path)
        ratios.append(other / ours)
        print(
            f"{name:32} {ready:8.2f} {ours * 1e3:9.3f} {other * 1e3:9.3f} {ratios[-1]:6.2f} {difference:10.1e}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
