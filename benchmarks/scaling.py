"""Estimates the cost of decoders of 7 and 70 billion parameters on many devices: writes docs/scaling.md.

    python -m benchmarks.scaling

The decoders are ONNX files with shapes only: their weights are external data in a file that does not exist. Each
row is the output of `onnx2jax plan`, in a separate process.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from onnx import TensorProto

from benchmarks.decoders import Size, Writer
from onnx2jax.model.devices.chips import CHIPS, Chip
from onnx2jax.model.devices.cost import Cost, cost

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
SIZES: Final = {
    "7B": Size(32000, 32, 4096, 32, 32, 11008),
    "70B": Size(32000, 80, 8192, 64, 8, 28672),
}
BATCH, LENGTH = 64, 128
TOKENS: Final = BATCH * LENGTH
DIMS: Final = {
    "batch_size": BATCH,
    "sequence_length": LENGTH,
    "total_sequence_length": LENGTH,
    "past_sequence_length": 0,
}


class Description(Writer):
    """A decoder whose large weights are external data in a file that is never written."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, 0)
        self.end = 0

    def weight(self, name: str, rows: int, columns: int, scale: float) -> str:  # noqa: ARG002
        length = rows * columns * 4
        tensor = TensorProto(name=name, dims=(rows, columns), data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights", "offset": self.end, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        self.weights.append(tensor)
        self.end += length
        return name


def described(size: Size, path: Path) -> Path:
    path.write_bytes(Description(size).model().SerializeToString())
    return path


@dataclass(frozen=True)
class Machine:
    """An accelerator by its data sheet, and the one-way bytes/s to its neighbours."""

    chip: Chip
    link: float

    @property
    def balance(self) -> float:
        """FLOPs per transferred byte below which collectives take longer than the computation."""
        return self.chip.flops / self.link


MACHINES: Final = {
    "TPU v5e": Machine(CHIPS["v5e"], 200e9),
    "H100 (NVLink)": Machine(CHIPS["h100"], 450e9),
    "H100 (400 Gbit/s)": Machine(CHIPS["h100"], 50e9),
    "TPU v5p": Machine(Chip("TPU v5p", 459e12, 2.765e12, 95 * 10**9), 600e9),  # XLA cannot compile for one chip of it
}
MOVED: Final = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}
"""The factor by which a ring algorithm transfers the bytes of a result, for many devices."""
ROWS: Final = (
    ("7B", "data=8", "data"),
    ("7B", "data=8", "fsdp"),
    ("7B", "model=8", "tensor"),
    ("7B", "data=2,model=4", "data+tensor"),
    ("7B", "stage=4,data=2", "data"),
    ("70B", "model=8", "tensor"),
    ("70B", "data=64", "fsdp"),
    ("70B", "data=8,model=8", "data+tensor"),
    ("70B", "data=8,model=8", "fsdp+tensor"),
    ("70B", "data=64,model=8", "fsdp+tensor"),
    ("70B", "stage=8,model=8", "tensor"),
)


@dataclass(frozen=True)
class Found:
    """The cost of a decoder's step on one device, in bfloat16."""

    weights: float
    flops: float
    number: float
    moved: float


def measured(size: Size, mesh: str, plan: str, folder: Path) -> Found:
    """The bytes of the whole decoder, and its cost extrapolated from one and two layers."""
    axes = {name: int(n) for name, n in (a.split("=") for a in mesh.split(","))}
    inside = {n: extent for n, extent in axes.items() if n != "stage"}
    stages, parts = axes.get("stage", 1), axes.get("data", 1)
    whole = cost(described(size, folder / "whole.onnx"), axes, plan, DIMS, compiled=False)
    few = [cost(described(replace(size, layers=n), folder / f"{n}.onnx"), inside, plan, DIMS) for n in (1, 2)]

    def of_all(what: Callable[[Cost], float]) -> float:
        one, two = map(what, few)
        return (one + (size.layers - 1) * (two - one)) / stages

    number = of_all(lambda f: sum(e.number for e in f.exchanges))
    moved = of_all(lambda f: sum(MOVED.get(e.kind, 1) * e.bytes for e in f.exchanges))
    handed = (stages > 1) * TOKENS * size.hidden * 4 / parts
    flops = of_all(lambda f: float(f.flops or 0))
    return Found(whole.weight_bytes / 2, flops, number + (stages > 1), (moved + handed) / 2)


def row(name: str, mesh: str, plan: str, found: Found) -> str:
    devices = math.prod(int(a.split("=")[1]) for a in mesh.split(","))
    fits = [n for n, m in MACHINES.items() if found.weights < 0.8 * m.chip.memory]
    share = found.flops / found.moved if found.moved else math.inf
    bound = [n for n in fits if MACHINES[n].balance > share]
    cells = (
        *(name, mesh.replace(",", ", "), plan, f"{found.weights / 1e9:.3g}", f"{found.flops / 1e12:.3g}"),
        *(f"{found.number:.0f}", f"{found.moved / 1e9:.3g}", f"{found.moved * devices / TOKENS / 1e6:.3g}"),
        *("-" if share == math.inf else f"{share:,.0f}", ", ".join(fits) or "none", ", ".join(bound) or "none"),
    )
    return f"| {' | '.join(cells)} |"


HEAD: Final = f"""# What large decoders cost on many devices

Written by `python -m benchmarks.scaling`. These are estimates: nothing was run, and no weights exist. Two decoders
are described as ONNX with shapes alone, in the form in which onnxruntime-genai's builder writes llama: 7B has 32
layers of width 4096, 70B has 80 of width 8192 with 8 key-value heads. A step is one forward pass over {BATCH}
sequences of {LENGTH} tokens.

Each row is the output of `onnx2jax plan decoder.onnx --mesh ... --plan ...`, which compiles the program for as many
CPU devices and counts its FLOPs and collectives:

- **Weights**: bytes of the whole decoder on the device that has most. The other columns are extrapolated from
  decoders of one and two layers, because compiling all layers would take too long.
- CPU programs transfer float32. Bytes here are half of theirs, for weights and activations in bfloat16.
- **Moved**: bytes that a device sends. A ring sends the result of an all-reduce twice, of other collectives once. A
  pipeline stage sends one activation per batch.
- **FLOPs a byte**: FLOPs per byte moved. A plan whose value is below a machine's balance is bound by collectives
  there, unless they overlap with computation.
- A plan **fits** if its weights take less than 80 % of the memory. KV caches, activations and, in training, gradients
  and optimizer state come in addition.

Not counted: the latency of collectives, which dominates if a step has few tokens. A mesh axis of more than 8 H100
leaves NVLink; the 400 Gbit/s row covers that case.

| machine, by its data sheet | memory, GB | TFLOP/s, bfloat16 | GB/s between devices, one way | FLOPs a byte |
|---|---|---|---|---|
"""
FOOT: Final = """

Conclusions:

- `fsdp` gathers every weight in every step, whatever the number of tokens. Its FLOPs a byte are about the number of
  tokens per device: 1024 for 8 devices, 128 for 64. It needs large batches.
- `tensor` needs two all-reduces of activations per layer and one for the embedding, so bytes grow with the number of
  tokens, and FLOPs a byte with the width of the model divided by the devices of the axis. It needs the fastest links,
  and few devices.
- `data+tensor` also divides the tokens, at the same FLOPs a byte; weights are replicated over the data axis.
  `fsdp+tensor` shards weights over both axes, and has the collectives of both.
- Pipeline stages move least. Their cost is idle time: for `m` microbatches and `n` stages, `(n - 1) / (m + n - 1)` of
  each device's time.
"""
COLUMNS: Final = (
    *("decoder", "mesh", "plan", "weights, GB a device", "TFLOPs a device", "exchanges", "moved, GB a device"),
    *("moved by all, MB a token", "FLOPs a byte", "fits", "bound by exchanges on"),
)


def in_a_process(number: int) -> str:
    """A row of the table, in a separate process: JAX fixes the number of devices at its start."""
    mesh = ROWS[number][1]
    devices = math.prod(int(a.split("=")[1]) for a in mesh.split(","))
    # LLVM's optimiser does not change collectives, and takes most of the time.
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    env |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "benchmarks.scaling", "--row", str(number)]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, help="print one row, in a process that has its devices")
    number = parser.parse_args().row
    if number is not None:
        name, mesh, plan = ROWS[number]
        with tempfile.TemporaryDirectory() as folder:
            print(row(name, mesh, plan, measured(SIZES[name], mesh, plan, Path(folder))))
        return
    lines = [
        f"| {n} | {m.chip.memory / 1e9:.0f} | {m.chip.flops / 1e12:.0f} | {m.link / 1e9:.0f} | {m.balance:,.0f} |"
        for n, m in MACHINES.items()
    ]
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for i in range(len(ROWS)):
        lines.append(in_a_process(i))
        print(lines[-1], flush=True)
    PAGE.write_text(HEAD + "\n".join(lines) + FOOT)


if __name__ == "__main__":
    main()
