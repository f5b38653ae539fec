"""Cuts a graph into partitions to compile and host nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, Final

from ..ir.graph import Graph, Node, descendants
from ..limits import MOST_COMPILED, MOST_FUSED
from ..ops.registry import Operator

DOMAIN: Final = "onnx2jax.runtime"
COMPILED: Final = Operator(*(DOMAIN, "Compiled", 1, lambda *, body: body.compiled()), attributes=frozenset({"body"}))
"""The target of a node that stands for a partition: its graph as one program."""


def body_of(node: Node) -> Graph | None:
    """The partition that a node stands for; None for a host node."""
    body: Any = node.attributes["body"] if node.target is COMPILED else None
    return body


def is_heavy(node: Node) -> bool:
    """Whether a node, or a node in its subgraphs and functions, is worth compiling by itself."""
    if isinstance(node.target, Operator) and node.target.heavy:
        return True
    return any(is_heavy(n) for graph in node.bodies for n in graph.nodes)


def partitioned(graph: Graph, host: Collection[Node], *, light_on_host: bool = False, bounded: bool = False) -> Graph:
    """The graph to evaluate on the host, in which each compiled partition is one node.

    Args:
        graph: what to cut.
        host: the nodes that must run on the host.
        light_on_host: keep a graph without heavy nodes on the host altogether. Also done when something must.
        bounded: end partitions after so many nodes that XLA's time would grow faster than theirs.
    """
    groups = _groups(graph, host, light_on_host) if host or light_on_host else [(False, [*graph.nodes])]
    if bounded:
        arguments = {v.name for v in graph.inputs}.difference(graph.initializers) | graph.captures
        varying = {*descendants(graph.nodes, arguments)}
        groups = [(h, piece) for h, g in groups for piece in ([g] if h else _pieces(g, varying))]
    outputs = [v.name for v in graph.outputs]
    later = set(outputs)
    nodes: list[Node] = []
    for on_host, group in reversed(groups):
        if not on_host:
            names = {name for node in group for name in node.outputs}
            made = tuple(dict.fromkeys(n for n in (*outputs, *sorted(later)) if n in names))
            body = {"body": graph.extract(group, made)}
            group = [Node(graph.name or "graph", "Compiled", DOMAIN, 1, (), made, body, COMPILED)]
        later.update(name for node in group for name in node.reads)
        nodes.extend(reversed(group))
    return graph.extract(nodes[::-1], outputs)


def _pieces(nodes: list[Node], varying: Collection[Node]) -> Iterator[list[Node]]:
    """Nodes in parts of equal size; a part also ends after ``MOST_FUSED`` light ones in a row that are ``varying``."""
    size = math.ceil(len(nodes) / math.ceil(len(nodes) / MOST_COMPILED))
    start = light = 0
    for end, node in enumerate(nodes, 1):
        light = 0 if is_heavy(node) else light + (node in varying)
        if light == MOST_FUSED or end - start == size or end == len(nodes):
            yield nodes[start:end]
            start, light = end, 0


def _groups(graph: Graph, host: Collection[Node], light_on_host: bool) -> list[tuple[bool, list[Node]]]:
    """Nodes that run together, in order, each group with whether it runs on the host."""
    if (host or light_on_host) and not any(map(is_heavy, graph.nodes)):
        return [(True, list(graph.nodes))]
    levels: dict[str, int] = {}
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        # Even levels are compiled, odd ones run on the host.
        level = max((levels.get(name, 0) for name in node.reads), default=0)
        level += (level % 2 == 1) != (node in host)
        groups.setdefault(level, []).append(node)
        levels.update((name, level) for name in node.outputs)
    if 2 in groups and {n for node in groups.get(0, []) for n in node.outputs}.isdisjoint(
        n for node in groups[1] for n in node.reads
    ):
        groups[2] = groups.pop(0, []) + groups[2]  # one program, since the host needs nothing of the first
    merged: list[tuple[bool, list[Node]]] = []
    for level, nodes in sorted(groups.items()):
        # What follows the host's work without heavy nodes of its own stays there.
        on_host = level % 2 == 1 or (level > 0 and not any(map(is_heavy, nodes)))
        if merged and merged[-1][0] == on_host:
            merged[-1][1].extend(nodes)
        else:
            merged.append((on_host, nodes))
    return merged
