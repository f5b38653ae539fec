"""If, Loop, Scan and functions of the model, as functions inside of statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...eval.interpreter import FunctionCall
from ...ir.analysis import sources
from ...ir.graph import Graph, Node
from .calls import unsupported
from .code import EXTENT, FUNCTION, PARAM, Block, mark, references
from .emitter import Scope
from .types import fresh
from .values import Value, constant, extent, tuple_of


def _array(scope: Scope, value: Value) -> str:
    """The text of a value as an array."""
    return scope.emitter.array(value)


def _scalar(scope: Scope, value: Value) -> str:
    """The text of a value of one element as a scalar."""
    return f"{_array(scope, value)}.reshape(())" if value.rank != 0 else _array(scope, value)


def _result(scope: Scope, values: Sequence[Value]) -> str:
    texts = [_array(scope, v) for v in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts) if texts else "()"


def _state(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else tuple_of(texts) if texts else "()"


def _rows_text(scope: Scope, rows: Sequence[Value]) -> str:
    return _state([_array(scope, v) for v in rows]) if rows else "None"


def _merged(a: Value, b: Value) -> Value:
    """The type of a value that is one of two."""
    shape = a.shape if a.shape == b.shape else None
    return Value("", None, shape, a.dtype if a.dtype == b.dtype else None, False)


def if_(scope: Scope, node: Node) -> Sequence[Value]:
    """An If: the branch that is taken, where that is known, and otherwise ``lax.cond``."""
    condition = scope.values[node.inputs[0]]
    graphs = [scope.actual(node)[f"{name}_branch"] for name in ("then", "else")]
    if condition.known is not None and condition.known.size == 1 and condition.known.dtype != object:
        inner = scope.inner(graphs[0 if condition.known.item() else 1])
        inner._equal = scope._equal
        return inner.run()
    blocks, branches = [], []
    for name, graph in zip(("then_branch", "else_branch"), graphs, strict=True):
        block = Block(scope.emitter.reference(FUNCTION + name), name, "")
        inner = scope.inner(graph, statements=block.statements)
        branches.append(inner.run())
        block.result = _result(inner, branches[-1])
        blocks.append(block)
    if any(len(b) != len(node.outputs) for b in branches):
        raise unsupported(node, "its branches have other outputs than the node")
    then, other = (mark(b.reference) for b in blocks)
    types = [_merged(a, b) for a, b in zip(*branches, strict=True)]
    if condition.host:
        return scope.define(node, f"{then}() if {_array(scope, condition)} else {other}()", types, blocks)
    if any(None not in (a.rank, b.rank) and a.rank != b.rank for a, b in zip(*branches, strict=True)):
        raise unsupported(node, "its branches return values of different rank; give its condition to convert(static=)")
    origins = sources(scope.graph.nodes, node.inputs[:1]) if scope.graph.path == "" else set()
    scope.emitter.conditional[node.name] = [v.name for v in scope.graph.inputs if v.name in origins]
    return scope.define(node, f"lax.cond({_scalar(scope, condition)}, {then}, {other})", types, blocks)


def _check_body(node: Node, graph: Graph) -> None:
    if graph.draws:
        raise unsupported(node, "its body draws random numbers in each trip")


def _body(
    scope: Scope, graph: Graph, hint: str, formals: Sequence[tuple[str, Value]]
) -> tuple[Scope, Block, list[Value]]:
    """A body written for operands of given types: its scope, block and outputs."""
    block = Block(scope.emitter.reference(FUNCTION + hint), hint, "")
    inner = scope.inner(graph, statements=block.statements)
    for name, value in formals:
        inner.bind(name, value)
    return inner, block, inner.run()


def _same_type(a: Value, b: Value) -> bool:
    return a.dtype == b.dtype and a.shape is not None and a.shape == b.shape


def loop(scope: Scope, node: Node) -> Sequence[Value]:
    """A Loop: ``lax.scan`` over counted trips, ``lax.while_loop``, or a Python loop where the state changes type."""
    graph: Graph = scope.actual(node)["body"]
    _check_body(node, graph)
    trips, go, *initial = (scope.values[n] if n else None for n in (*node.inputs, *[""] * (2 - len(node.inputs))))
    states = [v for v in initial if v is not None]
    names = [v.name for v in graph.inputs]
    refs = [scope.emitter.reference(graph.key(n)) for n in names]
    rank = len(graph.inputs[1].shape or ()) if graph.inputs[1].shape else 0
    counter = Value(mark(refs[0]), None, (1,) * len(graph.inputs[0].shape or ()), np.dtype(np.int64))
    true = constant(np.ones((1,) * rank, bool))
    kept: dict[int, Value] = {}
    unknown: set[int] = set()
    while True:
        formals = [(names[0], counter), (names[1], true)]
        for i, (name, value) in enumerate(zip(names[2:], states, strict=True)):
            typed = fresh(value, refs[2 + i])
            typed = Value(typed.text, None, None if i in unknown else typed.shape, typed.dtype)
            formals.append((name, kept.get(i, typed)))
        inner, block, outputs = _body(scope, graph, "body", formals)
        test, new, rows = outputs[0], outputs[1 : 1 + len(states)], outputs[1 + len(states) :]
        same = {i for i, v in enumerate(new) if i not in kept and v.text and v.text == formals[2 + i][1].text}
        changed = {i for i, v in enumerate(new) if i not in kept and i not in unknown and not _same_type(v, states[i])}
        if not same and not changed:
            break
        kept |= {i: states[i] for i in same}
        unknown |= changed - same
    if go is None and (trips is None or any(names[1] in n.reads for n in graph.nodes if n.op_type != "Identity")):
        raise unsupported(node, "without a condition, its body reads one")
    counted = go is None or (test.known is not None and bool(test.known.all()))
    variant = [i for i in range(len(states)) if i not in kept]
    count = _trips(scope, trips) if trips is not None else None
    types = [_merged(states[i], new[i]) if i not in kept else states[i] for i in range(len(states))]
    own = [mark(refs[2 + i]) for i in variant]
    start = _state([_array(scope, states[i]) for i in variant])
    starts_true = go is None or (go.known is not None and bool(go.known.all()))
    if not counted or count is None or not starts_true:
        if rows:
            raise unsupported(node, "the number of its trips is computed from inputs, and so the extent of its outputs")
        if unknown:
            raise unsupported(node, "its state changes type, and its trips are counted as it runs")
        return _while(scope, node, inner, block, refs, own, variant, kept, states, test, new, count, trips, go, start)
    row_types = [Value("", None, None if v.shape is None or trips is None else _rows(trips, v), v.dtype) for v in rows]
    results = [new[i] for i in variant]
    block.formals = f"{own[0] if len(own) == 1 else mark(_STATE)}, {mark(refs[0])}"
    block.opening = () if len(own) == 1 else (f"{', '.join(own)} = {mark(_STATE)}",) if own else ()
    if unknown:
        return _unrolled(scope, node, inner, block, kept, states, results, rows, count, start, variant)
    block.result = f"{_state([_array(inner, v) for v in results])}, {_rows_text(inner, rows)}"
    return _defined(
        scope, node, f"lax.scan({mark(block.reference)}, {start}, np.arange({count}))", block, kept, states, variant,
        types, row_types,
    )  # fmt: skip


_STATE: Final = "state"


def _rows(trips: Value, row: Value) -> tuple[Any, ...]:
    assert trips.known is not None and row.shape is not None
    return (trips.known.reshape(-1)[0] if trips.is_extents else int(trips.known.reshape(-1)[0]), *row.shape)


def _trips(scope: Scope, trips: Value) -> str | None:
    """The number of trips as text; None where it is computed from inputs."""
    if trips.known is not None:
        return extent(trips.known.reshape(-1)[0])
    return f"int({_array(scope, trips)})" if trips.host else None


def _defined(
    scope: Scope, node: Node, text: str, block: Block, kept: Any, states: Any, variant: Any, types: Any, row_types: Any
) -> list[Value]:
    """The results of a scan, whose invariant states are those from outside."""
    n = len(states)

    def target(outputs: Sequence[str]) -> str:
        last = [outputs[i] for i in variant]
        rows = list(outputs[n:])
        return f"{_state(last) if last else '_'}, {_state(rows) if rows else '_'}"

    found = scope.define(node, text, [*types, *row_types], [block], target=target)
    return [kept.get(i, v) for i, v in enumerate(found)]


def _unrolled(
    scope: Scope, node: Node, inner: Scope, block: Block, kept: Any, states: Any, results: Any, rows: Any, count: str,
    start: str, variant: Any,
) -> list[Value]:  # fmt: skip
    """A loop in Python, whose state has another shape in each trip."""
    if rows:
        raise unsupported(node, "its state changes shape in each trip, beside outputs of each trip")
    block.result = _state([_array(inner, v) for v in results])
    types = [Value("", None, None, states[i].dtype) for i in range(len(states))]
    text = f"functools.reduce({mark(block.reference)}, np.arange({count}), {start})"

    def target(outputs: Sequence[str]) -> str:
        return ", ".join(outputs[i] for i in variant)

    found = scope.define(node, text, types, [block], target=target)
    return [kept.get(i, v) for i, v in enumerate(found)]


def _while(
    scope: Scope, node: Node, inner: Scope, block: Block, refs: Any, own: Any, variant: Any, kept: Any, states: Any,
    test: Value, new: Any, count: Any, trips: Any, go: Any, start: str,
) -> list[Value]:  # fmt: skip
    """A loop whose trips are counted as it runs."""
    i, more = mark(refs[0]), mark(refs[1])
    check = Block(scope.emitter.reference(FUNCTION + "keep_going"), "keep_going", mark(_STATE))
    limit = "" if trips is None else f"{i} < {count or _scalar(scope, trips)}"
    check.opening = (f"{', '.join([i, more, *own])} = {mark(_STATE)}",)
    check.result = f"{more} & ({limit})" if limit else more
    block.formals = mark(_STATE)
    block.opening = check.opening
    block.result = ", ".join([f"{i} + 1", _scalar(inner, test), *(_array(inner, new[k]) for k in variant)])
    first = "np.True_" if go is None else _scalar(scope, go)
    begin = ", ".join(["np.int64(0)", first, *([start[1:-1].rstrip(",")] if len(own) > 1 else [start] if own else [])])
    text = f"lax.while_loop({mark(check.reference)}, {mark(block.reference)}, ({begin}))"

    def target(outputs: Sequence[str]) -> str:
        return ", ".join(["_", "_", *(outputs[k] for k in variant)])

    types = [kept.get(k) or Value("", None, states[k].shape, states[k].dtype) for k in range(len(states))]
    found = scope.define(node, text, types, [check, block], target=target, wide=True)
    return [kept.get(k, v) for k, v in enumerate(found)]


def scan(scope: Scope, node: Node) -> Sequence[Value]:
    """A Scan: ``lax.scan`` over the first axes."""
    attributes = scope.actual(node)
    graph: Graph = attributes["body"]
    _check_body(node, graph)
    if node.opset < 9:
        raise unsupported(node, "Scan of opset 8 has a batch axis")
    count = attributes["num_scan_inputs"]
    values = [scope.values[n] for n in node.inputs]
    states, xs = values[: len(values) - count], values[len(values) - count :]
    names = [v.name for v in graph.inputs]
    refs = [scope.emitter.reference(graph.key(n)) for n in names]
    formals, scanned = [], []
    for name, ref, value in zip(names, refs, states, strict=False):
        formals.append((name, Value(mark(ref), None, value.shape, value.dtype)))
    axes = attributes.get("scan_input_axes") or (0,) * count
    back = attributes.get("scan_input_directions") or (0,) * count
    for name, ref, value, axis, flip in zip(names[len(states) :], refs[len(states) :], xs, axes, back, strict=True):
        shape = value.shape
        if shape is not None:
            shape = tuple(d for i, d in enumerate(shape) if i != axis % len(shape))
        formals.append((name, Value(mark(ref), None, shape, value.dtype)))
        text = _array(scope, value)
        text = text if axis == 0 else f"jnp.moveaxis({text}, {axis}, 0)"
        scanned.append(f"jnp.flip({text}, 0)" if flip else text)
    inner, block, outputs = _body(scope, graph, "body", formals)
    new, rows = outputs[: len(states)], outputs[len(states) :]
    if any(not _same_type(a, b) and None not in (a.shape, b.shape) for a, b in zip(states, new, strict=True)):
        raise unsupported(node, "its state changes type")
    own, each = [mark(r) for r in refs[: len(states)]], [mark(r) for r in refs[len(states) :]]
    one = own[0] if len(own) == 1 else mark(_STATE) if own else "_"
    element = each[0] if len(each) == 1 else mark("element")
    block.formals = f"{one}, {element}"
    block.opening = tuple(
        f"{', '.join(several)} = {mark(name)}"
        for several, name in ((own, _STATE), (each, "element"))
        if len(several) > 1
    )
    block.result = f"{_state([_array(inner, v) for v in new])}, {_rows_text(inner, rows)}"
    start = _state([_array(scope, v) for v in states]) if states else "None"
    if not states:
        block.result = block.result.replace("()", "None", 1)
    n = xs[0].shape[axes[0]] if xs and xs[0].shape is not None else None
    types = [Value("", None, v.shape, v.dtype) for v in states]
    row_types = [Value("", None, None if v.shape is None or n is None else (n, *v.shape), v.dtype) for v in rows]
    text = f"lax.scan({mark(block.reference)}, {start}, {_state(scanned)})"
    found = _defined(scope, node, text, block, {}, states, range(len(states)), types, row_types)
    out_axes = attributes.get("scan_output_axes") or (0,) * len(rows)
    out_back = attributes.get("scan_output_directions") or (0,) * len(rows)
    for k, (axis, flip) in enumerate(zip(out_axes, out_back, strict=True), len(states)):
        if axis or flip:
            value = found[k]
            text = f"jnp.flip({value.text}, 0)" if flip else value.text
            text = f"jnp.moveaxis({text}, 0, {axis})" if axis else text
            part = replace(node, outputs=(node.outputs[k],))
            found[k] = scope.define(part, text, [Value("", None, None, value.dtype)])[0]
    return found


def function(scope: Scope, node: Node, call: FunctionCall) -> Sequence[Value]:
    """A call of a function of the model, which stands at the top of the module."""
    target: Any = node.target
    body: Graph = target.body
    names = [v.name for v in body.inputs]
    operands = [scope.values[n] if n else None for n in node.inputs]
    operands += [None] * (len(names) - len(operands))
    block = Block(scope.emitter.reference(FUNCTION + node.op_type), node.op_type, "")
    values: dict[str, Value] = {}
    abstract: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    inner = Scope(scope.emitter, body, values, abstract, samples, block.statements, call, scope.rng)
    formals, arguments = [], []
    for name, value in zip(names, operands, strict=True):
        if value is None:
            values[name] = abstract[name] = samples[name] = None  # type: ignore[assignment]
        elif value.known is not None and not value.is_extents and value.known.size <= 16:
            inner.bind(name, value)
        else:
            formal = fresh(value, scope.emitter.reference(body.key(name)))
            inner.bind(name, formal)
            formals.append(formal.text)
            arguments.append(_array(scope, value))
    drew = scope.emitter.draws
    scope.emitter.draws = False
    results = inner.run()
    drawn, scope.emitter.draws = scope.emitter.draws, scope.emitter.draws or drew
    block.result = _result(inner, results)
    outside = sorted(r for r in block.reads() if r.startswith((PARAM, EXTENT)))
    extra = (["params"] if any(r.startswith(PARAM) for r in outside) else []) + (["rng"] if drawn else [])
    dims = [mark(r) for r in outside if r.startswith(EXTENT)]
    block.formals = ", ".join([*extra, *(f for f in formals if references(f)[0] in used(block)), *dims])
    arguments = [a for a, f in zip(arguments, formals, strict=True) if references(f)[0] in used(block)]
    if drawn:
        extra[extra.index("rng")] = scope.key(node)
    block = scope.emitter.function(block)
    types = [Value("", None, v.shape, v.dtype, v.host, "", v.sample) for v in results]
    text = f"{mark(block.reference)}({', '.join([*extra, *arguments, *dims])})"
    return scope.define(node, text, types)


def used(block: Block) -> set[str]:
    """References that the body of a block reads, its arguments included."""
    read = set(references(block.result))
    for statement in block.statements:
        read |= statement.reads()
    return read


def sequence_map(_: Scope, node: Node) -> Sequence[Value]:
    raise unsupported(node, "it maps a sequence")


FORMS: Final[Mapping[str, Callable[..., Sequence[Value]]]] = {
    "If": if_,
    "Loop": loop,
    "Scan": scan,
    "SequenceMap": sequence_map,
    FUNCTION: function,
}
"""Forms of operators with graphs inside, and of calls of the model's functions."""
