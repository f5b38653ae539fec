"""Classifiers with string labels, as a classifier that numbers its classes and a look-up of their labels.

Strings exist on the host alone. Apart from them, a classifier is compiled, traced and differentiated like any other
node; where nothing reads the labels, as in a cut to the scores, the look-up is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..ir.graph import Graph, Node, ancestors
from ..ops.ml.scores import labels_of
from ..ops.registry import Operator


def with_label_lookups(graph: Graph) -> Graph:
    """The graph with the look-up of string labels apart from each classifier; itself where there is none."""
    if not any(map(_has_string_labels, graph.nodes)):
        return graph
    nodes = (part for node in graph.nodes for part in _parts(node, graph.defines))
    return replace(graph, nodes=tuple(ancestors(tuple(nodes), [v.name for v in graph.outputs])))


def _has_string_labels(node: Node) -> bool:
    operator = node.target
    if not isinstance(operator, Operator) or not operator.labels or not node.is_plain or not node.outputs[0]:
        return False
    return bool(node.attributes.get("classlabels_strings")) and not node.attributes.get(operator.labels)


def _parts(node: Node, taken: Collection[str]) -> Iterator[Node]:
    if not _has_string_labels(node):
        yield node
        return
    operator: Any = node.target
    strings = node.attributes["classlabels_strings"]
    label, *rest = node.outputs
    number = f"{label} (class number)"
    while number in taken:
        number += "'"
    others = {n: v for n, v in node.attributes.items() if n != "classlabels_strings"}
    yield replace(node, attributes={**others, operator.labels: tuple(range(len(strings)))}, outputs=(number, *rest))
    attributes = {"strings": np.array(strings, object)}
    # The operator's name stays, for messages.
    yield replace(node, attributes=attributes, inputs=(number,), outputs=(label,), target=LOOK_UP, casts=None)


def _look_up(number: Any, *, strings: np.ndarray) -> np.ndarray:
    labels: np.ndarray = labels_of(strings, number)
    return labels


LOOK_UP = Operator("onnx2jax.runtime", "ClassLabels", 1, _look_up, ("number",), attributes=frozenset({"strings"}))
