"""``onnx2jax export model.onnx out/``: a program of ``jax.export`` or StableHLO, which runs without this library."""

from __future__ import annotations

import argparse
import ast
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..model.files.export import ABOUT, PLATFORMS
from ..model.files.exported import load_exported
from ..progress import stage
from .parser import Arguments, Parser, as_path, converted
from .terminal import declaration, note, print_result


def add_export(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "export model.onnx folder --dim batch=8 --platforms cpu,cuda,tpu",
        json="print inputs, outputs, platforms and files as JSON",
    )
    parser.add_argument("folder", type=as_path)
    parser.add_dims(
        "the extent of a dimension variable: a number, or an expression such as past+1; symbolic by default", _extent
    )
    parser.add_pairs(
        "--static",
        "NAME=VALUE",
        "fix an input whose value decides shapes or branches: a number, or a list [1, 8]",
        _literal,
    )
    parser.add_repeatable("--constraint", "'A <= 512'", "a constraint on dimensions")
    parser.add_argument(
        "--platforms",
        type=lambda text: text.split(","),
        metavar="cpu,cuda,tpu",
        help=f"some of {', '.join(PLATFORMS)} (default: cpu,cuda,tpu; cpu for StableHLO)",
    )
    parser.add_argument(
        "--format", choices=["jax", "stablehlo"], default="jax", help="stablehlo: for other compilers, such as IREE"
    )
    parser.add_argument(
        "--vjp-order", type=int, default=0, metavar="N", help="how many times the program can be differentiated (0)"
    )
    parser.add_rebatch()
    parser.add_computing()
    parser.add_argument("--weights", choices=["beside", "inside"], default="beside", help="(default: %(default)s)")
    parser.add_switch("--text", "write the program as StableHLO too")


def do_export(arguments: Arguments) -> None:
    model = converted(arguments, dims=None, static=dict(arguments.static))
    with stage("lowering"), _attempts():
        folder = model.export(
            arguments.folder,
            dims=dict(arguments.dim),
            constraints=arguments.constraint,
            platforms=arguments.platforms,
            weights=arguments.weights,
            text=arguments.text,
            format=arguments.format,
            vjp_order=arguments.vjp_order,
        )
    files = {str(f): f.stat().st_size for f in sorted(folder.iterdir())}
    listed = [f"  {file}  {size:,} bytes" for file, size in files.items()]
    about = json.loads((folder / ABOUT).read_text())
    if arguments.format == "stablehlo":
        facts = {**{key: about[key] for key in ("arguments", "results", "platform")}, "files": files}
        print_result(arguments, facts, _stablehlo(about), *listed)
        return
    program = load_exported(folder)
    if constraints := about["constraints"][len(arguments.constraint) :]:
        note(f"the model requires {', '.join(constraints)}")
    for name, k in about.get("multiples", {}).items():
        note(f"{name} must be a multiple of {k}, which the model requires; fix it: --dim {name}={8 * k}")
    inputs = list(map(declaration, program.inputs))
    facts = {"inputs": inputs, "outputs": program.outputs, "platforms": program.platforms, "files": files}
    print_result(arguments, facts, program, *listed)


def _extent(text: str) -> int | str:
    """Parse an extent: a number, or an expression of other dimensions, as in ``total=past+sequence``."""
    return int(text) if text.isdecimal() else text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of numbers") from None


@contextmanager
def _attempts() -> Iterator[None]:
    """Shows on standard error what export tries: attempts with more constraints may take a while."""
    logger, handler = logging.getLogger("onnx2jax.export"), logging.StreamHandler()
    if sys.stderr.isatty():  # where a line about progress may stand
        handler.setFormatter(logging.Formatter("\r\x1b[K%(message)s"))
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _stablehlo(about: Mapping[str, Any]) -> str:
    """The function of a StableHLO program, in a line."""
    arguments = ", ".join(f"{a['name']}: {a['dtype']}{a['shape']}" for a in about["arguments"] if a["kind"] != "weight")
    weights = sum(a["kind"] == "weight" for a in about["arguments"])
    beside = f", {weights} weights" if weights else ""
    return f"StableHLO: main({arguments}{beside}) -> ({', '.join(r['name'] for r in about['results'])})"
