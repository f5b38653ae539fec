"""``onnx2jax inspect``, ``operators`` and ``summary``: contents of a file, its operators, and costs of its nodes."""

from __future__ import annotations

import argparse
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from ..errors import did_you_mean
from ..ir import analysis, binding
from ..ir.graph import Function, Imported
from ..model.convert import open_model
from ..model.model import Model
from ..model.reports.summary import HEAD
from ..model.spec import Spec
from ..ops.registry import supported
from ..proto.types import ValueInfo
from .terminal import (
    CommandError,
    add_command,
    add_dims,
    as_path,
    converted,
    dims,
    loading,
    print_json,
    print_table,
    reading,
    type_of,
)

SHOWN = 12
"""The number of parameters that ``inspect`` lists without ``--all``."""


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(parser, _inspect, example="inspect model.onnx --json", statuses={3: "some operators are unsupported"})
    parser.add_argument("--all", action="store_true", help=f"list every parameter, not the {SHOWN} largest")


def _inspect(arguments: argparse.Namespace) -> int:
    with loading(arguments.model):
        facts = describe(open_model(arguments.model, reading(arguments)).model())
    if arguments.json:
        print_json(facts)
    else:
        _print_facts(facts, everything=arguments.all)
    return 3 if any(not o["supported"] for o in facts["operators"]) else 0


def describe(imported: Imported) -> dict[str, Any]:
    """The facts that ``inspect`` shows, in JSON types."""
    model = Model(Spec.of(imported))
    return {
        "ir_version": imported.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in imported.opsets.items()},
        "metadata": dict(imported.metadata),
        "inputs": [_described(v) for v in model.inputs],
        "optional_inputs": [_described(v) for v in model.optional.values()],
        "outputs": [_described(v) for v in model.outputs],
        "parameters": [
            {"name": name, "type": type_of(array), "bytes": int(array.nbytes)}
            for name, array in analysis.parameters(imported.graph).items()
        ],
        "operators": operators(imported),
        "missing": [binding.missing_text(*entry) for entry in binding.missing_extras(imported.graph).items()],
    }


def operators(imported: Imported) -> list[dict[str, Any]]:
    """The operators of a file with their counts, including those in subgraphs and functions."""
    counts: Counter[tuple[str, str, int, bool, bool]] = Counter()
    for graph in imported.graph.walk():
        for node in graph.nodes:
            is_function = isinstance(node.target, Function)
            counts[node.domain, node.op_type, node.opset, is_function, node.target is not None] += 1
    return [
        {
            "domain": domain or "ai.onnx",
            "name": name,
            "opset": opset,
            "count": count,
            "supported": is_supported,
            "function": is_function,
        }
        for (domain, name, opset, is_function, is_supported), count in sorted(counts.items())
    ]


def _described(info: ValueInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": info.name, "type": str(info.type or "undeclared")}
    if info.shape is not None:
        facts["shape"] = list(info.shape)
    return facts


def _print_facts(facts: dict[str, Any], everything: bool) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts["opsets"].items())
    print(f"IR {facts['ir_version']}, opsets: {opsets}")
    if facts["metadata"]:
        print_table("metadata", ("name", "value"), facts["metadata"].items())
    for part in ("inputs", "optional_inputs", "outputs"):
        if facts[part]:
            print_table(part.replace("_", " "), ("name", "type"), [(v["name"], v["type"]) for v in facts[part]])
    parameters = sorted(facts["parameters"], key=lambda p: -p["bytes"])
    shown = parameters if everything else parameters[:SHOWN]
    total = sum(p["bytes"] for p in parameters)
    print_table(
        f"parameters: {len(parameters)}, {_size(total)}"
        + (f"; the {SHOWN} largest" if len(shown) < len(parameters) else ""),
        ("name", "type", "size"),
        [(p["name"], p["type"], _size(p["bytes"])) for p in shown],
    )
    unsupported = sum(not o["supported"] for o in facts["operators"])
    print_table(
        f"operators: {len(facts['operators'])}, {unsupported or 'none'} unsupported",
        ("domain", "operator", "opset", "count", ""),
        [
            (o["domain"], o["name"], str(o["opset"]), str(o["count"]), remark(o))
            for o in sorted(facts["operators"], key=lambda o: (o["supported"], -o["count"]))
        ],
    )
    for text in facts["missing"]:
        print(text)


def remark(operator: dict[str, Any]) -> str:
    """The remark about one of ``operators``."""
    if not operator["supported"]:
        return "unsupported"
    return "function of the model" if operator["function"] else ""


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def add_operators(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(
        parser,
        _operators,
        example="operators --domain com.microsoft --name '*Attention*'",
        statuses={3: "some operators of the file are unsupported"},
        model=None,
    )
    parser.add_argument("model", type=as_path, nargs="?", help="a file; lists its operators")
    parser.add_argument("--domain", metavar="PATTERN", default="*", help="such as ai.onnx or com.*")
    parser.add_argument("--name", metavar="PATTERN", default="*", help="such as Conv or 'Reduce*'; ignores case")


def _operators(arguments: argparse.Namespace) -> int:
    def matches(domain: str, name: str) -> bool:
        return fnmatchcase(domain, arguments.domain) and fnmatchcase(name.lower(), arguments.name.lower())

    if arguments.model is not None:
        return _of_file(arguments, matches)
    found = [
        (domain or "ai.onnx", name, since)
        for domain, names in sorted(supported().items())
        for name, since in names.items()
        if matches(domain or "ai.onnx", name)
    ]
    if arguments.json:
        print_json([{"domain": domain, "name": name, "since": list(since)} for domain, name, since in found])
        return 0
    if not found:
        near = did_you_mean(arguments.name, (name for names in supported().values() for name in names))
        raise CommandError(
            f"no supported operator matches --name {arguments.name!r} --domain {arguments.domain!r}{near}"
        )
    rows = [(domain, name, ", ".join(map(str, since))) for domain, name, since in found]
    print_table(f"{len(rows)} operators; opsets at which their meaning changes", ("domain", "operator", "since"), rows)
    return 0


def _of_file(arguments: argparse.Namespace, matches: Any) -> int:
    with loading(arguments.model):
        found = operators(open_model(arguments.model, {}).model())
    found = [o for o in found if matches(o["domain"], o["name"])]
    unsupported = sum(not o["supported"] for o in found)
    if arguments.json:
        print_json(found)
    else:
        print_table(
            f"{len(found)} operators in {arguments.model.name}, {unsupported or 'none'} unsupported",
            ("domain", "operator", "opset", "nodes", ""),
            [(o["domain"], o["name"], str(o["opset"]), str(o["count"]), remark(o)) for o in found],
        )
    return 3 if unsupported else 0


def add_summary(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(parser, _summary, example="summary model.onnx --dim batch=8")
    add_dims(parser)


def _summary(arguments: argparse.Namespace) -> int:
    sizes = dims(arguments.dim)
    model = converted(arguments)
    found = model.summary(dims=sizes)
    if arguments.json:
        print(found.to_json())
    else:
        print_table(found.total, HEAD, found.rows())
    return 0
