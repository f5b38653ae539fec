"""The same graph over integers, for the shapes of strings, which ``jax.eval_shape`` cannot trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...ir.graph import Graph, Node
from ...ops.registry import Operator
from ...proto.types import TensorType, ValueInfo

VALUES: Final = {"values_strings": "values_int64s", "default_string": "default_int64"}
"""Attributes of a LabelEncoder's results, and their counterparts of integers."""


def without_strings(graph: Graph) -> Graph:
    """The graph with int64 in place of strings; nodes that compute with their characters stay as they are."""
    return replace(
        graph,
        inputs=tuple(map(_declared, graph.inputs)),
        outputs=tuple(map(_declared, graph.outputs)),
        value_info={n: _declared(v) for n, v in graph.value_info.items()},
        initializers={n: _zeros(v) for n, v in graph.initializers.items()},
        nodes=tuple(map(_node, graph.nodes)),
    )


def lengths_of_lists(graph: Graph) -> dict[str, str]:
    """The tensors whose first axis has the length of a list of maps, by the name of the list."""
    zip_maps = (n for n in graph.nodes if (n.domain, n.op_type) == ("ai.onnx.ml", "ZipMap"))
    return {n.outputs[0]: n.inputs[0] for n in zip_maps}


def _declared(value: ValueInfo) -> ValueInfo:
    kind = value.type
    if not isinstance(kind, TensorType) or not kind.dtype.hasobject:
        return value
    return replace(value, type=replace(kind, dtype=np.dtype(np.int64)))


def _zeros(value: Any) -> Any:
    return np.zeros(value.shape, np.int64) if value.dtype.hasobject else value


def _node(node: Node) -> Node:
    """The node with integers in attributes of strings that have a counterpart of integers."""
    operator = node.target
    if not isinstance(operator, Operator) or not (operator.strings or operator.labels):
        return node
    counterparts = {operator.strings: operator.strings.replace("strings", "int64s")}
    counterparts |= {"classlabels_strings": operator.labels} if operator.labels else {}
    counterparts |= VALUES if node.op_type == "LabelEncoder" else {}
    changes = {n: v for n, v in node.attributes.items() if n in counterparts and v is not None}
    integers = {counterparts[n]: 0 if isinstance(v, str) else tuple(range(len(v))) for n, v in changes.items()}
    return replace(node, attributes={n: v for n, v in node.attributes.items() if n not in changes} | integers)
