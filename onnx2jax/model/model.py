"""What a user holds: a converted model, callable, with its parameters."""

from __future__ import annotations

import copy
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import compat
from ..errors import InputNameError
from ..ir import analysis
from ..ir.graph import Imported, read_constants
from ..proto.external import load
from ..proto.origin import Origin
from ..proto.types import ValueInfo
from ..runtime.compiled import Known
from ..runtime.evaluate import Settings
from ..runtime.program import Program
from ..runtime.values import to_host
from ..sharding.rules import Placement
from . import arguments, buckets
from .max_size import check_counts
from .outputs import Declarations, field_names, packed


class Model:
    """An ONNX model as a JAX function. Made by ``convert``.

    Attributes:
        params: the weights by ONNX name, NumPy arrays. Replace any of them to change what ``model(x)`` computes.
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
        self.origin, self._changes = origin, dict(changes or {})
        self.placement = placement
        self.graph = imported.graph
        self.opsets = dict(imported.opsets)
        self.metadata = dict(imported.metadata)
        self._stored = analysis.parameters(self.graph)
        self._read: dict[str, Any] | None = None
        self._params: dict[str, Any] = {}
        read_constants(self.graph, self._stored)
        declared = arguments.override_dims(self.graph.inputs, dim_overrides or {})
        self.static = _pinned(declared, static or {})
        defaults = self.graph.initializers
        self.inputs = tuple(v for v in declared if v.name not in defaults and v.name not in self.static)
        # Below IR 4 every weight is listed as an input; such an entry declares a constant (rule GR-06).
        own = imported.ir_version >= 4
        self.optional = {v.name: v for v in declared if own and v.name in defaults and v.name not in self.static}
        self.outputs = self.graph.outputs
        self._fields = field_names(v.name for v in self.outputs)
        self._max_size = dict(max_size or {})
        self._bucket = buckets.checked_buckets(declared, bucket or {})
        self.settings = settings or Settings()
        self._program = Program(self.graph, self.settings)
        self._held: tuple[Any, ...] = ()
        self._placed: dict[str, jax.Array] = {}
        self._known = Known({}, self.static)
        self._declared = Declarations(self.graph.inputs, self.outputs)
        self._compared = 0

    @property
    def params(self) -> dict[str, Any]:
        """The weights by ONNX name. Those in files beside the model are read when this is first asked for.

        Raises:
            ExternalDataError: such a file was changed after the model was converted.
        """
        if self._read is None:
            self._params = {n: load(v) for n, v in self._stored.items()}
            self._read = dict(self._params)
        return self._params

    @params.setter
    def params(self, params: dict[str, Any]) -> None:
        arguments.check_names(params, self._stored)
        self._read, self._params = self._read or {}, params

    def changed(self) -> dict[str, Any]:
        """Weights that are no longer what the file says."""
        read = self._read or {}
        return self._changes | {n: v for n, v in self._params.items() if v is not read.get(n)}

    @property
    def jitted(self) -> bool:
        """Whether calls run as one ``jax.jit``. False once something in the model needed the host."""
        return self._program.is_one

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one for each stage and each set of shapes it met."""
        return self._program.compilations

    def __call__(self, *args: Any, rng: Any = None, **named: Any) -> Any:
        """Run the model, compiled for the shapes of this call.

        Args:
            *args: required inputs in order.
            rng: random key for models that draw random numbers; a fresh one when left out.
            **named: inputs by name.

        Returns:
            The output, or a named tuple when there are several. Arrays are JAX arrays with the dtypes that ONNX
            says, 64-bit ones included; strings and maps stay with NumPy and Python.

        Raises:
            InputError: the arguments do not fit ``model.inputs``.
        """
        return self._packed(self._call(arguments.bind(self.inputs, self.optional, args, named), rng))

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], *, rng: Any = None) -> list[Any]:
        """Run the model as onnxruntime's ``InferenceSession.run`` does: NumPy in, a list of NumPy out.

        Args:
            output_names: the outputs wanted, in the order wanted; None for all.
            feeds: inputs by name.
            rng: random key; a fresh one when left out.
        """
        names = [v.name for v in self.outputs]
        wanted = names if output_names is None else list(output_names)
        unknown = [n for n in wanted if n not in names]
        if unknown:
            raise InputNameError(f"there is no output {', '.join(map(repr, unknown))}; the model's outputs are {names}")
        results = self._call(arguments.bind(self.inputs, self.optional, (), feeds), rng)
        by_name = dict(zip(names, results, strict=True))
        return [to_host(by_name[n]) for n in wanted]

    def apply(self, params: Mapping[str, Any], *args: Any, rng: Any = None, **named: Any) -> Any:
        """The model as a pure function, for jit, grad, vmap, sharding and export of your own.

        Args:
            params: the weights: ``model.params``, or new values for some of them (the others are the model's own).
            *args, **named: inputs, as for a call.
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
        arguments.check_names(params, self._stored)
        with compat.enable_x64():
            rng = None if rng is None else arguments.as_key(rng)
            params = {n: arguments.as_param(n, v, self._stored[n]) for n, v in params.items()}
            values = arguments.bind(self.inputs, self.optional, args, named)
            self._place_params()
            own = self._placed | self._put(self._known.scalars)
            given = self._put(params)
            placed = values
            if self.placement is not None:
                placed, rng = self.placement.put_inputs(values), self.placement.put_whole(rng)
            results = self._program.outputs(placed, own | given, Known({}, self.static), rng, given)
            self._declared.compare(values | self.static, results)
            return self._packed(results)

    def with_params(self, params: Mapping[str, Any]) -> Model:
        """The model with new values for some of its parameters; what is compiled is shared with this one."""
        arguments.check_names(params, self._stored)
        new = copy.copy(self)
        new.params = self.params | dict(params)
        return new

    def explain(self) -> str:
        """How the model runs, as a table: its stages, why each is cut off, compilations and seconds so far."""
        rows = [("stage", "nodes", "why here", "compiled", "seconds"), *self._program.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _call(self, values: dict[str, Any], rng: Any) -> tuple[Any, ...]:
        if rng is not None:
            rng = arguments.as_key(rng)
        elif self.graph.draws:
            rng = jax.random.key(secrets.randbits(32))
        padded, extents = buckets.pad(self.inputs, values, self._bucket)
        with compat.enable_x64():
            self._place_params()
            if self.placement is not None:
                padded, rng = self.placement.put_inputs(padded), self.placement.put_whole(rng)
            results = self._program.outputs(padded, self._placed, self._known, rng)
            check_counts(results, self._max_size)
            results = buckets.cut(self.outputs, results, extents)
        compilations = self._program.compilations
        if compilations != self._compared and not self._max_size:  # else every shape has been met before
            self._compared = compilations
            self._declared.compare(values | self.static, results)
        return results

    def _place_params(self) -> None:
        """Parameters on the device, once for each change; scalars apart, to be baked in: an argument costs more.

        device_put, unlike jnp.asarray, shares the memory of a NumPy array on the CPU.
        """
        current = tuple(self.params.values())
        if len(current) == len(self._held) and all(map(operator.is_, current, self._held)):
            return
        arguments.check_names(self.params, self._stored)
        params = {n: arguments.as_param(n, v, self._stored[n]) for n, v in self.params.items()}
        scalars = {n: np.asarray(v) for n, v in params.items() if np.size(v) == 1}
        self._known = Known(scalars, self.static)
        with compat.outside():  # inside a jit or shard_map of the caller's own, it would make tracers
            self._placed = self._put({n: v for n, v in params.items() if n not in scalars})
        self._held = current

    def _put(self, params: Mapping[str, Any]) -> dict[str, Any]:
        if self.placement is not None:
            return self.placement.put_params(params)
        return {n: jax.device_put(v) for n, v in params.items()}

    def _packed(self, results: tuple[Any, ...]) -> Any:
        with compat.enable_x64():
            return packed(self._fields, results)


def _pinned(inputs: Sequence[ValueInfo], static: Mapping[str, Any]) -> dict[str, np.ndarray]:
    declared = {v.name: v for v in inputs}
    unknown = sorted(set(static) - set(declared))
    if unknown:
        raise InputNameError(f"static names {unknown}; the model's inputs are {sorted(declared)}")
    pinned = arguments.bind([declared[n] for n in static], {}, tuple(static.values()), {})
    return {n: np.asarray(v) for n, v in pinned.items()}
