"""Models with external data, and counts of the bytes read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import helper

from onnx2jax.proto.mapped import File
from tests.support.models import model, value

F = np.float32


def written(path: Path, size: int = 256, layers: int = 2) -> int:
    """A network of two products a layer, x [n, size] -> y [n, size], its weights in a file; the bytes of these."""
    rng, weights = np.random.default_rng(0), {}
    nodes, x = [], "x"
    for i in range(layers):
        weights |= {f"up{i}": rng.normal(size=(size, 2 * size)), f"down{i}": rng.normal(size=(2 * size, size))}
        nodes += [
            helper.make_node("MatMul", [x, f"up{i}"], [f"h{i}"]),
            helper.make_node("Tanh", [f"h{i}"], [f"t{i}"]),
            helper.make_node("MatMul", [f"t{i}", f"down{i}"], [x := f"x{i}"]),
        ]
    nodes.append(helper.make_node("Identity", [x], ["y"]))
    arrays = {n: (w / size).astype(F) for n, w in weights.items()}
    proto = model(nodes, [value("x", F, ["n", size])], [value("y", F, ["n", size])], arrays)
    onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
    return sum(w.nbytes for w in arrays.values())


@dataclass
class Reads:
    """How many bytes have been read of files beside models, and how many at most at once."""

    bytes: int = 0
    largest: int = 0


@contextmanager
def counted() -> Iterator[Reads]:
    """Counts the bytes read inside the scope."""
    reads, read = Reads(), File.read_runs

    def read_runs(file: File, starts: Any, nbytes: int) -> np.ndarray:
        reads.bytes += len(starts) * nbytes
        reads.largest = max(reads.largest, len(starts) * nbytes)
        return read(file, starts, nbytes)

    with mock.patch.object(File, "read_runs", read_runs):
        yield reads
