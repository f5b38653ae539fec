"""Checks of a model outside its graphs: versions, metadata, functions' headers; device configurations and shardings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

from ..ops.registry import resolve
from ..proto.devices import Sharding, problems, read_node, shard_of
from ..proto.messages import normal_domain
from .report import Note

FIRST_IR: Final = {"opset_import": 3, "training_info": 7, "functions": 8, "configuration": 11}
"""Field of the model -> the IR version that introduced it."""


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
