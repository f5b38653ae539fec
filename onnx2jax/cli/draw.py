"""``onnx2jax draw model.onnx page.html``: the graph as an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import open_model
from ..model.model import Model
from ..model.spec import Spec
from .terminal import add_command, add_model, loading, print_json, reading


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    draw = add_command(
        commands,
        "draw",
        _draw,
        "write the graph, branches and bodies included, as an HTML page",
        example="draw model.onnx page.html",
        json="print the page's path and size as JSON",
    )
    add_model(draw)
    draw.add_argument("page", type=Path, help="the file to write: one self-contained HTML file")


def _draw(arguments: argparse.Namespace) -> int:
    with loading(arguments.model):
        # Works with unsupported operators, too.
        path = Model(Spec.of(open_model(arguments.model, reading(arguments)).model())).draw(arguments.page)
    size = path.stat().st_size
    if arguments.json:
        print_json({"page": str(path), "bytes": size})
    else:
        print(f"{path}  {size:,} bytes")
    return 0
