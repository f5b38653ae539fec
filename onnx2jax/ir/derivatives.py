"""Operators that differentiate a named value of their graph with respect to other named values: Gradient.

The nodes between the named values are found in the graph. Where the operands are the named values themselves, a tape
records these nodes while they run, so the forward pass is computed once. Everywhere else (other operands, nodes
of an enclosing graph, a derivative of a derivative) the nodes are re-evaluated with the same random draws.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ..errors import ModelError
from .graph import Graph, Node, Reference, ancestors, descendants, with_graphs
from .rules import quoted


def between(starts: Collection[str], target: str, nodes: Sequence[Node]) -> list[Node]:
    """The nodes through which ``target`` depends on ``starts``, in order; every path ends at a start (rule TR-31)."""
    return descendants(ancestors(nodes, {target}, roots=starts), starts)


def with_implicit_inputs(graph: Graph, before: tuple[Node, ...] = (), visible: Iterable[str] = ()) -> Graph:
    """The graph with ``Node.implicit_inputs`` set on its differentiating nodes and on those of its subgraphs.

    Args:
        graph: a main graph or the body of a function.
        before: the preceding nodes of the enclosing graphs.
        visible: the names that the enclosing graphs define.

    Raises:
        ModelError: a name is not defined before the node (rule TR-30), or is no independent value (rule TR-31).
    """
    if not graph.differentiates:
        return graph
    names = {*visible, *(v.name for v in graph.inputs), *graph.initializers}
    nodes: list[Node] = []
    for node in graph.nodes:
        around = (*before, *nodes)
        if node.graphs:
            inside = partial(with_implicit_inputs, before=around, visible=names)
            node = replace(node, attributes=with_graphs(node.attributes, inside))
        if node.differentiates and not has_references(node):
            node = replace(node, implicit_inputs=_implicit_inputs(node, around, names))
        nodes.append(node)
        names.update(node.outputs)
    return replace(graph, nodes=tuple(nodes))


def has_references(node: Node) -> bool:
    """Whether attributes of the calling node supply the names of the values."""
    return any(isinstance(v, Reference) for v in node.attributes.values())


def named_values(node: Node) -> tuple[tuple[str, ...], str]:
    """The independent values, then the target."""
    return (*node.attributes["xs"], *node.attributes.get("zs", ())), node.attributes["y"]


def _implicit_inputs(node: Node, before: Sequence[Node], visible: Collection[str]) -> tuple[str, ...]:
    names, target = named_values(node)
    if unknown := {*names, target}.difference(visible):
        raise ModelError(f"{quoted(unknown)} named by {node} but not defined before it", rule="TR-30")
    if len(node.inputs) != len(names) or not all(node.inputs):
        raise ModelError(f"{node} has inputs {list(node.inputs)} for the values {list(names)}", rule="TR-30")
    for name in names:
        others = set(names) - {name}
        if names.count(name) > 1 or between(others, name, before):
            raise ModelError(
                f"{node}: {name!r} of xs and zs ({list(names)}) depends on another of them, so they are no independent "
                f"variables of {target!r}: leave it out, or name only values that do not depend on it",
                rule="TR-31",
            )
    through = between(names, target, before)
    defined = {*names, *(name for step in through for name in step.outputs)}
    return tuple(dict.fromkeys(name for step in through for name in step.reads if name not in defined)) or (target,)
