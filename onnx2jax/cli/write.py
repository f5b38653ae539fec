"""``onnx2jax simplify``, ``join``, ``source`` and ``export``: models written as ONNX files, as Python or as programs.

A program of ``jax.export`` or StableHLO runs without this library.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import InputNameError
from ..ir.file import read
from ..model.files.export import ABOUT, PLATFORMS
from ..model.files.exported import load_exported
from ..model.files.join import join
from ..model.files.save import save
from ..model.model import Model
from ..progress import stage
from .parser import Arguments, CommandError, Parser, as_path, converted, reading
from .terminal import Table, declaration, flags, note, print_result


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
    parser.add_reading()
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
            first, second = (read(path, **reading(arguments)) for path in (arguments.first, arguments.second))
            joined = join(first, second, names, prefix=arguments.prefix)
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


def add_export(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "export model.onnx folder --dim batch=8 --platforms cpu,cuda,tpu",
        json="print inputs, outputs, platforms and files as JSON",
    )
    parser.add_argument("folder", type=as_path)
    parser.add_dims(
        "the extent of a dimension variable: a number, or an expression such as past+1; symbolic by default", _extent
    )
    parser.add_pairs(
        "--static",
        "NAME=VALUE",
        "fix an input whose value decides shapes or branches: a number, or a list [1, 8]",
        _literal,
    )
    parser.add_repeatable("--constraint", "'A <= 512'", "a constraint on dimensions")
    parser.add_argument(
        "--platforms",
        type=lambda text: text.split(","),
        metavar="cpu,cuda,tpu",
        help=f"some of {', '.join(PLATFORMS)} (default: cpu,cuda,tpu; cpu for StableHLO)",
    )
    parser.add_argument(
        "--format", choices=["jax", "stablehlo"], default="jax", help="stablehlo: for other compilers, such as IREE"
    )
    parser.add_argument(
        "--vjp-order", type=int, default=0, metavar="N", help="how many times the program can be differentiated (0)"
    )
    parser.add_rebatch()
    parser.add_computing()
    parser.add_argument("--weights", choices=["beside", "inside"], default="beside", help="(default: %(default)s)")
    parser.add_switch("--text", "write the program as StableHLO too")


def do_export(arguments: Arguments) -> None:
    model = converted(arguments, dims=None, static=dict(arguments.static))
    with stage("lowering"), _attempts():
        folder = model.export(
            arguments.folder,
            dims=dict(arguments.dim),
            constraints=arguments.constraint,
            platforms=arguments.platforms,
            weights=arguments.weights,
            text=arguments.text,
            format=arguments.format,
            vjp_order=arguments.vjp_order,
        )
    files = {str(f): f.stat().st_size for f in sorted(folder.iterdir())}
    listed = [f"  {file}  {size:,} bytes" for file, size in files.items()]
    about = json.loads((folder / ABOUT).read_text())
    if arguments.format == "stablehlo":
        facts = {**{key: about[key] for key in ("arguments", "results", "platform")}, "files": files}
        print_result(arguments, facts, _stablehlo(about), *listed)
        return
    program = load_exported(folder)
    if constraints := about["constraints"][len(arguments.constraint) :]:
        note(f"the model requires {', '.join(constraints)}")
    for name, k in about.get("multiples", {}).items():
        note(f"{name} must be a multiple of {k}, which the model requires; fix it: {flags('--dim', {name: 8 * k})}")
    inputs = list(map(declaration, program.inputs))
    facts = {"inputs": inputs, "outputs": program.outputs, "platforms": program.platforms, "files": files}
    print_result(arguments, facts, program, *listed)


def _extent(text: str) -> int | str:
    """Parse an extent: a number, or an expression of other dimensions, as in ``total=past+sequence``."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of numbers") from None


class _Notes(logging.Handler):
    """Prints records as remarks."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def _attempts() -> Iterator[None]:
    """Shows on standard error what export tries: attempts with more constraints may take a while."""
    logger, handler = logging.getLogger("onnx2jax.export"), _Notes()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _stablehlo(about: Mapping[str, Any]) -> str:
    """The function of a StableHLO program, in a line."""
    arguments = ", ".join(f"{a['name']}: {a['dtype']}{a['shape']}" for a in about["arguments"] if a["kind"] != "weight")
    weights = sum(a["kind"] == "weight" for a in about["arguments"])
    beside = f", {weights} weights" if weights else ""
    return f"StableHLO: main({arguments}{beside}) -> ({', '.join(r['name'] for r in about['results'])})"
