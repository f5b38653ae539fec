"""``onnx2jax inspect``, ``operators``, ``summary``, ``draw``, ``view``: what is in a file, and pages of its graph."""

from __future__ import annotations

import tempfile
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import ModelError, UnsupportedError, did_you_mean
from ..ir import analysis, binding
from ..ir.graph import Function, Imported
from ..model.convert import open_model
from ..model.model import Model
from ..model.reports.comparison import described
from ..model.reports.drawing import is_picture
from ..model.reports.page import by_position
from ..model.reports.summary import HEAD, short
from ..model.spec import Spec
from ..ops.registry import supported
from ..progress import stage
from ..proto.origin import Origin
from .inputs import add_inputs, filled, input_values, sized
from .parser import Arguments, CommandError, Parser, as_path, converted, loading, reading
from .terminal import Table, declaration, note, print_result

SHOWN = 12
"""The number of parameters that ``inspect`` lists without ``--all``."""
PROFILED: int = 5
"""Calls that ``--profile`` records."""


def add_inspect(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("inspect model.onnx --json", statuses={3: "some operators are unsupported"})
    parser.add_switch("--all", f"list every parameter, not the {SHOWN} largest")


def do_inspect(arguments: Arguments) -> int:
    with loading(arguments.model):
        facts = describe(open_model(arguments.model, reading(arguments)).model())
    print_result(arguments, facts, *_parts(facts, everything=arguments.all))
    return _status(facts["operators"])


def describe(imported: Imported) -> dict[str, Any]:
    """The facts that ``inspect`` shows, in JSON types."""
    model = Model(Spec.of(imported))
    return {
        "ir_version": imported.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in imported.opsets.items()},
        "metadata": dict(imported.metadata),
        "inputs": list(map(declaration, model.inputs)),
        "optional_inputs": list(map(declaration, model.optional.values())),
        "outputs": list(map(declaration, model.outputs)),
        "parameters": [
            {"name": name, "type": described(array), "bytes": int(array.nbytes)}
            for name, array in analysis.parameters(imported.graph).items()
        ],
        "operators": operators(imported),
        "missing": binding.missing_extras(imported.graph),
    }


def operators(imported: Imported) -> list[dict[str, Any]]:
    """The operators of a file with their counts, including those in subgraphs and functions."""
    nodes = (node for graph in imported.graph.walk() for node in graph.nodes)
    counts = Counter(
        (n.domain, n.op_type, n.opset, n.target is not None, isinstance(n.target, Function)) for n in nodes
    )
    names = ("name", "opset", "supported", "function")
    return [
        {"domain": domain or "ai.onnx", **dict(zip(names, facts, strict=True)), "count": count}
        for (domain, *facts), count in sorted(counts.items())
    ]


def _parts(facts: dict[str, Any], everything: bool) -> Iterator[Table | str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts["opsets"].items())
    yield f"IR {facts['ir_version']}, opsets: {opsets}"
    if facts["metadata"]:
        yield Table("metadata", ("name", "value"), facts["metadata"].items())
    for part in ("inputs", "optional_inputs", "outputs"):
        if facts[part]:
            yield Table(part.replace("_", " "), ("name", "type"), [(v["name"], v["type"]) for v in facts[part]])
    parameters = sorted(facts["parameters"], key=lambda p: -p["bytes"])
    shown = parameters if everything else parameters[:SHOWN]
    total = sum(p["bytes"] for p in parameters)
    yield Table(
        f"parameters: {len(parameters)}, {_size(total)}"
        + (f"; the {SHOWN} largest" if len(shown) < len(parameters) else ""),
        ("name", "type", "size"),
        [(p["name"], p["type"], _size(p["bytes"])) for p in shown],
    )
    by_count = sorted(facts["operators"], key=lambda o: (o["supported"], -o["count"]))
    yield _table(f"operators: {len(by_count)}", "count", by_count)
    yield from facts["missing"]


def _table(title: str, count: str, operators: list[dict[str, Any]]) -> Table:
    """The table of ``operators``, with the header of their counts."""
    unsupported = sum(not o["supported"] for o in operators)
    rows = []
    for o in operators:
        remark = "unsupported" if not o["supported"] else "function of the model" if o["function"] else ""
        rows.append((o["domain"], o["name"], str(o["opset"]), str(o["count"]), remark))
    return Table(f"{title}, {unsupported or 'none'} unsupported", ("domain", "operator", "opset", count, ""), rows)


def _size(n: int) -> str:
    return f"{n} B" if n < 1000 else f"{short(n)}B"


def add_operators(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "operators --domain com.microsoft --name '*Attention*'",
        statuses={3: "some operators of the file are unsupported"},
        model=None,
    )
    parser.add_argument("model", type=as_path, nargs="?", help="a file; lists its operators")
    parser.add_reading()
    parser.add_argument("--domain", metavar="PATTERN", default="*", help="such as ai.onnx or com.*")
    parser.add_argument("--name", metavar="PATTERN", default="*", help="such as Conv or 'Reduce*'; ignores case")


def do_operators(arguments: Arguments) -> int:
    def matches(domain: str, name: str) -> bool:
        return fnmatchcase(domain, arguments.domain) and fnmatchcase(name.lower(), arguments.name.lower())

    if arguments.model is not None:
        return _of_file(arguments, matches)
    matching: list[dict[str, Any]] = [
        {"domain": domain or "ai.onnx", "name": name, "since": list(since)}
        for domain, names in sorted(supported().items())
        for name, since in names.items()
        if matches(domain or "ai.onnx", name)
    ]
    if not matching and not arguments.json:
        near = did_you_mean(arguments.name, (name for names in supported().values() for name in names))
        raise CommandError(
            f"no supported operator matches --name {arguments.name!r} --domain {arguments.domain!r}{near}"
        )
    rows = [(o["domain"], o["name"], ", ".join(map(str, o["since"]))) for o in matching]
    title = f"{len(rows)} operators; opsets at which their meaning changes"
    print_result(arguments, matching, Table(title, ("domain", "operator", "since"), rows))
    return 0


def _of_file(arguments: Arguments, matches: Callable[[str, str], bool]) -> int:
    with loading(arguments.model):
        imported = open_model(arguments.model, reading(arguments)).model()
    facts = [o for o in operators(imported) if matches(o["domain"], o["name"])]
    table = _table(f"{len(facts)} operators in {arguments.model.name}", "nodes", facts)
    print_result(arguments, facts, table, *binding.missing_extras(imported.graph))
    return _status(facts)


def _status(operators: list[dict[str, Any]]) -> int:
    return 0 if all(o["supported"] for o in operators) else 3


def add_summary(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("summary model.onnx --dim batch=8")
    parser.add_dims()


def do_summary(arguments: Arguments) -> None:
    summary = converted(arguments, dims=None).summary(dims=dict(arguments.dim))
    print_result(arguments, summary, Table(summary.total, HEAD, summary.rows()))


def add_draw(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("draw model.onnx page.html", json="print the page's path and size as JSON")
    parser.add_argument(
        "page", type=as_path, help="the file to write: one self-contained .html file, or an .svg picture"
    )
    add_facts(parser)


def add_facts(parser: Parser) -> None:
    """Add the options for what a page shows, which ``do_draw`` reads."""
    add_inputs(parser)
    parser.add_switch("--random", "show what nodes compute for random inputs")
    parser.add_switch("--profile", "colour nodes by the time of a call")
    parser.add_switch("--verify", "open at the first node that differs from others")
    parser.add_dims()


def do_draw(arguments: Arguments) -> None:
    """Write the page of the command's model, with what its options ask for, and print its path and size."""
    picture = is_picture(arguments.page)
    try:
        model = converted(arguments)
    except (UnsupportedError, ModelError) as e:
        if any(vars(arguments)[n] for n in ("dim", "random", "input", "text", "profile", "verify")):
            raise
        model = _unsupported(arguments, e)
    values = input_values(model, arguments)
    feeds = filled(model, values, arguments.seed) if values or arguments.random or arguments.profile else values
    if (feeds or arguments.profile or arguments.verify) and picture:
        raise CommandError("a picture shows the graph alone: write an .html page")
    profile = verification = None
    with stage("drawing"), sized(model, values):
        if arguments.profile:
            args, named = by_position(model, feeds)
            profile = model.profile(*args, calls=PROFILED, **named)
        if arguments.verify:
            verification = model.verify(*([feeds] if feeds else ()))
        page = model.draw(arguments.page, inputs=feeds or None, profile=profile, verification=verification)
    size = page.stat().st_size
    print_result(arguments, {"page": str(arguments.page), "bytes": size}, f"{arguments.page}  {size:,} bytes")


def _unsupported(arguments: Arguments, error: Exception) -> Model:
    """The model of a file with unsupported operators, to be drawn only."""
    importer = open_model(arguments.model, reading(arguments))
    imported = importer.model()
    if not imported.unsupported and not imported.rejected:
        raise error
    return Model(Spec.of(imported, origin=Origin(importer.message, importer.files)))


def add_view(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "view model.onnx --random --dim batch=2 --profile",
        json="print the page's path and size as JSON, and open nothing",
    )
    parser.add_argument("--page", type=as_path, help="the file to write (default: in a temporary folder)")
    add_facts(parser)


def do_view(arguments: Arguments) -> None:
    arguments.page = arguments.page or Path(tempfile.mkdtemp(prefix="onnx2jax-"), f"{arguments.model.stem}.html")
    do_draw(arguments)
    if not arguments.json and not webbrowser.open(arguments.page.resolve().as_uri()):
        note("there is no browser here: open the page elsewhere")
