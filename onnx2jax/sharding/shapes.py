"""Symbolic shapes of a graph's values, and the weights that a value consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..eval.abstract import SAME, is_elementwise
from ..eval.inferred import symbolic_types
from ..ir.graph import Graph, Node

Extent = int | str
Shape = tuple[Extent, ...]
Axes = tuple[int | None, ...]


class Fact(NamedTuple):
    """Static facts about a value."""

    shape: Shape | None = None
    """Its extents; None if its rank is unknown."""
    weights: Mapping[str, Axes] | None = None
    """Of a value computed from weights only: weight -> for each axis of the value, that of the weight."""


NOTHING: Final = Fact()


class Facts(dict[str, Fact]):
    """Facts about the values of a graph, by name."""

    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        kinds: Any = symbolic_types(graph)
        super().__init__({name: Fact(kind.shape) for name, kind in kinds.items()})
        for name, array in graph.initializers.items():
            self[name] = Fact(array.shape, {name: tuple(range(array.ndim))} if name in weights else {})
        for node in graph.nodes:
            results, operands = [self.of(n) for n in node.outputs], [self.of(n) for n in node.inputs if n]
            if operands and (axes := _weights(node, operands, results[0].shape)) is not None:
                self[node.outputs[0]] = Fact(results[0].shape, axes)

    def of(self, name: str) -> Fact:
        return self.get(name, NOTHING)


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
