"""``onnx2jax summary model.onnx``: output shapes and costs of each node."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import convert
from ..model.reports.summary import HEAD
from .terminal import add_command, add_dims, dims, loading, print_table


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    summary = add_command(
        commands,
        "summary",
        _summary,
        "show each node's output shapes, parameters, FLOPs and bytes",
        example="summary model.onnx --dim batch=8",
    )
    summary.add_argument("model", type=Path)
    add_dims(summary)


def _summary(arguments: argparse.Namespace) -> int:
    sizes = dims(arguments.dim)
    with loading(arguments.model):
        found = convert(arguments.model).summary(dims=sizes)
    if arguments.json:
        print(found.to_json())
    else:
        print_table(found.total, HEAD, found.rows())
    return 0
