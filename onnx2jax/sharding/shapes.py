"""What a graph says about extents without running it: enough to follow heads through Reshape and Transpose.

An extent is a number, or a name where it is not known: two extents of one name are equal. What no rule below knows has
no shape, and nothing is concluded from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..ir.graph import Graph, Node
from ..ops.registry import Operator
from ..proto.mapped import load

Extent = int | str
Shape = tuple[Extent, ...]

_SAME: Final = (
    "Abs BiasDropout BiasGelu Cast CastLike Ceil Celu Clip Cos Dropout Elu Erf Exp FastGelu Floor Gelu HardSigmoid "
    "HardSwish Identity IsNaN LeakyRelu Log Mish Neg Not QuickGelu Reciprocal Relu Round Selu Sigmoid Sign Sin "
    "Softplus Softsign Sqrt Swish Tanh ThresholdedRelu"
)
SAME: Final = frozenset(_SAME.split())
"""Operators that take each element of their first input by itself."""
_ALONG: Final = (
    "CumSum DequantizeLinear LayerNormalization LogSoftmax LpNormalization QuantizeLinear RMSNormalization "
    "RotaryEmbedding SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization Softmax Trilu"
)
ALONG: Final = frozenset(_ALONG.split())
"""Others whose result has the shape of their first input."""
_LARGEST: Final = 16
"""Numbers of a vector that may be a shape."""


@dataclass(frozen=True)
class Fact:
    """What is known of a value.

    Attributes:
        shape: its extents; None when even their number is unknown.
        numbers: the numbers in a vector of integers, or in a scalar.
        weights: for a value computed from weights alone, by weight: for each axis of the value the weight's own.
    """

    shape: Shape | None = None
    numbers: Shape | None = None
    weights: Mapping[str, tuple[int | None, ...]] | None = field(default=None)


NOTHING: Final = Fact()


class Facts(dict[str, Fact]):
    """Facts about the values of a graph, by name."""

    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self._unknown = 0
        for name, array in graph.initializers.items():
            small = array.dtype.kind == "i" and array.ndim <= 1 and array.size <= _LARGEST
            numbers = tuple(int(n) for n in np.ravel(load(array))) if small else None
            held = {name: tuple(range(array.ndim))} if name in weights else {}
            self[name] = Fact(tuple(array.shape), numbers, held)
        for value in graph.inputs:
            if value.name not in graph.initializers:
                self[value.name] = Fact(self._named(value.shape))
        for node in graph.nodes:
            self._node(graph, node)

    def of(self, name: str) -> Fact:
        return self.get(name, NOTHING)

    def fresh(self) -> str:
        """An extent of which nothing is known."""
        self._unknown += 1
        return f"?{self._unknown}"

    def _named(self, shape: Sequence[Any] | None) -> Shape | None:
        return None if shape is None else tuple(self.fresh() if n is None else n for n in shape)

    def _node(self, graph: Graph, node: Node) -> None:
        operands = [self.of(n) for n in node.inputs]
        rule = _RULES.get(node.op_type)
        if rule is None and is_elementwise(node):
            rule = _broadcast
        try:
            results = rule(self, node, operands) if rule and operands else []
        except (ArithmeticError, LookupError, TypeError, ValueError):  # its operator will refuse it, with a reason
            results = []
        for name, result in zip(node.outputs, [*results, *[NOTHING] * len(node.outputs)], strict=False):
            declared = graph.value_info[name].shape if name in graph.value_info else None
            if result.shape is None and declared is not None:
                result = Fact(self._named(declared), result.numbers, result.weights)
            self[name] = result

    def broadcast(self, shapes: Sequence[Shape | None]) -> Shape | None:
        """The shape of values that are broadcast against each other.

        A value of which nothing is known, beside one of several axes, is taken for a mask: of no more axes, and of
        no more extent.
        """
        known = [s for s in shapes if s is not None]
        if not known or (len(known) < len(shapes) and max(map(len, known)) < 2):
            return None
        rank = max(map(len, known))
        result: list[Extent] = []
        for i in range(rank):
            extents = {s[i - rank] for s in known if len(s) >= rank - i} - {1} or {1}
            numbers = [n for n in extents if isinstance(n, int)]
            result.append(extents.pop() if len(extents) == 1 else numbers[0] if numbers else self.fresh())
        return tuple(result)

    def reshaped(self, before: Shape | None, wanted: Shape | None, keep_zero: bool) -> Shape | None:
        """The shape that Reshape gives, -1 and 0 resolved as far as can be."""
        if wanted is None:
            return None
        copied = before if before is not None else ()
        after = [
            n if n != 0 or keep_zero else copied[i] if i < len(copied) else self.fresh() for i, n in enumerate(wanted)
        ]
        if -1 in after:
            others = [n for n in after if n != -1]
            after[after.index(-1)] = self.fresh() if before is None else _quotient(before, others) or self.fresh()
        return tuple(after)


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result follows from one of each operand, which are broadcast."""
    return node.op_type in SAME or (isinstance(node.target, Operator) and node.target.broadcasts)


def _quotient(whole: Sequence[Extent], parts: Sequence[Extent]) -> Extent | None:
    """The extent that parts lack to make up the whole; None where it has no name."""
    names = Counter(n for n in whole if isinstance(n, str))
    others = Counter(n for n in parts if isinstance(n, str))
    rest = list((names - others).elements())
    above, below = (math.prod(n for n in s if isinstance(n, int)) for s in (whole, parts))
    if others - names or below == 0 or above % below:
        return None
    if not rest:
        return above // below
    return rest[0] if len(rest) == 1 and above == below else None


def _broadcast(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    given = [o for o, name in zip(operands, node.inputs, strict=True) if name]
    if node.op_type in SAME:
        own = given[0].weights if all(o.weights is not None for o in given) else None
        numbers = given[0].numbers if node.op_type in ("Cast", "Identity") else None
        return [Fact(given[0].shape, numbers, own)]
    shape = facts.broadcast([o.shape for o in given])
    numbers = None
    calculated = _ARITHMETIC.get(node.op_type)
    if calculated and all(o.numbers is not None and all(isinstance(n, int) for n in o.numbers) for o in given):
        left, right = (np.array(o.numbers, np.int64) for o in given)
        if len(left) == len(right) and not (node.op_type == "Div" and not right.all()):
            numbers = tuple(int(n) for n in calculated(left, right))
    return [Fact(shape, numbers, _joined(shape, given))]


def _joined(shape: Shape | None, operands: Sequence[Fact]) -> Mapping[str, tuple[int | None, ...]] | None:
    """The weights in what is computed elementwise from weights."""
    if shape is None or any(o.weights is None for o in operands):
        return None
    found: dict[str, tuple[int | None, ...]] = {}
    for o in operands:
        for name, axes in (o.weights or {}).items():
            found[name] = (*[None] * (len(shape) - len(axes)), *axes)
    return found


_ARITHMETIC: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.floor_divide,
}


def _like_first(_: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    first = operands[0]
    weights = None
    if node.op_type == "DequantizeLinear" and all(o.weights is not None for o in operands) and first.shape is not None:
        weights = dict(first.weights or {})
        axis = node.attributes.get("axis", 1) % max(1, len(first.shape))
        for o in operands[1:]:
            for name, own in (o.weights or {}).items():
                aligned = own if len(own) == len(first.shape) else tuple(
                    0 if i == axis and len(own) == 1 else None for i in range(len(first.shape))
                )  # fmt: skip
                weights[name] = aligned
    return [Fact(first.shape, None, weights)]


def _shape(_: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    shape = operands[0].shape
    if shape is None:
        return []
    numbers = shape[slice(node.attributes.get("start"), node.attributes.get("end"))]
    return [Fact((len(numbers),), numbers)]


def _gather(_: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    data, indices = operands[:2]
    if data.shape is None or indices.shape is None or not data.shape:
        return []
    axis = node.attributes.get("axis", 0) % len(data.shape)
    numbers = None
    if data.numbers is not None and indices.numbers is not None:
        places = [i for i in indices.numbers if isinstance(i, int) and -len(data.numbers) <= i < len(data.numbers)]
        if len(places) == len(indices.numbers):
            numbers = tuple(data.numbers[i] for i in places)
    return [Fact((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), numbers)]


def _concat(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    shapes = [o.shape for o in operands]
    if any(s is None or len(s) != len(shapes[0] or ()) for s in shapes) or not shapes[0]:
        return []
    axis = node.attributes.get("axis", 0) % len(shapes[0])
    extents = [s[axis] for s in shapes if s is not None]
    known = [n for n in extents if isinstance(n, int)]
    joined: Extent = sum(known) if len(known) == len(extents) else facts.fresh()
    shape = tuple(joined if i == axis else n for i, n in enumerate(shapes[0]))
    whole = all(o.numbers is not None for o in operands)
    return [Fact(shape, tuple(n for o in operands for n in o.numbers or ()) if whole else None)]


def axes_of(node: Node, operands: Sequence[Fact]) -> tuple[int, ...] | None:
    """The axes of Squeeze or Unsqueeze, an attribute or an operand; None where they are not known."""
    if "axes" in node.attributes:
        return tuple(node.attributes["axes"])
    numbers = operands[1].numbers if len(operands) > 1 else None
    return None if numbers is None else tuple(int(n) for n in numbers)


def _unsqueeze(_: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    data, axes = operands[0], axes_of(node, operands)
    if data.shape is None or axes is None:
        return []
    rank, rest = len(data.shape) + len(axes), iter(data.shape)
    places = {a % rank for a in axes}
    return [Fact(tuple(1 if i in places else next(rest) for i in range(rank)), data.numbers)]


def _squeeze(_: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    data, axes = operands[0], axes_of(node, operands)
    if data.shape is None:
        return []
    rank = len(data.shape)
    places = {i for i, n in enumerate(data.shape) if n == 1} if axes is None else {a % rank for a in axes}
    return [Fact(tuple(n for i, n in enumerate(data.shape) if i not in places), data.numbers)]


def _slice(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    data = operands[0]
    if data.shape is None:
        return []
    ends = [operands[i].numbers if len(operands) > i else None for i in range(1, 5)]
    starts, stops = (node.attributes.get(n, ends[i]) for i, n in enumerate(("starts", "ends")))
    axes = node.attributes.get("axes", ends[2]) or (tuple(range(len(starts))) if starts is not None else None)
    steps = ends[3] or (1,) * len(axes or ())
    if axes is None:
        return [Fact(tuple(facts.fresh() for _ in data.shape))]
    shape, numbers = list(data.shape), None
    for i, axis in enumerate(axes):
        bounds = (starts[i], stops[i], steps[i]) if starts and stops else ("", "", "")
        extent = shape[int(axis)]
        whole = all(isinstance(n, int) for n in bounds)
        if whole and data.numbers is not None:
            numbers = data.numbers[slice(*bounds)]
        known = whole and isinstance(extent, int)
        shape[int(axis)] = len(range(extent)[slice(*bounds)]) if known and isinstance(extent, int) else facts.fresh()
    return [Fact(tuple(shape), numbers)]


def _split(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    data = operands[0]
    if not data.shape:
        return []
    axis, count = node.attributes.get("axis", 0) % len(data.shape), len(node.outputs)
    sizes = node.attributes.get("split") or (operands[1].numbers if len(operands) > 1 else None)
    extent = data.shape[axis]
    if sizes is None and isinstance(extent, int):
        each = -(-extent // count)
        sizes = [min(each, extent - i * each) for i in range(count)]
    sizes = sizes or [facts.fresh() for _ in range(count)]
    return [Fact((*data.shape[:axis], size, *data.shape[axis + 1 :])) for size in sizes]


def _reshape(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    wanted = node.attributes.get("shape") or (operands[1].numbers if len(operands) > 1 else None)
    shape = facts.reshaped(operands[0].shape, wanted, bool(node.attributes.get("allowzero")))
    return [Fact(shape, operands[0].numbers)]


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """The axes of a Transpose."""
    return tuple(node.attributes.get("perm") or range(rank)[::-1])


def _transpose(_: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    data = operands[0]
    if data.shape is None:
        return []
    perm = permutation(node, len(data.shape))
    weights = None if data.weights is None else {n: tuple(a[i] for i in perm) for n, a in data.weights.items()}
    return [Fact(tuple(data.shape[i] for i in perm), None, weights)]


def _expand(facts: Facts, _: Node, operands: Sequence[Fact]) -> list[Fact]:
    return [Fact(facts.broadcast([operands[0].shape, operands[1].numbers]))]


def _tile(facts: Facts, _: Node, operands: Sequence[Fact]) -> list[Fact]:
    shape, repeats = operands[0].shape, operands[1].numbers
    if shape is None or repeats is None:
        return []

    def times(n: Extent, by: Extent) -> Extent:
        if by == 1:
            return n
        return n * by if isinstance(n, int) and isinstance(by, int) else facts.fresh()

    return [Fact(tuple(times(n, by) for n, by in zip(shape, repeats, strict=False)))]


def _product(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    a, b = operands[0].shape, operands[1].shape
    if a is None or b is None or not a or not b:
        return []
    if node.op_type.endswith("NBits"):
        return [Fact((*a[:-1], node.attributes["N"]))]
    a, b = (
        (*s[:-2], s[-1], s[-2]) if node.attributes.get(f"trans{n}") and len(s) > 1 else s
        for s, n in ((a, "A"), (b, "B"))
    )
    if len(a) == 1 or len(b) == 1:
        return []
    batch = facts.broadcast([a[:-2], b[:-2]])
    return [] if batch is None else [Fact((*batch, a[-2], b[-1]))]


def _attention(facts: Facts, node: Node, operands: Sequence[Fact]) -> list[Fact]:
    query, value = operands[0].shape, (operands[2].shape if len(operands) > 2 else None)
    if query is None:
        return []
    if node.op_type == "Attention" and node.domain:
        width = operands[1].shape
        sizes = node.attributes.get("qkv_hidden_sizes")
        last: Any = sizes[2] if sizes else width[1] // 3 if width and isinstance(width[1], int) else facts.fresh()
        return [Fact((*query[:-1], last))]
    heads, of_values = node.attributes.get("num_heads", 1), node.attributes.get("kv_num_heads", 1)
    if len(query) == 3 and node.op_type == "GroupQueryAttention":
        packed = operands[1] is NOTHING
        size = query[2] // (heads + 2 * of_values) * heads if packed and isinstance(query[2], int) else query[2]
        return [Fact((*query[:2], size))]
    if len(query) == 4 and value is not None:
        return [Fact((*query[:3], value[-1]))]
    return [Fact(query)] if len(query) == 3 else []


_RULES: Final[Mapping[str, Callable[[Facts, Node, Sequence[Fact]], list[Fact]]]] = {
    **dict.fromkeys(ALONG, _like_first),
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "GemmFastGelu", "MatMulNBits"), _product),
    **dict.fromkeys(("Attention", "GroupQueryAttention", "MultiHeadAttention"), _attention),
    "MoE": _like_first,
    "QMoE": _like_first,
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
