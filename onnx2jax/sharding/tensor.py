"""Tensor parallelism from the graph: products in pairs, the first divided by columns, the second by rows.

What a product by columns gives is divided along its last axis. That axis is followed through elementwise operators,
heads (Reshape, Transpose) and attention to the next product, which is then divided by rows: one sum over the devices
for each pair. What ends elsewhere, at a normalization say, was no good beginning: that product stays whole, and the
walk begins anew without it, until nothing ends so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..ir.graph import Graph
from . import heads, products
from .shapes import ALONG, SAME, Evaluate, Facts
from .walk import Found, Rule, Walk, elementwise, nothing, other


def pairs(graph: Graph, weights: Mapping[str, Any], parts: int, evaluate: Evaluate) -> Found:
    """How the products of a graph can be divided over a number of devices.

    Args:
        graph: a main graph.
        weights: anything with a shape, by the name of an initializer.
        parts: the devices among which an axis is divided.
        evaluate: evaluates the graph abstractly.
    """
    facts, refused = Facts(graph, weights, evaluate), dict[int, str]()
    while True:
        walk = Walk(graph, facts, weights, parts, refused)
        walk.run(_RULES)
        if refused.keys() >= walk.failed.keys():
            walk.explain()
            return walk.found
        refused = walk.failed | refused


_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(ALONG, other),
    **dict.fromkeys(SAME, elementwise),
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "GemmFastGelu"), products.product),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization"), heads.normalized),
    **dict.fromkeys(("SimplifiedLayerNormalization",), heads.normalized),
    **dict.fromkeys(("Concat", "ScatterElements", "TensorScatter"), heads.joined),
    **dict.fromkeys(("Slice", "Expand", "Tile"), heads.sliced),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), heads.squeeze),
    **dict.fromkeys(("Attention", "GroupQueryAttention", "MultiHeadAttention"), heads.attention),
    **dict.fromkeys(("MoE", "QMoE"), products.experts),
    "Gather": products.gather,
    "MatMulNBits": products.packed_product,
    "Reshape": heads.reshape,
    "RotaryEmbedding": heads.rotated,
    "Shape": nothing,
    "Split": heads.parted,
    "Transpose": heads.transpose,
}
