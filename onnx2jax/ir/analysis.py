"""What must be known before compiling, read from the operators' declarations alone.

From that follow the parameters (initializers passed as arguments) and the constants (all others), and which inputs a
call has to supply by value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np

from ..errors import UnsupportedError
from ..ops.registry import Operator
from .graph import Graph, Node, ancestors

SMALL: Final = 32
"""Tensors of 8 bits up to this many elements are shapes, axes, tables; larger ones are quantised weights."""
LONG: Final = 4096
"""Vectors of 8 bits up to this many elements are zero points; longer ones are matrices, as MatMulBnb4 stores them."""


def needed(graph: Graph) -> set[str]:
    """Names, the graph's own and captured ones, whose values decide shapes: they feed Static parameters."""
    names: set[str] = set()
    for node in graph.nodes:
        operator = node.target
        if isinstance(operator, Operator):
            names.update(n for i, n in enumerate(node.inputs) if n and operator.parameter(i) in operator.static)
        for inner in node.bodies:
            inside = needed(inner)
            formals = [v.name for v in inner.inputs]
            if inner in node.graphs and not inside.isdisjoint(formals):
                names.update(filter(None, node.inputs))  # which operand feeds which formal only the operator knows
            elif inner not in node.graphs:
                names.update(n for n, formal in zip(node.inputs, formals, strict=False) if n and formal in inside)
            names.update(inside & inner.captures)
    return names.union(chain.from_iterable(map(_values_read, ancestors(graph.nodes, names, reads=_values_read))))


def _values_read(node: Node) -> Iterator[str]:
    """Names whose values (not only shapes) a node's outputs depend on."""
    operator = node.target
    for i, name in enumerate(node.inputs):
        if name and not (isinstance(operator, Operator) and operator.parameter(i) in operator.shaped):
            yield name
    for inner in node.graphs:
        yield from inner.captures


def sources(nodes: Sequence[Node], values: Collection[str]) -> set[str]:
    """The names that the given nodes do not define and from which the given values are computed."""
    above = ancestors(nodes, values, reads=_values_read)
    made = {name for node in above for name in node.outputs}
    return {*values, *chain.from_iterable(map(_values_read, above))} - made


def parameters(graph: Graph) -> dict[str, np.ndarray]:
    """The arrays that ``Model.params`` holds, by Graph.key: floating and quantised ones whose values decide no shape.

    Scalars that the file writes as Constant nodes are not among them: they are the network's arithmetic (an epsilon,
    an exponent), not its weights.

    Raises:
        UnsupportedError: two would have the same key.
    """
    params: dict[str, np.ndarray] = {}
    keys: set[str] = set()
    for inner in graph.walk():
        fixed = needed(inner)
        for name, value in inner.initializers.items():
            if inner.key(name) in keys:
                raise UnsupportedError(
                    f"two tensors of the model would both be {inner.key(name)!r} in Model.params: one of that name, "
                    f"and {name!r} of graph {inner.name!r} at {inner.path!r}; rename one of them in the file"
                )
            keys.add(inner.key(name))
            if name not in fixed and _is_weight(value) and not (name in inner.lifted and value.size <= 1):
                params[inner.key(name)] = value
    return params


def _is_weight(value: np.ndarray) -> bool:
    if value.dtype == object:
        return False
    # Vectors of 8-bit integers are zero points, which the compiler knows better: most are zero. Long ones are matrices.
    most = SMALL if value.ndim > 1 else LONG
    quantised = value.dtype.itemsize == 1 and value.dtype != np.bool_ and value.size > most
    return bool(np.issubdtype(value.dtype, np.inexact)) or value.dtype.kind == "V" or quantised
