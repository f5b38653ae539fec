"""Checks of a model outside its graphs: versions, metadata, functions' headers, device configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..proto.names import normal_domain
from .report import Note

FIRST_IR: Final = {"opset_import": 3, "training_info": 7, "functions": 8, "configuration": 11}
"""Field of the model -> the IR version that introduced it."""


def check_header(model: Any, note: Note) -> None:
    """Check a ModelProto except for its graphs."""
    check_since(model, FIRST_IR, model.ir_version, "model", note)
    if not model.graph.name:
        note("MV-04", "error", "model", "the graph has no name")
    for domain in _twice(normal_domain(entry.domain) for entry in model.opset_import):
        note(
            "OR-02", "warning", "model", f"domain {domain or 'ai.onnx'!r} is imported twice; the higher version applies"
        )
    check_metadata(model, "model", note)
    for i, function in enumerate(model.functions):
        _function(function, f"function {function.name!r}" if function.name else f"functions[{i}]", model, note)
    for i, configuration in enumerate(model.configuration):
        _configuration(configuration, f"configuration {configuration.name or i!r}", note)
    for name in _twice(c.name for c in model.configuration):
        note("DV-02", "error", "model", f"several configurations have the name {name!r}")


def check_since(message: Any, fields: Mapping[str, int], ir_version: int, path: str, note: Note) -> None:
    """Check that the model's IR version has the fields of a message that are set; ``fields``: since which version."""
    for field, since in fields.items():
        if getattr(message, field) and ir_version < since:
            rule = {"configuration": "DV-27", "opset_import": "MV-03"}.get(field, "MV-16")
            note(rule, "warning", path, f"{field} exists since IR {since}, the model is of IR {ir_version}")


def invalid_utf8(message: Any) -> bytes | None:
    """The first string of a message that is not valid UTF-8, which protobuf returns as bytes; None if there is none."""
    pending = [message]
    while pending:
        for field, value in pending.pop().ListFields():
            if field.type == field.TYPE_STRING:
                texts = (value,) if isinstance(value, str | bytes) else tuple(value)
                if bytes in map(type, texts):
                    return next(text for text in texts if isinstance(text, bytes))
            elif field.type == field.TYPE_MESSAGE:
                pending.extend((value,) if hasattr(value, "ListFields") else value)
    return None


def check_metadata(message: Any, path: str, note: Note) -> None:
    """Check the metadata_props of a message."""
    for key in _twice(entry.key for entry in message.metadata_props) if message.metadata_props else ():
        note("ME-02", "error", path, f"metadata key {key!r} is repeated")


def _twice(values: Iterable[str]) -> list[str]:
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
