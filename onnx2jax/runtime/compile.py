"""A graph as a compiled function: traced once for each signature, and specialised on the values it needs."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from .. import compat
from ..errors import KnownValueError
from ..eval.interpreter import ConstantOutput, Context, Settings, evaluate, with_constants
from ..eval.layers import Rolling
from ..eval.values import computed, is_jax, to_device, to_host, unaliased, without_arrays
from ..ir import analysis
from ..ir.fingerprint import fingerprint
from ..ir.graph import Graph, Node
from ..jaxpr.const_eval import Unfoldable
from ..jaxpr.pipeline import Passes
from ..limits import BY_VALUE, LARGEST_CONSTANT, MOST_VALUES
from ..ops.arrays import is_traced
from ..ops.registry import Operator
from ..proto.immutable import owned
from .dispatch import BoundCall, Callee, Constants, Signature, signature
from .executable import Executable
from .jitted import Jitted
from .mesh_mode import call_serially, in_auto_axes
from .output_sizes import refuse_outputs_beyond_memory
from .params import DeviceParams, device_of, is_cpu
from .program_cache import Store
from .sections import Sections


class RecompilationWarning(UserWarning):
    """A program is compiled again and again, because its inputs come in ever new shapes or values."""


class Subprogram:
    """A graph as a compiled function.

    Attributes:
        graph: a whole graph, or a partition that captures what the others compute.
        specialised: names of what it captures whose values are part of the signature.
        layers: the repeated layers of the graph, if they are evaluated as loops.
        executables: its optimised programs, shared by all parameters of the same types.
        compiles, seconds: how often it was compiled, or read from ``cache_dir``, and how long that took; callers'
            transformations are theirs.
    """

    def __init__(self, graph: Graph, settings: Settings, *, chosen: Collection[str] = ()) -> None:
        """``chosen`` are inputs whose values a caller chooses, unlike a loop's counter."""
        self.graph, self.settings = graph, settings
        self.specialised: set[str] = set()
        self.layers = Rolling.of(settings.scan_layers)
        self.executables: dict[Signature, Executable | Sections] = {}
        self.compiles, self.seconds = 0, 0.0
        self._chosen = frozenset(chosen)
        self._seen: dict[str, set[str]] = {}
        self._deciding: dict[Node, set[str]] = {}
        """Inputs specialised on because a control-flow node needs their value."""
        self._jitted = Jitted(self._jit)
        self._keys = dict.fromkeys(g.key(n) for g in graph.walk() for n in g.initializers)
        whole = graph.extracted_from or graph
        self._types = {v.name: v.type for v in whole.outputs}
        inputs = {v.name for v in whole.inputs}
        self._reads = tuple(sorted(graph.captures | (inputs & graph.initializers.keys())))

    def _jit(self, foreign: bool) -> Any:
        """The graph as a jitted function, which counts compilations unless they are the caller's."""

        def traced(*args: Any) -> list[Any]:
            results = self._trace(*args)
            if not foreign:
                refuse_outputs_beyond_memory(self.graph, results)
            self.compiles += not (foreign or jax.config.jax_disable_jit)  # type: ignore[attr-defined]
            return results

        trace = in_auto_axes(traced, batch=2)
        trace.__name__ = re.sub(r"\W", "_", self.graph.name) or "onnx_model"  # profiles and jaxprs show it
        return jax.jit(trace, static_argnums=0)

    def __call__(
        self,
        scope: Mapping[str, Any],
        fixed: Collection[str],
        params: Mapping[str, Any],
        constants: Constants,
        rng: Any,
        *,
        x32: bool = False,
        as_numpy: bool = False,
    ) -> tuple[tuple[Any, ...], set[str]]:
        """The graph's outputs, and the names of those that follow from shapes alone.

        Args:
            scope: values by name, of which it takes those that it reads; tracers when the caller transforms the model.
            fixed: the names of those that are known at compile time.
            params: parameters by Graph.key.
            constants: values compiled into the program.
            rng: random key or None.
            x32: a caller transforms the model in 32-bit mode.
            as_numpy: results as NumPy arrays where that is faster.
        """
        caller_traces = False
        while True:
            pinned, rest = self._divided(scope, fixed)
            own = constants.with_inputs(pinned, caller_traces)
            key, leaves = self._signed(rest, rng, params, own, x32, as_numpy)
            if key is not None and (bound := params.bound.get(key)) is not None:  # type: ignore[attr-defined]
                return self._unflattened(bound, bound.call(leaves))
            self._refuse_host_types(rest)
            if self._deciding and not is_traced(rest, self._own_params(params), rng):
                self._refuse_many_values(pinned)
            before, start = self.compiles, time.perf_counter()
            try:
                if key is not None and isinstance(params, DeviceParams):
                    bound = self._bind(key, own, params, rest, rng, leaves)
                    returned = self._unflattened(bound, bound.call(leaves))
                    params.bound[key] = bound
                else:
                    returned = self._unpacked(self._run(own, params, rest, rng, x32))
            except KnownValueError as e:
                if caller_traces or not is_traced([rest[n] for n in self._sources(e, rest)]):
                    self._learn(e, rest)
                else:
                    caller_traces = True
                continue
            if self.compiles > before:
                self._count(time.perf_counter() - start, rest, pinned)
            return returned

    def bound_call(
        self,
        scope: Mapping[str, Any],
        fixed: Collection[str],
        params: DeviceParams,
        constants: Constants,
        as_numpy: bool,
    ) -> BoundCall | None:
        """The bound call that a call without a random key used; None if it ran several optimised programs."""
        pinned, rest = self._divided(scope, fixed)
        if self.specialised & rest.keys() or self.specialised & pinned.keys() - set(fixed):
            return None  # the caller's signature does not hold these values
        key, _ = self._signed(rest, None, params, constants.with_inputs(pinned), False, as_numpy)
        bound = None if key is None else params.bound.get(key)
        return bound if bound is not None and bound.structure is None else None

    def _signed(
        self,
        values: Mapping[str, Any],
        rng: Any,
        params: Mapping[str, Any],
        constants: Constants,
        x32: bool,
        as_numpy: bool,
    ) -> tuple[Signature | None, list[Any]]:
        """The signature of a call and its arrays; None if no optimised program supports the call."""
        if x32 or not self.settings.optimize or not isinstance(params, DeviceParams):
            return None, []
        if params.device is None or compat.watches() or not compat.context_mesh().empty:
            return None, []
        inputs: Any = tuple(values)
        leaves = list(values.values())
        if rng is not None or any(isinstance(v, list) or v is None for v in leaves):
            leaves, inputs = jax.tree.flatten((dict(values), rng))
        own = self, constants
        if own not in params.callees:
            params.callees[own] = Callee(self.graph, self.settings, self._own_params(params.types), constants)
        return signature(params.callees[own], inputs, leaves, params.device, as_numpy), leaves

    def _bind(
        self,
        key: Signature,
        constants: Constants,
        params: DeviceParams,
        values: Mapping[str, Any],
        rng: Any,
        leaves: Any,
    ) -> BoundCall:
        """The optimised program for a signature, bound to parameter values."""
        shared, as_numpy = key.program, key.as_numpy and rng is None
        executable = self.executables.get(shared)
        if executable is None:
            executable = self._executable(constants, params, values, rng, leaves, as_numpy)
            self.executables[shared] = executable
        if isinstance(executable, Executable):
            try:
                executable.hoisted(params)
            except Unfoldable:  # scales beyond the range of float32
                executable = executable.unfolded()
        try:
            return executable.bind(params, leaves, tuple(values), as_numpy)
        except Exception:
            self.executables.pop(shared, None)  # it cannot be compiled, as inside an exporter that replaces functions
            raise

    def _executable(
        self,
        constants: Constants,
        params: DeviceParams,
        values: Mapping[str, Any],
        rng: Any,
        leaves: Any,
        as_numpy: bool,
    ) -> Executable | Sections:
        """The program for a signature: read from ``cache_dir`` if another process compiled it, or traced now."""
        args, jitted = (self._own_params(params.types), dict(values), rng), self._jitted(False)
        device = device_of((*leaves, *(params[k] for k in list(args[0])[:1])))
        options = Passes("" if device is None else compat.lowering_platform(device), self.settings.skip)
        if self.settings.scan_layers == "calls" and device is not None:
            sections = Sections.of(jitted.trace(constants, *args), sorted(args[0]), device, options)
            if sections is not None:
                return sections
        store = Store(self.settings.cache_dir) if self.settings.cache_dir and is_cpu(device) else None
        by_type = self._keys.keys() & params.types.keys()
        meaning = fingerprint(self.graph, by_type, self.settings) if store else None
        types = [(v.shape, v.dtype, getattr(v, "weak_type", False)) for v in leaves]
        structure = jax.tree.structure((dict(values), rng))
        entry = store.path(meaning, constants, structure, types, sorted(args[0].items())) if store and meaning else None
        if store is None or entry is None:
            return Executable(jitted, constants, *args, options=options)
        options = replace(options, portable=True)
        if kept := store.read(entry, as_numpy=as_numpy):
            self.compiles += 1
            return Executable(jitted, constants, *args, options=options, kept=kept)
        warned = len(self.settings.warned)
        executable = Executable(jitted, constants, *args, options=options)
        if len(self.settings.warned) == warned:  # another process would not repeat the warning
            try:
                new = executable.kept(params, leaves)
            except Unfoldable:  # the program without folding is right for these parameters and for any others
                executable = executable.unfolded()
                new = executable.kept(params, leaves)
            if new:
                store.write(entry, new)
        return executable

    def _unflattened(self, bound: BoundCall, results: list[Any]) -> tuple[tuple[Any, ...], set[str]]:
        """The outputs of a bound call, and the names of those that are constants."""
        if bound.structure is None:
            return tuple(results), set()
        return self._unpacked(jax.tree.unflatten(bound.structure, results))

    def _unpacked(self, results: list[Any]) -> tuple[tuple[Any, ...], set[str]]:
        names = (v.name for v in self.graph.outputs)
        constant = {n for n, r in zip(names, results, strict=True) if isinstance(r, ConstantOutput)}
        return with_constants(results), constant

    def _divided(
        self, scope: Mapping[str, Any], fixed: Collection[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Of the values that the graph reads, those that are part of the signature, and the others."""
        reads = {n: scope[n] for n in self._reads if n in scope}
        known = {n for n, v in reads.items() if n in fixed or (n in self.specialised and not is_traced(v))}
        if not known:
            return {}, reads
        return {n: np.asarray(to_host(reads[n])) for n in reads if n in known}, {
            n: v for n, v in reads.items() if n not in known
        }

    def _run(
        self, constants: Constants, params: Mapping[str, Any], values: dict[str, Any], rng: Any, x32: bool
    ) -> list[Any]:
        """A call of the program as it was traced: of a caller's transformation, a mesh, or without optimisation."""
        run, args = compat.call_in_64_bits if x32 else call_serially, (self._own_params(params), values, rng)
        results: list[Any] = run(self._jitted(is_traced(args)), constants, *args)
        return results

    def _own_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that the graph reads."""
        return {k: params[k] for k in self._keys if k in params}

    def _trace(self, key: Constants, params: dict[str, Any], values: dict[str, Any], rng: Any) -> list[Any]:
        """The graph's outputs, as jit traces them; known ones become constant outputs."""
        with compat.enable_x64():
            every, traces = {**params, **_copies(key.params)}, key.caller_traces
            context = Context(every, rng, self.settings, caller_traces=traces, layers=self.layers)
            results = []
            for declared, value in zip(
                self.graph.outputs, evaluate(self.graph, {**values, **_copies(key.inputs)}, context), strict=True
            ):
                value = computed(value, self._types.get(declared.name))
                result = ConstantOutput(_read_only(value)) if _is_constant(value) else to_device(value)
                if not isinstance(result, ConstantOutput) and not is_jax(result):
                    producers = [node for node in self.graph.nodes if declared.name in node.outputs]
                    raise NeedsHost(producers, f"{declared.name!r} holds {without_arrays(value)}")
                results.append(result)
        return unaliased(results, jax.tree.leaves((params, values)))

    def _count(self, seconds: float, values: Mapping[str, Any], pinned: Mapping[str, np.ndarray]) -> None:
        """Record the time and the shapes of a compilation; warn when there are too many."""
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
                "convert(..., dims={'name': n}), or pad it: convert(..., bucket={'name': [64, 128, 256]}); "
                "to hear of it later: convert(..., warn_after=n)",
                RecompilationWarning,
                stacklevel=2,
            )

    def _refuse_host_types(self, values: Mapping[str, Any]) -> None:
        """Move nodes that read strings, maps or floats of 6 bits to the host."""
        foreign = {n for n, v in values.items() if not is_jax(v)}
        if foreign:
            readers = [node for node in self.graph.nodes if foreign.intersection(node.reads)]
            kinds = {without_arrays(values[n]) for n in foreign}
            verb = "hold" if len(foreign) > 1 else "holds"
            reason = f"{', '.join(map(repr, sorted(foreign)))} {verb} {' and '.join(sorted(kinds))}"
            raise NeedsHost(readers, reason)

    def _refuse_many_values(self, pinned: Mapping[str, np.ndarray]) -> None:
        for node, names in self._deciding.items():
            for name in names & pinned.keys() & self._seen.keys():
                seen = self._seen[name]
                if len(seen) >= MOST_VALUES and str(pinned[name].tolist()) not in seen:
                    raise NeedsHost(
                        [node], f"{name!r}, which decides {node.op_type} {node.name!r}, comes in many values"
                    )

    def _learn(self, error: KnownValueError, values: Mapping[str, Any]) -> None:
        """Specialise on small inputs that a node needs, or partition the graph at the node."""
        node = error.node
        assert node is not None
        found = self._sources(error, values)
        small = {n for n in found if not is_traced(values[n]) and is_small(values[n])}
        # Each value costs a compilation: worth it for what a caller chooses, and before heavy work.
        chosen = small if isinstance(node.target, Operator) and node.target.heavy else small & self._chosen
        if chosen and (node.graphs or chosen == found):
            self.specialised |= chosen
            if node.graphs:
                self._deciding.setdefault(node, set()).update(chosen)
            return
        names = " or ".join(map(repr, error.values[:3]))
        raise NeedsHost([node], f"{node.op_type} {node.name!r} needs the value of {names}") from error

    def _sources(self, error: KnownValueError, values: Mapping[str, Any]) -> set[str]:
        """The inputs from which the needed values are computed."""
        return analysis.sources(self.graph.nodes, error.values) & values.keys()


class NeedsHost(Exception):
    """Some nodes have to run on the host."""

    def __init__(self, nodes: list[Node], reason: str) -> None:
        super().__init__(reason)
        self.nodes, self.reason = nodes, reason


def _copies(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies: JAX caches 64-bit constants by identity, and would reuse them in a caller's jit in 32-bit mode."""
    return {n: a.copy() for n, a in arrays.items()}


def is_small(value: Any) -> bool:
    """Whether a value is small enough to specialise on: a shape, axes, a count, scales."""
    return getattr(value, "ndim", 2) <= 1 and value.size <= BY_VALUE and value.dtype != object


def _is_constant(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size <= LARGEST_CONSTANT and not value.dtype.hasobject


def _read_only(value: np.ndarray) -> np.ndarray:
    """An array that a caller who receives it cannot write."""
    return owned(value)
