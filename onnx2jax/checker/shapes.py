"""Checks shapes: evaluates the graphs abstractly, and compares what each operator gives with what the file declares.

A free extent stands for two different numbers, one in each of two evaluations: an extent that is equal in both is a
constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..eval.abstract import Abstract, Extents, is_typed, without_data
from ..ir.graph import Graph, Node
from ..proto.types import TensorType, ValueInfo
from .report import Note

LEAST: Final = 199
"""Free extents are prime numbers from here on, larger than what networks halve images to; most position tables are
larger still."""


def check_shapes(graph: Graph, note: Note) -> None:
    """Check the shapes of a model's values, those of its subgraphs and functions included."""
    first = _evaluated(graph, 0)
    second = _evaluated(graph, 1) if first.extents else first
    for key, value in first.found.items():
        if (twin := second.found.get(key)) is not None and not value.fits(twin):
            pairs = zip(value.value.shape or (), twin.value.shape or (), strict=False)
            constant = TensorType(value.value.dtype, tuple(a if a == b else None for a, b in pairs))
            text = f"{key[1]!r} is declared {value.declared}, but {value.source} gives {constant}"
            note("GR-18" if value.is_output else "GR-20", "warning", key[0], text)
    for path, (title, types, reason) in first.refused.items():
        other = second.refused.get(path)
        if other is not None and other.reason == reason:
            fixed = types == other.types  # operands with free extents may fit in a call
            where = types if fixed else "whose extents are partly free"
            note("ND-15", "error" if fixed else "warning", path, f"{title} refuses its operands ({where}): {reason}")


def _evaluated(graph: Graph, first: int) -> _Evaluation:
    evaluation = _Evaluation(Extents(first, LEAST))

    def run() -> None:
        evaluation.graph(graph, f"graph {graph.name[:80]!r}")

    without_data(run)
    return evaluation


class _Refusal(NamedTuple):
    """Why a node refuses its operands, and their types."""

    op_type: str
    types: str
    reason: str


@dataclass(frozen=True)
class _Found:
    """The shape that a node gives a value, and the type that the file declares."""

    source: str
    value: TensorType
    declared: TensorType
    is_output: bool = False

    def fits(self, other: _Found) -> bool:
        """Whether the declared shape agrees with the constants among the extents of both evaluations."""
        wanted, one, two = self.declared.shape or (), self.value.shape or (), other.value.shape or ()
        if not len(wanted) == len(one) == len(two):
            return False
        return all(a != b or not isinstance(d, int) or a == d for d, a, b in zip(wanted, one, two, strict=True))


class _Evaluation(Abstract):
    """An abstract evaluation that notes what a graph's values are declared, and which nodes refuse their operands."""

    trusts_defaults = False

    def __init__(self, extents: Extents) -> None:
        super().__init__(extents)
        self.found: dict[tuple[str, str], _Found] = {}
        self.refused: dict[str, _Refusal] = {}

    def compare(self, path: str, declared: ValueInfo, value: Any, source: str, is_output: bool = False) -> None:
        """Note the shape of a value whose type is declared."""
        if is_typed(value) and isinstance(declared.type, TensorType) and declared.type.shape is not None:
            computed = TensorType(declared.type.dtype, tuple(value.shape))
            self.found[path, declared.name] = _Found(source, computed, declared.type, is_output)

    def refuse(self, path: str, node: Node, values: Sequence[Any], reason: str) -> None:
        """Note why a node refuses its operands, and their types."""
        types = ", ".join(f"{v.dtype}{list(v.shape)}" for v in values if is_typed(v))
        self.refused.setdefault(path, _Refusal(node.op_type, types or "none", reason))
