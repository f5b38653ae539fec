"""Dimension variables of a model's inputs, and the extents that keywords give them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import InputNameError, InputTypeError, InputValueError, did_you_mean
from ...proto.messages import unused_name
from ...proto.types import ValueInfo


def named_dims(inputs: Sequence[ValueInfo]) -> tuple[ValueInfo, ...]:
    """The inputs with a name for each free dimension; one without a name in the file is called ``input_axis``.

    >>> import numpy as np
    >>> from onnx2jax.proto.types import TensorType
    >>> named_dims([ValueInfo("x", TensorType(np.dtype("float32"), (None, "time", 64)))])[0].shape
    ('x_0', 'time', 64)
    """
    taken = variables(inputs)
    return tuple(
        v.reshaped([unused_name(f"{v.name}_{i}", taken) if d is None else d for i, d in enumerate(v.shape or ())])
        for v in inputs
    )


def variables(inputs: Iterable[ValueInfo]) -> list[str]:
    """The names of dimensions, in order."""
    return list(dict.fromkeys(d for v in inputs for d in v.shape or () if isinstance(d, str)))


def check_dims(keyword: str, sizes: Mapping[str, Any], inputs: Iterable[ValueInfo]) -> None:
    """Raise InputTypeError unless a keyword's value is a dict, InputNameError for a key that names no dimension."""
    if not isinstance(sizes, Mapping):
        raise InputTypeError(f"{keyword} takes a dict by dimension variable, not {type(sizes).__name__}")
    known = variables(inputs)
    if unknown := sorted(set(sizes) - set(known)):
        fix = did_you_mean(unknown, known) or ("" if known else "; for other batch sizes: convert(..., rebatch=True)")
        raise InputNameError(f"{keyword} names {unknown}; the model's dimension variables are {known}{fix}")


def checked_extent(keyword: str, name: str, extent: Any, also: str = "") -> int:
    """A dimension's extent as an int; ``also`` says in a message what else the keyword takes.

    Raises:
        InputValueError: it is no integer, or negative.
    """
    try:
        size = -1 if isinstance(extent, bool) else operator.index(extent)
    except TypeError:
        size = -1
    if size >= 0:
        return size
    message = f"{keyword} has {name!r}: {extent!r}; an extent is an integer of at least 0{also}"
    if isinstance(extent, list | tuple):
        message += f". Compile once for each size: for n in {tuple(extent)}: model.compile(dims={{{name!r}: n}})"
    raise InputValueError(message)


def checked_dims(dims: Mapping[str, Any], inputs: Iterable[ValueInfo]) -> dict[str, int]:
    """The extents by dimension variable that ``dims=`` gives.

    Raises:
        InputNameError, InputTypeError, InputValueError: a key names no dimension, or a value is no extent.
    """
    check_dims("dims", dims, inputs)
    return {name: checked_extent("dims", name, extent) for name, extent in dims.items()}


def with_dims(inputs: Sequence[ValueInfo], dims: Mapping[str, int]) -> tuple[ValueInfo, ...]:
    """The inputs with dimension variables replaced by extents; others keep their names, or none."""
    named = named_dims(inputs)
    dims = checked_dims(dims, named)
    return tuple(
        v.reshaped([dims.get(str(n), d) for n, d in zip(by_name.shape or (), v.shape or (), strict=True)])
        for v, by_name in zip(inputs, named, strict=True)
    )
