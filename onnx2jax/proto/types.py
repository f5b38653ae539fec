"""Element types, as ONNX's codes and NumPy's dtypes; declared types of values, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from ..errors import ModelError

STRING: Final = 8
Dim = int | str | None
"""An extent: a number, the name of a dimension variable, or unknown."""
UNNAMED: Final = frozenset({"", "?", "None"})
"""Names that exporters give every unknown extent; as a dimension variable they would all have to be equal."""


class ElementType(NamedTuple):
    """One row of ONNX's table of element types."""

    name: str
    dtype: np.dtype
    bits: int
    field: str
    """The typed field of TensorProto for such elements, used instead of raw_data."""


def _row(name: str, dtype: object, bits: int, field: str = "int32_data") -> ElementType:
    return ElementType(name, np.dtype(dtype), bits, field)  # type: ignore[call-overload]


ELEMENT_TYPES: Final[dict[int, ElementType]] = {
    1: _row("FLOAT", np.float32, 32, "float_data"),
    2: _row("UINT8", np.uint8, 8),
    3: _row("INT8", np.int8, 8),
    4: _row("UINT16", np.uint16, 16),
    5: _row("INT16", np.int16, 16),
    6: _row("INT32", np.int32, 32),
    7: _row("INT64", np.int64, 64, "int64_data"),
    STRING: _row("STRING", object, 0, "string_data"),
    9: _row("BOOL", np.bool_, 8),
    10: _row("FLOAT16", np.float16, 16),
    11: _row("DOUBLE", np.float64, 64, "double_data"),
    12: _row("UINT32", np.uint32, 32, "uint64_data"),
    13: _row("UINT64", np.uint64, 64, "uint64_data"),
    14: _row("COMPLEX64", np.complex64, 64, "float_data"),
    15: _row("COMPLEX128", np.complex128, 128, "double_data"),
    16: _row("BFLOAT16", ml_dtypes.bfloat16, 16),
    17: _row("FLOAT8E4M3FN", ml_dtypes.float8_e4m3fn, 8),
    18: _row("FLOAT8E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, 8),
    19: _row("FLOAT8E5M2", ml_dtypes.float8_e5m2, 8),
    20: _row("FLOAT8E5M2FNUZ", ml_dtypes.float8_e5m2fnuz, 8),
    21: _row("UINT4", ml_dtypes.uint4, 4),
    22: _row("INT4", ml_dtypes.int4, 4),
    23: _row("FLOAT4E2M1", ml_dtypes.float4_e2m1fn, 4),
    24: _row("FLOAT8E8M0", ml_dtypes.float8_e8m0fnu, 8),
    25: _row("UINT2", ml_dtypes.uint2, 2),
    26: _row("INT2", ml_dtypes.int2, 2),
    27: _row("FLOAT6E2M3", ml_dtypes.float6_e2m3fn, 6),
    28: _row("FLOAT6E3M2", ml_dtypes.float6_e3m2fn, 6),
}

HOST_ONLY: Final = frozenset(ELEMENT_TYPES[code].dtype for code in (STRING, 27, 28))
"""Types without arrays in JAX: XLA has no strings, and in jaxlib 0.10 no floats of 6 bits."""

FLOAT6: Final = "JAX has floats of 4, 8, 16, 32 and 64 bits; float8_e4m3fn has all values of floats of 6 bits"
"""What a message about a float of 6 bits in a traced program says of other types."""

_CODES: Final = {row.dtype: code for code, row in ELEMENT_TYPES.items()}


def to_dtype(code: int, name: str = "the element type") -> np.dtype:
    """The NumPy dtype of an ONNX element type code; strings are ``object``. ``name`` is what has the code, for errors.

    >>> to_dtype(1)
    dtype('float32')
    """
    if code not in ELEMENT_TYPES:
        raise ValueError(f"{name} ({code}) is not an ONNX element type; the codes are 1 to {max(ELEMENT_TYPES)}")
    return ELEMENT_TYPES[code].dtype


def to_code(dtype: object) -> int:
    """The ONNX element type code of a NumPy dtype.

    >>> to_code(np.float32)
    1
    """
    native = np.dtype(dtype)  # type: ignore[call-overload]
    native = native if native.isnative else native.newbyteorder("=")
    code = STRING if native.kind in "UST" else _CODES.get(native)
    if code is None:
        raise ValueError(f"ONNX has no element type for dtype {native}")
    return code


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
