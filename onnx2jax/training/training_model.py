"""Training as the file describes it: ``training_info`` becomes a state and functions that update it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..errors import InputError, InputNameError, InputTypeError, KnownValueError, UnsupportedError
from ..ir import analysis
from ..ir.file import Reading
from ..ir.graph import Graph
from ..model import arguments
from ..model.model import Model
from ..model.outputs import field_names, packed
from ..ops.arrays import is_traced
from ..proto.external import load
from ..runtime.compiled import Known
from ..runtime.evaluate import Settings
from ..runtime.jit import in_auto_mode, in_turn
from ..runtime.program import Program
from ..runtime.values import to_device
from ..sharding.configurations import placement
from ..sharding.rules import Placement
from .file import open_training
from .state import TrainingState, all_widened, assigned


class TrainingModel:
    """An ONNX model that trains as its ``training_info`` says: an object with a state, over pure functions.

    ``init``, ``initialize``, ``step`` and ``infer`` are pure: they take a state and return what they make of it.
    ``initialize()``, ``train_step(...)`` and ``infer(...)`` without a state work on ``self.state``.

    The variables are the initializers that a binding names as its key (rule TR-02); they start at the values in the
    file (TR-03). All other initializers are constants.

    Args:
        source: a path, the bytes of a file, an open binary file, an ``onnx.ModelProto``, or what ``read`` returned.
        mesh: devices over which state and batches are spread. The first axis of each batch entry goes over the mesh's
            first axis.
        shardings: how variables are spread over ``mesh``: a PartitionSpec for each name pattern (fnmatch). What no
            pattern matches is on every device. Constants that are passed as arguments go by these patterns too.
        device_configuration, devices: as for ``convert``; variables lie where the nodes that read them want them.
        rng: the random key to begin with, or a seed for one; seed 0 when left out.
        outputs: the names that a step returns; all when left out. New values of variables are among these, so naming
            the few that are wanted saves a copy of every variable.
        donate: let ``step`` reuse the memory of the state it is given, which is gone afterwards.
        max_trips: as for ``convert``.
        **reading: how to read the file: the keywords of ``read``.

    Attributes:
        state: the current state.
        algorithms: the names of the algorithms, in the order of ``training_info``.
        inputs: what ``infer`` takes.
        step_inputs: for each algorithm, what a step of it takes: the inputs of the main graph and its own (TR-16).

    Raises:
        UnsupportedError: the model has no training_info (rule TR-27).
        ModelError: the file is no ONNX model, or breaks a rule of the format.

    >>> import numpy as np, onnx2jax
    >>> trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    >>> trainer.initialize()
    >>> outputs = trainer.train_step(image=np.zeros((32, 64), np.float32), label=np.zeros(32, np.int64))
    >>> trainer.infer(image=np.zeros((1, 64), np.float32)).shape
    (1, 10)
    """

    @compat.outside()
    def __init__(
        self,
        source: Any,
        *,
        mesh: Mesh | None = None,
        shardings: Mapping[str, PartitionSpec] | None = None,
        device_configuration: str | None = None,
        devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None = None,
        rng: Any = None,
        outputs: Iterable[str] | None = None,
        donate: bool = True,
        max_trips: int | None = None,
        **reading: Unpack[Reading],
    ) -> None:
        self._imported, self._infos, self.origin = imported, infos, _ = open_training(source, reading)
        self._settings = Settings(max_trips=max_trips)
        self.algorithms = tuple(info.name for info in infos)

        main = imported.graph.initializers
        variables = set().union(*(info.assigned for info in infos))
        self._stored = {n: v for n, v in main.items() if n in variables}
        self._own_stored = tuple({n: load(v) for n, v in info.own.items() if n in info.assigned} for info in infos)
        for stored in (self._stored, *self._own_stored):
            for name, value in stored.items():
                if value.dtype.hasobject:
                    raise UnsupportedError(f"variable {name!r} holds strings, which JAX does not")
        key = arguments.as_key(0 if rng is None else rng)
        self._impl, self._key = jax.random.key_impl(key), np.array(jax.random.key_data(key))

        every = {n: v for values in (*reversed(self._own_stored), self._stored) for n, v in values.items()}
        graphs = [imported.graph, *(g for info in infos for g in (info.algorithm, info.initialization))]
        constants = {n: v for g in graphs for n, v in analysis.parameters(g).items() if n not in every}
        arrays = {**constants, **every}
        self._placement = placement(imported, device_configuration, devices, mesh, shardings, (graphs, arrays))
        self._draws = any(info.algorithm.draws for info in infos)
        self._shardings = self._spread(arrays)
        settings = replace(self._settings, place=self._placement.constrain if self._placement else None)

        def part(graph: Graph, variables: Mapping[str, Any]) -> _Part:
            return _Part(graph, variables, settings, self._placement)

        self._main = part(imported.graph, self._stored)
        self._parts = tuple(
            part(info.algorithm, {**self._stored, **own}) for info, own in zip(infos, self._own_stored, strict=True)
        )
        self._beginnings = tuple(part(info.initialization, {}) for info in infos)
        self._fields = field_names(v.name for v in imported.graph.outputs)
        self.inputs = self._main.inputs
        self.step_inputs = {info.path: part.inputs for info, part in zip(infos, self._parts, strict=True)}
        self._wanted = None if outputs is None else frozenset(outputs)
        given = {v.name for part in self._parts for v in part.graph.outputs}
        if unknown := sorted((self._wanted or set()) - given):
            raise InputNameError(f"outputs names {unknown}; main graph and algorithms give {sorted(given)}")
        self._staged: set[tuple[int, ...]] = set()
        """Algorithms that need the host between their stages, and so do not run as one program."""
        self._step = jax.jit(
            in_auto_mode(self._stepped, batch=2, state=1),
            static_argnums=0,
            donate_argnums=1 if donate else (),
            out_shardings=None if self._shardings is None else (self._within(self._shardings), None),
        )
        self.state = self.init()
        self._structure: Any = jax.tree.structure(self.state)

    def init(self) -> TrainingState:
        """The state that the file holds (rule TR-03)."""
        with compat.enable_x64():
            state = TrainingState(
                {n: jnp.array(v) for n, v in self._stored.items()},
                tuple({n: jnp.array(v) for n, v in own.items()} for own in self._own_stored),
                jax.random.wrap_key_data(jnp.array(self._key), impl=self._impl),
            )
            return self._placed(state)

    def initialize(self, state: TrainingState | None = None, /, rng: Any = None) -> TrainingState | None:
        """Start anew: stored values, then every initialization graph in the order of the list (rule TR-04).

        Args:
            state: a state, of which only the key is used; ``self.state`` when left out, which is then replaced.
            rng: random key or seed; the state's key when left out.

        Returns:
            The new state; None when ``state`` is left out.

        Raises:
            ModelError: a value does not fit its variable (rule TR-25).
        """
        if state is None:
            self.state = self._initialized(self.state.key if rng is None else self._drawn(rng))
            return None
        return self._initialized(state.key if rng is None else self._drawn(rng))

    def step(
        self, state: TrainingState, batch: Mapping[str, Any], rng: Any = None, algorithm: int | str | None = None
    ) -> tuple[TrainingState, dict[str, Any]]:
        """One step: run an algorithm, then assign all its updates at once (rule TR-20).

        Args:
            state: the state; its memory is reused (``donate``).
            batch: arrays by name of input.
            rng: random key or seed of this step; drawn from the state's when left out.
            algorithm: its index, or its name. When left out, a whole iteration: all of them in order, each on what the
                one before left (rule TR-22).

        Returns:
            The new state, and the outputs of main graph and algorithm by name. Of a name that several algorithms give,
            the last counts.

        Raises:
            InputError: the batch does not fit ``step_inputs``, or the state was used up.
            ModelError: a new value does not fit its variable (rule TR-25).
        """
        chosen = self._chosen(algorithm)
        self._check(state)
        with compat.enable_x64():
            batches = self._bound(chosen, batch)
            key = None if rng is None else self._drawn(rng)
            args = (chosen, self._within(state), batches, key, [self._parts[i].frozen for i in chosen])
            if chosen not in self._staged:
                try:
                    new, outputs = in_turn(self._step, *args)
                except KnownValueError:
                    if is_traced(state, batches, key):
                        raise
                    self._staged.add(chosen)
                except (RuntimeError, ValueError):
                    arguments.check_not_used_up(state)
                    raise
            if chosen in self._staged:
                new, outputs = self._stepped(*args)
                new, outputs = self._placed(new), {n: to_device(v) for n, v in outputs.items()}
            return (new if self._draws else replace(new, key=state.key)), outputs

    def infer(
        self, state: TrainingState | None = None, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Any:
        """The main graph's outputs with the variables of a state (rule TR-24).

        Args:
            state: the state; ``self.state`` when left out.
            inputs, **named: inputs by name. A variable that is an input too may be given: that value counts for this
                call (rule TR-26).

        Returns:
            The output, or a named tuple when there are several.

        Raises:
            InputError: the arguments do not fit ``inputs``.
        """
        state = self.state if state is None else state
        self._check(state)
        part = self._main
        with compat.enable_x64():
            values = arguments.bind(part.inputs, part.optional, (), {**(inputs or {}), **named})
            if self._placement is not None:
                values = self._placement.put_inputs(values)
            variables = all_widened(state.variables, self._stored)
            return packed(self._fields, part.run({**variables, **values}, part.frozen, state.key))

    def train_step(self, batch: Mapping[str, Any] | None = None, /, *, algorithm: Any = None, **named: Any) -> Any:
        """``step`` on ``self.state``; returns the outputs by name.

        Args:
            batch, **named: arrays by name of input.
            algorithm: index or name; a whole iteration when left out.
        """
        self.state, outputs = self.step(self.state, {**(batch or {}), **named}, None, algorithm)
        return outputs

    def to_model(self, state: TrainingState | None = None) -> Model:
        """The main graph as a Model with the variables of a state, ``self.state`` when left out."""
        variables = (self.state if state is None else state).variables
        values, graph = {n: np.asarray(v) for n, v in variables.items()}, self._imported.graph
        graph = replace(graph, initializers={**graph.initializers, **values})
        return Model(replace(self._imported, graph=graph), self._settings, origin=self.origin, changes=values)

    def changed(self, state: TrainingState | None = None) -> dict[str, jax.Array]:
        """The variables of a state (``self.state`` when left out) by the names under which ``save`` writes them: those
        of the main graph under their own, those of an algorithm as ``training_info[0].algorithm/T``."""
        state = self.state if state is None else state
        self._check(state)
        named = dict(state.variables)
        for info, own in zip(self._infos, state.own, strict=True):
            named |= {info.key(n): v for n, v in own.items()}
        return named

    def _chosen(self, algorithm: int | str | None) -> tuple[int, ...]:
        """Indices of the algorithms to run."""
        count = len(self.algorithms)
        if algorithm is None:
            return tuple(range(count))
        if isinstance(algorithm, str):
            found = [i for i, name in enumerate(self.algorithms) if name == algorithm]
        else:
            found = [int(algorithm)] if 0 <= algorithm < count else []
        if len(found) != 1:
            raise InputNameError(
                f"algorithm ({algorithm!r}) names {len(found)} algorithms; they are {list(self.algorithms)}, "
                f"also to be had as 0 to {count - 1}"
            )
        return tuple(found)

    def _bound(self, chosen: tuple[int, ...], batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For each algorithm, the entries of the batch that it takes, checked."""
        if not isinstance(batch, Mapping):
            raise InputTypeError(f"the batch is a dict of arrays by name, not {type(batch).__name__}")
        parts = [self._parts[i] for i in chosen]
        if unknown := sorted(set(batch).difference(*(part.takes for part in parts))):
            takes = {self.algorithms[i]: sorted(self._parts[i].takes) for i in chosen}
            raise InputNameError(f"the batch has {unknown}; the algorithms take {takes}")
        bound = [
            arguments.bind(part.inputs, part.optional, (), {n: v for n, v in batch.items() if n in part.takes})
            for part in parts
        ]
        return bound if self._placement is None else list(map(self._placement.put_batch, bound))

    def _spread(self, arrays: Mapping[str, Any]) -> TrainingState | None:
        """The sharding of each leaf of the state."""
        placed = self._placement
        if placed is None:
            return None
        everywhere: Any = NamedSharding(placed.mesh, PartitionSpec())

        def lie(values: Mapping[str, Any]) -> Any:
            # Under a configuration, variables of two algorithms may share a name; the first of them is meant.
            meant = {n: v for n, v in values.items() if placed.rules is not None or arrays[n] is v}
            return dict.fromkeys(values, everywhere) | placed.spread(meant)

        return TrainingState(lie(self._stored), tuple(map(lie, self._own_stored)), everywhere)

    def _drawn(self, rng: Any) -> Any:
        """A random key or seed of the caller's, as a key where the state lies."""
        key = arguments.as_key(rng)
        return key if self._placement is None else self._placement.put_whole(key)

    def _within(self, state: TrainingState) -> TrainingState:
        """What a compiled step takes of a state. A key that nothing draws from would cost each call some 10 us."""
        return state if self._draws else replace(state, key=None)

    def _placed(self, state: TrainingState) -> TrainingState:
        if self._shardings is None:
            return state
        return jax.device_put(state, self._shardings if state.key is not None else self._within(self._shardings))

    def _check(self, state: TrainingState) -> None:
        if not self._structure == jax.tree.structure(state):
            raise InputError(
                f"the state is {jax.tree.structure(state)}, not {self._structure}; model.init() makes one that fits"
            )

    def _initialized(self, key: Any) -> TrainingState:
        # Arrays with a placement are in Auto mode, also where ``jax.set_mesh`` says otherwise.
        with compat.enable_x64(), compat.in_auto_axes(compat.context_mesh()) if self._placement else nullcontext():
            key, draw = jax.random.split(key)
            state = replace(self.init(), key=key)
            for i, (info, part) in enumerate(zip(self._infos, self._beginnings, strict=True)):
                seen = {**info.algorithm.initializers, **state.variables, **state.own[i]}
                values = {n: seen[n] for n in part.graph.captures}
                results = part.named(part.run(values, part.frozen, jax.random.fold_in(draw, i)))
                state = assigned(state, i, info, info.initialization_binding, results)
            return self._placed(state)

    def _stepped(
        self,
        chosen: tuple[int, ...],
        state: TrainingState,
        batches: list[dict[str, Any]],
        key: Any,
        frozen: list[dict[str, Any]],
    ) -> tuple[TrainingState, dict[str, Any]]:
        """What is compiled: the algorithms one after another."""
        outputs: dict[str, Any] = {}
        if key is None and self._draws:
            rest, key = jax.random.split(state.key)
            state = replace(state, key=rest)
        for i, batch, fixed in zip(chosen, batches, frozen, strict=True):
            part, info = self._parts[i], self._infos[i]
            variables = all_widened(state.variables, self._stored) | all_widened(state.own[i], self._own_stored[i])
            rng = None if key is None else jax.random.fold_in(key, i)
            results = part.named(part.run({**variables, **batch}, fixed, rng))
            state = assigned(state, i, info, info.update_binding, results)
            outputs.update(results)
        return state, {n: v for n, v in outputs.items() if self._wanted is None or n in self._wanted}


class _Part:
    """A graph of the model, ready to run."""

    def __init__(
        self, graph: Graph, variables: Mapping[str, Any], settings: Settings, placed: Placement | None
    ) -> None:
        self.graph, self.program = graph, Program(graph, settings)
        self.inputs = tuple(v for v in graph.inputs if v.name not in graph.initializers)
        self.optional = {v.name: v for v in graph.inputs if v.name in graph.initializers}
        self.takes = {v.name for v in graph.inputs}
        frozen = {n: v for n, v in analysis.parameters(graph).items() if n not in variables}
        with compat.enable_x64():
            self.frozen = jax.device_put(frozen) if placed is None else placed.put_params(frozen)
        """The constants that are passed as arguments rather than compiled in."""

    def run(self, values: Mapping[str, Any], frozen: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
        """The graph's outputs, given inputs, variables and captured values by name."""
        return self.program.outputs(values, frozen, Known({}), rng if self.graph.draws else None, frozen)

    def named(self, results: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip((v.name for v in self.graph.outputs), results, strict=True))
