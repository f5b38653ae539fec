"""Operators with constants beside each other, which XLA would merge, and compute

    (x + c) - c as x        (x * c) * c as x * (c * c)        y / (c / x) as (y * x) / c

These round otherwise, or leave the range of the type: x + 1.5 * 2**23 - 1.5 * 2**23 rounds x to integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from ..ops.registry import Operator
from .graph import Function, Graph, Node

_SHAPING: Final = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators through which XLA moves constants."""


def merging(node: Node, graph: Graph, in_function: bool) -> Iterator[tuple[int, Literal["constant", "quotient"]]]:
    """The operands that such a neighbour computes: by position, what of it XLA would merge with the node's.

    Args:
        node: one of a binary operator with the trait ``merges``.
        graph: the graph around it.
        in_function: whether that is a function's body, whose inputs any operator may compute.
    """
    for i, name in enumerate(node.inputs):
        neighbour = _computed(name, graph, in_function)
        divides = i == 1 and node.op_type == "Div"
        if divides and (neighbour is True or (neighbour and neighbour.op_type == "Div")):
            yield i, "quotient"
        elif neighbour is True or (neighbour and _kind(neighbour) == _kind(node) and _has_constant(neighbour, graph)):
            yield i, "constant"


def _kind(node: Node) -> str:
    return node.target.merges if isinstance(node.target, Operator) else ""


def _computed(name: str, graph: Graph, in_function: bool) -> Node | bool:
    """The node that computes a value, but for its shape; True if it may be any, False if it is none."""
    while (node := graph.producers.get(name)) is not None:
        if isinstance(node.target, Function):
            return True
        if node.op_type not in _SHAPING or node.domain:
            return node
        name = node.inputs[0]
    return in_function and name not in graph.initializers


def _has_constant(node: Node, graph: Graph) -> bool:
    """Whether an operand is a constant, or may be one outside of the graph."""
    for name in node.inputs:
        while (producer := graph.producers.get(name)) is not None and producer.op_type in {*_SHAPING, "Cast"}:
            name = producer.inputs[0]
        if producer is None and all(name != v.name for v in graph.inputs):
            return True
        if producer is not None and producer.op_type in ("Constant", "ConstantOfShape"):
            return True
    return False
