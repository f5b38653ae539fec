"""``onnx2jax source model.onnx folder``: the model as a Python module, and its weights beside it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import convert
from .terminal import add_command, add_dims, add_model, dims, print_json, reading, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    source = add_command(
        commands,
        "source",
        _source,
        "write the model as a Python module over jax.numpy, and its weights beside it",
        example="source model.onnx folder --dim batch=1",
        json="print the module's path and number of lines as JSON",
    )
    add_model(source)
    source.add_argument("folder", type=Path, help="the folder of model.py and params.safetensors")
    add_dims(source, "fix the extent of a dimension variable (default: it stays a name)")


def _source(arguments: argparse.Namespace) -> int:
    sizes = dims(arguments.dim)
    with working(f"writing {arguments.folder}"):
        path = convert(arguments.model, **reading(arguments), dims=sizes).to_source(arguments.folder)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if arguments.json:
        print_json({"path": str(path), "lines": lines})
    else:
        print(f"{path}  {lines:,} lines")
    return 0
