"""``onnx2jax verify`` and ``check``: compares a model's results with others, and its file with the specification."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checker.check import check
from ..errors import UnsupportedError
from ..model.calls.arguments import named_dims
from ..model.model import Model
from ..model.reports.samples import data_sets
from ..progress import stage
from .inputs import add_inputs, filled, input_values, say_sizes, sized
from .parser import Parser, as_npz, converted, reading
from .terminal import note, print_result


def add_verify(parser: Parser) -> None:
    """Add the options of the command."""
    parser.set_command(
        _verify,
        example="verify model.onnx --dim batch=2 --each-node",
        statuses={1: "outputs differ, or the model or the data is invalid"},
    )
    parser.add_argument(
        "--against",
        metavar="WHAT",
        help="onnxruntime, reference (ONNX's own), or a folder with test data (default: test data beside the "
        "model, else onnxruntime)",
    )
    parser.add_switch("--each-node", "compare every node, even if outputs agree")
    parser.add_argument("--rtol", type=float, help="relative tolerance (default: by element type)")
    parser.add_argument("--atol", type=float, help="absolute tolerance (default: by element type and size)")
    add_inputs(parser)
    parser.add_dims()
    parser.add_dtype()
    parser.add_argument(
        "--operands", type=as_npz, metavar="FILE.npz", help="where to save the operands of the first node that differs"
    )


def _verify(arguments: argparse.Namespace) -> int:
    model = converted(arguments)
    feeds = input_values(model, arguments)
    with stage("comparing"), sized(model, feeds), _named(model, feeds, arguments.model):
        verification = model.verify(
            *([filled(model, feeds, arguments.seed)] if feeds else []),
            against=arguments.against,
            each_node=arguments.each_node,
            rtol=arguments.rtol,
            atol=arguments.atol,
            seed=arguments.seed,
        )
    if not feeds and "inputs" in verification.outputs:  # random ones; test data have other names
        say_sizes(named_dims(model.inputs))
    print_result(arguments, verification)
    if verification.first is not None:
        path = arguments.operands or Path(f"{arguments.model.stem}-difference.npz")
        note(f"its operands and results are in {verification.first.save(path)}")
    return 0 if verification else 1


@contextmanager
def _named(model: Model, feeds: Mapping[str, Any], path: Path) -> Iterator[None]:
    """Name the inputs that are random numbers if another implementation rejects them."""
    try:
        yield
    except UnsupportedError as e:
        if (names := [v.name for v in model.inputs if v.name not in feeds]) and not data_sets(path.parent):
            flags = " ".join(f"--input {name}=FILE.npy" for name in names)
            e.add_note(f"inputs are random numbers, which may be invalid in this model; others: {flags}")
        raise


def add_check(parser: Parser) -> None:
    """Add the options of the command."""
    parser.set_command(
        _check, example="check model.onnx --json", statuses={1: "there are errors, or the file cannot be read"}
    )
    parser.add_switch("--verify-checksums", "compare checksums of external data; reads all of it")


def _check(arguments: argparse.Namespace) -> int:
    with stage(f"checking {arguments.model.name}"):
        report = check(arguments.model, verify_checksums=arguments.verify_checksums, **reading(arguments))
    print_result(arguments, report)
    return 0 if report.ok else 1
