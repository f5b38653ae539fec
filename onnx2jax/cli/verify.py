"""``onnx2jax verify model.onnx``: compares results with onnxruntime's, node by node if they differ."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..model.calls.arguments import named_dims, variables
from .inputs import add_inputs, filled, given, say_sizes, sized
from .terminal import add_command, add_dims, add_dtype, add_model, converted, dims, note, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    verify = add_command(
        commands,
        "verify",
        _verify,
        "compare with onnxruntime, and report the first node that differs",
        example="verify model.onnx --dim batch=2 --each-node",
        statuses={1: "outputs differ, or the model or the data is invalid"},
    )
    add_model(verify)
    verify.add_argument(
        "--against",
        metavar="WHAT",
        help="onnxruntime, reference (ONNX's own), or a folder with test data (default: test data beside the "
        "model, else onnxruntime)",
    )
    verify.add_argument("--each-node", action="store_true", help="compare every node, even if outputs agree")
    verify.add_argument("--rtol", type=float, help="relative tolerance (default: by element type)")
    verify.add_argument("--atol", type=float, help="absolute tolerance (default: by element type and size)")
    add_inputs(verify)
    add_dims(verify)
    add_dtype(verify)
    verify.add_argument(
        "--operands", type=Path, metavar="FILE.npz", help="where to save the operands of the first node that differs"
    )


def _verify(arguments: argparse.Namespace) -> int:
    model = converted(arguments, dims=dims(arguments.dim))
    feeds = given(model, arguments)
    with working("comparing"), sized(model, feeds):
        found = model.verify(
            *([filled(model, feeds, arguments.seed)] if feeds else []),
            against=arguments.against,
            each_node=arguments.each_node,
            rtol=arguments.rtol,
            atol=arguments.atol,
            seed=arguments.seed,
        )
    if not feeds and "inputs" in found.outputs:  # random ones; test data have other names
        say_sizes(variables(named_dims(model.inputs)))
    print(found.to_json() if arguments.json else found)
    if found.first is not None:
        path = arguments.operands or Path(f"{arguments.model.stem}-difference.npz")
        note(f"its operands and results are in {found.first.save(path)}")
    return 0 if found else 1
