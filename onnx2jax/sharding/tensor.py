"""Tensor parallelism derived from the graph: matrix products in pairs, sharded by columns and by rows.

The result of a product sharded by columns is sharded along its last axis. That axis is propagated through elementwise
operators, heads (Reshape, Transpose) and attention to the next product, which is sharded by rows: one all-reduce per
pair. If it ends elsewhere, such as at a normalization, the first product stays replicated, and propagation restarts
without it, until every sharding ends at a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..eval.abstract import ALONG, SAME
from ..ir.graph import Graph
from . import heads, products
from .shapes import Facts
from .walk import Found, Rule, Walk, elementwise, nothing, other


def pairs(graph: Graph, weights: Mapping[str, Any], parts: int) -> Found:
    """Pair the matrix products of a graph and shard them over a number of devices.

    Args:
        graph: a main graph.
        weights: anything with a shape, by the name of an initializer.
        parts: the number of shards.
    """
    facts, refused = Facts(graph, weights), dict[int, str]()
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
    **dict.fromkeys(("Concat", "ScatterElements", "TensorScatter"), heads.concatenated),
    **dict.fromkeys(("Slice", "Expand", "Tile"), heads.sliced),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), heads.squeeze),
    **dict.fromkeys(("Attention", "GroupQueryAttention", "MultiHeadAttention"), heads.attention),
    **dict.fromkeys(("MoE", "QMoE"), products.experts),
    "Gather": products.gather,
    "MatMulNBits": products.packed_product,
    "Reshape": heads.reshape,
    "RotaryEmbedding": heads.rotated,
    "Shape": nothing,
    "Split": heads.split,
    "Transpose": heads.transpose,
}
