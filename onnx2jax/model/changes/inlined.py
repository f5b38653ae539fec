"""Inlines branches: each If of the main graph whose condition is constant becomes the nodes of the branch taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...eval.known_values import known_values
from ...eval.values import to_host
from ...ir.graph import Graph, Node, with_graphs
from ...proto.messages import GraphProto, graphs_of, inside, nested_graphs, node_names, rename, unused_name
from ..spec import Spec
from .rewritten import name_nodes


def with_branches_inlined(spec: Spec, graph: Graph) -> tuple[Spec, Graph]:
    """The spec and its graph without Ifs whose condition is constant, those in inlined branches included.

    Args:
        spec: has the current values of initializers.
        graph: the main graph, with declared inputs.
    """
    before = None
    while graph is not before:
        before = graph
        for node, branch in _chosen(spec, graph):
            inlining = _Inlining.of(graph, node, branch)
            if inlining is not None:
                spec, graph = inlining.applied(spec, graph, node)
    return spec, graph


def _chosen(spec: Spec, graph: Graph) -> list[tuple[Node, str]]:
    """Each If with a constant condition, and the name of the branch that it takes."""
    if not any(_is_if(n) for n in graph.nodes):
        return []
    free = {v.name for v in graph.inputs}
    constants = {n: to_host(spec.changes.get(n, v)) for n, v in graph.initializers.items() if n not in free}
    values, _ = known_values(graph, constants, constants.keys() & spec.types.keys(), {})
    conditions = {n: values.get(n.inputs[0]) for n in graph.nodes if _is_if(n)}
    known = {n: v.item() for n, v in conditions.items() if isinstance(v, np.ndarray) and v.size == 1}
    return [(n, "then_branch" if v else "else_branch") for n, v in known.items()]


def _is_if(node: Node) -> bool:
    return (node.domain, node.op_type) == ("", "If")


@dataclass(frozen=True)
class _Inlining:
    """An If of the main graph replaced by one of its branches; called, a change of a ModelProto.

    Attributes:
        outputs: of the If.
        branch: the attribute of the branch taken.
        values: new names of values of the branch, by name.
        nodes: new names of its nodes, by name.
    """

    outputs: tuple[str, ...]
    branch: str
    values: Mapping[str, str]
    nodes: Mapping[str, str]

    @classmethod
    def of(cls, graph: Graph, node: Node, branch: str) -> _Inlining | None:
        """The names that keep all names unique; None if an output would need a node more, or random numbers change."""
        body: Graph = node.attributes[branch]
        nested = [g for n in body.nodes for g in _inside(n)]
        ends = [v.name for v in body.outputs]
        replaced = any(n.is_private for g in body.walk() for n in g.nodes)
        if body.draws or replaced or len(set(ends)) < len(ends) or not body.defines >= set(ends):
            return None
        count = Counter(n for g in graph.walk() for n in g.defines)
        taken, values = set(count), dict[str, str]()
        for name in sorted(body.defines):
            values[name] = unused_name(name, taken) if count[name] > 1 else name
            taken.add(values[name])
        values |= {a: b for a, b in zip(ends, node.outputs, strict=True) if b}
        if any(not g.defines.isdisjoint((*values, *values.values())) for g in nested):
            return None
        labels, nodes = {n.name for n in graph.nodes if n is not node}, dict[str, str]()
        for n in body.nodes:
            nodes[n.name] = unused_name(n.name, labels)
            labels.add(nodes[n.name])
        changed = {a: b for a, b in values.items() if a != b}
        return cls(node.outputs, branch, changed, nodes)

    def applied(self, spec: Spec, graph: Graph, node: Node) -> tuple[Spec, Graph]:
        """The spec and its graph with the branch in place of the node."""
        body: Graph = node.attributes[self.branch]
        keys = {body.key(n): self._value(n) for n in body.initializers}
        for n in body.nodes:
            old, label = inside(body.path, n.name), self.nodes[n.name]
            keys |= {g.key(k): label + g.key(k)[len(old) :] for g in _inside(n) for k in g.initializers}
        place = graph.nodes.index(node)
        initializers = {self._value(n): v for n, v in body.initializers.items()}
        infos = {self._value(n): replace(v, name=self._value(n)) for n, v in body.value_info.items()}
        quantization = {self._value(n): self._names(m) for n, m in body.quantization.items()}
        nodes = [self._node(n, inside(body.path, n.name), self.nodes[n.name], self.nodes[n.name]) for n in body.nodes]
        new = replace(
            graph,
            nodes=(*graph.nodes[:place], *nodes, *graph.nodes[place + 1 :]),
            initializers={**graph.initializers, **initializers},
            lifted=graph.lifted | set(map(self._value, body.lifted)),
            value_info={**infos, **graph.value_info},
            quantization={**graph.quantization, **quantization},
        )
        gone = {g.key(n) for g in _inside(node) for n in g.initializers} - keys.keys()
        changes = {keys.get(n, n): v for n, v in spec.changes.items() if n not in gone}
        origin = None if spec.origin is None else spec.origin.changed(self)
        return replace(spec, graph=new, changes=changes, types={}, origin=origin), new

    def _value(self, name: str) -> str:
        return self.values.get(name, name)

    def _names(self, names: Mapping[str, str]) -> dict[str, str]:
        return {k: self._value(v) for k, v in names.items()}

    def _node(self, node: Node, old: str, new: str, name: str) -> Node:
        """A node with new names; the paths of graphs inside begin with ``new`` instead of ``old``."""
        inner = partial(self._graph, old=old, new=new)
        return replace(
            node,
            name=name,
            inputs=tuple(map(self._value, node.inputs)),
            outputs=tuple(map(self._value, node.outputs)),
            attributes=with_graphs(node.attributes, inner),
        )

    def _graph(self, graph: Graph, old: str, new: str) -> Graph:
        return replace(
            graph,
            path=new + graph.path[len(old) :],
            outputs=tuple(replace(v, name=self._value(v.name)) for v in graph.outputs),
            nodes=tuple(self._node(n, old, new, n.name) for n in graph.nodes),
        )

    def __call__(self, message: Any) -> None:
        graph = message.graph
        name_nodes(graph)
        nodes = list(graph.node)
        place = next(i for i, n in enumerate(nodes) if tuple(n.output) == self.outputs)
        (taken,) = (g for a in nodes[place].attribute if a.name == self.branch for g in graphs_of(a))
        body = GraphProto.FromString(taken.SerializeToString())
        for node, name in zip(body.node, node_names(body.node), strict=True):
            node.name = self.nodes.get(name, "")
        for inner in nested_graphs(body):
            rename(inner, self.values, {})
        del graph.node[:]
        graph.node.extend((*nodes[:place], *body.node, *nodes[place + 1 :]))
        declared = {v.name for v in (*graph.value_info, *graph.output)}
        graph.value_info.extend(v for v in body.value_info if v.name not in declared)
        for part in ("initializer", "sparse_initializer", "quantization_annotation"):
            getattr(graph, part).extend(getattr(body, part))


def _inside(node: Node) -> Iterator[Graph]:
    """The graphs inside a node, and those inside their nodes, without functions."""
    for graph in node.graphs:
        yield graph
        for inner in graph.nodes:
            yield from _inside(inner)
