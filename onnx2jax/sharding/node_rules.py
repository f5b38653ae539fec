"""How nodes pass on a sharded axis, by operator.

Matrix products are sharded by columns if the operand is not sharded, else by rows; tables and mixtures, too. Reshape,
Transpose, caches, normalizations and attention, which is sharded by heads, pass an axis on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..ir.graph import Node
from .propagation import (
    CONCATENATED,
    Along,
    Begin,
    Extent,
    Rule,
    Walk,
    begin,
    common_axis,
    fail,
    has_axis,
    key,
    label,
    moving,
    nothing,
    permutation,
)


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


def heads_of(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """[..., 3 * heads * size] -> [..., 3, heads, size]: each device slices its heads from a replicated value."""
    before, after = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    if node.inputs[0] in walk.concatenated and after:
        if len(after) > 2 and after[-3] == 3:
            return begin(walk, i, node, -2) if walk.divides(after[-2]) else []
        if before and before[-1] == after[-1]:
            walk.concatenated.update(node.outputs)
    return []


def parts_of(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """Split of concatenated queries, keys and values."""
    sizes = [s[-1] if (s := walk.shape(n)) else None for n in node.outputs]
    packed = node.inputs[0] in walk.concatenated and _axis(walk, node) == -1 and all(map(walk.divides, sizes))
    return begin(walk, i, node, -1) if packed else []


def reshape(walk: Walk, node: Node, axis: int) -> int | str:
    """Reshape, Squeeze and Unsqueeze."""
    before, after = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    if before is None or after is None:
        return f"the shapes of {label(node)} are unknown at compile time"
    if (place := moved(before, after, len(before) + axis, walk.parts)) is not None:
        return place - len(after)
    if len(after) > 2 and after[-3] == 3:
        return CONCATENATED
    return f"{walk.parts} devices divide no axis after {label(node)}: {list(before)} becomes {list(after)}"


def moved(before: Sequence[Extent], after: Sequence[Extent], axis: int, parts: int) -> int | None:
    """The axis of a Reshape's result that is sharded when ``axis`` of its operand is; None if there is none.

    >>> moved(("batch", "new", 768), ("batch", "new", 12, 64), 2, 4)
    2
    >>> moved(("batch", "new", 12, 64), ("batch", "new", 768), 2, 4)
    2
    >>> moved(("batch", "new", 768), ("batch", "new", 3, 4, 64), 2, 4)
    """
    short = min(len(before), len(after))
    front = next((i for i in range(short) if before[i] != after[i]), short)
    if axis < front:
        return axis
    back = next((i for i in range(short - front) if before[-1 - i] != after[-1 - i]), short - front)
    if axis >= len(before) - back:
        return axis - len(before) + len(after)
    between = [i for i in range(front, len(after) - back) if after[i] != 1]
    if not between or any(n != 1 for n in before[front:axis]):
        return None
    extent = after[between[0]]
    return between[0] if len(between) == 1 or (isinstance(extent, int) and extent % parts == 0) else None


def transpose(walk: Walk, node: Node, axis: int) -> int | str:
    rank = len(node.attributes.get("perm") or walk.shape(node.inputs[0]) or ())
    return permutation(node, rank).index(axis + rank) - rank if rank else ""


def concatenated(walk: Walk, node: Node, axis: int) -> int | str:
    """Concat and cache updates, along another axis than the sharded one."""
    along = _axis(walk, node, -2 if node.op_type == "TensorScatter" else 0)
    if along in (axis, None):
        return ""
    for name in node.inputs if node.op_type == "Concat" else node.inputs[:1]:
        walk.cache(name, axis)
    return axis


def split(walk: Walk, node: Node, axis: int) -> int | str:
    """Split, along another axis than the sharded one."""
    along = _axis(walk, node)
    return axis if along not in (axis, None) else CONCATENATED if along else ""


def sliced(walk: Walk, node: Node, axis: int) -> int | str:
    """Slice, Expand and Tile, where they keep the extent of the sharded axis."""
    before, after = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    return axis if before and after and before[axis] == after[axis] else ""


def gather(walk: Walk, node: Node, axis: int) -> int | str:
    """Gather, along another axis than the sharded one."""
    shape, places, along = walk.shape(node.inputs[0]), walk.shape(node.inputs[1]), _axis(walk, node)
    if shape is None or places is None or along is None or walk.along.get(node.inputs[1]):
        return ""
    if along == axis:
        return CONCATENATED if shape[axis] == 3 else ""
    return axis if axis > along else axis + 1 - len(places)


def normalized(walk: Walk, node: Node, axis: int) -> int | str:
    """Softmax and normalizations, over axes behind the sharded one."""
    first = _axis(walk, node, 1 if node.op_type.endswith("Softmax") and node.opset < 13 else -1)
    return axis if first is not None and axis < first else ""


def rotated(walk: Walk, node: Node, axis: int) -> int | str:
    """RotaryEmbedding, sharded by heads: part of the last axis of three, or the second axis of four."""
    return axis if axis == {3: -1, 4: -3}.get(len(walk.shape(node.inputs[0]) or ())) else ""


def _axis(walk: Walk, node: Node, default: int = 0) -> int | None:
    """The attribute ``axis``, counted from the last; None if the rank is unknown."""
    axis = node.attributes.get("axis", default)
    shape = walk.shape(node.inputs[0]) or walk.shape(node.outputs[0])
    return axis if axis < 0 else axis - len(shape) if shape else None


def packed_attention(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """Attention of concatenated queries, keys and values: each device computes all heads, and slices its own."""
    return begin(walk, i, node, -1) if _is_packed(node) and all(map(walk.divides, _head_counts(node))) else []


def attention(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Attention operators, sharded by heads."""
    if _is_packed(node) or any(operands[3:]):
        return fail(walk, node, operands, CONCATENATED if _is_packed(node) else "")
    counts = _head_counts(node)
    if not all(map(walk.divides, counts)):
        why = f"{walk.parts} devices cannot divide the {' and '.join(map(str, counts))} heads of {label(node)} evenly"
        return fail(walk, node, operands, why)
    one = common_axis(operands[:3]) if all(operands[:3]) else None
    if one is None or one[0] != {3: -1, 4: -3}.get(len(walk.shape(node.inputs[0]) or ())):
        return fail(walk, node, operands)
    for name in (node.inputs[p] for p in _PASTS[_kind(node)] if p < len(node.inputs)):
        walk.cache(name, -3)
    return [one, *[(-3, one[1])] * 2]


_PASTS = {"ONNX": (4, 5), "GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}
"""The positions of the caches among the operands."""


def _kind(node: Node) -> str:
    return node.op_type if node.domain or node.op_type != "Attention" else "ONNX"


def _is_packed(node: Node) -> bool:
    """Whether queries, keys and values are one operand."""
    kind = _kind(node)
    return kind == "Attention" or (kind != "ONNX" and (len(node.inputs) < 3 or not node.inputs[1]))


def _head_counts(node: Node) -> list[int]:
    names = ("q_num_heads" if _kind(node) == "ONNX" else "num_heads", "kv_num_heads")
    return [node.attributes[n] for n in names if n in node.attributes]


PRODUCTS: Final = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "GemmFastGelu")
ATTENTION: Final = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
_NORMALIZED: Final = "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"
BEGINS: Final[Mapping[str, Begin]] = {
    **dict.fromkeys(PRODUCTS, begin_product),
    **dict.fromkeys(ATTENTION, packed_attention),
    **dict.fromkeys(("MoE", "QMoE"), experts),
    "Gather": rows,
    "MatMulNBits": begin_packed_product,
    "Reshape": heads_of,
    "Split": parts_of,
}
"""Operator -> where a sharding starts, at nodes whose operands are replicated."""
RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(ATTENTION, attention),
    **dict.fromkeys(_NORMALIZED, moving(normalized)),
    **dict.fromkeys(("Concat", "ScatterElements", "TensorScatter"), moving(concatenated)),
    **dict.fromkeys(("Slice", "Expand", "Tile"), moving(sliced)),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), moving(reshape)),
    "Gather": moving(gather),
    "MatMulNBits": packed_product,
    "RotaryEmbedding": moving(rotated),
    "Shape": nothing,
    "Split": moving(split),
    "Transpose": moving(transpose),
}
"""Operator -> how a sharded axis of its operands is passed on."""
