"""Where a graph is cut: nodes whose operands must be known run on the host, the others are compiled around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..ir.graph import Graph, Node
from ..ops.registry import Operator


@dataclass(frozen=True)
class Stage:
    """Nodes that run together, in order."""

    nodes: tuple[Node, ...]
    host: bool
    """Whether they run by NumPy, one after the other, rather than compiled as one program."""
    reads: tuple[str, ...]
    """Names from outside: inputs, initializers, results of earlier stages, captured names."""
    writes: tuple[str, ...]
    """Results that later stages or the graph's outputs need."""
    passes: frozenset[str]
    """Those of ``writes`` that later stages read."""


def is_heavy(node: Node) -> bool:
    """Whether a node, or a node of the graphs and functions inside it, is worth compiling for its own sake."""
    if isinstance(node.target, Operator) and node.target.heavy:
        return True
    return any(is_heavy(n) for graph in node.bodies for n in graph.nodes)


def arrange(graph: Graph, host: Collection[Node], *, light_on_host: bool = False) -> tuple[Stage, ...]:
    """The stages of a graph.

    Args:
        graph: what to cut.
        host: the nodes that must run on the host.
        light_on_host: keep a graph without heavy nodes on the host altogether. Also done when something must.
    """
    if (host or light_on_host) and not any(map(is_heavy, graph.nodes)):
        return _finished(graph, [(True, list(graph.nodes))])
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
    return _finished(graph, merged)


def whole(graph: Graph) -> Stage:
    """The graph as one compiled stage."""
    (stage,) = _finished(graph, [(False, list(graph.nodes))])
    return stage


def _finished(graph: Graph, groups: list[tuple[bool, list[Node]]]) -> tuple[Stage, ...]:
    outputs = [v.name for v in graph.outputs]
    stages: list[Stage] = []
    later: set[str] = set()
    for host, nodes in reversed(groups):
        made = {name for node in nodes for name in node.outputs if name}
        reads = _unique(name for node in nodes for name in node.reads if name not in made)
        writes = _unique(name for node in nodes for name in node.outputs if name in later or name in outputs)
        stages.append(Stage(tuple(nodes), host, reads, writes, frozenset(later.intersection(writes))))
        later.update(reads)
    return tuple(reversed(stages))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
