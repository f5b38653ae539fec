"""What a user holds: a converted model, callable, with its parameters."""

from __future__ import annotations

import operator
import os
import re
import secrets
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import binding, calling, plan
from .errors import InputNameError, KnownValueError
from .graph import Imported
from .importer import build
from .ops import compat
from .ops.registry import Operator
from .proto.files import read_model
from .proto.types import ValueInfo
from .trace import Context, evaluate


def convert(
    source: Any,
    *,
    strict: bool = False,
    static: Mapping[str, Any] | None = None,
    dim_overrides: Mapping[str, int] | None = None,
    external_data_dir: str | os.PathLike[str] | None = None,
    follow_links: bool = False,
    allow_newer_opset: bool = False,
) -> Model:
    """Turn an ONNX model into a JAX function.

    Args:
        source: a path, the bytes of a file, an open binary file, or an ``onnx.ModelProto``.
        strict: refuse whatever breaks a rule of the format, also where common runtimes accept it.
        static: values for inputs, fixed now. Needed only for a jit of your own around a model whose shapes
            depend on the values of inputs; a plain call finds them by itself.
        dim_overrides: extents for dimension variables, fixed now: ``{"batch": 8}``.
        external_data_dir: where the weights lie, when not beside the model.
        follow_links: accept weights that symbolic links place outside that folder.
        allow_newer_opset: run operator sets newer than those known here as the newest known.

    Returns:
        A Model.

    Raises:
        ModelError: the file is no ONNX model or breaks a rule of the format.
        UnsupportedOperatorError: nothing serves some of its operators; the message lists all of them.
        FileNotFoundError: no such file.

    >>> import onnx2jax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> model.inputs[0].name
    'image'
    """
    message, files = read_model(source, external_data_dir=external_data_dir, follow_links=follow_links)
    imported = build(message, files, strict=strict, allow_newer_opset=allow_newer_opset)
    if imported.missing:
        raise binding.missing_error(imported.missing)
    return Model(imported, static=static or {}, dim_overrides=dim_overrides or {})


class Model:
    """An ONNX model as a JAX function. Made by ``convert``.

    Attributes:
        params: the weights by ONNX name, NumPy arrays that share memory with the file. Replace any of them to
            change what ``model(x)`` computes.
        inputs: the required inputs, in order; each has ``name`` and ``type`` (``dtype``, ``shape``).
        optional: inputs that have a default, by name; pass them by name to override it.
        outputs: the outputs, in order.
        opsets: version of each operator set that the model imports; ai.onnx is ``''``.
        metadata: what the file says about itself, as texts.
        graph: the frozen graph.
    """

    def __init__(
        self,
        imported: Imported,
        *,
        static: Mapping[str, Any] | None = None,
        dim_overrides: Mapping[str, int] | None = None,
    ) -> None:
        self.graph = imported.graph
        self.opsets = dict(imported.opsets)
        self.metadata = dict(imported.metadata)
        self.params: dict[str, Any] = dict(plan.parameters(self.graph))
        declared = calling.override_dims(self.graph.inputs, dim_overrides or {})
        self._static = _pinned(declared, static or {})
        defaults = self.graph.initializers
        self.inputs = tuple(v for v in declared if v.name not in defaults and v.name not in self._static)
        # Below IR 4 every weight is listed as an input; such an entry declares a constant (rule GR-06).
        own = imported.ir_version >= 4
        self.optional = {v.name: v for v in declared if own and v.name in defaults and v.name not in self._static}
        self.outputs = self.graph.outputs
        self._tuple = namedtuple("Outputs", [re.sub(r"\W", "_", v.name) for v in self.outputs], rename=True)  # type: ignore[misc]
        self._draws = any(
            isinstance(node.target, Operator) and "rng" in node.target.fixtures
            for graph in self.graph.walk()
            for node in graph.nodes
        )
        self._compiled = _named_jit(self._traced, self.graph.name)
        self._by_value: frozenset[str] = frozenset()
        host_types = [v.name for v in self.inputs if not calling.is_traceable(v.type)]
        self._host_reason = f"inputs {host_types} hold strings or maps" if host_types else ""
        self._held: tuple[Any, ...] = ()
        self._placed: dict[str, jax.Array] = {}
        self._scalars: dict[str, np.ndarray] = {}

    @property
    def jitted(self) -> bool:
        """Whether calls run as one ``jax.jit``. False once something in the model needed the host."""
        return not self._host_reason

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
        return self._packed(self._call(calling.bind(self.inputs, self.optional, args, named), rng))

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
        results = self._call(calling.bind(self.inputs, self.optional, (), feeds), rng)
        by_name = dict(zip(names, results, strict=True))
        return [calling.to_host(by_name[n]) for n in wanted]

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
        unknown = sorted(params.keys() - self.params.keys())
        if unknown:
            raise InputNameError(f"params has {unknown[:5]}, which are no parameters of the model (see model.params)")
        with compat.enable_x64():
            values = calling.bind(self.inputs, self.optional, args, named)
            self._place_params()
            own = {n: v for n, v in (self._placed | self._scalars).items() if n not in params}
            given = {n: calling.widened(jax.device_put(v), self.params[n].dtype) for n, v in params.items()}
            return self._packed(self._run(own | given, {}, values, rng))

    def _call(self, values: dict[str, Any], rng: Any) -> tuple[Any, ...]:
        if rng is None and self._draws:
            rng = jax.random.key(secrets.randbits(32))
        with compat.enable_x64():
            self._place_params()
            return self._run(self._placed, self._scalars, values, rng)

    def _run(
        self, params: Mapping[str, Any], scalars: Mapping[str, np.ndarray], values: Mapping[str, Any], rng: Any
    ) -> tuple[Any, ...]:
        """The outputs: through jit, or on the host when something in the model cannot be compiled."""
        traced = {n for n, v in values.items() if _has_tracer(v)}
        while not self._host_reason:
            known = {n: np.asarray(v) for n, v in values.items() if n in self._by_value - traced}
            rest = {n: v for n, v in values.items() if n not in known}
            try:
                return self._compiled(_Known(scalars, known), params, rest, rng)
            except (KnownValueError, _NotTraceable) as e:
                small = self._small_sources(e, values) - traced
                if small <= self._by_value:
                    if traced or _has_tracer(params):
                        raise
                    self._host_reason = str(e).splitlines()[0]
                self._by_value |= small
        values = values if traced else {n: calling.to_host(v) for n, v in values.items()}
        return self._evaluate({**params, **scalars}, values, rng)

    def _traced(self, known: _Known, params: dict[str, Any], values: dict[str, Any], rng: Any) -> tuple[Any, ...]:
        """What jit compiles."""
        outputs = self._evaluate({**params, **known.scalars}, {**values, **known.inputs}, rng)
        if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(outputs)):
            raise _NotTraceable("outputs hold strings or maps")
        return outputs

    def _evaluate(self, params: Mapping[str, Any], values: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
        with compat.enable_x64(), np.errstate(all="ignore"):
            outputs = evaluate(self.graph, {**self._static, **values}, Context(params, rng))
            return tuple(map(calling.to_device, outputs))

    def _small_sources(self, error: Exception, values: Mapping[str, Any]) -> set[str]:
        """Inputs from which the value that turned out to be needed comes, small enough for the compile key."""
        found = plan.sources(self.graph, error.values) if isinstance(error, KnownValueError) else set()
        return {n for n in found if n in values and plan.by_value(values[n])}

    def _place_params(self) -> None:
        """Parameters on the device, once for each change; scalars apart, to be baked in: an argument costs more.

        device_put, unlike jnp.asarray, shares the memory of a NumPy array on the CPU.
        """
        current = tuple(self.params.values())
        if len(current) == len(self._held) and all(map(operator.is_, current, self._held)):
            return
        self._scalars = {n: np.asarray(v) for n, v in self.params.items() if np.size(v) == 1}
        self._placed = {n: jax.device_put(v) for n, v in self.params.items() if n not in self._scalars}
        self._held = current

    def _packed(self, results: tuple[Any, ...]) -> Any:
        return results[0] if len(results) == 1 else self._tuple(*results)


class _NotTraceable(Exception):
    """The model has results that JAX cannot hold."""


class _Known:
    """Known arrays as part of the compile key: scalar parameters, and inputs taken by value."""

    def __init__(self, scalars: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> None:
        self.scalars, self.inputs = scalars, inputs
        self._key = tuple((n, a.dtype.str, a.shape, a.tobytes()) for n, a in (*scalars.items(), *inputs.items()))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self._key == other._key


def _named_jit(function: Callable[..., Any], name: str) -> Any:
    """A jit that profiles and jaxprs show under the graph's name."""

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = re.sub(r"\W", "_", name) or "onnx_model"
    return jax.jit(named, static_argnums=0)


def _has_tracer(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def _pinned(inputs: Sequence[ValueInfo], static: Mapping[str, Any]) -> dict[str, np.ndarray]:
    declared = {v.name: v for v in inputs}
    unknown = sorted(set(static) - set(declared))
    if unknown:
        raise InputNameError(f"static names {unknown}; the model's inputs are {sorted(declared)}")
    pinned = calling.bind([declared[n] for n in static], {}, tuple(static.values()), {})
    return {n: np.asarray(v) for n, v in pinned.items()}
