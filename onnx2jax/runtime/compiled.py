"""A graph as one compiled function, and what it learns about its inputs."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import compat
from ..errors import KnownValueError
from ..ir import analysis
from ..ir.fingerprint import fingerprint
from ..ir.graph import Graph, Node
from ..ops.arrays import is_traced
from ..ops.registry import Operator
from .evaluate import Beside, Context, Settings, evaluate, unpacked
from .jit import in_auto_mode, in_turn
from .optimize.executable import Executable, Weights, signature
from .optimize.on_numpy import Unfoldable
from .store import Store
from .thresholds import BY_VALUE, LARGEST_CONSTANT, MOST_VALUES
from .values import is_jax, to_device, to_host


class RecompilationWarning(UserWarning):
    """A program is compiled again and again, because its inputs come in ever new shapes or values."""


class Compiled:
    """A graph as a compiled function.

    Attributes:
        graph: a whole graph, or a part of one that captures what the others compute.
        by_value: what it captures that has to be known: it is part of the compile key.
        compiles, seconds: how often it was compiled, or found in ``cache_dir``, and how long that took.
    """

    def __init__(self, graph: Graph, settings: Settings, *, chosen: Collection[str] = ()) -> None:
        """``chosen`` are inputs whose values a caller chooses, unlike a loop's counter."""
        self.graph, self.settings = graph, settings
        self.by_value: set[str] = set()
        self.compiles, self.seconds = 0, 0.0
        self._chosen = frozenset(chosen)
        self._seen: dict[str, set[str]] = {}
        self._decide: dict[Node, set[str]] = {}
        """Inputs taken by value because a node with graphs inside depends on them."""
        trace = in_auto_mode(self._trace, batch=2)
        trace.__name__ = re.sub(r"\W", "_", graph.name) or "onnx_model"  # profiles and jaxprs show it
        self._jitted = jax.jit(trace, static_argnums=0)
        self._executables: dict[Any, Executable] = {}
        self._keys = dict.fromkeys(g.key(n) for g in graph.walk() for n in g.initializers)
        inputs = {v.name for v in (graph.whole or graph).inputs}
        self._reads = tuple(sorted(graph.captures | (inputs & graph.initializers.keys())))

    def __call__(
        self,
        scope: Mapping[str, Any],
        fixed: Collection[str],
        params: Mapping[str, Any],
        known: Known,
        rng: Any,
        *,
        narrow: bool = False,
        on_host: bool = False,
    ) -> tuple[tuple[Any, ...], set[str]]:
        """The graph's outputs, and the names of those that follow from shapes alone.

        Args:
            scope: values by name, of which it takes those that it reads; tracers when the caller transforms the model.
            fixed: the names of those that are known at compile time.
            params: parameters by Graph.key.
            known: parameters whose values are part of the compiled program.
            rng: random key or None.
            narrow: a caller transforms the model in 32-bit mode.
            on_host: NumPy's arrays will do.
        """
        optimizes = self.settings.optimize and not narrow and not compat.watches()  # which says where a NaN is from
        weights = params if isinstance(params, Weights) and optimizes else None
        kind = None if weights is None or rng is not None or not on_host else self._kind(scope, fixed)
        straight = None if weights is None or kind is None else weights.straight.get((self, kind))
        if straight is not None and compat.context_mesh().empty:
            return tuple(straight.call([scope[n] for n in straight.names])), set()
        caller_traces = False
        while True:
            pinned, rest = self._divided(scope, fixed)
            self._refuse_host_types(rest)
            if self._decide and not is_traced(rest, self._given(params), rng):
                self._refuse_many_values(pinned)
            before, start = self.compiles, time.perf_counter()
            try:
                results = self._run(
                    known.with_inputs(pinned, caller_traces), params, rest, rng, weights, narrow, on_host
                )
            except KnownValueError as e:
                if caller_traces or not is_traced([rest[n] for n in self._sources(e, rest)]):
                    self._learn(e, rest)
                else:
                    caller_traces = True
                continue
            if self.compiles > before:
                self._count(time.perf_counter() - start, rest, pinned)
            names = (v.name for v in self.graph.outputs)
            kept = {n for n, r in zip(names, results, strict=True) if isinstance(r, Beside)}
            if weights is not None and kind is not None:
                weights.straight[self, kind] = self.direct(scope, fixed, weights, known, on_host=True)
            return unpacked(results), kept

    def direct(
        self,
        scope: Mapping[str, Any],
        fixed: Collection[str],
        params: Mapping[str, Any],
        known: Known,
        *,
        on_host: bool,
    ) -> Direct | None:
        """What a call without a random key came to, where that was a call of an optimised program and nothing more.

        ``on_host``: the caller wants NumPy arrays.
        """
        if self.by_value or not isinstance(params, Weights) or not params.on_one_cpu or compat.watches():
            return None
        pinned, rest = self._divided(scope, fixed)
        leaves, structure = jax.tree.flatten((rest, None))
        executable = self._executables.get((known.with_inputs(pinned), structure, signature(leaves), params.folds))
        if executable is None or not executable.is_flat or len(leaves) != len(rest):
            return None
        main, handed, names = executable.main, executable.handed(params), sorted(rest)

        def call(leaves: list[Any]) -> list[Any]:
            before, start = self.compiles, time.perf_counter()
            results: list[Any] = main(handed, leaves)
            if self.compiles > before:  # in another context, or after jax.clear_caches
                self._count(time.perf_counter() - start, dict(zip(names, leaves, strict=True)), {})
            return results

        if on_host and all(isinstance(v, np.ndarray) for v in leaves):
            run = executable.on_host(params, leaves)
            return Direct(run if executable.is_small else in_64_bits(run), names)
        return Direct(in_64_bits(call), names)

    def _kind(self, scope: Mapping[str, Any], fixed: Collection[str]) -> tuple[Any, ...] | None:
        """What tells calls apart that take NumPy arrays, of which none is part of the compile key."""
        values = [scope.get(n) for n in self._reads]
        if any(n in fixed for n in self._reads) or any(type(v) is not np.ndarray for v in values):
            return None
        return tuple((v.dtype, v.shape) for v in values if v is not None)

    def _divided(
        self, scope: Mapping[str, Any], fixed: Collection[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Of the values that the graph reads, those that are part of the compile key, and the others."""
        reads = {n: scope[n] for n in self._reads if n in scope}
        known = {n for n, v in reads.items() if n in fixed or (n in self.by_value and not is_traced(v))}
        pinned = {n: np.asarray(to_host(reads[n])) for n in reads if n in known}
        return pinned, {n: v for n, v in reads.items() if n not in pinned}

    def _run(
        self, key: Known, params: Mapping[str, Any], values: dict[str, Any], rng: Any, weights: Weights | None,
        narrow: bool, on_host: bool,
    ) -> list[Any]:  # fmt: skip
        """A call of what is compiled: optimised where the weights lie on one CPU and nothing is traced."""
        if narrow:
            return compat.call_in_64_bits(self._jitted, key, self._given(params), values, rng)
        if weights is not None and weights.on_one_cpu and compat.context_mesh().empty:
            leaves, structure = jax.tree.flatten((values, rng))
            if (types := signature(leaves)) is not None:
                own = (key, structure, types, weights.folds)
                try:
                    if own not in self._executables:
                        self._executables[own] = self._executable(own, weights, leaves)
                    if on_host and rng is None:
                        return self._executables[own](weights, list(map(np.asarray, leaves)), on_host=True)
                    return self._executables[own](weights, leaves)
                except Unfoldable:
                    weights.folds = False
                    return self._run(key, params, values, rng, weights, narrow, on_host)
        return in_turn(self._jitted, key, self._given(params), values, rng)

    def _executable(self, own: Any, weights: Weights, leaves: list[Any]) -> Executable:
        """The program for a kind of calls: from ``cache_dir``, where another process left it, or traced now."""
        key, structure, types, folds = own
        args = (self._given(weights.types), *jax.tree.unflatten(structure, leaves))
        store = Store(self.settings.cache_dir) if self.settings.cache_dir else None
        meaning = fingerprint(self.graph, self._keys.keys() & weights.types.keys()) if store else None
        path = store.path(meaning, key, structure, types, folds, sorted(args[0].items())) if store and meaning else None
        if store is None or path is None:
            return Executable(self._jitted, key, *args, folds=folds)
        if kept := store.read(path):
            self.compiles += 1
            return Executable(self._jitted, key, *args, portable=True, folds=folds, kept=kept)
        warned = len(self.settings.warned)
        executable = Executable(self._jitted, key, *args, portable=True, folds=folds)
        if len(self.settings.warned) == warned and (new := executable.kept(weights, leaves)):  # else none would warn
            store.write(path, new)
        return executable

    def _given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that the graph reads."""
        return {k: params[k] for k in self._keys if k in params}

    def _trace(self, key: Known, params: dict[str, Any], values: dict[str, Any], rng: Any) -> list[Any]:
        """What jit compiles: the graph's outputs; those that are known pass beside it."""
        with compat.enable_x64():
            context = Context({**params, **_copies(key.scalars)}, rng, self.settings, caller_traces=key.caller_traces)
            results = []
            for declared, value in zip(
                self.graph.outputs, evaluate(self.graph, {**values, **_copies(key.inputs)}, context), strict=True
            ):
                results.append(Beside(_read_only(value)) if _is_constant(value) else to_device(value))
                if not is_jax(value):
                    makers = [node for node in self.graph.nodes if declared.name in node.outputs]
                    raise Cut(makers, f"{declared.name!r} holds strings or maps")
        self.compiles += 1
        return results

    def _count(self, seconds: float, values: Mapping[str, Any], pinned: Mapping[str, np.ndarray]) -> None:
        """Note how long a compilation took and what it was for; warn when there are too many."""
        self.seconds += seconds
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
            readers = [node for node in self.graph.nodes if foreign.intersection(node.reads)]
            raise Cut(readers, f"{', '.join(map(repr, sorted(foreign)))} hold strings or maps")

    def _refuse_many_values(self, pinned: Mapping[str, np.ndarray]) -> None:
        for node, names in self._decide.items():
            for name in names & pinned.keys() & self._seen.keys():
                seen = self._seen[name]
                if len(seen) >= MOST_VALUES and str(pinned[name].tolist()) not in seen:
                    raise Cut([node], f"{name!r}, which decides {node.op_type} {node.name!r}, comes in many values")

    def _learn(self, error: KnownValueError, values: Mapping[str, Any]) -> None:
        """After a value turned out to be needed: take small inputs by value, or cut the graph at the node."""
        node = error.node
        assert node is not None
        found = self._sources(error, values)
        small = {n for n in found if not is_traced(values[n]) and is_small(values[n])}
        # By value costs a compilation a value. It pays for what a caller chooses, and before heavy work.
        chosen = small if isinstance(node.target, Operator) and node.target.heavy else small & self._chosen
        if chosen and (node.graphs or chosen == found):
            self.by_value |= chosen
            if node.graphs:
                self._decide.setdefault(node, set()).update(chosen)
            return
        names = " or ".join(map(repr, error.values[:3]))
        raise Cut([node], f"{node.op_type} {node.name!r} needs the value of {names}") from error

    def _sources(self, error: KnownValueError, values: Mapping[str, Any]) -> set[str]:
        """Those of the values from which what must be known is computed."""
        return analysis.sources(self.graph.nodes, error.values) & values.keys()


class Direct(NamedTuple):
    """A compiled program with a model's weights, for inputs of one signature."""

    call: Callable[[list[Any]], list[Any]]
    """The results, as arrays of JAX's or NumPy's, from the inputs that it takes."""
    names: Sequence[str]
    """Those inputs, in order."""


def in_64_bits(call: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """The same in 64-bit mode."""

    def inside(leaves: list[Any]) -> list[Any]:
        with compat.enable_x64():
            return call(leaves)

    return inside


class Cut(Exception):
    """Nodes have to run on the host."""

    def __init__(self, nodes: list[Node], reason: str) -> None:
        super().__init__(reason)
        self.nodes, self.reason = nodes, reason


def _copies(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """JAX keeps 64-bit constants on the device by their identity, and gives them to a caller's jit in 32-bit mode."""
    return {n: a.copy() for n, a in arrays.items()}


class Known:
    """Known arrays as part of the compile key: scalar parameters, and inputs taken by value.

    ``caller_traces``: an operator would like to know a value and has to do without (see registry.StaticIfKnown).
    """

    def __init__(
        self,
        scalars: Mapping[str, np.ndarray],
        inputs: Mapping[str, np.ndarray] | None = None,
        caller_traces: bool = False,
    ) -> None:
        self.scalars, self.inputs, self.caller_traces = scalars, inputs or {}, caller_traces
        arrays = (*self.scalars.items(), *self.inputs.items())
        self._key = (caller_traces, *((n, a.dtype.str, a.shape, a.tobytes()) for n, a in arrays))
        self._hash = hash(self._key)

    def with_inputs(self, inputs: Mapping[str, np.ndarray], caller_traces: bool = False) -> Known:
        """The same scalars with other inputs."""
        same = inputs == {} == self.inputs and caller_traces == self.caller_traces
        return self if same else Known(self.scalars, inputs, caller_traces)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Known{self._key}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self._key == other._key


def is_small(value: Any) -> bool:
    """Whether a value is small enough to be part of the compile key: a shape, axes, a count, scales."""
    return getattr(value, "ndim", 2) <= 1 and value.size <= BY_VALUE and value.dtype != object


def _is_constant(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size <= LARGEST_CONSTANT and not value.dtype.hasobject


def _read_only(value: np.ndarray) -> np.ndarray:
    """Every call returns it: a caller who wrote into it would change what later ones return."""
    value = value.view()
    value.flags.writeable = False
    return value
