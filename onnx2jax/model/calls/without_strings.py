"""The same graph over integers, for the shapes of strings, which ``jax.eval_shape`` cannot trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...ir.graph import Graph, Node
from ...proto.types import TensorType, ValueInfo

INTEGERS: Final[Mapping[str, tuple[str, ...]]] = {
    "cats_strings": ("OneHotEncoder",),
    "classlabels_strings": ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"),
    "default_string": ("LabelEncoder",),
    "keys_strings": ("LabelEncoder",),
    "values_strings": ("LabelEncoder",),
}
"""Attributes of ai.onnx.ml that have a counterpart of integers, and operators in which it means the same."""


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
    if node.domain != "ai.onnx.ml":
        return node
    changes = {n: v for n, v in node.attributes.items() if node.op_type in INTEGERS.get(n, ()) and v is not None}
    if not changes:
        return node
    plural = "ints" if node.op_type in ("LinearClassifier", "SVMClassifier") else "int64s"
    integers = {
        n.replace("strings", plural).replace("string", "int64"): 0 if isinstance(v, str) else tuple(range(len(v)))
        for n, v in changes.items()
    }
    return replace(node, attributes={n: v for n, v in node.attributes.items() if n not in changes} | integers)
