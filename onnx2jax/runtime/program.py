"""Running a graph: as one compiled program where that is possible, otherwise in parts around what the host must do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ..errors import KnownValueError, OnnxError
from ..ir import analysis
from ..ir.graph import Graph, Node
from ..ops.arrays import is_traced
from ..ops.registry import PADDED, resolve
from ..proto.types import ValueInfo
from .compiled import Compiled, Cut, Direct, Known, in_64_bits, is_small
from .evaluate import Context, Scope, Settings, evaluate
from .partition import body_of, folded, is_heavy
from .steps import Step, decided, steps
from .thresholds import MOST_SHAPES, PATIENCE
from .values import is_jax, to_device, to_host


class Program:
    """A graph, folded around what the host must do, and what has been compiled of it.

    Attributes:
        folded: the graph as it is evaluated: nodes on the host, and nodes that stand for what is compiled.
        reasons: nodes that run on the host, each with the reason.
    """

    def __init__(self, graph: Graph, settings: Settings, *, inner: bool = False) -> None:
        """``inner`` graphs stand in nodes that run on the host."""
        self.graph, self.settings, self.inner = graph, settings, inner
        self.reasons: dict[Node, str] = {}
        self._compiled: dict[Graph, Compiled] = {}
        self._whole = folded(graph, ())
        self._inner: dict[Graph, Program] = {}
        """Graphs inside nodes on the host."""
        self._loops: dict[Node, Compiled] = {}
        """Loops on the host as compiled functions of many trips."""
        self._impossible: set[Node] = set()
        """Those that cannot be compiled."""
        self._steps: dict[Graph, dict[Node, Step] | None] = {}
        """The graph as it is folded, for calls that come again."""
        self._fold()

    def outputs(
        self,
        values: Mapping[str, Any],
        params: Mapping[str, Any],
        known: Known,
        rng: Any,
        given: Mapping[str, Any] | None = None,
        *,
        narrow: bool = False,
        on_host: bool = False,
    ) -> tuple[Any, ...]:
        """The outputs of the graph.

        Args:
            values: inputs and captured values by name; tracers when the caller transforms the model.
            params: parameters by Graph.key.
            known: parameters and inputs whose values are part of the compiled program.
            rng: random key or None.
            given: those of the parameters that may be tracers, because the caller gave them.
            narrow: the caller is in 32-bit mode.
            on_host: NumPy's arrays will do.
        """
        values = {**values, **known.inputs}
        if is_traced(list(values.values()), rng, given):
            return self._inside_transformation(values, params, known, rng, narrow)
        while True:
            parts = self.folded  # another thread may fold the graph anew meanwhile
            try:
                return self._evaluated(parts, values, params, known, rng, on_host=on_host)
            except Cut as cut:
                if {n for n in parts.nodes if body_of(n) is None}.issuperset(cut.nodes):  # and it did not help
                    raise cut.__cause__ or KnownValueError(cut.reason) from None
                self.reasons.update(dict.fromkeys(cut.nodes, cut.reason))
                self._fold()

    def direct(
        self, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, *, on_host: bool = False
    ) -> Direct | None:
        """What a call of ``outputs`` without a random key came to.

        None where it was more than a call of a program, or of operators on the host. It stands as long as ``folded``
        does. ``on_host``: the caller wants NumPy arrays.
        """
        parts = self.folded
        if (body := self._only(parts)) is None:
            return self._on_host(parts, values, params, known, on_host)
        values = {**values, **known.inputs}
        return self._part(body).direct(values, known.inputs.keys(), params, known, on_host=on_host)

    def _on_host(
        self, parts: Graph, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, on_host: bool
    ) -> Direct | None:
        """What a call came to that was evaluated on the host; None where parts of it may be compiled later."""
        if parts not in self._steps:
            self._steps = {parts: steps(parts, Context({}, None, self.settings))}
        bound = self._steps[parts]
        if bound is None:
            return None
        names, outputs = list(values), [v.name for v in parts.outputs]
        read = {n for node in parts.nodes for n in node.inputs}.union(outputs)
        constants: dict[str, Any] = {"": None}
        for name, value in parts.initializers.items():
            if name in read:
                key = parts.key(name)
                constants[name] = known.scalars[key] if key in known.scalars else to_host(params.get(key, value))
        constants.update(known.inputs)
        same, left = decided(bound, constants, values, _Host(self, values, params, known, on_host))

        def call(leaves: list[Any]) -> list[Any]:
            values = dict(zip(names, leaves, strict=True))
            scope, host = same | values, _Host(self, {**known.inputs, **values}, params, known, on_host)
            try:
                with np.errstate(all="ignore"):
                    for step in left:
                        step(scope, host)
                results = [scope[n] for n in outputs]
            except Cut:  # a part that is compiled has to be cut anew
                results = list(self.outputs(values, params, known, None, on_host=on_host))
            return results if on_host else list(map(to_device, results))

        return Direct(in_64_bits(call), names)

    @property
    def is_one(self) -> bool:
        """Whether all of it is compiled as one program."""
        return len(self.folded.nodes) <= 1 and all(map(body_of, self.folded.nodes))

    @property
    def compilations(self) -> int:
        """Programs compiled so far, those of graphs inside the nodes included."""
        return sum(compiled.compiles for compiled in self._everything())

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For each stage: where it runs, its nodes, why it is cut there, how often and how long it compiled."""
        rows = []
        for body, group in groupby(self.folded.nodes, body_of):
            nodes = tuple(group) if body is None else body.nodes
            inside = [c for n in nodes for c in self._inside(n)] if body is None else [self._part(body)]
            by_value = sorted(set().union(*(c.by_value for c in inside)))
            reasons = _alike([self.reasons[n] for n in nodes if n in self.reasons])
            fixed = f"by value: {', '.join(by_value)}" if body and by_value else ""
            kinds = ", ".join(dict.fromkeys(n.op_type for n in nodes))
            rows.append(
                (
                    "jit" if body else "host",
                    f"{len(nodes)} ({kinds if len(kinds) < 60 else kinds[:57] + '...'})",
                    "\n".join(filter(None, (*reasons, fixed))),
                    str(sum(c.compiles for c in inside)),
                    f"{sum(c.seconds for c in inside):.2f}",
                )
            )
        return rows

    def _fold(self) -> None:
        cut = self.reasons or self.inner
        self.folded = folded(self.graph, self.reasons.keys(), light_on_host=self.inner) if cut else self._whole

    def _only(self, parts: Graph) -> Graph | None:
        """The graph that is compiled, where that is all there is to it."""
        body = body_of(parts.nodes[0]) if len(parts.nodes) == 1 else None
        same = body is not None and [v.name for v in body.outputs] == [v.name for v in parts.outputs]
        return body if same else None

    def _part(self, graph: Graph) -> Compiled:
        """A part of the graph, compiled."""
        if graph not in self._compiled:
            # A caller chooses shapes and counts among the inputs; a loop's counter is no choice.
            chosen = () if self.inner else [v.name for v in self.graph.inputs]
            self._compiled.setdefault(graph, Compiled(graph, self.settings, chosen=chosen))
        return self._compiled[graph]

    def _everything(self) -> Iterator[Compiled]:
        yield from (*self._compiled.values(), *self._loops.values())
        for program in self._inner.values():
            yield from program._everything()

    def _inside(self, node: Node) -> Iterator[Compiled]:
        """What has been compiled for a node on the host."""
        if node in self._loops:
            yield self._loops[node]
        for body in node.bodies:
            if body in self._inner:
                yield from self._inner[body]._everything()
            for inner in body.nodes:
                yield from self._inside(inner)

    def _evaluated(
        self,
        parts: Graph,
        values: Mapping[str, Any],
        params: Mapping[str, Any],
        known: Known,
        rng: Any,
        narrow: bool = False,
        on_host: bool = False,
    ) -> tuple[Any, ...]:
        if (body := self._only(parts)) is not None:
            fixed = known.inputs.keys()
            return self._part(body)(values, fixed, params, known, rng, narrow=narrow, on_host=on_host)[0]
        host = _Host(self, values, params, known, on_host)
        return evaluate(parts, values, Context({**params, **known.scalars}, rng, self.settings, host=host))

    def _inside_transformation(
        self, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, rng: Any, narrow: bool
    ) -> tuple[Any, ...]:
        """A jit, grad or vmap of the caller's own: only one program can take part in it."""
        try:
            return self._evaluated(self._whole, values, params, known, rng, narrow)
        except Cut as cut:
            if isinstance(cut.__cause__, KnownValueError):
                found = analysis.sources(self.graph.nodes, cut.__cause__.values) & {v.name for v in self.graph.inputs}
                cut.__cause__.add_note(f"it is computed from: {', '.join(map(repr, sorted(found))) or 'no input'}")
                raise cut.__cause__ from None
            names = [v.name for v in self.graph.inputs if not is_jax(values.get(v.name))]
            cure = f", or fix {', '.join(names)}: convert(..., static={{{names[0]!r}: strings}})" if names else ""
            raise KnownValueError(
                f"{cut.reason}, which JAX cannot trace: call the model outside jit, grad and vmap{cure}"
            ) from None


def _alike(reasons: Sequence[str]) -> list[str]:
    """The reasons, those that differ in names only as the first of them and their number.

    >>> _alike(["NonZero 'a' needs 'x'", "NonZero 'b' needs 'y'", "Loop 'c' needs 'z'"])
    ["NonZero 'a' needs 'x' (and 1 more alike)", "Loop 'c' needs 'z'"]
    """
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(re.sub(r"'[^']*'", "", reason), []).append(reason)
    return [first + (f" (and {len(more)} more alike)" if more else "") for first, *more in kinds.values()]


class _Host:
    """What runs nodes by NumPy, in one evaluation of a program."""

    def __init__(
        self, program: Program, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, on_host: bool
    ) -> None:
        self._program, self._values, self._params, self._scalars = program, values, params, known.with_inputs({})
        self._on_host = on_host
        self._fixed = set(known.inputs)
        """Names of what follows from shapes alone: what is compiled may know it."""

    def inner(self, graph: Graph, named: Mapping[str, Any], around: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
        programs = self._program._inner
        if graph not in programs:
            programs.setdefault(graph, Program(graph, self._program.settings, inner=True))
        values = {n: around[n] for n in graph.captures} | dict(named)
        return tuple(map(to_host, programs[graph].outputs(values, self._params, self._scalars, rng, on_host=True)))

    def part(self, graph: Graph, scope: Scope, rng: Any = None) -> tuple[Any, ...]:
        program = self._program._part(graph)
        if self._program.inner and program.compiles >= MOST_SHAPES:
            params = {**self._params, **self._scalars.scalars}
            return evaluate(graph, {}, Context(params, rng, self._program.settings, host=self), scope)
        given = {n: scope[n] for n in graph.captures}
        given |= {n: self._values[n] for n in graph.initializers if n in self._values}
        results, fixed = program(given, self._fixed, self._params, self._scalars, rng, on_host=self._on_host)
        self._fixed |= fixed
        return results

    def trips(
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
        if node in impossible or (trip < PATIENCE and not is_heavy(node)):
            return None
        captured = {n: around[n] for graph in node.graphs for n in graph.captures}
        given = {f"\0{k}": value for k, value in enumerate(operands)}  # no name of the model's
        if is_traced(operands, captured) or any(graph.differentiates for graph in node.graphs):
            return None
        if node not in loops:
            outputs = tuple(f"\0out{k}" for k in range(n_outputs))
            inside = replace(
                node,
                target=resolve(PADDED, operator, 1),
                inputs=tuple(given),
                outputs=outputs,
                attributes={**node.attributes, **attributes},
            )
            graph = Graph(node.name, "", (), tuple(map(ValueInfo, outputs)), {}, (inside,))
            loop = Compiled(graph, self._program.settings)
            loop.by_value = analysis.needed(graph) & {n for n, v in captured.items() if is_small(v)}
            loops.setdefault(node, loop)
        loop = loops[node]
        if loop.compiles >= MOST_SHAPES:
            return None
        try:
            results, _ = loop({**captured, **given}, (), self._params, self._scalars, rng, on_host=True)
        except (Cut, OnnxError):
            impossible.add(node)  # as the state grows, say
            return None
        return tuple(map(to_host, results))
