"""Partitioning of a graph into compiled subprograms and host nodes, run as one staged program.

Nodes whose operands must be known run on the host, and the others are compiled around them. A graph starts as one
compiled program and is partitioned at the nodes that turn out to need the host.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ..errors import KnownValueError, OnnxError
from ..eval.interpreter import Context, Scope, Settings, evaluate
from ..eval.node_errors import check_special_values
from ..eval.values import is_jax, to_device, to_host, unaliased
from ..ir import analysis
from ..ir.graph import Graph, Node
from ..jaxpr.pipeline import HOST_PASS
from ..limits import HOST_TRIPS, MOST_FUSED, MOST_SHAPES
from ..ops.arrays import is_traced
from ..ops.registry import PADDED, resolve
from ..proto.types import ValueInfo
from .compile import Outcome, Subprogram, compile_ahead, row_from
from .cut import body_of, is_heavy, partitioned
from .dispatch import BoundCall, CallContext, is_wide, with_x64
from .host_plan import FEW_CALLS, Step, fused, host_steps, precomputed, typed_step
from .specialise import NeedsHost, is_small
from .string_codes import with_label_lookups, with_string_codes
from .untraceable import untraceable, untraceable_output


class StagedProgram:
    """A graph partitioned into compiled subprograms and host nodes.

    Attributes:
        partitioned: the graph as it is evaluated: host nodes, and nodes that stand for compiled partitions.
        reasons: nodes that run on the host, each with the reason.
    """

    graph: Graph
    settings: Settings
    inner: bool
    partitioned: Graph

    def __init__(self, graph: Graph, settings: Settings, *, inner: bool = False) -> None:
        """``inner``: the graph is a subgraph of a host node."""
        self._names = graph.defines
        graph = with_label_lookups(graph)
        self.graph = with_string_codes(graph) if any(map(is_heavy, graph.nodes)) else graph
        self.settings, self.inner = settings, inner
        self.reasons: dict[Node, str] = {}
        self._compiled: dict[Graph, Subprogram] = {}
        self._whole = partitioned(self.graph, ())
        self._inner: dict[Graph, StagedProgram] = {}
        """Subgraphs of host nodes."""
        self._loops: dict[Node, Subprogram] = {}
        """Host loops as compiled functions of many iterations."""
        self._impossible: set[Node] = set()
        """Loops that cannot be compiled."""
        self._host_steps: dict[Graph, dict[Node, Step] | None] = {}
        """The host nodes as steps, by partitioned graph."""
        self._partition()

    def __call__(self, values: Mapping[str, Any], context: CallContext) -> Outcome:
        """A call of the graph.

        Args:
            values: inputs and captured values by name; tracers when the caller transforms the model.
            context: parameters and the rest of the call.
        """
        values = {**values, **context.constants.inputs}
        if self.settings.is_traced or is_traced(list(values.values()), context.rng, context.passed):
            return Outcome(self._inside_transformation(values, context))
        while True:
            parts = self.partitioned  # another thread may partition the graph anew meanwhile
            try:
                outcome = self._evaluated(parts, values, context._replace(x32=False))
            except NeedsHost as cut:
                if {n for n in parts.nodes if body_of(n) is None}.issuperset(cut.nodes):  # and it did not help
                    raise cut.__cause__ or KnownValueError(cut.reason) from None
                self.reasons.update(dict.fromkeys(cut.nodes, cut.reason))
                self._partition()
                continue
            check_special_values(parts.outputs, outcome.outputs)
            return outcome

    def outputs(self, values: Mapping[str, Any], context: CallContext) -> tuple[Any, ...]:
        """The outputs of a call."""
        return self(values, context).outputs

    def host_call(self, values: Mapping[str, Any], context: CallContext) -> BoundCall | None:
        """A bound call that runs partitions and host nodes as steps; None if a node needs more than its operands.

        Args:
            values: those of a call that was made; what follows from their shapes is computed once.
            context: as for a call.
        """
        parts, params, constants = self.partitioned, context.params, context.constants
        if parts not in self._host_steps:
            self._host_steps = {parts: host_steps(parts, Context({}, None, self.settings))}
        bound = self._host_steps[parts]
        if bound is None:
            return None
        names, outputs = list(values), [v.name for v in parts.outputs]
        read = {n for node in parts.nodes for n in node.inputs}.union(outputs)
        known: dict[str, Any] = {"": None}
        for name, value in parts.initializers.items():
            if name in read:
                key = parts.key(name)
                known[name] = constants.params[key] if key in constants.params else to_host(params.get(key, value))
        known.update(constants.inputs)
        inside = context.without_inputs()
        same, left = precomputed(bound, known, values, _Host(self, values, inside, constants.inputs))
        steps, remaining = [step for _, step in left], FEW_CALLS if self.settings.optimize else 0

        def call(leaves: list[Any]) -> list[Any]:
            nonlocal steps, remaining
            values = dict(zip(names, leaves, strict=True))
            scope = same | values
            host = _Host(self, {**constants.inputs, **values}, inside, constants.inputs)
            try:
                with np.errstate(all="ignore"):
                    for step in steps:
                        step(scope, host)
                results = [scope[n] for n in outputs]
            except NeedsHost:  # the graph has to be partitioned anew
                results = list(self.outputs(values, context))
            else:
                if remaining:
                    remaining -= 1
                    if not remaining:
                        steps = self._bound_steps(left, scope, same, outputs, host, names)
            return results if context.as_numpy else list(map(to_device, results))

        return BoundCall(with_x64(call), names, "host")

    def _bound_steps(
        self,
        left: Sequence[tuple[Node, Step]],
        scope: Scope,
        same: Mapping[str, Any],
        outputs: list[str],
        host: _Host,
        inputs: Collection[str],
    ) -> list[Step]:
        """The steps of a signature: floating-point nodes fused, partitions bound to their programs."""
        if HOST_PASS not in self.settings.skip:
            left = fused(left, scope, same, outputs, self.settings, inputs)
        return [
            step if (body := body_of(node)) is None else host.bound_step(node, body, scope, step, inputs)
            for node, step in left
        ]

    @property
    def is_one(self) -> bool:
        """Whether the whole graph can be one compiled program; calls of a long one may run several."""
        return all(map(body_of, self.partitioned.nodes))

    @property
    def is_single(self) -> bool:
        """Whether calls run one compiled program, and nothing on the host."""
        return self._single(self.partitioned) is not None

    @property
    def compilations(self) -> int:
        """Programs compiled so far, subgraphs of nodes included."""
        return sum(compiled.compiles for compiled in self._everything())

    def stages(self) -> list[tuple[Graph | None, tuple[Node, ...]]]:
        """The partitions in order: the graph of one that is compiled, or None for host nodes, and its nodes."""
        stages = []
        for body, group in groupby(self.partitioned.nodes, body_of):
            stages.append((body, tuple(group) if body is None else body.nodes))
        return stages

    @property
    def specialised(self) -> set[str]:
        """Inputs whose values are part of the signature."""
        return set().union(*(compiled.specialisation.names for compiled in self._everything()))

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For each partition: where it runs, its nodes, why it ends there, compilations and their seconds."""
        rows = []
        for body, nodes in self.stages():
            inside = [c for n in nodes for c in self._inside(n)] if body is None else [self._subprogram(body)]
            by_value = sorted(set().union(*(c.specialisation.names for c in inside)))
            reasons = _alike([self.reasons[n] for n in nodes if n in self.reasons])
            fixed = f"by value: {', '.join(by_value)}" if body and by_value else ""
            rolled = [note for c in inside if c.layers is not None for note in c.layers.notes(c.graph)]
            shown = [inner for node in nodes for inner in _of_model(node)]
            kinds = ", ".join(dict.fromkeys(n.op_type for n in shown))
            rows.append(
                (
                    "jit" if body else "host",
                    f"{len(shown)} ({kinds if len(kinds) < 60 else kinds[:57] + '...'})",
                    "\n".join(filter(None, (*reasons, fixed, *rolled))),
                    str(sum(c.compiles for c in inside)),
                    f"{sum(c.seconds for c in inside):.2f}",
                )
            )
        return rows

    def _partition(self) -> None:
        if self.reasons or self.inner or len(self.graph.nodes) > MOST_FUSED:
            bounded = not self.settings.scan_layers  # which compiles layers once
            host = self.reasons.keys()
            self.partitioned = partitioned(self.graph, host, light_on_host=self.inner, bounded=bounded)
        else:
            self.partitioned = self._whole

    def _single(self, parts: Graph) -> Graph | None:
        """The compiled graph, if it is the only partition."""
        body = body_of(parts.nodes[0]) if len(parts.nodes) == 1 else None
        same = body is not None and [v.name for v in body.outputs] == [v.name for v in parts.outputs]
        return body if same else None

    def _subprogram(self, graph: Graph) -> Subprogram:
        """The compiled function of a partition."""
        if graph not in self._compiled:
            # A caller chooses shapes and counts among the inputs; a loop's counter is no choice.
            chosen = () if self.inner else [v.name for v in self.graph.inputs]
            graphs = [body for body, _ in self.stages() if body is not None]
            place = f"{graphs.index(graph) + 1} of {len(graphs)}" if graph in graphs and len(graphs) > 1 else ""
            self._compiled.setdefault(graph, Subprogram(graph, self.settings, chosen=chosen, place=place))
        return self._compiled[graph]

    def _everything(self) -> Iterator[Subprogram]:
        yield from (*self._compiled.values(), *self._loops.values())
        for program in self._inner.values():
            yield from program._everything()

    def _inside(self, node: Node) -> Iterator[Subprogram]:
        """The compiled functions inside a host node."""
        if node in self._loops:
            yield self._loops[node]
        for body in node.bodies:
            if body in self._inner:
                yield from self._inner[body]._everything()
            for inner in body.nodes:
                yield from self._inside(inner)

    def _evaluated(self, parts: Graph, values: Mapping[str, Any], context: CallContext) -> Outcome:
        if (body := self._single(parts)) is not None:
            outcome = self._subprogram(body)(values, context.constants.inputs.keys(), context)
            bound = outcome.bound
            if bound is not None and bound.path != "numpy" and any(is_wide(values[n]) for n in bound.names):
                bound = bound._replace(call=with_x64(bound.call))
            return Outcome(outcome.outputs, bound=bound)
        params = context.params
        every = {**params, **context.constants.params}
        host = _Host(self, values, context.without_inputs(), context.constants.inputs)
        results = evaluate(parts, values, Context(every, context.rng, self.settings, host=host))
        return Outcome(
            tuple(unaliased(results, (params[k] for k in map(parts.key, parts.initializers) if k in params)))
        )

    def _inside_transformation(self, values: Mapping[str, Any], context: CallContext) -> tuple[Any, ...]:
        """The outputs inside a caller's jit, grad or vmap, which only a single program can join."""
        try:
            results = self._evaluated(self._whole, values, context._replace(as_numpy=False)).outputs
        except NeedsHost as cut:
            raise untraceable(cut, self.graph, self._names, values, context.constants.inputs) from None
        for info, value in zip(self.graph.outputs, results, strict=True):
            if isinstance(value, np.ndarray) and not value.dtype.hasobject and not is_jax(value):
                # A caller may use strings while tracing; XLA of jaxlib 0.10 ends the process at these floats.
                raise untraceable_output(info.name, value.dtype)
        return results


def _of_model(node: Node) -> Sequence[Node]:
    """The node, or those of the graph that a node of this package, such as ``rebatch=``, evaluates."""
    return node.graphs[0].nodes if node.is_private and node.graphs else (node,)


def _alike(reasons: Sequence[str]) -> list[str]:
    """The reasons; of those that differ only in names, the first and their number.

    >>> _alike(["NonZero 'a' needs 'x'", "NonZero 'b' needs 'y'", "Loop 'c' needs 'z'"])
    ["NonZero 'a' needs 'x' (and 1 more alike)", "Loop 'c' needs 'z'"]
    """
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(re.sub(r"'[^']*'", "", reason), []).append(reason)
    return [first + (f" (and {len(more)} more alike)" if more else "") for first, *more in kinds.values()]


class _Host:
    """Runs host nodes in one evaluation of a program (see ``interpreter.Host``)."""

    def __init__(
        self, program: StagedProgram, values: Mapping[str, Any], context: CallContext, fixed: Iterable[str]
    ) -> None:
        """``fixed`` are the names of the inputs that the context of the call had, and ``context`` has not."""
        self._program, self._values, self._context = program, values, context
        self._fixed = set(fixed)
        """Names of values that follow from shapes alone and may be compile-time constants."""
        self._bound: dict[Graph, BoundCall] = {}
        """The bound calls of partitions, where one was all that ran."""

    def run_graph(self, graph: Graph, named: Mapping[str, Any], around: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
        programs = self._program._inner
        if graph not in programs:
            programs.setdefault(graph, StagedProgram(graph, self._program.settings, inner=True))
        values = {n: around[n] for n in graph.captures} | dict(named)
        return tuple(map(to_host, programs[graph].outputs(values, self._on_host(rng))))

    def run_partition(self, graph: Graph, scope: Scope, rng: Any = None) -> tuple[Any, ...]:
        program = self._program._subprogram(graph)
        if self._program.inner and program.compiles >= MOST_SHAPES:
            params = {**self._context.params, **self._context.constants.params}
            return evaluate(graph, {}, Context(params, rng, self._program.settings, host=self), scope)
        context = self._context._replace(rng=rng)
        if not context.x32 and (row := row_from(self._program.partitioned, graph)):
            read = {n: scope[n] for g in row for n in g.captures if n in scope} | self._overrides(row)
            compile_ahead(list(map(self._program._subprogram, row)), read, self._fixed, context)
        values = {n: scope[n] for n in graph.captures} | self._overrides([graph])
        outcome = program(values, self._fixed, context)
        self._fixed.update(outcome.fixed)
        if outcome.bound is not None:
            self._bound[graph] = outcome.bound
        return outcome.outputs

    def _on_host(self, rng: Any) -> CallContext:
        """The context of programs inside host nodes."""
        return self._context._replace(rng=rng, x32=False, as_numpy=True)

    def _overrides(self, graphs: Sequence[Graph]) -> dict[str, Any]:
        """The inputs that override initializers of these graphs."""
        return {n: self._values[n] for graph in graphs for n in graph.initializers if n in self._values}

    def bound_step(self, node: Node, graph: Graph, scope: Scope, plain: Step, inputs: Collection[str]) -> Step:
        """A step that calls a partition's program without its lookup, for arrays of the types in ``scope``."""
        captured, bound = {n: scope[n] for n in graph.captures}, self._bound.get(graph)
        if not self._context.as_numpy or bound is None or not captured.keys() >= set(bound.names):
            return plain
        if self._fixed & captured.keys() or not all(type(v) is np.ndarray for v in captured.values()):
            return plain
        return typed_step(bound.names, scope, bound.call, node.outputs, [plain], inputs)

    def run_trips(
        self,
        node: Node,
        around: Mapping[str, Any],
        rng: Any,
        trip: int,
        operator: str,
        operands: Sequence[Any],
        n_outputs: int,
        **attributes: Any,
    ) -> tuple[Any, ...] | None:
        loops, impossible = self._program._loops, self._program._impossible
        if node in impossible or (trip < HOST_TRIPS and not is_heavy(node)):
            return None
        captured = {n: around[n] for graph in node.graphs for n in graph.captures}
        arguments = {f"\0{k}": value for k, value in enumerate(operands)}  # no name of the model's
        if is_traced(operands, captured) or any(graph.differentiates for graph in node.graphs):
            return None
        if node not in loops:
            outputs = tuple(f"\0out{k}" for k in range(n_outputs))
            inside = replace(
                node,
                target=resolve(PADDED, operator, 1),
                inputs=tuple(arguments),
                outputs=outputs,
                attributes={**node.attributes, **attributes},
            )
            graph = Graph(node.name, "", (), tuple(map(ValueInfo, outputs)), {}, (inside,))
            loop = Subprogram(graph, self._program.settings)
            loop.specialisation.names = analysis.static_names(graph) & {n for n, v in captured.items() if is_small(v)}
            loops.setdefault(node, loop)
        loop = loops[node]
        if loop.compiles >= MOST_SHAPES:
            return None
        try:
            outcome = loop({**captured, **arguments}, (), self._on_host(rng))
        except (NeedsHost, OnnxError):
            impossible.add(node)  # as the state grows, say
            return None
        return tuple(map(to_host, outcome.outputs))
