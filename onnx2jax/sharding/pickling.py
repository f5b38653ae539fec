"""Pickling of what holds devices."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax


class Devices:
    """Base of classes that hold devices, which JAX does not pickle: pickles them as platform and id."""

    def __getstate__(self) -> bytes:
        _Pickler(file := io.BytesIO()).dump(vars(self))
        return file.getvalue()

    def __setstate__(self, data: bytes) -> None:
        vars(self).update(pickle.loads(data))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MappingProxyType):
            return _read_only, (dict(value),)
        return (_device, (value.platform, value.id)) if isinstance(value, jax.Device) else NotImplemented


def _read_only(value: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(value)


def _device(platform: str, number: int) -> jax.Device:
    return next(d for d in jax.devices(platform) if d.id == number)
