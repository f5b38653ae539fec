"""Inputs that are indices into tables of a model, such as tokens into its embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from ..errors import InputValueError
from .graph import Graph, Node

INT32, INT64 = 6, 7
"""Element types in TensorProto."""
KEEPS: Final = frozenset(
    ("Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
)
"""Operators whose result has all elements of an integer operand."""


def lookups(graph: Graph) -> Iterator[tuple[str, Node, int]]:
    """The inputs of a graph that its Gather nodes look up in initializers, with the extents of these."""
    inputs = {v.name: v.name for v in graph.inputs if v.name not in graph.initializers}
    for node in graph.nodes:
        if node.domain or not node.inputs:
            continue
        if node.op_type in KEEPS and node.attributes.get("to", INT64) in (INT32, INT64):
            inputs |= {o: inputs[n] for n in node.inputs if n in inputs for o in node.outputs}
        table = graph.initializers.get(node.inputs[0])
        if node.op_type == "Gather" and table is not None and node.inputs[1] in inputs:
            yield inputs[node.inputs[1]], node, table.shape[node.attributes.get("axis", 0)]


def check_lookups(graph: Graph, values: Mapping[str, Any]) -> None:
    """Raise InputValueError for an integer input with an index beyond the table in which the graph looks it up."""
    for name, node, extent in lookups(graph):
        value, table = values.get(name), node.inputs[0]
        if table in values or not getattr(value, "is_fully_addressable", True):  # a table of the caller's; a mesh
            continue
        indices = np.asarray(value)
        if indices.dtype.kind not in "iu" or not indices.size:
            continue
        low, high = int(indices.min()), int(indices.max())
        if low < -extent or high >= extent:
            raise InputValueError(
                f"input {name!r} has {low if low < -extent else high}, and {node} looks it up in {table!r}, which has "
                f"{extent} rows: {-extent} to {extent - 1}"
            )
