"""A part of a graph as one compiled function, and what it learns about its inputs."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..errors import KnownValueError
from ..ir import analysis
from ..ir.graph import Graph, Node
from ..ops.arrays import is_traced
from ..ops.registry import Operator
from .evaluate import Beside, Context, run_nodes
from .jit import in_auto_mode, in_turn
from .partition import Stage
from .values import is_jax, to_device

MOST_VALUES: Final = 8
"""A Loop or If decided by an input that comes in more values than this runs on the host, where they cost nothing."""

_LARGE: Final = 4096
"""Known arrays with more elements than this are passed as arguments rather than by value."""


@dataclass(frozen=True)
class Settings:
    """What a user may set about running."""

    max_trips: int | None = None
    """Trips after which a Loop is an error; None lets a loop run for ever."""
    warn_after: int = 16
    """Compilations of one stage after which a RecompilationWarning names the input and the cure."""
    place: Callable[..., list[Any]] | None = None
    """Says on which devices the values at a node lie."""


class RecompilationWarning(UserWarning):
    """A stage is compiled again and again, because its inputs come in ever new shapes or values."""


class Unit:
    """A stage as a compiled function, and what it has learnt about its inputs."""

    def __init__(self, graph: Graph, stage: Stage, settings: Settings, *, by_choice: bool) -> None:
        self.graph, self.stage, self.settings = graph, stage, settings
        self.by_value: set[str] = set()
        self.compiles, self.seconds = 0, 0.0
        # A caller chooses shapes and counts among the inputs; a loop's counter is no choice.
        self._chosen = frozenset(v.name for v in graph.inputs) if by_choice else frozenset()
        self._seen: dict[str, set[str]] = {}
        self._decide: dict[Node, set[str]] = {}
        """Inputs taken by value because a node with graphs inside depends on them."""
        self._producers = {name: node for node in stage.nodes for name in node.outputs if name}
        self._compiled = _named_jit(in_auto_mode(self._trace, batch=2), graph.name)
        keys = [g.key(n) for g in _graphs(stage) for n in g.initializers]
        self._keys = dict.fromkeys([*keys, *(graph.key(n) for n in stage.reads if n in graph.initializers)])

    def run(
        self, scope: dict[str, Any], fixed: set[str], params: Mapping[str, Any], known: Known, rng: Any
    ) -> set[str]:
        """Put the stage's results into the scope; return the names of those that follow from shapes alone."""
        given = {k: params[k] for k in self._keys if k in params}
        while True:
            reads = {n: scope[n] for n in self.stage.reads if n in scope}
            pinned = {
                n: np.asarray(v) for n, v in reads.items() if n in fixed or (n in self.by_value and not is_traced(v))
            }
            rest = {n: v for n, v in reads.items() if n not in pinned}
            self._refuse_host_types(rest)
            if self._decide and not is_traced(rest, given, rng):
                self._refuse_many_values(pinned)
            key = known.with_inputs(pinned)
            before, start = self.compiles, time.perf_counter()
            try:
                results = in_turn(self._compiled, key, given, rest, rng)
            except KnownValueError as e:
                self._learn(e, rest)
                continue
            if self.compiles > before:
                self.seconds += time.perf_counter() - start
                self._count(rest, pinned)
            kept = {n for n, v in results.items() if isinstance(v, Beside)}
            scope.update((n, v.value if n in kept else v) for n, v in results.items())
            return kept

    def _trace(self, key: Known, params: dict[str, Any], values: dict[str, Any], rng: Any) -> dict[str, Any]:
        """What jit compiles: the stage's results; those that later stages can know at compile time pass beside it."""
        every = {**params, **key.scalars}
        local: dict[str, Any] = {n: every.get(self.graph.key(n), v) for n, v in self.graph.initializers.items()}
        local.update(values)
        local.update(key.inputs)
        with compat.enable_x64(), np.errstate(all="ignore"):
            context = Context(every, rng, max_trips=self.settings.max_trips, place=self.settings.place)
            run_nodes(self.stage.nodes, local, context.within(self.graph, self.stage.nodes))
            results: dict[str, Any] = {}
            for name in self.stage.writes:
                value = local[name]
                if name in self.stage.passes and _is_constant(value):
                    results[name] = Beside(value)
                    continue
                results[name] = to_device(value)
                if not is_jax(results[name]):
                    raise Cut([self._producers[name]], f"{name!r} holds strings or maps")
        self.compiles += 1
        return results

    def _count(self, values: Mapping[str, Any], pinned: Mapping[str, np.ndarray]) -> None:
        """Note what a compilation was for; warn when there are too many."""
        for name, value in (*values.items(), *pinned.items()):
            said = value.tolist() if name in pinned else jax.tree.map(np.shape, value)
            self._seen.setdefault(name, set()).add(str(said))
        if self.compiles == self.settings.warn_after + 1:
            name, shapes = max(self._seen.items(), key=lambda item: len(item[1]))
            what = "values" if name in pinned else "shapes"
            warnings.warn(
                f"{self.graph.name!r} was compiled {self.compiles} times ({self.seconds:.1f} s so far): {name!r} came "
                f"in {len(shapes)} {what}, such as {', '.join(sorted(shapes)[:3])}. Fix its free dimensions with "
                "convert(..., dim_overrides={'name': n}), or pad it: convert(..., bucket={'name': [64, 128, 256]}); "
                "to hear of it later: convert(..., warn_after=n)",
                RecompilationWarning,
                stacklevel=2,
            )

    def _refuse_host_types(self, values: Mapping[str, Any]) -> None:
        """Nodes that read strings or maps run on the host."""
        foreign = {n for n, v in values.items() if not is_jax(v)}
        if foreign:
            readers = [node for node in self.stage.nodes if foreign.intersection(node.reads)]
            raise Cut(readers, f"{', '.join(map(repr, sorted(foreign)))} hold strings or maps")

    def _refuse_many_values(self, pinned: Mapping[str, np.ndarray]) -> None:
        for node, names in self._decide.items():
            for name in names & pinned.keys() & self._seen.keys():
                seen = self._seen[name]
                if len(seen) >= MOST_VALUES and str(pinned[name].tolist()) not in seen:
                    raise Cut([node], f"{name!r}, which decides {node.op_type} {node.name!r}, comes in many values")

    def _learn(self, error: KnownValueError, values: Mapping[str, Any]) -> None:
        """After a value turned out to be needed: take small inputs by value, or cut the stage at the node."""
        node = error.node
        assert node is not None
        found = analysis.sources(self.stage.nodes, error.values) & values.keys()
        small = {n for n in found if not is_traced(values[n]) and analysis.by_value(values[n])}
        # By value costs a compilation a value. It pays for what a caller chooses, and before heavy work.
        chosen = small if isinstance(node.target, Operator) and node.target.heavy else small & self._chosen
        if chosen and (node.graphs or chosen == found):
            self.by_value |= chosen
            if node.graphs:
                self._decide.setdefault(node, set()).update(chosen)
            return
        names = " or ".join(map(repr, error.values[:3]))
        raise Cut([node], f"{node.op_type} {node.name!r} needs the value of {names}") from error


class Cut(Exception):
    """Nodes have to run on the host."""

    def __init__(self, nodes: list[Node], reason: str) -> None:
        super().__init__(reason)
        self.nodes, self.reason = nodes, reason


class Known:
    """Known arrays as part of the compile key: scalar parameters, and inputs taken by value."""

    def __init__(self, scalars: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray] | None = None) -> None:
        self.scalars, self.inputs = scalars, inputs or {}
        arrays = (*self.scalars.items(), *self.inputs.items())
        self._key = tuple((n, a.dtype.str, a.shape, a.tobytes()) for n, a in arrays)
        self._hash = hash(self._key)

    def with_inputs(self, inputs: Mapping[str, np.ndarray]) -> Known:
        """The same scalars with other inputs."""
        return self if inputs == {} == self.inputs else Known(self.scalars, inputs)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self._key == other._key


def _graphs(stage: Stage) -> list[Graph]:
    """The graphs and function bodies inside a stage's nodes."""
    return [g for node in stage.nodes for body in node.bodies for g in body.walk()]


def _is_constant(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size <= _LARGE and not value.dtype.hasobject


def _named_jit(function: Callable[..., Any], name: str) -> Any:
    """A jit that profiles and jaxprs show under the graph's name."""

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = re.sub(r"\W", "_", name) or "onnx_model"
    return jax.jit(named, static_argnums=0)
