"""``onnx2jax demo``: converts, runs and differentiates the bundled model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import demo
from .terminal import add_command, print_json, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    shows = add_command(
        commands,
        "demo",
        _demo,
        "classify sixteen digits with the bundled model, and differentiate it",
        example="demo --output demo.png",
        statuses={1: "matplotlib or rich is not installed"},
        json="print the numbers as JSON and draw nothing; needs no extras",
    )
    shows.add_argument("--output", type=Path, default=Path("demo.png"), help="the picture (default: %(default)s)")


def _demo(arguments: argparse.Namespace) -> int:
    sign = working("converting, compiling and differentiating")
    if not arguments.json:
        return demo.run(arguments.output, sign)
    with sign:
        found = demo.compute()
    samples = found.samples
    print_json(
        {
            "labels": samples.labels.tolist(),
            "predictions": found.predictions.tolist(),
            "right": int((found.predictions == samples.labels).sum()),
            "seconds": found.timings._asdict(),
            "reference_difference": found.reference_difference,
            "vmap_difference": found.vmap_difference,
            "gradient": found.gradient,
            "finite_difference": found.finite_difference,
        }
    )
    return 0
