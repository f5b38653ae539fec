"""Whether onnxruntime saturates in a node of integer products.

On x86 processors without VNNI, onnxruntime multiplies uint8 by int8 with an instruction that adds two products in 16
bits and saturates. Its kernels for uint8 by uint8 are exact: the node runs there again with weights shifted to uint8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...errors import UnsupportedError
from ...eval.values import to_host
from ...ir.graph import Node
from .comparison import compared
from .peers import InnerGraph, Peer

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
