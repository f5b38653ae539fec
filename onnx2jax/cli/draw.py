"""``onnx2jax draw model.onnx page.html``: the main graph as a page for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import open_model
from ..model.model import Model


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    draw = commands.add_parser("draw", help="write the main graph as a page that a browser shows")
    draw.set_defaults(command=_draw)
    draw.add_argument("model", type=Path)
    draw.add_argument("page", type=Path, help="the file to write: HTML with its picture, styles and script inside")


def _draw(arguments: argparse.Namespace) -> int:
    # Also where operators are missing.
    path = Model(open_model(arguments.model, {}).model()).draw(arguments.page)
    print(f"{path}  {path.stat().st_size:,} bytes")
    return 0
