"""Message classes of the ONNX format; iteration over a model's message, and canonical names in it.

The classes have a descriptor pool of their own, so they do not conflict with those of the ``onnx`` package. They are
built at import time from a serialized descriptor (onnx.binpb, compiled from onnx.proto), because generated code works
with one major version of protobuf only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pkgutil import get_data
from typing import Any

from google.protobuf.message import Message


def _empty_pool() -> tuple[Any, Callable[[Any], Any]]:
    """An empty descriptor pool, and the function from a message's descriptor to its class.

    Both of protobuf's C library: its public modules ``descriptor_pool`` and ``message_factory``, which do the same,
    import the messages in Python too, and that takes longer than converting a small file.
    """
    try:
        from google.protobuf.descriptor import _message as library  # type: ignore[attr-defined]
        from google.protobuf.message import Message
        from google.protobuf.pyext.cpp_message import GeneratedProtocolMessageType  # type: ignore[import-not-found]

        pool = library.DescriptorPool()
    except (ImportError, AttributeError):
        from google.protobuf import descriptor_pool, message_factory

        return descriptor_pool.DescriptorPool(), message_factory.GetMessageClass
    classes: dict[str, Any] = {}

    def class_of(descriptor: Any) -> Any:
        if descriptor.full_name not in classes:
            members = {"DESCRIPTOR": descriptor, "__module__": None}
            classes[descriptor.full_name] = GeneratedProtocolMessageType(descriptor.name, (Message,), members)
            for field in descriptor.fields:
                if field.message_type:
                    class_of(field.message_type)
        return classes[descriptor.full_name]

    return pool, class_of


_POOL, _class_of = _empty_pool()
_POOL.AddSerializedFile(get_data(__package__, "onnx.binpb"))


def _message(name: str) -> Any:
    return _class_of(_POOL.FindMessageTypeByName(f"onnx2jax.{name}"))


ModelProto = _message("ModelProto")
GraphProto = _message("GraphProto")
NodeProto = _message("NodeProto")
FunctionProto = _message("FunctionProto")
AttributeProto = _message("AttributeProto")
TensorProto = _message("TensorProto")
SparseTensorProto = _message("SparseTensorProto")
TypeProto = _message("TypeProto")
ValueInfoProto = _message("ValueInfoProto")
TrainingInfoProto = _message("TrainingInfoProto")
OperatorSetProto = _message("OperatorSetProto")
SequenceProto = _message("SequenceProto")
MapProto = _message("MapProto")
OptionalProto = _message("OptionalProto")


def node_names(nodes: Iterable[Any]) -> list[str]:
    """A unique name for each node: its own or its first output's, followed by its index if that is taken.

    Node names may be empty or repeat (rule GR-22), but keys of weights and random streams in subgraphs depend on them.
    """
    names: dict[str, None] = {}
    for i, node in enumerate(nodes):
        name = node.name or next(filter(None, node.output), f"{node.op_type}_{i}")
        while name in names:
            name = f"{name}_{i}"
        names[name] = None
    return list(names)


def unused_name(name: str, taken: Container[str], suffix: str = "_") -> str:
    """The name, with the suffix as often as it takes to be none of those taken.

    >>> unused_name("w", {"w", "w_"})
    'w__'
    """
    while name in taken:
        name += suffix
    return name


def inside(path: str, name: str) -> str:
    """The name of a value, unique in the model, given the location of its graph."""
    return f"{path}/{name}" if path else name


def dotted(*names: str) -> str:
    """The names joined by dots, but for empty ones, as an operator's with its domain.

    >>> dotted("com.microsoft", "Gelu"), dotted("", "Relu")
    ('com.microsoft.Gelu', 'Relu')
    """
    return ".".join(filter(None, names))


def normal_domain(domain: str) -> str:
    """The domain, with ``ai.onnx`` spelled as the empty string (rule OR-03)."""
    return "" if domain == "ai.onnx" else domain


_HOLD_TENSORS = {"ModelProto", "GraphProto", "NodeProto", "AttributeProto", "FunctionProto"} | {
    "SparseTensorProto",
    "TrainingInfoProto",
}


def tensors(message: Any, *, into_graphs: bool = True) -> Iterator[tuple[Any, str]]:
    """Every TensorProto in a message, at any depth, with the name of the field that contains it."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        kind = field.message_type.name
        for inner in (value,) if isinstance(value, Message) else value:
            if kind == "TensorProto":
                yield inner, field.name
            elif kind in _HOLD_TENSORS and (into_graphs or kind != "GraphProto"):
                yield from tensors(inner)


def weights(model: Any) -> Iterator[tuple[str, Any]]:
    """(Graph.key, message) of each initializer and Constant tensor, as TensorProto or SparseTensorProto."""
    yield from _of_graph(model.graph, "")
    for f in model.functions:
        yield from _of_nodes(f.node, dotted(normal_domain(f.domain), f.name, f.overload))
    for i, info in enumerate(model.training_info):
        for part in ("initialization", "algorithm"):
            yield from _of_graph(getattr(info, part), f"training_info[{i}].{part}")


def graphs_of(attribute: Any) -> Iterator[Any]:
    """The GraphProtos of an AttributeProto."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def subgraphs(node: Any) -> Iterator[Any]:
    """The GraphProtos of the attributes of a NodeProto."""
    for attribute in node.attribute:
        yield from graphs_of(attribute)


def nested_graphs(graph: Any) -> Iterator[Any]:
    """A GraphProto and those inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from nested_graphs(inner)


def rename(graph: Any, values: Mapping[str, str], nodes: Mapping[str, str]) -> None:
    """Rename values and nodes of one GraphProto, without those inside."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = values.get(value.name, value.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = values.get(sparse.values.name, sparse.values.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = values.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = values.get(entry.value, entry.value)
    for node in graph.node:
        node.name = nodes.get(node.name, node.name)
        for names in (node.input, node.output):
            names[:] = [values.get(n, n) for n in names]
        if (node.domain, node.op_type) == ("ai.onnx.preview.training", "Gradient"):  # its attributes name values
            for attribute in node.attribute:
                attribute.strings[:] = [values.get(n.decode(), n.decode()).encode() for n in attribute.strings]
                if attribute.HasField("s"):
                    attribute.s = values.get(attribute.s.decode(), attribute.s.decode()).encode()


def keep(field: Any, wanted: Callable[[Any], bool]) -> None:
    """Remove the other entries of a repeated field."""
    kept = [v for v in field if wanted(v)]
    if len(kept) < len(field):
        copies = [type(v).FromString(v.SerializeToString()) for v in kept]
        del field[:]
        field.extend(copies)


def _of_graph(graph: Any, path: str) -> Iterator[tuple[str, Any]]:
    for tensor in graph.initializer:
        yield inside(path, tensor.name), tensor
    for sparse in graph.sparse_initializer:
        yield inside(path, sparse.values.name), sparse
    yield from _of_nodes(graph.node, path)


def _of_nodes(nodes: Any, path: str) -> Iterator[tuple[str, Any]]:
    for node, name in zip(nodes, node_names(nodes), strict=True):
        where = inside(path, name)
        constant = (normal_domain(node.domain), node.op_type) == ("", "Constant")
        for a in node.attribute:
            if constant and a.name == "value" and a.HasField("t") and node.output:
                yield inside(path, node.output[0]), a.t
            elif a.HasField("g"):
                yield from _of_graph(a.g, f"{where}.{a.name}")
            else:
                for i, graph in enumerate(a.graphs):
                    yield from _of_graph(graph, f"{where}.{a.name}.{i}")
