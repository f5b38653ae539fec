"""Arrays in a few numbers for a page: range, mean, zeros, NaN, a histogram, a small picture, a short text."""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import numpy as np

from ...ir.graph import Graph, Reference
from ...proto.mapped import load
from .comparison import described
from .table import clipped

MOST: Final = 1 << 16
"""Elements of a sample; larger arrays are read at this many evenly spaced places."""
BINS: Final = 32
SIDE: Final = 32
"""Pixels along the longer side of a picture."""
TILES: Final = 16
"""Planes, such as channels, that a picture shows side by side."""
MOST_LETTERS: Final = 200
"""Letters of an attribute's value."""
MOST_SHOWN: Final = 16
"""Elements of a constant whose values are shown."""


def figures(value: Any, *, whole: bool = False) -> dict[str, Any] | None:
    """Range, mean, share of zeros and count of NaN and infinities; None if it holds no numbers.

    Args:
        value: an array.
        whole: read all of it, rather than a sample.
    """
    array = _numbers(value)
    if array is None:
        return None
    elements = _floats(array if whole else _sample(array))
    finite = elements[np.isfinite(elements)]
    facts: dict[str, Any] = {"size": array.size, "zeros": round(float((elements == 0).mean()), 4)}
    if elements.size < array.size:
        facts["sample"] = elements.size
    if nan := int(np.isnan(elements).sum()):
        facts["nan"] = nan
    if infinite := elements.size - finite.size - nan:
        facts["inf"] = infinite
    if finite.size:
        facts |= {name: f"{getattr(finite, name)():.4g}" for name in ("min", "max", "mean")}
    return facts


def histogram(value: Any) -> list[int]:
    """The finite elements in equal bins between the least and the largest, as a share of the fullest, of 100."""
    array = _numbers(value)
    if array is None or array.size < 2:
        return []
    elements = _floats(_sample(array))
    finite = elements[np.isfinite(elements)]
    if not finite.size or finite.min() == finite.max():
        return []
    scale = np.abs(finite).max()
    counts, _ = np.histogram(finite / scale, BINS)
    return [math.ceil(100 * int(c) / int(counts.max())) for c in counts]


def picture(value: Any) -> dict[str, Any] | None:
    """The first sample as an image of bytes, NaN as 255; planes are side by side. None for scalars.

    A byte is the place between the least and the largest number, or if signs differ between their larger magnitudes.
    """
    array = _numbers(value)
    if array is None or array.size < 2:
        return None
    array = array.squeeze()
    array = np.atleast_2d(array[(0,) * (array.ndim - 3)])
    planes = array.reshape(-1, *array.shape[-2:])[:TILES]
    columns = math.ceil(math.sqrt(len(planes)))
    most = max(1, (SIDE if columns == 1 else 2 * SIDE) // columns)
    planes = planes[:, _places(planes.shape[1], most)][:, :, _places(planes.shape[2], most)]
    rows, (height, width) = -(-len(planes) // columns), planes.shape[1:]
    empty = rows * columns - len(planes)
    sheet = np.pad(_floats(planes), ((0, empty), (0, 0), (0, 0)), constant_values=np.nan)
    sheet = sheet.reshape(rows, columns, height, width).swapaxes(1, 2).reshape(rows * height, columns * width)
    finite = sheet[np.isfinite(sheet)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    signed = low < 0 < high
    if signed:
        low, high = -max(-low, high), max(-low, high)
    with np.errstate(all="ignore"):
        places = np.nan_to_num((sheet / 2 - low / 2) / ((high / 2 - low / 2) or 1.0) * 254, nan=255.0)
    data = np.where(np.isnan(sheet), 255, np.clip(places, 0, 254)).astype(np.uint8)
    encoded = base64.b64encode(data.tobytes()).decode()
    return {"width": data.shape[1], "height": data.shape[0], "signed": signed, "data": encoded}


def _places(size: int, most: int) -> Any:
    """Indices along an axis, at most so many."""
    return np.linspace(0, size - 1, min(size, most)).round().astype(int)


def _numbers(value: Any) -> Any:
    """An array of real numbers, or the magnitudes of complex ones; None for other values."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or value.dtype == object or not value.size:
        return None
    try:
        array = load(value) if isinstance(value, np.ndarray) else np.asarray(value)
    except TypeError:  # a random key
        return None
    if array.dtype.kind in "USOM":
        return None
    return np.abs(array) if array.dtype.kind == "c" else array


def _sample(array: Any) -> Any:
    """Evenly spaced elements, at most MOST."""
    return array.reshape(-1)[:: -(-array.size // MOST)]


def _floats(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def text_of(value: Any) -> str:
    """A constant, or the value of an attribute, as a short text."""
    if isinstance(value, Reference):
        return f"the caller's {value.name}"
    if isinstance(value, Graph):
        return f"graph of {len(value.nodes)} nodes"
    if isinstance(value, np.ndarray):
        if value.size > MOST_SHOWN:
            return described(value)
        value = load(value).tolist()
    if isinstance(value, tuple | list) and len(value) > 4 * MOST_SHOWN:
        return f"{len(value):,} values: {', '.join(map(text_of, value[:8]))}, …"
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return clipped(value.decode(errors="replace") if isinstance(value, bytes) else str(value), MOST_LETTERS)
