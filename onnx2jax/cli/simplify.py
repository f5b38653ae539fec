"""``onnx2jax simplify model.onnx small.onnx``: a smaller file that computes the same."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from ..model.convert import convert
from ..model.files.save import save
from ..model.model import Model
from .terminal import add_command, add_dims, add_model, dims, print_json, print_table, reading, working


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    simplify = add_command(
        commands,
        "simplify",
        _simplify,
        "fold constants and BatchNormalization into weights and remove no-ops, in a file of its own",
        example="simplify model.onnx small.onnx --dim batch=1",
        json="print the file's path, and counts before and after as JSON",
    )
    add_model(simplify)
    simplify.add_argument("output", type=Path, help="the file to write")
    simplify.add_argument(
        "--merge-products", action="store_true", help="multiply one input by several weights as one product"
    )
    add_dims(simplify, "fix the extent of a dimension variable in the file (default: it stays dynamic)")


def _simplify(arguments: argparse.Namespace) -> int:
    sizes = dims(arguments.dim)
    with working(f"simplifying {arguments.model.name}"):
        model = convert(arguments.model, **reading(arguments), dims=sizes)
        small = model.simplified(merge_products=arguments.merge_products)
        path = save(small, arguments.output)
    before, after = _counts(model), _counts(small)
    if arguments.json:
        print_json({"path": str(path), "bytes": path.stat().st_size, "before": before, "after": after})
        return 0
    rows = [(n, f"{before[n]:,}", f"{after[n]:,}") for n in ("nodes", "parameters", "parameter bytes")]
    operators = {**before["operators"], **after["operators"]}
    for name in sorted(operators, key=lambda n: after["operators"].get(n, 0) - before["operators"].get(n, 0)):
        counts = [found["operators"].get(name, 0) for found in (before, after)]
        if counts[0] != counts[1]:
            rows.append((name, *map(str, counts)))
    print_table(f"{path}  {path.stat().st_size:,} bytes", ("", "before", "after"), rows)
    return 0


def _counts(model: Model) -> dict[str, Any]:
    """Nodes of the main graph, also by operator, and parameters."""
    return {
        "nodes": len(model.graph.nodes),
        "parameters": len(model.types),
        "parameter bytes": sum(v.nbytes for v in model.params.values()),
        "operators": Counter(n.op_type for n in model.graph.nodes),
    }
