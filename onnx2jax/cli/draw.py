"""``onnx2jax draw model.onnx page.html`` and ``onnx2jax view model.onnx``: the graph as an interactive page."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path

from ..errors import ModelError, UnsupportedError
from ..model.convert import open_model
from ..model.model import Model
from ..model.reports.drawing import is_picture
from ..model.reports.page import by_position
from ..model.spec import Spec
from ..progress import stage
from ..proto.origin import Origin
from .inputs import add_inputs, filled, input_values, sized
from .parser import Arguments, CommandError, Parser, as_path, converted, reading
from .terminal import note, print_result

PROFILED: int = 5
"""Calls that ``--profile`` records."""


def add_draw(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("draw model.onnx page.html", json="print the page's path and size as JSON")
    parser.add_argument(
        "page", type=as_path, help="the file to write: one self-contained .html file, or an .svg picture"
    )
    add_facts(parser)


def add_facts(parser: Parser) -> None:
    """Add the options for what a page shows, which ``do_draw`` reads."""
    add_inputs(parser)
    parser.add_switch("--random", "show what nodes compute for random inputs")
    parser.add_switch("--profile", "colour nodes by the time of a call")
    parser.add_switch("--verify", "open at the first node that differs from others")
    parser.add_dims()


def do_draw(arguments: Arguments) -> None:
    """Write the page of the command's model, with what its options ask for, and print its path and size."""
    picture = is_picture(arguments.page)
    try:
        model = converted(arguments)
    except (UnsupportedError, ModelError) as e:
        if any(vars(arguments)[n] for n in ("dim", "random", "input", "text", "profile", "verify")):
            raise
        model = _unsupported(arguments, e)
    values = input_values(model, arguments)
    feeds = filled(model, values, arguments.seed) if values or arguments.random or arguments.profile else values
    if (feeds or arguments.profile or arguments.verify) and picture:
        raise CommandError("a picture shows the graph alone: write an .html page")
    profile = verification = None
    with stage("drawing"), sized(model, values):
        if arguments.profile:
            args, named = by_position(model, feeds)
            profile = model.profile(*args, calls=PROFILED, **named)
        if arguments.verify:
            verification = model.verify(*([feeds] if feeds else ()))
        page = model.draw(arguments.page, inputs=feeds or None, profile=profile, verification=verification)
    size = page.stat().st_size
    print_result(arguments, {"page": str(arguments.page), "bytes": size}, f"{arguments.page}  {size:,} bytes")


def _unsupported(arguments: Arguments, error: Exception) -> Model:
    """The model of a file with unsupported operators, to be drawn only."""
    importer = open_model(arguments.model, reading(arguments))
    imported = importer.model()
    if not imported.unsupported and not imported.rejected:
        raise error
    return Model(Spec.of(imported, origin=Origin(importer.message, importer.files)))


def add_view(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "view model.onnx --random --dim batch=2 --profile",
        json="print the page's path and size as JSON, and open nothing",
    )
    parser.add_argument("--page", type=as_path, help="the file to write (default: in a temporary folder)")
    add_facts(parser)


def do_view(arguments: Arguments) -> None:
    arguments.page = arguments.page or Path(tempfile.mkdtemp(prefix="onnx2jax-"), f"{arguments.model.stem}.html")
    do_draw(arguments)
    if not arguments.json and not webbrowser.open(arguments.page.resolve().as_uri()):
        note("there is no browser here: open the page elsewhere")
