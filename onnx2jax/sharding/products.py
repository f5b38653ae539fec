"""How products are divided: by columns where nothing is divided yet, by rows behind that; tables, mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.graph import Node
from .shapes import Extent
from .walk import PACKED, Along, Walk, fail, key, one_of, reaches, said


def columns(
    walk: Walk, i: int, node: Node, weight: Mapping[str, int], bias: str, extent: Extent | None
) -> list[Along | None]:
    """A product that begins: the weights of operands by axis, and the extent that is divided."""
    origin = frozenset({i})
    if i in walk.refused:
        walk.packed.update(node.outputs if walk.refused[i] == PACKED else ())
        walk.whole(node)
        return []
    if not walk.divides(extent):
        walk.fail(origin, f"the {extent} columns of {said(node)} cannot be divided evenly over {walk.parts} devices")
        return []
    if not all(walk.divide(name, axis, origin) for name, axis in weight.items()):
        return []
    if bias and reaches(walk.facts.of(bias), -1):
        walk.divide(bias, -1, frozenset())
    walk.place(node, 0, -1)
    return [(-1, origin)]


def product(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """MatMul, Gemm and their kin: x by a weight, or two values."""
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
    if not walk.divide(name, inner, x[1]):
        return []
    walk.whole(node)
    return []


def _batches(node: Node) -> bool:
    return bool(node.attributes.get("transBatchA") or node.attributes.get("transBatchB"))


def _values(walk: Walk, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """Two values, each a stack of matrices: divided along the stack, or along what remains of one of them."""
    if node.op_type not in ("MatMul", "FusedMatMul") or _batches(node) or not any(operands):
        return fail(walk, node, operands)
    a, b = operands[:2]
    kept = {0: -1 if node.attributes.get("transA") else -2, 1: -2 if node.attributes.get("transB") else -1}
    one = one_of([a, b])
    if one is not None and one[0] < -2:
        for name, operand in zip(node.inputs, (a, b), strict=False):
            if operand is None and name in walk.makers:  # keys that all heads share: each device has them
                walk.place(*walk.makers[name], one[0], "whole")
        return [one]
    for side, operand in enumerate((a, b)):
        if operand is not None and operand[0] == kept[side] and operands[1 - side] is None:
            return [((-2, -1)[side], operand[1])]
    return fail(walk, node, operands)


def packed_product(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """MatMulNBits: bytes [N, blocks, size], scales and zero points by row and block, maybe flat."""
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
        why = "its columns are in an order of their own" if order else f"its {blocks} blocks are not"
        return fail(walk, node, [x], f"{said(node)} cannot be divided by rows over {walk.parts} devices: {why}")
    if not walk.divide(packed, 1, x[1]):
        return []
    for name in (scales, zeros):
        # Zero points share bytes: a device needs whole ones. Flat ones lie row by row.
        if len(shapes[name]) == 2 and walk.divides(shapes[name][1]) and shapes[packed][1] == shapes[scales][-1]:
            bits = node.attributes.get("bits", 4) if name == zeros else 8
            if name == scales or int(blocks) * bits == 8 * int(shapes[name][1]):
                walk.divide(name, 1, frozenset())
    walk.found.shards[key(node)] = "in"
    walk.whole(node)
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
        return fail(walk, node, operands, PACKED if shape[axis] == 3 else "")
    return [data if data[0] > axis else (data[0] + 1 - len(places), data[1])]


def _rows(walk: Walk, i: int, node: Node) -> Sequence[Along | None]:
    """Rows of the largest table, of words: each device has some, and gives zeros for the others."""
    table = walk.table(node)
    if table is None or not walk.may_begin(i):
        return []
    if table != walk.largest:
        walk.fail(frozenset({i}), f"{said(node)} reads it, which is not the largest of the tables")
    if table == walk.largest and walk.divide(table, 0, frozenset({i})):
        walk.whole(node)
    return []


def experts(walk: Walk, i: int, node: Node, operands: Sequence[Along | None]) -> Sequence[Along | None]:
    """A mixture: each device has some of the experts, and gives its part of the sum."""
    if any(operands):
        return fail(walk, node, operands)
    stacked = [n for n in node.inputs[2:] if n and walk.is_weight(n) and len(walk.shape(n) or ()) > 1]
    axes = {n: -len(walk.shape(n) or ()) for n in stacked}
    if stacked and walk.may_begin(i) and all(walk.divide(n, axis, frozenset({i})) for n, axis in axes.items()):
        walk.found.shards[key(node)] = "experts"
        walk.whole(node)
    return []
