"""Writes a simplified graph into the message of its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...ir.graph import Graph, Node
from ...ops.registry import resolve
from ...proto.messages import (
    AttributeProto,
    NodeProto,
    TensorProto,
    graphs_of,
    keep,
    node_names,
    normal_domain,
    subgraphs,
)
from ...proto.tensors import from_array
from ...proto.types import UNNAMED


@dataclass(frozen=True)
class _Edit:
    """What is new in a node: names by their old ones, more inputs, integers of attributes, the graphs inside."""

    inputs: Mapping[str, str]
    more: tuple[str, ...]
    outputs: Mapping[str, str]
    attributes: Mapping[str, tuple[int, ...]]
    graphs: Mapping[str, tuple[Rewriting, ...]]


@dataclass(frozen=True)
class Rewriting:
    """The differences between two graphs, as a change of a ModelProto.

    Attributes:
        gone: outputs of removed nodes.
        edits: by an output of a node.
        added: nodes that are new, by their first input, which another node computes.
        new: initializers that are new, or have new values.
        lifted: those of them that become Constant nodes, so that they are no parameters.
        shapes: those for which the graph is made, by input.
    """

    gone: frozenset[str]
    edits: Mapping[str, _Edit]
    added: Mapping[str, Node]
    new: Mapping[str, np.ndarray]
    lifted: frozenset[str]
    shapes: Mapping[str, tuple[Any, ...]]

    @classmethod
    def between(cls, before: Graph, after: Graph) -> Rewriting:
        """The differences between a graph and what it became."""
        new = {n: v for n, v in after.initializers.items() if before.initializers.get(n) is not v}
        kept = {n.name: n for n in after.nodes}
        gone = {o for n in before.nodes if n.name not in kept for o in n.outputs if o}
        pairs = [(n, kept[n.name]) for n in before.nodes if n.name in kept]
        edits = {o: _edit(n, other) for n, other in pairs if n is not other for o in n.outputs if o}
        shapes = {v.name: v.shape for v in after.inputs if v.shape is not None}
        names = {n.name for n in before.nodes}
        added = {n.inputs[0]: n for n in after.nodes if n.name not in names}
        return cls(frozenset(gone), edits, added, new, after.lifted & new.keys(), shapes)

    def __call__(self, message: Any) -> None:
        graph = message.graph
        self._fix_extents(graph)
        if message.ir_version < 4:  # there weights are inputs, and IR 4 reads them as defaults
            weights = {t.name for t in graph.initializer}
            keep(graph.input, lambda v: v.name not in weights)
            message.ir_version = 4
            if not message.opset_import:  # optional below IR 3 (rule MV-03)
                message.opset_import.add(version=1)
        self._write(graph)

    def _write(self, graph: Any) -> None:
        self._write_nodes(graph)
        keep(graph.initializer, lambda t: t.name not in self.new)
        keep(graph.sparse_initializer, lambda t: t.values.name not in self.new)
        arrays = {n: TensorProto(**from_array(v, n)) for n, v in self.new.items()}
        graph.initializer.extend(t for n, t in arrays.items() if n not in self.lifted)
        value = partial(AttributeProto, name="value", type=AttributeProto.TENSOR)
        nodes = [NodeProto(op_type="Constant", output=[n], attribute=[value(t=arrays[n])]) for n in sorted(self.lifted)]
        for node in sorted(graph.node, key=lambda n: not _is_constant(n)):  # they may have readers before them now
            nodes += (node, *(node_message(self.added[o]) for o in node.output if o in self.added))
        del graph.node[:]
        graph.node.extend(nodes)
        drop_unread(graph)

    def _write_nodes(self, graph: Any) -> None:
        name_nodes(graph)
        constants = self.new.keys()
        keep(graph.node, lambda n: not any(o in self.gone or (_is_constant(n) and o in constants) for o in n.output))
        for node in graph.node:
            edit = next((self.edits[o] for o in node.output if o in self.edits), None)
            if edit is None:
                continue
            rename_ends(node, edit.inputs, edit.outputs)
            if edit.more:
                while node.input and not node.input[-1]:
                    node.input.pop()
                node.input.extend(edit.more)
            keep(node.attribute, lambda a, edit=edit: a.name not in edit.attributes)  # type: ignore[misc]
            for attribute in node.attribute:
                for rewriting, message in zip(edit.graphs.get(attribute.name, ()), graphs_of(attribute), strict=True):
                    rewriting._write(message)
            for key, value in edit.attributes.items():
                node.attribute.add(name=key, type=AttributeProto.INTS, ints=value)

    def _fix_extents(self, graph: Any) -> None:
        fixed: dict[str, int] = {}
        for value in graph.input:
            for d, extent in zip(value.type.tensor_type.shape.dim, self.shapes.get(value.name, ()), strict=False):
                if isinstance(extent, int) and not d.HasField("dim_value"):
                    fixed[d.dim_param] = extent
                    d.dim_value = extent
        for value in (*graph.input, *graph.output, *graph.value_info):
            for d in value.type.tensor_type.shape.dim:
                if d.dim_param in fixed.keys() - UNNAMED:
                    d.dim_value = fixed[d.dim_param]


def _edit(before: Node, after: Node) -> _Edit:
    shared = len(before.inputs)
    changed = {k: v for k, v in after.attributes.items() if before.attributes.get(k) is not v}
    graphs = {k: _graphs(before.attributes[k], v) for k, v in changed.items() if _is_graphs(v)}
    return _Edit(
        {a: b for a, b in zip(before.inputs, after.inputs, strict=False) if a != b},
        after.inputs[shared:],
        {a: b for a, b in zip(before.outputs, after.outputs, strict=True) if a != b},
        {k: v for k, v in changed.items() if k not in graphs},
        graphs,
    )


def rename_ends(node: Any, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    """Rename inputs and outputs of a NodeProto, in its shardings too."""
    node.input[:] = [inputs.get(n, n) for n in node.input]
    node.output[:] = [outputs.get(n, n) for n in node.output]
    names = {**inputs, **outputs}
    for spec in (s for entry in node.device_configurations for s in entry.sharding_spec):
        spec.tensor_name = names.get(spec.tensor_name, spec.tensor_name)


def new_node(
    name: str, op_type: str, opset: int, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any
) -> Node:
    """A node of ai.onnx; its only output has its name unless ``outputs`` are given."""
    return Node(name, op_type, "", opset, inputs, outputs or (name,), attributes, resolve("", op_type, opset))


def node_message(node: Node) -> Any:
    """A new node, whose attributes are integers, as a NodeProto."""
    integers = [AttributeProto(name=n, type=AttributeProto.INT, i=v) for n, v in node.attributes.items()]
    return NodeProto(name=node.name, op_type=node.op_type, input=node.inputs, output=node.outputs, attribute=integers)


def _is_graphs(value: Any) -> bool:
    return isinstance(value, Graph) or (isinstance(value, tuple) and any(isinstance(v, Graph) for v in value))


def _graphs(before: Any, after: Any) -> tuple[Rewriting, ...]:
    pairs = [(before, after)] if isinstance(after, Graph) else zip(before, after, strict=True)
    return tuple(Rewriting.between(a, b) for a, b in pairs)


def _is_constant(node: Any) -> bool:
    return (normal_domain(node.domain), node.op_type) == ("", "Constant")


def drop_unread(graph: Any) -> None:
    """Remove initializers and Constant nodes that nothing reads, and what is said of values that are gone."""
    read = {v.name for v in (*graph.output, *graph.input)} | set(names_read(graph))
    read |= {e.value for a in graph.quantization_annotation for e in a.quant_parameter_tensor_names}
    keep(graph.initializer, lambda t: t.name in read)
    keep(graph.sparse_initializer, lambda t: t.values.name in read)
    keep(graph.node, lambda n: not _is_constant(n) or not read.isdisjoint(n.output))
    made = {n for node in graph.node for n in node.output} | {v.name for v in graph.input}
    keep(graph.value_info, lambda v: v.name in made)
    made |= {t.name for t in graph.initializer}
    keep(graph.quantization_annotation, lambda a: a.tensor_name in made)


def name_nodes(graph: Any) -> None:
    """Write the names of nodes that hold graphs, by which weights inside are called, before other nodes go."""
    for node, name in zip(graph.node, node_names(graph.node), strict=True):
        if any(True for _ in subgraphs(node)):
            node.name = name


def names_read(graph: Any) -> Iterator[str]:
    """Names that nodes of a graph, and of those inside, read."""
    for node in graph.node:
        yield from node.input
        for inner in subgraphs(node):
            yield from names_read(inner)
            yield from (v.name for v in inner.output)
