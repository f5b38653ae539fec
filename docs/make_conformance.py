"""Write docs/conformance.md: each rule of the ONNX IR with the tests that prove it, read from the tests' marks.

python -m docs.make_conformance [--print]
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import defaultdict

import pytest

from tests.support.helpers import ROOT

PAGE = ROOT / "docs" / "conformance.md"
GROUPS = {
    "MV": "Model container and versions",
    "OR": "Operator set resolution",
    "OD": "Operator set documents",
    "FN": "Functions",
    "GR": "Graphs",
    "SC": "Names and scoping in subgraphs",
    "ND": "Nodes: inputs, outputs, attributes",
    "AT": "Attributes",
    "TY": "Types",
    "TD": "Tensor data encodings",
    "SH": "Shapes, dimension variables, denotations",
    "EX": "External data",
    "QA": "Quantization annotations",
    "TR": "Training information",
    "DV": "Multi-device configuration",
    "ME": "Metadata",
}
NOT_APPLICABLE: dict[str, str] = {}
"""Rules without a test, each with the reason why none is possible."""
PARTLY = {
    "FN-23": "a body in the model always runs; no operator of a user ever replaces it",
    "ME-03": "that of graphs and nodes is exposed; that of values and tensors is only written back by `save`",
    "SH-03": "names of inputs and outputs; those in value_info and inner graphs are hints, as exporters reuse them",
    "SH-09": "only extents that are numbers are checked; exporters name extents in which the elements differ",
    "TY-10": "NaN becomes -0, as the official node tests want, not 6, as the prose does",
}
"""What a rule asks for beyond what its tests show."""

HEAD = """# Conformance to the ONNX IR

Written by `python -m docs.make_conformance` from the marks of the tests; a test keeps it current. Each rule has a
number, the level of its source, its gist, and the tests that prove it, in `tests/`. `open` means that nothing proves it
yet. `onnx2jax.check` names findings by these numbers.

"""


class _Marks:
    """A pytest plugin that notes the rules of every test collected."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("rule"):
                name = re.sub(r"\[.*", "", item.nodeid).removeprefix("tests/")
                for rule in mark.args:
                    self.tests[rule].add(name)


def rules() -> dict[str, tuple[str, str]]:
    """Rule -> level and gist."""
    lines = (ROOT / "tests" / "tables" / "rules.txt").read_text(encoding="utf-8").splitlines()
    return {rule: (level, gist) for rule, level, gist in (line.split(" ", 2) for line in lines)}


def collect() -> dict[str, set[str]]:
    """Rule -> names of tests, from the files that mark any."""
    files = [str(p) for p in sorted((ROOT / "tests").rglob("test_*.py")) if re.search(r"\brule\(", p.read_text())]
    marks = _Marks()
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(
            ["--collect-only", "-q", "-o", "addopts=", "--import-mode=importlib", "--rootdir", str(ROOT), *files],
            [marks],
        )
    assert status == 0, f"the tests cannot be collected (status {status})"
    return marks.tests


def page() -> str:
    """The text of docs/conformance.md."""
    known, tests = rules(), collect()
    unknown = sorted(tests.keys() - known.keys())
    assert not unknown, f"tests are marked with rules that do not exist: {unknown}"
    assert not NOT_APPLICABLE.keys() & tests.keys()
    rows: dict[str, list[str]] = defaultdict(list)
    counts = {"proven": 0, "not applicable": 0, "open": 0}
    for rule, (level, gist) in known.items():
        if rule in tests:
            state, proof = "proven", ", ".join(f"`{name}`" for name in sorted(tests[rule]))
        elif rule in NOT_APPLICABLE:
            state, proof = "not applicable", f"not applicable: {NOT_APPLICABLE[rule]}"
        else:
            state = proof = "open"
        note = f" (in part: {PARTLY[rule]})" if rule in PARTLY else ""
        rows[rule[:2]].append(f"| {rule} | {level} | {_escaped(gist)} | {proof}{_escaped(note)} |")
        counts[state] += 1
    total = f"{len(known)} rules: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + ".\n"
    parts = [HEAD + total]
    for group, title in GROUPS.items():
        parts.append(
            f"\n## {title}\n\n| rule | level | gist | tests |\n|---|---|---|---|\n" + "\n".join(rows[group]) + "\n"
        )
    return "".join(parts)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.buffer.write(page().encode())
    else:
        PAGE.write_text(page(), encoding="utf-8")
