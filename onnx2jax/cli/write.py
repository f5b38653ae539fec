"""``onnx2jax simplify``, ``join`` and ``source``: models written as ONNX files or as Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import InputNameError
from ..model.files.join import join
from ..model.files.save import save
from ..model.model import Model
from ..progress import stage
from .parser import Arguments, CommandError, Parser, as_path, converted
from .terminal import Table, declaration, print_result


def add_simplify(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "simplify model.onnx small.onnx --dim batch=1",
        json="print the file's path, and counts before and after as JSON",
    )
    parser.add_argument("output", type=as_path, help="the file to write")
    parser.add_switch("--merge-products", "multiply one input by several weights as one product")
    parser.add_dims("fix the extent of a dimension variable in the file (default: it stays dynamic)")


def do_simplify(arguments: Arguments) -> None:
    model = converted(arguments)
    with stage(f"simplifying {arguments.model.name}"):
        small = model.simplified(merge_products=arguments.merge_products)
        path = save(small, arguments.output)
    size, before, after = path.stat().st_size, _counts(model), _counts(small)
    rows = [(n, f"{before[n]:,}", f"{after[n]:,}") for n in ("nodes", "parameters", "parameter bytes")]
    operators = {**before["operators"], **after["operators"]}
    for name in sorted(operators, key=lambda n: after["operators"][n] - before["operators"][n]):
        old, new = before["operators"][name], after["operators"][name]
        if old != new:
            rows.append((name, str(old), str(new)))
    facts = {"path": str(path), "bytes": size, "before": before, "after": after}
    print_result(arguments, facts, Table(f"{path}  {size:,} bytes", ("", "before", "after"), rows))


def _counts(model: Model) -> dict[str, Any]:
    """Nodes of the main graph, also by operator, and parameters."""
    return {
        "nodes": len(model.graph.nodes),
        "parameters": len(model.types),
        "parameter bytes": sum(v.nbytes for v in model.params.values()),
        "operators": Counter(n.op_type for n in model.graph.nodes),
    }


def add_join(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "join encoder.onnx classifier.onnx both.onnx --join features=x",
        json="print the file's path, size, inputs and outputs as JSON",
        model=None,
    )
    parser.add_argument("first", type=as_path)
    parser.add_argument("second", type=as_path)
    parser.add_argument("output", type=as_path, help="the file to write")
    parser.add_pairs(
        "--join", "OUTPUT=INPUT", "an output of the first model, and the input of the second that it feeds"
    )
    parser.add_argument(
        "--prefix",
        default="second/",
        help="prefix of names of the second model that clash with the first (default: %(default)s)",
    )


def do_join(arguments: Arguments) -> None:
    names: dict[str, list[str]] = {}
    for output, name in arguments.join:
        names.setdefault(output, []).append(name)
    with stage(f"joining {arguments.first.name} and {arguments.second.name}"):
        try:
            joined = join(arguments.first, arguments.second, names, prefix=arguments.prefix)
        except InputNameError as error:
            raise CommandError(f"{error}: --join OUTPUT=INPUT") from None
        path = save(joined, arguments.output)
    size = path.stat().st_size
    inputs, outputs = list(map(declaration, joined.inputs)), list(map(declaration, joined.outputs))
    facts = {"path": str(path), "bytes": size, "inputs": inputs, "outputs": outputs}
    print_result(arguments, facts, joined, f"{path}  {size:,} bytes")


def add_source(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "source model.onnx folder --dim batch=1", json="print the module's path and number of lines as JSON"
    )
    parser.add_argument("folder", type=as_path, help="the folder of model.py and params.safetensors")
    parser.add_switch("--overwrite", "replace files of the folder that were edited")
    parser.add_dims("fix the extent of a dimension variable (default: it stays a name)")


def do_source(arguments: Arguments) -> None:
    model = converted(arguments)
    with stage(f"writing {arguments.folder}"):
        path = model.to_source(arguments.folder, overwrite=arguments.overwrite)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    print_result(arguments, {"path": str(path), "lines": lines}, f"{path}  {lines:,} lines")
