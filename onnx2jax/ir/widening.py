"""A graph computed in float64: all of its float16, bfloat16 and float32 values become that type.

As for narrower types (see precision.py), the decision is stored on the nodes as ``Node.casts``: nodes keep their names,
operators and attributes. No analysis is needed, since float64 represents each value of the narrower types: every node
reads and returns float64. A Cast to a narrower type rounds nothing, and what an attribute calls float32, such as the
type of random numbers or that of a norm's sums, is float64. Types of 8 bits and fewer, complex numbers, integers,
strings and values that are float64 in the file stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Final

from ..errors import UnsupportedError
from ..ops.registry import Operator, resolve
from ..proto.dtypes import to_dtype
from ..proto.types import MapType, OptionalType, SequenceType, TensorType, ValueInfo, ValueType
from . import analysis
from .casts import DOUBLE, NARROWER, WIDE, Casts
from .graph import Function, Graph, Node, with_graphs

TYPES: Final = frozenset(
    ("dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type", "to")
)
"""Attributes that name an element type by its code, in the domains of ONNX and onnxruntime."""
DOMAINS: Final = ("", "ai.onnx.preview", "com.microsoft")


def widened(graph: Graph) -> Graph:
    """The main graph with its nodes' casts, for computing in float64; its values are declared in it.

    Raises:
        UnsupportedError: nodes of the graph differentiate other nodes, or a node reads the bits of a 16-bit float.
    """
    if graph.differentiates:
        raise UnsupportedError("nodes of the graph differentiate other nodes, which stays in float32: leave out dtype=")
    return _Widening().of(graph)


def widened_parameters(graph: Graph) -> frozenset[str]:
    """The parameters, by Graph.key, that are stored in float64 although the file has them in a narrower type."""
    return frozenset(n for n, v in analysis.parameters(graph).items() if v.dtype in NARROWER)


@dataclass
class _Widening:
    """The casts of a graph, and of the graphs and functions inside it, each function once."""

    functions: dict[Function, Function] = field(default_factory=dict)

    def of(self, graph: Graph) -> Graph:
        inputs, outputs = (tuple(map(_declared, values)) for values in (graph.inputs, graph.outputs))
        value_info = {n: _declared(v) for n, v in graph.value_info.items()}
        nodes = tuple(map(self._node, graph.nodes))
        return replace(graph, inputs=inputs, outputs=outputs, value_info=value_info, nodes=nodes)

    def _node(self, node: Node) -> Node:
        if isinstance(node.target, Function):
            return replace(node, target=self._function(node.target), casts=Casts(DOUBLE, DOUBLE, DOUBLE))
        opset = node.opset
        inside = {
            k: with_graphs(v, lambda body: self.of(with_own_outputs(body, opset))) for k, v in node.attributes.items()
        }
        return replace(node, attributes=inside, casts=_casts(node))

    def _function(self, function: Function) -> Function:
        if function not in self.functions:
            self.functions[function] = replace(function, body=self.of(function.body))
        return self.functions[function]


def _declared(value: ValueInfo) -> ValueInfo:
    return replace(value, type=_type(value.type))


def _type(kind: ValueType | None) -> ValueType | None:
    match kind:
        case TensorType() if kind.dtype in NARROWER:
            return replace(kind, dtype=DOUBLE)
        case SequenceType() | OptionalType():
            return replace(kind, element=_type(kind.element))
        case MapType():
            return replace(kind, value=_type(kind.value))
    return kind


def _casts(node: Node) -> Casts | None:
    if node.casts is not None and node.casts.pinned:
        return Casts(DOUBLE, WIDE, DOUBLE, pinned=True)
    if (node.domain, node.op_type) == ("", "BitCast"):
        return _of_bits(node)
    types: tuple[tuple[str, int | None], ...] = ()
    if isinstance(node.target, Operator) and node.domain in DOMAINS and (named := node.target.attributes & TYPES):
        assert node.target.function is not None
        declared = signature(node.target.function).parameters
        types = tuple((n, None if (d := declared[n].default) is Parameter.empty else d) for n in sorted(named))
    return Casts(DOUBLE, DOUBLE, DOUBLE, types=types)


def _of_bits(node: Node) -> Casts | None:
    """The casts of a BitCast: the bits are those of the file's type, which is as wide as that of the result."""
    size = to_dtype(node.attributes["to"]).itemsize
    if size == 2:
        raise UnsupportedError(
            f"{node} reads or makes 16-bit numbers, which have no such bits as float64: leave out dtype="
        )
    return Casts(DOUBLE, WIDE, DOUBLE) if size == 4 else None


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
