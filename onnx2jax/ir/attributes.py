"""Decodes attributes into the values that operators take, and metadata, which affects no result, into strings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final

from ..errors import ModelError
from ..proto.external import ExternalFiles
from ..proto.tensors import to_array, to_dense
from ..proto.types import to_type
from . import rules


def kind_of(a: Any, where: str, ir_version: int, strict: bool) -> int:
    """The type code of an AttributeProto; raises unless its value is in the field of that type and in no other."""
    used = rules.used_fields(a)
    if not a.type:  # IR 1 stores none: it is that of the only field in use (rule AT-03)
        if ir_version >= 2 and strict:
            raise ModelError(f"{where}: attribute {a.name!r} has no type", rule="AT-02")
        if len(used) != 1:
            text = f"{where}: attribute {a.name!r} has no type and {len(used)} values"
            raise ModelError(text, rule=("AT-01", "AT-03"))
        return next(kind for kind, field in rules.VALUE_FIELDS.items() if field == used[0])
    if others := [n for n in used if n != rules.VALUE_FIELDS.get(a.type)]:
        raise ModelError(
            f"{where}: attribute {a.name!r} of type {a.type} has a value in {others[0]!r}; "
            f"its type uses {rules.VALUE_FIELDS.get(a.type, 'no known field')!r}",
            rule=("AT-01", "AT-02"),
        )
    return int(a.type)


def value(a: Any, kind: int, where: str, files: ExternalFiles, graph: Callable[..., Any]) -> Any:
    """The value of an AttributeProto of type ``kind``; ``graph(message, index)`` imports the graphs among them."""
    match rules.VALUE_FIELDS.get(kind):
        case "f" | "i" as field:
            return getattr(a, field)
        case "floats" | "ints" as field:
            return tuple(getattr(a, field))
        case "s":
            return _text(a.s)
        case "strings":
            return tuple(map(_text, a.strings))
        case "t":
            return to_array(a.t, files)
        case "tensors":
            return tuple(to_array(t, files) for t in a.tensors)
        case "g":
            return graph(a.g)
        case "graphs":
            return tuple(map(graph, a.graphs, count()))
        case "sparse_tensor":
            return to_dense(a.sparse_tensor, files)
        case "sparse_tensors":
            return tuple(to_dense(t, files) for t in a.sparse_tensors)
        case "tp":
            return to_type(a.tp)
        case "type_protos":
            return tuple(map(to_type, a.type_protos))
        case _:
            raise ModelError(f"{where}: attribute {a.name!r} has type {a.type}, which is undefined", rule="AT-02")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


_IMAGE: Final = {
    "Image.BitmapPixelFormat": ("Gray8", "Rgb8", "Bgr8", "Rgba8", "Bgra8"),
    "Image.ColorSpaceGamma": ("Linear", "SRGB"),
    "Image.NominalPixelRange": ("NominalRange_0_255", "Normalized_0_1", "Normalized_1_1", "NominalRange_16_235"),
}
_SPELLING: Final = {text.lower(): text for key, values in _IMAGE.items() for text in (key, *values)}
"""Canonical spelling of keys and values about images, which are case-insensitive (rule ME-05)."""


def metadata(model: Any) -> dict[str, str]:
    """The metadata_props of a ModelProto and its descriptive fields; the last value of a repeated key."""
    result = entries(model)
    for name in ("producer_name", "producer_version", "domain", "doc_string"):
        if model.HasField(name):
            result.setdefault(name, getattr(model, name))
    if model.HasField("model_version"):
        result.setdefault("model_version", version(model.model_version))
    return result


def entries(message: Any) -> dict[str, str]:
    """The metadata_props of a message."""
    result = {}
    for entry in message.metadata_props:
        key = _SPELLING.get(entry.key.lower(), entry.key)
        result[key] = _SPELLING.get(entry.value.lower(), entry.value) if key in _IMAGE else entry.value
    return result


def version(number: int) -> str:
    """A model_version as text: a number, or major.minor.patch if the upper 32 bits are set (rule MV-06).

    >>> version(7), version(0x0001000200000159)
    ('7', '1.2.345')
    """
    number &= 2**64 - 1
    return f"{number >> 48}.{number >> 32 & 0xFFFF}.{number & 0xFFFFFFFF}" if number >> 32 else str(number)
