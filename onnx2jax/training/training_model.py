"""TrainingModel: runs ``training_info`` as update functions of a state pytree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import compat
from ..errors import InputError, InputNameError, UnsupportedError, did_you_mean, names_list
from ..eval.interpreter import Settings
from ..eval.values import to_host
from ..ir import analysis, binding
from ..ir.file import Reading, check_keywords
from ..ir.graph import Graph, Imported, read_constants
from ..ir.training_info import TrainingInfo, read_training
from ..model.calls import arguments
from ..model.calls.outputs import as_outputs, field_names
from ..model.convert import check_operands, open_model
from ..model.model import Model
from ..model.options import Options
from ..model.spec import Spec
from ..proto.mapped import load
from ..proto.origin import Origin
from ..proto.types import ValueInfo
from ..runtime.cache_folder import folder
from ..runtime.dispatch import CallContext, Constants, snapshot
from ..runtime.partition import StagedProgram
from ..sharding.configurations import placement
from ..sharding.processes import EQUAL, in_agreement, several
from .engine import CompiledStep, TrainingEngine, TrainingState, assign, check_not_donated, summary, widen_all


class TrainingModel(TrainingEngine):
    """An ONNX model that trains by its ``training_info``: pure functions of a state, and an object that holds one.

    ``init``, ``initialize``, ``step`` and ``infer`` are pure functions of a state. Without a state, ``initialize()``,
    ``train_step(...)`` and ``infer(...)`` use ``self.state``.

    The variables are the initializers that are keys of a binding (rule TR-02); they start with the values in the file
    (TR-03). All other initializers are constants.

    Args:
        source: a path, the bytes of a file, an open binary file, an ``onnx.ModelProto``, or a result of ``read``.
        mesh: devices over which state and batches are sharded. Batches are sharded over the mesh's first axis.
        shardings: PartitionSpecs of variables and constants over ``mesh``, by name pattern (fnmatch); those without a
            match are replicated.
        device_configuration, devices: as for ``convert``; variables get the placement of the nodes that read them.
        rng: initial PRNG key or seed; defaults to seed 0.
        outputs: the names of the outputs that a step returns; defaults to all. These include the new values of
            variables, so naming only the outputs you need saves a copy of every variable.
        donate: whether ``step`` donates the state it receives, which is invalid afterwards.
        max_trips, optimize: as for ``convert``.
        **reading: keywords of ``read``.

    Attributes:
        state: the current state.
        algorithms: the names of the algorithms, in the order of ``training_info``.
        inputs: the inputs of ``infer``.
        step_inputs: the inputs of a step of each algorithm: those of the main graph and its own (TR-16).

    Raises:
        UnsupportedError: the model has no training_info (rule TR-27).
        ModelError: the file is not an ONNX model, or breaks a rule of the format.

    >>> import numpy as np, onnx2jax
    >>> trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    >>> trainer.initialize()
    >>> outputs = trainer.train_step(image=np.zeros((32, 64), np.float32), label=np.zeros(32, np.int64))
    >>> trainer.infer(image=np.zeros((1, 64), np.float32)).shape
    (1, 10)
    """

    origin: Origin
    state: TrainingState
    algorithms: tuple[str, ...]
    inputs: tuple[ValueInfo, ...]
    step_inputs: dict[str, tuple[ValueInfo, ...]]
    _stored: tuple[dict[str, np.ndarray], ...]
    """The variables' values in the file: of the main graph, then of each algorithm."""

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
        outputs: str | Iterable[str] | None = None,
        donate: bool = True,
        max_trips: int | None = None,
        optimize: bool = True,
        **reading: Unpack[Reading],
    ) -> None:
        check_keywords(reading, TrainingModel)
        with in_agreement(mesh, "TrainingModel") as processes:
            self._imported, self._infos, self.origin = imported, infos, _ = _opened(source, reading)
            if several(mesh):
                processes.same({"the file": self.origin.digest(), "shardings=": str(shardings)})
        self.algorithms = tuple(info.name for info in infos)

        assigned = set().union(*(info.assigned for info in infos))
        self._stored = (
            {n: v for n, v in imported.graph.initializers.items() if n in assigned},
            *({n: v for n, v in info.initializers.items() if n in info.assigned} for info in infos),
        )
        self._variables = {n: v for values in reversed(self._stored) for n, v in values.items()}
        if strings := [n for n, v in self._variables.items() if v.dtype.hasobject]:
            raise UnsupportedError(f"variables {strings} hold strings, which JAX does not support")
        self._rng = jnp.copy(arguments.as_key(0 if rng is None else rng))
        self._outputs, self._donate = None if outputs is None else frozenset(names_list(outputs)), donate

        graphs = [imported.graph, *(g for info in infos for g in (info.algorithm, info.initialization))]
        constants = {n: v for g in graphs for n, v in analysis.parameters(g).items() if n not in self._variables}
        self._params = {**constants, **self._variables}
        self._placement = placement(imported, device_configuration, devices, mesh, shardings, (graphs, self._params))
        place = self._placement.constrain if self._placement else None
        self._options = Options(max_trips=max_trips, optimize=optimize)
        self._settings = Settings(max_trips=max_trips, place=place, optimize=optimize, cache_dir=folder(True))
        self._draws = any(info.algorithm.draws for info in infos)
        self._fields = field_names(v.name for v in imported.graph.outputs)
        self.inputs = self._program_of(imported.graph).inputs
        self.step_inputs = {info.path: self._program_of(info.algorithm).inputs for info in infos}
        available = {v.name for info in infos for v in info.algorithm.outputs}
        if unknown := sorted((self._outputs or set()) - available):
            raise InputNameError(
                f"outputs has {unknown}; the outputs of main graph and algorithms are {sorted(available)}"
                f"{did_you_mean(unknown, available)}"
            )
        self.state = self.init()

    @cached_property
    def _structure(self) -> Any:
        main, *algorithms = (dict.fromkeys(values, 0) for values in self._stored)
        return jax.tree.structure(TrainingState(main, tuple(algorithms), 0))  # type: ignore[arg-type]

    @cached_property
    def _program_of(self) -> Callable[[Graph], _GraphProgram]:
        """The program of a graph, created on first use."""
        return cache(self._make_program)

    @cached_property
    def _step_of(self) -> Callable[[tuple[int, ...]], CompiledStep]:
        """The step that runs the algorithms at these indices in turn, created on first use."""
        return cache(self._make_step)

    def init(self) -> TrainingState:
        """The initial state: the values stored in the file (rule TR-03)."""
        with compat.enable_x64():
            main, *algorithms = ({n: jnp.array(self._put_param(n, v)) for n, v in s.items()} for s in self._stored)
            return self._put(TrainingState(main, tuple(algorithms), self._key(self._rng)))

    def initialize(self, state: TrainingState | None = None, /, rng: Any = None) -> TrainingState | None:
        """Resets to the stored values, then runs every initialization graph in order (rule TR-04).

        Args:
            state: a state, of which only the key is used; None replaces ``self.state``.
            rng: PRNG key or seed; defaults to the state's key.

        Returns:
            The new state, or None if ``state`` is None.

        Raises:
            ModelError: a value does not fit its variable (rule TR-25).
        """
        key = (self.state if state is None else state).key if rng is None else self._key(rng)
        # Arrays with a placement are in Auto mode, also if ``jax.set_mesh`` selects another.
        with compat.enable_x64(), compat.in_auto_axes(compat.context_mesh()) if self._placement else nullcontext():
            key, draw = jax.random.split(key)
            new = replace(self.init(), key=key)
            for i, info in enumerate(self._infos):
                part = self._program_of(info.initialization)
                visible: dict[str, Any] = {**info.algorithm.initializers, **new.variables, **new.own[i]}
                values = {n: load(visible[n]) for n in part.graph.captures}
                results = part.run(values, part.constants, jax.random.fold_in(draw, i))
                new = assign(new, i, info, info.initialization_binding, results)
            new = self._put(new)
        if state is not None:
            return new
        self.state = new
        return None

    def step(
        self, state: TrainingState, batch: Mapping[str, Any], rng: Any = None, algorithm: int | str | None = None
    ) -> tuple[TrainingState, dict[str, Any]]:
        """One step: runs an algorithm, then assigns all its updates at once (rule TR-20).

        Args:
            state: the state; donated unless ``donate=False``.
            batch: arrays by input name. NumPy arrays must be equal in all processes; use ``from_process`` for rows per
                process.
            rng: PRNG key or seed of this step; by default derived from the state's key.
            algorithm: index or name of the algorithm. None runs a whole iteration: all algorithms in order, each on the
                state left by the previous one (rule TR-22).

        Returns:
            The new state, and the outputs of main graph and algorithm by name. If several algorithms have an output of
            the same name, that of the last is returned.

        Raises:
            InputError: the batch does not fit ``step_inputs``, or the state was donated to an earlier step.
            ModelError: a new value does not fit its variable (rule TR-25).
        """
        indices = self._indices(algorithm)
        self._check(state)
        key = None if rng is None else self._key(rng)
        # Passing a key that no operator uses would cost about 10 us per call.
        new, outputs = self._step_of(indices)(state if self._draws else replace(state, key=None), batch, key)
        return (new if self._draws else replace(new, key=state.key)), outputs

    def infer(
        self, state: TrainingState | None = None, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> Any:
        """The main graph's outputs with the variables of a state (rule TR-24).

        Args:
            state: the state; defaults to ``self.state``.
            inputs, **named: inputs by name. A value for a variable that is also an input overrides it in this call
                (rule TR-26).

        Returns:
            The output, or a named tuple if there are several.

        Raises:
            InputError: the arguments do not fit ``inputs``.
        """
        state = self._valid(state)
        with compat.enable_x64():
            part = self._program_of(self._imported.graph)
            with in_agreement(self._mesh, "infer", EQUAL) as processes:
                values = part.bind({**(inputs or {}), **named})
                processes.same(values)
            if self._placement is not None:
                values = self._placement.put_inputs(values)
            variables = widen_all(state.variables, self._stored[0])
            results = part.run(values, {**part.constants, **variables}, state.key)
            return as_outputs(self._fields, results.values())

    def train_step(self, batch: Mapping[str, Any] | None = None, /, *, algorithm: Any = None, **named: Any) -> Any:
        """``step`` on ``self.state``; returns the outputs by name.

        Args:
            batch, **named: arrays by input name.
            algorithm: index or name; None for a whole iteration.
        """
        self.state, outputs = self.step(self.state, {**(batch or {}), **named}, None, algorithm)
        return outputs

    def to_model(self, state: TrainingState | None = None) -> Model:
        """The main graph as a Model with the variables of a state, by default ``self.state``."""
        state = self._valid(state)
        values, graph = {n: np.asarray(to_host(v)) for n, v in state.variables.items()}, self._imported.graph
        graph = replace(graph, initializers={**graph.initializers, **values})
        settings = replace(self._settings, place=None)
        changes = {n: snapshot(v) for n, v in values.items()}
        imported = replace(self._imported, graph=graph)
        return Model(Spec.of(imported, self._options, settings=settings, origin=self.origin, changes=changes))

    def changed(self, state: TrainingState | None = None) -> dict[str, jax.Array]:
        """The variables of a state (by default ``self.state``) under the names that ``save`` uses.

        Variables of the main graph have their own names, those of an algorithm ``training_info[0].algorithm/T``.
        """
        state = self._valid(state)
        algorithms = zip(self._infos, state.own, strict=True)
        return dict(state.variables) | {info.key(n): v for info, values in algorithms for n, v in values.items()}

    def _indices(self, algorithm: int | str | None) -> tuple[int, ...]:
        """Indices of the algorithms to run."""
        indices = [i for i, name in enumerate(self.algorithms) if algorithm is None or algorithm in (i, name)]
        if algorithm is not None and len(indices) != 1:
            raise InputNameError(
                f"algorithm={algorithm!r} matches {len(indices)} algorithms; choose one of {list(self.algorithms)}, "
                f"or 0 to {len(self.algorithms) - 1}"
            )
        return tuple(indices)

    def _valid(self, state: TrainingState | None) -> TrainingState:
        """The state, by default ``self.state``, checked to fit and not to be donated."""
        state = self.state if state is None else state
        self._check(state)
        check_not_donated(state)
        return state

    def _check(self, state: TrainingState) -> None:
        if (structure := jax.tree.structure(state)) != self._structure:
            raise InputError(f"the state is {structure}, not {self._structure}; model.init() returns one that fits")

    def _make_step(self, indices: tuple[int, ...]) -> CompiledStep:
        parts = {i: self._program_of(self._infos[i].algorithm) for i in indices}

        def bound(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
            if unknown := sorted(batch.keys() - set().union(*(part.takes for part in parts.values()))):
                takes = {self.algorithms[i]: sorted(part.takes) for i, part in parts.items()}
                raise InputNameError(f"the batch has {unknown}; the algorithms take {takes}")
            each = (part.bind({n: v for n, v in batch.items() if n in part.takes}) for part in parts.values())
            return list(map(self._put_batch, each))

        def train_step(state: TrainingState, constants: Any, batches: list[dict[str, Any]], key: Any) -> Any:
            outputs: dict[str, Any] = {}
            if key is None and self._draws:
                rest, key = jax.random.split(state.key)
                state = replace(state, key=rest)
            for (i, part), batch, fixed in zip(parts.items(), batches, constants, strict=True):
                info = self._infos[i]
                variables = widen_all(state.variables, self._stored[0]) | widen_all(state.own[i], self._stored[i + 1])
                rng = None if key is None else jax.random.fold_in(key, i)
                results = part.run(batch, {**fixed, **variables}, rng)
                state = assign(state, i, info, info.update_binding, results)
                outputs.update(results)
            return state, {n: v for n, v in outputs.items() if self._outputs is None or n in self._outputs}

        constants = [part.constants for part in parts.values()]
        return CompiledStep(self, train_step, bound, constants, donate=self._donate, may_partition=True)

    def _make_program(self, graph: Graph) -> _GraphProgram:
        constants = {n: v for n, v in analysis.parameters(graph).items() if n not in self._variables}
        return _GraphProgram(graph, self._settings, self._put_params(constants))

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self.state = self._put(copy.copy(self.state))

    def __repr__(self) -> str:
        rows = {"infer takes": ", ".join(map(str, self.inputs)), "variables": summary(self._stored[0])}
        for info, variables in zip(self._infos, self._stored[1:], strict=True):
            rows[f"{info.name} takes"] = ", ".join(map(str, self.step_inputs[info.path]))
            rows[f"{info.name} has"] = summary(variables)
        return self._describe(self._imported.graph.name, rows)


class _GraphProgram:
    """A graph's program, with the constants that are passed as arguments rather than embedded in it."""

    def __init__(self, graph: Graph, settings: Settings, constants: Mapping[str, Any]) -> None:
        self.graph, self.program, self.constants = graph, StagedProgram(graph, settings), constants
        self.inputs = tuple(v for v in graph.inputs if v.name not in graph.initializers)
        self.optional = {v.name: v for v in graph.inputs if v.name in graph.initializers}
        self.takes = {v.name for v in graph.inputs}

    def bind(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Validates inputs by name."""
        return arguments.bind(self.inputs, self.optional, (), values)

    def run(self, values: Mapping[str, Any], params: Mapping[str, Any], rng: Any) -> dict[str, Any]:
        """The graph's outputs by name, given inputs and captured values by name, variables and constants."""
        key = rng if self.graph.draws else None
        results = self.program.outputs(values, CallContext(params, Constants({}), key, params))
        return dict(zip((v.name for v in self.graph.outputs), results, strict=True))


def _opened(source: Any, reading: Reading) -> tuple[Imported, tuple[TrainingInfo, ...], Origin]:
    """An imported model, its training_info, and its origin."""
    importer = open_model(source, reading)
    if not importer.message.training_info:
        raise UnsupportedError(
            "the model has no training_info. Train it with your own loss and optimizer: "
            "onnx2jax.finetune(onnx2jax.convert(source), loss, optimizer)",
            rule="TR-27",
        )
    imported = importer.model()
    infos = read_training(importer.message, imported.graph, importer)
    binding.check_supported(importer.unsupported, importer.rejected)
    check_operands(importer)
    for graph in (imported.graph, *(g for info in infos for g in (info.initialization, info.algorithm))):
        read_constants(graph, analysis.parameters(graph))
    return imported, infos, Origin(importer.message, importer.files)
