"""``onnx2jax verify model.onnx``, ``onnx2jax summary model.onnx``: what takes more than the file to say."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .errors import InputNameError
from .model.convert import convert
from .model.summary import HEAD
from .terminal import print_table


def add(commands: Any) -> None:
    """Add the commands to the parser's."""
    verify = commands.add_parser("verify", help="compare with onnxruntime, and name the first node that differs")
    verify.set_defaults(command=_verify)
    verify.add_argument("model", type=Path)
    verify.add_argument(
        "--against",
        metavar="WHAT",
        help="onnxruntime, reference (ONNX's own), or a folder with test data (default: test data beside the "
        "model, or else onnxruntime)",
    )
    verify.add_argument("--each-node", action="store_true", help="compare every node, also where outputs are the same")
    verify.add_argument("--rtol", type=float, help="relative tolerance (default: by element type)")
    verify.add_argument("--atol", type=float, help="absolute tolerance (default: by element type and size)")
    verify.add_argument("--seed", type=int, default=0, help="of random inputs (default: %(default)s)")
    verify.add_argument("--dim", action="append", default=[], metavar="NAME=N", help="a free dimension; repeatable")
    verify.add_argument(
        "--operands", type=Path, metavar="FILE.npz", help="where to save what the first node that differs reads"
    )
    verify.add_argument("--json", action="store_true", help="print everything as JSON")

    summary = commands.add_parser("summary", help="show each node's output shapes, parameters, FLOPs and bytes")
    summary.set_defaults(command=_summary)
    summary.add_argument("model", type=Path)
    summary.add_argument("--dim", action="append", default=[], metavar="NAME=N", help="a free dimension; repeatable")
    summary.add_argument("--json", action="store_true", help="print everything as JSON")


def dims(options: list[str]) -> dict[str, int]:
    """The extents of ``NAME=N`` options.

    Raises:
        InputNameError: one is of another form.
    """
    found = {}
    for option in options:
        name, equals, value = option.rpartition("=")
        if not (name and equals and value.isdecimal()):
            raise InputNameError(f"--dim {option}: expected NAME=N, a name and a whole number")
        found[name] = int(value)
    return found


def _verify(arguments: argparse.Namespace) -> int:
    model = convert(arguments.model, dim_overrides=dims(arguments.dim))
    found = model.verify(
        against=arguments.against,
        each_node=arguments.each_node,
        rtol=arguments.rtol,
        atol=arguments.atol,
        seed=arguments.seed,
    )
    print(found.to_json() if arguments.json else found)
    if found.first is not None:
        path = arguments.operands or Path(f"{arguments.model.stem}-difference.npz")
        print(f"its operands and results are in {found.first.save(path)}", file=sys.stderr)
    return 0 if found else 1


def _summary(arguments: argparse.Namespace) -> int:
    found = convert(arguments.model).summary(dims=dims(arguments.dim))
    if arguments.json:
        print(found.to_json())
    else:
        print_table(found.total, HEAD, found.rows())
    return 0
