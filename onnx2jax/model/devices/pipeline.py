"""Models in stages: a program for each, on devices of its own, through which the parts of a batch go.

Why several programs and not one: the stages of an ONNX graph are unlike in nodes, shapes and weights, while one
program for all devices (``shard_map`` with ``ppermute``) would want them alike, or each device to have room for the
largest. So each stage is compiled for its own devices, and what it makes is handed on by ``device_put``, which JAX
differentiates. Nobody waits: JAX computes on all devices at once as soon as their operands are there. While a stage
computes one micro-batch, the stage before it computes the next (the schedule of GPipe: all forward, then, in a
gradient, all backward).

Where stages are alike both can be measured: 32 products of 512 x 512 in four stages on four devices of a CPU of two
cores, 512 samples in 1, 4 and 8 micro-batches, take 49, 60 and 75 ms here, and by ``ppermute`` 195, 116 and 117.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ... import compat
from ...errors import InputShapeError, OperatorError, ShardingError
from ...ir.graph import Graph, Node
from ...ops.arrays import is_traced
from ...proto.types import ValueInfo
from ...runtime.compiled import Known
from ...runtime.evaluate import Settings
from ...runtime.optimize.executable import Weights
from ...runtime.program import Program
from ...runtime.values import to_host
from ...sharding.put import put
from ...sharding.rules import Placement
from ...sharding.stages import Staged, weights_read
from ..calls import buckets


def program_of(graph: Graph, settings: Settings, placement: Placement | None) -> Program | Pipeline:
    """What runs a graph: one program, or one for each stage."""
    if isinstance(placement, Staged):
        return Pipeline(graph, settings, placement)
    return Program(graph, settings)


class Pipeline:
    """The stages of a graph; it is called as a ``Program`` is.

    Attributes:
        segments: the stages in their order; one that reads what a later one makes has several.
    """

    is_one = False

    def __init__(self, graph: Graph, settings: Settings, placement: Staged) -> None:
        """
        Raises:
            ShardingError: nodes of the graph differentiate others, which they would have to hold together.
        """
        if graph.differentiates:
            raise ShardingError("nodes of the graph differentiate others: they have to be one program, without stages")
        self.graph, self.placement = graph, placement
        groups = placement.segments(graph)
        later = {v.name for v in graph.outputs}
        segments: list[Segment] = []
        for i, (stage, nodes) in reversed(list(enumerate(groups))):
            own = {n for node in nodes for n in node.outputs if n}
            loose = later - {n for _, ns in groups for node in ns for n in node.outputs} if i == len(groups) - 1 else ()
            part = _part(graph, nodes, [*sorted(own & later), *loose])
            segments.append(Segment(stage, part, settings, placement.parts[stage]))
            later |= {n for node in nodes for n in node.reads}
        self.segments = segments[::-1]
        self._proven = placement.microbatches == 1 or graph.draws

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(s.program.compilations for s in self.segments)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """As ``Program.rows``, with the devices of each stage as the reason for the cut."""
        rows = []
        for segment in self.segments:
            devices = ", ".join(str(d.id) for d in segment.placement.mesh.devices.flat)
            why = f"stage {segment.stage} on devices {devices}"
            rows += [(kind, n, f"{why}\n{more}".strip(), *rest) for kind, n, more, *rest in segment.program.rows()]
        return rows  # type: ignore[return-value]

    def outputs(
        self, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, rng: Any,
        given: Mapping[str, Any] | None = None, *, narrow: bool = False, on_host: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The outputs of the graph, on the devices of the last stage; arguments as of ``Program.outputs``.

        Raises:
            InputShapeError: the micro-batches do not divide the batch.
            ShardingError: the caller is inside a jit; or micro-batches give other numbers than the whole batch.
        """
        _refuse_jit((values, rng, given))
        count = self.placement.microbatches
        if not isinstance(params, Weights):  # at home first: there gradients of weights that stages share are added
            params = jax.device_put(dict(params), plain(self.placement.of_params(params)))
        every = [_Params(s, params, known, given, narrow) for s in self.segments]
        try:
            results = self._run(every, self._divided(values, count), rng)
        except OperatorError as e:
            if count > 1:
                e.add_note(f"in one of {count} micro-batches; if it takes the whole batch, leave out microbatches=")
            raise
        if not self._proven:
            self._prove(values, params, known, rng, results, narrow)
        return tuple(map(to_host, results)) if on_host else results

    def _run(self, params: Sequence[_Params], batches: Sequence[dict[str, Any]], rng: Any) -> tuple[Any, ...]:
        scopes = [dict(batch) for batch in batches]
        for step in range(len(scopes) + len(self.segments) - 1):
            for i, own in enumerate(params):
                if 0 <= step - i < len(scopes):
                    turn = step - i
                    key = rng if rng is None or len(scopes) == 1 else jax.random.fold_in(rng, turn)
                    scopes[turn].update(own.run(scopes[turn], key))
        last = self.placement.parts[-1]
        each = [[_put(last, v.name, scope[v.name]) for scope in scopes] for v in self.graph.outputs]
        if len(scopes) == 1:
            return tuple(values[0] for values in each)
        axes = batch_axes(self.graph.inputs)[1]
        return tuple(_joined(v, values, axes) for v, values in zip(self.graph.outputs, each, strict=True))

    def _divided(self, values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """The values of each micro-batch."""
        if count == 1:
            return [dict(values)]
        axes, _ = batch_axes(self.graph.inputs)
        axes = {n: a for n, a in axes.items() if n in values and np.ndim(values[n]) > a}
        extents = {n: values[n].shape[a] for n, a in axes.items()}
        if len(set(extents.values())) != 1 or any(n % count for n in extents.values()):
            raise InputShapeError(
                f"{count} micro-batches do not divide the batch evenly: {extents or 'no input declares one'}. Give a "
                f"multiple of {count}, or convert(..., microbatches=n) with one of its divisors"
            )
        size = next(iter(extents.values())) // count
        return [{n: _taken(v, axes.get(n), i * size, size) for n, v in values.items()} for i in range(count)]

    def _prove(
        self, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, rng: Any,
        results: Sequence[Any], narrow: bool,
    ) -> None:  # fmt: skip
        """Compare with the whole batch at once, in the first call: a file does not say whether samples mix."""
        values, params, rng, results = jax.tree.map(
            compat.primal, (dict(values), params if isinstance(params, Weights) else dict(params), rng, list(results)),
            is_leaf=lambda v: isinstance(v, Weights),
        )  # fmt: skip
        if is_traced(values, results):  # inside vmap: a later call shows it
            return
        whole = self._run([_Params(s, params, known, None, narrow) for s in self.segments], [dict(values)], rng)
        count = self.placement.microbatches
        for output, ours, want in zip(self.graph.outputs, results, whole, strict=True):
            if not buckets.alike(ours, want):
                raise ShardingError(
                    f"output {output.name!r} is another with {count} micro-batches than with the whole batch: "
                    f"{buckets.compared(ours, want)}. The model mixes the samples of a batch, or has it on another "
                    "axis than it declares: leave out microbatches="
                )
        self._proven = True


class Segment:
    """A part of a graph that runs as one program on the devices of its stage.

    Attributes:
        takes: the values that it reads from outside.
        keys: the weights that it reads.
    """

    def __init__(self, stage: int, graph: Graph, settings: Settings, placement: Placement) -> None:
        self.stage, self.graph, self.placement = stage, graph, placement
        self.program = Program(graph, replace(settings, place=placement.constrain))
        self.takes = [v.name for v in graph.inputs]
        self.keys = {k for node in graph.nodes for k in weights_read(graph, node)}
        self.keys |= {graph.key(v.name) for v in graph.outputs if v.name in graph.initializers}

    def weights(self, params: Weights) -> Weights:
        """Those of a model's parameters that it reads, on its own devices."""

        def place(name: str, value: Any) -> Any:
            return put(value, plain(self.placement.of_params({name: value}))[name])

        if self not in params.elsewhere:
            own = {n: t for n, t in params.types.items() if n in self.keys}
            params.elsewhere[self] = Weights(own, params.read, place)
        return params.elsewhere[self]


class _Params:
    """A segment with its parameters, for one call."""

    def __init__(
        self, segment: Segment, params: Mapping[str, Any], known: Known, given: Mapping[str, Any] | None, narrow: bool
    ) -> None:
        self.segment, self.known, self.narrow = segment, known, narrow
        self.given = {n: v for n, v in (given or {}).items() if n in segment.keys}
        if isinstance(params, Weights):
            self.params: Mapping[str, Any] = segment.weights(params)
        else:
            own = {n: params[n] for n in segment.keys if n in params}
            self.params = jax.device_put(own, plain(segment.placement.of_params(own)))

    def run(self, scope: Mapping[str, Any], rng: Any) -> dict[str, Any]:
        """What the segment makes of the values of one micro-batch, by name."""
        segment = self.segment
        taken = {n: scope[n] for n in segment.takes if n in scope}
        # What follows from shapes alone comes as NumPy's, and stays part of what is compiled.
        fixed = {n: v for n, v in self.known.inputs.items() if n in segment.takes}
        fixed |= {n: v.value for n, v in taken.items() if isinstance(v, _Fixed)}
        values = {n: _put(segment.placement, n, v) for n, v in taken.items() if n not in fixed}
        key = None if rng is None else _put(segment.placement, "", rng)
        known = Known(self.known.scalars, fixed)
        results = segment.program.outputs(values, self.params, known, key, self.given, narrow=self.narrow)
        one = segment.program.is_one
        names = [v.name for v in segment.graph.outputs]
        return {n: _Fixed(r) if one and type(r) is np.ndarray else r for n, r in zip(names, results, strict=True)}


class _Fixed:
    """A value that follows from shapes alone."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


def batch_axes(inputs: Sequence[ValueInfo]) -> tuple[dict[str, int], str | int | None]:
    """The axis of the batch of each input that has one, and how that extent is declared.

    It is the first axis of the first input that has axes, and wherever else its variable stands.
    """
    shapes = {v.name: v.shape for v in inputs if v.shape}
    firsts = [s[0] for s in shapes.values()]
    batch = next((d for d in firsts if isinstance(d, str)), next(iter(firsts), None))
    if isinstance(batch, str):
        return {n: s.index(batch) for n, s in shapes.items() if batch in s}, batch
    return {n: 0 for n, s in shapes.items() if s[0] == batch}, batch


def _part(graph: Graph, nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
    """Some of the nodes as a graph; what they read of the others is its inputs."""
    made = {n for node in nodes for n in node.outputs}
    reads = dict.fromkeys([*(n for node in nodes for n in node.reads), *outputs])
    known = {v.name: v for v in (*graph.value_info.values(), *graph.inputs, *graph.outputs)}
    declared = {v.name for v in graph.inputs}
    outside = [n for n in reads if n not in made and (n in declared or n not in graph.initializers)]
    return replace(
        graph,
        nodes=tuple(nodes),
        inputs=tuple(known.get(n, ValueInfo(n)) for n in outside),
        outputs=tuple(known.get(n, ValueInfo(n)) for n in outputs),
        initializers={n: v for n, v in graph.initializers.items() if n in reads},
    )


def _taken(value: Any, axis: int | None, start: int, size: int) -> Any:
    if axis is None:
        return value
    if isinstance(value, jax.Array):
        return jax.lax.slice_in_dim(value, start, start + size, axis=axis)
    return value[(slice(None),) * axis + (slice(start, start + size),)]


def _put(placement: Placement, name: str, value: Any) -> Any:
    """A value on the devices of a stage; tracers of a gradient too."""
    if isinstance(value, _Fixed):
        return value.value
    if isinstance(value, list):
        return [_put(placement, name, v) for v in value]
    if not hasattr(value, "dtype") or value.dtype == object:
        return value
    key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    lies = {name: placement.everywhere} if key else placement.of_inputs({name: value}, False)
    return jax.device_put({name: value}, plain(lies))[name]


def plain(shardings: Mapping[str, NamedSharding]) -> dict[str, jax.sharding.Sharding]:
    """Shardings of which those over one device name no mesh: arrays then have the types that they have without one."""
    return {n: SingleDeviceSharding(*s.device_set) if s.num_devices == 1 else s for n, s in shardings.items()}


def _joined(output: ValueInfo, values: Sequence[Any], batch: str | int | None) -> Any:
    axis = output.shape.index(batch) if output.shape and isinstance(batch, str) and batch in output.shape else 0
    if any(np.ndim(v) <= axis for v in values):
        raise ShardingError(
            f"output {output.name!r} has no axis along which micro-batches could be joined: leave out microbatches="
        )
    return jnp.concatenate([jnp.asarray(v) for v in values], axis)


def _refuse_jit(values: Any) -> None:
    if any(isinstance(v, jax.core.Tracer) and compat.in_a_program(v) for v in jax.tree.leaves(values)):
        raise ShardingError(
            "a model in stages is several programs, each on devices of its own, which no jax.jit can hold: call it "
            "outside of jit. jax.grad and jax.vjp take it as it is, and its stages are compiled"
        )
