"""Symbolic shapes of a graph's values, from two abstract evaluations; and the weights that a value consists of.

The graph is evaluated (by ``Evaluate``, which the caller passes) with two sets of extents for the dimension variables.
An extent that is equal in both is a constant; others become symbols, equal where both numbers are. A value that cannot
be evaluated has no shape, and nothing is inferred from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import isqrt
from typing import Any, Final

import numpy as np

from ..ir.graph import Graph, Node
from ..ops.registry import Operator

Extent = int | str
Shape = tuple[Extent, ...]
Axes = tuple[int | None, ...]

_SAME: Final = (
    "Abs BiasDropout BiasGelu Cast CastLike Ceil Celu Clip Cos Dropout Elu Erf Exp FastGelu Floor Gelu HardSigmoid "
    "HardSwish Identity IsNaN LeakyRelu Log Mish Neg Not QuickGelu Reciprocal Relu Round Selu Sigmoid Sign Sin "
    "Softplus Softsign Sqrt Swish Tanh ThresholdedRelu"
)
SAME: Final = frozenset(_SAME.split())
"""Operators that map each element of their first input separately."""
_ALONG: Final = (
    "CumSum DequantizeLinear LayerNormalization LogSoftmax LpNormalization QuantizeLinear RMSNormalization "
    "RotaryEmbedding SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization Softmax Trilu"
)
ALONG: Final = frozenset(_ALONG.split())
"""Other operators whose result has the shape of their first input."""


class Extents(dict[str, int]):
    """Extents of dimension variables, distinct primes assigned on first use, so that none divides another."""

    def __init__(self, first: int) -> None:
        """Every second prime from index ``first``, 0 or 1; small primes do not exceed position tables."""
        super().__init__()
        self._primes = islice(_primes(), first, None, 2)

    def __missing__(self, name: str) -> int:
        self[name] = next(self._primes)
        return self[name]

    def shape(self, name: str, declared: Sequence[int | str | None]) -> tuple[int, ...]:
        """A declared shape with extents substituted; unnamed dimensions are keyed by the value's ``name``."""
        return tuple(d if isinstance(d, int) else self[d or f"{name}, axis {i}"] for i, d in enumerate(declared))


def _primes() -> Iterator[int]:
    return (n for n in count(11, 2) if all(n % k for k in range(3, isqrt(n) + 1, 2)))


Evaluate = Callable[[Extents], Mapping[str, Any]]
"""Evaluates a graph abstractly: name -> NumPy array if the value is known, else anything with a shape."""


@dataclass(frozen=True)
class Fact:
    """Static facts about a value.

    Attributes:
        shape: its extents; None if its rank is unknown.
        weights: of a value computed from weights only: weight -> for each axis of the value, that of the weight.
        numbers: its elements, if they are constant integers.
    """

    shape: Shape | None = None
    weights: Mapping[str, Axes] | None = None
    numbers: tuple[int, ...] | None = None


NOTHING: Final = Fact()


class Facts(dict[str, Fact]):
    """Facts about the values of a graph, by name."""

    def __init__(self, graph: Graph, weights: Mapping[str, Any], evaluate: Evaluate) -> None:
        super().__init__()
        extents = Extents(0), Extents(1)
        first, second = map(evaluate, extents)
        self._names = {(extents[0][name], extents[1][name]): name for name in reversed(extents[0])}
        for name in first.keys() & second.keys():
            self[name] = Fact(self._shape(first[name], second[name]), None, _numbers(first[name], second[name]))
        for name, array in graph.initializers.items():
            own = {name: tuple(range(array.ndim))} if name in weights else {}
            self[name] = Fact(tuple(array.shape), own, self.of(name).numbers)
        for node in graph.nodes:
            found, operands = [self.of(n) for n in node.outputs], [self.of(n) for n in node.inputs if n]
            if operands and (held := _weights(node, operands, found[0].shape)) is not None:
                self[node.outputs[0]] = Fact(found[0].shape, held, found[0].numbers)

    def of(self, name: str) -> Fact:
        return self.get(name, NOTHING)

    def _shape(self, first: Any, second: Any) -> Shape | None:
        if len(first.shape) != len(second.shape):
            return None
        return tuple(a if a == b else self._name(a, b) for a, b in zip(first.shape, second.shape, strict=True))

    def _name(self, first: int, second: int) -> str:
        return self._names.setdefault((first, second), f"?{len(self._names)}")


def _numbers(first: Any, second: Any) -> tuple[int, ...] | None:
    """The elements of two integer vectors or scalars, if they are constant and equal."""
    if not all(type(v) is np.ndarray and v.ndim <= 1 and v.dtype.kind == "i" for v in (first, second)):
        return None
    return tuple(map(int, first.ravel())) if np.array_equal(first, second) else None


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result depends on one element of each broadcast operand."""
    return node.op_type in SAME or (isinstance(node.target, Operator) and node.target.broadcasts)


def _weights(node: Node, operands: Sequence[Fact], shape: Shape | None) -> Mapping[str, Axes] | None:
    """The weights that the first output of a node consists of; None if it also depends on other values."""
    if shape is None or any(o.weights is None for o in operands):
        return None
    own = dict(operands[0].weights or {})
    if node.op_type == "Transpose":
        return {n: tuple(axes[i] for i in permutation(node, len(shape))) for n, axes in own.items()}
    if node.op_type in SAME:
        return own
    if node.op_type == "DequantizeLinear":
        axis = node.attributes.get("axis", 1) % max(1, len(shape))
        for operand in operands[1:]:
            for name, axes in (operand.weights or {}).items():
                per_axis = tuple(0 if i == axis and len(axes) == 1 else None for i in range(len(shape)))
                own[name] = axes if len(axes) == len(shape) else per_axis
        return own
    if not is_elementwise(node):
        return None
    return {n: (*[None] * (len(shape) - len(a)), *a) for o in operands for n, a in (o.weights or {}).items()}


def axes_of(node: Node, operands: Sequence[Fact]) -> tuple[int, ...] | None:
    """The axes of Squeeze or Unsqueeze, from the attribute or the operand; None if unknown."""
    if "axes" in node.attributes:
        return tuple(node.attributes["axes"])
    return operands[1].numbers if len(operands) > 1 else None


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """The axes of a Transpose."""
    return tuple(node.attributes.get("perm") or range(rank)[::-1])
