"""``onnx2jax verify model.onnx``: the same numbers as elsewhere, or the first node that differs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..model.convert import convert
from .terminal import dims


def add(commands: Any) -> None:
    """Add the command to a parser's."""
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
