"""Labels where two scores are equal within rounding are no difference; every other wrong label is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import onnx2jax
from onnx2jax.ir.graph import Node
from onnx2jax.model.reports.explanations import TIED, tied

SCORES = np.array([[0.1, 0.45, 0.45], [0.2, 0.7, 0.1]], np.float32)
TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[n, 2] x) => (int64[n] y) { s = Sin(x) y = ArgMax<axis = 1, keepdims = 0>(s) }"""
ROWS = np.array([[1.0, 1.0], [0.2, 1.0]], np.float32)


def choice(op_type: str, axis: int | None = 1) -> Node:
    attributes = {} if axis is None else {"axis": axis}
    return Node("n", op_type, "", 21, ("x",), ("label", "scores"), attributes, None)


@pytest.mark.parametrize(
    "node, ours, explained",
    [
        (choice("ArgMax"), [2, 1], True),
        (choice("ArgMax"), [1, 2], False),
        (choice("ArgMax"), [[2], [1]], True),
        (choice("ArgMax", -1), [2, 1], True),
        (choice("ArgMax", None), [2, 1], False),  # over rows
        (choice("ArgMin"), [2, 1], False),  # of the two smallest scores, none are equal
        (choice("TreeEnsembleClassifier"), [2, 1], True),
        (choice("TreeEnsembleClassifier"), [2, 0], False),
        (choice("TreeEnsembleClassifier"), ["c", "b"], True),
        (choice("TreeEnsembleClassifier"), [0.45, 0.7], False),  # scores are no labels
        (choice("Relu"), [2, 1], False),
    ],
)
def test_labels_of_equal_scores(node: Node, ours: Any, explained: bool) -> None:
    theirs = {int: [1, 1], str: ["b", "b"], float: [0.4, 0.7]}[type(np.ravel(ours).tolist()[0])]
    wanted = np.reshape(theirs, np.shape(ours))
    assert tied([node], np.asarray(ours), wanted, {"x": SCORES, "scores": SCORES}) is explained


def test_labels_that_last_digits_decide_are_no_difference(shift: Any) -> None:
    shift("Sin", lambda y: y * np.array([1, 1 + 1e-6], np.float32))
    found = onnx2jax.convert(onnx.parser.parse_model(TEXT)).verify({"x": ROWS}, against="onnxruntime")
    assert found and found.outputs["inputs"][0].why == TIED


@pytest.mark.parametrize("name, change", [("ArgMax", lambda y: 1 - y), ("Sin", lambda y: -y)])
def test_wrong_labels_are_found(shift: Any, name: str, change: Any) -> None:
    shift(name, change)
    found = onnx2jax.convert(onnx.parser.parse_model(TEXT)).verify({"x": ROWS}, against="onnxruntime")
    assert found.first is not None and name in found.first.node
