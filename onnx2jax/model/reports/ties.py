"""Labels of the largest score: where two scores are equal within rounding, the last digit of a sum decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...eval.values import to_host
from ...ir.graph import Node

TIED: Final = "equal scores, in rows whose labels differ"
TOLERANCE: Final = 1e-5
"""Relative to the larger of two scores: sums of a few hundred terms in float32 in another order."""
ARGUMENTS: Final = {"ArgMax": 1, "ArgMin": -1}
CLASSIFIERS: Final = {"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"}


def explain(nodes: Sequence[Node], ours: Any, theirs: Any, values: Mapping[str, Any]) -> bool:
    """Whether rows of labels differ only where the last of the nodes to choose labels has two equal scores.

    Args:
        nodes: the nodes behind them, in order.
        ours, theirs: the labels of each implementation.
        values: the other implementation's values by name.
    """
    choosing = [n for n in nodes if n.op_type in ARGUMENTS or n.op_type in CLASSIFIERS]
    tied = _tied_rows(choosing[-1], values) if choosing else None
    if isinstance(theirs, list | dict):
        return False
    ours, theirs = np.asarray(to_host(ours)), np.asarray(theirs)
    if theirs.dtype.kind not in "iuOU" or tied is None or ours.shape != theirs.shape or ours.shape[:1] != tied.shape:
        return False
    differs = (ours != theirs).reshape(len(tied), -1).any(axis=1)
    return bool(tied[differs].all())


def _tied_rows(node: Node, values: Mapping[str, Any]) -> np.ndarray | None:
    """Whether the two best scores of each row are equal; None if there are no scores of several classes in rows."""
    name = node.inputs[0] if node.op_type in ARGUMENTS else node.outputs[1]
    scores = np.asarray(to_host(values[name])) if name in values else np.zeros(())
    axis = node.attributes.get("axis", 0) % scores.ndim if node.op_type in ARGUMENTS and scores.ndim else 1
    if scores.ndim < 2 or axis == 0 or scores.shape[axis] < 2:
        return None
    second, best = np.moveaxis(np.partition(scores * ARGUMENTS.get(node.op_type, 1), -2, axis), axis, 0)[-2:]
    tied = best - second <= TOLERANCE * np.maximum(np.abs(best), np.abs(second))
    return tied.reshape(len(tied), -1).any(axis=1)
