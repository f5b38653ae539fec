"""Conversion of values to NumPy, to JAX and to 64-bit types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..ops.arrays import is_known, is_string
from ..ops.cast import materialize_dims
from ..proto.types import HOST_ONLY, TensorType, ValueType

_WIDENINGS = {
    (np.dtype(narrow), np.dtype(wide)) for narrow, wide in (("i4", "i8"), ("u4", "u8"), ("f4", "f8"), ("c8", "c16"))
}


_ON_HOST = frozenset((np.ndarray, dict, type(None)))


def widened(value: Any, dtype: np.dtype) -> Any:
    """A JAX array in the declared 64-bit type, which its owner could not create in 32-bit mode. Exact."""
    return value.astype(dtype) if (value.dtype, dtype) in _WIDENINGS else value


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class ConstantOutput:
    """A known value among the results of a jit: it passes beside the program and stays known."""

    value: Any


def marked_constants(results: Iterable[Any]) -> list[Any]:
    """The results of a function that is jitted, the known ones as ``ConstantOutput``."""
    return [ConstantOutput(r) if is_known(r) else r for r in results]


def with_constants(results: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a jit with those that passed beside it."""
    return tuple(r.value if isinstance(r, ConstantOutput) else r for r in results)


def is_jax(value: Any) -> bool:
    """Whether JAX can hold a value: numbers, missing values, and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(is_jax, value))
    return value is None or (hasattr(value, "dtype") and value.dtype not in HOST_ONLY)


def without_arrays(value: Any) -> str:
    """What a value holds that JAX cannot, for messages: ``"strings"``, ``"maps"`` or the name of a float type."""
    if isinstance(value, list | tuple):
        return next((without_arrays(v) for v in value if not is_jax(v)), "nothing")
    dtype = getattr(value, "dtype", None)
    return "maps" if dtype is None else "strings" if dtype == object else str(dtype)


def to_host(value: Any) -> Any:
    """Arrays as NumPy, lists element by element; dicts and tracers as they are.

    An array over several processes is gathered, so all of them have to call this.
    """
    if type(value) in _ON_HOST:  # most of them; to ask for a jax.Array takes ten times as long
        return value
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer):
            return value
        return np.asarray(value) if value.is_fully_addressable else compat.gathered(value)
    if not isinstance(value, list | tuple) or are_maps(value):
        return value
    return [to_host(v) for v in value]


def are_maps(values: Iterable[Any]) -> bool:
    """Whether all values of a sequence are dicts, as ZipMap makes them."""
    return {*map(type, values)} == {dict}


def computed(value: Any, declared: ValueType | None) -> Any:
    """The symbolic dimensions of an output that is a shape, under ``jax.export``, as arrays of the declared type."""
    if isinstance(value, list):
        return [computed(v, declared) for v in value]
    if not isinstance(value, np.ndarray) or value.dtype != object or is_string(value):
        return value
    is_int32 = isinstance(declared, TensorType) and declared.dtype == np.int32
    return materialize_dims(value, np.int32 if is_int32 else np.int64)


def to_device(value: Any) -> Any:
    """Arrays that JAX can hold as JAX arrays; strings, floats of 6 bits, maps and None as they are."""
    if isinstance(value, list):
        return [to_device(v) for v in value]
    if isinstance(value, np.ndarray) and value.dtype not in HOST_ONLY:
        return jnp.asarray(value)
    return value


def unaliased(results: Iterable[Any], arguments: Iterable[Any]) -> list[Any]:
    """The results of a traced function, copied where one is an argument: jit would return the argument's own buffer.

    A caller who donates or deletes such a result would delete a parameter of the model.
    """
    buffers = {id(v) for v in arguments}
    return [jnp.copy(r) if id(r) in buffers and _is_numeric(r) else r for r in results]


def _is_numeric(value: Any) -> bool:
    """Whether a value is an array of numbers, and no random key."""
    return isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
