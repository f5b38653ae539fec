"""How far a node that rounds inside amplifies the last digits of its operands.

In a quantised recurrence, a number between two steps is rounded up here and down there; all steps after it differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from ... import compat
from ...eval.interpreter import Context, run_node
from ...eval.values import to_host
from ...ir.graph import Node

SCALES: Final = {"DynamicQuantizeLSTM": (8, 10)}
"""By operator that rounds inside: the inputs that are scales of weights, whose last digits do not affect how the first
input is rounded."""
TRIALS: Final = 8
CHANGE: Final = 1e-6
"""The largest relative change of a scale: the differences of sums in another order, and of other sigmoids."""
FLIPS: Final = 2
"""The other implementation may differ by so many times the largest change."""


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
        run = jax.jit(lambda given: run_node(alone, given, context))
        usual = [np.asarray(v) for v in run(operands)]
        found = [np.zeros((*v.shape[:-1], 1), v.dtype) for v in usual]
        for _ in range(TRIALS):
            near = {n: (v * (1 + rng.uniform(-CHANGE, CHANGE, v.shape))).astype(v.dtype) for n, v in scales.items()}
            for most, a, b in zip(found, run({**operands, **near}), usual, strict=True):
                np.maximum(most, np.abs(np.asarray(a) - b).max(-1, keepdims=True), out=most)
    return found
