"""The section of docs/accelerators.md with times on GPUs, from docs/gpu.json."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

KEPT: Final = Path(__file__).resolve().parents[1] / "docs" / "gpu.json"
"""A list of runs, one a device."""
BANDWIDTH: Final = {"NVIDIA H100": 3.35e12, "NVIDIA H200": 4.8e12}
"""Bytes a second of device memory, from the maker's tables."""
OURS, TORCH = ("onnx2jax", "in a jit"), ("torch.compile, graphs",)
TITLES: Final = {"onnx2jax": "call"}

TIMED_TEXT: Final = """Milliseconds by `python -m benchmarks.on_gpu`: inputs and results stay on the device, and many
calls are made before the last is awaited. float32 products run in TF32. `call` is `model(x)`, `in a jit` a caller's
`jax.jit` of `model.simplified().apply`; `ratio` is by hand over the faster of both, below 1 where by hand is faster.
PyTorch compiles with `mode="reduce-overhead"`. What was not compiled in the time that a GPU was at hand is missing."""


def lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The section of docs/accelerators.md."""
    yield from ("", "## Timed on a GPU", "", TIMED_TEXT)
    for run in runs:
        yield from ("", f"### {run['device']}, jax {run['jax']}")
        if "note" in run:
            yield from ("", *textwrap.wrap(run["note"], 120))
        if networks := run.get("networks"):
            yield from _networks(networks)
        if steps := run.get("training"):
            yield from _training(steps)
        if decoders := run.get("decoders"):
            yield from _decoders(decoders, run["device"])


def _networks(networks: Mapping[str, Any]) -> Iterator[str]:
    names = [n for n in (*OURS, "by hand", *TORCH) if any(n in found for found in networks.values())]
    yield from (
        "",
        f"| | type | batch | {' | '.join(TITLES.get(n, n) for n in names)} | ratio |",
        f"|{'---|' * (4 + len(names))}",
    )
    for key, found in networks.items():
        is_compared = {*OURS, "by hand"} <= found.keys()
        ratio = f"{found['by hand'] / min(found[n] for n in OURS):.2f}" if is_compared else "-"
        times = (f"{found[n]:.2f}" if n in found else "-" for n in names)
        yield f"| {' | '.join(key.split('; '))} | {' | '.join(times)} | {ratio} |"


def _training(steps: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "Training steps, the gradient by all weights:", "", "| | type | batch | ours | by hand | ratio |")
    yield "|---|---|---|---|---|---|"
    for key, found in steps.items():
        ours, hand = found[OURS[0]], found["by hand"]
        yield f"| {' | '.join(key.split('; '))} | {ours:.2f} | {hand:.2f} | {hand / ours:.2f} |"


def _decoders(decoders: Mapping[str, Any], device: str) -> Iterator[str]:
    bandwidth = next(rate for name, rate in BANDWIDTH.items() if device.startswith(name))
    yield from ("", "Decoders in bfloat16, 128 tokens after 32; the bound of a step reads all weights once:", "")
    yield from ("| | batch | tokens a second | a step, ms | bound, ms |", "|---|---|---|---|---|")
    for key, found in decoders.items():
        bound = found["held"] / bandwidth * 1e3
        name, batch = key.split("; ")
        yield f"| {name} | {batch} | {found['tokens']:,.0f} | {found['step']:.2f} | {bound:.2f} |"
