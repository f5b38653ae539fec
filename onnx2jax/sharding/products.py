"""Shards matrix products: by columns if the operand is not sharded, else by rows; also tables and mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.graph import Node
from .shapes import Extent
from .walk import CONCATENATED, Along, Walk, common_axis, fail, has_axis, key, label


def columns(
    walk: Walk, i: int, node: Node, weight: Mapping[str, int], bias: str, extent: Extent | None
) -> list[Along | None]:
    """Start sharding at a product by columns; ``weight``: operand -> axis, ``extent``: the number of columns."""
    origin = frozenset({i})
    if i in walk.refused:
        walk.concatenated.update(node.outputs if walk.refused[i] == CONCATENATED else ())
        walk.replicate(node)
        return []
    if not walk.divides(extent):
        walk.fail(origin, f"the {extent} columns of {label(node)} cannot be divided evenly over {walk.parts} devices")
        return []
    if not all(walk.shard(name, axis, origin) for name, axis in weight.items()):
        return []
    if bias and has_axis(walk.facts.of(bias), -1):
        walk.shard(bias, -1, frozenset())
    walk.constrain(node, 0, -1)
    return [(-1, origin)]


def product(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """MatMul, Gemm and the like: of a value and a weight, or of two values."""
    x, weight = operands[:2]
    name, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else ""
    shape = walk.shape(name)
    if weight is not None or not walk.is_weight(name):
        return _values(walk, node, operands)
    if shape is None or len(shape) != 2 or node.attributes.get("transA") or _batches(node):
        return fail(walk, node, operands)
    inner, outer = (-1, -2) if node.attributes.get("transB") else (-2, -1)
    if x is None:
        return columns(walk, i, node, {name: outer}, bias, shape[outer])
    if x[0] != -1:
        return [x]
    if not walk.shard(name, inner, x[1]):
        return []
    walk.replicate(node)
    return []


def _batches(node: Node) -> bool:
    return bool(node.attributes.get("transBatchA") or node.attributes.get("transBatchB"))


def _values(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Products of two values: sharded along a batch axis, or along the free axis of one of them."""
    if node.op_type not in ("MatMul", "FusedMatMul") or _batches(node) or not any(operands):
        return fail(walk, node, operands)
    a, b = operands[:2]
    kept = {0: -1 if node.attributes.get("transA") else -2, 1: -2 if node.attributes.get("transB") else -1}
    one = common_axis([a, b])
    if one is not None and one[0] < -2:
        for name, operand in zip(node.inputs, (a, b), strict=False):
            if operand is None and name in walk.producers:  # keys that all heads share are replicated
                walk.constrain(*walk.producers[name], one[0], "replicated")
        return [one]
    for side, operand in enumerate((a, b)):
        if operand is not None and operand[0] == kept[side] and operands[1 - side] is None:
            return [((-2, -1)[side], operand[1])]
    return fail(walk, node, operands)


def packed_product(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """MatMulNBits: packed weights [N, blocks, bytes], scales and zero points [N, blocks] or flat."""
    x, names = operands[0], [*node.inputs, *[""] * 6][:6]
    packed, scales, zeros, order, bias = names[1:]
    shapes = {n: walk.shape(n) or () for n in (packed, scales, zeros)}
    if not all(walk.is_weight(n) for n in (packed, scales)):
        return fail(walk, node, operands)
    if x is None:
        held = {n: -len(shapes[n]) for n in (packed, scales, zeros) if n and walk.is_weight(n)}
        begun = columns(walk, i, node, held, bias, node.attributes["N"])
        walk.found.shards |= {key(node): "out"} if begun and not order else {}
        return begun
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
    walk.found.shards[key(node)] = "in"
    walk.replicate(node)
    return []


def gather(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    data, indices = operands[:2]
    if indices is not None:
        return fail(walk, node, operands)
    if data is None:
        return _rows(walk, i, node)
    shape, places = walk.shape(node.inputs[0]), walk.shape(node.inputs[1])
    if shape is None or places is None:
        return fail(walk, node, operands)
    axis = node.attributes.get("axis", 0) % len(shape) - len(shape)
    if axis == data[0]:
        return fail(walk, node, operands, CONCATENATED if shape[axis] == 3 else "")
    return [data if data[0] > axis else (data[0] + 1 - len(places), data[1])]


def _rows(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """The embedding table, sharded by rows: each device returns zeros for rows that it does not hold."""
    table = walk.table(node)
    if table is None or not walk.may_begin(i):
        return []
    if table != walk.largest:
        walk.fail(frozenset({i}), f"{label(node)} reads it, and only the largest table is sharded")
    if table == walk.largest and walk.shard(table, 0, frozenset({i})):
        walk.replicate(node)
    return []


def experts(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """A mixture sharded by experts: each device computes a partial sum."""
    if any(operands):
        return fail(walk, node, operands)
    stacked = [n for n in node.inputs[2:] if n and walk.is_weight(n) and len(walk.shape(n) or ()) > 1]
    axes = {n: -len(walk.shape(n) or ()) for n in stacked}
    if stacked and walk.may_begin(i) and all(walk.shard(n, axis, frozenset({i})) for n, axis in axes.items()):
        walk.found.shards[key(node)] = "experts"
        walk.replicate(node)
    return []
