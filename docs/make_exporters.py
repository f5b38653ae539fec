"""Write docs/exporters.md, and docs/exporters.json behind it, from what the tests of the zoo left in .venv/zoo.

python -m docs.make_exporters

A case that was not run this time keeps its line; one that is no longer in the zoo loses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.helpers import ROOT
from tests.zoo.case import Case
from tests.zoo.families import CASES, REFUSED
from tests.zoo.test_zoo import RECORDS

PAGE, KEPT = ROOT / "docs" / "exporters.md", ROOT / "docs" / "exporters.json"

HEAD = """# What exporters write, and what of it works

Written by `make test-zoo`, which exports each of these models with random weights (tests/zoo/), runs it at two sizes
of its dynamic axes if the exporter supports them, and compares:

- **outputs**: the largest difference from onnxruntime's outputs / from the framework's, relative to the largest
  element. A dash: that one cannot run the model, or does not exist.
- **program**: `one` if a call is one compiled program, `host` if NumPy runs it; otherwise the number of partitions,
  because shapes depend on data or an operator runs on the host. Only `one` can be transformed by `jit` and `grad`.
- **jit, grad**: `jax.jit(model.apply)` and `jax.jit(jax.grad(...))` with respect to floating-point inputs and
  parameters, in JAX's default 32-bit mode. A number is the largest difference from the framework's gradients;
  `finite` if it has none.
- **ready**: seconds of processor time for conversion and first call, and those of onnxruntime's session. Nearly all
  of it is XLA's compilation, whose cost depends on the number of layers rather than on their size; onnxruntime
  compiles nothing.

"""


def records() -> list[tuple[Case, dict[str, Any]]]:
    """Cases that were ever run, in the zoo's order, each with its newest record."""
    known = {_key(r): r for r in json.loads(KEPT.read_text())} if KEPT.exists() else {}
    known |= {_key(r): r for r in map(_read, sorted(RECORDS.glob("*.json")))}
    return [(c, known[k]) for c in CASES if (k := (c.family, c.name, c.exporter)) in known]


def page(judged: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    rows = [r for _, r in judged]
    one = [r for r in rows if not r["reasons"]]
    slopes = [r["grad"] for r in one if isinstance(r["grad"], float)]
    ratios = [r["ready"] / r["peer_ready"] for r in rows if r["peer_ready"]]
    excused = sum(bool(c.known) for c, r in judged if not r["faults"])
    right = sum(not r["faults"] for r in rows) - excused
    summary = (
        f"{len(rows)} models of {len({r['family'] for r in rows})} families: {right} right in every column, {excused} "
        f"limited by something outside this project, {len(rows) - right - excused} wrong. {len(one)} are one "
        f"program; of these {sum(r['jit'] == 'yes' for r in one)} run inside a caller's `jit`, "
        f"{len(slopes)} have gradients to compare, "
        f"{sum(s <= 1e-4 for s in slopes)} of them equal to 1e-4, and {sum(r['grad'] == 'finite' for r in one)} have "
        f"finite ones without a peer. Seconds to be ready: median {median(r['ready'] for r in rows):.1f}, "
        f"{median(ratios):.0f} times onnxruntime's.\n"
    )
    return HEAD + summary + "".join(_sections(judged)) + _refused()


def _sections(judged: Sequence[tuple[Case, dict[str, Any]]]) -> Iterator[str]:
    ordered = sorted(judged, key=lambda pair: pair[0].family)
    for family, group in groupby(ordered, lambda pair: pair[0].family):
        lines = [f"\n## {family}\n", "| model | exporter | nodes | program | outputs | jit | grad | ready |"]
        lines.append("|---|---|---|---|---|---|---|---|")
        reasons: list[str] = []
        for case, r in sorted(group, key=lambda pair: (pair[0].name.lower(), pair[0].exporter)):
            cells = (
                case.name,
                case.exporter,
                r["nodes"],
                _program(r),
                f"{_number(r['peer'])} / {_number(r['framework'])}",
                {"yes": "yes", "": "–"}.get(r["jit"], "no"),
                _number(r["grad"]),
                f"{r['ready']:.1f} / {r['peer_ready']:.2f}",
            )
            lines.append("| " + " | ".join(_escaped(str(c)) for c in cells) + " |")
            reasons += [f"- {case.name}, {case.exporter}: {column}: {why}" for column, why in case.known.items()]
            reasons += [f"- **wrong**: {case.name}, {case.exporter}: {_escaped(fault)}" for fault in r["faults"]]
        yield "\n".join([*lines, "", *reasons] if reasons else lines) + "\n"


def _refused() -> str:
    lines = [f"| {_escaped(name)} | {_escaped(error)} |\n" for name, error in sorted(REFUSED.items())]
    return "\n## What exporters refuse to write\n\n| model / exporter | its error |\n|---|---|\n" + "".join(lines)


def _program(record: dict[str, Any]) -> str:
    if not record["reasons"]:
        return "one"
    return "host" if record["stages"] == 1 else f"{record['stages']} stages"


def _number(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.0e}" if value else "0"
    return {"": "–", "finite": "finite"}.get(value, "no")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    return record["family"], record["name"], record["exporter"]


if __name__ == "__main__":
    judged = records()
    KEPT.write_text("[\n" + ",\n".join(json.dumps(r) for _, r in judged) + "\n]\n")
    PAGE.write_text(page(judged), encoding="utf-8")
    print(f"{PAGE}: {len(judged)} of {len(CASES)} cases")
