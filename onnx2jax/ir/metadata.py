"""Model metadata as strings; none of it affects a result."""

from __future__ import annotations

from typing import Any, Final

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
