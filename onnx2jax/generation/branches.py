"""Splits a merged decoder file, whose If selects between prefill and step, into its two graphs.

The rewrites of ``in_place`` only reach top-level nodes, so the branch taken is inlined first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.graph import Graph, Node, with_graphs
from ..ops.registry import resolve


def inline_branch(graph: Graph, flag: str, value: bool) -> Graph:
    """The graph with each If over the input ``flag`` replaced by the nodes of the branch that ``value`` selects.

    Parameters keep their names in ``Model.params``.
    """
    nodes: list[Node] = []
    initializers = dict(graph.initializers)
    lifted = set(graph.lifted)
    for node in graph.nodes:
        if node.op_type != "If" or node.domain or node.inputs != (flag,):
            nodes.append(node)
            continue
        branch = node.attributes["then_branch" if value else "else_branch"]
        names = {n: branch.key(n) for n in branch.initializers}
        initializers |= {names[n]: v for n, v in branch.initializers.items()}
        lifted |= {names[n] for n in branch.lifted}
        nodes += (_renamed(inner, names) for inner in branch.nodes)
        for output, outer in zip(branch.outputs, node.outputs, strict=True):
            source = names.get(output.name, output.name)
            if outer and source != outer:
                identity = resolve("", "Identity")
                nodes.append(
                    Node(f"{node.name}/{outer}", "Identity", "", node.opset, (source,), (outer,), {}, identity)
                )
    return replace(graph, nodes=tuple(nodes), initializers=initializers, lifted=frozenset(lifted))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The node with initializers renamed, in its subgraphs too."""

    def inner(graph: Graph) -> Graph:
        nodes = tuple(_renamed(n, names) for n in graph.nodes)
        return replace(
            graph, nodes=nodes, outputs=tuple(replace(v, name=names.get(v.name, v.name)) for v in graph.outputs)
        )

    inputs, implicit = (tuple(names.get(n, n) for n in values) for values in (node.inputs, node.implicit_inputs))
    attributes = with_graphs(node.attributes, inner)
    return replace(node, inputs=inputs, implicit_inputs=implicit, attributes=attributes)
