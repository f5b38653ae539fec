"""Shards matrix products: by columns if the operand is not sharded, else by rows; also tables and mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.graph import Node
from .propagation import Along, Extent, Walk, common_axis, fail, has_axis, key, label


def columns(
    walk: Walk, i: int, node: Node, weight: Mapping[str, int], bias: str, extent: Extent | None
) -> list[Along | None]:
    """Start sharding at a product by columns; ``weight``: operand -> axis, ``extent``: the number of columns."""
    origin = frozenset({i})
    if not walk.divides(extent):
        walk.fail(origin, f"the {extent} columns of {label(node)} cannot be divided evenly over {walk.parts} devices")
        return []
    if not all(walk.shard(name, axis, origin) for name, axis in weight.items()):
        return []
    if bias and has_axis(walk.facts.of(bias), -1):
        walk.shard(bias, -1, frozenset())
    return [(-1, origin)]


def begin_product(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """MatMul, Gemm and the like of a replicated value and a weight: by columns."""
    name, shape = node.inputs[1], walk.shape(node.inputs[1])
    if not walk.is_weight(name) or shape is None or not _is_plain(node, shape):
        return []
    outer = -2 if node.attributes.get("transB") else -1
    return columns(walk, i, node, {name: outer}, node.inputs[2] if len(node.inputs) > 2 else "", shape[outer])


def product(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """MatMul, Gemm and the like: of a value and a weight, by rows, or of two values."""
    x, name = operands[0], node.inputs[1]
    if operands[1] is not None or not walk.is_weight(name):
        return _values(walk, node, operands)
    if x is None or not _is_plain(node, walk.shape(name) or ()):
        return fail(walk, node, operands)
    if x[0] == -1:
        walk.shard(name, -1 if node.attributes.get("transB") else -2, x[1])
        return []
    return [x]


def _is_plain(node: Node, weight: Sequence[Extent]) -> bool:
    """Whether it multiplies rows by a matrix."""
    return len(weight) == 2 and not node.attributes.get("transA") and not _batches(node)


def _batches(node: Node) -> bool:
    return bool(node.attributes.get("transBatchA") or node.attributes.get("transBatchB"))


def _values(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Products of two values: sharded along a batch axis, or along the free axis of one of them."""
    if node.op_type not in ("MatMul", "FusedMatMul") or _batches(node):
        return fail(walk, node, operands)
    a, b = operands[:2]
    one = common_axis([a, b])
    if one is not None and one[0] < -2:
        return [one]
    if a is not None and b is None and a[0] == (-1 if node.attributes.get("transA") else -2):
        return [(-2, a[1])]
    if b is not None and a is None and b[0] == (-2 if node.attributes.get("transB") else -1):
        return [(-1, b[1])]
    return fail(walk, node, operands)


def begin_packed_product(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """MatMulNBits of a replicated value: by columns."""
    _, packed, scales, zeros, order, bias = [*node.inputs, *[""] * 6][:6]
    if not walk.is_weight(packed) or not walk.is_weight(scales):
        return []
    rows = {n: -len(walk.shape(n) or ()) for n in (packed, scales, zeros) if n and walk.is_weight(n)}
    begun = columns(walk, i, node, rows, bias, node.attributes["N"])
    if begun and not order:
        walk.sharded.shards[key(node)] = "out"
    return begun


def packed_product(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """MatMulNBits by rows: packed weights [N, blocks, bytes], scales and zero points [N, blocks] or flat."""
    x, (packed, scales, zeros, order) = operands[0], [*node.inputs[1:], *[""] * 4][:4]
    shapes = {n: walk.shape(n) or () for n in (packed, scales, zeros)}
    if x is None or not walk.is_weight(packed) or not walk.is_weight(scales):
        return fail(walk, node, operands)
    if x[0] != -1:
        return [x]
    blocks = shapes[packed][1]
    if order or not walk.divides(blocks):
        why = "g_idx reorders its columns" if order else f"its {blocks} blocks are not divisible"
        return fail(walk, node, [x], f"{label(node)} cannot be sharded by rows over {walk.parts} devices: {why}")
    if not walk.shard(packed, 1, x[1]):
        return []
    for name in (scales, zeros):
        # Packed zero points: shards must start at whole bytes. Flat ones are stored row by row.
        if len(shapes[name]) == 2 and walk.divides(shapes[name][1]) and shapes[packed][1] == shapes[scales][-1]:
            bits = node.attributes.get("bits", 4) if name == zeros else 8
            if name == scales or int(blocks) * bits == 8 * int(shapes[name][1]):
                walk.shard(name, 1, frozenset())
    walk.sharded.shards[key(node)] = "in"
    return []


def rows(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """Gather of the embedding table, sharded by rows: each device returns zeros for rows that it does not hold."""
    table = walk.table(node)
    if table is not None and table == walk.largest:
        walk.shard(table, 0, frozenset({i}))
    elif table is not None:
        walk.fail(frozenset({i}), f"{label(node)} reads it, and only the largest table is sharded")
    return []


def experts(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """A mixture sharded by experts: each device computes a partial sum."""
    stacked = [n for n in node.inputs[2:] if n and walk.is_weight(n) and len(walk.shape(n) or ()) > 1]
    axes = {n: -len(walk.shape(n) or ()) for n in stacked}
    if stacked and all(walk.shard(n, axis, frozenset({i})) for n, axis in axes.items()):
        walk.sharded.shards[key(node)] = "experts"
    return []
