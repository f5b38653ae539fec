"""Buckets: inputs padded to a few sizes, so that few shapes are compiled, and outputs cut back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ops.arrays import is_traced
from ..proto.types import ValueInfo
from .arguments import override_dims


def checked_buckets(inputs: Sequence[ValueInfo], bucket: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The sizes for each dimension variable, ascending."""
    override_dims(inputs, dict.fromkeys(bucket, 0))  # refuses names that are no dimension variables
    return {name: sorted(sizes) for name, sizes in bucket.items()}


def pad(
    inputs: Sequence[ValueInfo], values: dict[str, Any], bucket: Mapping[str, list[int]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Inputs padded with zeros (texts with empty ones) to the next size of their bucket, and the extents they had.

    What is larger than the largest size stays as it is, and so does every input while a value is traced.
    """
    if not bucket or is_traced(values):
        return values, {}
    extents: dict[str, int] = {}
    padded = dict(values)
    for declared in inputs:
        shape = declared.shape or ()
        if not bucket.keys() & set(shape):
            continue
        array = np.asarray(values[declared.name])
        widths = []
        for name, have in zip(shape, array.shape, strict=True):
            want = next((n for n in bucket.get(name, ()) if n >= have), have) if isinstance(name, str) else have
            widths.append((0, want - have))
            if want != have:
                extents[str(name)] = have
        nothing = "" if array.dtype == object else 0
        padded[declared.name] = np.pad(array, widths, constant_values=nothing)
    return padded, extents


def cut(outputs: Sequence[ValueInfo], results: tuple[Any, ...], extents: Mapping[str, int]) -> tuple[Any, ...]:
    """Outputs without what padding added to the dimensions they declare.

    By NumPy: JAX would compile the slice anew for each extent.
    """
    if not extents:
        return results

    ends = [[extents.get(d) if isinstance(d, str) else None for d in v.shape or ()] for v in outputs]
    return tuple(np.asarray(r)[tuple(map(slice, e))] for r, e in zip(results, ends, strict=True))
