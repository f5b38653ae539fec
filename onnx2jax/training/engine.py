"""The step engine: functions of a state as compiled programs, for TrainingModel and FineTuning alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, tree_map_with_path

from .. import compat
from ..errors import InputError, InputTypeError, KnownValueError
from ..model.calls import arguments
from ..ops.arrays import is_traced
from ..proto.mapped import load
from ..runtime.cpu.train_step import with_passes
from ..runtime.dispatch import snapshot
from ..runtime.mesh_mode import call_serially, in_auto_axes
from ..runtime.params import device_of, is_cpu
from ..runtime.values import to_device, to_host
from ..sharding.processes import EQUAL, together
from ..sharding.put import put
from ..sharding.rules import Placement

S = TypeVar("S")


class State:
    """What a step changes: a dataclass that is a pytree of arrays, and keeps 64-bit types when pickled or copied."""

    def __getstate__(self) -> dict[str, Any]:
        check_not_used_up(self)
        return {n: jax.tree.map(lambda v: v if is_key(v) else to_host(v), v) for n, v in vars(self).items()}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        with compat.enable_x64():
            vars(self).update(jax.tree.map(jnp.array, fields))


class Training:
    """What TrainingModel and FineTuning have in common: devices, compiled steps, copies.

    It is pickled and copied without its cached properties: what is compiled, or lies on devices, is made anew.

    Attributes:
        compilations: how often steps and evaluations were compiled: once for each shape of batch.
    """

    _placement: Placement | None
    """Where arrays lie; None on one device."""
    _params: dict[str, Any]
    """Parameters by name. What a state has under such a name, in its shape, lies as the parameter does."""
    compilations: int = 0

    @cached_property
    def _places(self) -> Mapping[str, Any]:
        return self._placement.of_params(self._params) if self._placement else {}

    def shardings(self, state: S) -> S | None:
        """Where the leaves of a state lie on the mesh, an optimizer's moments where their parameters do."""
        if self._placement is None:
            return None
        everywhere = self._placement.replicated

        def of(path: tuple[Any, ...], leaf: Any) -> Any:
            names = [k.key for k in path if isinstance(k, DictKey) and k.key in self._params]
            alike = names and jnp.shape(leaf) == jnp.shape(self._params[names[-1]])
            return self._places[names[-1]] if alike else everywhere

        return tree_map_with_path(of, state)

    def _put(self, state: S) -> S:
        """A state on the devices."""
        return jax.tree.map(put, state, self.shardings(state)) if self._placement else state

    def _begun(self, optimizer: Any, params: dict[str, jax.Array]) -> Any:
        """An optimizer's state before the first step; over a mesh no device ever holds more of it than its part."""
        if self._placement is None:
            return optimizer.init(params)
        lies = self.shardings(jax.eval_shape(optimizer.init, params))
        return jax.jit(optimizer.init, out_shardings=lies)(params)

    def _put_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters on the devices, also where the caller is inside a transformation of JAX."""
        with compat.enable_x64(), compat.outside():
            return {n: self._laid(n, v) for n, v in params.items()}

    def _laid(self, name: str, value: Any) -> jax.Array:
        """A parameter on its devices, of which no more is read from its file than lies there."""
        return put(value, self._places[name]) if self._placement else jax.device_put(load(value))

    def _put_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._placement.put_batch(batch) if self._placement else batch

    def from_process(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A batch of which each of several processes gives its own rows, for ``step``; the rows as they are without a
        mesh.

        Args:
            batch: arrays by name, with as many rows in each process.

        Raises:
            ShardingError: rows cannot be divided over the devices.
            ProcessError: processes give other names, shapes or types.
        """
        return self._placement.from_process(batch) if self._placement else dict(batch)

    def _key(self, rng: Any) -> Any:
        """A key or seed of the caller's as a key of the state's own: a step takes its memory."""
        with compat.enable_x64():
            key = jnp.copy(arguments.as_key(rng))
            return self._placement.put_replicated(key) if self._placement else key

    def __getstate__(self) -> dict[str, Any]:
        kept = {n: v for n, v in vars(self).items() if not isinstance(getattr(type(self), n, None), cached_property)}
        return kept | {"compilations": 0}

    def _described(self, name: str, rows: Mapping[str, str]) -> str:
        """Its repr: a line for each thing there is to say."""
        devices = str(self._placement).split("\n")[0] if self._placement else str(jax.devices()[0])
        lines = (f"  {what}: {text}" for what, text in {**rows, "devices": devices}.items() if text)
        return "\n".join([f"{type(self).__name__} of {name!r}", *lines])


@dataclass(eq=False)
class Step:
    """A function of a state and a batch, compiled once for each shape of batch."""

    training: Training
    compute: Callable[..., Any]
    """``compute(state, constants, batch, *rest)``: a new state and outputs by name, if it ``updates`` the state."""
    bind: Callable[[Mapping[str, Any]], Any]
    """From a caller's batch the arrays that it takes, checked, on their devices."""
    constants: Any
    """Arrays that are passed as arguments rather than compiled in."""
    updates: bool = True
    donate: bool = False
    """Whether the memory of the state is used again."""
    in_stages: bool = False
    """Whether what cannot be one program may run as several."""
    optimize: bool = True
    """Whether the program is optimised where it is one for a CPU (see runtime/cpu)."""
    _programs: dict[bool, Any] = field(default_factory=dict)
    """What is compiled, by whether it is optimised."""
    _staged: bool = False

    def __call__(self, state: Any, batch: Any, *rest: Any) -> Any:
        """What ``compute`` returns.

        Raises:
            InputError: the batch does not fit, or the state was used up.
        """
        if not isinstance(batch, Mapping):
            raise InputTypeError(f"a batch is a dict of arrays by name, not {type(batch).__name__}")
        with compat.enable_x64():
            # The step may outlast the caller's arrays, which a loader refills.
            args = (state, self.constants, *map(snapshot, (self._bound(batch, rest), *rest)))
            if not self._staged:
                try:
                    return call_serially(self._program(args), *args)
                except KnownValueError:
                    if not self.in_stages or is_traced(args):
                        raise
                    self._staged = True
                except (RuntimeError, ValueError):
                    check_not_used_up(state)
                    raise
            if not self.updates:
                return call_serially(self.compute, *args)
            new, outputs = call_serially(self.compute, *args)
            return self.training._put(new), {n: to_device(v) for n, v in outputs.items()}

    def _bound(self, batch: Any, rest: Any) -> Any:
        placement = self.training._placement
        if placement is None or is_traced(batch):
            return self.bind(batch)
        with together(placement.mesh, "a step of training", EQUAL) as said:
            bound = self.bind(batch)
            said.same({**batch, "rng": list(rest)})
        return bound

    def _program(self, args: tuple[Any, ...]) -> Any:
        optimize = self.optimize and self.training._placement is None and _on_one_cpu(args)
        if optimize not in self._programs:
            self._programs[optimize] = self._compiled(args[0], optimize)
        return self._programs[optimize]

    def _compiled(self, state: Any, optimize: bool) -> Any:
        @wraps(self.compute)
        def compute(*args: Any) -> Any:
            self.training.compilations += 1
            return self.compute(*args)

        lies = self.training.shardings(state)
        return jax.jit(
            in_auto_axes(with_passes(compute) if optimize else compute, batch=2, state=0 if self.updates else None),
            donate_argnums=0 if self.donate else (),
            out_shardings=None if lies is None or not self.updates else (lies, None),
        )


def counted(arrays: Mapping[str, Any]) -> str:
    """How many arrays these are, and how many numbers in all.

    >>> counted({"w": np.zeros((300, 4)), "b": np.zeros(4)})
    'w, b: 1,204 numbers'
    """
    names = [*list(arrays)[:6], *([f"... ({len(arrays)} in all)"] if len(arrays) > 6 else [])]
    return f"{', '.join(names)}: {sum(map(np.size, arrays.values())):,} numbers" if arrays else ""


def is_key(leaf: Any) -> bool:
    """Whether a leaf of a state is a typed random key."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def check_not_used_up(state: Any) -> None:
    """Refuse a state that was donated to an earlier step.

    Raises:
        InputError: it was, and how to go on.
    """
    arrays = [v for v in jax.tree.leaves(state) if isinstance(v, jax.Array) and not is_traced(v)]
    if any(v.is_deleted() for v in arrays):
        raise InputError(
            "this state was used up by an earlier step, which has its memory now (donation). Go on from the state that "
            "the step returned, or keep a copy before it: jax.tree.map(jnp.copy, state)"
        )


def _on_one_cpu(args: Any) -> bool:
    """Whether arguments are those of a program for a single CPU, and nobody transforms the call."""
    return not is_traced(args) and is_cpu(device_of(jax.tree.leaves(args)))
