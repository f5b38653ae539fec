"""Which values must be known before compiling, and which nodes are alike, from the operators' declarations alone.

The former separates parameters (initializers passed as arguments) from constants (all others), and decides which inputs
a call specialises on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from ..errors import UnsupportedError
from ..ops.registry import NO_OPERATOR
from ..proto.types import HOST_ONLY, MapType, OptionalType, SequenceType, TensorType, ValueType
from . import loops
from .graph import Graph, Node, ancestors, descendants

MOST_ENDS: Final = 6
"""The most values at which a message proposes to cut a graph."""
MAX_TABLE: Final = 32
"""8-bit tensors of at most this many elements are shapes, axes or tables; larger ones are quantised weights."""
MAX_ZERO_POINTS: Final = 4096
"""8-bit vectors of at most this many elements are zero points; longer ones are matrices, as MatMulBnb4 stores them."""
MOST_COMPARED: Final = 64
"""Nodes with longer attributes, such as tables and trees, are not compared with others."""


def static_names(graph: Graph) -> set[str]:
    """Names, the graph's own and captured ones, whose values must be known: they reach Static parameters."""
    names: set[str] = set()
    for node in graph.nodes:
        operator = node.operator
        names.update(n for i, n in enumerate(node.inputs) if n and operator.parameter(i) in operator.static)
        for inner in node.bodies:
            inside = static_names(inner)
            formals = [v.name for v in inner.inputs]
            if inner in node.graphs and not inside.isdisjoint(formals):
                names.update(filter(None, node.inputs))  # only the operator knows which operand feeds which formal
            elif inner not in node.graphs:
                names.update(n for n, formal in zip(node.inputs, formals, strict=False) if n and formal in inside)
            names.update(inside & inner.captures)
        names.update(_deciding_scalars(node, graph))
    return names.union(chain.from_iterable(map(_values_read, ancestors(graph.nodes, names, reads=_values_read))))


def ends_before(graph: Graph, node: Node, names: Collection[str]) -> list[str]:
    """The outputs of the largest part of a graph without a node: outputs of the graph, and what the others read of it.

    It is without strings and maps among the outputs, too, which no program holds. Of ``names`` alone, those of the
    file: a rewritten graph has more. Empty where that part is less than half of the graph, or has more than MOST_ENDS
    outputs.
    """
    objects = {v.name for v in graph.outputs if _holds_objects(v.type)}
    lost = {node, *(n for n in graph.nodes if not objects.isdisjoint(n.outputs))}
    below = {*lost, *descendants(graph.nodes, [o for n in lost for o in n.outputs if o])}
    if node not in graph.nodes or 2 * len(below) > len(graph.nodes):
        return []
    kept = {o for n in graph.nodes if n not in below for o in n.outputs}
    reads = (*(v.name for v in graph.outputs), *(n for lost in graph.nodes if lost in below for n in lost.reads))
    ends = [n for n in dict.fromkeys(reads) if n in kept and n in names]
    return ends if len(ends) <= MOST_ENDS else []


def _holds_objects(kind: ValueType | None) -> bool:
    """Whether a value of the type holds strings or maps."""
    if isinstance(kind, SequenceType | OptionalType):
        return _holds_objects(kind.element)
    return isinstance(kind, MapType) or (isinstance(kind, TensorType) and kind.dtype == object)


def _deciding_scalars(node: Node, graph: Graph) -> set[str]:
    """Scalar initializers that, with shapes alone, decide how often a loop runs."""
    deciding = loops.deciding(node)
    origins = sources(graph.nodes, deciding) if deciding else set()
    scalars = {n for n in origins if n in graph.initializers and graph.initializers[n].size <= 1}
    return scalars if scalars == origins else set()


def _values_read(node: Node) -> Iterator[str]:
    """Names on whose values, not only shapes, the node's outputs depend."""
    operator = node.operator
    yield from (n for i, n in enumerate(node.inputs) if n and operator.parameter(i) not in operator.shaped)
    for inner in node.graphs:
        yield from inner.captures


def sources(nodes: Sequence[Node], values: Collection[str]) -> set[str]:
    """Names from which the values are computed and which none of the nodes defines."""
    above = ancestors(nodes, values, reads=_values_read)
    defined = {name for node in above for name in node.outputs}
    return {*values, *chain.from_iterable(map(_values_read, above))} - defined


def read_counts(graph: Graph) -> Counter[str]:
    """How often each value is read, by nodes or as an output; one of a graph around counts once more."""
    counts = Counter(n for node in graph.nodes for n in node.reads)
    counts.update((*graph.captures, *(v.name for v in graph.outputs)))
    return counts


def parameters(graph: Graph) -> dict[str, np.ndarray]:
    """The arrays of ``Model.params``, by Graph.key: floating-point and quantised initializers that no shape depends on.

    Scalars of Constant nodes are excluded: they belong to the arithmetic (an epsilon, an exponent), not to the weights.

    Raises:
        UnsupportedError: two initializers have the same key.
    """
    params: dict[str, np.ndarray] = {}
    keys: set[str] = set()
    for inner in graph.walk():
        fixed = static_names(inner)
        for name, value in inner.initializers.items():
            if inner.key(name) in keys:
                raise UnsupportedError(
                    f"two tensors of the model map to the key {inner.key(name)!r} of Model.params: one of that name, "
                    f"and {name!r} of graph {inner.name!r} at {inner.path!r}; rename one of them in the file"
                )
            keys.add(inner.key(name))
            if name not in fixed and _is_weight(value) and not (name in inner.lifted and value.size <= 1):
                params[inner.key(name)] = value
    return params


def _is_weight(value: np.ndarray) -> bool:
    if value.dtype in HOST_ONLY:
        return False
    # Zero points stay constants, because most are zero and fold away.
    limit = MAX_TABLE if value.ndim > 1 else MAX_ZERO_POINTS
    quantised = value.dtype.itemsize == 1 and value.dtype != np.bool_ and value.size > limit
    return bool(np.issubdtype(value.dtype, np.inexact)) or value.dtype.kind == "V" or quantised


def siblings(graph: Graph) -> list[tuple[Node, ...]]:
    """Groups of nodes for the ``for_siblings`` of their operator: two or more with equal inputs, opset and casts.

    Inputs are equal if they have one name, or if pure nodes that are equal compute them.
    """
    if sum(map(_joins, graph.nodes)) < 2:
        return []
    names, first, groups = dict[str, str](), dict[Any, tuple[str, ...]](), dict[Any, list[Node]]()
    for node in graph.nodes:
        inputs = tuple(names.get(n, n) for n in node.inputs)
        if _joins(node):
            groups.setdefault((node.target, node.opset, inputs, node.casts), []).append(node)
        elif _is_pure(node) and not any(
            isinstance(v, tuple) and len(v) > MOST_COMPARED for v in node.attributes.values()
        ):
            same = first.setdefault(application(node, inputs), node.outputs)
            names.update(zip(node.outputs, same, strict=False))
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _joins(node: Node) -> bool:
    return node.operator.for_siblings is not None and node.is_plain


def _is_pure(node: Node) -> bool:
    draws = not node.operator.fixtures.isdisjoint({"rng", "derivatives"})
    return node.operator is not NO_OPERATOR and node.is_plain and not draws


def application(node: Node, inputs: tuple[Any, ...]) -> Any:
    """A key of what a node computes from its inputs."""
    attributes = tuple((k, by_bits(v)) for k, v in sorted(node.attributes.items()))
    return node.domain, node.op_type, node.opset, inputs, len(node.outputs), attributes, node.casts


def by_bits(value: Any) -> Any:
    """A key of an attribute's value: its type and bits; of a graph, its identity."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, tuple(value.flat) if value.dtype.hasobject else value.tobytes()
    if isinstance(value, tuple | list):
        return type(value), *map(by_bits, value)
    return type(value), repr(value) if isinstance(value, float) else value  # 0.0 == -0.0
