"""Propagates shardings through the nodes of a graph; the operators' rules call its methods."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..eval.abstract import ALONG, SAME, is_elementwise
from ..eval.known_values import symbolic_types
from ..ir.graph import Graph, Node

Extent = int | str
Shape = tuple[Extent, ...]
Axes = tuple[int | None, ...]
Along = tuple[int, frozenset[int]]
"""The sharded axis of a value, counted from the last, and the nodes where that sharding started."""
Key = tuple[str, tuple[str, ...]]

CONCATENATED: Final = "it concatenates queries, keys and values, so its blocks are not heads"


def key(node: Node) -> Key:
    """Identifies a node of the main graph, also after the node was replaced."""
    return node.op_type, node.outputs


class Fact(NamedTuple):
    """Static facts about a value."""

    shape: Shape | None = None
    """Its extents; None if its rank is unknown."""
    weights: Mapping[str, Axes] | None = None
    """Of a value computed from weights only: weight -> for each axis of the value, that of the weight."""


class ValueFacts(dict[str, Fact]):
    """Facts about the values of a graph, by name."""

    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        kinds: Any = symbolic_types(graph)
        super().__init__({name: Fact(kind.shape) for name, kind in kinds.items()})
        for name, array in graph.initializers.items():
            self[name] = Fact(array.shape, {name: tuple(range(array.ndim))} if name in weights else {})
        for node in graph.nodes:
            results, operands = [self.of(n) for n in node.outputs], [self.of(n) for n in node.inputs if n]
            if operands and (axes := _weights(node, operands, results[0].shape)) is not None:
                self[node.outputs[0]] = Fact(results[0].shape, axes)

    def of(self, name: str) -> Fact:
        return self.get(name, Fact())


def _weights(node: Node, operands: Sequence[Fact], shape: Shape | None) -> Mapping[str, Axes] | None:
    """The weights that the first output of a node consists of; None if it also depends on other values."""
    if shape is None or any(o.weights is None for o in operands):
        return None
    weights = dict(operands[0].weights or {})
    if node.op_type == "Transpose":
        return {n: tuple(axes[i] for i in permutation(node, len(shape))) for n, axes in weights.items()}
    if node.op_type in SAME:
        return weights
    if node.op_type == "DequantizeLinear":
        axis = node.attributes.get("axis", 1) % max(1, len(shape))
        for operand in operands[1:]:
            for name, axes in (operand.weights or {}).items():
                per_axis = tuple(0 if i == axis and len(axes) == 1 else None for i in range(len(shape)))
                weights[name] = axes if len(axes) == len(shape) else per_axis
        return weights
    if not is_elementwise(node):
        return None
    return {n: (*[None] * (len(shape) - len(a)), *a) for o in operands for n, a in (o.weights or {}).items()}


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """The axes of a Transpose."""
    return tuple(node.attributes.get("perm") or range(rank)[::-1])


@dataclass
class ShardedAxes:
    """How a graph can be sharded.

    Attributes:
        weights: sharded weight -> axis.
        inputs: sharded input (a cache) -> axis, counted from the last.
        sliced: ``key`` of a node -> its outputs of which each device slices its shard, and their axes from the last.
        results: ``key`` of a node -> outputs that a file annotates: sharded axis, from the last, or None, and rank.
        shards: ``key`` of a node -> ``registry.Shards.along``, for operators that need to know.
        reasons: weight that is not sharded -> why.
    """

    weights: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    sliced: dict[Key, dict[str, int]] = field(default_factory=dict)
    results: dict[Key, dict[str, tuple[int | None, int]]] = field(default_factory=dict)
    shards: dict[Key, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Walk:
    """One pass over the nodes; ``rejected`` maps indices of nodes where sharding must not start to the reason."""

    def __init__(
        self, graph: Graph, facts: ValueFacts, weights: Mapping[str, Any], parts: int, rejected: Mapping[int, str]
    ) -> None:
        self.graph, self.facts, self.weights, self.parts, self.rejected = graph, facts, weights, parts, rejected
        self.sharded = ShardedAxes()
        self.along: dict[str, Along] = {}
        self.concatenated: set[str] = set()
        """Replicated values that concatenate queries, keys and values."""
        self.failed: dict[int, str] = {}
        self.inputs = {v.name for v in graph.inputs} - graph.initializers.keys()
        self.largest = self._largest()

    def run(self, begins: Mapping[str, Begin], rules: Mapping[str, Rule]) -> None:
        """Propagate shardings through all nodes: ``begins`` where no operand is sharded, else ``rules``."""
        for i, node in enumerate(self.graph.nodes):
            operands = [self.along.get(n) for n in node.inputs]
            try:
                if any(self.along.get(n) for n in node.reads):
                    results = rules.get(node.op_type, elementwise if _is_elementwise(node) else other)(
                        self, node, operands
                    )
                else:
                    results = self._begun(i, node, begins)
            except (ArithmeticError, LookupError, TypeError, ValueError):  # an invalid node, which its operator reports
                results = fail(self, node, operands)
            self.along.update((n, r) for n, r in zip(node.outputs, results, strict=False) if n and r is not None)

    def _begun(self, i: int, node: Node, begins: Mapping[str, Begin]) -> Sequence[Along | None]:
        if node.op_type not in begins:
            joined = _is_elementwise(node) and self.concatenated.intersection(node.inputs)
            self.concatenated.update(node.outputs if joined else ())
        elif i not in self.rejected:
            return begins[node.op_type](self, i, node)
        elif self.rejected[i] == CONCATENATED:
            self.concatenated.update(node.outputs)
        return []

    # For the rules of operators.

    def table(self, node: Node) -> str | None:
        """The weight from which a node gathers rows; None if it does not."""
        if node.op_type != "Gather" or node.attributes.get("axis", 0) != 0:
            return None
        name = node.inputs[0]
        return name if name in self.weights and len(self.weights[name].shape) == 2 else None

    def _largest(self) -> str | None:
        """The embedding table: the largest, except pairs of one shape and indices, which are cosines and sines."""
        reads = {(t, node.inputs[1]) for node in self.graph.nodes if (t := self.table(node)) is not None}
        alike = Counter((tuple(self.weights[t].shape), places) for t, places in reads)
        alone = sorted(t for t, places in reads if alike[tuple(self.weights[t].shape), places] == 1)
        return max(alone, key=lambda t: math.prod(self.weights[t].shape), default=None)

    def shape(self, name: str) -> tuple[Extent, ...] | None:
        return self.facts.of(name).shape

    def divides(self, extent: Extent | None) -> bool:
        return isinstance(extent, int) and extent > 0 and extent % self.parts == 0

    def fail(self, origins: frozenset[int], why: str) -> None:
        for origin in origins:
            self.failed.setdefault(origin, why)

    def shard(self, name: str, axis: int, origins: frozenset[int]) -> bool:
        """Shard the weights that a value consists of along one of its axes; False if that is impossible."""
        chosen: dict[str, int] = {}
        for weight, axes in (self.facts.of(name).weights or {}).items():
            place = axes[axis] if -len(axes) <= axis < len(axes) else None
            if place is None or (extent := self.weights[weight].shape[place]) == 1:
                continue
            if extent % self.parts:
                self.fail(origins, f"axis {place} of {extent} cannot be divided evenly over {self.parts} devices")
                return False
            if (other := self.sharded.weights.get(weight, place)) != place:
                self.fail(origins, f"another node shards it along axis {other}, this one along {place}")
                return False
            chosen[weight] = place
        self.sharded.weights |= chosen
        return True

    def is_weight(self, name: str) -> bool:
        return bool(self.facts.of(name).weights)

    def cache(self, name: str, axis: int) -> None:
        """Shard an input of the graph, such as a cache that a sharded value is appended to."""
        if name in self.inputs:
            self.sharded.inputs[name] = axis

    def annotate(self, products: Collection[str], tables: Collection[str]) -> None:
        """Record the placement of outputs of products and attention, tables and mixtures, and slices."""
        for i, node in enumerate(self.graph.nodes):
            weights = {w for n in node.inputs for w in self.facts.of(n).weights or ()}
            reads = not weights.isdisjoint(self.sharded.weights) and node.op_type in (*products, *tables)
            moves = node.op_type in products and (i in self.rejected or any(n in self.along for n in node.outputs))
            if reads or moves or key(node) in self.sharded.sliced:
                shapes = {n: shape for n in node.outputs if n and (shape := self.shape(n))}
                axes = {n: self.along[n][0] if n in self.along else None for n in shapes}
                self.sharded.results[key(node)] = {n: (axes[n], len(shape)) for n, shape in shapes.items()}

    def explain(self) -> None:
        """Record why the other weights are not sharded."""
        readers: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            for name in {w for n in node.inputs for w in (n, *(self.facts.of(n).weights or ()))}:
                readers.setdefault(name, []).append(i)
        for name in self.weights.keys() - self.sharded.weights.keys():
            places, why = readers.get(name, []), "no node of the main graph reads it"
            if places:
                why = f"{label(self.graph.nodes[places[0]])} needs it replicated"
            self.sharded.reasons[name] = next((self.rejected[i] for i in places if i in self.rejected), why)


Begin = Callable[[Walk, int, Node], Sequence[Along | None]]
"""The outputs of a node whose operands are replicated."""
Rule = Callable[[Walk, Node, Sequence[Along | None]], Sequence[Along | None]]
"""The outputs of a node with a sharded operand."""
Move = Callable[[Walk, Node, int], int | str]
"""From the sharded axis of the operands to that of the outputs, or the reason why it cannot be sharded, or ""."""


def label(node: Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def fail(walk: Walk, node: Node, operands: Sequence[Along | None], why: str = "") -> list[Along | None]:
    for operand in operands:
        if operand is not None:
            walk.fail(operand[1], why or f"{label(node)} needs the result of its product replicated")
    return []


def begin(walk: Walk, i: int, node: Node, axis: int) -> list[Along | None]:
    """Start sharding at a replicated value: each device slices its shard, which needs no communication."""
    names = node.outputs if node.op_type == "Split" else node.outputs[:1]
    walk.sharded.sliced[key(node)] = dict.fromkeys(filter(None, names), axis)
    return [(axis, frozenset({i}))] * len(names)


def common_axis(operands: Sequence[Along | None]) -> Along | None:
    """The sharding that all sharded operands have in common; None if they differ."""
    sharded = [o for o in operands if o is not None]
    axes = {axis for axis, _ in sharded}
    return (axes.pop(), frozenset().union(*(origins for _, origins in sharded))) if len(axes) == 1 else None


def has_axis(fact: Fact, axis: int) -> bool:
    return fact.shape is not None and len(fact.shape) >= -axis and fact.shape[axis] != 1


def moving(move: Move) -> Rule:
    """The rule of an operator that moves the axis along which its operands are sharded."""

    def rule(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
        one = common_axis(operands)
        axis = "" if one is None else move(walk, node, one[0])
        if one is None or isinstance(axis, str):
            return fail(walk, node, operands, str(axis))
        return [(axis, one[1])] * len(node.outputs)

    return rule


def _is_elementwise(node: Node) -> bool:
    return node.op_type in SAME or (is_elementwise(node) and node.op_type not in ALONG)


def elementwise(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    one = common_axis(operands)
    if one is None:
        return fail(walk, node, operands)
    for name, operand in zip(node.inputs, operands, strict=True):
        if operand is None and name and walk.is_weight(name) and has_axis(walk.facts.of(name), one[0]):
            walk.shard(name, one[0], frozenset())
    return [one]


def other(walk: Walk, node: Node, _: Sequence[Along | None]) -> Sequence[Along | None]:
    """A node without a rule needs its operands replicated, and the captures of its subgraphs."""
    return fail(walk, node, [walk.along.get(n) for n in node.reads])


def nothing(*_: Any) -> list[Along | None]:
    """A node that only reads the shape."""
    return []
