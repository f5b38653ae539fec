"""The cost of a decoder's first step by number of layers, in three forms: ``python -m benchmarks.layers``.

Processor seconds of a child process from the parsed file to the first result, and the sizes of what it compiled.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any, Final

import jax
import numpy as np

import onnx2jax
from benchmarks.decoders import Size, Writer
from onnx2jax.runtime.sections import Sections

DEPTHS = (2, 12, 22, 48)
FORMS: Final[dict[str, Any]] = {"unrolled": False, "rolled": True, "called": "calls"}
SIZES = {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 8, "total_sequence_length": 9}


def measure(depth: int, form: str) -> str:
    """A row of the table."""
    file = Writer(Size(61, depth, 32, 4, 2, 64), bits=0).model()
    model = onnx2jax.convert(file, scan_layers=FORMS[form])
    shapes = {v.name: [d if isinstance(d, int) else SIZES[str(d)] for d in v.shape or ()] for v in model.inputs}
    inputs = {v.name: np.ones(shapes[v.name], v.type.dtype) for v in model.inputs}  # type: ignore[union-attr]
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # starts the backend
    start = _seconds()
    jax.block_until_ready(model(**inputs))
    ready = _seconds() - start
    (subprogram,) = model._runtime.program._compiled.values()  # type: ignore[union-attr]
    (executable,) = subprogram.executables.values()
    texts: list[str]
    if isinstance(executable, Sections):
        programs = {s.executable: s.compiling for s in executable.sections}
        texts = [str(p.result().as_text()) for p in programs.values()]
    else:
        with jax.enable_x64(True):
            given = [jax.device_put(inputs[n]) for n in executable._types[1]]
            texts = [str(executable._whole.lower(executable.hoisted(model.weights), given).compile().as_text())]
    return f"| {depth} | {form} | {ready:.1f} | {sum(text.count(' = ') for text in texts)} |"


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(int(sys.argv[1]), sys.argv[2]))
    else:
        print("| layers | | processor seconds | HLO instructions |\n|---|---|---|---|", flush=True)
        for depth in DEPTHS:
            for form in FORMS:
                subprocess.run([sys.executable, "-m", "benchmarks.layers", str(depth), form], check=True)
