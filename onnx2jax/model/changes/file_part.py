"""The part of a file between some values, as ``Model.cut`` takes it from the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ModelError
from ...eval.inferred import inferred_types
from ...ir.graph import Graph
from ...proto.dtypes import to_code
from ...proto.messages import ValueInfoProto
from ...proto.types import TensorType
from ...proto.walk import keep, subgraphs
from .parts import PASSED
from .rewritten import drop_unread, name_nodes, names_read


@dataclass(frozen=True)
class FilePart:
    """A change of a ModelProto: its graph between some values; training_info refers to the whole graph, and goes.

    Attributes:
        inputs, outputs: values of the main graph.
        graph: the whole graph, from which types are inferred where the file declares none.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: Graph

    def __call__(self, message: Any) -> None:
        graph = message.graph
        declared = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output) if v.HasField("type")}
        weights = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        computed = {name for node in graph.node for name in node.output}
        if unknown := {*self.inputs, *self.outputs} - weights - computed - declared.keys():
            raise ModelError(
                f"the file has no value {sorted(unknown)[0]!r}, which an option of convert computes: cut the model "
                "converted without that option, and save it"
            )
        read = self._keep_nodes(graph)
        missing = {*self.inputs, *self.outputs} - declared.keys()
        inferred = inferred_types(self.graph) if missing else {}
        ends = {n: declared[n] if n in declared else _value_info(n, inferred) for n in (*self.inputs, *self.outputs)}
        others = [v for v in graph.input if v.name in read and v.name not in self.inputs]
        inputs, outputs = [ends[n] for n in self.inputs] + others, [ends[n] for n in self.outputs]
        for field, values in ((graph.input, inputs), (graph.output, outputs)):
            copies = [type(v).FromString(v.SerializeToString()) for v in values]
            del field[:]
            field.extend(copies)
        keep(graph.initializer, lambda t: t.name not in self.inputs)
        keep(graph.sparse_initializer, lambda t: t.values.name not in self.inputs)
        drop_unread(graph)
        del message.training_info[:]

    def _keep_nodes(self, graph: Any) -> set[str]:
        """Remove the nodes that the outputs do not need; returns the names that are read."""
        name_nodes(graph)
        for node in graph.node:
            node.output[:] = [PASSED.format(n) if n in self.inputs else n for n in node.output]
        read = {*self.outputs}
        for node in reversed(graph.node):
            if not read.isdisjoint(node.output):
                read.update(filter(None, node.input))
                read.update(name for inner in subgraphs(node) for name in names_read(inner) if name)
        keep(graph.node, lambda n: not read.isdisjoint(n.output))
        return read


def _value_info(name: str, types: Mapping[str, TensorType]) -> Any:
    """The declaration of a value, with its type where it is inferred."""
    info, kind = ValueInfoProto(name=name), types.get(name)
    if kind is not None:
        tensor = info.type.tensor_type
        tensor.elem_type = to_code(kind.dtype)
        for extent in kind.shape or ():
            tensor.shape.dim.add(**({"dim_value": extent} if isinstance(extent, int) else {"dim_param": extent or ""}))
    return info
