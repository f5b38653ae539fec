"""The cost of a decoder's first step by number of layers, unrolled and rolled: ``python -m benchmarks.layers``.

Processor seconds of a child process from the parsed file to the first result, and the sizes of what it compiled.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import jax
import numpy as np

import onnx2jax
from tests.support import decoders

DEPTHS = (2, 12, 22, 48)
SIZES = {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 8, "total_sequence_length": 9}


def measure(depth: int, rolled: bool) -> str:
    """A row of the table."""
    proto = decoders.group_query(layers=depth).proto
    model = onnx2jax.convert(proto, scan_layers=rolled)
    shapes = {v.name: [d if isinstance(d, int) else SIZES[str(d)] for d in v.shape or ()] for v in model.inputs}
    inputs = {v.name: np.ones(shapes[v.name], v.type.dtype) for v in model.inputs}  # type: ignore[union-attr]
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # starts the backend
    start = _seconds()
    jax.block_until_ready(model(**inputs))
    ready = _seconds() - start
    (subprogram,) = model._runtime.program._compiled.values()
    (executable,) = subprogram.executables.values()
    with jax.enable_x64(True):
        given = [jax.device_put(inputs[n]) for n in executable._types[1]]
        compiled = executable._whole.lower(executable.hoisted(model.weights), given).compile()
    instructions = compiled.as_text().count(" = ")
    return f"| {depth} | {'rolled' if rolled else 'unrolled'} | {ready:.1f} | {instructions} |"


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(int(sys.argv[1]), sys.argv[2] == "rolled"))
    else:
        print("| layers | | processor seconds | HLO instructions |\n|---|---|---|---|", flush=True)
        for depth in DEPTHS:
            for how in ("unrolled", "rolled"):
                subprocess.run([sys.executable, "-m", "benchmarks.layers", str(depth), how], check=True)
