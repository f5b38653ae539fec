"""Pads nodes with data-dependent shapes to a fixed size: ``convert(..., max_size={"node": size})``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import InputNameError, InputShapeError
from ...ir.graph import Imported, Node
from ...ops import registry
from ...ops.arrays import is_traced
from ...ops.registry import PADDED
from ...proto.types import TensorType, ValueInfo


def with_max_size(imported: Imported, sizes: Mapping[str, int]) -> Imported:
    """The model with the named nodes padded to a size; adds the count of each to the graph's outputs."""
    if not sizes:
        return imported
    possible = {n.name: n for n in imported.graph.nodes if n.op_type in registry.supported()[PADDED] and not n.domain}
    unknown = sorted(set(sizes) - set(possible))
    if unknown:
        raise InputNameError(f"max_size names {unknown}; the nodes that can take a size are {sorted(possible)}")
    graph = imported.graph
    padded = {possible[name]: size for name, size in sizes.items()}
    nodes = tuple(_padded(n, padded[n]) if n in padded else n for n in graph.nodes)
    counts = tuple(ValueInfo(f"{name}/count", TensorType(np.dtype(np.int64), ())) for name in sizes)
    return replace(imported, graph=replace(graph, nodes=nodes, outputs=graph.outputs + counts))


def check_counts(results: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Raise InputShapeError when a node found more than its size; the counts are the last results, in order."""
    if is_traced(results):
        return
    for (name, size), count in zip(sizes.items(), results[len(results) - len(sizes) :], strict=True):
        if (most := int(np.asarray(count).max(initial=0))) > size:  # an array in a rebatched model
            raise InputShapeError(
                f"node {name!r} has {most} results, more than its max_size ({size}): "
                f"convert(..., max_size={{{name!r}: {most}}})"
            )


def _padded(node: Node, size: int) -> Node:
    target, outputs = registry.resolve(PADDED, node.op_type, 1), (f"{node.name}/count", *node.outputs)
    return replace(node, outputs=outputs, attributes={**node.attributes, "size": size}, target=target)
