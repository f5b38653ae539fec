"""Operators beside each other that XLA would merge, as if numbers were real: it computes

    (x + c) - c as x      (x * c) * c as x * (c * c)      y / (c / x) as (y * x) / c      (x / y) / z as x / (y * z)
    log(exp(x)) as x      sqrt(x * x) as abs(x)           log(x ** y) as y * log(abs(x))
    (x / y) ** 2 as x ** 2 / y ** 2

These round otherwise, or leave the range of the type: x + 1.5 * 2**23 - 1.5 * 2**23 rounds x to integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np

from .graph import Function, Graph, Node

_SHAPING: Final = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators through which XLA moves constants."""
_PASSING: Final = _SHAPING | {
    "Cast", "CastLike", "Clip", "Concat", "Dropout", "Max", "Mean", "Min", "Neg", "Pad", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceSum", "Slice", "Split", "Sum", "Where",
}  # fmt: skip
"""Operators that XLA removes for some attributes and operands, such as a maximum with -infinity."""
_NEUTRAL: Final = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}
"""The second operand, of sums and products either, for which XLA removes the operator."""
REWRITTEN: Final = {
    "Div": {"Div", "Mul", "Reciprocal"},
    "Log": {"Exp", "Pow", "Reciprocal", "Sqrt"},
    "Mul": {"Div"},
    "Pow": {"Div", "Exp", "Mul", "Pow"},
    "Reciprocal": {"Div", "Reciprocal"},
    "Sqrt": {"Exp", "Mul", "Pow"},
}
"""Operators -> those that compute an operand with which XLA rewrites them, whatever the constants."""


def merging(node: Node, graph: Graph, in_function: bool) -> Iterator[tuple[int, Literal["constant", "all"]]]:
    """The operands that such a neighbour computes: by position, whether XLA merges its constant or all of it.

    Args:
        node: of an operator with the trait ``merges``, or in REWRITTEN.
        graph: the graph around it.
        in_function: whether that is a function's body, whose inputs any operator may compute.
    """
    kind = node.operator.merges
    for i, name in enumerate(node.inputs):
        neighbour = _computed(name, graph, in_function)
        if _is_rewritten(node, i, neighbour):
            yield i, "all"
        elif kind and neighbour and (neighbour is True or _has_constant(neighbour, graph, kind)):
            yield i, "constant"


def _is_rewritten(node: Node, position: int, neighbour: Node | bool) -> bool:
    """Whether XLA rewrites a node together with what computes an operand."""
    if neighbour is True:
        return position == 1 and node.op_type == "Div"
    if not neighbour or neighbour.domain or neighbour.op_type not in REWRITTEN.get(node.op_type, ()):
        return False
    if node.op_type == "Mul":
        return len({*node.inputs}) == 1
    if neighbour.op_type == "Mul":
        shared = {*neighbour.inputs} & {*node.inputs}
        return bool(shared) if node.op_type == "Div" else len({*neighbour.inputs}) == 1
    return True


def _computed(name: str, graph: Graph, in_function: bool) -> Node | bool:
    """The node that computes a value, but for its shape; True if it may be any, False if it is none."""
    while (node := graph.producers.get(name)) is not None:
        if isinstance(node.target, Function):
            return True
        if node.domain or not (node.op_type in _PASSING or _is_neutral(node, graph)):
            return node
        inputs = node.inputs[node.op_type == "Where" :]  # not its condition
        name = next((n for n in inputs if n in graph.producers and not _is_constant(n, graph)), node.inputs[0])
    return in_function and name not in graph.initializers


def _is_neutral(node: Node, graph: Graph) -> bool:
    """Whether a node adds zeros or multiplies by ones."""
    neutral = _NEUTRAL.get(node.op_type)
    values = [v for n in node.inputs if isinstance(v := _value(n, graph), np.ndarray)]
    return neutral is not None and any(v.size == 1 and v.item() == neutral for v in values)


def _value(name: str, graph: Graph) -> Any:
    producer = graph.producers.get(name)
    if producer is None:
        return graph.initializers.get(name)
    return producer.attributes.get("value") if producer.op_type == "Constant" else None


def _is_constant(name: str, graph: Graph) -> bool:
    return graph.producers[name].op_type in ("Constant", "ConstantOfShape")


def _has_constant(node: Node, graph: Graph, kind: str) -> bool:
    """Whether an operator merges this kind, and an operand is a constant, or may be one outside of the graph."""
    for name in node.inputs if node.operator.merges == kind else ():
        while (producer := graph.producers.get(name)) is not None and producer.op_type in {*_SHAPING, "Cast"}:
            name = producer.inputs[0]
        if producer is None and all(name != v.name for v in graph.inputs):
            return True
        if producer is not None and producer.op_type in ("Constant", "ConstantOfShape"):
            return True
    return False
