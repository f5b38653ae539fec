"""Results of data-dependent length that end in scatters alone: they can be padded, where a scatter drops the padding.

Exporters of JAX write ``x.at[i].add(y, mode="drop")`` so: NonZero of a mask of the valid indices, Gather of their rows
and of the rows of updates, ScatterND. Padding of NonZero is out of range, which a traced Gather reads as the least
integer, which is out of range in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from .graph import Graph, Node

Kind = Literal["positions", "indices", "rows", "count"]
"""NonZero's [rank, n]; rows that are out of range in the padding; other rows; the number of rows."""
_SHAPING: Final = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
_LINEAR: Final = ("Add", "Cast", "Identity", "Neg", "Sub")
"""By element, with derivatives that do not read padding, which is NaN."""
_SCATTERS: Final = ("ScatterElements", "ScatterND")


def reader_beside_scatters(graph: Graph, node: Node) -> str:
    """What reads the results of a NonZero in another way than by rows for a scatter; "" if nothing does."""
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
    (_SHAPING, lambda r: {*r.kinds} <= {"count", None}, "count"),
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
    passes = node.op_type in _SHAPING and node.op_type != "Slice"
    return node.op_type == "Shape" or (passes and _leads(graph, node.inputs[0], kinds))
