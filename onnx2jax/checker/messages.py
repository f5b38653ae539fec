"""Checks of messages that the importer does not make: of graphs, and of a model and its functions outside of them.

Of graphs: names, nodes, attributes, types and tensors. Outside: versions, metadata, functions' headers, device
configurations and shardings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np

from ..ir.rules import VALUE_FIELDS, used_fields
from ..ir.signatures import element, same_schema, type_of
from ..ops.registry import LEGACY_HINTS, resolve
from ..proto.devices import Sharding, problems, read_node, shard_of
from ..proto.external import ExternalFiles
from ..proto.messages import normal_domain, tensors
from ..proto.tensors import EXTERNAL
from ..proto.types import ELEMENT_TYPES, shapes_agree
from .report import Note
from .scopes import GraphPlace, extents, places

MESSAGES: Final = frozenset(k for k, name in VALUE_FIELDS.items() if name in ("t", "g", "sparse_tensor", "tp"))
"""The types of attributes without a default value."""
EXTERNAL_KEYS: Final = frozenset({"location", "offset", "length", "checksum"})
FIRST_IR: Final = {"opset_import": 3, "training_info": 7, "functions": 8, "configuration": 11}
"""Field of the model -> the IR version that introduced it."""


def check_graphs(model: Any, opsets: dict[str, int], files: ExternalFiles, note: Note) -> None:
    """Check every graph and function of a ModelProto."""
    configurations = {c.name: c.num_devices for c in model.configuration}
    functions = {(normal_domain(f.domain), f.name) for f in model.functions}
    for place in places(model):
        graph, root = place.graph, place.outer[0][0] if place.outer else place
        imports = root.graph.opset_import if root.kind == "function" else ()
        body = {normal_domain(e.domain): e.version for e in imports}
        if place.kind == "function" and not graph.opset_import:
            note("FN-05", "error", place.where, "it imports no operator set")
        if place.kind != "function":
            _declarations(place, model.ir_version, note)
        _names(place, note)
        for i, node in enumerate(graph.node):
            path = place.node(i)
            domain = normal_domain(node.domain)
            if not any(node.output):
                note("GR-28", "error", path, f"{node.op_type} has no outputs")
            if node.overload and (domain, node.op_type) not in functions:
                note("ND-13", "warning", path, f"overload {node.overload!r} has no meaning for an operator")
            check_since(node, {"overload": 10}, model.ir_version, path, note)
            if not domain:
                _control_flow(node, path, model.ir_version, (body or opsets).get("", 0), note)
            inner, outer = body.get(domain), opsets.get(domain)
            if inner is not None and outer is not None and not same_schema(domain, node.op_type, inner, outer):
                title = f"{node.op_type} of {domain or 'ai.onnx'}"
                text = f"{title} {inner} in the function differs from that of {outer} in the model"
                note("FN-06", "error", path, text)
            for a in node.attribute:
                _attribute(a, path, note)
            check_metadata(node, path, note)
            check_devices(node, path, configurations, place.shapes, note)
        for tensor, path in _tensors(place):
            _stored(tensor, path, files, note)


def _control_flow(node: Any, path: str, ir_version: int, opset: int, note: Note) -> None:
    """Check the numbers of inputs and outputs of the subgraphs of If, Loop and Scan."""
    graphs = [a.g for a in node.attribute if a.HasField("g")]
    states = max(len(node.input) - 2, 0)
    supplied = {"Loop": 2 + states, "Scan": len(node.input) - (opset < 9)}.get(node.op_type, 0)
    for graph in graphs if ir_version < 4 else ():
        constants = {t.name for t in graph.initializer}
        for name in (v.name for v in graph.input[:supplied] if v.name in constants):
            note("SC-09", "error", path, f"{name!r} is an initializer, but {node.op_type} supplies this input")
    if node.op_type == "If":
        counts = sorted({len(g.output) for g in graphs})
        if len(counts) > 1 or (counts and counts[0] < len(node.output)):
            note("SC-12", "error", path, f"its branches have {counts} outputs, the node {len(node.output)}")
    if node.op_type not in ("Loop", "Scan") or not graphs:
        return
    inputs, outputs, is_loop = len(graphs[0].input), len(graphs[0].output), node.op_type == "Loop"
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 1)
    if not is_loop and not 1 <= scanned <= supplied:
        note("SC-14", "error", path, f"num_scan_inputs is {scanned}, the node has {len(node.input)} inputs")
    if inputs < supplied or (inputs > supplied and ir_version >= 4):
        expected = f"not iteration, condition and {states} states" if is_loop else f"but the node supplies {supplied}"
        note("SC-11", "error", path, f"its body has {inputs} inputs, {expected}")
    if is_loop and outputs <= max(states, len(node.output)):
        note("SC-13", "error", path, f"its body has {outputs} outputs for {states} states and what it collects")
    if not is_loop and outputs < len(node.output):
        note("SC-14", "error", path, f"its body has {outputs} outputs, the node {len(node.output)}")


def _names(place: GraphPlace, note: Note) -> None:
    graph, where = place.graph, place.where
    names = Counter(node.name for node in graph.node if node.name)
    for name in (n for n, times in names.items() if times > 1):
        note("GR-22", "warning", where, f"{names[name]} nodes have the name {name!r}")
    for name in repeated(v.name for v in graph.value_info):
        note("GR-20", "warning", where, f"value_info describes {name!r} twice")
    if place.kind != "function":
        _contradictions(graph, where, note)
    for name in place.definitions:
        if place.sees(name):
            rule = "TR-17" if place.kind == "training" else "SC-03"
            note(rule, "error", where, f"{name!r} is also defined in an enclosing graph")


def _contradictions(graph: Any, where: str, note: Note) -> None:
    """Check that all that declares one value agrees: inputs, initializers, outputs and value_info."""
    declared: dict[str, tuple[Any, Any]] = {}
    stored = ((t.name, element(t.data_type), tuple(t.dims)) for t in graph.initializer)
    types = ((v.name, type_of(v.type), extents(v.type)) for v in chain(graph.input, graph.output, graph.value_info))
    for name, kind, shape in chain(stored, types):
        other, first = declared.setdefault(name, (kind, shape))
        if not shapes_agree(shape, first) or (kind and other and kind != other):
            text = f"{name!r} is declared both {other}{_shown(first)} and {kind}{_shown(shape)}"
            note("GR-20", "warning", where, text)


def _shown(shape: tuple[int | str | None, ...] | None) -> str:
    return "" if shape is None else f"[{', '.join('?' if d in (None, '') else str(d) for d in shape)}]"


def _declarations(place: GraphPlace, ir_version: int, note: Note) -> None:
    """Check inputs, outputs, initializers and annotations of a graph."""
    graph, where, kind = place.graph, place.where, place.kind
    inputs = {v.name for v in graph.input}
    if kind == "subgraph" and not graph.name:
        note("MV-04", "warning", where, "the graph has no name")
    for tensor in graph.initializer:
        if ir_version <= 3 and tensor.name not in inputs:
            rule = "GR-06" if kind == "main" else "SC-09"
            note(rule, "error", where, f"initializer {tensor.name!r} is not an input; below IR 4 it must be")
        if kind == "subgraph" and ir_version >= 4 and tensor.name in inputs:
            note("SC-08", "error", where, f"{tensor.name!r} is both an input and an initializer")
    for v in graph.output if kind == "subgraph" else ():
        if not v.name:
            note("SC-10", "error", where, "an output has no name")
        elif v.name not in place.definitions:
            note("SC-06", "error", where, f"output {v.name!r} is not defined in the graph that returns it")
    ends = [*graph.input, *graph.output] if kind == "main" else ()
    for v in ends:
        if v.type.WhichOneof("value") is None:
            note("GR-16", "error", f"{where}, value {v.name!r}", "it has no type")
        elif v.type.HasField("tensor_type") and not v.type.tensor_type.HasField("shape"):
            note("GR-16", "error", f"{where}, value {v.name!r}", "it has no shape")
    for v in chain(graph.input, graph.output, graph.value_info):
        _type(v.type, f"{where}, value {v.name!r}", note)
        check_metadata(v, f"{where}, value {v.name!r}", note)
    check_metadata(graph, where, note)
    for annotation in graph.quantization_annotation:
        refers = [annotation.tensor_name, *(e.value for e in annotation.quant_parameter_tensor_names)]
        for name in refers:
            if name not in place.definitions:
                text = f"quantization_annotation names {name!r}, which is not a value of the graph"
                note("QA-02", "warning", where, text)
    check_since(graph, {"sparse_initializer": 6, "quantization_annotation": 5}, ir_version, where, note)


def _type(message: Any, path: str, note: Note) -> None:
    """Check a type at any depth; the importer checks element types and keys."""
    pending = [message] if message.WhichOneof("value") else []
    while pending:
        kind = pending.pop()
        match kind.WhichOneof("value"):
            case None:
                note("TY-14", "error", path, "the type of its elements is missing")
            case "tensor_type" | "sparse_tensor_type" as field:
                for dim in getattr(kind, field).shape.dim:
                    if dim.dim_value < 0:
                        note("SH-13", "error", path, f"an extent is {dim.dim_value}")
            case "sequence_type" | "optional_type" as field:
                pending.append(getattr(kind, field).elem_type)
            case "map_type":
                pending.append(kind.map_type.value_type)
            case "opaque_type":
                if not kind.opaque_type.name:
                    note("TY-20", "error", path, "the opaque type has no name")


def _attribute(a: Any, path: str, note: Note) -> None:
    if not a.name:
        note("AT-01", "error", path, "an attribute has no name")
    used = used_fields(a)
    where = f"{path}, attribute {a.name!r}"
    if a.ref_attr_name and not a.type:
        note("AT-02", "error", where, "the reference has no type")
    if not a.ref_attr_name and not used and a.type in MESSAGES:
        note("AT-01", "error", where, "it has no value")
    if a.ref_attr_name and used and a.name not in LEGACY_HINTS:
        note("AT-01", "error", where, f"it has both ref_attr_name {a.ref_attr_name!r} and {used[0]!r}")


def _tensors(place: GraphPlace) -> Iterator[tuple[Any, str]]:
    """Every tensor stored in a graph, without those of subgraphs."""
    if place.kind != "function":
        for tensor in place.graph.initializer:
            yield tensor, f"{place.where}, initializer {tensor.name!r}"
        for sparse in place.graph.sparse_initializer:
            yield sparse.values, f"{place.where}, initializer {sparse.values.name!r}"
            yield sparse.indices, f"{place.where}, initializer {sparse.values.name!r}, indices"
    for i, node in enumerate(place.graph.node):
        for a in node.attribute:
            path = f"{place.node(i)}, attribute {a.name!r}"
            yield from ((tensor, path) for tensor, _ in tensors(a, into_graphs=False))


def _stored(tensor: Any, path: str, files: ExternalFiles, note: Note) -> None:
    row = ELEMENT_TYPES.get(tensor.data_type)
    if row is not None and row.dtype.kind in "iu" and row.bits in (8, 16) and tensor.int32_data:
        numbers = np.asarray(tensor.int32_data, np.int64)
        info = np.iinfo(row.dtype)
        if numbers.min() < info.min or numbers.max() > info.max:
            note("TD-05", "error", path, f"int32_data has values out of the range of {row.name}")
    check_metadata(tensor, path, note)
    if tensor.data_location != EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if unknown := sorted(entries.keys() - EXTERNAL_KEYS):
        note("EX-15", "warning", path, f"external_data has unknown keys {unknown}")
    if not files.follow_links and files.is_link(entries.get("location", "")):
        note("EX-05", "error", path, f"{entries['location']!r} is a symbolic link")


def check_header(model: Any, note: Note) -> None:
    """Check a ModelProto except for its graphs."""
    check_since(model, FIRST_IR, model.ir_version, "model", note)
    if not model.graph.name:
        note("MV-04", "error", "model", "the graph has no name")
    for domain in repeated(normal_domain(entry.domain) for entry in model.opset_import):
        text = f"domain {domain or 'ai.onnx'!r} is imported twice; the higher version applies"
        note("OR-02", "warning", "model", text)
    check_metadata(model, "model", note)
    for i, function in enumerate(model.functions):
        _function(function, f"function {function.name!r}" if function.name else f"functions[{i}]", model, note)
    for i, configuration in enumerate(model.configuration):
        _configuration(configuration, f"configuration {configuration.name or i!r}", note)
    for name in repeated(c.name for c in model.configuration):
        note("DV-02", "error", "model", f"several configurations have the name {name!r}")


def check_since(message: Any, fields: Mapping[str, int], ir_version: int, path: str, note: Note) -> None:
    """Check that the model's IR version has the fields of a message that are set; ``fields``: since which version."""
    for field, since in fields.items():
        if getattr(message, field) and ir_version < since:
            rule = {"configuration": "DV-27", "opset_import": "MV-03"}.get(field, "MV-16")
            note(rule, "warning", path, f"{field} exists since IR {since}, the model is of IR {ir_version}")


def is_utf8(message: Any, path: str, note: Note) -> bool:
    """Whether all strings of a message are valid UTF-8; protobuf returns the others as bytes, the first is noted."""
    pending = [message]
    while pending:
        for field, value in pending.pop().ListFields():
            if field.type == field.TYPE_STRING:
                texts = (value,) if isinstance(value, str | bytes) else tuple(value)
                for invalid in (text for text in texts if isinstance(text, bytes)):
                    note("GR-23", "error", path, f"{invalid[:40]!r} is not valid UTF-8, so nothing else was checked")
                    return False
            elif field.type == field.TYPE_MESSAGE:
                pending.extend((value,) if hasattr(value, "ListFields") else value)
    return True


def check_metadata(message: Any, path: str, note: Note) -> None:
    """Check the metadata_props of a message."""
    for key in repeated(entry.key for entry in message.metadata_props) if message.metadata_props else ():
        note("ME-02", "error", path, f"metadata key {key!r} is repeated")


def repeated(values: Iterable[str]) -> list[str]:
    """The values that occur more than once."""
    return [value for value, times in Counter(values).items() if times > 1]


def _function(function: Any, path: str, model: Any, note: Note) -> None:
    if not function.name:
        note("FN-28", "error", path, "the function has no name")
    if not function.HasField("domain") and model.ir_version >= 8:
        note("FN-28", "error", path, "the function has no domain")
    fields = {"attribute_proto": 9, "overload": 10, "value_info": 10}
    check_since(function, fields, model.ir_version, path, note)
    check_metadata(function, path, note)


def _configuration(configuration: Any, path: str, note: Note) -> None:
    if not configuration.name:
        note("DV-02", "error", path, "the configuration has no name")
    if configuration.num_devices < 1:
        note("DV-02", "error", path, f"num_devices is {configuration.num_devices}")
    labels = len(configuration.device)
    if labels and labels != configuration.num_devices:
        note("DV-02", "error", path, f"{labels} device labels for {configuration.num_devices} devices")


Shape = tuple[int | str | None, ...]


def check_devices(
    node: Any, path: str, configurations: dict[str, int], shapes: Mapping[str, Shape], note: Note
) -> None:
    """Check a node's device_configurations; ``configurations`` maps the model's to their numbers of devices."""
    if not node.device_configurations:
        return
    for name, annotation in read_node(node).items():
        if name not in configurations:
            note("DV-04", "error", path, f"configuration {name!r} is not one of the model's {sorted(configurations)}")
            continue
        valid: dict[str, Sharding] = {}
        for sharding in annotation.shardings:
            tensor = sharding.tensor
            where = f"{path}, sharding of {tensor!r}"
            if not tensor or tensor not in {*node.input, *node.output}:
                note("DV-05", "error", where, f"{tensor!r} is not an input or output of the node")
            wrong = list(problems(sharding, configurations[name]))
            for rule, text in wrong:
                note(rule, "error", where, text)
            if not wrong and tensor in shapes and _check_axes(sharding, shapes[tensor], where, note):
                valid[tensor] = sharding
        operator = resolve(node.domain, node.op_type)
        if operator is not None and operator.broadcasts:
            inputs = [valid[n] for n in dict.fromkeys(node.input) if n in valid]
            for pair in pairwise(inputs):
                _check_colocated(*pair, shapes, path, note)


def _check_axes(sharding: Sharding, shape: Shape, path: str, note: Note) -> bool:
    """Whether the axes are valid and distinct; notes extents that differ from the tensor's."""
    rank = len(shape)
    axes = [a + rank if a < 0 else a for a in sharding.axes]
    if not all(0 <= a < rank for a in axes) or len(set(axes)) < len(axes):
        note("DV-09", "error", path, f"axes {list(sharding.axes)} of a tensor of rank {rank}")
        return False
    for axis in axes:
        factors = [s.extent for s in sharding.splits if s.axis in (axis, axis - rank)]
        extent = factors[0] if len(factors) == 1 else None
        if len(factors) > 1 and all(isinstance(f, int) for f in factors):
            extent = math.prod(factors)  # type: ignore[arg-type]
        if extent is not None and type(extent) is type(shape[axis]) and extent != shape[axis]:
            note("DV-10", "warning", path, f"axis {axis} has extent {shape[axis]}, but {extent} in the sharding")
    return True


def _check_colocated(a: Sharding, b: Sharding, shapes: Mapping[str, Shape], path: str, note: Note) -> None:
    """For each shard of the output, some device must hold the matching shards of both inputs (rule DV-16)."""
    counts: dict[int, int] = {}
    indices: list[dict[int, dict[int, int]]] = []
    for sharding in (a, b):
        shape, shards = shapes[sharding.tensor], shard_of(sharding.pattern)
        if not shards or len({s.axis for s in sharding.splits}) < len(sharding.splits):
            return
        # Axes are counted from the last, as in broadcasting.
        axes = [s.axis - len(shape) if s.axis >= 0 else s.axis for s in sharding.splits]
        for axis, split in zip(axes, sharding.splits, strict=True):
            if shape[axis] == 1 and split.shards > 1:
                note("DV-16", "warning", path, f"{sharding.tensor!r} has 1 on axis {split.axis}, which is broadcast")
                return
            if counts.setdefault(axis, split.shards) != split.shards:
                text = f"{a.tensor!r} and {b.tensor!r} have different numbers of shards along axis {axis}"
                note("DV-16", "warning", path, text)
                return
        indices.append({d: dict(zip(axes, index, strict=True)) for d, index in shards.items()})
    first, second = indices
    covered = {
        tuple((first[d] | second[d])[axis] for axis in counts)
        for d in first.keys() & second.keys()
        if all(first[d][axis] == second[d][axis] for axis in first[d].keys() & second[d].keys())
    }
    if len(covered) < math.prod(counts.values()):
        text = f"for some shard of the output, no device holds the shards of both {a.tensor!r} and {b.tensor!r}"
        note("DV-16", "error", path, text)
