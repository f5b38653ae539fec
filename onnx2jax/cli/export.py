"""``onnx2jax export model.onnx out/``: a program of ``jax.export``, for machines without this library."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import convert
from ..model.export import PLATFORMS
from ..model.exported import load_exported


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    export = commands.add_parser("export", help="write a program that runs with jax alone")
    export.set_defaults(command=_export)
    export.add_argument("model", type=Path)
    export.add_argument("folder", type=Path)
    export.add_argument(
        "--dim",
        action="append",
        default=[],
        type=_dim,
        metavar="NAME=N",
        help="a number, or an expression such as past+1, for a free dimension; repeatable",
    )
    export.add_argument(
        "--constraint", action="append", default=[], metavar="'A <= 512'", help="what holds of dimensions; repeatable"
    )
    export.add_argument(
        "--platforms",
        type=lambda text: text.split(","),
        default=["cpu", "cuda", "tpu"],
        metavar="cpu,cuda,tpu",
        help=f"some of {', '.join(PLATFORMS)} (default: cpu,cuda,tpu)",
    )
    export.add_argument("--weights", choices=["beside", "inside"], default="beside", help="(default: %(default)s)")
    export.add_argument("--text", action="store_true", help="write the program as StableHLO too")


def _dim(text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=N")
    return name, int(value) if value.isdecimal() else value


def _export(arguments: argparse.Namespace) -> int:
    folder = convert(arguments.model).export(
        arguments.folder,
        dims=dict(arguments.dim),
        constraints=arguments.constraint,
        platforms=arguments.platforms,
        weights=arguments.weights,
        text=arguments.text,
    )
    print(load_exported(folder))
    for file in sorted(folder.iterdir()):
        print(f"  {file}  {file.stat().st_size:,} bytes")
    return 0
