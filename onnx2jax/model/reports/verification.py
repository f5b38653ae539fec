"""The result of ``Model.verify``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...printed import Printed
from ...proto import atomic
from ...proto.files import path_of
from .comparison import Comparison
from .table import table


@dataclass(frozen=True)
class Difference:
    """The node that differs on equal operands: of several the first whose error is comparable to the largest.

    Attributes:
        node: its name, operator and opset, followed by those of inner nodes.
        value: the output that differs.
        comparison: the comparison of that output.
        operands: its operands by name, and ``ours/NAME`` and ``theirs/NAME`` for its outputs.
        accumulated: no node differs on equal operands, and this is the first whose accumulated rounding error exceeds
            the tolerance.
    """

    node: str
    value: str
    comparison: Comparison
    operands: Mapping[str, Any] = field(repr=False)
    accumulated: bool = False

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the operands and results as .npz; maps and missing values are omitted."""
        arrays: dict[str, Any] = {}
        for name, value in self.operands.items():
            for key, part in _parts(name, value):
                array = np.asarray(part)
                arrays[key] = array.astype(str) if array.dtype == object else array
        path = path_of(path)
        with atomic.replacing(path) as file:
            atomic.write_npz(file, {n.replace("/", "|"): v for n, v in arrays.items()})
        return path


@dataclass(frozen=True, repr=False)
class Verification(Printed):
    """The result of ``Model.verify``; true if nothing differs.

    Attributes:
        against: the other implementation, or the folder of test data.
        outputs: comparisons of the outputs, by set of inputs.
        nodes: likewise comparisons of node outputs, each node on the other's operands; empty if not compared.
        first: the node that differs.
        notes: values that could not be compared.
    """

    against: str
    outputs: Mapping[str, Sequence[Comparison]]
    nodes: Mapping[str, Sequence[Comparison]]
    first: Difference | None = None
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return all(c.ok for comparisons in (*self.outputs.values(), *self.nodes.values()) for c in comparisons)

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """The comparisons as JSON, without the operands."""
        facts: dict[str, Any] = {"ok": self.ok, "against": self.against, "notes": list(self.notes), "first": None}
        for part in ("outputs", "nodes"):
            facts[part] = {n: list(map(_facts, comparisons)) for n, comparisons in getattr(self, part).items()}
        if self.first is not None:
            kept = ("node", "value", "accumulated")
            facts["first"] = {n: getattr(self.first, n) for n in kept} | {"comparison": _facts(self.first.comparison)}
        return json.dumps(facts, indent=2)

    def __str__(self) -> str:
        lines = []
        for what, sets in (("outputs", self.outputs), ("values of nodes", self.nodes)):
            for name, comparisons in sets.items():
                bad = [c for c in comparisons if not c.ok]
                lines.append(f"{name}: {len(comparisons)} {what} compared with {self.against}, {len(bad)} differ")
                if what == "outputs" or bad:
                    lines.append(table([HEAD, *map(_row, comparisons if what == "outputs" else bad[:10])], width=140))
        if self.first is not None:
            begins = "Roundings add up; past the tolerance first at" if self.first.accumulated else "It begins at"
            lines.append(f"{begins} {self.first.node}: {self.first.value!r}, {self.first.comparison.why}")
        return "\n".join([*lines, *self.notes])


def _facts(comparison: Comparison) -> dict[str, Any]:
    """A comparison as a dict for JSON, which has no infinity."""
    return {n: "inf" if v == np.inf else v for n, v in asdict(comparison).items()}


HEAD: Final = ("value", "type", "largest difference", "relative", "")


def _row(comparison: Comparison) -> tuple[str, ...]:
    numbers = ("-" if d is None else f"{d:.3g}" for d in (comparison.absolute, comparison.relative))
    return comparison.value, comparison.ours, *numbers, comparison.why or "same"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from _parts(f"{name}[{i}]", v)
    elif value is not None and not isinstance(value, Mapping):
        yield name, value
