"""``onnx2jax summary model.onnx``: output shapes and costs of each node."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any

from ..errors import OperatorError
from ..model.reports.summary import HEAD
from .terminal import add_command, add_dims, add_model, converted, dims, print_table


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    summary = add_command(
        commands,
        "summary",
        _summary,
        "show each node's output shapes, parameters, FLOPs and bytes",
        example="summary model.onnx --dim batch=8",
    )
    add_model(summary)
    add_dims(summary)


def _summary(arguments: argparse.Namespace) -> int:
    sizes = dims(arguments.dim)
    model = converted(arguments)
    try:
        found = model.summary(dims=sizes)
    except OperatorError as error:
        raise OperatorError(re.sub(r"model\.summary\(dims=(\{.*?\})\)", _flags, str(error))) from error
    if arguments.json:
        print(found.to_json())
    else:
        print_table(found.total, HEAD, found.rows())
    return 0


def _flags(advice: re.Match[str]) -> str:
    """The extents that ``model.summary`` advises, as flags."""
    return " ".join(f"--dim {name}={size}" for name, size in ast.literal_eval(advice[1]).items())
