"""Constant targets of Reshape: extents of its operand are copied by 0, one other is inferred by -1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...eval.known_values import Values
from ...ir.graph import Graph, Node
from ...proto.names import unused_name


def with_constant_targets(
    graph: Graph, values: Values, extents: Mapping[str, tuple[Any, ...]], taken: set[str]
) -> Graph:
    """The graph with constants in place of shapes that are computed from dimension variables.

    Args:
        graph: the graph.
        values: what is known of its values.
        extents: vectors of extents, some of which are symbols, by name.
        taken: names that new initializers may not have; theirs are added.
    """
    nodes, new = list[Node](), dict[str, np.ndarray]()
    for node in graph.nodes:
        target = _target(node, values, extents)
        if target is not None:
            name = unused_name(f"{node.outputs[0]}.shape", taken)
            taken.add(name)
            new[name] = np.array(target, np.int64)
            node = replace(node, inputs=(node.inputs[0], name))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), initializers={**graph.initializers, **new})


def _target(node: Node, values: Values, extents: Mapping[str, tuple[Any, ...]]) -> Sequence[int] | None:
    if (node.domain, node.op_type) != ("", "Reshape") or len(node.inputs) < 2 or node.attributes.get("allowzero", 0):
        return None
    data, target = values.get(node.inputs[0]), extents.get(node.inputs[1])
    if data is None or target is None:
        return None
    numbers = [d for d in target if isinstance(d, int)]
    if all(isinstance(d, int) or (i < len(data.shape) and d == data.shape[i]) for i, d in enumerate(target)):
        return [d if isinstance(d, int) else 0 for d in target]
    if len(numbers) == len(target) - 1 and min(numbers, default=1) > 0:
        return [d if isinstance(d, int) else -1 for d in target]
    return None
