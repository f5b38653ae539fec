"""A model as frozen Python objects: every node bound to its implementation, every constant a NumPy array."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import numpy as np

from ..ops.registry import NO_OPERATOR, Operator
from ..proto.devices import Configuration, NodeDevices
from ..proto.mapped import is_lazy, load
from ..proto.messages import dotted, inside
from ..proto.types import ValueInfo
from .casts import Casts


@dataclass(frozen=True)
class Reference:
    """An attribute of a node in a function whose value is the caller's attribute ``name`` (rule FN-13)."""

    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an operator or function. An empty name marks an omitted input or output."""

    name: str
    op_type: str
    domain: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    target: Operator | Function | None
    """Its implementation; None if unsupported (only in graphs loaded for inspection)."""
    implicit_inputs: tuple[str, ...] = ()
    """Values that it reads beyond its inputs, because the values named by its attributes are computed from them."""
    devices: Mapping[str, NodeDevices] = field(default_factory=dict)
    """Its annotations, by the name of the model's device configuration."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    casts: Casts | None = None
    """Casts of its operands and results in a model converted with ``dtype`` (see ir/precision.py)."""

    @cached_property
    def operator(self) -> Operator:
        """The operator that it applies; NO_OPERATOR if it calls a function, or is unsupported."""
        return self.target if isinstance(self.target, Operator) else NO_OPERATOR

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs among the attributes."""
        values = (v if isinstance(v, tuple) else (v,) for v in self.attributes.values())
        lists = (group for group in values if Graph in set(map(type, group)))  # a forest has 600,000 numbers
        return tuple(g for group in lists for g in group if isinstance(g, Graph))

    @cached_property
    def is_plain(self) -> bool:
        """Whether no attribute is a graph or a reference."""
        return not self.graphs and not any(isinstance(v, Reference) for v in self.attributes.values())

    @cached_property
    def bodies(self) -> tuple[Graph, ...]:
        """The graphs among the attributes, and the body of the function that the node calls."""
        return (*self.graphs, self.target.body) if isinstance(self.target, Function) else self.graphs

    @cached_property
    def captures(self) -> tuple[str, ...]:
        """Names that it reads beyond its inputs: the captures of its graphs, and its implicit inputs."""
        return (*(n for g in self.graphs for n in sorted(g.captures)), *self.implicit_inputs)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names that it reads: its inputs and its captures."""
        return (*filter(None, self.inputs), *self.captures)

    @property
    def title(self) -> str:
        """Its operator, with the domain if that is not ONNX's own: ``com.microsoft.Gelu``."""
        return dotted(self.domain, self.op_type)

    @property
    def is_private(self) -> bool:
        """Whether it is one of this package, which no file has, such as that of ``rebatch``."""
        return self.domain.startswith("onnx2jax.")

    @property
    def differentiates(self) -> bool:
        """Whether it differentiates values of the graph, named by its attributes."""
        return "derivatives" in self.operator.fixtures

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.title}, opset {self.opset})"


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in topological order, and the constants they use."""

    name: str
    path: str
    """Its location in the model; empty for the main graph."""
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    initializers: Mapping[str, np.ndarray]
    nodes: tuple[Node, ...]
    lifted: frozenset[str] = frozenset()
    """Initializers that are Constant nodes in the file."""
    value_info: Mapping[str, ValueInfo] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tensor -> the tensors of its quantisation parameters, by SCALE_TENSOR, ZERO_POINT_TENSOR and others."""
    extracted_from: Graph | None = None
    """The complete graph, if this one is the result of ``extract``."""

    @property
    def complete(self) -> Graph:
        """The graph itself, or that from which it was extracted."""
        return self.extracted_from or self

    def extract(self, nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
        """A graph of some of the nodes, which captures what they read from the others."""
        reads = {*outputs, *(name for node in nodes for name in node.reads)}
        initializers = {n: v for n, v in self.initializers.items() if n in reads}
        declared = tuple(map(ValueInfo, outputs))
        return Graph(self.name, self.path, (), declared, initializers, tuple(nodes), extracted_from=self.complete)

    @cached_property
    def defines(self) -> frozenset[str]:
        """Names of its inputs, its initializers and its nodes' outputs."""
        computed = (n for node in self.nodes for n in node.outputs if n)
        return frozenset((*(v.name for v in self.inputs), *self.initializers, *computed))

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The nodes by the names of their outputs."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def captures(self) -> frozenset[str]:
        """Names that it reads from the enclosing graphs."""
        defined = {v.name for v in self.inputs} | set(self.initializers)
        captured: set[str] = set()
        for node in self.nodes:
            captured.update(n for n in node.reads if n not in defined)
            defined.update(node.outputs)
        return frozenset(captured | {v.name for v in self.outputs if v.name not in defined})

    @cached_property
    def differentiates(self) -> bool:
        """Whether a node of it or of its subgraphs differentiates."""
        return any(node.differentiates or any(g.differentiates for g in node.graphs) for node in self.nodes)

    @cached_property
    def draws(self) -> bool:
        """Whether any node draws random numbers, subgraphs and functions included."""
        return any("rng" in node.operator.fixtures for graph in self.walk() for node in graph.nodes)

    def key(self, name: str) -> str:
        """The name of an initializer in ``Model.params``: unique over all graphs of the model."""
        return inside(self.path, name)

    def walk(self) -> Iterator[Graph]:
        """This graph, its subgraphs, and the bodies of the functions that they call, each once."""
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
    """An attribute's value, or all attributes, with ``change`` applied to the graphs, those in lists too (SC-17)."""
    if isinstance(value, Mapping):
        return {name: with_graphs(v, change) for name, v in value.items()}
    if isinstance(value, tuple) and any(isinstance(v, Graph) for v in value):
        return tuple(with_graphs(v, change) for v in value)
    return change(value) if isinstance(value, Graph) else value


def ancestors(
    nodes: Sequence[Node],
    values: Iterable[str],
    *,
    roots: Container[str] = (),
    reads: Callable[[Node], Iterable[str]] = attrgetter("reads"),
) -> list[Node]:
    """The nodes from which the values are computed, in topological order.

    Args:
        nodes: in topological order.
        values: names; those that no node defines have no ancestors.
        roots: names whose own ancestors are excluded.
        reads: the names that a node depends on.
    """
    wanted = {name for name in values if name not in roots}
    above = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            above.append(node)
            wanted.update(name for name in reads(node) if name not in roots)
    return above[::-1]


def in_place_of(nodes: Iterable[Node], groups: Mapping[tuple[Node, ...], Node]) -> tuple[Node, ...]:
    """The nodes, with another node in the place of the first of each group of them."""
    first = {group[0]: node for group, node in groups.items()}
    members = {*chain.from_iterable(groups)}
    return tuple(first.get(node, node) for node in nodes if node in first or node not in members)


def nodes_named(graph: Graph, names: Collection[str]) -> str:
    """The end of a message about values that do not exist: some of the names are nodes'; empty if none is."""
    hints = [f"; {n.name!r} is a node, whose outputs are {list(n.outputs)}" for n in graph.nodes if n.name in names]
    return "".join(hints[:3])


def descendants(nodes: Iterable[Node], values: Iterable[str]) -> list[Node]:
    """The nodes that depend on the values, directly or through other nodes, in topological order."""
    reached, below = set(values), []
    for node in nodes:
        if not reached.isdisjoint(node.reads):
            below.append(node)
            reached.update(node.outputs)
    return below


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the model (FunctionProto)."""

    domain: str
    name: str
    overload: str
    attributes: tuple[str, ...]
    defaults: Mapping[str, Any]
    body: Graph
    size: int
    """The number of nodes once every call inside is expanded."""
    parameters: Mapping[str, int]
    """The types of the attributes, as codes of AttributeProto; 0 where the body leaves it open."""
    required: frozenset[str]
    """Attributes without a default that operators in the body require."""


@dataclass(frozen=True)
class Unsupported:
    """A node whose operator is unsupported."""

    domain: str
    op_type: str
    opset: int
    node: str
    overload: str = ""
    note: str = ""
    """Why a given operator set document does not implement it."""


@dataclass(frozen=True, eq=False)
class Imported:
    """An imported model: the main graph, and what the file declares about it."""

    graph: Graph
    opsets: Mapping[str, int]
    metadata: Mapping[str, str]
    ir_version: int
    unsupported: tuple[Unsupported, ...] = ()
    configurations: tuple[Configuration, ...] = ()
    rejected: tuple[Exception, ...] = ()
    """An error for each node whose attributes its operator rejects."""
    deviations: tuple[str, ...] = ()
    """A text for each node of a function that means something else in the versions that the model imports."""


def read_constants(
    graph: Graph, params: Collection[str] = (), known: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Load the lazy initializers of the graph and its subgraphs, except those with a key in ``params``.

    Args:
        graph: the initializers are replaced in place.
        params: keys of initializers that stay lazy.
        known: arrays that have been read already, by key.

    Returns:
        The arrays, including those that were in memory already, by Graph.key.

    Raises:
        ExternalDataError: a file has become shorter since the model was imported.
    """
    every: dict[str, np.ndarray] = {}
    for inner in graph.walk():
        wanted = {n: (inner.key(n), v) for n, v in inner.initializers.items() if inner.key(n) not in params}
        constants = {n: known[k] if known and k in known and is_lazy(v) else load(v) for n, (k, v) in wanted.items()}
        cast(dict[str, np.ndarray], inner.initializers).update(constants)
        every |= {inner.key(n): v for n, v in constants.items()}
    return every
