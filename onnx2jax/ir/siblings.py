"""Nodes of one operator that read the same values, and that the operator evaluates together: trees of a forest."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..ops.registry import NO_OPERATOR
from .graph import Graph, Node

LARGEST: Final = 64
"""Nodes with longer attributes, such as tables and trees, are not compared with others."""


def siblings(graph: Graph) -> list[tuple[Node, ...]]:
    """Groups of nodes for the ``for_siblings`` of their operator: two or more with equal inputs, opset and casts.

    Inputs are equal if they have one name, or if pure nodes that are equal compute them.
    """
    if sum(map(_joins, graph.nodes)) < 2:
        return []
    names, first, groups = dict[str, str](), dict[Any, tuple[str, ...]](), dict[Any, list[Node]]()
    for node in graph.nodes:
        inputs = tuple(names.get(n, n) for n in node.inputs)
        if _joins(node):
            groups.setdefault((node.target, node.opset, inputs, node.casts), []).append(node)
        elif _is_pure(node) and not any(isinstance(v, tuple) and len(v) > LARGEST for v in node.attributes.values()):
            same = first.setdefault(application(node, inputs), node.outputs)
            names.update(zip(node.outputs, same, strict=False))
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _joins(node: Node) -> bool:
    return node.operator.for_siblings is not None and node.is_plain


def _is_pure(node: Node) -> bool:
    draws = not node.operator.fixtures.isdisjoint({"rng", "derivatives"})
    return node.operator is not NO_OPERATOR and node.is_plain and not draws


def application(node: Node, inputs: tuple[Any, ...]) -> Any:
    """A key of what a node computes from its inputs."""
    attributes = tuple((k, by_bits(v)) for k, v in sorted(node.attributes.items()))
    return node.domain, node.op_type, node.opset, inputs, len(node.outputs), attributes, node.casts


def by_bits(value: Any) -> Any:
    """A key of an attribute's value: its type and bits; of a graph, its identity."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, tuple(value.flat) if value.dtype.hasobject else value.tobytes()
    if isinstance(value, tuple | list):
        return type(value), *map(by_bits, value)
    return type(value), repr(value) if isinstance(value, float) else value  # 0.0 == -0.0
