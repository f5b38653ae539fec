"""``onnx2jax join first.onnx second.onnx both.onnx --join output=input``: two models as one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import InputNameError
from ..model.files.join import join
from ..model.files.save import save
from .terminal import CommandError, add_command, pairs, print_json, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    joins = add_command(
        commands,
        "join",
        _join,
        "join two models: outputs of the first become inputs of the second",
        example="join encoder.onnx classifier.onnx both.onnx --join features=x",
        json="print the file's path, size, inputs and outputs as JSON",
    )
    joins.add_argument("first", type=Path)
    joins.add_argument("second", type=Path)
    joins.add_argument("output", type=Path, help="the file to write")
    joins.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="OUTPUT=INPUT",
        help="an output of the first model, and the input of the second that it feeds; repeatable",
    )
    joins.add_argument(
        "--prefix",
        default="second/",
        help="prefix of names of the second model that clash with the first (default: %(default)s)",
    )


def _join(arguments: argparse.Namespace) -> int:
    names: dict[str, list[str]] = {}
    for output, name in pairs("--join", arguments.join, "INPUT"):
        names.setdefault(output, []).append(name)
    with working(f"joining {arguments.first.name} and {arguments.second.name}"):
        try:
            joined = join(arguments.first, arguments.second, names, prefix=arguments.prefix)
        except InputNameError as error:
            raise CommandError(f"{error}: --join OUTPUT=INPUT") from None
        path = save(joined, arguments.output)
    if arguments.json:
        inputs, outputs = (
            [{"name": v.name, "type": str(v.type)} for v in vs] for vs in (joined.inputs, joined.outputs)
        )
        print_json({"path": str(path), "bytes": path.stat().st_size, "inputs": inputs, "outputs": outputs})
    else:
        print(f"{joined}\n{path}  {path.stat().st_size:,} bytes")
    return 0
