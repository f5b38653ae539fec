"""If, Loop, Scan and functions of the model, as functions inside of statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

import jax
import numpy as np

from ...eval.interpreter import FunctionCall
from ...ir.analysis import sources
from ...ir.graph import Graph, Node
from .calls import unsupported
from .code import EXTENT, FUNCTION, PARAM, Block, mark
from .emitter import Scope
from .values import Value, constant, extent, packed


def _merged(a: Value, b: Value) -> Value:
    """The type of a value that is one of two."""
    return Value(shape=a.shape if a.shape == b.shape else None, dtype=a.dtype if a.dtype == b.dtype else None)


def _differ(a: Value, b: Value) -> bool:
    """Whether two values are of different types in every call."""
    if None not in (a.dtype, b.dtype) and a.dtype != b.dtype:
        return True
    if a.shape is None or b.shape is None:
        return None not in (a.rank, b.rank) and a.rank != b.rank
    return len(a.shape) != len(b.shape) or any(map(_never_equal, a.shape, b.shape))


def _never_equal(m: Any, n: Any) -> bool:
    """Whether two extents, which may be symbols, differ in every call."""
    try:
        return m != n and bool(m > n or m < n)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def if_(scope: Scope, node: Node) -> Sequence[Value]:
    """An If: the branch that is taken, where that is known, and otherwise ``lax.cond``."""
    condition, emitter, attributes = scope.values[node.inputs[0]], scope.emitter, scope.actual(node)
    if condition.known is not None and condition.known.size == 1 and condition.known.dtype != object:
        inner = scope.inner(attributes["then_branch" if condition.known.item() else "else_branch"])
        inner._equal = scope._equal
        return inner.run()
    blocks, branches = [], []
    for name in ("then_branch", "else_branch"):
        block = Block(emitter.reference(FUNCTION + name), name, "")
        branches.append(scope.inner(attributes[name], statements=block.statements).run())
        block.result = _result(emitter.arrays(branches[-1]))
        blocks.append(block)
    if any(len(b) != len(node.outputs) for b in branches):
        raise unsupported(node, "its branches have other outputs than the node")
    then, other = (mark(b.reference) for b in blocks)
    types = [_merged(a, b) for a, b in zip(*branches, strict=True)]
    if condition.host:
        return scope.define(node, f"{then}() if {emitter.array(condition)} else {other}()", types, blocks)
    origins = sources(scope.graph.nodes, node.inputs[:1]) if scope.graph.path == "" else set()
    deciding = [v.name for v in scope.graph.inputs if v.name in origins]
    if any(map(_differ, *branches)):
        fixed = ", ".join(f"{n!r}: value" for n in deciding) or "..."
        what = "its branches return values of different shapes or dtypes"
        raise unsupported(node, f"{what}; fix its condition: convert(..., static={{{fixed}}})")
    emitter.conditional[node.name] = deciding
    text = f"lax.cond({emitter.scalar(condition)}, {then}, {other})"
    return scope.define(node, text, types, blocks, deciding=deciding)


def _result(texts: Sequence[str]) -> str:
    return ", ".join(texts) or "()"


def _same_type(a: Value, b: Value) -> bool:
    return a.dtype == b.dtype and a.shape is not None and a.shape == b.shape


def _is_true(value: Value) -> bool:
    return value.known is not None and bool(value.known.all())


_STATE: Final = mark("state")


class _Body:
    """The body of a Loop or Scan: a function from the states before a trip to those after it, and the trip's rows.

    Attributes:
        scope: of the node.
        emitter: of the module.
        node: the node.
        graph: the body.
        names: the marked names of the body's inputs.
        states: the values before the first trip.
        kept: those of them that no trip changes, by position.
        block: the function, once it is written.
    """

    block: Block

    def __init__(self, scope: Scope, node: Node, states: Sequence[Value]) -> None:
        self.scope, self.emitter, self.node, self.states = scope, scope.emitter, node, states
        self.graph: Graph = scope.actual(node)["body"]
        if self.graph.draws:
            raise unsupported(node, "its body draws random numbers in each trip")
        self.names = [mark(self.emitter.reference(self.graph.key(v.name))) for v in self.graph.inputs]
        self.kept: dict[int, Value] = {}

    @property
    def variant(self) -> list[int]:
        """Positions of the states that trips change."""
        return [i for i in range(len(self.states)) if i not in self.kept]

    @property
    def start(self) -> list[str]:
        """The texts of the states that trips change, before the first trip."""
        return [self.emitter.array(self.states[i]) for i in self.variant]

    @property
    def types(self) -> list[Value]:
        """The types of the states, which hold in each trip."""
        return [self.kept.get(i, Value(shape=v.shape, dtype=v.dtype)) for i, v in enumerate(self.states)]

    def write(self, formals: Sequence[Value]) -> list[Value]:
        """Write the function for inputs of given types; the body's outputs."""
        self.block = Block(self.emitter.reference(FUNCTION + "body"), "body", "")
        inner = self.scope.inner(self.graph, statements=self.block.statements)
        for value, formal in zip(self.graph.inputs, formals, strict=True):
            inner.bind(value.name, formal)
        return inner.run()

    def take(self, *arguments: tuple[Sequence[str], str]) -> None:
        """Set the function's arguments, each of which is one value, or a tuple that the function unpacks."""
        self.block.formals = ", ".join(names[0] if len(names) == 1 else whole for names, whole in arguments)
        unpacked = (f"{', '.join(names)} = {whole}" for names, whole in arguments if len(names) > 1)
        self.block.opening = tuple(unpacked)

    def define(
        self, text: str, types: Sequence[Value], target: Callable[[Sequence[str], Sequence[str]], str], *blocks: Block,
        wide: bool = False,
    ) -> list[Value]:  # fmt: skip
        """The node's values; ``target``: the left-hand side for the states that trips change, and for the rows."""

        def names(outputs: Sequence[str]) -> str:
            return target([outputs[i] for i in self.variant], outputs[len(self.states) :])

        values = self.scope.define(self.node, text, types, [*blocks, self.block], target=names, wide=wide)
        return [self.kept.get(i, v) for i, v in enumerate(values)]

    def scan(self, new: Sequence[Value], rows: Sequence[Value], xs: str, count: Any, empty: str = "()") -> list[Value]:
        """``lax.scan`` over ``xs``, of ``count`` elements if that is known; ``empty`` stands for no states."""
        self.block.result = f"{packed(self.emitter.arrays(new), empty)}, {packed(self.emitter.arrays(rows), 'None')}"
        shapes = [None if v.shape is None or count is None else (count, *v.shape) for v in rows]
        types = [*self.types, *(Value(shape=s, dtype=v.dtype) for s, v in zip(shapes, rows, strict=True))]
        text = f"lax.scan({mark(self.block.reference)}, {packed(self.start, empty)}, {xs})"
        return self.define(text, types, lambda states, rows: f"{packed(states, '_')}, {packed(rows, '_')}")


class _Loop(_Body):
    """A Loop: ``lax.scan`` over counted trips, ``lax.while_loop``, or a Python loop where the state changes type.

    Attributes:
        trips: the greatest number of trips; None if the node leaves it out.
        count: that number, an integer or an extent, where it is known.
        condition: the condition of the first trip; None if the node leaves it out.
        changing: positions of states whose type changes.
    """

    def __init__(self, scope: Scope, node: Node) -> None:
        operands = [scope.values[n] if n else None for n in node.inputs]
        self.trips, self.condition, *states = operands + [None] * (2 - len(operands))
        super().__init__(scope, node, [v for v in states if v is not None])
        self.count = self.trips.known.item(0) if self.trips and self.trips.known is not None else None
        self.changing: set[int] = set()

    def settled(self) -> tuple[Value, list[Value], list[Value]]:
        """Write the body for types that hold in each trip; its condition, states and rows."""
        step, go = ((1,) * len(v.shape or ()) for v in self.graph.inputs[:2])
        fixed = [Value(self.names[0], shape=step, dtype=np.dtype(np.int64)), constant(np.ones(go, bool))]
        while True:
            formals = [
                self.kept.get(i, Value(name, shape=None if i in self.changing else v.shape, dtype=v.dtype))
                for i, (name, v) in enumerate(zip(self.names[2:], self.states, strict=True))
            ]
            test, *outputs = self.write([*fixed, *formals])
            same = {i for i in self.variant if outputs[i].text and outputs[i].text == formals[i].text}
            changed = {i for i in self.variant if not _same_type(outputs[i], self.states[i])} - self.changing
            if not same and not changed:
                return test, outputs[: len(self.states)], outputs[len(self.states) :]
            self.kept |= {i: self.states[i] for i in same}
            self.changing |= changed - same

    def values(self) -> list[Value]:
        """The node's values."""
        test, new, rows = self.settled()
        name = self.graph.inputs[1].name
        reads = any(name in n.reads for n in self.graph.nodes if n.op_type != "Identity")
        if self.condition is None and (self.trips is None or reads):
            raise unsupported(self.node, "without a condition, its body reads one")
        new = [new[i] for i in self.variant]
        names = [self.names[2 + i] for i in self.variant]
        limit = extent(self.count) if self.count is not None else None
        if self.trips and self.trips.known is None and self.trips.host:
            limit = f"int({self.emitter.array(self.trips)})"
        if limit is None or not (self.condition is None or (_is_true(self.condition) and _is_true(test))):
            if rows:
                why = "the number of its trips is computed from inputs, and so the extent of its outputs"
                raise unsupported(self.node, why)
            if self.changing:
                raise unsupported(self.node, "its state changes type, and its trips are counted as it runs")
            return self.until(test, new, names, limit)
        self.take((names, _STATE), (self.names[:1], ""))
        if not self.changing:
            return self.scan(new, rows, f"np.arange({limit})", self.count)
        if rows:
            raise unsupported(self.node, "its state changes shape in each trip, beside outputs of each trip")
        return self.unrolled(new, limit)

    def unrolled(self, new: Sequence[Value], limit: str) -> list[Value]:
        """A loop in Python, whose state has another shape in each trip."""
        self.block.result = packed(self.emitter.arrays(new))
        types = [Value(dtype=v.dtype) for v in self.states]
        text = f"functools.reduce({mark(self.block.reference)}, np.arange({limit}), {packed(self.start)})"
        return self.define(text, types, lambda states, _: ", ".join(states))

    def until(self, test: Value, new: Sequence[Value], names: Sequence[str], limit: str | None) -> list[Value]:
        """A loop whose trips are counted as it runs."""
        step, more = self.names[:2]
        self.take(([step, more, *names], _STATE))
        self.block.result = ", ".join([f"{step} + 1", self.emitter.scalar(test), *self.emitter.arrays(new)])
        goes_on = f"{more} & ({step} < {limit or self.emitter.scalar(self.trips)})" if self.trips else more
        reference = self.emitter.reference(FUNCTION + "keep_going")
        check = Block(reference, "keep_going", self.block.formals, [], goes_on, self.block.opening)
        first = self.emitter.scalar(self.condition) if self.condition else "np.True_"
        begin = ", ".join(["np.int64(0)", first, *self.start])
        text = f"lax.while_loop({mark(reference)}, {mark(self.block.reference)}, ({begin}))"
        return self.define(text, self.types, lambda states, _: ", ".join(["_", "_", *states]), check, wide=True)


def scan(scope: Scope, node: Node) -> Sequence[Value]:
    """A Scan: ``lax.scan`` over the first axes."""
    if node.opset < 9:
        raise unsupported(node, "Scan of opset 8 has a batch axis")
    attributes = scope.actual(node)
    count = attributes["num_scan_inputs"]
    values = [scope.values[n] for n in node.inputs]
    states, xs = values[: len(values) - count], values[len(values) - count :]
    axes = attributes.get("scan_input_axes") or (0,) * count
    back = attributes.get("scan_input_directions") or (0,) * count
    body = _Body(scope, node, states)
    shapes, scanned = [v.shape for v in states], []
    for value, axis, flip in zip(xs, axes, back, strict=True):
        shape, text = value.shape, scope.emitter.array(value)
        shapes.append(shape if shape is None else tuple(d for i, d in enumerate(shape) if i != axis % len(shape)))
        text = f"jnp.moveaxis({text}, {axis}, 0)" if axis else text
        scanned.append(f"jnp.flip({text}, 0)" if flip else text)
    outputs = body.write([Value(n, None, s, v.dtype) for n, s, v in zip(body.names, shapes, values, strict=True)])
    new, rows = outputs[: len(states)], outputs[len(states) :]
    if any(not _same_type(a, b) and None not in (a.shape, b.shape) for a, b in zip(states, new, strict=True)):
        raise unsupported(node, "its state changes type")
    body.take((body.names[: len(states)], _STATE if states else "_"), (body.names[len(states) :], mark("element")))
    length = xs[0].shape[axes[0]] if xs and xs[0].shape is not None else None
    results = body.scan(new, rows, packed(scanned), length, "None")
    out_axes = attributes.get("scan_output_axes") or (0,) * len(rows)
    out_back = attributes.get("scan_output_directions") or (0,) * len(rows)
    for k, (axis, flip) in enumerate(zip(out_axes, out_back, strict=True), len(states)):
        if axis or flip:
            text = f"jnp.flip({results[k].text}, 0)" if flip else results[k].text
            text = f"jnp.moveaxis({text}, 0, {axis})" if axis else text
            part = replace(node, outputs=(node.outputs[k],))
            (results[k],) = scope.define(part, text, [Value(dtype=results[k].dtype)])
    return results


def function(scope: Scope, node: Node, call: FunctionCall) -> Sequence[Value]:
    """A call of a function of the model, which stands at the top of the module."""
    target: Any = node.target
    body: Graph = target.body
    emitter = scope.emitter
    block = Block(emitter.reference(FUNCTION + node.op_type), node.op_type, "")
    inner = Scope(emitter, body, {}, {}, block.statements, call, scope.rng)
    arguments: dict[str, str] = {}
    for formal, name in zip_longest((v.name for v in body.inputs), node.inputs, fillvalue=""):
        value = scope.values[name] if name else None
        if value is None:
            inner.values[formal] = inner.abstract[formal] = None  # type: ignore[assignment]
        elif value.known is not None and not value.is_extents and value.known.size <= 16:
            inner.bind(formal, value)
        else:
            reference = emitter.reference(body.key(formal))
            inner.bind(formal, replace(value, text=mark(reference), known=None))
            arguments[reference] = emitter.array(value)
    drew, emitter.draws = emitter.draws, False
    results = inner.run()
    drawn, emitter.draws = emitter.draws, emitter.draws or drew
    block.result = _result(emitter.arrays(results))
    outside = sorted(r for r in block.reads() if r.startswith((PARAM, EXTENT)))
    extra = (["params"] if any(r.startswith(PARAM) for r in outside) else []) + (["rng"] if drawn else [])
    dims = [mark(r) for r in outside if r.startswith(EXTENT)]
    arguments = {r: text for r, text in arguments.items() if r in block.used}
    block.formals = ", ".join([*extra, *map(mark, arguments), *dims])
    if drawn:
        extra[-1] = scope.key(node)
    block = emitter.function(block)
    text = f"{mark(block.reference)}({', '.join([*extra, *arguments.values(), *dims])})"
    return scope.define(node, text, results)


def sequence_map(_: Scope, node: Node) -> Sequence[Value]:
    raise unsupported(node, "it maps a sequence")


FORMS: Final[Mapping[str, Callable[..., Sequence[Value]]]] = {
    "If": if_,
    "Loop": lambda scope, node: _Loop(scope, node).values(),
    "Scan": scan,
    "SequenceMap": sequence_map,
    FUNCTION: function,
}
"""Forms of operators with graphs inside, and of calls of the model's functions."""
