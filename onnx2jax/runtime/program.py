"""Running a graph: as one compiled program where that is possible, otherwise in stages around what the host must do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import KnownValueError, OnnxError
from ..ir import analysis
from ..ir.graph import Graph, Node
from ..ops.arrays import is_traced
from ..ops.registry import PADDED, resolve
from ..proto.types import ValueInfo
from .compiled import Cut, Known, Settings, Unit
from .evaluate import Context, run_nodes
from .partition import Stage, arrange, is_heavy, whole
from .values import to_host

MOST_SHAPES: Final = 8
"""A stage inside a loop that meets more shapes than this runs on the host: its state grows with every trip."""

PATIENCE: Final = 64
"""Trips of a loop without heavy nodes that run on the host before the others are compiled."""


class Program:
    """A graph with its stages and what has been compiled of them."""

    def __init__(self, graph: Graph, settings: Settings, *, inner: bool = False) -> None:
        self.graph, self.settings = graph, settings
        self.inner = inner
        self.reasons: dict[Node, str] = {}
        """Nodes that run on the host, each with the reason."""
        self._whole = Unit(graph, whole(graph), settings, by_choice=not inner)
        self._units = {self._whole.stage: self._whole}
        self._programs: dict[Graph, Program] = {}
        self._loops: dict[Node, Unit] = {}
        """Loops on the host as compiled functions of many trips."""
        self._impossible: set[Node] = set()
        """Those that cannot be compiled."""
        self._arrange()

    def run(
        self,
        values: Mapping[str, Any],
        params: Mapping[str, Any],
        known: Known,
        rng: Any,
        given: Mapping[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """The outputs of the graph.

        Args:
            values: inputs and captured values by name; tracers when the caller transforms the model.
            params: parameters by Graph.key.
            known: parameters and inputs whose values are part of the compiled program.
            rng: random key or None.
            given: those of the parameters that may be tracers, because the caller gave them.
        """
        if is_traced(list(values.values()), rng, given):
            return self._inside_transformation(values, params, known, rng)
        while True:
            # Another thread may cut the graph anew meanwhile.
            stages = self.stages
            try:
                return self._in_stages(stages, values, params, known, rng)
            except Cut as cut:
                on_host = {node for stage in stages if stage.host for node in stage.nodes}
                if on_host.issuperset(cut.nodes):  # and it did not help
                    raise cut.__cause__ or KnownValueError(cut.reason) from None
                self.reasons.update(dict.fromkeys(cut.nodes, cut.reason))
                self._arrange()

    @property
    def compilations(self) -> int:
        """Programs compiled so far, those of graphs inside the nodes included."""
        return sum(unit.compiles for unit in self._all_units())

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For each stage: where it runs, its nodes, why it is cut there, how often and how long it compiled."""
        rows = []
        for stage in self.stages:
            unit = self._units.get(stage)
            inside = [u for n in stage.nodes for u in self._inside(n)] if stage.host else [unit] if unit else []
            reasons = "; ".join(dict.fromkeys(self.reasons[n] for n in stage.nodes if n in self.reasons))
            fixed = f"by value: {', '.join(sorted(unit.by_value))}" if unit and unit.by_value else ""
            kinds = ", ".join(dict.fromkeys(n.op_type for n in stage.nodes))
            rows.append(
                (
                    "host" if stage.host else "jit",
                    f"{len(stage.nodes)} ({kinds if len(kinds) < 60 else kinds[:57] + '...'})",
                    "; ".join(filter(None, (reasons, fixed))),
                    str(sum(u.compiles for u in inside)),
                    f"{sum(u.seconds for u in inside):.2f}",
                )
            )
        return rows

    def _all_units(self) -> Iterator[Unit]:
        yield from self._units.values()
        yield from self._loops.values()
        for program in self._programs.values():
            yield from program._all_units()

    def _inside(self, node: Node) -> Iterator[Unit]:
        """What has been compiled for a node on the host."""
        if unit := self._loops.get(node):
            yield unit
        for body in node.bodies:
            if body in self._programs:
                yield from self._programs[body]._all_units()
            for inner in body.nodes:
                yield from self._inside(inner)

    def _arrange(self) -> None:
        self.stages = arrange(self.graph, self.reasons.keys(), light_on_host=self.inner)

    def _inside_transformation(
        self, values: Mapping[str, Any], params: Mapping[str, Any], known: Known, rng: Any
    ) -> tuple[Any, ...]:
        """A jit, grad or vmap of the caller's own: only one program can take part in it."""
        scope = {**values, **known.inputs}
        try:
            self._whole.run(scope, set(known.inputs), params, known, rng)
        except Cut as cut:
            if isinstance(cut.__cause__, KnownValueError):
                found = analysis.sources(self.graph.nodes, cut.__cause__.values) & {v.name for v in self.graph.inputs}
                cut.__cause__.add_note(f"it is computed from: {', '.join(map(repr, sorted(found))) or 'no input'}")
                raise cut.__cause__ from None
            raise KnownValueError(
                f"{cut.reason}, which JAX cannot trace: call the model outside jit, grad and vmap"
            ) from None
        return self._outputs(scope, params, known)

    def _in_stages(
        self, stages: Sequence[Stage], values: Mapping[str, Any], params: Mapping[str, Any], known: Known, rng: Any
    ) -> tuple[Any, ...]:
        scope = {**values, **known.inputs}
        fixed = set(known.inputs)
        for stage in stages:
            if stage.host:
                self._on_host(stage, scope, params, known, rng)
                continue
            if stage not in self._units:
                self._units.setdefault(stage, Unit(self.graph, stage, self.settings, by_choice=not self.inner))
            unit = self._units[stage]
            if self.inner and unit.compiles >= MOST_SHAPES:
                self._on_host(stage, scope, params, known, rng)
            else:
                fixed |= unit.run(scope, fixed, params, known, rng)
        return self._outputs(scope, params, known)

    def _outputs(self, scope: Mapping[str, Any], params: Mapping[str, Any], known: Known) -> tuple[Any, ...]:
        return tuple(self._look_up(v.name, scope, params, known) for v in self.graph.outputs)

    def _look_up(self, name: str, scope: Mapping[str, Any], params: Mapping[str, Any], known: Known) -> Any:
        if name in scope:
            return scope[name]
        key = self.graph.key(name)
        return params[key] if key in params else known.scalars.get(key, self.graph.initializers[name])

    def _on_host(self, stage: Stage, scope: dict[str, Any], params: Mapping[str, Any], known: Known, rng: Any) -> None:
        # What only graphs inside the nodes read, weights mostly, may stay on the device.
        operands = {n for node in stage.nodes for n in node.inputs}
        local = {n: self._look_up(n, scope, params, known) for n in stage.reads}
        local.update((n, to_host(local[n])) for n in operands & local.keys())

        def inner(graph: Graph, named: Mapping[str, Any], around: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
            if graph not in self._programs:
                self._programs.setdefault(graph, Program(graph, self.settings, inner=True))
            values = {n: around[n] for n in graph.captures} | dict(named)
            results = self._programs[graph].run(values, params, Known(known.scalars), rng)
            return tuple(map(to_host, results))

        def compiled(node: Node, around: Mapping[str, Any], rng: Any, trip: int, *what: Any, **attributes: Any) -> Any:
            if node in self._impossible or (trip < PATIENCE and not is_heavy(node)):
                return None
            return self._many_trips(node, around, params, known, rng, *what, **attributes)

        with np.errstate(all="ignore"):
            every = {**params, **known.scalars}
            context = Context(every, rng, max_trips=self.settings.max_trips, on_host=inner, compiled=compiled)
            run_nodes(stage.nodes, local, context.within(self.graph, stage.nodes))
        scope.update((n, local[n]) for n in stage.writes)

    def _many_trips(
        self,
        node: Node,
        around: Mapping[str, Any],
        params: Mapping[str, Any],
        known: Known,
        rng: Any,
        operator: str,
        operands: Sequence[Any],
        n_outputs: int,
        **attributes: Any,
    ) -> tuple[Any, ...] | None:
        """An operator of the padded domain in the place of a node on the host, compiled; None where that fails."""
        captured = {n: around[n] for graph in node.graphs for n in graph.captures}
        given = {f"\0{k}": value for k, value in enumerate(operands)}  # no name of the model's
        if is_traced(operands, captured) or any(graph.differentiates for graph in node.graphs):
            return None
        if node not in self._loops:
            outputs = tuple(f"\0out{k}" for k in range(n_outputs))
            inside = replace(
                node,
                target=resolve(PADDED, operator, 1),
                inputs=tuple(given),
                outputs=outputs,
                attributes={**node.attributes, **attributes},
            )
            graph = Graph(node.name, "", (), tuple(map(ValueInfo, outputs)), {}, (inside,))
            unit = Unit(graph, whole(graph), self.settings, by_choice=False)
            unit.by_value = analysis.needed(graph) & {n for n, v in captured.items() if analysis.by_value(v)}
            self._loops.setdefault(node, unit)
        unit = self._loops[node]
        if unit.compiles >= MOST_SHAPES:
            return None
        scope = {**captured, **given}
        try:
            unit.run(scope, set(), params, Known(known.scalars), rng)
        except (Cut, OnnxError):
            self._impossible.add(node)  # as the state grows, say
            return None
        return tuple(to_host(scope[n]) for n in unit.stage.writes)
