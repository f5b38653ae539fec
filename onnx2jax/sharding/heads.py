"""Propagates a sharded axis through Reshape, Transpose, caches, normalizations and attention (sharded by heads)."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import Node
from .propagation import CONCATENATED, Along, Extent, Walk, begin, common_axis, fail, label, permutation


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
