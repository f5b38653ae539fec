"""Merges products of one input: ``MatMul(x, A)``, ``MatMul(x, B)`` become ``MatMul(x, [A B])`` and a Split.

So one product computes query, key and value. XLA merges them by itself on GPUs and TPUs, but then concatenates their
weights in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...ir import analysis
from ...ir.graph import Graph, Node
from ...ops.registry import resolve
from ...proto.immutable import owned
from ...proto.names import unused_name

SPLIT: Final = 13
"""The opset since which Split takes its sizes as an input."""


def with_products_merged(graph: Graph, constant: Callable[[str], Any], taken: set[str]) -> Graph:
    """The graph with one MatMul for those of an input by floating weights that nothing else reads.

    Args:
        graph: the graph.
        constant: the value of an initializer; None for other names.
        taken: names that new initializers and nodes may not have; theirs are added.
    """
    readers = analysis.read_counts(graph)
    groups: dict[Any, list[tuple[Node, np.ndarray]]] = {}
    for node in graph.nodes:
        if (node.domain, node.op_type) != ("", "MatMul") or node.opset < SPLIT or node.devices:
            continue
        own = node.inputs[1] in graph.initializers and readers[node.inputs[1]] == 1
        weight = constant(node.inputs[1]) if own else None
        if weight is not None and weight.ndim == 2 and weight.dtype.name in ("float16", "bfloat16", "float32"):
            groups.setdefault((node.inputs[0], len(weight), weight.dtype), []).append((node, weight))
    merged: dict[str, Sequence[Node]] = {}  # what takes the place of a node, by its name
    new: dict[str, np.ndarray] = {}
    for members in groups.values():
        if len(members) > 1:
            merged.update(dict.fromkeys((n.name for n, _ in members), ()))
            merged[members[0][0].name] = _merged(members, new, taken)
    nodes = tuple(n for node in graph.nodes for n in merged.get(node.name, (node,)))
    return replace(graph, nodes=nodes, initializers={**graph.initializers, **new})


def _merged(members: Sequence[tuple[Node, np.ndarray]], new: dict[str, np.ndarray], taken: set[str]) -> list[Node]:
    """The product by all weights, and the Split of its result; their initializers are added to ``new``."""
    first = members[0][0]

    def named(name: str) -> str:
        taken.add(name := unused_name(f"{first.outputs[0]}.{name}", taken))
        return name

    weight, sizes, product, split = map(named, ("weight", "sizes", "product", "split"))
    new[weight] = owned(np.concatenate([w for _, w in members], axis=1))
    new[sizes] = owned(np.array([w.shape[1] for _, w in members], np.int64))
    outputs = tuple(n.outputs[0] for n, _ in members)
    target = resolve("", "Split", first.opset)
    return [
        replace(first, inputs=(first.inputs[0], weight), outputs=(product,)),
        Node(split, "Split", "", first.opset, (product, sizes), outputs, {"axis": -1}, target),
    ]
