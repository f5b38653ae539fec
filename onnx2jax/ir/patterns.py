"""Nodes that need care because of those around them: what XLA would merge, scatters of rows, look-ups in tables.

XLA merges operators beside each other as if numbers were real: it computes

    (x + c) - c as x      (x * c) * c as x * (c * c)      y / (c / x) as (y * x) / c      (x / y) / z as x / (y * z)
    log(exp(x)) as x      sqrt(x * x) as abs(x)           log(x ** y) as y * log(abs(x))
    (x / y) ** 2 as x ** 2 / y ** 2

These round otherwise, or leave the range of the type: x + 1.5 * 2**23 - 1.5 * 2**23 rounds x to integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..errors import InputValueError
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
Kind = Literal["positions", "indices", "rows", "count"]
"""NonZero's [rank, n]; rows that are out of range in the padding; other rows; the number of rows."""
_OF_ROWS: Final = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_LINEAR: Final = ("Add", "Cast", "Identity", "Neg", "Sub")
"""By element, with derivatives that do not read padding, which is NaN."""
_SCATTERS: Final = ("ScatterElements", "ScatterND")
INT32, INT64 = 6, 7
"""Element types in TensorProto."""
KEEPS: Final = frozenset(
    ("Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
)
"""Operators whose result has all elements of an integer operand."""


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


def reader_beside_scatters(graph: Graph, node: Node) -> str:
    """What reads the results of a NonZero in another way than by rows for a scatter; "" if nothing does.

    If nothing does, they can be padded, as scatters drop the padding. Exporters of JAX write ``x.at[i].add(y,
    mode="drop")`` so: NonZero of a mask of the valid indices, Gather of their rows and of the rows of updates,
    ScatterND. Padding of NonZero is out of range, which a traced Gather reads as the least integer, which is out of
    range in turn.
    """
    kinds: dict[str, Kind] = {node.outputs[0]: "positions"}
    for reader in graph.nodes:
        if kinds.keys().isdisjoint(reader.reads):
            continue
        if reader.op_type in _SCATTERS and _drops(reader, kinds):
            continue
        kind = None if reader.domain or not kinds.keys().isdisjoint(reader.captures) else _kind(graph, reader, kinds)
        if kind is None:
            return str(reader)
        kinds[reader.outputs[0]] = kind
    return next((f"output {v.name!r}" for v in graph.outputs if v.name in kinds), "")


def _drops(scatter: Node, kinds: Mapping[str, Kind]) -> bool:
    """Whether a scatter's indices are out of range in the padding, and its updates have as many rows."""
    data, indices, updates = (kinds.get(name) for name in scatter.inputs)
    along = scatter.op_type == "ScatterND" or scatter.attributes.get("axis", 0) == 0
    return data is None and indices == "indices" and updates in ("indices", "rows") and along


class _Read(NamedTuple):
    """A node that reads results of NonZero.

    Attributes:
        kinds: those of its inputs; None for other values.
        constants: the values of its inputs that are initializers.
        leads: whether its second input is a shape that begins with the number of rows.
    """

    node: Node
    kinds: Sequence[Kind | None]
    constants: Sequence[Any]
    leads: bool

    @property
    def axis(self) -> int:
        return int(self.node.attributes.get("axis", 0))

    @property
    def axes(self) -> list[int]:
        """The second input as a list; [] if it is not known."""
        value = self.constants[1] if len(self.constants) > 1 else None
        return [] if value is None else np.ravel(value).tolist()


def _is_number(value: Any) -> bool:
    return value is not None and np.ndim(value) == 0


_ROWS: Final = ("indices", "rows")
_RULES: Final[Sequence[tuple[Collection[str], Callable[[_Read], bool], Kind | None]]] = (
    (["Transpose"], lambda r: r.kinds[0] == "positions" and r.node.attributes.get("perm") in (None, (1, 0)), "indices"),
    (["Shape"], lambda r: r.kinds[0] in _ROWS and not r.node.attributes, "count"),
    (["Expand"], lambda r: r.kinds[0] is None and r.leads, "rows"),
    (["GatherND"], lambda r: r.kinds == [None, "indices"] and not r.node.attributes.get("batch_dims"), "indices"),
    (["Gather"], lambda r: r.kinds == [None, "indices"] and r.axis == 0, "indices"),
    (["Gather"], lambda r: r.kinds[0] == "positions" and r.axis == 0 and _is_number(r.constants[1]), "indices"),
    (_OF_ROWS, lambda r: {*r.kinds} <= {"count", None}, "count"),
    (["Squeeze"], lambda r: r.kinds[0] == "positions" and r.axes == [0], "indices"),
    # Negative axes count from an end that is not known here; of Unsqueeze, -1 comes last.
    (["Squeeze", "Unsqueeze"], lambda r: r.kinds[0] in _ROWS and (r.axes == [-1] or min(r.axes, default=0) > 0), None),
    (["Reshape"], lambda r: r.kinds[0] in _ROWS and (r.leads or r.axes[:1] in ([-1], [0])), None),
    (["Concat"], lambda r: r.axis != 0 and "indices" in r.kinds and {*r.kinds} <= {*_ROWS}, "indices"),
    (["Concat"], lambda r: r.axis != 0 and {*r.kinds} == {"rows"}, "rows"),
    (["Identity"], lambda r: r.kinds[0] in _ROWS, None),
    (_LINEAR, lambda r: all(k in _ROWS or _is_number(v) for k, v in zip(r.kinds, r.constants, strict=True)), "rows"),
)
"""Operators, a condition, and what their output then is; None for what their first input is."""


def _kind(graph: Graph, node: Node, kinds: Mapping[str, Kind]) -> Kind | None:
    """What the output of a node is, by its inputs; None if it is not among the kinds."""
    operand_kinds, constants = [kinds.get(n) for n in node.inputs], [graph.initializers.get(n) for n in node.inputs]
    leads = len(operand_kinds) > 1 and operand_kinds[1] == "count" and _leads(graph, node.inputs[1], kinds)
    read = _Read(node, operand_kinds, constants, leads)
    matches = (kind or operand_kinds[0] for names, holds, kind in _RULES if node.op_type in names and holds(read))
    return next(matches, None)


def _leads(graph: Graph, shape: str, kinds: Mapping[str, Kind]) -> bool:
    """Whether a shape begins with the number of rows: it is the Shape of rows, or a Concat that begins so."""
    node = graph.producers.get(shape)
    if node is None or kinds.get(shape) != "count":
        return False
    constant = graph.initializers.get(node.inputs[1]) if node.op_type == "Gather" else None
    if node.op_type == "Gather" and (constant is None or constant.size != 1 or constant.item() != 0):
        return False
    passes = node.op_type in _OF_ROWS and node.op_type != "Slice"
    return node.op_type == "Shape" or (passes and _leads(graph, node.inputs[0], kinds))


def lookups(graph: Graph) -> Iterator[tuple[str, Node, int]]:
    """The inputs of a graph that its Gather nodes look up in initializers, with the extents of these."""
    inputs = {v.name: v.name for v in graph.inputs if v.name not in graph.initializers}
    for node in graph.nodes:
        if node.domain or not node.inputs:
            continue
        if node.op_type in KEEPS and node.attributes.get("to", INT64) in (INT32, INT64):
            inputs |= {o: inputs[n] for n in node.inputs if n in inputs for o in node.outputs}
        table = graph.initializers.get(node.inputs[0])
        if node.op_type == "Gather" and table is not None and node.inputs[1] in inputs:
            yield inputs[node.inputs[1]], node, table.shape[node.attributes.get("axis", 0)]


def check_lookups(graph: Graph, values: Mapping[str, Any]) -> None:
    """Raise InputValueError for an integer input with an index beyond the table in which the graph looks it up."""
    for name, node, extent in lookups(graph):
        value, table = values.get(name), node.inputs[0]
        if table in values or not getattr(value, "is_fully_addressable", True):  # a table of the caller's; a mesh
            continue
        indices = np.asarray(value)
        if indices.dtype.kind not in "iu" or not indices.size:
            continue
        low, high = int(indices.min()), int(indices.max())
        if low < -extent or high >= extent:
            raise InputValueError(
                f"input {name!r} has {low if low < -extent else high}, and {node} looks it up in {table!r}, which has "
                f"{extent} rows: {-extent} to {extent - 1}"
            )
