"""Jitted functions: apart for callers' traces, with Auto axes over a mesh, and serialised on the devices of one CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import compat
from ..ops.arrays import is_traced
from .dispatch import DispatchCache, signature_of
from .program_cache import Store


@dataclass(eq=False)
class Jitted:
    """The jitted functions of one function, those for callers' traces apart, which neither count nor serve a model.

    JAX caches the traces of each, so that those for one platform are apart, too. A trace made while somebody replaces
    functions of JAX, as jax2onnx does in an export, has operations that nobody else can compile: then, and afterwards,
    the function is jitted anew.
    """

    jit: Callable[..., Any]
    """``jit(foreign, *options)`` jits the function, for callers' traces or for this package's own programs."""
    _functions: dict[tuple[Any, ...], tuple[list[Any], Any]] = field(default_factory=dict, init=False)

    def __call__(self, *options: bool) -> Any:
        """The jitted function for a caller's trace, or for a program of this package."""
        key = *options, compat.platform(), compat.keeps_convolutions()
        functions, entry = compat.functions(), self._functions.get(key)
        if entry is None or entry[0] != functions:
            entry = self._functions[key] = functions, self.jit(*options)
        return entry[1]


def in_auto_axes(function: Callable[..., Any], *, batch: int, state: int | None = None) -> Callable[..., Any]:
    """The function with the Explicit axes of the caller's mesh as Auto axes inside.

    Since JAX 0.9 axes are Explicit by default: an array's sharding is part of its type, and an operation that cannot
    derive the sharding of its result raises. An ONNX model cannot declare it, so the axes are Auto inside. Results come
    back in the caller's types: sharded like the batch if their first axis has the extent of a sharded batch axis,
    otherwise replicated; a state as it was passed.

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
    """The sharding in the type of an array over a mesh; None for other values."""
    sharding = jax.typeof(value).sharding if isinstance(value, jax.Array) else None
    return None if sharding is None or sharding.mesh.empty else sharding


_turn = threading.RLock()


def call_serially(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function; over several devices of one CPU, wait for it before the next call starts.

    XLA:CPU has one thread per device, and a collective waits for the other devices. When calls overlap (from several
    threads, or more than 32 from one), waiting collectives can occupy all threads, and XLA aborts the process after
    40 s.
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
    """Whether an array spans more than one device."""
    return any(isinstance(v, jax.Array) and len(v.sharding.device_set) > 1 for v in leaves)


class PersistentJit:
    """A jitted function, compiled ahead of time for each signature of its arguments, or loaded from a store.

    It is the jitted function for programs that cannot be stored, and for arguments without a signature.
    """

    def __init__(self, jitted: Any, store: Store, *, static: int = 0) -> None:
        """``static``: the number of leading arguments that are static."""
        self._jitted, self._store, self._static = jitted, store, static
        self.trace, self.__name__ = jitted.trace, jitted.__name__
        self._programs: DispatchCache[Callable[..., Any]] = DispatchCache()

    def __call__(self, *args: Any) -> Any:
        """The results, as the jitted function returns them."""
        static, dynamic = args[: self._static], args[self._static :]
        if (key := signature_of(static, dynamic)) is None:
            return self._jitted(*args)
        program = self._programs.get(key)
        if program is None:
            compiled = None if compat.checks_values() else self._store.compiled(self._jitted.lower(*args))
            program = partial(self._jitted, *static) if compiled is None else compat.unwrapped(compiled.function)
            self._programs[key] = program
        return program(*dynamic)


def persistent(jitted: Any, store: Store | None, *, static: int = 0) -> Any:
    """The jitted function with a store for its programs; itself without one, since JAX caches programs in memory."""
    return jitted if store is None else PersistentJit(jitted, store, static=static)
