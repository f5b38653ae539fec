"""Propagates shardings through the nodes of a graph; the operators' rules call its methods."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ..eval.abstract import is_elementwise
from ..ir.graph import Graph, Node
from .shapes import Extent, Fact, Facts

Along = tuple[int, frozenset[int]]
"""The sharded axis of a value, counted from the last, and the nodes where that sharding started."""
Key = tuple[str, tuple[str, ...]]
How = Literal["sharded", "replicated", "sliced"]
"""How a value is placed; "sliced": each device slices its shard from a replicated value."""

CONCATENATED: Final = "it concatenates queries, keys and values, so its blocks are not heads"


def key(node: Node) -> Key:
    """Identifies a node of the main graph, also after the node was replaced."""
    return node.op_type, node.outputs


@dataclass
class Found:
    """How a graph can be sharded.

    Attributes:
        weights: sharded weight -> axis.
        inputs: sharded input (a cache) -> axis, counted from the last.
        values: ``key`` of a node -> its outputs to constrain: an axis, counted from the last, and how it is placed.
        ranks: ranks of the outputs in ``values``, where known.
        shards: ``key`` of a node -> ``registry.Shards.along``, for operators that need to know.
        reasons: weight that is not sharded -> why.
    """

    weights: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    values: dict[Key, dict[str, tuple[int, How]]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    shards: dict[Key, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Walk:
    """One pass over the nodes; ``refused`` maps indices of nodes where sharding must not start to the reason."""

    def __init__(
        self, graph: Graph, facts: Facts, weights: Mapping[str, Any], parts: int, refused: Mapping[int, str]
    ) -> None:
        self.graph, self.facts, self.weights, self.parts, self.refused = graph, facts, weights, parts, refused
        self.found = Found()
        self.along: dict[str, Along] = {}
        self.concatenated: set[str] = set()
        """Replicated values that concatenate queries, keys and values."""
        self.failed: dict[int, str] = {}
        self.producers = {n: (node, i) for node in graph.nodes for i, n in enumerate(node.outputs) if n}
        self.inputs = {v.name for v in graph.inputs} - graph.initializers.keys()
        self.largest = self._largest()

    def run(self, rules: Mapping[str, Rule]) -> None:
        """Propagate shardings through all nodes by the rules of their operators."""
        for i, node in enumerate(self.graph.nodes):
            operands = [self.along.get(n) for n in node.inputs]
            rule = rules.get(node.op_type, elementwise if is_elementwise(node) else other)
            try:
                results = rule(self, i, node, operands)
            except (ArithmeticError, LookupError, TypeError, ValueError):  # an invalid node, which its operator reports
                results = fail(self, node, operands)
            self.along.update((n, r) for n, r in zip(node.outputs, results, strict=False) if n and r is not None)

    # For the rules of operators.

    def table(self, node: Node) -> str | None:
        """The weight from which a node gathers rows; None if it does not."""
        if node.op_type != "Gather" or node.attributes.get("axis", 0) != 0:
            return None
        name = node.inputs[0]
        return name if name in self.weights and len(self.weights[name].shape) == 2 else None

    def _largest(self) -> str | None:
        """The embedding table: the largest, except pairs of one shape and indices, which are cosines and sines."""
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

    def shard(self, name: str, axis: int, origins: frozenset[int]) -> bool:
        """Shard the weights that a value consists of along one of its axes; False if that is impossible."""
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
                self.fail(
                    origins, f"another node shards it along axis {self.found.weights[weight]}, this one along {own}"
                )
                return False
            wanted[weight] = own
        self.found.weights |= wanted
        return True

    def is_weight(self, name: str) -> bool:
        return bool(self.facts.of(name).weights)

    def constrain(self, node: Node, output: int, axis: int, how: How = "sharded") -> None:
        """Constrain the placement of an output, so that XLA does not choose another."""
        if output < len(node.outputs) and node.outputs[output]:
            name = node.outputs[output]
            self.found.values.setdefault(key(node), {})[name] = axis, how
            if (shape := self.shape(name)) is not None:
                self.found.ranks[name] = len(shape)

    def replicate(self, node: Node) -> None:
        self.constrain(node, 0, -1, "replicated")

    def cache(self, name: str, axis: int) -> None:
        """Shard an input of the graph, such as a cache that a sharded value is appended to."""
        if name in self.inputs:
            self.found.inputs[name] = axis

    def explain(self) -> None:
        """Record why the other weights are not sharded."""
        readers: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            for name in {w for n in node.inputs for w in (n, *(self.facts.of(n).weights or ()))}:
                readers.setdefault(name, []).append(i)
        for name in self.weights.keys() - self.found.weights.keys():
            places = readers.get(name, [])
            why = [self.refused[i] for i in places if i in self.refused]
            plain = (
                f"{label(self.graph.nodes[places[0]])} needs it replicated"
                if places
                else "no node of the main graph reads it"
            )
            self.found.reasons[name] = why[0] if why else plain


Rule = Callable[[Walk, int, Node, Sequence[Along | None]], Sequence[Along | None]]


def label(node: Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def fail(walk: Walk, node: Node, operands: Sequence[Along | None], why: str = "") -> list[Along | None]:
    for operand in operands:
        if operand is not None:
            walk.fail(operand[1], why or f"{label(node)} needs the result of its product replicated")
    return []


def begin(walk: Walk, i: int, node: Node, axis: int, extent: Extent) -> list[Along | None]:
    """Start sharding at a replicated value: each device slices its shard, which needs no communication."""
    if not walk.divides(extent):
        return []
    count = len(node.outputs) if node.op_type == "Split" else 1
    for output in range(count):
        walk.constrain(node, output, axis, "sliced")
    return [(axis, frozenset({i}))] * count


def common_axis(operands: Sequence[Along | None]) -> Along | None:
    """The sharding that all sharded operands have in common; None if they differ."""
    given = [o for o in operands if o is not None]
    axes = {axis for axis, _ in given}
    return (axes.pop(), frozenset().union(*(origins for _, origins in given))) if len(axes) == 1 else None


def has_axis(fact: Fact, axis: int) -> bool:
    return fact.shape is not None and len(fact.shape) >= -axis and fact.shape[axis] != 1


def elementwise(walk: Walk, _i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    if not any(operands):
        walk.concatenated.update(node.outputs if walk.concatenated.intersection(node.inputs) else ())
        return []
    one = common_axis(operands)
    if one is None:
        return fail(walk, node, operands)
    axis, _ = one
    for name, operand in zip(node.inputs, operands, strict=True):
        if operand is None and name and walk.is_weight(name) and has_axis(walk.facts.of(name), axis):
            walk.shard(name, axis, frozenset())
    return [one]


def other(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """A node without a rule needs its operands replicated, and the captures of its subgraphs."""
    return fail(walk, node, [*operands, *(walk.along.get(n) for n in node.reads)])


def nothing(*_: Any) -> list[Along | None]:
    """A node that only reads the shape."""
    return []
