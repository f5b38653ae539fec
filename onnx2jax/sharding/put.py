"""Transfers arrays to devices and back, and pickles devices; each process reads and holds only its own shards."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import compat
from ..errors import ShardingError
from ..ops.arrays import is_traced
from ..proto.mapped import is_lazy, load


def put(value: Any, sharding: Sharding) -> Any:
    """Place an array by a sharding.

    Args:
        value: a NumPy array, a JAX array or a tracer. Of a lazy array only this process's shards are read. An array
            that is not global has to be equal in all processes.
        sharding: over devices, some of which belong to this process.
    """
    if is_traced(value):
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        same = value.sharding.is_equivalent_to(sharding, value.ndim)
        return value if same else compat.spread(value, sharding)
    if sharding.is_fully_addressable and not is_lazy(value):
        return jax.device_put(value, sharding)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return by_parts(np.shape(value), value.dtype, sharding, lambda index: load(np.asarray(value), index))


def by_parts(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, read: Callable[[tuple[slice, ...]], Any]
) -> jax.Array:
    """A JAX array of the shards that ``read`` returns for their slices; replicated shards are read once."""

    @cache
    def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        return np.asarray(read(tuple(slice(*b) for b in bounds)), order="C")

    return jax.make_array_from_callback(shape, sharding, lambda index: part(_bounds(index, shape)), dtype=dtype)


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Start and end of a shard along each axis."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def share(sharding: NamedSharding, extent: int) -> tuple[int, int]:
    """The number of shards along the first axis, and how many of them belong to this process."""
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    parts = math.prod(rows.mesh.shape[a] for entry in rows.spec for a in mesh_axes(entry))
    return parts, len({s[0].start or 0 for s in rows.addressable_devices_indices_map((extent,)).values() if s})


def from_process(name: str, value: Any, of_shape: Any) -> jax.Array:
    """A global array of the rows of each process.

    Args:
        name: the array's name in messages.
        value: the rows of this process.
        of_shape: returns the sharding of a ShapeDtypeStruct.

    Raises:
        ShardingError: the rows cannot be divided over the devices of this process.
    """
    array = np.asarray(value)
    whole = jax.ShapeDtypeStruct((array.shape[0] * jax.process_count(), *array.shape[1:]), array.dtype)
    parts, local = share(of_shape(whole), whole.shape[0])
    if array.shape[0] % local:
        raise ShardingError(
            f"{name!r}: the {array.shape[0]} rows of this process cannot be divided evenly over its {local} shards of "
            f"{parts}; pad them to {-(-array.shape[0] // local) * local}"
        )
    shape = (array.shape[0] // local * parts, *array.shape[1:])
    sharding = of_shape(jax.ShapeDtypeStruct(shape, array.dtype))
    return jax.make_array_from_process_local_data(sharding, array, shape)


def to_process(value: Any) -> np.ndarray:
    """The block of an array on this process's devices; the whole array if it is local or replicated."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    parts = {_bounds(p.index, value.shape): p for p in value.addressable_shards}
    places = [{first: i for i, first in enumerate(sorted({b[axis][0] for b in parts}))} for axis in range(value.ndim)]
    block = value.sharding.shard_shape(value.shape)
    result = np.empty([len(p) * n for p, n in zip(places, block, strict=True)], value.dtype)
    for bounds, part in parts.items():
        starts = (places[axis][first] * block[axis] for axis, (first, _) in enumerate(bounds))
        result[tuple(slice(s, s + n) for s, n in zip(starts, block, strict=True))] = part.data
    return result


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
