"""Conversion of values to NumPy, to JAX and to 64-bit types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..proto.dtypes import HOST_ONLY

_WIDENINGS = {
    (np.dtype(narrow), np.dtype(wide)) for narrow, wide in (("i4", "i8"), ("u4", "u8"), ("f4", "f8"), ("c8", "c16"))
}


HELD_ON_HOST: Final = "strings, maps or floats of 6 bits"
"""Values without arrays in JAX, for messages."""
_ON_HOST = frozenset((np.ndarray, dict, type(None)))


def widened(value: Any, dtype: np.dtype) -> Any:
    """A JAX array in the declared 64-bit type, which its owner could not create in 32-bit mode. Exact."""
    return value.astype(dtype) if (value.dtype, dtype) in _WIDENINGS else value


def is_jax(value: Any) -> bool:
    """Whether JAX can hold a value: numbers, missing values, and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(is_jax, value))
    return value is None or (hasattr(value, "dtype") and value.dtype not in HOST_ONLY)


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
    own = {id(v) for v in arguments}
    return [jnp.copy(r) if id(r) in own and is_numeric(r) else r for r in results]


def is_numeric(value: Any) -> bool:
    """Whether a value is an array of numbers, and no random key."""
    return isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
