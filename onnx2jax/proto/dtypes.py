"""Element types: ONNX's codes (TensorProto.DataType) and NumPy's dtypes."""

from __future__ import annotations

from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

STRING: Final = 8


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
