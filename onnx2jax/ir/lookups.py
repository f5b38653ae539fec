"""Rows of tables in a graph that computes in bfloat16 or float16: embeddings, which are rounded, or positions and ids.

bfloat16 has no 257: as a position or an id it would be another one, and after a subtraction nothing else is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..proto.mapped import load
from .casts import WIDE
from .graph import Graph, Node

_VIEWS: Final = "Concat Expand Flatten Identity Reshape Slice Split Squeeze Tile Transpose Unsqueeze"
VIEWS: Final = frozenset(_VIEWS.split())
"""Operators that only move data: a weight behind them is still a weight."""

ROWS: Final = 64
"""Rows of a table that are read at a time: the first of them tell that it has embeddings."""


def is_lookup(node: Node, constants: Mapping[str, Any], dtype: np.dtype) -> bool:
    """Whether a node takes rows of a table of embeddings, that is, of anything but integers that ``dtype`` rounds.

    Args:
        node: any node of a graph.
        constants: the graph's initializers, by name.
        dtype: the compute dtype.
    """
    table: Any = constants.get(node.inputs[0]) if node.op_type == "Gather" else None
    if getattr(table, "ndim", 0) < 2:
        return False
    rounds = False
    for i in range(0, len(table) if table.dtype == WIDE else 0, ROWS):
        rows = load(table[i : i + ROWS])
        if np.any(np.trunc(rows) != rows):
            return True
        with np.errstate(over="ignore"):
            rounds = rounds or bool(np.any(rows.astype(dtype) != rows))
    return not rounds


def is_only_subtracted(graph: Graph, name: str) -> bool:
    """Whether subtractions alone read a value, or views of it: a difference of rounded operands may be all error."""
    readers = [node for node in graph.nodes if name in node.reads]
    return bool(readers) and all(
        node.op_type == "Sub" or (node.op_type in VIEWS and is_only_subtracted(graph, node.outputs[0]))
        for node in readers
    )
