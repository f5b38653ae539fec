"""Calls of compiled functions: Explicit mesh axes left to the compiler, and devices of one CPU used in turn."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import compat
from ..ops.arrays import is_traced


def in_auto_mode(function: Callable[..., Any], *, batch: int, state: int | None = None) -> Callable[..., Any]:
    """The function, with Explicit axes of the caller's mesh left to the compiler inside.

    Since JAX 0.9 axes are Explicit by default: an array's sharding is part of its type, and an operation that cannot
    derive that of its result is an error. An ONNX model has no place to say it, so inside there are Auto axes only.
    Results come back in the caller's types: over the mesh as the batch is, where their first axes are as long as one of
    the batch that is divided, and otherwise whole; a state as it came.

    Args:
        function: takes and returns pytrees.
        batch: the position of the argument that holds the batch.
        state: the position of the argument that the first result replaces.
    """

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        meshes = [compat.context_mesh(), *(s.mesh for v in jax.tree.leaves(args) if (s := _typed(v)))]
        mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
        if mesh is None:
            return function(*args)
        divided: dict[int, Any] = {}
        for value in jax.tree.leaves(args[batch]):
            if (sharding := _typed(value)) and value.ndim and (first := sharding.spec[0]):
                divided.setdefault(value.shape[0], first)

        def into(value: Any) -> Any:
            return compat.reshard(value, PartitionSpec()) if _typed(value) else value

        def back(value: Any) -> Any:
            if not _typed(value):
                return value  # no array, or one that follows from none of the arguments
            # JAX reads nothing back out of the parts of an array without elements.
            whole = not value.ndim or 0 in value.shape
            spec = PartitionSpec() if whole else PartitionSpec(divided.get(value.shape[0]))
            return compat.reshard(value, NamedSharding(mesh, spec))

        def as_before(new: Any, old: Any) -> Any:
            sharding = _typed(old)
            return compat.reshard(new, sharding) if sharding else new

        with compat.in_auto_axes(mesh):
            results = function(*jax.tree.map(into, args))
        if state is None:
            return jax.tree.map(back, results)
        new, *rest = results
        return jax.tree.map(as_before, new, args[state]), *jax.tree.map(back, rest)

    return inside


def _typed(value: Any) -> NamedSharding | None:
    """The sharding in the type of an array that lies on a mesh; None for all else."""
    sharding = jax.typeof(value).sharding if isinstance(value, jax.Array) else None
    return None if sharding is None or sharding.mesh.empty else sharding


_turn = threading.RLock()


def in_turn(compiled: Callable[..., Any], *args: Any) -> Any:
    """A call of a compiled function; over several devices of one CPU it ends before the next begins.

    XLA:CPU has one thread for each device, and where devices exchange data the part of one waits for those of the
    others. When calls overlap, those of other threads or more than 32 of one, waiting parts can hold all threads:
    then XLA ends the process after 40 s.
    """
    if not _over_several_cpus(args):
        return compiled(*args)
    with _turn:
        return jax.block_until_ready(compiled(*args))


def _over_several_cpus(args: tuple[Any, ...]) -> bool:
    if jax.default_backend() != "cpu" or jax.local_device_count() == 1 or is_traced(args):
        return False
    return not compat.context_mesh().empty or on_several_devices(jax.tree.leaves(args))


def on_several_devices(leaves: Iterable[Any]) -> bool:
    """Whether an array lies on more than one device."""
    return any(isinstance(v, jax.Array) and len(v.sharding.device_set) > 1 for v in leaves)
