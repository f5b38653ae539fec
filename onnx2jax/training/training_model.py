"""Training as the file describes it: ``training_info`` becomes a state and functions that update it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import compat
from ..errors import InputError, InputNameError, UnsupportedError
from ..ir import analysis
from ..ir.file import Reading
from ..ir.graph import Graph
from ..model.calls import arguments
from ..model.calls.outputs import as_outputs, field_names
from ..model.model import Model
from ..model.spec import Spec
from ..proto.mapped import load
from ..runtime.dispatch import Constants, snapshot
from ..runtime.interpreter import Settings
from ..runtime.partition import Program
from ..runtime.values import to_host
from ..sharding.configurations import placement
from ..sharding.processes import EQUAL, several, together
from .engine import Step, Training, check_not_used_up, counted
from .file import open_training
from .state import TrainingState, all_widened, assigned


class TrainingModel(Training):
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
        max_trips, optimize: as for ``convert``.
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
        optimize: bool = True,
        **reading: Unpack[Reading],
    ) -> None:
        with together(mesh, "TrainingModel") as said:
            self._imported, self._infos, self.origin = imported, infos, _ = open_training(source, reading)
            if several(mesh):
                said.same({"the file": self.origin.digest(), "shardings=": str(shardings)})
        self.algorithms = tuple(info.name for info in infos)

        main = imported.graph.initializers
        variables = set().union(*(info.assigned for info in infos))
        self._stored = {n: v for n, v in main.items() if n in variables}
        self._own_stored = tuple({n: v for n, v in info.own.items() if n in info.assigned} for info in infos)
        self._variables = {n: v for each in (*reversed(self._own_stored), self._stored) for n, v in each.items()}
        if strings := [n for n, v in self._variables.items() if v.dtype.hasobject]:
            raise UnsupportedError(f"variables {strings} hold strings, which JAX does not")
        self._rng = jnp.copy(arguments.as_key(0 if rng is None else rng))
        self._outputs, self._donate = None if outputs is None else frozenset(outputs), donate

        graphs = [imported.graph, *(g for info in infos for g in (info.algorithm, info.initialization))]
        constants = {n: v for g in graphs for n, v in analysis.parameters(g).items() if n not in self._variables}
        self._params = {**constants, **self._variables}
        self._placement = placement(imported, device_configuration, devices, mesh, shardings, (graphs, self._params))
        place = self._placement.constrain if self._placement else None
        self._settings = Settings(max_trips=max_trips, place=place, optimize=optimize)
        self._draws = any(info.algorithm.draws for info in infos)
        self._fields = field_names(v.name for v in imported.graph.outputs)
        self.inputs = self._part(imported.graph).inputs
        self.step_inputs = {info.path: self._part(info.algorithm).inputs for info in infos}
        given = {v.name for info in infos for v in info.algorithm.outputs}
        if unknown := sorted((self._outputs or set()) - given):
            raise InputNameError(f"outputs names {unknown}; main graph and algorithms give {sorted(given)}")
        self.state = self.init()

    @cached_property
    def _structure(self) -> Any:
        variables, *own = (dict.fromkeys(s, 0) for s in (self._stored, *self._own_stored))
        return jax.tree.structure(TrainingState(variables, tuple(own), 0))  # type: ignore[arg-type]

    @cached_property
    def _parts(self) -> dict[Graph, _Part]:
        """Those asked for so far."""
        return {}

    @cached_property
    def _steps(self) -> dict[tuple[int, ...], Step]:
        """Those made so far, by the positions of their algorithms."""
        return {}

    def init(self) -> TrainingState:
        """The state that the file holds (rule TR-03)."""
        with compat.enable_x64():
            every = (self._stored, *self._own_stored)
            variables, *own = ({n: jnp.array(self._laid(n, v)) for n, v in s.items()} for s in every)
            return self._put(TrainingState(variables, tuple(own), self._key(self._rng)))

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
            self.state = self._initialized(self.state.key if rng is None else self._key(rng))
            return None
        return self._initialized(state.key if rng is None else self._key(rng))

    def step(
        self, state: TrainingState, batch: Mapping[str, Any], rng: Any = None, algorithm: int | str | None = None
    ) -> tuple[TrainingState, dict[str, Any]]:
        """One step: run an algorithm, then assign all its updates at once (rule TR-20).

        Args:
            state: the state; its memory is reused (``donate``).
            batch: arrays by name of input. NumPy arrays are the same in all processes; rows of each process go through
                ``from_process``.
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
        if chosen not in self._steps:
            self._steps[chosen] = self._iteration(chosen)
        key = None if rng is None else self._key(rng)
        # A key that nothing draws from would cost each call some 10 us.
        new, outputs = self._steps[chosen](state if self._draws else replace(state, key=None), batch, key)
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
        check_not_used_up(state)
        with compat.enable_x64():
            part = self._part(self._imported.graph)
            with together(self._placement.mesh if self._placement else None, "infer", EQUAL) as said:
                values = part.bind({**(inputs or {}), **named})
                said.same(values)
            if self._placement is not None:
                values = self._placement.put_inputs(values)
            variables = all_widened(state.variables, self._stored)
            results = part.run(values, {**part.constants, **variables}, state.key)
            return as_outputs(self._fields, results.values())

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
        state = self.state if state is None else state
        self._check(state)
        check_not_used_up(state)
        values, graph = {n: np.asarray(to_host(v)) for n, v in state.variables.items()}, self._imported.graph
        graph = replace(graph, initializers={**graph.initializers, **values})
        settings = replace(self._settings, place=None)
        changes = {n: snapshot(v) for n, v in values.items()}
        imported = replace(self._imported, graph=graph)
        return Model(Spec.of(imported, settings=settings, origin=self.origin, changes=changes))

    def changed(self, state: TrainingState | None = None) -> dict[str, jax.Array]:
        """The variables of a state (``self.state`` when left out) by the names under which ``save`` writes them: those
        of the main graph under their own, those of an algorithm as ``training_info[0].algorithm/T``."""
        state = self.state if state is None else state
        self._check(state)
        check_not_used_up(state)
        named = dict(state.variables)
        for info, own in zip(self._infos, state.own, strict=True):
            named |= {info.key(n): v for n, v in own.items()}
        return named

    def _chosen(self, algorithm: int | str | None) -> tuple[int, ...]:
        """Indices of the algorithms to run."""
        count = len(self.algorithms)
        found = [i for i, name in enumerate(self.algorithms) if algorithm is None or algorithm in (i, name)]
        if algorithm is not None and len(found) != 1:
            raise InputNameError(
                f"algorithm ({algorithm!r}) names {len(found)} algorithms; they are {list(self.algorithms)}, "
                f"also to be had as 0 to {count - 1}"
            )
        return tuple(found)

    def _check(self, state: TrainingState) -> None:
        if (have := jax.tree.structure(state)) != self._structure:
            raise InputError(f"the state is {have}, not {self._structure}; model.init() makes one that fits")

    def _initialized(self, key: Any) -> TrainingState:
        # Arrays with a placement are in Auto mode, also where ``jax.set_mesh`` says otherwise.
        with compat.enable_x64(), compat.in_auto_axes(compat.context_mesh()) if self._placement else nullcontext():
            key, draw = jax.random.split(key)
            state = replace(self.init(), key=key)
            for i, info in enumerate(self._infos):
                part = self._part(info.initialization)
                seen: dict[str, Any] = {**info.algorithm.initializers, **state.variables, **state.own[i]}
                values = {n: load(seen[n]) for n in part.graph.captures}
                results = part.run(values, part.constants, jax.random.fold_in(draw, i))
                state = assigned(state, i, info, info.initialization_binding, results)
            return self._put(state)

    def _iteration(self, chosen: tuple[int, ...]) -> Step:
        """A step of the algorithms at these positions, one after another."""
        parts = {i: self._part(self._infos[i].algorithm) for i in chosen}

        def bound(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
            if unknown := sorted(batch.keys() - set().union(*(part.takes for part in parts.values()))):
                takes = {self.algorithms[i]: sorted(part.takes) for i, part in parts.items()}
                raise InputNameError(f"the batch has {unknown}; the algorithms take {takes}")
            each = ((part, {n: v for n, v in batch.items() if n in part.takes}) for part in parts.values())
            return [self._put_batch(part.bind(entries)) for part, entries in each]

        def stepped(state: TrainingState, constants: Any, batches: list[dict[str, Any]], key: Any) -> Any:
            outputs: dict[str, Any] = {}
            if key is None and self._draws:
                rest, key = jax.random.split(state.key)
                state = replace(state, key=rest)
            for (i, part), batch, fixed in zip(parts.items(), batches, constants, strict=True):
                info = self._infos[i]
                variables = all_widened(state.variables, self._stored) | all_widened(state.own[i], self._own_stored[i])
                rng = None if key is None else jax.random.fold_in(key, i)
                results = part.run(batch, {**fixed, **variables}, rng)
                state = assigned(state, i, info, info.update_binding, results)
                outputs.update(results)
            return state, {n: v for n, v in outputs.items() if self._outputs is None or n in self._outputs}

        constants = [part.constants for part in parts.values()]
        return Step(
            self, stepped, bound, constants, donate=self._donate, in_stages=True, optimize=self._settings.optimize
        )

    def _part(self, graph: Graph) -> _Part:
        if graph not in self._parts:
            constants = {n: v for n, v in analysis.parameters(graph).items() if n not in self._variables}
            self._parts[graph] = _Part(graph, self._settings, self._put_params(constants))
        return self._parts[graph]

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self.state = self._put(copy.copy(self.state))

    def __repr__(self) -> str:
        rows = {"infer takes": ", ".join(map(str, self.inputs)), "variables": counted(self._stored)}
        for info, own in zip(self._infos, self._own_stored, strict=True):
            rows[f"{info.name} takes"] = ", ".join(map(str, self.step_inputs[info.path]))
            rows[f"{info.name} has"] = counted(own)
        return self._described(self._imported.graph.name, rows)


class _Part:
    """A graph of the model, ready to run, with the constants that are passed as arguments rather than compiled in."""

    def __init__(self, graph: Graph, settings: Settings, constants: Mapping[str, Any]) -> None:
        self.graph, self.program, self.constants = graph, Program(graph, settings), constants
        self.inputs = tuple(v for v in graph.inputs if v.name not in graph.initializers)
        self.optional = {v.name: v for v in graph.inputs if v.name in graph.initializers}
        self.takes = {v.name for v in graph.inputs}

    def bind(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs by name, checked."""
        return arguments.bind(self.inputs, self.optional, (), values)

    def run(self, values: Mapping[str, Any], params: Mapping[str, Any], rng: Any) -> dict[str, Any]:
        """The graph's outputs by name, given inputs and captured values by name, variables and constants."""
        results = self.program.outputs(values, params, Constants({}), rng if self.graph.draws else None, params)
        return dict(zip((v.name for v in self.graph.outputs), results, strict=True))
