"""``onnx2jax summary model.onnx``: what each node gives and costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import convert
from ..model.summary import HEAD
from .terminal import dims, print_table


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    summary = commands.add_parser("summary", help="show each node's output shapes, parameters, FLOPs and bytes")
    summary.set_defaults(command=_summary)
    summary.add_argument("model", type=Path)
    summary.add_argument("--dim", action="append", default=[], metavar="NAME=N", help="a free dimension; repeatable")
    summary.add_argument("--json", action="store_true", help="print everything as JSON")


def _summary(arguments: argparse.Namespace) -> int:
    found = convert(arguments.model).summary(dims=dims(arguments.dim))
    if arguments.json:
        print(found.to_json())
    else:
        print_table(found.total, HEAD, found.rows())
    return 0
