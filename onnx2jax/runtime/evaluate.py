"""The evaluation loop: a graph's nodes in order, over NumPy values that are known and JAX values that are traced.

It knows no operator by name. What an operator needs (known values, random keys, the number of outputs) it says in its
signature, which ops.registry has read.
"""

from __future__ import annotations

import math
import zlib
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..errors import KnownValueError, OnnxError, OperatorError, RandomKeyError, UnsupportedError
from ..ir import binding
from ..ir.graph import Function, Graph, Node, Reference
from ..ops.arrays import is_known, is_string, is_traced
from ..ops.registry import PADDED, Operator, resolve
from ..proto.types import ValueInfo
from .tape import Derivatives, Frame, Tape

Scope = MutableMapping[str, Any]
LARGEST: Final = 2**43
"""Bytes of an array that no machine has; beyond, the model is at fault, and the node can be named."""
NESTED_JITS: Final = 16
"""Functions deeper than this are traced in place: a nested jit takes a dozen frames of Python's stack."""


@dataclass(frozen=True)
class Context:
    """What every graph of one evaluation shares."""

    params: Mapping[str, Any]
    """Values of initializers by Graph.key; the others are constants."""
    rng: Any = None
    """Random key, or None when none was given."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Actual attributes of the function being evaluated."""
    max_trips: int | None = None
    """Trips after which a loop is taken to be endless."""
    calls: dict[Any, Any] = field(default_factory=dict)
    """Functions traced already, by signature."""
    depth: int = 0
    """Functions around the one being evaluated."""
    place: Callable[[Node, Sequence[str], Sequence[Any]], list[Any]] | None = None
    """Says on which devices the values at a node lie."""
    on_host: Callable[[Graph, Mapping[str, Any], Mapping[str, Any], Any], tuple[Any, ...]] | None = None
    """Set while nodes run by NumPy, outside any program: runs the graphs inside them, given inputs, scope and key."""
    compiled: Callable[..., tuple[Any, ...] | None] | None = None
    """Set with `on_host`: runs an operator of the padded domain in a node's place, compiled."""
    frames: tuple[Frame, ...] = ()
    """The graphs around a node, outermost first, where a node names values to be differentiated."""
    tape: Tape | None = None
    """Records the nodes that will be differentiated."""

    def within(self, graph: Graph, nodes: Collection[Node]) -> Context:
        """The context for running ``nodes`` of a graph."""
        if not graph.differentiates:
            return self
        again = replace(self, tape=None)

        def run(node: Node, scope: Scope) -> Sequence[Any]:
            return _run(node, scope, replace(again, frames=frames))

        frames = (*self.frames, Frame(graph.nodes, run))
        return replace(again, frames=frames, tape=None if self.on_host else Tape(graph, nodes))


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
        if context.on_host is not None:
            if not context.attributes and not is_traced(*args):
                return context.on_host(self.graph, named, self.scope, context.rng)
            context = replace(context, on_host=None, compiled=None)
        return evaluate(self.graph, named, context, self.scope)


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
    own = {name: context.params.get(graph.key(name), value) for name, value in graph.initializers.items()}
    own.update(inputs)
    scope: Scope = own if outer is None else ChainMap(own, outer)
    run_nodes(graph.nodes, scope, context.within(graph, graph.nodes))
    return tuple(scope[v.name] for v in graph.outputs)


def run_nodes(nodes: Iterable[Node], scope: Scope, context: Context) -> None:
    """Evaluate nodes in order, reading and writing the scope."""
    for node in nodes:
        if context.tape is not None and node in context.tape.recorded:
            results = context.tape.record(node, scope, context.frames[-1].run)
        else:
            results = _run(node, scope, context)
        scope.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)


def _closed(value: Any, scope: Scope, context: Context) -> Any:
    """An attribute's value with its graphs as closures (rule SC-17: in lists too)."""
    if isinstance(value, tuple) and any(isinstance(v, Graph) for v in value):
        return tuple(_closed(v, scope, context) for v in value)
    return Closure(value, scope, context) if isinstance(value, Graph) else value


def _run(node: Node, scope: Scope, context: Context) -> Sequence[Any]:
    values = [scope[name] if name else None for name in node.inputs]
    if context.place is not None:
        values = context.place(node, node.inputs, values)
    attributes = {name: _closed(value, scope, context) for name, value in _actual(node, context)}
    with jax.named_scope(node.name), np.errstate(all="ignore"):
        try:
            if isinstance(node.target, Function):
                return _call(node.target, values, attributes, _inside(context, node))
            assert node.target is not None and node.target.function is not None
            node.target.check_choices(attributes)
            values = [_known(node, node.target, i, v) for i, v in enumerate(values)]
            results = node.target.function(*values, **(_fixtures(node, node.target, scope, context) | attributes))
        except OnnxError as e:
            if isinstance(e, KnownValueError) and e.node is None:  # the operator's own
                cure = f"; or {_bound(node)}" if _can_be_padded(node) else ""
                raise KnownValueError(f"{node}: {e}{cure}", tuple(filter(None, node.inputs)), node) from e
            if isinstance(node.target, Function) or node.graphs or node.differentiates:
                e.add_note(f"inside {node}")
                if node.differentiates and context.on_host is not None:
                    raise OperatorError(f"{node} meets a node on its way that has no derivative\n{e}") from e
                if isinstance(e, KnownValueError):
                    e.values, e.node = node.reads, node  # in terms of the graph outside
            raise
        except jax.errors.JAXTypeError as e:
            # The body looked at a traced value: conversion to int, bool or NumPy.
            raise _needs_known(node, "an operand", node.inputs) from e
        except NotImplementedError as e:
            raise UnsupportedError(f"{node}: {e}\n{_operands(node, values)}") from e
        except Exception as e:
            if any(map(is_string, values)) and not is_known(values):
                raise _needs_known(node, "an operand beside strings", node.inputs) from e
            raise OperatorError(f"{node}: {e}\n{_operands(node, values)}") from e
    if not isinstance(results, tuple):
        results = (results,)
    for result in results:
        if (size := _bytes(result)) > LARGEST:
            raise OperatorError(f"{node} would make an array of {size:.2g} bytes\n{_operands(node, values)}")
        if any(type(d) is int and d < 0 for d in getattr(result, "shape", ())):
            raise OperatorError(f"{node} would make an array of shape {result.shape}\n{_operands(node, values)}")
    if len(node.outputs) > len(results):
        raise OperatorError(
            f"{node} names {len(node.outputs)} outputs, the operator gives {len(results)}", rule="ND-08"
        )
    if context.on_host is not None:
        # A Gradient on the host traces.
        return [jax.tree.map(np.asarray, r) if _is_jax(r) and not is_traced(r) else r for r in results]
    results = [np.asarray(r) if isinstance(r, np.generic) else r for r in results]
    return results if context.place is None else context.place(node, node.outputs, results)


def _is_jax(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.generic) for leaf in jax.tree.leaves(value))


def _bytes(value: Any) -> int:
    """What an array takes in memory; 0 for other values and for symbolic extents."""
    shape = getattr(value, "shape", ())
    return math.prod(shape) * value.dtype.itemsize if shape and all(type(d) is int for d in shape) else 0


def _inside(context: Context, node: Node) -> Context:
    """The context inside a call: two calls of one function draw different numbers."""
    return context if context.rng is None else replace(context, rng=_fold(context.rng, node))


def _operands(node: Node, values: Sequence[Any]) -> str:
    """Shapes and dtypes of a node's operands, for messages."""

    def describe(value: Any) -> str:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
        if isinstance(value, list):
            return f"sequence of {len(value)}"
        return "absent" if value is None else type(value).__name__

    shown = ", ".join(f"{name or '-'}: {describe(v)}" for name, v in zip(node.inputs, values, strict=False))
    return f"operands: {shown or 'none'}"


def _actual(node: Node, context: Context) -> list[tuple[str, Any]]:
    """The node's attributes, with references replaced by the caller's values or left out (rules FN-13, FN-14)."""
    items = []
    for name, value in node.attributes.items():
        if isinstance(value, Reference):
            if value.name not in context.attributes:
                continue
            value = context.attributes[value.name]
            if isinstance(node.target, Operator):
                value = binding.land(node.target, {name: value})[name]
        items.append((name, value))
    return items


def _known(node: Node, operator: Operator, position: int, value: Any) -> Any:
    """An operand, as NumPy when the operator must know its value before compiling."""
    if operator.parameter(position) not in operator.static or is_known(value):
        return value
    if is_traced(value):
        raise _needs_known(node, f"{operator.parameter(position)!r}", (node.inputs[position],))
    return jax.tree.map(np.asarray, value)


def _needs_known(node: Node, parameter: str, names: Sequence[str]) -> KnownValueError:
    names = tuple(filter(None, names))
    return KnownValueError(
        f"{node}: {parameter} (value {' or '.join(map(repr, names))}) must be known before compiling, because a "
        "shape or the course of the computation depends on it, but it is traced.\n"
        "Call the model itself (model(x) or model.run(...)), which finds such values by itself; or pin the input it "
        "comes from: convert(..., static={'input name': value})"
        + (f"; or {_bound(node)}" if _can_be_padded(node) else ""),
        names,
        node,
    )


def _can_be_padded(node: Node) -> bool:
    return not node.domain and resolve(PADDED, node.op_type, 1) is not None


def _bound(node: Node) -> str:
    return f"bound the result: convert(..., max_size={{{node.name!r}: n}})"


def _fixtures(node: Node, operator: Operator, scope: Scope, context: Context) -> dict[str, Any]:
    """What the operator asks for by name beyond its inputs and attributes."""
    fixtures: dict[str, Any] = {}
    if "opset" in operator.fixtures:
        fixtures["opset"] = node.opset
    if "n_outputs" in operator.fixtures:
        fixtures["n_outputs"] = len(node.outputs)
    if "max_trips" in operator.fixtures:
        fixtures["max_trips"] = context.max_trips
    if "derivatives" in operator.fixtures:
        fixtures["derivatives"] = Derivatives(node, scope, context.frames, context.tape)
    if "compiled" in operator.fixtures:
        run = None if context.attributes else context.compiled
        fixtures["compiled"] = run and partial(run, node, scope, context.rng)
    if "forward_only" in operator.fixtures:
        fixtures["forward_only"] = partial(_forward_only, node)
    if "rng" in operator.fixtures:
        fixtures["rng"] = _NoKey(node) if context.rng is None else _fold(context.rng, node)
    return fixtures


def _forward_only(node: Node, values: Any, why: str) -> Any:
    """The values; to differentiate them in reverse is an error that says why."""
    error = KnownValueError(f"{node}: {why}", tuple(filter(None, node.inputs)), node)
    return jax.tree.map(lambda v: compat.forward_only(v, error) if is_traced(v) else v, values)


def _fold(rng: Any, node: Node) -> Any:
    # By name rather than by position, so that removing another node leaves this stream alone (rule GR-25).
    return jax.random.fold_in(rng, zlib.crc32(node.name.encode()))


class _NoKey:
    """Stands for the random key nobody gave: harmless until somebody draws from it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        raise RandomKeyError(f"{self._node} draws random numbers: pass a key, model.apply(..., rng=jax.random.key(0))")


def _call(function: Function, values: list[Any], attributes: dict[str, Any], context: Context) -> tuple[Any, ...]:
    """The outputs of a model's own function; traced once per signature, as a nested jit."""
    names = [v.name for v in function.body.inputs]
    named = dict(zip(names, values + [None] * (len(names) - len(values)), strict=True))
    attributes = {**function.defaults, **attributes}
    context = replace(context, attributes=attributes, depth=context.depth + 1, frames=(), tape=None)
    traced = {name: value for name, value in named.items() if isinstance(value, jax.core.Tracer)}
    known = {name: value for name, value in named.items() if name not in traced}
    key = _signature((known, context.attributes))
    if not traced or key is None or context.depth > NESTED_JITS:
        return evaluate(function.body, named, context)
    full_key = (function, key, tuple(traced), context.rng is None)
    if full_key not in context.calls:
        context.calls[full_key] = _traced_function(function, known, context)
    results = context.calls[full_key](traced, context.rng)
    return tuple(r.value if isinstance(r, Beside) else r for r in results)


def _traced_function(function: Function, known: Mapping[str, Any], context: Context) -> Any:
    """A jitted function over the traced operands."""

    def body(traced: dict[str, Any], rng: Any) -> list[Any]:
        results = evaluate(function.body, {**known, **traced}, replace(context, rng=rng))
        return [Beside(r) if is_known(r) else r for r in results]

    body.__name__ = function.name
    return jax.jit(body)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Beside:
    """A known value among the results of a jit: it passes beside the program and stays known."""

    value: Any


def _signature(value: Any) -> Any:
    """Known values as something hashable; None when they are large or hold graphs."""
    match value:
        case np.ndarray():
            if value.nbytes > 4096 or value.dtype.hasobject:
                return None
            return value.dtype, value.shape, value.tobytes()
        case list() | tuple() | dict():
            items = [*value, *value.values()] if isinstance(value, dict) else value
            parts = tuple(map(_signature, items))
            return None if any(p is None for p in parts) else parts
        case str() | int() | float() | bool() | None:
            return (type(value), value)
        case _:
            return None
