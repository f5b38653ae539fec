"""``onnx2jax operators``: supported operators and versions, or those of a file."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import did_you_mean
from ..model.convert import open_model
from ..ops.registry import supported
from .inspect import operators, remark
from .terminal import CommandError, add_command, loading, print_json, print_table


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    lists = add_command(
        commands,
        "operators",
        _operators,
        "list the supported operators, or those of a file",
        example="operators --domain com.microsoft --name '*Attention*'",
        statuses={3: "some operators of the file are unsupported"},
    )
    lists.add_argument("model", type=Path, nargs="?", help="a file; lists its operators")
    lists.add_argument("--domain", metavar="PATTERN", default="*", help="such as ai.onnx or com.*")
    lists.add_argument("--name", metavar="PATTERN", default="*", help="such as Conv or 'Reduce*'; ignores case")


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
