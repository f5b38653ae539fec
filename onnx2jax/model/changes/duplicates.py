"""Merges nodes that compute the same, and equal constants that are no parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...ir.graph import Graph, Node
from ...ir.siblings import application, by_bits
from .constants import KEPT, SMALL, is_pure
from .no_ops import with_inputs


def without_duplicates(graph: Graph, constants: Mapping[str, np.ndarray]) -> Graph:
    """The graph with one node for all with the same operator, inputs and attributes.

    Outputs of the graph, and what graphs inside nodes capture, keep their names. DequantizeLinear stays, since runtimes
    look for one in front of each operator.

    Args:
        graph: the graph.
        constants: the current values of those of its initializers that no caller can override, and that are no
            parameters: each of these stays one of its own.
    """
    held = {v.name for v in graph.outputs}.union(*(node.captures for node in graph.nodes))
    renamed, nodes, first = dict[str, str](), list[Node](), dict[Any, str | Node]()
    for name, value in constants.items():
        if name not in held and value.nbytes <= SMALL and not value.dtype.hasobject:
            same = first.setdefault(by_bits(value), name)
            if same != name:
                renamed[name] = str(same)
    for node in graph.nodes:
        node = with_inputs(node, renamed)
        same = (
            first.setdefault(application(node, node.inputs), node)
            if is_pure(node) and node.op_type not in KEPT
            else node
        )
        if same is not node and isinstance(same, Node) and _covers(same, node) and held.isdisjoint(node.outputs):
            renamed.update((n, m) for n, m in zip(node.outputs, same.outputs, strict=False) if n)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _covers(node: Node, other: Node) -> bool:
    """Whether a node names all outputs that another names."""
    return all(any(node.outputs[i : i + 1]) for i, n in enumerate(other.outputs) if n)
