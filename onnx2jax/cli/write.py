"""``onnx2jax simplify``, ``join`` and ``source``: models written as ONNX files or as Python."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from ..errors import InputNameError
from ..model.files.join import join
from ..model.files.save import save
from ..model.model import Model
from ..progress import stage
from .terminal import (
    CommandError,
    add_command,
    add_dims,
    as_path,
    converted,
    dims,
    pairs,
    print_json,
    print_result,
    print_table,
)


def add_simplify(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(
        parser,
        _simplify,
        example="simplify model.onnx small.onnx --dim batch=1",
        json="print the file's path, and counts before and after as JSON",
    )
    parser.add_argument("output", type=as_path, help="the file to write")
    parser.add_argument(
        "--merge-products", action="store_true", help="multiply one input by several weights as one product"
    )
    add_dims(parser, "fix the extent of a dimension variable in the file (default: it stays dynamic)")


def _simplify(arguments: argparse.Namespace) -> int:
    model = converted(arguments, dims=dims(arguments.dim))
    with stage(f"simplifying {arguments.model.name}"):
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


def add_join(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(
        parser,
        _join,
        example="join encoder.onnx classifier.onnx both.onnx --join features=x",
        json="print the file's path, size, inputs and outputs as JSON",
        model=None,
    )
    parser.add_argument("first", type=as_path)
    parser.add_argument("second", type=as_path)
    parser.add_argument("output", type=as_path, help="the file to write")
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="OUTPUT=INPUT",
        help="an output of the first model, and the input of the second that it feeds; repeatable",
    )
    parser.add_argument(
        "--prefix",
        default="second/",
        help="prefix of names of the second model that clash with the first (default: %(default)s)",
    )


def _join(arguments: argparse.Namespace) -> int:
    names: dict[str, list[str]] = {}
    for output, name in pairs("--join", arguments.join, "INPUT"):
        names.setdefault(output, []).append(name)
    with stage(f"joining {arguments.first.name} and {arguments.second.name}"):
        try:
            joined = join(arguments.first, arguments.second, names, prefix=arguments.prefix)
        except InputNameError as error:
            raise CommandError(f"{error}: --join OUTPUT=INPUT") from None
        path = save(joined, arguments.output)
    size = path.stat().st_size
    inputs, outputs = ([{"name": v.name, "type": str(v.type)} for v in vs] for vs in (joined.inputs, joined.outputs))
    facts = {"path": str(path), "bytes": size, "inputs": inputs, "outputs": outputs}
    return print_result(arguments, facts, f"{joined}\n{path}  {size:,} bytes")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(
        parser,
        _source,
        example="source model.onnx folder --dim batch=1",
        json="print the module's path and number of lines as JSON",
    )
    parser.add_argument("folder", type=as_path, help="the folder of model.py and params.safetensors")
    parser.add_argument("--overwrite", action="store_true", help="replace files of the folder that were edited")
    add_dims(parser, "fix the extent of a dimension variable (default: it stays a name)")


def _source(arguments: argparse.Namespace) -> int:
    model = converted(arguments, dims=dims(arguments.dim))
    with stage(f"writing {arguments.folder}"):
        path = model.to_source(arguments.folder, overwrite=arguments.overwrite)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    return print_result(arguments, {"path": str(path), "lines": lines}, f"{path}  {lines:,} lines")
