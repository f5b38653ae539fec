"""``onnx2jax export model.onnx out/``: a serialized ``jax.export`` program, which runs without this library."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.convert import convert
from ..model.files.export import PLATFORMS
from ..model.files.exported import load_exported
from .terminal import add_command, add_dims, extents, loading, print_json, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    export = add_command(
        commands,
        "export",
        _export,
        "write a program that runs with jax only",
        example="export model.onnx folder --dim batch=8 --platforms cpu,cuda,tpu",
        json="print inputs, outputs, platforms and files as JSON",
    )
    export.add_argument("model", type=Path)
    export.add_argument("folder", type=Path)
    add_dims(
        export, "the extent of a dimension variable: a number, or an expression such as past+1; symbolic by default"
    )
    export.add_argument(
        "--constraint", action="append", default=[], metavar="'A <= 512'", help="a constraint on dimensions; repeatable"
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


def _export(arguments: argparse.Namespace) -> int:
    sizes = extents(arguments.dim)
    with loading(arguments.model):
        model = convert(arguments.model)
    with working(f"lowering for {', '.join(arguments.platforms)}"):
        folder = model.export(
            arguments.folder,
            dims=sizes,
            constraints=arguments.constraint,
            platforms=arguments.platforms,
            weights=arguments.weights,
            text=arguments.text,
        )
    program, files = load_exported(folder), {str(f): f.stat().st_size for f in sorted(folder.iterdir())}
    if arguments.json:
        inputs = [{"name": v.name, "type": str(v.type)} for v in program.inputs]
        print_json({"inputs": inputs, "outputs": program.outputs, "platforms": program.platforms, "files": files})
        return 0
    print(program)
    for file, size in files.items():
        print(f"  {file}  {size:,} bytes")
    return 0
