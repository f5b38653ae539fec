"""Symbolic shapes of a graph's values, from two abstract evaluations; and the weights that a value consists of.

The graph is evaluated with two sets of extents for the dimension variables. An extent that is equal in both is a
constant; others become symbols, equal where both numbers are. A value that cannot be evaluated has no shape, and
nothing is inferred from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..eval.abstract import SAME, Extents, abstract_values, is_elementwise
from ..ir.graph import Graph, Node

Extent = int | str
Shape = tuple[Extent, ...]
Axes = tuple[int | None, ...]


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

    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        super().__init__()
        extents = Extents(0), Extents(1)
        first, second = (abstract_values(graph, e) for e in extents)
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


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """The axes of a Transpose."""
    return tuple(node.attributes.get("perm") or range(rank)[::-1])
