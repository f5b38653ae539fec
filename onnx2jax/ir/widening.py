"""A graph computed in float32 or float64: all of its values in narrower types (see casts.NARROWER) become that type.

As for narrower types (see precision.py), the decision is stored on the nodes as ``Node.casts``: nodes keep their names,
operators and attributes. No analysis is needed, since the wide type represents each value of the narrower ones: every
node reads and returns the wide type. A Cast to a narrower type rounds nothing, and an attribute that names a narrower
type, as of random numbers or of the sums in a norm, names the wide one. Types of 8 bits and fewer, complex numbers,
integers, strings and values that are float64 in the file stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any, Final

import numpy as np

from ..errors import UnsupportedError
from ..ops.registry import Operator, resolve
from ..proto.types import MapType, OptionalType, SequenceType, TensorType, ValueInfo, ValueType, to_dtype
from . import analysis
from .casts import CODES, NARROWER, WIDE, Casts
from .graph import Function, Graph, Node, Reference, with_graphs

TYPES: Final = frozenset(
    ("dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type", "to")
)
"""Attributes that name an element type by its code, in the domains of ONNX and onnxruntime."""
DOMAINS: Final = ("", "ai.onnx.preview", "com.microsoft")


def widened(graph: Graph, dtype: np.dtype) -> Graph:
    """The main graph with its nodes' casts, for computing in float32 or float64; its values are declared in it.

    Raises:
        UnsupportedError: a node reads the bits of a 16-bit float.
    """
    return _Widening(dtype).of(graph)


def widened_parameters(graph: Graph, dtype: np.dtype) -> frozenset[str]:
    """The parameters, by Graph.key, that are stored in ``dtype`` although the file has them in a narrower type."""
    return frozenset(n for n, v in analysis.parameters(graph).items() if v.dtype in NARROWER[dtype])


def has_narrower(graph: Graph, dtype: np.dtype) -> bool:
    """Whether values of a graph are declared, stored or named in a type narrower than ``dtype``."""
    return any(
        not NARROWER[dtype].isdisjoint(v.dtype for v in inner.initializers.values())
        or any(_type(v.type, dtype) != v.type for v in (*inner.inputs, *inner.outputs, *inner.value_info.values()))
        or any(_names(node.attributes, CODES[dtype]) for node in inner.nodes)
        for inner in graph.walk()
    )


def _names(attributes: Mapping[str, Any], codes: Collection[int]) -> bool:
    """Whether attributes of a node name one of these element types, or may: the caller of a function decides it."""
    types = [attributes[n] for n in TYPES if n in attributes]
    return any(isinstance(v, Reference) or (isinstance(v, int) and v in codes) for v in types)


@dataclass
class _Widening:
    """The casts of a graph, and of the graphs and functions inside it, each function once."""

    dtype: np.dtype
    functions: dict[Function, Function] = field(default_factory=dict)

    def of(self, graph: Graph) -> Graph:
        inputs, outputs = (tuple(map(self._declared, values)) for values in (graph.inputs, graph.outputs))
        value_info = {n: self._declared(v) for n, v in graph.value_info.items()}
        nodes = tuple(map(self._node, graph.nodes))
        return replace(graph, inputs=inputs, outputs=outputs, value_info=value_info, nodes=nodes)

    def _declared(self, value: ValueInfo) -> ValueInfo:
        return replace(value, type=_type(value.type, self.dtype))

    def _node(self, node: Node) -> Node:
        if isinstance(node.target, Function):
            return replace(node, target=self._function(node.target), casts=Casts(self.dtype, self.dtype, self.dtype))
        attributes = with_graphs(node.attributes, lambda body: self.of(with_own_outputs(body, node.opset)))
        return replace(node, attributes=attributes, casts=_casts(node, self.dtype))

    def _function(self, function: Function) -> Function:
        if function not in self.functions:
            self.functions[function] = replace(function, body=self.of(function.body))
        return self.functions[function]


def _type(kind: ValueType | None, dtype: np.dtype) -> ValueType | None:
    match kind:
        case TensorType() if kind.dtype in NARROWER[dtype]:
            return replace(kind, dtype=dtype)
        case SequenceType() | OptionalType():
            return replace(kind, element=_type(kind.element, dtype))
        case MapType():
            return replace(kind, value=_type(kind.value, dtype))
    return kind


def _casts(node: Node, dtype: np.dtype) -> Casts | None:
    if node.casts is not None and node.casts.pinned:
        return Casts(dtype, WIDE, dtype, pinned=True)
    if (node.domain, node.op_type) == ("", "BitCast"):
        return _of_bits(node, dtype)
    types: tuple[tuple[str, int | None], ...] = ()
    if isinstance(node.target, Operator) and node.domain in DOMAINS and (named := node.target.attributes & TYPES):
        assert node.target.function is not None
        declared = signature(node.target.function).parameters
        types = tuple((n, None if (d := declared[n].default) is Parameter.empty else d) for n in sorted(named))
    return Casts(dtype, dtype, dtype, types=types)


def _of_bits(node: Node, dtype: np.dtype) -> Casts | None:
    """The casts of a BitCast: the bits are those of the file's type, which is as wide as that of the result."""
    size = to_dtype(node.attributes["to"]).itemsize
    if size == 2:
        raise UnsupportedError(
            f"{node} reads or makes 16-bit numbers, which have no such bits as {dtype}: leave out dtype="
        )
    return Casts(dtype, WIDE, dtype) if size == 4 else None


def with_own_outputs(body: Graph, opset: int) -> Graph:
    """A body whose outputs all come from its nodes, so that they can be cast."""
    made = {o for node in body.nodes for o in node.outputs}
    identity = resolve("", "Identity", opset)
    nodes, outputs = list(body.nodes), []
    for i, output in enumerate(body.outputs):
        name = output.name
        if name not in made:
            name = f"{output.name}/output {i}"
            nodes.append(Node(name, "Identity", "", opset, (output.name,), (name,), {}, identity))
        outputs.append(replace(output, name=name))
    return replace(body, nodes=tuple(nodes), outputs=tuple(outputs))
