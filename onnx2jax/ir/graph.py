"""A model as frozen Python objects: every node bound to what serves it, every constant a NumPy array."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, cast

import numpy as np

from ..ops.registry import Operator
from ..proto.devices import Configuration, NodeDevices
from ..proto.mapped import load, waits
from ..proto.names import inside
from ..proto.types import ValueInfo


@dataclass(frozen=True)
class Reference:
    """The value of an attribute inside a function: that of the caller's attribute ``name`` (rule FN-13)."""

    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an operator or function. An empty name among inputs or outputs is left out."""

    name: str
    op_type: str
    domain: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    target: Operator | Function | None
    """What serves it; None when nothing does (only in graphs loaded for inspection)."""
    hidden: tuple[str, ...] = ()
    """What it reads beyond its inputs: the values from which those that its attributes name are computed."""
    devices: Mapping[str, NodeDevices] = field(default_factory=dict)
    """What it says about each device configuration of the model."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs among the attributes."""
        values = (v if isinstance(v, tuple) else (v,) for v in self.attributes.values())
        return tuple(g for group in values for g in group if isinstance(g, Graph))

    @cached_property
    def is_plain(self) -> bool:
        """Whether its attributes are values as they stand, neither graphs nor references."""
        return not self.graphs and not any(isinstance(v, Reference) for v in self.attributes.values())

    @cached_property
    def bodies(self) -> tuple[Graph, ...]:
        """The graphs among the attributes, and the body of the function that serves the node."""
        return (*self.graphs, self.target.body) if isinstance(self.target, Function) else self.graphs

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names it reads from its surroundings: its inputs and what its graphs capture."""
        captured = (n for g in self.graphs for n in sorted(g.captures))
        return (*filter(None, self.inputs), *captured, *self.hidden)

    @property
    def differentiates(self) -> bool:
        """Whether its attributes name values of the graph to be differentiated."""
        return isinstance(self.target, Operator) and "derivatives" in self.target.fixtures

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.domain + '.' if self.domain else ''}{self.op_type}, opset {self.opset})"


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in an order in which each comes after those it reads, with the constants they use."""

    name: str
    path: str
    """Where it stands in the model; empty for the main graph."""
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    initializers: Mapping[str, np.ndarray]
    nodes: tuple[Node, ...]
    lifted: frozenset[str] = frozenset()
    """Initializers that the file writes as Constant nodes."""
    value_info: Mapping[str, ValueInfo] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For a tensor the names of those with its parameters, by SCALE_TENSOR, ZERO_POINT_TENSOR and others."""
    whole: Graph | None = None
    """The graph of which it is a part."""

    def part(self, nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
        """Some of the nodes as a graph, which captures what they read of the others."""
        reads = {*outputs, *(name for node in nodes for name in node.reads)}
        initializers = {n: v for n, v in self.initializers.items() if n in reads}
        declared = tuple(map(ValueInfo, outputs))
        return Graph(self.name, self.path, (), declared, initializers, tuple(nodes), whole=self.whole or self)

    @cached_property
    def defines(self) -> frozenset[str]:
        """Names of its inputs, initializers and nodes' outputs."""
        made = (n for node in self.nodes for n in node.outputs if n)
        return frozenset((*(v.name for v in self.inputs), *self.initializers, *made))

    @cached_property
    def captures(self) -> frozenset[str]:
        """Names read from the enclosing graphs."""
        defined = {v.name for v in self.inputs} | set(self.initializers)
        captured: set[str] = set()
        for node in self.nodes:
            captured.update(n for n in node.reads if n not in defined)
            defined.update(node.outputs)
        return frozenset(captured | {v.name for v in self.outputs if v.name not in defined})

    @cached_property
    def differentiates(self) -> bool:
        """Whether a node in it, or in the graphs inside its nodes, does."""
        return any(node.differentiates or any(g.differentiates for g in node.graphs) for node in self.nodes)

    @cached_property
    def draws(self) -> bool:
        """Whether anything in it draws random numbers."""
        nodes = (node for graph in self.walk() for node in graph.nodes)
        return any(isinstance(node.target, Operator) and "rng" in node.target.fixtures for node in nodes)

    def key(self, name: str) -> str:
        """The name of an initializer in ``Model.params``: unique over all graphs of the model."""
        return inside(self.path, name)

    def walk(self) -> Iterator[Graph]:
        """This graph, the graphs inside its nodes, and the bodies of the functions they call (each once)."""
        seen: set[int] = set()

        def visit(graph: Graph) -> Iterator[Graph]:
            if id(graph) in seen:
                return
            seen.add(id(graph))
            yield graph
            for node in graph.nodes:
                for inner in node.bodies:
                    yield from visit(inner)

        yield from visit(self)


def with_graphs(value: Any, change: Callable[[Graph], Any]) -> Any:
    """An attribute's value with its graphs changed, those in lists too (rule SC-17)."""
    if isinstance(value, tuple) and any(isinstance(v, Graph) for v in value):
        return tuple(with_graphs(v, change) for v in value)
    return change(value) if isinstance(value, Graph) else value


def ancestors(
    nodes: Sequence[Node],
    values: Iterable[str],
    *,
    given: Container[str] = (),
    reads: Callable[[Node], Iterable[str]] = attrgetter("reads"),
) -> list[Node]:
    """The nodes from which values are computed, in their order.

    Args:
        nodes: in an order in which each comes after those it reads.
        values: names; those that no node defines have no ancestors.
        given: names that are taken as they are, so that the nodes behind them do not count.
        reads: the names that count among those that a node reads.
    """
    wanted = {name for name in values if name not in given}
    found = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            found.append(node)
            wanted.update(name for name in reads(node) if name not in given)
    return found[::-1]


def descendants(nodes: Iterable[Node], values: Iterable[str]) -> list[Node]:
    """The nodes that are computed, directly or through others, from values, in their order."""
    moved, found = set(values), []
    for node in nodes:
        if not moved.isdisjoint(node.reads):
            found.append(node)
            moved.update(node.outputs)
    return found


@dataclass(frozen=True, eq=False)
class Function:
    """An operator that the model itself defines."""

    domain: str
    name: str
    overload: str
    attributes: tuple[str, ...]
    defaults: Mapping[str, Any]
    body: Graph
    size: int
    """Nodes after every call inside is expanded."""
    parameters: Mapping[str, int]
    """The types of the attributes, as codes of AttributeProto; 0 when the body does not tell."""
    required: frozenset[str]
    """Attributes without default that operators inside cannot do without."""


@dataclass(frozen=True)
class Missing:
    """A node that nothing serves."""

    domain: str
    op_type: str
    opset: int
    node: str
    overload: str = ""
    note: str = ""
    """Why an operator set document that was given does not serve it."""


@dataclass(frozen=True, eq=False)
class Imported:
    """What a file says: the main graph and everything about it."""

    graph: Graph
    opsets: Mapping[str, int]
    metadata: Mapping[str, str]
    ir_version: int
    missing: tuple[Missing, ...] = ()
    configurations: tuple[Configuration, ...] = ()
    refused: tuple[Exception, ...] = ()
    """For each node that its operator refuses by its attributes alone, the error."""


def read_constants(
    graph: Graph, params: Collection[str] = (), known: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Read the initializers that still lie in files, in all its graphs, but those with a key in ``params``.

    Args:
        graph: holds what is read from now on.
        params: keys of those that are left where they are.
        known: what some of them would be, when somebody has read them already.

    Returns:
        What was read, and what was in memory already, by Graph.key.

    Raises:
        ExternalDataError: such a file has become shorter since the model was imported.
    """
    every: dict[str, np.ndarray] = {}
    for inner in graph.walk():
        wanted = {n: (inner.key(n), v) for n, v in inner.initializers.items() if inner.key(n) not in params}
        constants = {n: known[k] if known and k in known and waits(v) else load(v) for n, (k, v) in wanted.items()}
        cast(dict[str, np.ndarray], inner.initializers).update(constants)
        every |= {inner.key(n): v for n, v in constants.items()}
    return every
