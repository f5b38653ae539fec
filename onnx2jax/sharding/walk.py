"""One walk through the nodes of a graph, and what the rules for operators ask and say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ..ir.graph import Graph, Node
from .shapes import Extent, Fact, Facts, is_elementwise

Along = tuple[int, frozenset[int]]
"""The axis, counted from the end, along which a value is divided, and the nodes where that began."""
Key = tuple[str, tuple[str, ...]]
How = Literal["divided", "whole", "taken"]
"""Divided over the devices, whole on each, or a part that each takes of what it has whole."""

PACKED: Final = "queries, keys and values lie in it one behind the other, so that no block of it is a head's"


def key(node: Node) -> Key:
    """What tells the nodes of a main graph apart, also where a node was made anew."""
    return node.op_type, node.outputs


@dataclass
class Found:
    """How a graph can be divided.

    Attributes:
        weights: for each weight that is divided the axis.
        inputs: for each input (a cache) that is divided the axis, counted from the end.
        values: for nodes, by ``key``, an axis of outputs, counted from the end, and how it lies.
        ranks: of the outputs in ``values``, where they are known.
        shards: for nodes, by ``key``, along what a weight is divided whose operator has to know (registry.Shards).
        reasons: for each weight that is not divided, why.
    """

    weights: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    values: dict[Key, dict[str, tuple[int, How]]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    shards: dict[Key, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Walk:
    """One walk through the nodes, some of which are refused as beginnings, by position, each with the reason."""

    def __init__(
        self, graph: Graph, facts: Facts, weights: Mapping[str, Any], parts: int, refused: Mapping[int, str]
    ) -> None:
        self.graph, self.facts, self.weights, self.parts, self.refused = graph, facts, weights, parts, refused
        self.found = Found()
        self.along: dict[str, Along] = {}
        self.packed: set[str] = set()
        """Values in which queries, keys and values lie one behind the other, whole on every device."""
        self.failed: dict[int, str] = {}
        self.makers = {n: (node, i) for node in graph.nodes for i, n in enumerate(node.outputs) if n}
        self.inputs = {v.name for v in graph.inputs} - graph.initializers.keys()
        self.largest = self._largest()

    def run(self, rules: Mapping[str, Rule]) -> None:
        """Follow what is divided through all nodes, by the rules for their operators."""
        for i, node in enumerate(self.graph.nodes):
            operands = [self.along.get(n) for n in node.inputs]
            rule = rules.get(node.op_type, elementwise if is_elementwise(node) else other)
            try:
                results = rule(self, i, node, operands)
            except (ArithmeticError, LookupError, TypeError, ValueError):  # a node that its operator will refuse
                results = fail(self, node, operands)
            self.along.update((n, r) for n, r in zip(node.outputs, results, strict=False) if n and r is not None)

    # What rules ask and say.

    def table(self, node: Node) -> str | None:
        """The weight from which a Gather takes rows."""
        if node.op_type != "Gather" or node.attributes.get("axis", 0) != 0:
            return None
        name = node.inputs[0]
        return name if name in self.weights and len(self.weights[name].shape) == 2 else None

    def _largest(self) -> str | None:
        """The table of words. Two of one shape, read at the same places, are cosines and sines."""
        read = {(t, node.inputs[1]) for node in self.graph.nodes if (t := self.table(node)) is not None}
        alike = Counter((tuple(self.weights[t].shape), places) for t, places in read)
        alone = sorted(t for t, places in read if alike[tuple(self.weights[t].shape), places] == 1)
        return max(alone, key=lambda t: math.prod(self.weights[t].shape), default=None)

    def shape(self, name: str) -> tuple[Extent, ...] | None:
        return self.facts.of(name).shape

    def divides(self, extent: Extent | None) -> bool:
        return isinstance(extent, int) and extent > 0 and extent % self.parts == 0

    def fail(self, origins: frozenset[int], why: str) -> None:
        for origin in origins:
            self.failed.setdefault(origin, why)

    def may_begin(self, i: int) -> bool:
        return i not in self.refused and i not in self.failed

    def divide(self, name: str, axis: int, origins: frozenset[int]) -> bool:
        """Divide the weights of a value along one of its axes; False where that cannot be."""
        wanted: dict[str, int] = {}
        for weight, axes in (self.facts.of(name).weights or {}).items():
            own = axes[axis] if -len(axes) <= axis < len(axes) else None
            if own is None or self.weights[weight].shape[own] == 1:
                continue
            extent = self.weights[weight].shape[own]
            if extent % self.parts:
                self.fail(origins, f"axis {own} of {extent} cannot be divided evenly over {self.parts} devices")
                return False
            if self.found.weights.get(weight, own) != own:
                self.fail(origins, f"another node divides it along axis {self.found.weights[weight]}, this one {own}")
                return False
            wanted[weight] = own
        self.found.weights |= wanted
        return True

    def is_weight(self, name: str) -> bool:
        return bool(self.facts.of(name).weights)

    def place(self, node: Node, output: int, axis: int, how: How = "divided") -> None:
        """Say how an output lies: an operator between would else be free to choose."""
        if output < len(node.outputs) and node.outputs[output]:
            name = node.outputs[output]
            self.found.values.setdefault(key(node), {})[name] = axis, how
            if (shape := self.shape(name)) is not None:
                self.found.ranks[name] = len(shape)

    def whole(self, node: Node) -> None:
        self.place(node, 0, -1, "whole")

    def cache(self, name: str, axis: int) -> None:
        """What joins a divided value is divided alike, if it is an input of the graph."""
        if name in self.inputs:
            self.found.inputs[name] = axis

    def explain(self) -> None:
        """Why each of the others is whole."""
        readers: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            for name in {w for n in node.inputs for w in (n, *(self.facts.of(n).weights or ()))}:
                readers.setdefault(name, []).append(i)
        for name in self.weights.keys() - self.found.weights.keys():
            places = readers.get(name, [])
            why = [self.refused[i] for i in places if i in self.refused]
            plain = (
                f"{said(self.graph.nodes[places[0]])} takes it whole"
                if places
                else "no node of the main graph reads it"
            )
            self.found.reasons[name] = why[0] if why else plain


Rule = Callable[[Walk, int, Node, Sequence[Along | None]], Sequence[Along | None]]


def said(node: Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def fail(walk: Walk, node: Node, operands: Sequence[Along | None], why: str = "") -> list[Along | None]:
    for operand in operands:
        if operand is not None:
            walk.fail(operand[1], why or f"{said(node)} takes whole what the product with it gives")
    return []


def begin(walk: Walk, i: int, node: Node, axis: int, extent: Extent) -> list[Along | None]:
    """Each device goes on with a part of what all have: that costs nothing."""
    if not walk.divides(extent):
        return []
    count = len(node.outputs) if node.op_type == "Split" else 1
    for output in range(count):
        walk.place(node, output, axis, "taken")
    return [(axis, frozenset({i}))] * count


def one_of(operands: Sequence[Along | None]) -> Along | None:
    """How the result of operands is divided that lie beside each other; None where they do not."""
    given = [o for o in operands if o is not None]
    axes = {axis for axis, _ in given}
    return (axes.pop(), frozenset().union(*(origins for _, origins in given))) if len(axes) == 1 else None


def reaches(fact: Fact, axis: int) -> bool:
    return fact.shape is not None and len(fact.shape) >= -axis and fact.shape[axis] != 1


def elementwise(walk: Walk, _i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    if not any(operands):
        walk.packed.update(node.outputs if walk.packed.intersection(node.inputs) else ())
        return []
    one = one_of(operands)
    if one is None:
        return fail(walk, node, operands)
    axis, _ = one
    for name, operand in zip(node.inputs, operands, strict=True):
        if operand is None and name and walk.is_weight(name) and reaches(walk.facts.of(name), axis):
            walk.divide(name, axis, frozenset())
    return [one]


def other(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """A node of which nothing is known takes its operands whole, what its graphs read too."""
    return fail(walk, node, [*operands, *(walk.along.get(n) for n in node.reads)])


def nothing(*_: Any) -> list[Along | None]:
    """Only the shape is read."""
    return []
