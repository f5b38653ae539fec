"""String inputs that are only compared with constants, as integer codes of those constants.

before:   text -> ArrayFeatureExtractor -> LabelEncoder -> Concat -> TreeEnsembleClassifier
after:    text -> StringCodes    (on the host)
          codes -> ArrayFeatureExtractor -> LabelEncoder -> Concat -> TreeEnsembleClassifier    (one program)

Strings exist on the host alone. One look-up of each string, however many encoders compare it, leaves the rest of the
graph to one compiled program.

A classifier with string labels, likewise, becomes one that numbers its classes and a look-up of their labels: it is
compiled, traced and differentiated like any other node, and where nothing reads the labels, as in a cut to the scores,
the look-up is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..ir.graph import Graph, Node, ancestors, descendants
from ..ops.arrays import needs_known
from ..ops.ml.scores import labels_of
from ..ops.registry import Operator
from ..proto.messages import unused_name
from ..proto.types import TensorType


def with_string_codes(graph: Graph) -> Graph:
    """The graph with codes for the string inputs that only reach encoders; itself where there is none."""
    texts = {v.name for v in graph.inputs if isinstance(v.type, TensorType) and v.type.dtype == object}
    if not texts:
        return graph
    coded = _coded(graph, texts)
    encoders = [n for n in graph.nodes if coded.intersection(n.inputs) and _compares(n)]
    if not encoders:
        return graph
    strings = dict.fromkeys(s for node in encoders for s in node.attributes[_traits(node).strings])
    codes = {s: i for i, s in enumerate(strings)}
    named = {n: unused_name(f"{n} (codes)", graph.defines) for n in coded}
    first = []
    for text in (v.name for v in graph.inputs if v.name in coded):
        readers = (n for n in descendants(graph.nodes, [text]) if n in encoders)
        reader = next(readers, encoders[0])  # whose name messages give; nothing reads the text if it has none
        codes_of = replace(reader, inputs=(text,), outputs=(named[text],), target=STRING_CODES, casts=None)
        first.append(replace(codes_of, attributes={"codes": codes}))
    return replace(graph, nodes=(*first, *(_renamed(node, named, codes) for node in graph.nodes)))


def _coded(graph: Graph, texts: set[str]) -> set[str]:
    """The string inputs, and what movers make of them, that nothing but movers and encoders reads."""
    while True:
        coded, wrong = set(texts), {v.name for v in graph.outputs}
        for node in graph.nodes:
            if _moves(node, coded):
                coded.update(filter(None, node.outputs))
            elif not _compares(node):
                wrong.update(node.reads)
        if not (bad := coded & wrong):
            return coded
        texts = {
            t for t in texts if bad.isdisjoint([t, *(n for d in descendants(graph.nodes, [t]) for n in d.outputs)])
        }


def _moves(node: Node, coded: set[str]) -> bool:
    """Whether a node moves coded elements alone."""
    data = node.inputs if _traits(node).variadic else node.inputs[:1]
    others = set(node.reads) - set(data)
    known = _traits(node).moves and node.is_plain and node.casts is None
    return known and coded.issuperset(data) and coded.isdisjoint(others)


def _compares(node: Node) -> bool:
    """Whether a node compares strings with constants, and an unknown one is no error."""
    known = isinstance(node.attributes.get(_traits(node).strings), tuple) and node.is_plain
    return known and node.attributes.get("zeros", 1) == 1


def _traits(node: Node) -> Operator:
    return node.target if isinstance(node.target, Operator) else STRING_CODES  # which has none


def _renamed(node: Node, named: Mapping[str, str], codes: Mapping[str, int]) -> Node:
    """The node with the names of codes for those of strings, and an encoder's strings as codes."""
    if named.keys().isdisjoint(node.inputs):
        return node
    attributes, strings = dict(node.attributes), _traits(node).strings
    if strings:
        attributes[strings.replace("strings", "int64s")] = tuple(codes[s] for s in attributes.pop(strings))
    return replace(node, inputs=_of(named, node.inputs), outputs=_of(named, node.outputs), attributes=attributes)


def _of(named: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(named.get(n, n) for n in names)


def _string_codes(X: Any, *, codes: Mapping[str, int]) -> np.ndarray:
    """The code of each string, -1 where it has none."""
    X = needs_known(X, "strings are looked up on the host")
    return np.array([codes.get(text, -1) for text in X.ravel().tolist()], np.int64).reshape(X.shape)


STRING_CODES = Operator("onnx2jax.runtime", "StringCodes", 1, _string_codes, ("X",), attributes=frozenset({"codes"}))


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
