"""What a user holds: a converted model, callable, with its parameters."""

from __future__ import annotations

import copy
import operator
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from . import binding, calling, plan
from .check import check_message
from .declared import Declarations
from .devices import placement
from .errors import InputNameError
from .fixed_size import check_counts, with_max_size
from .graph import Graph, Imported
from .importer import build
from .ops import compat
from .outputs import field_names, packed
from .program import Program
from .proto.external import load
from .proto.files import read_model
from .proto.operator_sets import read_operator_sets
from .proto.origin import Origin
from .proto.types import ValueInfo
from .proto.walk import tensors
from .rebatch import rebatched
from .sharding import Placement
from .unit import Known, Settings


def convert(
    source: Any,
    *,
    strict: bool = False,
    static: Mapping[str, Any] | None = None,
    dim_overrides: Mapping[str, int] | None = None,
    bucket: Mapping[str, Sequence[int]] | None = None,
    max_size: Mapping[str, int] | None = None,
    max_trips: int | None = None,
    rebatch: bool | Mapping[str, int] = False,
    warn_after: int = 16,
    external_data_dir: str | os.PathLike[str] | None = None,
    follow_links: bool = False,
    allow_newer_opset: bool = False,
    buffers: Mapping[str, Any] | None = None,
    operator_sets: Iterable[Any] = (),
    verify_checksums: bool = False,
    mesh: Mesh | None = None,
    shardings: Mapping[str, PartitionSpec] | None = None,
    device_configuration: str | None = None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None = None,
) -> Model:
    """Turn an ONNX model into a JAX function.

    Args:
        source: a path, the bytes of a file, an open binary file, or an ``onnx.ModelProto``.
        strict: refuse whatever breaks a rule of the format (see ``check``), also where common runtimes accept it.
        static: values for inputs, fixed now. Needed only for a jit of your own around a model whose shapes
            depend on the values of inputs; a plain call finds them by itself.
        dim_overrides: extents for dimension variables, fixed now: ``{"batch": 8}``.
        bucket: sizes to which a call pads a dimension variable with zeros, so that few shapes are compiled:
            ``{"seq": [64, 128]}``. Outputs that declare the variable are cut back. Sound only if the model masks
            what is padded (an attention mask among the inputs, say): that is for you to know.
        max_size: sizes, by node name, for nodes whose output shape depends on data (NonZero, NonMaxSuppression,
            Unique, Compress, and the scan outputs of a Loop whose trips depend on data): ``{"nms": 100}``. Their
            results are padded to it and the whole model is one jit, for transformations of your own. Each such node
            adds an output ``name/count``, how many entries are real; a plain call raises when they are more than
            the size, in a jit of your own compare them yourself.
        max_trips: trips after which a Loop is an error; without it an endless loop runs for ever.
        rebatch: repair the constants into which an exporter wrote its batch size, so that any other will do. True: the
            batch is the first axis of every input; otherwise its axis by input, ``{"x": 0, "state": 1}``, inputs left
            out being the same for all samples. ``Model.explain`` lists the nodes changed. Compiles the model twice, to
            show that several batches at once give what each gives alone.
        warn_after: compilations of one stage after which a RecompilationWarning says why and what to do.
        external_data_dir: where the weights lie, when not beside the model.
        follow_links: accept weights that symbolic links place outside that folder.
        allow_newer_opset: run operator sets newer than those known here as the newest known.
        buffers: bytes or arrays for weights that are in memory: those whose ``location`` begins with ``#``
            (``{"#w": array}``), and any other that you would rather give than have read.
        operator_sets: operator set documents (paths, bytes, binary files): an operator that one of them declares
            with a body runs without Python. Of several versions of one domain the newest not above the imported one
            counts. An operator is served by the first of: ONNX's own here, a function in the model, a function
            registered with ``onnx2jax.op``, a document.
        verify_checksums: compare external data with the checksums that the file gives; reads all of it.
        mesh: devices to run on, as ``jax.make_mesh`` makes them. Inputs lie with their first axis over the mesh's
            first where that divides it; weights are on every device, unless ``shardings`` says otherwise.
        shardings: patterns over the names of weights and inputs, each with a spec over the mesh's axes; the first that
            matches counts: ``{"*.weight": PartitionSpec(None, "model")}``.
        device_configuration: the name of one of the file's own device configurations, to be followed. Without it
            they are ignored; results are the same.
        devices: the devices of that configuration, by label or number or in order; those of JAX when left out.

    Returns:
        A Model.

    Raises:
        ModelError: the file is no ONNX model or breaks a rule of the format.
        UnsupportedOperatorError: nothing serves some of its operators; the message lists all of them.
        ShardingError: a rule does not fit an array or the mesh, or there is no such device configuration.
        RebatchError: ``rebatch`` cannot be done, or not be shown to be right.
        FileNotFoundError: no such file.

    >>> import onnx2jax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> model.inputs[0].name
    'image'
    """
    message, files = read_model(source, external_data_dir=external_data_dir, follow_links=follow_links, buffers=buffers)
    documents = read_operator_sets(operator_sets)
    if strict:
        check_message(message, files, allow_newer_opset=allow_newer_opset, documents=documents).raise_errors()
    if verify_checksums:
        for tensor, _ in tensors(message):
            files.verify(tensor)
    imported = build(message, files, strict=strict, allow_newer_opset=allow_newer_opset, documents=documents)
    if imported.missing:
        raise binding.missing_error(imported.missing)
    imported = with_max_size(imported, max_size or {})
    changes: tuple[str, ...] = ()
    if rebatch:
        imported, changes = rebatched(imported, rebatch, dim_overrides or {}, static or {})
    origin = Origin(message, files)
    placed = placement(imported, device_configuration, devices, mesh, shardings)
    settings = Settings(max_trips=max_trips, warn_after=warn_after, place=placed.constrain if placed else None)
    return Model(
        imported,
        settings,
        static=static or {},
        dim_overrides=dim_overrides or {},
        bucket=bucket or {},
        max_size=max_size or {},
        origin=origin,
        placement=placed,
        rebatched=changes,
    )


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
        rebatched: what ``convert(rebatch=...)`` changed, node by node.
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
        rebatched: tuple[str, ...] = (),
        changes: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.origin, self._changes = origin, dict(changes or {})
        self.placement = placement
        self.rebatched = rebatched
        self.graph = imported.graph
        self.opsets = dict(imported.opsets)
        self.metadata = dict(imported.metadata)
        self._stored = plan.parameters(self.graph)
        self._read: dict[str, Any] | None = None
        self._params: dict[str, Any] = {}
        read_constants(self.graph, self._stored)
        declared = calling.override_dims(self.graph.inputs, dim_overrides or {})
        self.static = _pinned(declared, static or {})
        defaults = self.graph.initializers
        self.inputs = tuple(v for v in declared if v.name not in defaults and v.name not in self.static)
        # Below IR 4 every weight is listed as an input; such an entry declares a constant (rule GR-06).
        own = imported.ir_version >= 4
        self.optional = {v.name: v for v in declared if own and v.name in defaults and v.name not in self.static}
        self.outputs = self.graph.outputs
        self._fields = field_names(v.name for v in self.outputs)
        self._max_size = dict(max_size or {})
        self._bucket = calling.checked_buckets(declared, bucket or {})
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
        calling.check_names(params, self._stored)
        self._read, self._params = self._read or {}, params

    def changed(self) -> dict[str, Any]:
        """Weights that are no longer what the file says."""
        read = self._read or {}
        return self._changes | {n: v for n, v in self._params.items() if v is not read.get(n)}

    @property
    def jitted(self) -> bool:
        """Whether calls run as one ``jax.jit``. False once something in the model needed the host."""
        return len(self._program.stages) <= 1 and not any(stage.host for stage in self._program.stages)

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
        calling.check_names(params, self._stored)
        with compat.enable_x64():
            rng = None if rng is None else calling.as_key(rng)
            params = {n: calling.as_param(n, v, self._stored[n]) for n, v in params.items()}
            values = calling.bind(self.inputs, self.optional, args, named)
            self._place_params()
            own = self._placed | self._put(self._known.scalars)
            given = self._put(params)
            placed = values
            if self.placement is not None:
                placed, rng = self.placement.put_inputs(values), self.placement.put_whole(rng)
            results = self._program.run(placed, own | given, Known({}, self.static), rng, given)
            self._declared.compare(values | self.static, results)
            return self._packed(results)

    def with_params(self, params: Mapping[str, Any]) -> Model:
        """The model with new values for some of its parameters; what is compiled is shared with this one."""
        calling.check_names(params, self._stored)
        new = copy.copy(self)
        new.params = self.params | dict(params)
        return new

    def explain(self) -> str:
        """How the model runs, as a table: its stages, why each is cut off, compilations and seconds so far.

        Below it, the nodes that ``convert(rebatch=...)`` changed.
        """
        rows = [("stage", "nodes", "why here", "compiled", "seconds"), *self._program.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *(f"for any batch size, {change}" for change in self.rebatched)])

    def _call(self, values: dict[str, Any], rng: Any) -> tuple[Any, ...]:
        if rng is not None:
            rng = calling.as_key(rng)
        elif self.graph.draws:
            rng = jax.random.key(secrets.randbits(32))
        padded, extents = calling.pad(self.inputs, values, self._bucket)
        with compat.enable_x64():
            self._place_params()
            if self.placement is not None:
                padded, rng = self.placement.put_inputs(padded), self.placement.put_whole(rng)
            results = self._program.run(padded, self._placed, self._known, rng)
            check_counts(results, self._max_size)
            results = calling.cut(self.outputs, results, extents)
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
        calling.check_names(self.params, self._stored)
        params = {n: calling.as_param(n, v, self._stored[n]) for n, v in self.params.items()}
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


def read_constants(graph: Graph, params: Collection[str] = ()) -> None:
    """Read the initializers that lie in files beside the model, in all its graphs, but those with a key in ``params``.

    Raises:
        ExternalDataError: such a file has become shorter since the model was imported.
    """
    for inner in graph.walk():
        constants = {n: load(v) for n, v in inner.initializers.items() if inner.key(n) not in params}
        cast(dict[str, np.ndarray], inner.initializers).update(constants)


def _pinned(inputs: Sequence[ValueInfo], static: Mapping[str, Any]) -> dict[str, np.ndarray]:
    declared = {v.name: v for v in inputs}
    unknown = sorted(set(static) - set(declared))
    if unknown:
        raise InputNameError(f"static names {unknown}; the model's inputs are {sorted(declared)}")
    pinned = calling.bind([declared[n] for n in static], {}, tuple(static.values()), {})
    return {n: np.asarray(v) for n, v in pinned.items()}
