"""``onnx2jax view model.onnx``: the graph as an interactive page in the browser."""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from .draw import add_facts, tell, written
from .terminal import add_command, add_model, note


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    view = add_command(
        commands,
        "view",
        _view,
        "open the graph as an interactive page in the browser",
        example="view model.onnx --random --dim batch=2 --profile",
        json="print the page's path and size as JSON, and open nothing",
    )
    add_model(view)
    view.add_argument("--page", type=Path, help="the file to write (default: in a temporary folder)")
    add_facts(view)


def _view(arguments: argparse.Namespace) -> int:
    path = arguments.page or Path(tempfile.mkdtemp(prefix="onnx2jax-"), f"{arguments.model.stem}.html")
    tell(written(arguments, path), arguments.json)
    if not arguments.json and not webbrowser.open(path.resolve().as_uri()):
        note("there is no browser here: open the page elsewhere")
    return 0
