"""Declared types of values: TypeProto and ValueInfoProto as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..errors import ModelError
from .dtypes import to_dtype

Dim = int | str | None
"""An extent: a number, the name of a dimension variable, or unknown."""
UNNAMED: Final = frozenset({"", "?", "None"})
"""Names that exporters give every unknown extent; as a dimension variable they would all have to be equal."""


@dataclass(frozen=True)
class TensorType:
    """A dense tensor; ``shape`` is None if the rank is unknown. Strings have dtype object."""

    dtype: np.dtype
    shape: tuple[Dim, ...] | None = None

    def __str__(self) -> str:
        extents = "..." if self.shape is None else ", ".join(str(d or "?") if d != 0 else "0" for d in self.shape)
        return f"{_name(self.dtype)}[{extents}]"


@dataclass(frozen=True)
class SparseTensorType(TensorType):
    """A sparse tensor; as an input or output of a model it is dense."""


@dataclass(frozen=True)
class SequenceType:
    """A list of values of one type."""

    element: ValueType | None

    def __str__(self) -> str:
        return f"sequence({self.element})"


@dataclass(frozen=True)
class OptionalType:
    """A value or None."""

    element: ValueType | None

    def __str__(self) -> str:
        return f"optional({self.element})"


@dataclass(frozen=True)
class MapType:
    """A dictionary."""

    key: np.dtype
    value: ValueType | None

    def __str__(self) -> str:
        return f"map({_name(self.key)}, {self.value})"


@dataclass(frozen=True)
class OpaqueType:
    """A type whose meaning is private to its domain."""

    domain: str
    name: str

    def __str__(self) -> str:
        return f"opaque({self.domain}.{self.name})"


ValueType = TensorType | SequenceType | OptionalType | MapType | OpaqueType


@dataclass(frozen=True)
class ValueInfo:
    """A value of a graph: its name and, if declared, its type."""

    name: str
    type: ValueType | None = None
    denotations: tuple[str, ...] = ()
    """The denotation of each dimension (DATA_BATCH, ...), if given."""
    denotation: str = ""
    """The denotation of the value (IMAGE, AUDIO, TEXT), if given."""

    @property
    def shape(self) -> tuple[Dim, ...] | None:
        """The extents of a tensor; None if its rank is unknown or the value is not a tensor."""
        return self.type.shape if isinstance(self.type, TensorType) else None

    def reshaped(self, shape: Sequence[Dim]) -> ValueInfo:
        """A copy with another shape; unchanged if the value has none."""
        if not isinstance(self.type, TensorType) or self.type.shape is None:
            return self
        return replace(self, type=replace(self.type, shape=tuple(shape)))

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"

    def __repr__(self) -> str:
        return f"<{self}>"


def shapes_agree(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> bool:
    """Whether two declared shapes may be those of one value: variables and unknown extents fit any other."""
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(m == n for m, n in zip(a, b, strict=True) if type(m) is type(n) is int)


def to_value_info(message: Any) -> ValueInfo:
    """A ValueInfoProto as a ValueInfo."""
    try:
        kind = to_type(message.type)
    except ModelError as e:
        raise ModelError(f"value {message.name!r} has an invalid type: {e.message}", rule=e.rules) from None
    except ValueError as e:
        raise ModelError(f"value {message.name!r} has an invalid type: {e}", rule="TY-01") from None
    shape = getattr(message.type, message.type.WhichOneof("value") or "tensor_type", None)
    marks = tuple(d.denotation for d in shape.shape.dim) if isinstance(kind, TensorType) and shape is not None else ()
    return ValueInfo(message.name, kind, marks if any(marks) else (), message.type.denotation)


def to_type(message: Any) -> ValueType | None:
    """A TypeProto as a type; None if it is empty."""
    match message.WhichOneof("value"):
        case "tensor_type":
            return _tensor(TensorType, message.tensor_type)
        case "sparse_tensor_type":
            return _tensor(SparseTensorType, message.sparse_tensor_type)
        case "sequence_type":
            return SequenceType(to_type(message.sequence_type.elem_type))
        case "optional_type":
            return OptionalType(to_type(message.optional_type.elem_type))
        case "map_type":
            key = to_dtype(message.map_type.key_type)
            if key.kind not in "iuO":
                raise ModelError(f"a map's keys are integers or strings, not {key}", rule="TY-16")
            return MapType(key, to_type(message.map_type.value_type))
        case "opaque_type":
            return OpaqueType(message.opaque_type.domain, message.opaque_type.name)
        case _:
            return None


def _name(dtype: np.dtype) -> str:
    return "string" if dtype.hasobject else str(dtype)


def _tensor(kind: type[TensorType], message: Any) -> TensorType:
    shape = tuple(map(_dim, message.shape.dim)) if message.HasField("shape") else None
    return kind(to_dtype(message.elem_type), shape)


def _dim(message: Any) -> Dim:
    match message.WhichOneof("value"):
        case "dim_value":
            # Some exporters write -1 for "unknown" (rule SH-13).
            return int(message.dim_value) if message.dim_value >= 0 else None
        case "dim_param":
            return None if message.dim_param in UNNAMED else message.dim_param
        case _:
            return None
