"""The Model: a converted file, callable, with its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import Mesh

from .. import compat
from ..errors import InputTypeError, RandomKeyError
from ..eval.settings import Settings
from ..eval.values import to_host
from ..ir.graph import Graph
from ..ir.patterns import check_lookups
from ..ops.arrays import is_traced
from ..proto.origin import Origin
from ..proto.types import ValueInfo
from ..sharding.processes import equal_arguments, one_seed
from .calls import arguments, buckets, misfits
from .calls.outputs import as_outputs, bundled, positions, unshared
from .files.exports import Exports
from .options import Options
from .parameters import attributes_of, register
from .spec import Spec
from .views import Views

if TYPE_CHECKING:
    from ..runtime.dispatch import Signature
    from ..sharding.rules import Placement
    from .runtime import Runtime


class Model(Views, Exports):
    """An ONNX model as a JAX function, created by ``convert``. Immutable: ``with_params`` returns another.

    A pytree: its leaves are the parameters under their ONNX names, all else is static. So JAX's transformations, and
    libraries such as optax and equinox, take the model itself; models that differ only in parameters share programs.
    Leaves are checked in calls.

    Attributes:
        inputs: the required inputs, in order; each has ``name`` and ``type`` (``dtype``, ``shape``).
        optional: inputs that have a default, by name; pass them by name to override it.
        outputs: the outputs, in order.
        opsets: version of each operator set that the model imports; ai.onnx is ``''``.
        metadata: the file's metadata, as strings.
        graph: the frozen graph, with ``rebatch`` that of a group of samples. Its initializers are memory maps where
            weights are external data: read ``params``.
        static: inputs fixed by ``convert(static=...)``, as read-only arrays.
        options: those of ``convert``, a frozen dataclass of its keywords; ``with_options`` changes them.
        settings: what evaluation and dispatch read of them.
        origin: the file, for ``onnx2jax.save``.
        placement: ``mesh``, a sharding for each of ``params``, and ``notes`` on the parts of a device configuration
            that could not be applied. None on one device.
    """

    graph: Graph
    inputs: tuple[ValueInfo, ...]
    optional: Mapping[str, ValueInfo]
    outputs: tuple[ValueInfo, ...]
    opsets: Mapping[str, int]
    metadata: Mapping[str, str]
    static: Mapping[str, Any]
    options: Options
    settings: Settings
    origin: Origin | None
    placement: Placement | None

    def __init__(self, spec: Spec, runtime: Runtime | None = None) -> None:
        if not isinstance(spec, Spec):
            raise TypeError(f"onnx2jax.convert makes a Model: onnx2jax.convert({spec!r:.60})")
        vars(self).update(spec=spec, **attributes_of(Model, spec))
        if runtime is not None:
            vars(self)["_runtime"] = runtime
        elif spec.placement is not None:
            _ = self._runtime  # which raises for stages that cannot be

    @property
    def jitted(self) -> bool:
        """Whether calls run as one ``jax.jit``; False once a node needed the host."""
        return self._runtime.program.is_one

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far: one for each partition and signature, none for your own jit or grad."""
        return self._runtime.program.compilations

    def __call__(self, /, *args: Any, rng: Any = None, **named: Any) -> Any:
        """Run the model, compiled for the shapes of this call.

        Args:
            *args: required inputs in order, or a dict of inputs by name.
            rng: random key, or a seed for one, for models that draw random numbers; a fresh one when left out. If the
                model has an input called ``rng``, anything but a typed key (``jax.random.key``) is that input.
            **named: inputs by name.

        On a mesh over several processes, pass the same NumPy arrays, or single-process JAX arrays, in all of them. Use
        ``placement.from_process`` for inputs of which each process has its own rows, ``placement.to_process`` for
        outputs.

        Returns:
            The output, or a named tuple of several: JAX arrays with the declared dtypes, 64-bit ones included; strings
            are NumPy arrays, maps dicts.

        Raises:
            InputError: the arguments do not match ``model.inputs``, or a leaf its parameter.
            RandomKeyError: the model draws random numbers inside your own transformation, and ``rng`` is left out.

        >>> import jax, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> slopes = jax.jit(jax.grad(lambda model, x: model(x).sum()))(model, np.zeros((1, 1, 8, 8), np.float32))
        >>> slopes.params["fc.bias"].shape
        (10,)
        """
        runtime = self._runtime
        signature, arrays = runtime.signature(args, named, False)
        if rng is None and (bound := runtime.params.bound.get(signature)) is not None:
            runtime.note("call", bound.path)
            return bundled(runtime.fields, runtime.call(bound, signature, arrays))
        if (feeds := arguments.as_feeds(self.inputs, args, named)) is not None:
            return self(**feeds) if rng is None else self(rng=rng, **feeds)

        runtime.note("call", "full")
        x32 = compat.in_32_bits()
        with compat.enable_x64():
            bind = partial(self._bind, args, named, rng)
            is_local = self.placement is None
            values, key = bind() if is_local else equal_arguments(self._mesh, "a call of the model", bind)
            return as_outputs(runtime.fields, self._call(values, key, x32, signature, arrays))

    def run(self, output_names: str | Sequence[str] | None, feeds: Mapping[str, Any], *, rng: Any = None) -> list[Any]:
        """Run the model as onnxruntime's ``InferenceSession.run`` does: NumPy in, a list of NumPy out.

        On a mesh over several processes, the outputs are gathered to each; a call leaves them sharded.

        Args:
            output_names: names of the outputs to return, in order, or one name; None for all.
            feeds: inputs by name.
            rng: random key; a fresh one when left out.
        """
        wanted: Sequence[int] = range(len(self.outputs))
        if output_names is not None:
            wanted = positions(output_names, [v.name for v in self.outputs], self.graph)
        runtime = self._runtime
        signature, values = runtime.signature((), feeds, True) if isinstance(feeds, dict) else (None, [])
        bound = runtime.params.bound.get(signature) if rng is None else None
        if bound is not None:
            runtime.note("run", bound.path)
            results: Sequence[Any] = runtime.call(bound, signature, values)
        else:
            runtime.note("run", "full")
            x32 = compat.in_32_bits()
            # Values that are at hand inside of a caller's jit are computed there as outside: the results are NumPy's.
            is_known = compat.in_a_program() and not (self.settings.is_traced or is_traced(feeds, runtime.unchecked))
            with compat.enable_x64(), compat.outside() if is_known else nullcontext():

                def bind() -> tuple[dict[str, Any], Any]:
                    bound = self._checked((), feeds)
                    return bound, None if rng is None else arguments.as_key(rng)

                inputs, key = equal_arguments(self._mesh, "a run of the model", bind)
                results = self._call(inputs, key, x32, signature, values, as_numpy=True)
        outputs = [to_host(results[i]) for i in wanted]
        owned = bound is not None and bound.path != "host"  # compiled programs return arrays that share no memory
        return outputs if owned else unshared(outputs, feeds.values())

    def compile(self, /, *args: Any, dims: Mapping[str, int] | None = None, **named: Any) -> Self:
        """Compile for input shapes, and hoist parameter-only subexpressions, ahead of the first call.

        The model runs once, on random numbers for inputs without values; with ``convert(..., bucket=...)`` a second
        time on shorter inputs, which verifies padding. With ``convert(..., cache_dir=folder)`` other processes load
        the program in place of compiling it.

        Args:
            *args, **named: inputs as for a call: arrays, or shapes as tuples or ``jax.ShapeDtypeStruct``; the others
                are as declared. Pass values for inputs that decide control flow or shapes, and in a dict one that is
                called ``dims``.
            dims: extents of dimension variables, 1 when left out.

        Returns:
            The model.

        Raises:
            InputError: they do not match the model.
            BucketError: padding changes an output.

        >>> import onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model()).compile(dims={"batch": 8})
        >>> model.compilations
        1
        """
        from .reports.summary import feeds_of

        values = arguments.by_name(self.inputs, self.optional, args, named, ["dims"])
        feeds = feeds_of(self, values, dims or {})
        self._runtime.wait(feeds)
        self.run(None, feeds)
        if shorter := buckets.shortened(self.inputs, feeds, self.spec.bucket):
            self.run(None, shorter)
        return self

    def apply(self, params: Mapping[str, Any], /, *args: Any, rng: Any = None, **named: Any) -> Any:
        """The model as a pure function, for your own jit, grad, vmap, sharding and export.

        Args:
            params: the weights: ``model.params``, or new values for some of them (the others are the model's own).
            *args, **named: inputs, as for a call. JAX's transformations accept no strings or maps as arguments: fix
                such inputs, ``convert(..., static={"text": strings})``.
            rng: random key; required when the model draws random numbers.

        Returns:
            As for a call.

        Raises:
            KnownValueError: a shape depends on the value of a traced input.
            InputError: the arguments do not match ``model.inputs``.

        >>> import jax, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> loss = lambda params, x: model.apply(params, x).sum()
        >>> gradients = jax.grad(loss)(model.params, np.zeros((1, 1, 8, 8), np.float32))
        """
        from ..runtime.dispatch import snapshot

        arguments.check_names(params, self.types)
        x32 = compat.in_32_bits()
        with compat.enable_x64():
            mesh = None if is_traced(list(params.values()), args, list(named.values())) else self._mesh
            values, rng = equal_arguments(mesh, "model.apply", partial(self._bind, args, named, rng))
            values = {n: snapshot(v) for n, v in values.items()}
            results = self._runtime.applied(values, {**self._runtime.unchecked, **params}, rng, x32)
            return as_outputs(self._runtime.fields, results)

    def with_options(self, **options: Any) -> Self:
        """The model under other options, with the same parameter values, trained ones too.

        Args:
            **options: keywords of ``convert``, in the same five groups, but those of ``read``; the others stay as they
                are. Those that rewrite the graph (``max_size``, ``weights``, ``dtype``) apply before ``cut``,
                ``replace``, ``simplified``.

        Raises:
            TypeError: an unknown keyword.
            UnsupportedError: an option has rewritten a graph that was changed since.

        >>> import jax, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> half = model.with_options(dtype="bfloat16", outputs="compute", dims={"batch": 2})
        >>> half(np.zeros((2, 1, 8, 8), np.float32)).dtype.name
        'bfloat16'
        """
        from .build import with_options

        spec = with_options(self.spec, options, type(self))
        new = self._replace(spec)
        if "weights" not in options and spec.placement is self.placement and spec.stored == self.types:
            new._runtime.share_params(self._runtime)
        return new

    def explain(self) -> str:
        """The partitions of the model as a table: where each runs and why, with compilations and seconds so far."""
        from .reports.table import table

        rows = table([("stage", "nodes", "why here", "compiled", "seconds"), *self._runtime.program.rows()])
        return rows if self.spec.groups is None else f"{rows}\n{self.spec.groups}"

    def explain_call(self, /, *args: Any, rng: Any = None, **named: Any) -> str:
        """Which path a call takes and why, as tables: numpy, inline, compiled, layers, host or full.

        Makes the call, and the same call through ``run``. With the environment variable ``ONNX2JAX_DEBUG=2`` every
        call prints its path.

        Args:
            *args, rng, **named: as for a call.

        Raises:
            InputError: the arguments do not match ``model.inputs``.

        >>> import numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> print(model.explain_call(np.zeros((1, 1, 8, 8), np.float32)).splitlines()[1].split()[:2])
        ['model(...)', 'compiled']
        """
        from .reports.calls import explain_call

        return explain_call(self, args, named, rng)

    def __repr__(self) -> str:
        from .reports.card import described

        return (
            described(self) if "graph" in vars(self) else f"Model of {len(self._flat[0])} parameters, without a graph"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a Model is immutable, so {name} cannot be set; for other parameters: model.with_params({{name: w}})"
        )

    def __copy__(self) -> Self:
        return self  # immutable

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        spec, params = self.spec, self.params  # programs and device arrays are not pickled
        if any(isinstance(v, jax.Array) for v in spec.changes.values()):
            spec = replace(spec, changes={n: params.get(n, v) for n, v in spec.changes.items()})
        return _restored, (spec, params)

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any], rng: Any) -> tuple[dict[str, Any], Any]:
        """A call's arguments by input name, and its random key."""
        if len(args) == 1 and isinstance(args[0], Model):  # optax calls masks and labels that are callable
            raise InputTypeError(
                "the argument is a Model, not arrays; a tree of masks or labels for optax is a Model too, and is given "
                "as a function: lambda _: labels"
            )
        if rng is not None and not arguments.is_key(rng) and "rng" in {*self.optional, *(v.name for v in self.inputs)}:
            named, rng = {**named, "rng": rng}, None
        return self._checked(args, named), None if rng is None else arguments.as_key(rng)

    def _checked(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by name, checked."""
        fix = partial(misfits.of_options, self.spec.called.inputs, self.spec.options.rebatch)
        return arguments.bind(self.inputs, self.optional, args, named, self.settings.dtype, fix)

    @property
    def _mesh(self) -> Mesh | None:
        """The mesh over whose processes a call compares its arguments; none in a caller's transformation."""
        return self.placement.mesh if self.placement and not self._runtime.unchecked else None

    def _call(
        self,
        values: dict[str, Any],
        rng: Any,
        x32: bool,
        signature: Signature | None,
        arrays: Sequence[Any],
        as_numpy: bool = False,
    ) -> tuple[Any, ...]:
        """The outputs for checked inputs, which were ``arrays`` with this signature; binds the next such call."""
        from ..runtime.dispatch import snapshot

        checked = values
        if not as_numpy:
            values = {n: snapshot(v) for n, v in values.items()}  # the call may outlast the caller's arrays
        if rng is None and self.graph.draws:
            rng = jax.random.key(one_seed(self._mesh))
            if is_traced(values, rng, list(self._runtime.unchecked.values())):
                raise RandomKeyError(
                    f"model {self.graph.name!r} draws random numbers, and inside jit, grad or vmap they would be "
                    "constants: pass a key, model(..., rng=jax.random.key(0))"
                )
        runtime, spec = self._runtime, self.spec
        if runtime.unchecked or spec.settings.is_traced:
            return runtime.applied(values, runtime.unchecked, rng, x32)
        if runtime.background is not None and (early := runtime.evaluated(signature, values, as_numpy)) is not None:
            return early
        padded, extents = buckets.pad(self.inputs, values, spec.bucket) if spec.bucket else (values, {})
        naming: AbstractContextManager[None] = nullcontext()
        if compat.checks_values():
            from .reports.special_values import naming_their_node

            naming = naming_their_node(self, padded, rng)  # where debug_nans or debug_infs refuses a value
        with buckets.blaming_padding(self.inputs, values, spec.bucket, extents) if extents else nullcontext(), naming:
            outcome = runtime.run(runtime.program, padded, rng, x32, as_numpy)
        if spec.max_size:
            from .changes.max_size import check_counts

            check_counts(outcome.outputs, spec.max_size)
        results = runtime.unpad(values, padded, outcome.outputs, extents) if extents else outcome.outputs
        if extents and not self.graph.draws and not is_traced(results):  # random numbers depend on the shape
            runtime.verify_padding(values, padded, results, extents, x32)
        structure, traced = runtime.structure, is_traced(values)
        is_new = structure.compared != (compilations := runtime.program.compilations)
        if (traced or is_new) and not spec.max_size:
            structure.declared.compare(values | dict(self.static), results)
        if is_new and not traced:
            check_lookups(self.graph, values)
            structure.compared = compilations
            if not spec.max_size:
                structure.growth.note(self.graph, self.inputs, values)
        if rng is None and not extents:  # not a call that pads
            runtime.bind(signature, arrays, checked, outcome.bound)
        return results


def _restored(spec: Spec, params: Mapping[str, Any]) -> Model:
    """An unpickled model."""
    model = Model(spec)
    vars(model)["_params"] = params
    return model


register(Model)
