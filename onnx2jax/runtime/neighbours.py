"""Keeps XLA from merging the constants of neighbouring operators, which would compute

    (x + c) - c as x        (x * c) * c as x * (c * c)        y / (c / x) as (y * x) / c

and round otherwise, or leave the range of the type: x + 1.5 * 2**23 - 1.5 * 2**23 rounds x to integers. A barrier
around what the first operator computes keeps the second one apart, on CPUs inside the same fused loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jax import lax

from .. import compat
from ..ir.graph import Function, Graph, Node
from ..ops.arrays import is_known
from ..ops.cast import is_float
from ..ops.registry import Operator

_SHAPING: Final = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators through which XLA moves constants."""


def apart(node: Node, values: Sequence[Any], graph: Graph, in_function: bool) -> list[Any]:
    """The operands of a node, behind a barrier where XLA would merge a constant with a neighbour's.

    Args:
        node: one of an operator with the trait ``merges``.
        values: its operands, two.
        graph: the graph around it.
        in_function: whether that is a function's body, whose inputs any operator may compute.
    """
    found = [*values]
    for i, (name, value) in enumerate(zip(node.inputs, values, strict=True)):
        by_constant = compat.merges_constants() and _is_uniform(values[1 - i])
        divisor = i == 1 and node.op_type == "Div"
        if not is_known(value) and is_float(value.dtype) and (by_constant or divisor):
            near = _neighbour(name, graph, in_function)
            if near is True or (near and (by_constant or near.op_type == "Div") and _merges(near, node)):
                found[i] = lax.optimization_barrier(value)
    return found


def _neighbour(name: str, graph: Graph, in_function: bool) -> Node | bool:
    """The node that computes a value, but for its shape; True if it may be any, False if it is none."""
    while (node := graph.producers.get(name)) is not None:
        if isinstance(node.target, Function):
            return True
        if node.op_type not in _SHAPING or node.domain:
            return node
        name = node.inputs[0]
    return in_function and name not in graph.initializers


def _merges(one: Node | bool, other: Node) -> bool:
    operators = [node.target for node in (one, other) if isinstance(node, Node)]
    return len({o.merges for o in operators if isinstance(o, Operator)}) == 1


def _is_uniform(value: Any) -> bool:
    """Whether a value is known and all its elements are equal."""
    return is_known(value) and value.size > 0 and bool((value == np.ravel(value)[0]).all())
