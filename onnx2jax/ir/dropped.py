"""Results of data-dependent length that end in scatters alone: they can be padded, where a scatter drops the padding.

Exporters of JAX write ``x.at[i].add(y, mode="drop")`` so: NonZero of a mask of the valid indices, Gather of their rows
and of the rows of updates, ScatterND. Padding of NonZero is out of range, which a traced Gather reads as the least
integer, which is out of range in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from .graph import Graph, Node

Kind = Literal["positions", "indices", "rows", "count"]
"""NonZero's [rank, n]; rows that are out of range in the padding; other rows; the number of rows."""
_SHAPING: Final = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_LINEAR: Final = ("Add", "Cast", "Identity", "Neg", "Sub")
"""By element, with derivatives that do not read padding, which is NaN."""
_SCATTERS: Final = ("ScatterElements", "ScatterND")


def reader_beside_scatters(graph: Graph, node: Node) -> str:
    """What reads the results of a NonZero in another way than by rows for a scatter; "" if nothing does."""
    kinds: dict[str, Kind] = {node.outputs[0]: "positions"}
    for reader in graph.nodes:
        if kinds.keys().isdisjoint(reader.reads):
            continue
        if reader.op_type in _SCATTERS and _drops(reader, kinds):
            continue
        kind = None if reader.domain or not kinds.keys().isdisjoint(reader.captures) else _kind(graph, reader, kinds)
        if kind is None:
            return str(reader)
        kinds[reader.outputs[0]] = kind
    return next((f"output {v.name!r}" for v in graph.outputs if v.name in kinds), "")


def _drops(scatter: Node, kinds: Mapping[str, Kind]) -> bool:
    """Whether a scatter's indices are out of range in the padding, and its updates have as many rows."""
    data, indices, updates = (kinds.get(name) for name in scatter.inputs)
    along = scatter.op_type == "ScatterND" or scatter.attributes.get("axis", 0) == 0
    return data is None and indices == "indices" and updates in ("indices", "rows") and along


def _kind(graph: Graph, node: Node, kinds: Mapping[str, Kind]) -> Kind | None:
    """What the output of a node is, by its inputs; None if it is not among the kinds."""
    given = [kinds.get(name) for name in node.inputs]
    constants = [graph.initializers.get(name) for name in node.inputs]
    first, second = (*given, None, None)[:2]
    table: Mapping[str, Kind | None] = {
        "Transpose": "indices" if first == "positions" and node.attributes.get("perm") in (None, (1, 0)) else None,
        "Shape": "count" if first in ("indices", "rows") and not node.attributes else None,
        "Expand": "rows" if first is None and second == "count" and _leads(graph, node.inputs[1], kinds) else None,
        "GatherND": "indices" if given == [None, "indices"] and not node.attributes.get("batch_dims") else None,
    }
    if node.op_type in table:
        return table[node.op_type]
    if node.op_type == "Gather" and not node.attributes.get("axis", 0):
        if given == [None, "indices"]:
            return "indices"
        if first == "positions" and constants[1] is not None and constants[1].ndim == 0:
            return "indices"
    if node.op_type in _SHAPING and set(given) <= {"count", None}:
        return "count"
    if node.op_type in ("Squeeze", "Unsqueeze") and second is None and constants[1:] and constants[1] is not None:
        axes = constants[1].tolist()
        if first == "positions" and node.op_type == "Squeeze" and axes == [0]:
            return "indices"
        # Negative axes count from an end that is not known here; of Unsqueeze, -1 comes last.
        if first in ("indices", "rows") and all(a > 0 or (a == -1 and len(axes) == 1) for a in axes):
            return first
    if node.op_type == "Reshape" and first in ("indices", "rows"):
        shape = constants[1]
        led = shape is not None and shape.size and shape[0] in (-1, 0)
        return first if led or (second == "count" and _leads(graph, node.inputs[1], kinds)) else None
    if node.op_type == "Concat" and node.attributes["axis"] != 0 and set(given) <= {"indices", "rows"}:
        return "indices" if "indices" in given else "rows"
    if node.op_type == "Identity" and first in ("indices", "rows"):
        return first
    if node.op_type in _LINEAR and all(
        kind in ("indices", "rows") or (value is not None and np.ndim(value) == 0)
        for kind, value in zip(given, constants, strict=True)
    ):
        return "rows"
    return None


def _leads(graph: Graph, shape: str, kinds: Mapping[str, Kind]) -> bool:
    """Whether a shape begins with the number of rows: it is the Shape of rows, or a Concat that begins so."""
    node = graph.producers.get(shape)
    if node is None or kinds.get(shape) != "count":
        return False
    if node.op_type == "Shape":
        return True
    if node.op_type in ("Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Concat"):
        constant = graph.initializers.get(node.inputs[1]) if node.op_type == "Gather" else None
        if node.op_type == "Gather" and (constant is None or constant.size != 1 or constant.item() != 0):
            return False
        return _leads(graph, node.inputs[0], kinds)
    return False
