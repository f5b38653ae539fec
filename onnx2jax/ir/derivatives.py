"""Operators that name values of their graph and differentiate one with respect to others: Gradient.

The nodes between the named values are found in the graph. Where the operands are the named values themselves, a tape
records these nodes while they run, so that the forward pass is computed once. Everywhere else (other operands, nodes
of an enclosing graph, a derivative of a derivative) they are evaluated again, with the random draws they had.
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
    return descendants(ancestors(nodes, {target}, given=starts), starts)


def prepared(graph: Graph, before: tuple[Node, ...] = (), visible: Iterable[str] = ()) -> Graph:
    """The graph, in which nodes that name values know what these depend on (``Node.hidden``).

    Args:
        graph: a main graph or the body of a function; graphs inside its nodes are prepared with it.
        before: the nodes of the enclosing graphs that come before.
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
            inside = partial(prepared, before=around, visible=names)
            node = replace(node, attributes={k: with_graphs(v, inside) for k, v in node.attributes.items()})
        if node.differentiates and not referring(node):
            node = replace(node, hidden=_hidden(node, around, names))
        nodes.append(node)
        names.update(node.outputs)
    return replace(graph, nodes=tuple(nodes))


def referring(node: Node) -> bool:
    """Whether a caller's attributes say which values the node names."""
    return any(isinstance(v, Reference) for v in node.attributes.values())


def named(node: Node) -> tuple[tuple[str, ...], str]:
    """The independent values and the target."""
    return (*node.attributes["xs"], *node.attributes.get("zs", ())), node.attributes["y"]


def _hidden(node: Node, before: Sequence[Node], visible: Collection[str]) -> tuple[str, ...]:
    names, target = named(node)
    if unknown := {*names, target}.difference(visible):
        raise ModelError(f"{quoted(unknown)} named by {node} but not defined before it", rule="TR-30")
    if len(node.inputs) != len(names) or not all(node.inputs):
        raise ModelError(f"{node} has inputs {list(node.inputs)} for the values {list(names)}", rule="TR-30")
    for name in names:
        others = set(names) - {name}
        if names.count(name) > 1 or between(others, name, before):
            raise ModelError(
                f"{node}: {name!r} of xs and zs ({list(names)}) depends on another of them, so they are no independent "
                f"variables of {target!r}: leave it out, or name only values that do not follow from it",
                rule="TR-31",
            )
    through = between(names, target, before)
    made = {*names, *(name for step in through for name in step.outputs)}
    return tuple(dict.fromkeys(name for step in through for name in step.reads if name not in made)) or (target,)
