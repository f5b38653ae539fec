"""A graph as a compiled function: traced once for each signature, and specialised on the values it needs.

Partitions in a row are traced one after another, and compiled side by side before the first of them runs: what one
hands to the next is known by its types once it is traced. XLA compiles without the interpreter lock, so the next one is
traced meanwhile.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat, progress
from ..compat import cores
from ..errors import KnownValueError, RecompilationWarning
from ..eval.interpreter import ConstantOutput, Context, Settings, evaluate, with_constants
from ..eval.layers import Rolling
from ..eval.node_errors import check_memory_of_outputs
from ..eval.values import computed, is_jax, to_device, unaliased, without_arrays
from ..ir.fingerprint import fingerprint
from ..ir.graph import Graph
from ..jaxpr.const_eval import Unfoldable
from ..jaxpr.pipeline import Passes
from ..limits import LARGEST_CONSTANT
from ..ops.arrays import is_traced
from ..proto.mapped import owned
from ..proto.types import HOST_ONLY
from .cut import body_of
from .dispatch import BoundCall, CallContext, Callee, Constants, DispatchCache, Signature, signature
from .executable import Executable, traced_for
from .jitted import Jitted, call_serially, in_auto_axes, persistent
from .params import DeviceParams, device_of, is_cpu
from .program_cache import Store
from .sections import Sections, sections_of
from .specialise import NeedsHost, Specialisation


class Outcome(NamedTuple):
    """What a call of a graph returned."""

    outputs: tuple[Any, ...]
    fixed: Collection[str] = frozenset()
    """The outputs that follow from shapes alone."""
    bound: BoundCall | None = None
    """The bound call that served it, if that is a call of one program with these inputs and nothing more."""


class Subprogram:
    """A graph as a compiled function.

    Attributes:
        graph: a whole graph, or a partition that captures what the others compute.
        specialisation: the inputs whose values are part of the signature.
        layers: the repeated layers of the graph, if they are evaluated as loops.
        executables: its optimised programs, shared by all parameters of the same types.
        compiles, seconds: how often it was compiled, or read from ``cache_dir``, and how long that took; callers'
            transformations are theirs.
    """

    def __init__(self, graph: Graph, settings: Settings, *, chosen: Collection[str] = (), place: str = "") -> None:
        """``chosen`` are inputs whose values a caller chooses, unlike a loop's counter; ``place`` is "2 of 3"."""
        self.graph, self.settings = graph, settings
        self._compiling = f"compiling {graph.name!r}{f', program {place}' if place else ''}"
        self.specialisation = Specialisation(graph, frozenset(chosen))
        self.layers = Rolling(settings.scan_layers) if settings.scan_layers else None
        self.executables: DispatchCache[Executable | Sections] = DispatchCache()
        self.compiles, self.seconds = 0, 0.0
        self._jitted = Jitted(self._jit)
        self._store = Store.of(settings.cache_dir)
        self._keys = dict.fromkeys(g.key(n) for g in graph.walk() for n in g.initializers)
        whole = graph.complete
        self._types = {v.name: v.type for v in whole.outputs}
        inputs = {v.name for v in whole.inputs}
        self._reads = tuple(sorted(graph.captures | (inputs & graph.initializers.keys())))

    def _jit(self, foreign: bool) -> Any:
        """The graph as a jitted function, for calls that no Executable runs."""
        jitted = jax.jit(in_auto_axes(self._function(foreign), batch=2), static_argnums=0)
        return jitted if foreign else persistent(jitted, self._store, static=1)

    def _function(self, foreign: bool) -> Callable[..., list[Any]]:
        """The graph as a function to jit, which counts compilations unless they are the caller's.

        Its outputs that are known become constant outputs.
        """

        def trace(key: Constants, params: dict[str, Any], values: dict[str, Any], rng: Any) -> list[Any]:
            platform = self.settings.platform or compat.platform()
            with compat.enable_x64(), compat.on_platform(platform, compat.keeps_convolutions()):
                # JAX caches 64-bit constants by identity, and would reuse these in a caller's jit in 32-bit mode.
                scalars, known = ({n: a.copy() for n, a in arrays.items()} for arrays in (key.params, key.inputs))
                every, traces = params | scalars, key.caller_traces
                context = Context(every, rng, self.settings, caller_traces=traces, layers=self.layers)
                outputs = zip(self.graph.outputs, evaluate(self.graph, values | known, context), strict=True)
                results = [
                    v if isinstance(v, jax.Array) and v.dtype not in HOST_ONLY else self._converted(declared.name, v)
                    for declared, v in outputs
                ]
            results = unaliased(results, jax.tree.leaves((params, values)))
            if not foreign:
                check_memory_of_outputs(self.graph, results)
                progress.announce(self._compiling)
                self.compiles += not jax.config.jax_disable_jit  # type: ignore[attr-defined]
            return results

        trace.__name__ = re.sub(r"\W", "_", self.graph.name) or "onnx_model"  # profiles and jaxprs show it
        return trace

    def _converted(self, name: str, value: Any) -> Any:
        """An output that is no array of JAX's as a jitted function can return it."""
        value = computed(value, self._types.get(name))
        if isinstance(value, np.ndarray) and value.size <= LARGEST_CONSTANT and not value.dtype.hasobject:
            return ConstantOutput(owned(value))
        if is_jax(result := to_device(value)):
            return result
        producers = [node for node in self.graph.nodes if name in node.outputs]
        raise NeedsHost(producers, f"{name!r} holds {without_arrays(value)}")

    def __call__(self, scope: Mapping[str, Any], fixed: Collection[str], context: CallContext) -> Outcome:
        """A call of the graph.

        Args:
            scope: values by name, of which it takes those that it reads; tracers when the caller transforms the model.
            fixed: the names of those that are known at compile time.
            context: parameters and the rest of the call.
        """
        reads, params = {n: scope[n] for n in self._reads if n in scope}, context.params
        caller_traces = False
        while True:  # once more for each set of inputs whose values a node turns out to need
            pinned, rest, specialised = self.specialisation.divided(reads, fixed, context, caller_traces)
            key, leaves = self._signed(rest, specialised)
            bound: BoundCall | None = params.bound.get(key) if key is not None else None  # type: ignore[attr-defined]
            if bound is not None:
                return self._outcome(bound, leaves, pinned.keys() <= {*fixed})
            self.specialisation.check_types(rest)
            if self.specialisation.deciding and not is_traced(rest, self._own_params(params), context.rng):
                self.specialisation.check_values(pinned)
            before, start = self.compiles, time.perf_counter()
            try:
                if key is not None and isinstance(params, DeviceParams):
                    with progress.stage(self._compiling):
                        bound = self._compile(key, rest, leaves, specialised)
                    outcome = self._outcome(bound, leaves, pinned.keys() <= {*fixed})
                    params.bound[key] = bound
                else:
                    outcome = self._unpacked(self._run(rest, specialised))
            except KnownValueError as e:
                sources = self.specialisation.sources(e, rest)
                if caller_traces or not is_traced([rest[n] for n in sources]):
                    self.specialisation.learn(e, rest)
                else:
                    caller_traces = True
                continue
            if self.compiles > before:
                self._count(time.perf_counter() - start, rest, pinned)
            return outcome

    def _signed(self, values: Mapping[str, Any], context: CallContext) -> tuple[Signature | None, list[Any]]:
        """The signature of a call and its arrays; None if no optimised program supports the call."""
        params, constants, rng = context.params, context.constants, context.rng
        if context.x32 or not self.settings.optimize or not isinstance(params, DeviceParams):
            return None, []
        if params.device is None or compat.checks_values() or not compat.context_mesh().empty:
            return None, []
        inputs: Any = tuple(values)
        leaves = list(values.values())
        if rng is not None or any(isinstance(v, list) or v is None for v in leaves):
            leaves, inputs = jax.tree.flatten((dict(values), rng))
        program = self, constants
        if program not in params.callees:
            params.callees[program] = Callee(self.graph, self.settings, self._own_params(params.types), constants)
        return signature(params.callees[program], inputs, leaves, params.device, context.as_numpy), leaves

    def _compile(self, key: Signature, values: Mapping[str, Any], leaves: Any, context: CallContext) -> BoundCall:
        """The optimised program for a signature, bound to parameter values."""
        params: Any = context.params
        shared, as_numpy = key.program, context.as_numpy and context.rng is None
        executable = self.executables.get(shared)
        if executable is None:
            executable = self.executables[shared] = self._executable(values, leaves, context)
        try:
            return executable.bind(params, leaves, tuple(values), as_numpy)
        except Exception:
            self.executables.pop(shared, None)  # it cannot be compiled, as inside an exporter that replaces functions
            raise

    def _executable(
        self, values: Mapping[str, Any], leaves: Any, context: CallContext, pool: Executor | None = None
    ) -> Executable | Sections:
        """The program for a signature: read from ``cache_dir`` if another process compiled it, or traced now.

        With a pool, one of its threads compiles it; otherwise it is compiled here if ``cache_dir`` keeps it.
        """
        params: Any = context.params
        # Of its own: no mesh is around it, and no other program has its types.
        constants, rng, jitted = context.constants, context.rng, jax.jit(self._function(False), static_argnums=0)
        args = self._own_params(params.types), dict(values), rng
        device = device_of((*leaves, *(params[k] for k in list(args[0])[:1])))
        options = Passes("" if device is None else compat.lowering_platform(device), self.settings.skip)
        store = self._store
        if self.settings.scan_layers == "calls" and device is not None:
            traced = traced_for(options, jitted, constants, *args)
            if (sections := sections_of(traced, sorted(args[0]), device, options, store=store)) is not None:
                return sections
        by_type = self._keys.keys() & params.types.keys()
        meaning = fingerprint(self.graph, by_type, self.settings) if store and is_cpu(device) else None
        types = [(v.shape, str(v.dtype), getattr(v, "weak_type", False)) for v in leaves]
        structure = jax.tree.structure((dict(values), rng))
        key = meaning, constants, structure, types, sorted(args[0].items()), store and store.is_users
        entry = store.path(*key) if store and meaning else None
        if store is not None and entry is not None:
            options = replace(options, portable=not store.is_users)
            if kept := store.read(entry, as_numpy=context.as_numpy and rng is None):
                self.compiles += 1
                return Executable(jitted, constants, *args, options=options, kept=kept)
        warned = len(self.settings.warned)
        executable, write = Executable(jitted, constants, *args, options=options, store=store), None
        if store is not None and entry is not None and len(self.settings.warned) == warned:
            write = partial(store.write, entry)  # not of a program that warned: another process would not
        if write or pool:
            try:
                lowered = executable.lowered(params, leaves)
            except Unfoldable:  # the program without folding is right for these parameters and for any others
                executable = executable.unfolded()
                lowered = executable.lowered(params, leaves)
            if lowered is not None and pool is not None:
                pool.submit(executable.compile, lowered, write)
            elif lowered is not None:
                executable.compile(lowered, write)
        return executable

    def compile_ahead(
        self,
        pool: Executor,
        stand_ins: Collection[str],
        scope: Mapping[str, Any],
        fixed: Collection[str],
        context: CallContext,
    ) -> Outcome | None:
        """Trace a call and have a thread compile its program; the results, with stand-ins for those not fixed.

        None if the program exists, or what it returns is not known.

        Args:
            pool: the threads.
            stand_ins: the names of values that do not exist yet, in whose places are arrays of their types.
            scope, fixed, context: as for a call.
        """
        reads = {n: scope[n] for n in self._reads if n in scope}
        if not self.specialisation.names.isdisjoint(stand_ins):
            return None
        pinned, rest, specialised = self.specialisation.divided(reads, fixed, context)
        key, leaves = self._signed(rest, specialised)
        if key is None or key.program in self.executables:
            return None
        start = time.perf_counter()
        executable = self.executables[key.program] = self._executable(rest, leaves, specialised, pool)
        self._count(time.perf_counter() - start, rest, pinned)
        if executable.result_types is None:
            return None
        return self._unpacked(jax.tree.unflatten(executable.structure, map(_stand_in, executable.result_types)))

    def _outcome(self, bound: BoundCall, leaves: list[Any], by_signature: bool) -> Outcome:
        """What a bound call returns; ``by_signature``: the caller's signature holds all values it is specialised on."""
        results, structure = bound.call(leaves), bound.structure
        if structure.num_nodes == 1 + structure.num_leaves:  # a list of arrays
            return Outcome(tuple(results), frozenset(), bound if by_signature else None)
        return self._unpacked(jax.tree.unflatten(structure, results))

    def _unpacked(self, results: list[Any]) -> Outcome:
        names = (v.name for v in self.graph.outputs)
        constant = frozenset(n for n, r in zip(names, results, strict=True) if isinstance(r, ConstantOutput))
        return Outcome(with_constants(results), constant)

    def _run(self, values: Mapping[str, Any], context: CallContext) -> list[Any]:
        """A call of the program as it was traced: of a caller's transformation, a mesh, or without optimisation."""
        args = self._own_params(context.params), values, context.rng
        run = compat.call_in_64_bits if context.x32 else call_serially
        with progress.call():
            foreign = self.settings.is_traced or is_traced(args)
            results: list[Any] = run(self._jitted(foreign), context.constants, *args)
        return results

    def _own_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that the graph reads."""
        return {k: params[k] for k in self._keys if k in params}

    def _count(self, seconds: float, values: Mapping[str, Any], pinned: Mapping[str, np.ndarray]) -> None:
        """Record the time and the shapes of a compilation; warn when there are too many."""
        self.seconds += seconds
        for name, value in (*values.items(), *pinned.items()):
            text = value.tolist() if name in pinned else jax.tree.map(np.shape, value)
            self.specialisation.seen.setdefault(name, set()).add(str(text))
        if self.compiles == self.settings.warn_after + 1:
            name, shapes = max(self.specialisation.seen.items(), key=lambda item: len(item[1]))
            what = "values" if name in pinned else "shapes"
            warnings.warn(
                f"{self.graph.name!r} was compiled {self.compiles} times ({self.seconds:.1f} s so far): {name!r} came "
                f"in {len(shapes)} {what}, such as {', '.join(sorted(shapes)[:3])}. Fix its free dimensions with "
                "convert(..., dims={'name': n}), or pad it: convert(..., bucket={'name': [64, 128, 256]}); "
                "to raise the threshold: convert(..., warn_after=n)",
                RecompilationWarning,
                stacklevel=2,
            )


def _stand_in(aval: Any) -> np.ndarray:
    """An array of a type, without memory of its own, in the place of a value that does not exist yet.

    Raises:
        TypeError: the value will be none of NumPy's arrays: its type is weak, or a random key's.
    """
    if getattr(aval, "weak_type", False) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        raise TypeError(f"no NumPy array is {aval}")
    return np.broadcast_to(np.zeros((), aval.dtype), aval.shape)


def compile_ahead(
    row: Sequence[Subprogram], values: Mapping[str, Any], fixed: Collection[str], context: CallContext
) -> None:
    """Compile the programs of partitions in a row, as far as their types can be known.

    What tracing raises here, or XLA, the call of the partition raises again.

    Args:
        row: the partitions.
        values: all that they read from before the first.
        fixed: the names of values that are known at compile time.
        context: as for a call of each.
    """
    threads = min(len(row), cores())
    if threads < 2:
        return
    known, stand_ins, fixed = dict(values), set[str](), set(fixed)
    with ThreadPoolExecutor(threads, "onnx2jax-partition") as pool:  # whose threads have ended when it is left
        try:
            with suppress(Exception):
                for subprogram in row:
                    traced = subprogram.compile_ahead(pool, stand_ins, known, fixed, context)
                    if traced is None:
                        break
                    names = [v.name for v in subprogram.graph.outputs]
                    known.update(zip(names, traced.outputs, strict=True))
                    fixed.update(traced.fixed)
                    stand_ins.update({*names}.difference(traced.fixed))
        except BaseException:  # KeyboardInterrupt
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def row_from(parts: Graph, graph: Graph) -> list[Graph]:
    """The partitions that are compiled with nothing on the host between them, if ``graph`` is the first of several."""
    groups = (list(group) for _, group in groupby(map(body_of, parts.nodes), lambda body: body is None))
    rows = ([body for body in group if body is not None] for group in groups)
    return next((row for row in rows if len(row) > 1 and row[0] is graph), [])
