"""A model's parameters on their devices: the only place where weights meet devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..jaxpr.passes.any.hoist_params import HoistedValues
from ..ops.arrays import is_traced
from ..proto.mapped import owned
from .dispatch import BoundCall, Callee, DispatchCache


class DeviceParams(Mapping[str, Any]):
    """One set of parameter values by name, each put on its device when first read, and what is derived from them.

    Attributes:
        types: shapes and dtypes, by name.
        read: returns the value of a parameter, in memory or mapped from its file.
        bound: the dispatch cache: compiled programs bound to these values.
        hoisted: what programs take in place of these parameters, computed from them once (see cpu/hoist_params).
        shared: hoisted values that several programs use, by computation.
    """

    def __init__(
        self, types: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], Any], place: Callable[[str, Any], Any]
    ) -> None:
        """``place`` puts the value of a parameter on its device."""
        self.types: dict[str, jax.ShapeDtypeStruct] = dict(types)
        self.read: Callable[[str], Any] = read
        self._place, self._placed = place, dict[str, Any]()
        self.bound: DispatchCache[BoundCall] = DispatchCache()
        self.hoisted: dict[Hashable, list[Any]] = {}
        self.shared: HoistedValues = HoistedValues()
        self.callees: dict[Any, Callee] = {}
        self.by_stage: dict[Any, DeviceParams] = {}
        """Parameters of each pipeline stage, on its devices."""

    def merged(self, prefix: str, other: DeviceParams, names: Sequence[str]) -> DeviceParams:
        """These parameters and some of another model's, whose names get a prefix."""
        theirs = {prefix + n: n for n in names if n in other}

        def read(name: str) -> Any:
            return other.read(theirs[name]) if name in theirs else self.read(name)

        def place(name: str, value: Any) -> Any:
            return other[theirs[name]] if name in theirs else self._place(name, value)

        return DeviceParams(self.types | {n: other.types[name] for n, name in theirs.items()}, read, place)

    @cached_property
    def device(self) -> jax.Device | None:
        """The device on which all of them lie, or would lie; None when they span several."""
        return device_of(self[n] for n in list(self.types)[:1])

    @property
    def on_one_cpu(self) -> bool:
        """Whether programs of these parameters run on a single CPU."""
        return is_cpu(self.device)

    def placed(self) -> dict[str, Any]:
        """Those already on their devices."""
        return self._placed.copy()  # another thread may put more meanwhile

    def on_host(self) -> dict[str, np.ndarray]:
        """Those already on a CPU, as NumPy arrays that share their memory."""
        return {n: np.asarray(v) for n, v in self.placed().items()} if self.on_one_cpu else {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._placed:
            if name not in self.types:
                raise KeyError(name)
            with compat.outside():  # inside a caller's jit or shard_map this would create tracers
                self._placed.setdefault(name, self._place(name, self.read(name)))
        return self._placed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __len__(self) -> int:
        return len(self.types)

    def __contains__(self, name: object) -> bool:
        return name in self.types


def device_of(values: Iterable[Any]) -> jax.Device | None:
    """The one device on which a program of these arrays runs; None when they span several.

    Committed arrays decide; otherwise it is the device that JAX uses by default.
    """
    committed = None
    for value in values:
        if isinstance(value, jax.Array) and not is_traced(value):
            devices = value.sharding.device_set
            if len(devices) > 1:
                return None
            if value.committed:
                (committed,) = devices
    if committed is not None:
        return committed
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=default)[0] if isinstance(default, str) else default


def is_cpu(device: jax.Device | None) -> bool:
    """Whether a program runs on one device, and that is a CPU."""
    return device is not None and device.platform == "cpu"


def immutable(value: Any) -> Any:
    """A copy that no caller can write, donate or delete; on a CPU a NumPy array."""
    if not isinstance(value, jax.Array):
        return owned(np.asarray(value))
    if isinstance(value, jax.core.Tracer):
        return value
    return owned(np.array(value)) if is_cpu(device_of([value])) else jnp.copy(value)
