"""Explanations of differences between equal programs: rounding, labels of equal scores, and onnxruntime's saturation.

In a quantised recurrence, a number between two steps is rounded up here and down there; all steps after it differ. On
x86 processors without VNNI, onnxruntime multiplies uint8 by int8 with an instruction that adds two products in 16 bits
and saturates. Its kernels for uint8 by uint8 are exact: the node runs there again with weights shifted to uint8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from ... import compat
from ...errors import OnnxError, UnsupportedError
from ...eval.interpreter import Context, run_node
from ...eval.values import to_host
from ...ir.graph import Node
from .comparison import compared
from .peers import InnerGraph, Peer
from .samples import in_types

SCALES: Final = {"DynamicQuantizeLSTM": (8, 10)}
"""By operator that rounds inside: the inputs that are scales of weights, whose last digits do not affect how the first
input is rounded."""
TRIALS: Final = 8
CHANGE: Final = 1e-6
"""The largest relative change of a scale: the differences of sums in another order, and of other sigmoids."""
FLIPS: Final = 2
"""The other implementation may differ by so many times the largest change."""


def in_double(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a model computed in float64, by name; empty where it cannot be."""
    if model.settings.dtype is not None:
        return {}
    try:
        double = model.with_options(dtype="float64")
        results = double.run(None, in_types(feeds, double.inputs))
        return dict(zip((v.name for v in double.outputs), results, strict=True))
    except OnnxError:
        return {}


def distances(exact: Any, ours: Any, theirs: Any) -> str:
    """How far two results are from that in float64; empty where they are no floats."""
    if not all(isinstance(v, np.ndarray) and v.dtype.kind == "f" for v in (exact, ours, theirs)):
        return ""
    off, their = (np.abs(np.asarray(v, np.float64) - exact).max(initial=0) for v in (ours, theirs))
    return f"computed in float64 here, our result is {off:.3g} off, and the other one {their:.3g}"


def amplified(model: Any, node: Node, values: Mapping[str, Any], name: str, ours: Any, theirs: Any) -> np.ndarray:
    """Our output of a node, moved towards the other implementation's as far as last digits of its scales move it.

    Args:
        model: the Model.
        node: a node of its graph, or of a graph inside it.
        values: what the node reads, by name.
        name: the output.
        ours, theirs: its values.
    """
    moved = FLIPS * _spread(model, node, values)[node.outputs.index(name)]
    return np.asarray(ours) - np.clip(np.asarray(ours) - theirs, -moved, moved)


def _spread(model: Any, node: Node, values: Mapping[str, Any]) -> list[np.ndarray]:
    """The largest changes of each row of a node's outputs when the last digits of its scales change."""
    operands = {f"operand{i}": np.asarray(to_host(values[n])) for i, n in enumerate(node.inputs) if n}
    scales = {n: operands[n] for i in SCALES[node.op_type] if (n := f"operand{i}") in operands}
    alone = replace(node, inputs=tuple(f"operand{i}" if n else "" for i, n in enumerate(node.inputs)))
    context, rng = Context(dict(model.params), settings=model.settings), np.random.default_rng(0)
    with compat.enable_x64():
        run = jax.jit(lambda values: run_node(alone, values, context))
        usual = [np.asarray(v) for v in run(operands)]
        changes = [np.zeros((*v.shape[:-1], 1), v.dtype) for v in usual]
        for _ in range(TRIALS):
            near = {n: (v * (1 + rng.uniform(-CHANGE, CHANGE, v.shape))).astype(v.dtype) for n, v in scales.items()}
            for largest, a, b in zip(changes, run({**operands, **near}), usual, strict=True):
                np.maximum(largest, np.abs(np.asarray(a) - b).max(-1, keepdims=True), out=largest)
    return changes


TIED: Final = "equal scores, in rows whose labels differ"
TOLERANCE: Final = 1e-5
"""Relative to the larger of two scores: sums of a few hundred terms in float32 in another order."""
ARGUMENTS: Final = {"ArgMax": 1, "ArgMin": -1}
CLASSIFIERS: Final = {"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"}


def tied(nodes: Sequence[Node], ours: Any, theirs: Any, values: Mapping[str, Any]) -> bool:
    """Whether rows of labels differ only where the last of the nodes to choose labels has two equal scores.

    Args:
        nodes: the nodes behind them, in order.
        ours, theirs: the labels of each implementation.
        values: the other implementation's values by name.
    """
    choosing = [n for n in nodes if n.op_type in ARGUMENTS or n.op_type in CLASSIFIERS]
    equal = _tied_rows(choosing[-1], values) if choosing else None
    if isinstance(theirs, list | dict):
        return False
    ours, theirs = np.asarray(to_host(ours)), np.asarray(theirs)
    if theirs.dtype.kind not in "iuOU" or equal is None or ours.shape != theirs.shape or ours.shape[:1] != equal.shape:
        return False
    differs = (ours != theirs).reshape(len(equal), -1).any(axis=1)
    return bool(equal[differs].all())


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


WEIGHTS: Final = {
    "ConvInteger": ((1, 3),),
    "DynamicQuantizeLSTM": ((1, 9), (2, 11)),
    "DynamicQuantizeMatMul": ((1, 3),),
    "MatMulInteger": ((1, 3),),
    "MatMulIntegerToFloat": ((1, 5),),
    "QAttention": ((1, 7),),
    "QGemm": ((3, 5),),
    "QLinearConv": ((3, 5),),
    "QLinearMatMul": ((3, 5),),
}
"""The inputs of weights, each with that of its zero points, by operator."""
SATURATES: Final = "onnxruntime saturates here: it adds products of 8-bit integers in 16 bits on this processor"


def unsaturated(
    model: Any, node: Node, values: Mapping[str, Any], steps: tuple[InnerGraph, ...] = ()
) -> dict[str, Any]:
    """onnxruntime's outputs of a node by name, computed without saturation; empty if saturation does not explain them.

    It does not where the node cannot saturate, and where onnxruntime computes other outputs from our operands: then
    these are wrong.

    Args:
        model: the Model.
        node: a node of its graph, or of the inner graph to which ``steps`` lead.
        values: what the node reads by name, and onnxruntime's outputs of it.
        steps: the path to the graph of the node.
    """
    if node.op_type not in WEIGHTS:
        return {}
    operands = [to_host(values[n]) if n in values else None for n in node.inputs]
    usual = list(operands)
    for at, zero in WEIGHTS[node.op_type]:
        operands += [None] * (zero + 1 - len(operands))
        weights, points = operands[at], operands[zero]
        if weights is None or weights.dtype != np.int8 or not (points is None or points.dtype == np.int8):
            return {}
        operands[at], operands[zero] = _shifted(weights), _shifted(np.int8(0) if points is None else points)
    try:
        again = _alone(model, node, usual, steps)
        if not all(compared(n, v, values[n]).ok for n, v in again.items() if n in values):
            return {}
        return _alone(model, node, operands, steps)
    except UnsupportedError:
        return {}


def _alone(model: Any, node: Node, operands: Sequence[Any], steps: tuple[InnerGraph, ...]) -> dict[str, Any]:
    """onnxruntime's outputs of a node on some operands, by name."""
    peer = Peer("onnxruntime", model, every=True, steps=steps, alone=(node, operands))
    return peer.run({f"operand{i}": v for i, v in enumerate(operands) if v is not None})


def _shifted(values: Any) -> np.ndarray:
    return np.asarray(np.asarray(values, np.int16) + 128, np.uint8)
