"""Where a graph is cut: nodes whose operands must be known run on the host, the others are compiled around them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from ..ir.graph import Graph, Node
from ..ops.registry import Operator

_DOMAIN: Final = "onnx2jax.runtime"
COMPILED: Final = Operator(*(_DOMAIN, "Compiled", 1, lambda *, body: body.compiled()), attributes=frozenset({"body"}))
"""What serves a node that stands for a part of the graph: its graph as one program."""


def is_heavy(node: Node) -> bool:
    """Whether a node, or a node of the graphs and functions inside it, is worth compiling for its own sake."""
    if isinstance(node.target, Operator) and node.target.heavy:
        return True
    return any(is_heavy(n) for graph in node.bodies for n in graph.nodes)


def folded(graph: Graph, host: Collection[Node], *, light_on_host: bool = False) -> Graph:
    """The graph to be evaluated on the host, in which nodes that are compiled together are one.

    Args:
        graph: what to cut.
        host: the nodes that must run on the host.
        light_on_host: keep a graph without heavy nodes on the host altogether. Also done when something must.
    """
    groups = _groups(graph, host, light_on_host)
    outputs = [v.name for v in graph.outputs]
    later = set(outputs)
    nodes: list[Node] = []
    for on_host, group in reversed(groups):
        if not on_host:
            names = {name for node in group for name in node.outputs}
            made = tuple(dict.fromkeys(n for n in (*outputs, *sorted(later)) if n in names))
            body = {"body": graph.part(group, made)}
            group = [Node(graph.name or "graph", "Compiled", _DOMAIN, 1, (), made, body, COMPILED)]
        later.update(name for node in group for name in node.reads)
        nodes.extend(reversed(group))
    return graph.part(nodes[::-1], outputs)


def body_of(node: Node) -> Graph | None:
    """The part of the graph for which a node stands; None for a node that runs on the host."""
    body: Any = node.attributes["body"] if node.target is COMPILED else None
    return body


def _groups(graph: Graph, host: Collection[Node], light_on_host: bool) -> list[tuple[bool, list[Node]]]:
    """Nodes that run together, in order: on the host, or as one program."""
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
    merged: list[tuple[bool, list[Node]]] = []
    for level, nodes in sorted(groups.items()):
        # What follows the host's work without heavy nodes of its own stays there.
        on_host = level % 2 == 1 or (level > 0 and not any(map(is_heavy, nodes)))
        if merged and merged[-1][0] == on_host:
            merged[-1][1].extend(nodes)
        else:
            merged.append((on_host, nodes))
    return merged
