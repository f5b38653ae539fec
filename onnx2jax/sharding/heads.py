"""Propagates a sharded axis through Reshape, Transpose, caches, normalizations and attention (sharded by heads)."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import Node
from .shapes import Extent, axes_of, permutation
from .walk import CONCATENATED, Along, Walk, begin, common_axis, fail, label


def reshape(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    before, after = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    x = operands[0]
    if x is None:
        # [..., 3 * heads * size] -> [..., 3, heads, size]: each device slices its heads from a replicated value.
        if node.inputs[0] in walk.concatenated and after and len(after) > 2 and after[-3] == 3 and walk.may_begin(i):
            return begin(walk, i, node, -2, after[-2])
        if node.inputs[0] in walk.concatenated and before and after and before[-1] == after[-1]:
            walk.concatenated.update(node.outputs)
        return []
    if before is None or after is None:
        return fail(walk, node, operands, f"the shapes of {label(node)} are unknown at compile time")
    axis = moved(before, after, len(before) + x[0], walk.parts)
    if axis is None:
        heads = f"{walk.parts} devices divide no axis after {label(node)}: {list(before)} becomes {list(after)}"
        return fail(walk, node, operands, CONCATENATED if len(after) > 2 and after[-3] == 3 else heads)
    return [(axis - len(after), x[1])]


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


def transpose(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    x = operands[0]
    shape = walk.shape(node.inputs[0])
    rank = len(node.attributes.get("perm") or shape or ())
    if x is None or not rank:
        return fail(walk, node, operands)
    return [(permutation(node, rank).index(x[0] + rank) - rank, x[1])]


def squeeze(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Squeeze and Unsqueeze: the sharded axis moves by the removed or inserted ones."""
    x, shape, after = operands[0], walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    if x is None or shape is None or after is None:
        return fail(walk, node, operands)
    axes = axes_of(node, [walk.facts.of(n) for n in node.inputs])
    wide, narrow = (after, shape) if node.op_type == "Unsqueeze" else (shape, after)
    ones = {a % len(wide) for a in axes} if axes is not None else {i for i, n in enumerate(wide) if n == 1}
    kept = [i for i in range(len(wide)) if i not in ones]
    if node.op_type == "Unsqueeze":
        return [(kept[len(narrow) + x[0]] - len(wide), x[1])]
    return [(kept.index(len(wide) + x[0]) - len(narrow), x[1])]


def concatenated(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Concat and cache updates, along another axis than the sharded one."""
    one = common_axis(operands)
    if one is None:
        return fail(walk, node, operands)
    shapes = [s for n in node.inputs if (s := walk.shape(n)) is not None]
    along = node.attributes.get("axis", -2 if node.op_type == "TensorScatter" else 0)
    if along >= 0:
        along = along - len(shapes[0]) if shapes else one[0]
    if along == one[0]:
        return fail(walk, node, operands)
    for name in node.inputs if node.op_type == "Concat" else node.inputs[:1]:
        walk.cache(name, one[0])
    return [one]


def split(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Split, along another axis than the sharded one, or of concatenated queries, keys and values."""
    x, shape = operands[0], walk.shape(node.inputs[0])
    axis = node.attributes.get("axis", 0)
    axis = axis - len(shape) if axis >= 0 and shape else axis
    if x is None:
        sizes = [s[axis] if (s := walk.shape(n)) else None for n in node.outputs]
        packed = node.inputs[0] in walk.concatenated and axis == -1 and all(map(walk.divides, sizes))
        return begin(walk, i, node, -1, walk.parts) if packed and walk.may_begin(i) else []
    if axis >= 0:
        return fail(walk, node, operands)
    return fail(walk, node, operands, CONCATENATED) if axis == x[0] else [x] * len(node.outputs)


def sliced(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Slice, Expand and Tile, where they keep the extent of the sharded axis."""
    x, before, after = operands[0], walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    if x is None or before is None or after is None or before[x[0]] != after[x[0]]:
        return fail(walk, node, operands)
    return [x]


def normalized(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Softmax and normalizations, over axes behind the sharded one."""
    x, shape = operands[0], walk.shape(node.inputs[0])
    axis = node.attributes.get("axis", 1 if node.op_type.endswith("Softmax") and node.opset < 13 else -1)
    axis = axis - len(shape) if axis >= 0 and shape else axis
    if x is None or axis >= 0 or x[0] >= axis or any(operands[1:]):
        return fail(walk, node, operands)
    return [x]


def rotated(walk: Walk, _: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """RotaryEmbedding, sharded by heads: part of the last axis of three, or the second axis of four."""
    x, shape = operands[0], walk.shape(node.inputs[0])
    if x is None or shape is None or x[0] != {3: -1, 4: -3}.get(len(shape)):
        return fail(walk, node, operands)
    return [x]


def attention(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Attention operators, sharded by heads."""
    kind = node.op_type if node.domain or node.op_type != "Attention" else "ONNX"
    pasts = {"ONNX": (4, 5), "GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7), "Attention": (4,)}[kind]
    names = ("q_num_heads", "kv_num_heads") if kind == "ONNX" else ("num_heads", "kv_num_heads")
    counts = [node.attributes[n] for n in names if n in node.attributes]
    three = operands[:3]
    packed = kind == "Attention" or (kind != "ONNX" and (len(node.inputs) < 3 or not node.inputs[1]))
    if any(operands[3:]) or (packed and any(operands)):
        return fail(walk, node, operands, CONCATENATED if packed else "")
    if not packed and not any(three):
        return []
    if not all(map(walk.divides, counts)):
        why = f"{walk.parts} devices cannot divide the {' and '.join(map(str, counts))} heads of {label(node)} evenly"
        return fail(walk, node, operands, why)
    rank = len(walk.shape(node.inputs[0]) or ())
    if packed:  # each device computes all heads, and slices its own
        return begin(walk, i, node, -1, walk.parts)[:1] if walk.may_begin(i) else []
    one = common_axis(three) if all(three) else None
    if one is None or one[0] != {3: -1, 4: -3}.get(rank):
        return fail(walk, node, operands)
    walk.constrain(node, 0, one[0])
    for name in (node.inputs[p] for p in pasts if p < len(node.inputs)):
        walk.cache(name, -3)
    for output in range(1, min(3, len(node.outputs))):
        walk.constrain(node, output, -3)
    return [one, *[(-3, one[1])] * 2]
