"""The dispatch cache: from the signature of a call to the compiled program that runs it.

``Signature`` is the only key. It holds all that decides which program a call gets and what that program computes, and
``signature`` is the only function that makes one. ``DispatchCache`` is the only table of compiled programs in memory:

| cache | program |
|---|---|
| ``DeviceParams.bound`` | ``BoundCall``: a program bound to one set of parameter values |
| ``Subprogram.executables`` | ``Executable`` or ``Sections``, which all parameters of the same types share |
| ``PersistentJit`` | compiled for, or loaded with, types and shardings of arguments: meshes, training steps |
| ``Spread`` | the parts of a function over several devices |
| a decoder's ``Programs`` | steps with their hoisted weights, and loops around them, bound to these |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import compat
from ..eval.interpreter import Settings
from ..ir.graph import Graph
from .memory import copied

P = TypeVar("P")
_NUMPY: Final = (np.ndarray, np.generic)


class Constants:
    """Values compiled into a program: scalar parameters, fixed inputs, and inputs specialised on.

    Arrays are owned copies, so a caller who writes into an array changes neither key nor program.

    Attributes:
        params: scalar parameters by Graph.key.
        inputs: fixed and specialised inputs by name.
        caller_traces: an operator would like to know a value that the caller traces (see registry.StaticIfKnown).
    """

    def __init__(
        self, params: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, caller_traces: bool = False
    ) -> None:
        self.params: dict[str, np.ndarray] = {n: _owned_copy(v) for n, v in params.items()}
        self.inputs: dict[str, np.ndarray] = {n: _owned_copy(v) for n, v in (inputs or {}).items()}
        self.caller_traces = caller_traces
        arrays = [(kind, n, v) for kind in ("params", "inputs") for n, v in getattr(self, kind).items()]
        self._key = (caller_traces, *((kind, n, v.dtype.str, v.shape, _content(v)) for kind, n, v in arrays))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Constants) and self._key == other._key)

    def __repr__(self) -> str:
        return f"Constants{self._key}"


def _owned_copy(value: Any) -> np.ndarray:
    """A read-only array whose memory nobody else can write."""
    array = np.array(value, order="C")
    array.flags.writeable = False
    return array


def _content(array: np.ndarray) -> Any:
    return repr(array.tolist()) if array.dtype.hasobject else array.tobytes()


class CallContext(NamedTuple):
    """What a call passes to each of its programs beside values by name."""

    params: Mapping[str, Any]
    """Parameters by Graph.key."""
    constants: Constants
    """Values compiled into the programs."""
    rng: Any = None
    """Random key or None."""
    passed: Mapping[str, Any] | None = None
    """Those of the parameters that may be tracers, because the caller passed them."""
    x32: bool = False
    """The caller is in 32-bit mode."""
    as_numpy: bool = False
    """Results may be NumPy arrays, where that is faster."""

    def without_inputs(self) -> CallContext:
        """The same without the values of inputs among the constants."""
        return self._replace(constants=Constants(self.constants.params)) if self.constants.inputs else self


class Callee:
    """What is called, apart from the arguments; compared by content, hashed once.

    Attributes:
        graph: the graph or partition, by identity: a graph that is partitioned anew is another.
        settings: the options of ``convert`` for execution.
        params: shape and dtype of each parameter, by name.
        constants: values compiled in.
    """

    __slots__ = ("_hash", "constants", "graph", "params", "settings")
    graph: Graph
    settings: Settings
    params: tuple[tuple[str, tuple[Any, ...], str], ...]
    constants: Constants

    def __init__(self, graph: Graph, settings: Settings, params: Mapping[str, Any], constants: Constants) -> None:
        self.graph, self.settings, self.constants = graph, settings, constants
        self.params = tuple(sorted((n, tuple(t.shape), str(t.dtype)) for n, t in params.items()))
        self._hash = hash((id(graph), self.params, constants))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Callee)
            and self.graph is other.graph
            and self.settings == other.settings
            and self.params == other.params
            and self.constants == other.constants
        )


class Signature(NamedTuple):
    """The key that selects the compiled program for a call, and all that its results depend on but the values."""

    callee: Hashable
    """A Callee; of a function that is no graph, its static arguments."""
    inputs: Any
    """The names of the inputs given, or the pytree structure around them."""
    arrays: tuple[Any, ...]
    """dtype and shape of each array; of JAX's also weak type, sharding, and whether it is committed."""
    device: jax.Device | None
    """Where the parameters lie; None when they span several devices."""
    configuration: Hashable
    """JAX's configuration in the caller's context, its mesh included."""
    as_numpy: bool
    """Whether the results are wanted as NumPy arrays."""

    @property
    def program(self) -> Signature:
        """The key of the traced program: NumPy's arrays, and JAX's on the device of the parameters, share one."""
        arrays = ((*a, False) if len(a) == 2 else a[:3] if self._is_local(*a[3:]) else a for a in self.arrays)
        return self._replace(arrays=tuple(arrays), as_numpy=False)

    def _is_local(self, sharding: Any, committed: bool) -> bool:
        return not committed or sharding.device_set == {self.device}


def signature(
    callee: Hashable,
    inputs: Any,
    values: Sequence[Any],
    device: jax.Device | None,
    as_numpy: bool,
    *,
    spanning: bool = False,
) -> Signature | None:
    """The signature of a call; None where an argument is traced, is no array, or spans devices, unless ``spanning``."""
    arrays: list[Any] = []
    try:
        for value in values:
            if type(value) is np.ndarray:
                arrays.append((value.dtype, value.shape))
            else:
                sharding = value.sharding
                if type(sharding) is not SingleDeviceSharding and len(sharding.device_set) > 1 and not spanning:
                    return None
                weak = getattr(value, "weak_type", False)  # random keys have none
                arrays.append((value.dtype, value.shape, weak, sharding, value.committed))
    except AttributeError:  # a tracer, a list, an array of another library
        return None
    fields = callee, inputs, tuple(arrays), device, compat.trace_context(), as_numpy
    return tuple.__new__(Signature, fields)  # half as long as Signature(*fields), in each call


def signature_of(callee: Hashable, args: Any, device: jax.Device | None = None) -> Signature | None:
    """The signature of a call with pytrees of arrays on any devices; None where an argument is traced or no array."""
    leaves, structure = jax.tree.flatten(args)
    leaves = [np.asarray(v) if isinstance(v, _NUMPY) else v for v in leaves]
    return signature(callee, structure, leaves, device, False, spanning=True)


def argument_types(args: Any) -> Hashable:
    """What arguments in a pytree add to a key on disk: its structure, and shape, dtype and weak type of each array."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((np.shape(v), str(v.dtype), getattr(v, "weak_type", False)) for v in leaves)


class DispatchCache(dict[Signature | None, P]):
    """Compiled programs by signature.

    A signature contains JAX's configuration, so a program is called in the configuration that it was compiled in. An
    entry lives as long as the cache, and the cache as long as its owner: it holds its programs and what is bound to
    them, but no argument of a call. Threads need no lock: those that miss at the same time compile equal programs, and
    the first remains. A forked process inherits the entries; copies and pickles of an owner have an empty cache.
    """

    def program(self, key: Signature | None, build: Callable[[], P]) -> P:
        """The program of a signature, built at its first call; signatures of equal ``Signature.program`` share it.

        Without a signature it is built for this call alone.
        """
        if key is None:
            return build()
        if key not in self:
            shared = key.program
            if shared not in self:
                self.setdefault(shared, build())
            self.setdefault(key, self[shared])
        return self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return DispatchCache, ()


class BoundCall(NamedTuple):
    """A compiled program bound to parameter values, for calls of one signature."""

    call: Callable[[list[Any]], list[Any]]
    """The results, as arrays of JAX's or NumPy's, from the inputs that it reads."""
    names: Sequence[str]
    """Those inputs, in order."""
    path: str
    """How it runs: "numpy", "inline", "compiled", "layers" or "host" (see ``Model.explain_call``)."""
    structure: Any = None
    """The pytree structure of the outputs; None where host nodes compute some."""


def is_wide(value: Any) -> bool:
    """Whether a value is a NumPy array that a compiled program accepts in 64-bit mode alone."""
    return isinstance(value, np.ndarray) and value.dtype.itemsize > 4


def with_x64(call: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """The call in 64-bit mode."""

    def inside(leaves: list[Any]) -> list[Any]:
        with compat.enable_x64():
            return call(leaves)

    return inside


def snapshot(value: Any) -> Any:
    """A value that an asynchronous call may read after it has returned: NumPy arrays are copied.

    XLA:CPU reads aligned NumPy memory in place. Copying 3 KB takes 0.4 us, 256 KB 6 us, 5.8 MB 160 us, while waiting
    for the results of a program of 16 KB takes 30 us and gives up asynchronous dispatch.
    """
    if type(value) is np.ndarray:
        return copied(value)
    return jax.tree.map(lambda v: copied(v) if isinstance(v, np.ndarray) else v, value)
