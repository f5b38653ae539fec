"""The step engine of TrainingModel and FineTuning: compiles and runs update functions of a state.

States are pytrees of everything that a step updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import DictKey, tree_map_with_path

from .. import compat, progress
from ..errors import InputError, InputTypeError, KnownValueError, ModelError
from ..eval.settings import Settings
from ..eval.values import to_device, to_host, widened
from ..ir.training_info import TrainingInfo
from ..jaxpr.pipeline import with_passes
from ..model.calls import arguments
from ..ops.arrays import is_traced
from ..proto.mapped import load
from ..runtime.dispatch import Signature, signature_of, snapshot
from ..runtime.jitted import Jitted, call_serially, in_auto_axes, persistent
from ..runtime.multi_device_jit import Spread
from ..runtime.params import device_of, is_cpu
from ..runtime.program_cache import Store
from ..sharding.processes import EQUAL, in_agreement
from ..sharding.put import put
from ..sharding.rules import Placement
from ..sharding.stages import Staged

S = TypeVar("S")


class State:
    """Base of training states: dataclass pytrees of arrays that keep 64-bit types when pickled or copied."""

    def __getstate__(self) -> dict[str, Any]:
        check_not_donated(self)
        return {n: jax.tree.map(lambda v: v if is_key(v) else to_host(v), v) for n, v in vars(self).items()}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        with compat.enable_x64():
            vars(self).update(jax.tree.map(jnp.array, fields))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingState(State):
    """The state of a TrainingModel: a pytree of arrays.

    Attributes:
        variables: the variables among the main graph's initializers, by name.
        own: for each training_info, the variables among its algorithm's own initializers, by name.
        key: the PRNG key of the next step.
    """

    variables: dict[str, jax.Array]
    own: tuple[dict[str, jax.Array], ...]
    key: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FineTuningState(State):
    """The state of a FineTuning: a pytree of arrays, to be checkpointed as a whole.

    Attributes:
        params: the trained parameters, by ONNX name; 16-bit ones are held in float32.
        stats: running statistics of BatchNormalization, by ONNX name; empty unless ``batchnorm="train"``.
        opt_state: the optimizer's state.
        step: int32, the number of steps taken.
        key: the PRNG key from which the key of each step is derived.
        loss_scale: by what the loss is multiplied before it is differentiated; None unless the model computes in
            float16.
    """

    params: dict[str, jax.Array]
    stats: dict[str, jax.Array]
    opt_state: Any
    step: jax.Array
    key: jax.Array
    loss_scale: jax.Array | None = None


class TrainingEngine:
    """Base of TrainingModel and FineTuning: placement of arrays, pickling and copying.

    Cached properties (compiled programs, arrays on devices) are neither pickled nor copied.

    Attributes:
        compilations: number of compilations of steps and evaluations, one for each signature of batches.
    """

    _placement: Placement | None
    """Placement of arrays on a mesh; None for a single device."""
    _settings: Settings
    _params: dict[str, Any]
    """Parameters by name. A leaf of a state with such a name and the same shape gets the parameter's sharding."""
    compilations: int = 0

    @property
    def _stages(self) -> Staged | None:
        """The placement of a model that runs as pipeline stages on separate devices; None for others."""
        return self._placement if isinstance(self._placement, Staged) else None

    @property
    def _mesh(self) -> Mesh | None:
        return self._placement.mesh if self._placement else None

    @property
    def _store(self) -> Store | None:
        """The compiled programs of earlier processes (see runtime/program_cache.py)."""
        return Store.of(self._settings.cache_dir)

    @cached_property
    def _param_shardings(self) -> Mapping[str, Any]:
        return self._placement.of_params(self._params) if self._placement else {}

    def shardings(self, state: S) -> S | None:
        """The shardings of a state's leaves, or None without a mesh; an optimizer's moments follow their parameters."""
        if self._placement is None:
            return None
        replicated = self._placement.replicated

        def of(path: tuple[Any, ...], leaf: Any) -> Any:
            names = [k.key for k in path if isinstance(k, DictKey) and k.key in self._params]
            is_like_param = names and jnp.shape(leaf) == jnp.shape(self._params[names[-1]])
            return self._param_shardings[names[-1]] if is_like_param else replicated

        return tree_map_with_path(of, state)

    def _put(self, state: S) -> S:
        """The state on its devices."""
        return jax.tree.map(put, state, self.shardings(state)) if self._placement else state

    def _init_optimizer(self, init: Callable[..., Any], params: dict[str, jax.Array]) -> Any:
        """The initial optimizer state; over a mesh, no device ever holds more than its shards."""
        if self._placement is None:
            return init(params)
        if self._stages:
            return Spread(init, self._store)(params)
        shardings = self.shardings(jax.eval_shape(init, params))
        return persistent(jax.jit(init, out_shardings=shardings), self._store)(params)

    def _put_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters on their devices, also inside a caller's JAX transformation."""
        with compat.enable_x64(), compat.outside():
            return {n: self._put_param(n, v) for n, v in params.items()}

    def _put_param(self, name: str, value: Any) -> jax.Array:
        """The parameter on its devices; only the shards of this process are read from its file."""
        return put(value, self._param_shardings[name]) if self._placement else jax.device_put(load(value))

    def _put_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._placement.put_batch(batch) if self._placement else batch

    def from_process(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A global batch for ``step`` from each process's own rows; without a mesh, the rows unchanged.

        Args:
            batch: arrays by name, with the same number of rows in every process.

        Raises:
            ShardingError: the rows cannot be divided over the devices.
            ProcessError: names, shapes or dtypes differ between processes.
        """
        return self._placement.from_process(batch) if self._placement else dict(batch)

    def _key(self, rng: Any) -> Any:
        """A PRNG key from the caller's key or seed, always a copy: a step donates it."""
        with compat.enable_x64():
            key = jnp.copy(arguments.as_key(rng))
            return self._placement.put_replicated(key) if self._placement else key

    def __getstate__(self) -> dict[str, Any]:
        kept = {n: v for n, v in vars(self).items() if not isinstance(getattr(type(self), n, None), cached_property)}
        return kept | {"compilations": 0}

    def _describe(self, name: str, rows: Mapping[str, str]) -> str:
        """The repr: a line for each non-empty row."""
        devices = str(self._placement).split("\n")[0] if self._placement else str(jax.devices()[0])
        lines = (f"  {what}: {text}" for what, text in {**rows, "devices": devices}.items() if text)
        return "\n".join([f"{type(self).__name__} of {name!r}", *lines])


@dataclass(eq=False)
class CompiledStep:
    """A function of a state and a batch, compiled once for each signature of the batch."""

    training: TrainingEngine
    compute: Callable[..., Any]
    """``compute(state, constants, batch, *rest)``; returns (state, outputs by name) if it ``updates`` the state."""
    bind: Callable[[Mapping[str, Any]], Any]
    """Validates a caller's batch and returns its arrays on their devices."""
    constants: Any
    """Constants that are passed as arguments rather than embedded in the program."""
    updates: bool = True
    donate: bool = False
    """Whether the state's buffers are donated."""
    may_partition: bool = False
    """Whether a function that cannot be one program may run partitioned, around host nodes."""

    def __post_init__(self) -> None:
        self._jitted = Jitted(self._jit)
        self._partitioned = set[Signature | None]()
        """The signatures of batches for which it cannot be one program."""
        self._out_shardings: Any = None

    def __call__(self, state: Any, batch: Any, *rest: Any) -> Any:
        """The result of ``compute``.

        Raises:
            InputError: the batch does not fit, or the state was donated to an earlier step.
        """
        if not isinstance(batch, Mapping):
            raise InputTypeError(f"a batch is a dict of arrays by name, not {type(batch).__name__}")
        with compat.enable_x64():
            # Dispatch is asynchronous: a data loader may overwrite the caller's arrays before they are read.
            args = (state, self.constants, *map(snapshot, (self._bind(batch, rest), *rest)))
            key = signature_of((), args[2:]) if self._partitioned else None
            if self.training._stages is None and key not in self._partitioned:
                try:
                    with progress.call():
                        return call_serially(self._program(args), *args)
                except KnownValueError:
                    if not self.may_partition or is_traced(args):
                        raise
                    self._partitioned.add(key or signature_of((), args[2:]))
                except (RuntimeError, ValueError):
                    check_not_donated(state)
                    raise
            if not self.updates:
                return call_serially(self.compute, *args)
            new, outputs = call_serially(self.compute, *args)
            return self.training._put(new), {n: to_device(v) for n, v in outputs.items()}

    def _bind(self, batch: Any, rest: Any) -> Any:
        mesh = self.training._mesh
        if mesh is None or is_traced(batch):
            return self.bind(batch)
        with in_agreement(mesh, "a training step", EQUAL) as processes:
            processes.same({**batch, "rng": list(rest)})
            return self.bind(batch)

    def _program(self, args: tuple[Any, ...]) -> Any:
        single, foreign = self.training._placement is None, is_traced(args)
        if self.updates and not single and self._out_shardings is None:
            self._out_shardings = self.training.shardings(args[0]), None
        optimize = self.training._settings.optimize and single and not foreign
        return self._jitted(foreign, optimize and is_cpu(device_of(jax.tree.leaves(args))))

    def _jit(self, foreign: bool, optimize: bool) -> Any:
        inner = with_passes(self.compute, self.training._settings.skip) if optimize else self.compute

        @wraps(self.compute)
        def compute(*args: Any) -> Any:
            self.training.compilations += not foreign
            if not foreign:
                progress.announce(f"compiling the {'training step' if self.updates else 'evaluation'}")
            return inner(*args)

        jitted = jax.jit(
            in_auto_axes(compute, batch=2, state=0 if self.updates else None),
            # A derivative keeps what it was given; in a program of the caller, donation has no effect.
            donate_argnums=0 if self.donate and not foreign else (),
            out_shardings=self._out_shardings,
        )
        return jitted if foreign else persistent(jitted, self.training._store)


def summary(arrays: Mapping[str, Any]) -> str:
    """The names of the first arrays and the total number of elements, for a repr.

    >>> summary({"w": np.zeros((300, 4)), "b": np.zeros(4)})
    'w, b: 1,204 numbers'
    """
    names = [*list(arrays)[:6], *([f"... ({len(arrays)} in all)"] if len(arrays) > 6 else [])]
    return f"{', '.join(names)}: {sum(map(np.size, arrays.values())):,} numbers" if arrays else ""


def is_key(leaf: Any) -> bool:
    """Whether a leaf of a state is a typed PRNG key."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def check_not_donated(state: Any) -> None:
    """Checks that a state was not donated to an earlier step.

    Raises:
        InputError: it was.
    """
    arrays = [v for v in jax.tree.leaves(state) if isinstance(v, jax.Array) and not is_traced(v)]
    if any(v.is_deleted() for v in arrays):
        raise InputError(
            "this state was donated to an earlier step, which reused its buffers. Continue from the state that the "
            "step returned, or copy the state before the step: jax.tree.map(jnp.copy, state)"
        )


def assign(
    state: TrainingState, index: int, info: TrainingInfo, binding: Mapping[str, str], results: Mapping[str, Any]
) -> TrainingState:
    """The state after the simultaneous assignments of a binding.

    Raises:
        ModelError: a new value has another shape or dtype than its variable (rule TR-25).
    """
    variables, of_algorithm = dict(state.variables), dict(state.own[index])
    for name, output in binding.items():
        target = variables if name in variables else of_algorithm
        old, new = target[name], results[output]
        if not (hasattr(new, "dtype") and (new.shape, new.dtype) == (old.shape, old.dtype)):
            kind = f"{new.dtype}{list(new.shape)}" if hasattr(new, "dtype") else type(new).__name__
            raise ModelError(
                f"{info.path}: output {output!r} ({kind}) is assigned to variable {name!r}, which is "
                f"{old.dtype}{list(old.shape)}: a variable keeps its dtype and shape",
                rule="TR-25",
            )
        target[name] = jnp.asarray(new)
    return replace(state, variables=variables, own=(*state.own[:index], of_algorithm, *state.own[index + 1 :]))


def widen_all(values: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The variables in their stored dtypes, which a caller in 32-bit mode may have narrowed."""
    return {n: widened(v, stored[n].dtype) for n, v in values.items()}
