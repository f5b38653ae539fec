"""Iterates over the graphs of a model, with the names that are visible in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..proto.messages import graphs_of


@dataclass(frozen=True, eq=False)
class GraphPlace:
    """A graph or a function body, and its location."""

    graph: Any
    where: str
    kind: Literal["main", "subgraph", "function", "training"]
    outer: tuple[tuple[GraphPlace, int], ...] = ()
    """The enclosing graphs, each with the index of the node that contains this one."""

    @cached_property
    def definitions(self) -> dict[str, int]:
        """Name -> index of the node that defines it; -1 for inputs and initializers."""
        if self.kind == "function":
            names = dict.fromkeys(self.graph.input, -1)
        else:
            names = {v.name: -1 for v in self.graph.input}
            names |= {t.name: -1 for t in self.graph.initializer}
            names |= {t.values.name: -1 for t in self.graph.sparse_initializer}
        for i, node in enumerate(self.graph.node):
            for name in node.output:
                names.setdefault(name, i)
        names.pop("", None)
        return names

    def sees(self, name: str) -> bool:
        """Whether an enclosing graph defines the name before the node that contains this graph."""
        return any(place.definitions.get(name, node) < node for place, node in self.outer)

    @cached_property
    def shapes(self) -> dict[str, tuple[int | str | None, ...]]:
        """The declared shapes, by value name."""
        lists = ("value_info",) if self.kind == "function" else ("value_info", "input", "output")
        values = (v for field in lists for v in getattr(self.graph, field))
        shapes = {v.name: shape for v in values if (shape := extents(v.type)) is not None}
        if self.kind != "function":
            shapes |= {t.name: tuple(t.dims) for t in self.graph.initializer}
        return shapes

    def node(self, i: int) -> str:
        """The path of a node in findings."""
        node = self.graph.node[i]
        name = node.name or next(filter(None, node.output), f"{node.op_type}_{i}")
        return f"{self.where}, node {name[:80]!r}"

    def inside(self, i: int) -> Iterator[GraphPlace]:
        """The subgraphs of a node."""
        for a in self.graph.node[i].attribute:
            for graph in graphs_of(a):
                where = f"{self.node(i)}, graph {(graph.name or a.name)[:80]!r}"
                yield GraphPlace(graph, where, "subgraph", (*self.outer, (self, i)))


def extents(kind: Any) -> tuple[int | str | None, ...] | None:
    """The declared shape of a tensor, with None for unknown extents; None without one."""
    if not kind.tensor_type.HasField("shape"):
        return None
    return tuple(getattr(d, d.WhichOneof("value") or "", None) for d in kind.tensor_type.shape.dim)


def places(model: Any) -> Iterator[GraphPlace]:
    """Every graph and function body of a model, outer ones first. Iterative, because files may nest them deeply."""
    main = GraphPlace(model.graph, f"graph {model.graph.name[:80]!r}", "main")
    pending = [GraphPlace(f, f"function {f.name[:80]!r}", "function") for f in reversed(model.functions)]
    for i, info in enumerate(model.training_info):
        end = len(model.graph.node)
        for part in ("algorithm", "initialization"):
            if info.HasField(part):
                outer = ((main, end),) if part == "algorithm" else ()
                pending.append(GraphPlace(getattr(info, part), f"training_info[{i}], {part}", "training", outer))
    pending.append(main)
    while pending:
        place = pending.pop()
        yield place
        for i in range(len(place.graph.node)):
            pending.extend(place.inside(i))
