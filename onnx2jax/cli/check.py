"""``onnx2jax check model.onnx``: violations of the ONNX specification."""

from __future__ import annotations

import argparse
from typing import Any

from ..checker.check import check
from .terminal import add_command, add_model, reading, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    checks = add_command(
        commands,
        "check",
        _check,
        "list violations of the ONNX specification",
        example="check model.onnx --json",
        statuses={1: "there are errors, or the file cannot be read"},
    )
    add_model(checks)
    checks.add_argument(
        "--verify-checksums", action="store_true", help="compare checksums of external data; reads all of it"
    )


def _check(arguments: argparse.Namespace) -> int:
    with working(f"checking {arguments.model.name}"):
        report = check(
            arguments.model,
            verify_checksums=arguments.verify_checksums,
            **reading(arguments),
        )
    print(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1
