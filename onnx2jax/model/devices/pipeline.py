"""Pipeline parallelism: a program for each stage, on its own devices; microbatches pass through them in turn.

The stages of an ONNX graph differ in nodes, shapes and weights. One program for all devices (``shard_map`` with
``ppermute``) would need identical stages, or memory for the largest on every device. So each stage is compiled for its
own devices, and ``device_put``, which JAX differentiates, transfers its outputs. JAX dispatches asynchronously: while a
stage computes one microbatch, the stage before it computes the next (GPipe's schedule: all forward, then, in a
gradient, all backward).

For identical stages both can be measured: 32 products of 512 x 512 in four stages on four devices of a two-core CPU,
512 samples in 1, 4 and 8 microbatches, take 49, 60 and 75 ms, and with ``ppermute`` 195, 116 and 117.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ... import compat
from ...errors import InputShapeError, OnnxError, OperatorError, ShardingError
from ...eval.interpreter import Settings
from ...eval.values import to_host
from ...ir import analysis
from ...ir.graph import Graph, Imported, Node
from ...ops.arrays import is_traced
from ...proto.types import ValueInfo
from ...runtime.compile import Outcome
from ...runtime.dispatch import CallContext, Constants
from ...runtime.params import DeviceParams
from ...runtime.partition import StagedProgram
from ...sharding.put import put
from ...sharding.rules import Placement
from ...sharding.stages import Staged, weights_read
from ..calls import buckets
from ..changes.parts import node_outputs, with_graph, with_outputs
from ..reports.summary import feeds_of, mark, traced
from ..spec import Spec


class Pipeline:
    """The pipeline stages of a graph, with the interface of ``StagedProgram``.

    Attributes:
        segments: in execution order; a stage that reads values of a later one has several.
    """

    is_one = False

    def __init__(self, graph: Graph, settings: Settings, placement: Staged) -> None:
        """
        Raises:
            ShardingError: nodes of the graph differentiate other nodes.
        """
        if graph.differentiates:
            raise ShardingError(
                "nodes of the graph differentiate other nodes, which needs one program: convert without stages="
            )
        self.graph: Graph = graph
        self.placement: Staged = placement
        wanted = {v.name for v in graph.outputs}
        passed = wanted - graph.producers.keys()  # inputs that are outputs: of the last segment
        segments: list[Segment] = []
        for stage, nodes in reversed(placement.segments(graph)):
            outputs = sorted(wanted & {n for node in nodes for n in node.outputs})
            part = _subgraph(graph, nodes, [*outputs, *passed])
            segments.append(Segment(stage, part, settings, placement.parts[stage]))
            wanted |= {n for node in nodes for n in node.reads}
            passed = set()
        self.segments: list[Segment] = segments[::-1]
        self._sources = {v.name: s.placement for s in self.segments for v in s.graph.outputs}
        """The devices from which a value comes, to which its gradient has to return."""
        self._verified = placement.microbatches == 1 or graph.draws

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(s.program.compilations for s in self.segments)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """As ``StagedProgram.rows``, with the devices of each stage as the reason."""
        rows: list[Any] = []
        for segment in self.segments:
            devices = ", ".join(str(d.id) for d in segment.placement.mesh.devices.flat)
            why = f"stage {segment.stage} on devices {devices}"
            rows += [(kind, n, f"{why}\n{more}".strip(), *rest) for kind, n, more, *rest in segment.program.rows()]
        return rows

    def __call__(self, values: Mapping[str, Any], context: CallContext) -> Outcome:
        """A call, as of a StagedProgram."""
        return Outcome(self.outputs(values, context))

    def outputs(self, values: Mapping[str, Any], context: CallContext) -> tuple[Any, ...]:
        """The outputs of the graph, on the devices of the last stage; arguments as of ``StagedProgram.outputs``.

        Raises:
            InputShapeError: the number of microbatches does not divide the batch.
            ShardingError: the caller is inside a jit, or microbatches change the results.
        """
        _check_outside_jit()
        count = self.placement.microbatches
        if not isinstance(params := context.params, DeviceParams):
            # To their home stage first: gradients of weights that stages share are summed there.
            params = jax.device_put(dict(params), plain(self.placement.of_params(params)))
            context = context._replace(params=params)
        runs = [s.bound(context) for s in self.segments]
        try:
            results = self._run(runs, self._microbatches(values, count), context.rng)
        except OperatorError as e:
            if count > 1:
                e.add_note(f"in one of {count} microbatches; if the node needs the whole batch, remove microbatches=")
            raise
        if not self._verified:
            self._verify(values, context, results)
        return tuple(map(to_host, results)) if context.as_numpy else results

    def _run(self, runs: Sequence[Callable[..., Any]], batches: Sequence[dict[str, Any]], rng: Any) -> tuple[Any, ...]:
        scopes = [dict(batch) for batch in batches]
        for step in range(len(scopes) + len(runs) - 1):
            for i, run in enumerate(runs):
                turn = step - i
                if 0 <= turn < len(scopes):
                    key = rng if rng is None or len(scopes) == 1 else jax.random.fold_in(rng, turn)
                    scopes[turn].update(run(scopes[turn], key, self._sources))
        last = self.placement.parts[-1]
        each = [[_put(last, v.name, scope[v.name], self._sources) for scope in scopes] for v in self.graph.outputs]
        if len(scopes) == 1:
            return tuple(values[0] for values in each)
        axes = batch_axes(self.graph.inputs)[1]
        return tuple(_concatenated(v, values, axes) for v, values in zip(self.graph.outputs, each, strict=True))

    def _microbatches(self, values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """The values of each microbatch."""
        if count == 1:
            return [dict(values)]
        axes, _ = batch_axes(self.graph.inputs)
        axes = {n: a for n, a in axes.items() if n in values and np.ndim(values[n]) > a}
        extents = {n: values[n].shape[a] for n, a in axes.items()}
        if len(set(extents.values())) != 1 or any(n % count for n in extents.values()):
            raise InputShapeError(
                f"{count} microbatches do not divide the batch evenly: {extents or 'no input declares a batch'}. "
                f"Pass a multiple of {count}, or convert(..., microbatches=n) with one of its divisors"
            )
        size = next(iter(extents.values())) // count
        return [{n: _sliced(v, axes.get(n), i * size, size) for n, v in values.items()} for i in range(count)]

    def _verify(self, values: Mapping[str, Any], context: CallContext, results: Sequence[Any]) -> None:
        """Compare with the whole batch, in the first call: no file declares whether samples mix."""
        params = context.params if isinstance(context.params, DeviceParams) else dict(context.params)
        values, params, rng, results = jax.tree.map(
            compat.primal,
            (dict(values), params, context.rng, list(results)),
            is_leaf=lambda v: isinstance(v, DeviceParams),
        )  # fmt: skip
        if is_traced(values, results):  # inside vmap: a later call verifies it
            return
        plainly = context._replace(params=params, passed=None)
        whole = self._run([s.bound(plainly) for s in self.segments], [dict(values)], rng)
        count = self.placement.microbatches
        for output, ours, want in zip(self.graph.outputs, results, whole, strict=True):
            if not buckets.is_close(ours, want):
                raise ShardingError(
                    f"output {output.name!r} differs between {count} microbatches and the whole batch: "
                    f"{buckets.difference(ours, want)}. The model mixes the samples of a batch, or declares the "
                    "batch on another axis: remove microbatches="
                )
        self._verified = True


class Segment:
    """A subgraph that runs as one program on the devices of its stage.

    Attributes:
        inputs: names of the inputs and of other segments' values that it reads.
        keys: names of the weights that it reads.
    """

    def __init__(self, stage: int, graph: Graph, settings: Settings, placement: Placement) -> None:
        self.stage, self.graph, self.placement = stage, graph, placement
        self.program = StagedProgram(graph, replace(settings, place=placement.constrain))
        self.inputs = [v.name for v in graph.inputs]
        self.keys = {k for node in graph.nodes for k in weights_read(graph, node)}
        self.keys |= {graph.key(v.name) for v in graph.outputs if v.name in graph.initializers}

    def weights(self, params: DeviceParams) -> DeviceParams:
        """The parameters that it reads, on its own devices."""

        def place(name: str, value: Any) -> Any:
            return put(value, plain(self.placement.of_params({name: value}))[name])

        if self not in params.by_stage:
            types = {n: t for n, t in params.types.items() if n in self.keys}
            params.by_stage[self] = DeviceParams(types, params.read, place)
        return params.by_stage[self]

    def bound(
        self, context: CallContext
    ) -> Callable[[Mapping[str, Any], Any, Mapping[str, Placement]], dict[str, Any]]:
        """The segment with its parameters: a function from values, key and sources to its outputs by name."""
        params, known = context.params, context.constants
        if isinstance(params, DeviceParams):
            weights: Mapping[str, Any] = self.weights(params)
        else:
            weights = {n: params[n] for n in self.keys if n in params}
            weights = jax.device_put(weights, plain(self.placement.of_params(weights)))
        passed = {n: v for n, v in (context.passed or {}).items() if n in self.keys}

        def run(scope: Mapping[str, Any], rng: Any, sources: Mapping[str, Placement]) -> dict[str, Any]:
            reads = {n: scope[n] for n in self.inputs if n in scope}
            # Values computed from shapes alone are NumPy constants, and are compiled in.
            fixed = {n: v for n, v in known.inputs.items() if n in self.inputs}
            fixed |= {n: v.value for n, v in reads.items() if isinstance(v, _ShapeConstant)}
            values = {n: _put(self.placement, n, v, sources) for n, v in reads.items() if n not in fixed}
            key = None if rng is None else _put(self.placement, "", rng, {})
            constants = Constants(known.params, fixed)
            results = self.program.outputs(values, CallContext(weights, constants, key, passed, context.x32))
            if self.program.is_one:
                results = tuple(_ShapeConstant(r) if type(r) is np.ndarray else r for r in results)
            return dict(zip((v.name for v in self.graph.outputs), results, strict=True))

        return run


class _ShapeConstant:
    """A NumPy constant computed from shapes alone."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


def batch_axes(inputs: Sequence[ValueInfo]) -> tuple[dict[str, int], str | int | None]:
    """The batch axis of each input that has one, and the batch's declared extent or dimension variable.

    The batch is the first dimension variable among the inputs' first axes, or else the first extent there.
    """
    shapes = {v.name: v.shape for v in inputs if v.shape}
    firsts = [s[0] for s in shapes.values()]
    batch = next((d for d in firsts if isinstance(d, str)), next(iter(firsts), None))
    if isinstance(batch, str):
        return {n: s.index(batch) for n, s in shapes.items() if batch in s}, batch
    return {n: 0 for n, s in shapes.items() if s[0] == batch}, batch


def _subgraph(graph: Graph, nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
    """The subgraph of some nodes; its inputs are the values that they read from the other nodes."""
    computed = {n for node in nodes for n in node.outputs}
    reads = dict.fromkeys([*(n for node in nodes for n in node.reads), *outputs])
    known = {v.name: v for v in (*graph.value_info.values(), *graph.inputs, *graph.outputs)}
    declared = {v.name for v in graph.inputs}
    outside = [n for n in reads if n not in computed and (n in declared or n not in graph.initializers)]
    return replace(
        graph,
        nodes=tuple(nodes),
        inputs=tuple(known.get(n, ValueInfo(n)) for n in outside),
        outputs=tuple(known.get(n, ValueInfo(n)) for n in outputs),
        initializers={n: v for n, v in graph.initializers.items() if n in reads},
    )


def _sliced(value: Any, axis: int | None, start: int, size: int) -> Any:
    if axis is None:
        return value
    if isinstance(value, jax.Array):
        return jax.lax.slice_in_dim(value, start, start + size, axis=axis)
    return value[(slice(None),) * axis + (slice(start, start + size),)]


def _put(placement: Placement, name: str, value: Any, sources: Mapping[str, Placement]) -> Any:
    """A value, or a tracer inside ``jax.grad``, put on the devices of a stage.

    JAX sees where a value is, and returns its gradient there, but not inside ``jax.vmap``: ``sources`` says it.
    """
    if isinstance(value, _ShapeConstant):
        return value.value
    if isinstance(value, list):
        return [_put(placement, name, v, sources) for v in value]
    if not hasattr(value, "dtype") or value.dtype == object:
        return value
    key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)

    def sharding(of: Placement) -> Any:
        return plain({name: of.replicated} if key else of.of_inputs({name: value}, False))[name]

    return jax.device_put(value, sharding(placement), src=sharding(sources[name]) if name in sources else None)


def plain(shardings: Mapping[str, NamedSharding]) -> dict[str, jax.sharding.Sharding]:
    """The shardings, with SingleDeviceSharding for one device, so that array types do not mention a mesh."""
    return {n: SingleDeviceSharding(*s.device_set) if s.num_devices == 1 else s for n, s in shardings.items()}


def _concatenated(output: ValueInfo, values: Sequence[Any], batch: str | int | None) -> Any:
    axis = output.shape.index(batch) if output.shape and isinstance(batch, str) and batch in output.shape else 0
    if any(np.ndim(v) <= axis for v in values):
        raise ShardingError(
            f"output {output.name!r} has no axis along which to concatenate microbatches: remove microbatches="
        )
    return jnp.concatenate([jnp.asarray(v) for v in values], axis)


def _check_outside_jit() -> None:
    if compat.in_a_program():
        raise ShardingError(
            "a model with pipeline stages is several programs on different devices, which one jax.jit (or scan, "
            "checkpoint, eval_shape, export) cannot hold: call it outside of jit, its stages are compiled. jax.grad, "
            "jax.vjp and jax.vmap work outside of jit, and onnx2jax.finetune trains it; or convert without stages="
        )


def costs(model_type: Any, imported: Imported) -> list[float]:
    """The cost of each node of the main graph: the mean of its share of FLOPs and its share of weight bytes.

    FLOPs are counted by tracing with free extents of 1; if that fails, only bytes are. The bytes of a weight are its
    first reader's.
    """
    sizes = {n: v.nbytes for n, v in analysis.parameters(imported.graph).items()}
    nodes = imported.graph.nodes
    weights = [sum(sizes.pop(n, 0) for n in weights_read(imported.graph, node)) for node in nodes]
    flops = _flops(model_type, imported)
    shares = [s for s in (weights, [flops[i] for i in range(len(nodes))]) if sum(s)] or [[1] * len(nodes)]
    return [sum(s[i] / sum(s) for s in shares) / len(shares) for i in range(len(nodes))]


def _flops(model_type: Any, imported: Imported) -> Counter[int]:
    """The FLOPs of nodes by position; none where tracing fails."""
    model = model_type(Spec.of(imported))
    marked = mark(model.graph)
    try:
        with np.errstate(all="ignore"):
            shown = with_outputs(with_graph(model, marked), node_outputs(marked))
            return traced(shown, None, feeds_of(model, {}, {}, abstract=True), marked.nodes)[1]
    except (OnnxError, TypeError):  # it needs the host, or other extents
        return Counter()
