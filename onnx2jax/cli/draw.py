"""``onnx2jax draw model.onnx page.html``: the graph as an interactive page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ModelError, UnsupportedError
from ..model.convert import convert, open_model
from ..model.model import Model
from ..model.reports.facts import by_position
from ..model.spec import Spec
from ..proto.origin import Origin
from .inputs import add_inputs, filled, given, sized
from .terminal import CommandError, add_command, add_dims, add_model, dims, loading, print_json, reading, working

PROFILED: int = 5
"""Calls that ``--profile`` records."""


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    draw = add_command(
        commands,
        "draw",
        _draw,
        "write the graph, branches and bodies included, as an interactive HTML page, or as a picture",
        example="draw model.onnx page.html",
        json="print the page's path and size as JSON",
    )
    add_model(draw)
    draw.add_argument("page", type=Path, help="the file to write: one self-contained .html file, or an .svg picture")
    add_facts(draw)


def add_facts(parser: argparse.ArgumentParser) -> None:
    """Add the options for what a page shows, which ``written`` reads."""
    add_inputs(parser)
    parser.add_argument("--random", action="store_true", help="show what nodes compute for random inputs")
    parser.add_argument("--profile", action="store_true", help="colour nodes by the time of a call")
    parser.add_argument("--verify", action="store_true", help="open at the first node that differs from others")
    add_dims(parser)


def _draw(arguments: argparse.Namespace) -> int:
    tell(written(arguments, arguments.page), arguments.json)
    return 0


def tell(path: Path, as_json: bool) -> None:
    """Print the path and the size of a page."""
    size = path.stat().st_size
    if as_json:
        print_json({"page": str(path), "bytes": size})
    else:
        print(f"{path}  {size:,} bytes")


def written(arguments: argparse.Namespace, path: Path) -> Path:
    """Write the page of the command's model, with what its options ask for."""
    sizes = dims(arguments.dim)
    with loading(arguments.model):
        try:
            model = convert(arguments.model, **reading(arguments), dims=sizes)
        except (UnsupportedError, ModelError) as e:
            if sizes or arguments.random or arguments.input or arguments.text or arguments.profile or arguments.verify:
                raise
            model = _unsupported(arguments, e)
    shown: dict[str, Any] = {}
    feeds = given(model, arguments)
    if feeds or arguments.random or arguments.profile:
        feeds = filled(model, feeds, arguments.seed)
    if (feeds or arguments.profile or arguments.verify) and path.suffix.lower() == ".svg":
        raise CommandError("a picture shows the graph alone: write an .html page")
    with working("drawing"), sized(model, feeds):
        if arguments.profile:
            args, named = by_position(model, feeds)
            shown["profile"] = model.profile(*args, calls=PROFILED, **named)
        if arguments.verify:
            shown["verification"] = model.verify(*([feeds] if feeds else ()))
        return model.draw(path, inputs=feeds or None, **shown)


def _unsupported(arguments: argparse.Namespace, error: Exception) -> Model:
    """The model of a file with unsupported operators, to be drawn only."""
    importer = open_model(arguments.model, reading(arguments))
    imported = importer.model()
    if not imported.unsupported and not imported.rejected:
        raise error
    return Model(Spec.of(imported, origin=Origin(importer.message, importer.files)))
