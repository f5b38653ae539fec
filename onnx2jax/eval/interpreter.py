"""The evaluation loop: runs a graph's nodes in order, over NumPy values (known) and JAX values (traced).

It knows no operator by name: an operator declares what it needs (known values, a random key, the number of outputs) in
its signature. The same loop runs on the host, outside any program: operands are then NumPy arrays, and a node may stand
for a compiled partition of the graph (see runtime/partition.py).
"""

from __future__ import annotations

import math
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import jax
import numpy as np

from .. import compat, debug
from ..errors import OperatorError
from ..ir import binding, loops
from ..ir.analysis import by_bits
from ..ir.graph import Function, Graph, Node, Reference, with_graphs
from ..ir.patterns import REWRITTEN, merging
from ..limits import LARGEST_ARRAY, LARGEST_IN_SIGNATURE, LARGEST_TRACED, NESTED_JITS
from ..ops.arrays import check_room, is_known, is_traced
from ..ops.cast import is_float
from ..ops.registry import Operator, Shards, is_built_in
from ..proto.types import ValueInfo
from .autodiff_tape import Derivatives, Rerun, Tape
from .layers import Rolling
from .node_errors import NoKey, dropped, forward_only, node_error, operands, warn
from .settings import Settings as Settings
from .sibling_fusion import fused, once_of
from .static_operands import static_operands
from .values import ConstantOutput as ConstantOutput
from .values import marked_constants, to_host
from .values import with_constants as with_constants

Scope = MutableMapping[str, Any]


@dataclass(frozen=True)
class FunctionCall:
    """The call of a model-local function that is being evaluated."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    """The caller's attributes."""
    depth: int = 0
    """The number of enclosing function calls."""
    traced: dict[Any, Any] = field(default_factory=dict)
    """Functions traced in this evaluation, by signature."""


class Host(Protocol):
    """Runs nodes in NumPy, outside any program."""

    def run_graph(self, graph: Graph, named: Mapping[str, Any], around: Mapping[str, Any], rng: Any) -> tuple[Any, ...]:
        """The outputs of a node's subgraph, given its inputs and the enclosing scope."""

    def run_partition(self, graph: Graph, scope: Scope, rng: Any = None) -> tuple[Any, ...]:
        """The outputs of a compiled partition, which reads its captures from the scope."""

    def run_trips(
        self, node: Node, around: Mapping[str, Any], rng: Any, trip: int, *what: Any, **attributes: Any
    ) -> Any:
        """Many iterations of a loop as one compiled call; None if that fails."""


@dataclass(frozen=True)
class Context:
    """State shared by all graphs of one evaluation."""

    params: Mapping[str, Any]
    """Values of initializers by Graph.key; the others are constants."""
    rng: Any = None
    """Random key, or None when none was given."""
    settings: Settings = field(default_factory=Settings)
    call: FunctionCall = field(default_factory=FunctionCall)
    host: Host | None = None
    """Set while nodes run on the host."""
    caller_traces: bool = False
    """Whether values that operators would like to know are traced by the caller."""
    reruns: Mapping[Node, Rerun] = field(default_factory=dict)
    """Evaluates nodes of the graphs around again, for a node that asks for derivatives; empty where none does."""
    tape: Tape | None = None
    """Records the nodes that will be differentiated."""
    graphs: tuple[Graph, ...] = ()
    """The complete graph that is being evaluated and those around it, the innermost first; empty on the host."""
    layers: Rolling | None = None
    """The repeated layers that are evaluated as loops; None to evaluate each layer."""

    def within(self, graph: Graph) -> Context:
        """The context in which the nodes of a graph run."""
        whole = graph.complete
        context = self if self.host is not None else replace(self, graphs=(whole, *self.graphs))
        if not whole.differentiates:
            return context

        def run(node: Node, scope: Scope) -> Sequence[Any]:
            return run_node(node, scope, replace(context, reruns=reruns, tape=None))

        reruns = {**self.reruns, **dict.fromkeys(whole.nodes, run)}
        return replace(context, reruns=reruns, tape=Tape(whole, graph.nodes) if self.host is None else None)


@dataclass(frozen=True)
class Closure:
    """A graph attribute as operators see it: a callable over the scope where its node stands."""

    graph: Graph
    scope: Scope
    context: Context

    @property
    def inputs(self) -> tuple[ValueInfo, ...]:
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[ValueInfo, ...]:
        return self.graph.outputs

    def __call__(self, *args: Any, step: Any = None) -> tuple[Any, ...]:
        """Evaluate the graph. ``step``, a loop's iteration number, varies the random keys inside."""
        context = self.context
        if step is not None and context.rng is not None:
            context = replace(context, rng=jax.random.fold_in(context.rng, step))
        named = dict(zip((v.name for v in self.graph.inputs), args, strict=False))
        if len(named) < len(args):
            raise ValueError(f"graph {self.graph.name!r} takes {len(self.graph.inputs)} inputs, not {len(args)}")
        if context.host is not None:
            if not context.call.attributes and not is_traced(*args):
                return context.host.run_graph(self.graph, named, self.scope, context.rng)
            context = replace(context, host=None)
        return evaluate(self.graph, named, context, self.scope)

    def condition(self) -> tuple[Closure | None, list[int]]:
        """Of a Loop's body the part that computes its condition (see ``ir.loops``); None if it computes none.

        A part that draws random numbers is none, too.
        """
        part, needed = loops.condition(self.graph)
        return (replace(self, graph=part) if part.nodes and not part.draws else None), needed

    def compiled(self) -> tuple[Any, ...]:
        """The graph's outputs, from one compiled program: only on the host."""
        assert self.context.host is not None
        return self.context.host.run_partition(self.graph, self.scope, self.context.rng)


Run = Callable[[Node, Scope, Context], Sequence[Any]]
"""Evaluates a node in a scope, and returns its outputs."""


def evaluate(graph: Graph, inputs: Mapping[str, Any], context: Context, outer: Scope | None = None) -> tuple[Any, ...]:
    """The outputs of a graph.

    Args:
        graph: what to evaluate.
        inputs: values by name; they override initializers of the same name (rule GR-04).
        context: parameters, random key, attributes of the function around.
        outer: the scope around a subgraph.

    Raises:
        KnownValueError: a value that must be known is traced.
        OperatorError: an operator refuses its inputs.
    """
    values = initial_scope(graph, inputs, context)
    scope: Scope = values if outer is None else ChainMap(values, outer)
    context = context.within(graph)
    settings, nodes = context.settings, graph.nodes
    if context.layers is not None:
        nodes = context.layers.nodes(graph)
    elif context.host is None and context.tape is None and settings.optimize and settings.place is None:
        joins = (isinstance(node.target, Operator) and node.target.for_siblings for node in nodes)
        nodes = fused(graph) if any(joins) else nodes
    run_nodes(nodes, scope, context)
    return tuple(scope[v.name] for v in graph.outputs)


def initial_scope(graph: Graph, inputs: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """The initializers of a graph and its inputs, by name."""
    initializers = {name: context.params.get(graph.key(name), value) for name, value in graph.initializers.items()}
    return initializers | dict(inputs)


def run_nodes(nodes: Iterable[Node], scope: Scope, context: Context, run: Run | None = None) -> None:
    """Evaluate nodes in order, and add their results to the scope.

    ``run`` evaluates each in place of ``run_node``: it may observe nodes, answer for them, free values, or raise to
    stop.
    """
    run = run or run_node
    shown = debug.level() >= 1
    with np.errstate(all="ignore"):
        for node in nodes:
            if shown:
                values = [scope.get(name) for name in node.inputs]
                debug.emit(f"{'host' if context.host else 'trace'} {node}; {operands(node, values)}")
            results = run(node, scope, context)
            scope.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)


def run_node(node: Node, scope: Scope, context: Context) -> Sequence[Any]:
    """The outputs of a node."""
    if context.tape is not None and node in context.tape.recorded:
        return context.tape.record(node, scope, context.reruns[node])
    values = [scope[name] if name else None for name in node.inputs]
    place, on_host = context.settings.place, context.host is not None
    if on_host:
        values = [v if type(v) is np.ndarray else to_host(v) for v in values]
    if place is not None:
        values = place(node, node.inputs, values)
    try:
        if on_host and node.is_plain and not context.settings.annotate:
            results = _call(node, values, scope, context)
        else:
            # Scopes name what is traced, and annotations what runs here, in profiles.
            here = compat.annotation(node.name) if on_host and context.settings.annotate else nullcontext()
            with here, nullcontext() if on_host and node.is_plain else jax.named_scope(node.name):
                results = _call(node, values, scope, context)
    except Exception as e:
        if (error := node_error(e, node, values, on_host)) is e:
            raise
        raise error from e
    results = checked_results(node, values, results)
    return results if place is None else place(node, node.outputs, results)


def _call(node: Node, values: list[Any], scope: Scope, context: Context) -> Any:
    if isinstance(node.target, Function):
        results = _call_function(node, values, scope, context)
        return results if node.casts is None else node.casts.results(results)
    assert node.target is not None and node.target.function is not None
    attributes = node.attributes if node.is_plain else _attributes(node, scope, context)
    node.target.check_choices(attributes)
    if node.target.static and not all(type(v) is np.ndarray for v in values):
        values = static_operands(node, values, scope, context.graphs, caller_traces=context.caller_traces)
    if (node.target.merges or (node.op_type in REWRITTEN and not node.domain)) and context.graphs:
        values = _apart(node, values, context)
    if node.target.fixtures:
        attributes = {**fixtures(node, node.target, scope, context), **attributes}
    function = node.target.function if node.casts is None else partial(node.casts.call, node.target.function)
    if compat.keeps_convolutions() and not is_built_in(node.target):
        with compat.on_any_platform():
            return function(*values, **attributes)
    return function(*values, **attributes)


def _apart(node: Node, values: Sequence[Any], context: Context) -> list[Any]:
    """The operands, behind a barrier where XLA would merge the node with a neighbour; on CPUs both remain one loop."""
    separate = [*values]
    for i, what in merging(node, context.graphs[0], context.call.depth > 0):
        merges = what == "all" or (compat.merges_constants() and _is_uniform(values[1 - i]))
        if merges and not is_known(values[i]) and is_float(values[i].dtype):
            separate[i] = jax.lax.optimization_barrier(values[i])
    return separate


def _is_uniform(value: Any) -> bool:
    """Whether a value is known, and all its elements are equal."""
    return is_known(value) and value.size > 0 and bool((value == np.ravel(value)[0]).all())


def checked_results(node: Node, values: Sequence[Any], returned: Any) -> list[Any]:
    """The results of a node, which are as many as it names, and arrays that can be."""
    several = returned if isinstance(returned, tuple) else (returned,)
    results = [np.asarray(r) if isinstance(r, np.generic) else r for r in several]
    for result in results:
        if type(result) is np.ndarray and result.nbytes <= LARGEST_ARRAY:
            continue
        shape = getattr(result, "shape", ())
        if any(type(d) is int and d < 0 for d in shape):
            raise OperatorError(f"{node} would make an array of shape {result.shape}\n{operands(node, values)}")
        is_sized = shape and all(type(d) is int for d in shape)  # unlike an array of symbolic extents
        if is_sized and math.prod(filter(None, shape)) * result.dtype.itemsize > LARGEST_ARRAY:
            try:
                in_programs = LARGEST_TRACED * jax.process_count()
                check_room(result.shape, result.dtype, LARGEST_ARRAY if is_known(result) else in_programs)
            except ValueError as e:
                raise OperatorError(f"{node}: {e}\n{operands(node, values)}") from None
    if len(node.outputs) > len(results):
        text = f"{node} names {len(node.outputs)} outputs, the operator gives {len(results)}"
        raise OperatorError(text, rule="ND-08")
    return results


def _attributes(node: Node, scope: Scope, context: Context) -> dict[str, Any]:
    """The node's attributes, with graphs as callables."""
    closed = partial(Closure, scope=scope, context=context)
    return with_graphs(actual_attributes(node, context.call), closed)


def actual_attributes(node: Node, call: FunctionCall) -> dict[str, Any]:
    """The node's attributes, with references replaced by the caller's values or left out (rules FN-13, FN-14)."""
    actual = {}
    for name, value in node.attributes.items():
        if isinstance(value, Reference):
            if value.name not in call.attributes:
                continue
            value = call.attributes[value.name]
            if isinstance(node.target, Operator):
                value = binding.convert_attributes(node.target, {name: value})[name]
        actual[name] = value
    return actual


def fixtures(node: Node, operator: Operator, scope: Scope, context: Context) -> dict[str, Any]:
    """What the operator asks for by name beyond its inputs and attributes."""
    return {name: _FIXTURES[name](node, scope, context) for name in operator.fixtures}


def _trips(node: Node, scope: Scope, context: Context) -> Any:
    host = None if context.call.attributes else context.host
    return host and partial(host.run_trips, node, scope, context.rng)


def _declared(node: Node, context: Context) -> Sequence[Any] | None:
    """The shape that the model declares of a node's first output."""
    graph, name = context.graphs[0], node.outputs[0]
    declared = next((v for v in graph.outputs if v.name == name), graph.value_info.get(name))
    return None if declared is None else declared.shape


_FIXTURES: dict[str, Callable[[Node, Scope, Context], Any]] = {
    "opset": lambda node, *_: node.opset,
    "n_outputs": lambda node, *_: len(node.outputs),
    "loop_cond": lambda _node, _scope, context: context.settings.loop_cond,
    "max_trips": lambda _node, _scope, context: context.settings.max_trips,
    "derivatives": lambda node, scope, context: Derivatives(node, scope, context.reruns, context.tape),
    "compiled": _trips,
    "forward_only": lambda node, *_: partial(forward_only, node),
    "once": lambda node, *_: once_of(node),
    "shards": lambda node, _, context: Shards() if (place := context.settings.place) is None else place.shards(node),
    "extents": lambda node, _, context: _declared(node, context) if context.caller_traces else None,
    "wide": lambda node, *_: node.casts is not None and node.casts.result == np.float32,
    "double": lambda node, *_: node.casts is not None and node.casts.result == np.float64,
    "dropped": lambda node, _, context: partial(dropped, node, *context.graphs[:1]),
    "warn": lambda node, _, context: partial(warn, node, context.settings.warned),
    "rng": lambda node, _, context: NoKey(node) if context.rng is None else _fold(context.rng, node),
}


def _fold(rng: Any, node: Node) -> Any:
    """The node's own key: two calls of one function draw different numbers."""
    # By name rather than by position, so that removing another node leaves this stream alone (rule GR-25).
    return None if rng is None else jax.random.fold_in(rng, zlib.crc32(node.name.encode()))


def call_of(node: Node, scope: Scope, context: Context) -> FunctionCall:
    """The call that a node makes of a model-local function."""
    assert isinstance(node.target, Function)
    attributes = {**node.target.defaults, **_attributes(node, scope, context)}
    return FunctionCall(attributes, context.call.depth + 1, context.call.traced)


def _call_function(node: Node, values: list[Any], scope: Scope, context: Context) -> tuple[Any, ...]:
    """The outputs of a model-local function; traced once per signature, as a nested jit."""
    function: Any = node.target
    named = dict(zip_longest((v.name for v in function.body.inputs), values))
    call, rng = call_of(node, scope, context), _fold(context.rng, node)
    context = replace(context, call=call, rng=rng, reruns={}, tape=None, graphs=())
    traced = {name: value for name, value in named.items() if isinstance(value, jax.core.Tracer)}
    known = {name: value for name, value in named.items() if name not in traced}
    signature = _signature((known, call.attributes))
    if not traced or signature is None or call.depth > NESTED_JITS:
        return evaluate(function.body, named, context)
    key = (function, signature, tuple(traced), context.rng is None)
    if key not in call.traced:

        def body(traced: dict[str, Any], rng: Any) -> list[Any]:
            return marked_constants(evaluate(function.body, {**known, **traced}, replace(context, rng=rng)))

        body.__name__ = function.name
        call.traced[key] = jax.jit(body)
    return with_constants(call.traced[key](traced, context.rng))


def _signature(value: Any) -> Any:
    """Known values as a hashable key that tells their bits apart; None when they are large or hold graphs."""
    leaves, structure = jax.tree.flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray | str | int | float):
            return None
        if isinstance(leaf, np.ndarray) and (leaf.nbytes > LARGEST_IN_SIGNATURE or leaf.dtype.hasobject):
            return None
    return structure, by_bits(leaves)
