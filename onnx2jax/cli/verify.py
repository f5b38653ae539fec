"""``onnx2jax verify`` and ``check``: compares a model's results with others, and its file with the specification."""

from __future__ import annotations

from pathlib import Path

from ..checker.check import check
from ..errors import UnsupportedError
from ..model.reports.samples import data_sets
from ..progress import stage
from .inputs import add_inputs, filled, input_values, say_extents, sized
from .parser import Arguments, Parser, as_npz, converted, number, reading
from .terminal import flags, note, print_result, with_flags


def add_verify(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "verify model.onnx --dim batch=2 --each-node",
        statuses={1: "outputs differ, or the model or the data is invalid"},
    )
    parser.add_argument(
        "--against",
        metavar="WHAT",
        help="onnxruntime, reference (ONNX's own), or a folder with test data (default: test data beside the "
        "model, else onnxruntime)",
    )
    parser.add_switch("--each-node", "compare every node, even if outputs agree")
    parser.add_argument("--rtol", type=number, help="relative tolerance (default: by element type)")
    parser.add_argument("--atol", type=number, help="absolute tolerance (default: by element type and size)")
    add_inputs(parser)
    parser.add_dims()
    parser.add_dtype()
    parser.add_argument(
        "--operands", type=as_npz, metavar="FILE.npz", help="where to save the operands of the first node that differs"
    )


def do_verify(arguments: Arguments) -> int:
    model = converted(arguments)
    feeds = input_values(model, arguments)
    try:
        with stage("comparing"), sized(model, feeds):
            verification = model.verify(
                *([filled(model, feeds, arguments.seed)] if feeds else []),
                against=arguments.against,
                each_node=arguments.each_node,
                rtol=arguments.rtol,
                atol=arguments.atol,
                seed=arguments.seed,
            )
    except UnsupportedError as e:  # another implementation may reject random inputs
        names = [v.name for v in model.inputs if v.name not in feeds]
        if names and not data_sets(arguments.model.parent):
            others = flags("--input", dict.fromkeys(names, "FILE.npy"))
            e.add_note(f"inputs are random numbers, which may be invalid in this model; others: {others}")
        raise
    if not feeds and "inputs" in verification.outputs:  # random ones; test data have other names
        say_extents(model, {})
    print_result(arguments, verification)
    if verification.first is not None:
        path = arguments.operands or Path(f"{arguments.model.stem}-difference.npz")
        note(f"its operands and results are in {verification.first.save(path)}")
    return 0 if verification else 1


def add_check(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("check model.onnx --json", statuses={1: "there are errors, or the file cannot be read"})
    parser.add_switch("--verify-checksums", "compare checksums of external data; reads all of it")


def do_check(arguments: Arguments) -> int:
    with stage(f"checking {arguments.model.name}"):
        report = check(arguments.model, verify_checksums=arguments.verify_checksums, **reading(arguments))
    print_result(arguments, report, with_flags(str(report), arguments.parser._option_string_actions))
    return 0 if report.ok else 1
