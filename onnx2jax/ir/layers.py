"""Repeated layers of a graph: nodes that apply the same operators again and again, to other weights.

A run of layers is found by the distance between equal nodes: from some node on, each equals the one a *period* later.
Then their operands are compared layer by layer. Each is one of

- computed in the layer itself;
- a *carry*: computed by the layer before, and for the first layer outside of the run;
- *shared*: the same value from outside for all layers;
- of a *column*: another value from outside for each layer, such as its weights or its KV cache.

A layer with any other operand ends the run. Shapes that the graph does not show are compared when it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from ..proto.mapped import load
from . import analysis
from .analysis import application
from .graph import Graph, Node

FEWEST: Final = 6
"""Nodes that a loop must save: a loop over two layers of Conv and Relu costs more than it saves."""
TRIES: Final = 16
"""Nodes at which a layer may begin that are tried, those with the fewest carries first."""

Place = tuple[int, int, int]
"""A value computed in a run: its layer, and of the producer the index in the layer and the output."""


@dataclass(frozen=True)
class Layers:
    """A run of repeated layers.

    Attributes:
        nodes: of all layers, in graph order.
        count: the number of layers.
        template: the nodes of the layer that represents all of them.
        carries: for each carry its value before the first layer, and in the template before and after the layer.
        last: for each carry its value after the last layer; "" if nothing outside reads it.
        columns: the name in the template -> the names in all layers.
        rows: values that are read outside: the name in the template -> the names in all layers, "" if not read.
    """

    nodes: tuple[Node, ...]
    count: int
    template: tuple[Node, ...]
    carries: tuple[tuple[str, str, str], ...]
    last: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.count} layers of {len(self.template)} nodes, {self.nodes[0].name!r} to {self.nodes[-1].name!r}"


def repeated(graph: Graph) -> list[Layers]:
    """The runs of repeated layers among the nodes of a graph, in order."""
    return _Search(graph).layers()


def first_difference(graph: Graph) -> str:
    """Where the longest repetition among the nodes of a graph ends."""
    return _Search(graph).first_difference()


@dataclass(frozen=True)
class _Run:
    """Layers of ``period`` nodes from the node at index ``first`` on."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.count

    @property
    def saved(self) -> int:
        return self.period * (self.count - 1)


class _Search:
    """The search for runs among the nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.nodes = graph, graph.nodes
        kinds: dict[Any, int] = {}
        self.kinds = np.array([kinds.setdefault(_kind(n), len(kinds)) for n in graph.nodes], np.int64)
        self.able = np.array([_is_able(n) for n in graph.nodes], bool)
        self.heavy = np.array([n.operator.heavy for n in graph.nodes], bool)
        self.producers = {n: (i, o) for i, node in enumerate(graph.nodes) for o, n in enumerate(node.outputs) if n}
        self.static = analysis.static_names(graph)

    def layers(self) -> list[Layers]:
        runs = map(self._described, self._runs(0, len(self.nodes)))
        return [layers for layers in runs if layers is not None]

    def first_difference(self) -> str:
        heavy = [s for s in self._stretches(0, len(self.nodes), 1) if self._is_heavy(*s[:2])]
        inside = [s for s in heavy if s[2] < s[0] and sum(s) < len(self.nodes)]
        if not heavy:
            return "no layer with a product, convolution or the like is followed by an equal one"
        period, first, length = max(inside or heavy, key=lambda s: s[2])
        if not inside:
            return f"the {length + period} nodes from {self.nodes[first]} on are alike, but do not follow one another"
        a, b = (self.nodes[first + length + distance] for distance in (0, period))
        what = "operators" if a.op_type != b.op_type else "attributes or outputs"
        return f"the {what} of {a} and {b} differ, after {length} nodes that are alike"

    # ------------------------------------------------------------------------------------------------ runs

    def _runs(self, start: int, end: int) -> Iterator[_Run]:
        """Runs between two nodes: the one that saves most, and those before and after it."""
        best = None
        for period, first, length in sorted(self._stretches(start, end), key=lambda s: (-s[2], s[0])):
            if length < FEWEST or (best is not None and length <= best.saved):
                break
            if self._is_heavy(period, first):
                run = self._best(period, first, length + period)
                if run is not None and (best is None or run.saved > best.saved):
                    best = run
        if best is not None:
            yield from self._runs(start, best.first)
            yield best
            yield from self._runs(best.end, end)

    def _stretches(self, start: int, end: int, least: int = 0) -> Iterator[tuple[int, int, int]]:
        """(period, first node, number of nodes that equal the one a period later), a period or more of them."""
        kinds, able = self.kinds[start:end], self.able[start:end]
        for period in range(1, (end - start) // 2 + 1):
            same = (kinds[:-period] == kinds[period:]) & able[:-period] & able[period:]
            edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
            lengths = edges[1::2] - edges[::2]
            for i in np.flatnonzero(lengths >= (least or period)):
                yield period, start + int(edges[2 * i]), int(lengths[i])

    def _is_heavy(self, period: int, first: int) -> bool:
        return bool(self.heavy[first : first + period].any())

    def _best(self, period: int, first: int, length: int) -> _Run | None:
        """The run with most layers in a stretch of nodes, and of those the one with fewest carries."""
        crossing = self._crossing(first, first + length)
        shifts = range(min(period, length - 2 * period + 1))
        best = None
        for shift in sorted(shifts, key=lambda s: (crossing[s + period], s))[:TRIES]:
            at = first + shift
            while (most := (first + length - at) // period) >= 2:
                count = self._fitting(at, period, most)
                if count >= 2 and (best is None or count > best.count):
                    best = _Run(at, period, count)
                at += period * count
            if best is not None and best.count == (length - shift) // period:
                break
        return best if best is not None and best.saved >= FEWEST else None

    def _crossing(self, start: int, end: int) -> Any:
        """For each node of a stretch, how many values computed in the stretch before it are read from it on."""
        until = {}
        for i in range(start, end):
            for name in self.nodes[i].reads:
                place = self.producers.get(name, (-1, 0))
                if place[0] >= start:
                    until[place] = i
        change = np.zeros(end - start + 2, np.int64)
        for (i, _), last in until.items():
            change[i - start + 1] += 1
            change[last - start + 1] -= 1
        return np.cumsum(change)

    # ------------------------------------------------------------------------------------------------ operands

    def _fitting(self, first: int, period: int, count: int) -> int:
        """The number of layers from a node on whose operands agree; 1 at least."""
        for j in range(period):
            for slot, name in enumerate(self.nodes[first + j].inputs):
                if name:
                    count = self._agreeing(first, period, self._column(first, period, count, j, slot))
                    if count == 1:
                        return 1
        return count

    def _column(self, first: int, period: int, count: int, j: int, slot: int) -> list[str]:
        """The names of an operand in all layers."""
        return [self.nodes[first + k * period + j].inputs[slot] for k in range(count)]

    def _agreeing(self, first: int, period: int, names: Sequence[str]) -> int:
        """In how many layers, from the first on, an operand is of one sort."""
        places = [self._place(n, first, period) for n in names]
        source, second = places[0], places[1]
        if source is None and second is None:
            outside = next((k for k, p in enumerate(places) if p is not None), len(places))
            return next((k for k in range(1, outside) if not self._may_differ(names[0], names[k])), outside)
        if source is None:  # a carry
            expected = [None, *((k, *(second or ())[1:]) for k in range(len(names) - 1))]
        else:
            expected = [(k, *source[1:]) for k in range(len(names))]
        return next((k for k, pair in enumerate(zip(places, expected, strict=True)) if pair[0] != pair[1]), len(names))

    def _place(self, name: str, first: int, period: int) -> Place | None:
        """Where a run computes a value; None outside of it."""
        i, output = self.producers.get(name, (-1, 0))
        return None if i < first else (*divmod(i - first, period), output)

    def _may_differ(self, name: str, other: str) -> bool:
        """Whether values from outside may be those of two layers, as far as the graph shows."""
        a, b = self.graph.initializers.get(name), self.graph.initializers.get(other)
        if name == other or a is None or b is None:
            return True
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return self.static.isdisjoint((name, other)) or bool(np.array_equal(load(a), load(b)))

    # ------------------------------------------------------------------------------------------------ description

    def _described(self, run: _Run) -> Layers | None:
        """A run with its operands by sort; None if one name is two different operands in every layer but the first."""
        nodes = self.nodes[run.first : run.end]
        inner = [nodes[k * run.period : (k + 1) * run.period] for k in range(run.count)]
        columns: dict[tuple[str, ...], None] = {}
        carries: dict[Place, dict[str, None]] = {}
        shared: set[str] = set()
        for j, node in enumerate(inner[0]):
            for slot, name in enumerate(node.inputs):
                if not name or self._place(name, run.first, run.period) is not None:
                    continue
                names = self._column(run.first, run.period, run.count, j, slot)
                place = self._place(names[1], run.first, run.period)
                if place is not None:
                    carries.setdefault(place, {})[name] = None
                elif len({*names}) == 1:
                    shared.add(name)
                else:
                    columns[tuple(names)] = None
        if not carries or any(len(names) > 1 for names in carries.values()):
            return None
        for k in range(1, run.count):
            layer_names = [names[k] for names in columns]
            if len({*layer_names}) == len(layer_names) and shared.isdisjoint(layer_names):
                return self._as_layers(run, inner, k, columns, {p: next(iter(n)) for p, n in carries.items()})
        return None

    def _as_layers(
        self, run: _Run, inner: Sequence[tuple[Node, ...]], k: int, columns: Any, carries: Mapping[Place, str]
    ) -> Layers:
        """A run whose layer ``k`` is the template."""
        others = (*self.nodes[: run.first], *self.nodes[run.end :])
        outside = {*(v.name for v in self.graph.outputs), *(n for node in others for n in node.reads)}
        leaving = {place[1:] for place in carries}
        rows = {}
        for j, node in enumerate(inner[k]):
            for output, name in enumerate(node.outputs):
                names = [layer[j].outputs[output] for layer in inner]
                if (j, output) in leaving:
                    names[-1] = ""  # it is in ``last``
                names = [n if n in outside else "" for n in names]
                if any(names):
                    rows[name] = tuple(names)
        before, after, ends = (
            [layer[j].outputs[output] for _, j, output in carries] for layer in (inner[k - 1], inner[k], inner[-1])
        )
        nodes, last = tuple(chain.from_iterable(inner)), tuple(n if n in outside else "" for n in ends)
        carried = tuple(zip(carries.values(), before, after, strict=True))
        return Layers(nodes, run.count, inner[k], carried, last, {names[k]: names for names in columns}, rows)


def _is_able(node: Node) -> bool:
    """Whether a node may be part of a layer: it has no graphs, draws no random numbers, reads nothing unseen."""
    if node.target is None or node.graphs or node.implicit_inputs or node.differentiates:
        return False
    return "rng" not in node.operator.fixtures and not any(body.draws for body in node.bodies)


def _kind(node: Node) -> Any:
    """What two nodes must have in common, beside their operands: equal kinds are equal computations."""
    positions = {n: i for i, n in enumerate((*node.inputs, *node.outputs)) if n}
    devices = [
        (name, d.stage, *((positions.get(s.tensor), s.holders, s.splits, s.axes) for s in d.shardings))
        for name, d in sorted(node.devices.items())
    ]
    present = tuple(map(bool, node.outputs))
    return application(node, tuple(map(bool, node.inputs))), id(node.target), present, tuple(devices)
