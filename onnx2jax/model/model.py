"""What a user holds: a converted model, callable, with its parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from .. import compat
from ..errors import InputNameError, RandomKeyError
from ..ir import analysis
from ..ir.graph import Graph, Imported, read_constants
from ..ops.arrays import is_traced
from ..proto.mapped import load
from ..proto.origin import Origin
from ..proto.types import TensorType
from ..runtime.compiled import Known
from ..runtime.evaluate import Settings
from ..runtime.optimize.executable import Weights
from ..runtime.program import Program
from ..runtime.values import to_host
from ..sharding.processes import alike, one_seed
from ..sharding.rules import Placement
from .calls import arguments, buckets
from .calls.growth import Growth
from .calls.outputs import Declarations, apart, bundled, field_names, packed
from .calls.repeated import Calls
from .changes.max_size import check_counts
from .devices.pipeline import Pipeline, program_of
from .files.export import Exports
from .frozen import Frozen
from .params import Params, kept
from .reports.card import described
from .reports.summary import feeds_of
from .reports.table import table
from .views import Views


class Model(Frozen, Views, Exports):
    """An ONNX model as a JAX function. Made by ``convert``; it never changes: ``with_params`` makes another.

    Attributes:
        inputs: the required inputs, in order; each has ``name`` and ``type`` (``dtype``, ``shape``).
        optional: inputs that have a default, by name; pass them by name to override it.
        outputs: the outputs, in order.
        opsets: version of each operator set that the model imports; ai.onnx is ``''``.
        metadata: what the file says about itself, as texts.
        graph: the frozen graph. Weights in files are in its initializers as maps of them: read them from ``params``.
        static: inputs fixed by ``convert(static=...)``.
        settings: what ``convert`` was told about running.
        origin: what the file said, for ``onnx2jax.save``.
        placement: where weights and inputs lie when there is a mesh: ``mesh``, a sharding for each of ``params``, and
            ``notes`` on what of a device configuration could not be followed. None on one device.
    """

    def __init__(
        self,
        imported: Imported,
        settings: Settings | None = None,
        *,
        static: Mapping[str, Any] | None = None,
        dim_overrides: Mapping[str, int] | None = None,
        bucket: Mapping[str, Sequence[int]] | None = None,
        max_size: Mapping[str, int] | None = None,
        origin: Origin | None = None,
        placement: Placement | None = None,
        changes: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.graph = graph = imported.graph
        stored = analysis.parameters(graph)
        read_constants(graph, stored)
        declared = arguments.override_dims(graph.inputs, dim_overrides or {})
        pinned = arguments.pinned(declared, static or {})
        free = [v for v in declared if v.name not in pinned]
        # Below IR 4 every weight is listed as an input; such an entry declares a constant (rule GR-06).
        own = imported.ir_version >= 4
        self.inputs = tuple(v for v in free if v.name not in graph.initializers)
        self.optional = MappingProxyType({v.name: v for v in free if own and v.name in graph.initializers})
        self.outputs = graph.outputs
        self.opsets = MappingProxyType(dict(imported.opsets))
        self.metadata = MappingProxyType(dict(imported.metadata))
        self.static = MappingProxyType(pinned)
        self.settings, self.origin, self.placement = settings or Settings(), origin, placement
        self._types = {n: TensorType(v.dtype, v.shape) for n, v in stored.items()}
        self._max_size = dict(max_size or {})
        self._bucket = buckets.checked_buckets(declared, bucket or {})
        self._changes = {n: kept(v) for n, v in (changes or {}).items()}
        self._begin()

    def _begin(self) -> None:
        """What is not part of the model: programs, arrays on devices, warnings given."""
        self._fields = field_names(v.name for v in self.outputs)
        self._declared = Declarations(self.graph.inputs, self.outputs)
        self._compared, self._growth = 0, Growth()
        self._unpadded: dict[frozenset[str], Program | Pipeline | None] = {}
        """Without padding, by the variables that are padded; None once it has shown that they may be."""
        self._showing: dict[tuple[str, ...], Model] = {}
        """The model that ``values`` ran last, by the names that it shows."""
        program = program_of(self.graph, self.settings, self.placement)
        self._calls = Calls()
        self._program = program  # the last: a model that has one is complete

    @cached_property
    def params(self) -> Params:
        """The weights by ONNX name: a read-only mapping of read-only arrays, and a pytree for JAX's transformations.

        Those in files beside the model are read when this is first asked for.

        Raises:
            ExternalDataError: such a file was changed after the model was converted.
        """
        known = self._on_devices[0].on_host() if "_on_devices" in vars(self) else {}
        values = read_constants(self.graph, known={n: v for n, v in known.items() if n not in self._changes})
        return Params({n: self._changes.get(n, values[n]) for n in self._types})

    @property
    def weights(self) -> Weights:
        """The parameters on their devices, but for those of one number, which are part of what is compiled."""
        return self._on_devices[0]

    @property
    def by_value(self) -> Known:
        """What is part of what is compiled: parameters of one number, and inputs that are fixed."""
        return self._on_devices[1]

    def changed(self) -> dict[str, Any]:
        """Weights that are not what the file says."""
        return dict(self._changes)

    @property
    def jitted(self) -> bool:
        """Whether calls run as one ``jax.jit``. False once something in the model needed the host."""
        return self._program.is_one

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one for each stage and each set of shapes it met."""
        return self._program.compilations

    def __call__(self, /, *args: Any, rng: Any = None, **named: Any) -> Any:
        """Run the model, compiled for the shapes of this call.

        Args:
            *args: required inputs in order.
            rng: random key, or a seed for one, for models that draw random numbers; a fresh one when left out. Of a
                model with an input of this name, whatever is no typed key (``jax.random.key``) is that input.
            **named: inputs by name.

        Of several processes NumPy arrays, and JAX's of one process, are the same in all; rows that each has for itself
        go through ``placement.from_process``, and those of an output come out of ``placement.to_process``.

        Returns:
            The output, or a named tuple when there are several. Arrays are JAX arrays with the dtypes that ONNX
            says, 64-bit ones included; strings and maps stay with NumPy and Python.

        Raises:
            InputError: the arguments do not fit ``model.inputs``.
            RandomKeyError: the model draws random numbers inside a transformation of yours, and ``rng`` is left out.
        """
        if rng is None and (known := self._calls.again(args, named)) is not None:
            return bundled(self._fields, known)
        narrow = compat.in_32_bits()
        with compat.enable_x64():
            values, key = alike(self._mesh, "a call of the model", lambda: self._bound(args, named, rng))
            results = self._call(values, key, narrow)
            self._remember(args, named, values, key)
            return packed(self._fields, results)

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], *, rng: Any = None) -> list[Any]:
        """Run the model as onnxruntime's ``InferenceSession.run`` does: NumPy in, a list of NumPy out.

        Of a model over several processes each gets all of the outputs, gathered; a call leaves them where they lie.

        Args:
            output_names: the outputs wanted, in the order wanted; None for all.
            feeds: inputs by name.
            rng: random key; a fresh one when left out.
        """
        wanted = range(len(self.outputs)) if output_names is None else self._places(output_names)
        results: Sequence[Any] | None = None
        if rng is None and isinstance(feeds, dict):
            results = self._calls.again((), feeds, on_host=True)
        if results is None:
            narrow = compat.in_32_bits()
            with compat.enable_x64():

                def bind() -> tuple[dict[str, Any], Any]:
                    bound = arguments.bind(self.inputs, self.optional, (), feeds)
                    return bound, None if rng is None else arguments.as_key(rng)

                values, key = alike(self._mesh, "a run of the model", bind)
                results = self._call(values, key, narrow, on_host=True)
                self._remember((), feeds, values, key, on_host=True)
        return apart([to_host(results[i]) for i in wanted], feeds.values())

    def compile(self, inputs: Mapping[str, Any] | None = None, *, dims: Mapping[str, int] | None = None) -> Self:
        """Compile for inputs of some shapes, and prepare the weights, ahead of the first call.

        The model runs once, on random numbers where no values are given. With ``convert(..., cache_dir=folder)`` other
        processes need not compile for these shapes either.

        Args:
            inputs: by name, arrays, or shapes as tuples or ``jax.ShapeDtypeStruct``; the others are as declared. Where
                values decide the course of the computation, give them.
            dims: extents of dimension variables, 1 when left out.

        Returns:
            The model.

        Raises:
            InputError: they do not fit the model.

        >>> import onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model()).compile(dims={"batch": 8})
        >>> model.compilations
        1
        """
        self.run(None, feeds_of(self, inputs or {}, dims or {}))
        return self

    def apply(self, params: Mapping[str, Any], /, *args: Any, rng: Any = None, **named: Any) -> Any:
        """The model as a pure function, for jit, grad, vmap, sharding and export of your own.

        Args:
            params: the weights: ``model.params``, or new values for some of them (the others are the model's own).
            *args, **named: inputs, as for a call. JAX takes no strings, and no maps, as arguments of what it
                transforms, and says so before the model is asked: fix them, ``convert(..., static={"text": strings})``.
            rng: random key; required when the model draws random numbers.

        Returns:
            As for a call.

        Raises:
            KnownValueError: a shape depends on the value of a traced input.
            InputError: the arguments do not fit ``model.inputs``.

        >>> import jax, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> loss = lambda params, x: model.apply(params, x).sum()
        >>> gradients = jax.grad(loss)(model.params, np.zeros((1, 1, 8, 8), np.float32))
        """
        arguments.check_names(params, self._types)
        narrow = compat.in_32_bits()
        with compat.enable_x64():
            mesh = None if is_traced(list(params.values()), args, list(named.values())) else self._mesh
            values, rng = alike(mesh, "model.apply", partial(self._bound, args, named, rng))
            given = _put(self.placement, {n: arguments.as_param(n, v, self._types[n]) for n, v in params.items()})
            own: dict[str, Any] = {}
            if len(given) < len(self._types):
                placed, known = self._on_devices
                own = {n: placed[n] for n in placed if n not in given} | _put(self.placement, known.scalars)
            feeds = values
            if self.placement is not None:
                feeds, rng = self.placement.put_inputs(values), self.placement.put_whole(rng)
            results = self._program.outputs(feeds, own | given, Known({}, self.static), rng, given, narrow=narrow)
            self._declared.compare(values | dict(self.static), results)
            return packed(self._fields, results)

    def with_params(self, params: Mapping[str, Any]) -> Model:
        """The model with new values for some of its parameters; what is compiled is shared with this one.

        Raises:
            InputNameError, InputTypeError: a name that is none of ``params``, or another element type.
        """
        arguments.check_names(params, self._types)
        with compat.enable_x64():
            changes = {n: kept(arguments.as_param(n, v, self._types[n])) for n, v in params.items()}
        new = copy.copy(self)
        vars(new).update(_changes=self._changes | changes, _calls=Calls(), _showing={})
        for begun in ("params", "_on_devices"):
            vars(new).pop(begun, None)
        return new

    def explain(self) -> str:
        """How the model runs, as a table: its stages, why each is cut off, compilations and seconds so far."""
        return table([("stage", "nodes", "why here", "compiled", "seconds"), *self._program.rows()])

    def __repr__(self) -> str:
        return described(self)

    def _places(self, output_names: Sequence[str]) -> Sequence[int]:
        names = [v.name for v in self.outputs]
        if unknown := [n for n in output_names if n not in names]:
            raise InputNameError(f"there is no output {', '.join(map(repr, unknown))}; the model's outputs are {names}")
        return [names.index(n) for n in output_names]

    def _bound(self, args: Sequence[Any], named: Mapping[str, Any], rng: Any) -> tuple[dict[str, Any], Any]:
        """A call's arguments by input name, and its random key."""
        if rng is not None and not arguments.is_key(rng) and "rng" in {*self.optional, *(v.name for v in self.inputs)}:
            named, rng = {**named, "rng": rng}, None
        values = arguments.bind(self.inputs, self.optional, args, named)
        return values, None if rng is None else arguments.as_key(rng)

    @property
    def _mesh(self) -> Mesh | None:
        return self.placement.mesh if self.placement else None

    def _remember(
        self, args: Sequence[Any], named: Mapping[str, Any], values: dict[str, Any], rng: Any, on_host: bool = False
    ) -> None:
        """Let the next call of this kind go straight to the program, where nothing else is to be done."""
        more = rng is not None or self.graph.draws or self._bucket or self._max_size or self.placement is not None
        if not more and isinstance(self._program, Program):  # which it is without a placement
            self._calls.remember(self._program, args, named, values, *self._on_devices, on_host)

    def _call(self, values: dict[str, Any], rng: Any, narrow: bool, on_host: bool = False) -> tuple[Any, ...]:
        if rng is None and self.graph.draws:
            rng = jax.random.key(one_seed(self._mesh))
            if is_traced(values, rng):
                raise RandomKeyError(
                    f"model {self.graph.name!r} draws random numbers, and inside jit, grad or vmap they would be drawn "
                    "once and stay as they are: pass a key, model(..., rng=jax.random.key(0))"
                )
        padded, extents = buckets.pad(self.inputs, values, self._bucket)
        with buckets.blamed(extents):
            results = self._outputs(self._program, padded, rng, narrow, on_host)
        check_counts(results, self._max_size)
        results = buckets.cut(self.outputs, results, extents)
        if extents and not self.graph.draws:  # random numbers differ with the shape that is drawn
            self._prove(values, padded, results, extents, narrow)
        compilations = self._program.compilations
        if compilations != self._compared and not self._max_size:  # else every shape has been met before
            vars(self)["_compared"] = compilations
            self._declared.compare(values | dict(self.static), results)
            self._growth.note(self, values)
        return results

    def _outputs(
        self, program: Program | Pipeline, values: dict[str, Any], rng: Any, narrow: bool, on_host: bool = False
    ) -> tuple[Any, ...]:
        params, known = self._on_devices
        if self.placement is not None:
            values, rng = self.placement.put_inputs(values), self.placement.put_whole(rng)
        return program.outputs(values, params, known, rng, narrow=narrow, on_host=on_host)

    def _prove(
        self, values: dict[str, Any], padded: dict[str, Any], results: Any, extents: Mapping[str, int], narrow: bool
    ) -> None:
        """Compare with what the model gives without padding, once for each set of variables that are padded."""
        names = frozenset(extents)
        plain = self._unpadded.setdefault(names, program_of(self.graph, self.settings, self.placement))
        if plain is None:
            return

        def run(graph: Graph, values: dict[str, Any]) -> tuple[Any, ...]:
            program = plain if graph is self.graph else program_of(graph, self.settings, self.placement)
            return self._outputs(program, values, None, narrow)

        def call(padded: dict[str, Any]) -> tuple[Any, ...]:
            return buckets.cut(self.outputs, self._outputs(self._program, padded, None, narrow), extents)

        if buckets.prove(self.graph, run, call, values, padded, results, extents):
            self._unpadded[names] = None

    @cached_property
    def _on_devices(self) -> tuple[Weights, Known]:
        """Parameters on the device; scalars apart, to be baked in: an argument costs more.

        device_put, unlike jnp.asarray, shares the memory of a NumPy array on the CPU.
        """
        values = analysis.parameters(self.graph) | self._changes
        put = partial(_put, self.placement)
        scalars = {n: np.asarray(to_host(load(v))) for n, v in values.items() if np.size(v) == 1}
        types = {n: jax.ShapeDtypeStruct(np.shape(v), v.dtype) for n, v in values.items() if n not in scalars}
        return Weights(types, values.__getitem__, lambda n, v: put({n: v})[n]), Known(scalars, self.static)


def _put(placement: Placement | None, params: Mapping[str, Any]) -> dict[str, Any]:
    if placement is not None:
        return placement.put_params(params)
    return {n: v if is_traced(v) else jax.device_put(load(v)) for n, v in params.items()}
