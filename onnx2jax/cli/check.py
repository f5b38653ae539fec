"""``onnx2jax check model.onnx``: violations of the ONNX specification."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..checker.check import check
from .terminal import add_command, working


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
    checks.add_argument("model", type=Path)
    checks.add_argument(
        "--verify-checksums", action="store_true", help="compare checksums of external data; reads all of it"
    )
    checks.add_argument("--external-data-dir", type=Path, metavar="DIR", help="the folder of external data")
    checks.add_argument("--follow-links", action="store_true", help="accept external data behind links")


def _check(arguments: argparse.Namespace) -> int:
    with working(f"checking {arguments.model.name}"):
        report = check(
            arguments.model,
            external_data_dir=arguments.external_data_dir,
            follow_links=arguments.follow_links,
            verify_checksums=arguments.verify_checksums,
        )
    print(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1
