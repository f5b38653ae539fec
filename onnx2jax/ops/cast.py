"""Conversions between element types: Cast, CastLike, BitCast."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from ml_dtypes import finfo, float8_e8m0fnu

from ..errors import KnownValueError
from ..proto.types import ELEMENT_TYPES, FLOAT6, HOST_ONLY, to_dtype
from .arrays import is_known, is_string, needs_known, xp
from .registry import Shaped, op

_UNDEFINED = "float to integer: NaN and out-of-range values, undefined in ONNX, convert as on x86 and in onnxruntime"
Rounding = Literal["up", "down", "nearest"]


def is_integer(dtype):
    """Whether a dtype is an ONNX integer (2 and 4 bits included) or object (a vector of symbolic dimensions)."""
    return dtype == object or jnp.issubdtype(dtype, np.integer)


def is_float(dtype):
    """Whether a dtype is an ONNX floating-point type, those of 4 to 16 bits included."""
    return dtype != object and jnp.issubdtype(dtype, np.floating)


def materialize_dims(value, dtype=np.int64):
    """A vector of symbolic dimensions as a JAX array; any other array unchanged."""
    if value.dtype != object:
        return value
    if is_string(value):
        raise KnownValueError("strings cannot be combined with a traced value: JAX has no strings")
    return jnp.stack([jnp.asarray(d, dtype) for d in value.flat]).reshape(value.shape)


def as_host_array(value):
    """A NumPy result as an array; an object array of Python ints becomes int64."""
    if not isinstance(value, np.ndarray | np.generic):  # NumPy unwraps objects of rank 0
        value = np.array(value, object)
    integers = value.dtype == object and value.size and all(isinstance(v, int) for v in value.flat)
    return value.astype(np.int64) if integers else value


_NUMBERS = frozenset(map(np.dtype, "bhilBHILefd"))
"""Dtypes between which NumPy and XLA convert alike, except for floats outside an integer's range."""


def cast_to(x, dtype, *, saturate=1, round_mode="up"):
    """``x`` cast to ``dtype`` by the rules of Cast."""
    dtype = np.dtype(dtype)
    if x.dtype == object or dtype == object:
        return _cast_objects(x, dtype, saturate, round_mode)
    if x.dtype == dtype:
        return x
    if "c" in (x.dtype.kind, dtype.kind):
        raise ValueError(f"Cast from {x.dtype} to {dtype}: ONNX does not cast complex numbers")
    with np.errstate(all="ignore"):
        if x.dtype in _NUMBERS and dtype in _NUMBERS:
            return x.astype(dtype) if dtype.kind == "f" or x.dtype.kind != "f" else _truncated(x, dtype)
        for float6 in HOST_ONLY.intersection((np.dtype(x.dtype), dtype)):
            x = needs_known(x, f"XLA has no {float6} ({FLOAT6})")
        if x.dtype.itemsize == 1 and x.dtype.isbuiltin == 2:  # NumPy lacks some conversions among ml_dtypes
            x = x.astype(np.float32 if is_float(x.dtype) else np.int8)
        if is_float(dtype) and dtype.itemsize == 1:
            x = x.astype(np.float32)
        if dtype == np.bool_:
            return x != 0
        if dtype == float8_e8m0fnu:
            return _to_e8m0(x, saturate, round_mode)
        if saturate and dtype.name.startswith("float8_"):
            x = xp.clip(x, float(finfo(dtype).min), float(finfo(dtype).max))
        return _truncated(x, dtype) if is_integer(dtype) and is_float(x.dtype) else x.astype(dtype)


def _truncated(x, dtype):
    """Float to integer as on x86 and in onnxruntime, also where ONNX leaves it undefined.

    Converts to int32 (int64 for wider types), NaN and overflow to the smallest integer, then drops the upper bits.
    """
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    wide = np.int32 if dtype.itemsize < 4 or dtype == np.int32 else np.int64
    bound = 2.0**31 if wide is np.int32 else 2.0**63
    if dtype == np.uint64:
        upper = x >= bound
        low = _truncated(xp.where(upper, x - bound, x), np.dtype(np.int64)).astype(dtype)
        return low + upper.astype(dtype) * dtype.type(2**63)
    return xp.where(abs(x) < bound, x, -bound).astype(wide).astype(dtype)


def _to_e8m0(x, saturate, round_mode):
    """Float to float8e8m0: the exponent of a float32, rounded by ``round_mode``."""
    x = x.astype(np.float32)
    bits = _bits(x, np.dtype(np.uint32))
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    tiny = (exponent == 0) & (fraction < 0x400000)  # below 2^-127; the rest of the denormals have exponent 2^-127
    fraction = xp.where(exponent == 0, fraction << 1 & 0x7FFFFF, fraction)
    exponent = exponent + (fraction >= {"up": 1, "nearest": 0x400000, "down": 0x800000}[round_mode]).astype(np.uint32)
    exponent = xp.minimum(exponent, np.uint32(0xFE if saturate else 0xFF))
    exponent = xp.where(tiny, np.uint32(0 if saturate else 0xFF), exponent)
    exponent = xp.where((x != x) | (x < 0), np.uint32(0xFF), exponent)
    return _bits(exponent.astype(np.uint8), np.dtype(float8_e8m0fnu))


def _cast_objects(x, dtype, saturate, round_mode):
    """Casts strings to and from numbers, and vectors of symbolic dimensions."""
    if dtype == object:
        x = needs_known(x, "JAX has no strings")
        return np.array([_text(v) for v in x.flat] + [None], object)[:-1].reshape(x.shape)
    if not is_string(x):
        return x if dtype in (np.int32, np.int64) else cast_to(materialize_dims(x), dtype)
    wide = np.dtype("uint64" if dtype == np.uint64 else "int64" if is_integer(dtype) else "float64")
    try:
        numbers = np.array([_number(s, wide) for s in x.flat], wide).reshape(x.shape)
    except OverflowError:
        raise ValueError(f"Cast from STRING to {dtype}: a number is outside the range of {wide}") from None
    return cast_to(numbers, dtype, saturate=saturate, round_mode=round_mode)


def _number(text, dtype):
    try:
        if dtype.kind in "iu":
            try:
                return int(text)
            except ValueError:
                return int(float(text))
        return float({"true": "1", "false": "0"}.get(text.lower(), text))
    except (ValueError, OverflowError):
        raise ValueError(f"Cast from STRING: {text!r} is not a number that {dtype} can represent") from None


def _text(value):
    """A number in positional notation with the fewest digits that identify it."""
    if isinstance(value, str):
        return value
    if not is_float(value.dtype):
        return str(int(value))
    if value != value:
        return "NaN"
    if abs(value) == np.inf:
        return "INF" if value > 0 else "-INF"
    if value.dtype.kind != "f":  # NumPy cannot print ml_dtypes' floats positionally
        value = np.float32(str(value))
    return np.format_float_positional(value, trim="-")


@op("Cast", limits=f"{_UNDEFINED}; strings and float6 on the host; complex numbers are not cast")
def cast(input, *, to, saturate=1, round_mode: Rounding = "up"):
    """Cast; ``to`` is a type name ("FLOAT") in opsets 1 to 5, a type code from 6 on."""
    if isinstance(to, str):
        names = {row.name: code for code, row in ELEMENT_TYPES.items()}
        if to.upper() not in names:
            raise ValueError(f"to ({to!r}) is not an element type; the element types are {', '.join(names)}")
        to = names[to.upper()]
    return cast_to(input, to_dtype(to, "to"), saturate=saturate, round_mode=round_mode)


@op("CastLike", since=15, exact=("input",), limits=f"{_UNDEFINED}; strings and float6 on the host")
def cast_like(input, target_type: Shaped, *, saturate=1, round_mode: Rounding = "up"):
    symbolic = target_type.dtype == object and not is_string(target_type)
    return cast_to(input, np.int64 if symbolic else target_type.dtype, saturate=saturate, round_mode=round_mode)


@op("BitCast", since=26, wide=True, exact=("input",), limits="strings and types of different widths are unsupported")
def bit_cast(input, *, to):
    dtype = to_dtype(to, "to")
    widths = [next(row.bits for row in ELEMENT_TYPES.values() if row.dtype == d) for d in (input.dtype, dtype)]
    if widths[0] != widths[1]:
        raise ValueError(f"BitCast from {input.dtype} ({widths[0]} bits) to {dtype} ({widths[1]} bits): widths differ")
    return input if input.dtype == dtype else _bits(input, dtype)


def _bits(x, dtype):
    """The bits of ``x`` reinterpreted (little endian) as another dtype of the same width."""
    if is_known(x):
        return np.ascontiguousarray(x).view(dtype).reshape(x.shape)
    if dtype == np.bool_:
        return _bits(x, np.dtype(np.uint8)) != 0
    if dtype == np.complex64:
        pair = lax.bitcast_convert_type(x, np.float32)
        return lax.complex(pair[..., 0], pair[..., 1])
    x = jnp.stack([x.real, x.imag], -1) if x.dtype == np.complex64 else x.astype(np.uint8) if x.dtype == np.bool_ else x
    return lax.bitcast_convert_type(x, dtype)
