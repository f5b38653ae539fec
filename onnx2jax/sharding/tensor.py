"""Tensor parallelism derived from the graph: matrix products in pairs, sharded by columns and by rows.

The result of a product sharded by columns is sharded along its last axis. That axis is propagated through elementwise
operators, heads (Reshape, Transpose) and attention to the next product, which is sharded by rows: one all-reduce per
pair. If it ends elsewhere, such as at a normalization, the first product stays replicated, and propagation restarts
without it, until every sharding ends at a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..ir.graph import Graph
from . import heads, product_rules
from .propagation import Begin, Rule, ShardedAxes, ValueFacts, Walk, moving, nothing


def pairs(graph: Graph, weights: Mapping[str, Any], parts: int) -> ShardedAxes:
    """Pair the matrix products of a graph and shard them over a number of devices.

    Args:
        graph: a main graph.
        weights: anything with a shape, by the name of an initializer.
        parts: the number of shards.
    """
    facts, refused = ValueFacts(graph, weights), dict[int, str]()
    while True:
        walk = Walk(graph, facts, weights, parts, refused)
        walk.run(_BEGINS, _RULES)
        if refused.keys() >= walk.failed.keys():
            walk.annotate({"MatMulNBits", *_PRODUCTS, *_ATTENTION}, {"Gather", "MoE", "QMoE"})
            walk.explain()
            return walk.sharded
        refused = walk.failed | refused


_PRODUCTS: Final = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "GemmFastGelu")
_ATTENTION: Final = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
_NORMALIZED: Final = "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"
_BEGINS: Final[Mapping[str, Begin]] = {
    **dict.fromkeys(_PRODUCTS, product_rules.begin_product),
    **dict.fromkeys(_ATTENTION, heads.packed_attention),
    **dict.fromkeys(("MoE", "QMoE"), product_rules.experts),
    "Gather": product_rules.rows,
    "MatMulNBits": product_rules.begin_packed_product,
    "Reshape": heads.heads_of,
    "Split": heads.parts_of,
}
_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_PRODUCTS, product_rules.product),
    **dict.fromkeys(_ATTENTION, heads.attention),
    **dict.fromkeys(_NORMALIZED, moving(heads.normalized)),
    **dict.fromkeys(("Concat", "ScatterElements", "TensorScatter"), moving(heads.concatenated)),
    **dict.fromkeys(("Slice", "Expand", "Tile"), moving(heads.sliced)),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), moving(heads.reshape)),
    "Gather": moving(heads.gather),
    "MatMulNBits": product_rules.packed_product,
    "RotaryEmbedding": moving(heads.rotated),
    "Shape": nothing,
    "Split": moving(heads.split),
    "Transpose": moving(heads.transpose),
}
