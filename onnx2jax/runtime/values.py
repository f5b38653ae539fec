"""What JAX can hold, and values on their way to the host, to the device, and into 64 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat

_WIDENINGS = {
    (np.dtype(narrow), np.dtype(wide)) for narrow, wide in (("i4", "i8"), ("u4", "u8"), ("f4", "f8"), ("c8", "c16"))
}


_ON_HOST = frozenset((np.ndarray, dict, type(None)))


def widened(value: Any, dtype: np.dtype) -> Any:
    """A JAX array in the 64-bit type wanted: in 32-bit mode its owner could not make one. Widening is exact."""
    return value.astype(dtype) if (value.dtype, dtype) in _WIDENINGS else value


def is_jax(value: Any) -> bool:
    """Whether JAX can hold a value: numbers, missing values, and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(is_jax, value))
    return value is None or (hasattr(value, "dtype") and not getattr(value.dtype, "hasobject", False))


def to_host(value: Any) -> Any:
    """Values for people and other runtimes: arrays as NumPy; dicts, and what is only traced, as they are.

    An array over devices of several processes is gathered, so all of them call this.
    """
    if type(value) in _ON_HOST:  # most of them; to ask for a jax.Array takes ten times as long
        return value
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer):
            return value
        return np.asarray(value) if value.is_fully_addressable else compat.gathered(value)
    return [to_host(v) for v in value] if isinstance(value, list | tuple) else value


def to_device(value: Any) -> Any:
    """Outputs for JAX: numbers as JAX arrays; strings, maps and missing values as they are."""
    if isinstance(value, list):
        return [to_device(v) for v in value]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return jnp.asarray(value)
    return value
