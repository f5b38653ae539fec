"""A graph computed in bfloat16 or float16: which of its float32 values become that type, and where they are cast.

The decision is an analysis of the graph, stored on its nodes as ``Node.casts``, not a rule of the evaluation loop: to
keep positions in float32 one has to know, at the node that makes them, that a cosine reads them later. Nodes keep their
names and operators, and no Cast nodes are inserted, so whatever looks for patterns in a graph (plans of sharding, KV
caches, adapters, reports) finds them as before. The casts depend on the types that arrive: integers, booleans,
strings and float64 are never touched, and inputs may come in either type.

Three passes over the nodes:

1. Forward: which values are *active*, that is, computed from a product (a node whose operator has the trait
   ``product``) or from a row of a table of embeddings. A table of integers has positions or ids, and is exact.
2. Backward: what the readers of a value *need*. Cosines, casts to integers and shapes need it exact; powers, norms,
   softmax and losses (the trait ``wide``, see ops/registry.py) need float32, and so do the model's outputs. All
   readers have to agree, and of a value in memory, which several nodes read, a wide node gets the rounded one: a
   residual stream, which a norm and the next addition read, is of the compute dtype.
3. Forward: the *kind* of each value, the greatest of its operands' unless the operator or the readers decide otherwise.

A node that the caller pins reads and returns float32, and what it reads is not rounded where no other node needs that.
A product reads the compute dtype and accumulates in float32. Whatever else has a float32 operand computes in float32
and is rounded once, at its end; what several wide nodes compute in turn, such as a norm, where a product reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np

from ..errors import UnsupportedError
from ..ops.description import MOVES
from ..proto.mapped import load
from ..proto.types import TensorType, ValueInfo, to_dtype
from . import analysis
from .casts import NARROWER, WIDE, Casts
from .graph import Function, Graph, Node, with_graphs
from .widening import widened, widened_parameters, with_own_outputs

VIEWS: Final = frozenset(MOVES[""].split()) - {"Gather"}
"""Operators that only move data: a weight behind them is still a weight."""

TABLE_ROWS: Final = 64
"""Rows of a table that are read at a time: the first of them tell that it has embeddings."""


class Kind(IntEnum):
    """What a value is; values of all kinds but NARROW are float32."""

    CONSTANT = 0
    """Computed from parameters and constants alone."""
    GIVEN = 1
    """Computed from inputs without a product: positions, masks, images."""
    NARROW = 2
    """In the compute dtype."""
    LONG = 3
    """Computed from narrow values in float32, and not rounded yet."""


class Need(IntEnum):
    """What all the readers of a value need."""

    ANY = 0
    WIDE = 1
    """Its one reader computes in float32."""
    OUTPUT = 2
    """Only outputs of the model are computed from it, by no further product."""
    EXACT = 3


Needs = dict[str, Need]


def computed_in(graph: Graph, dtype: Any) -> Graph:
    """The main graph with its nodes' casts, for computing in bfloat16, float16, float32 or float64.

    Raises:
        UnsupportedError: nodes of the graph differentiate other nodes, or a node cannot be computed in the type.
    """
    if graph.differentiates:
        text = "nodes of the graph differentiate other nodes, which stays in the file's types: leave out dtype="
        raise UnsupportedError(text)
    if dtype in NARROWER:
        return widened(graph, dtype)
    return _Narrowing(np.dtype(dtype)).of(graph, {v.name: Kind.GIVEN for v in graph.inputs}, frozenset(), None)[0]


def parameters_in(graph: Graph, dtype: Any) -> frozenset[str]:
    """The parameters, by Graph.key, that such a graph stores in ``dtype`` although the file has another type."""
    return widened_parameters(graph, dtype) if dtype in NARROWER else narrow_parameters(graph)


def pinned(graph: Graph, names: Collection[str], dtype: Any) -> Graph:
    """The graph with nodes that ``computed_in`` keeps in float32, by name, with all that is inside them."""
    casts = Casts(np.dtype(dtype), WIDE, WIDE, pinned=True)

    def inside(body: Graph) -> Graph:
        return replace(body, nodes=tuple(map(pin, body.nodes)))

    def pin(node: Node) -> Node:
        target, attributes = node.target, with_graphs(node.attributes, inside)
        if isinstance(target, Function):
            target = replace(target, body=inside(target.body))
        return replace(node, target=target, attributes=attributes, casts=casts)

    return replace(graph, nodes=tuple(pin(node) if node.name in names else node for node in graph.nodes))


def _is_pinned(node: Node) -> bool:
    return node.casts is not None and node.casts.pinned


def narrow_parameters(graph: Graph) -> frozenset[str]:
    """The parameters, by Graph.key, that nothing reads in float32: they are stored in the compute dtype."""
    narrow, wide, nothing = set[str](), set[str](), frozenset[str]()

    def visit(graph: Graph, outside: Mapping[str, frozenset[str]]) -> list[frozenset[str]]:
        """The initializers that outputs of a graph are views of; ``outside`` says it of inputs and captures."""
        views = {**outside, **{n: frozenset((graph.key(n),)) for n in graph.initializers}}
        for node in graph.nodes:
            casts, keys_of = node.casts, {i: views[n] for i, n in enumerate(node.inputs) if n in views}
            if isinstance(node.target, Function):
                formals = {f: views[n] for f, n in _formals(node) if n in views}
                views |= dict(zip(node.outputs, visit(node.target.body, formals), strict=False))
                continue
            for body in node.graphs:
                wide.update(*visit(body, views))
            if node.op_type in VIEWS and casts is None:
                views |= dict.fromkeys(node.outputs, nothing.union(*keys_of.values()))
                continue
            for i, keys in keys_of.items():
                reads_narrow = casts is not None and casts.operand == casts.dtype and i not in casts.kept
                looks_up = node.op_type == "Gather" and i == 0 and casts is not None and casts.operand is None
                (narrow if reads_narrow or looks_up else wide).update(keys)
        results = [views.get(v.name, nothing) for v in graph.outputs]
        if graph.path == "":
            wide.update(*results)
        return results

    visit(graph, {})
    stored = {n: v for n, v in analysis.parameters(graph).items() if v.dtype == WIDE and v.size > 1}
    return frozenset((narrow - wide) & stored.keys())


def _is_wide(node: Node) -> bool:
    """Whether a node computes in float32: by its operator, or as a square, which leaves the range of float16 at 256."""
    squares = node.op_type == "Mul" and len(set(node.inputs)) == 1
    return squares or node.operator.wide


def _values(node: Node) -> Iterator[tuple[int, str]]:
    """The operands whose values flow into the results: not those that decide shapes, or of which only shapes count."""
    operator = node.operator
    for i, name in enumerate(node.inputs):
        if name and operator.parameter(i) not in operator.static | operator.shaped:
            yield i, name


def _exact(node: Node) -> frozenset[int]:
    """Positions of the operands that must not be rounded."""
    to = node.attributes.get("to", 0) if (node.domain, node.op_type) == ("", "Cast") else 0
    if isinstance(to, int) and to and to_dtype(to).kind in "biuO":
        return frozenset((0,))
    names = {*node.operator.static, *node.operator.shaped, *node.operator.exact}
    return frozenset(i for i in range(len(node.inputs)) if node.operator.parameter(i) in names)


@dataclass
class _Narrowing:
    """The analysis of a graph and of the graphs and functions inside it."""

    dtype: np.dtype
    _active: dict[Any, frozenset[str]] = field(default_factory=dict)
    _functions: dict[Any, tuple[Function, list[Kind]]] = field(default_factory=dict)

    def active(self, graph: Graph, sources: frozenset[str]) -> frozenset[str]:
        """The active values of a graph; ``sources`` are those among its inputs and captures."""
        key = graph, sources & (graph.captures | {v.name for v in graph.inputs})
        if key not in self._active:
            reached = set(sources)
            for node in graph.nodes:
                reached.update(self._active_outputs(node, reached, graph.initializers))
            self._active[key] = frozenset(reached)
        return self._active[key]

    def _active_outputs(self, node: Node, active: Iterable[str], constants: Mapping[str, Any]) -> Iterable[str]:
        reads = {n for _, n in _values(node)}.union(node.captures)
        if isinstance(node.target, Function):
            body = node.target.body
            inside = self.active(body, frozenset(f for f, n in _formals(node) if n in active))
            return [o for o, v in zip(node.outputs, body.outputs, strict=False) if v.name in inside]
        multiplies = any(n.operator.product for g in node.graphs for inner in g.walk() for n in inner.nodes)
        starts = node.operator.product or multiplies or _is_lookup(node, constants, self.dtype)
        is_active = starts or not reads.isdisjoint(active)
        return node.outputs if is_active else ()

    def needs(self, graph: Graph, sources: frozenset[str], needs: Needs) -> Needs:
        """What the readers of each value need, given those of the outputs."""
        active, needs = self.active(graph, sources), dict(needs)
        readers = Counter(name for node in graph.nodes for name in {*node.reads})
        for node in reversed(graph.nodes):
            for name in node.outputs:  # with one reader it is fused into that; with several it is materialised
                if needs.get(name) == Need.WIDE and readers[name] > 1:
                    needs[name] = Need.ANY
            for name, need in self._operand_needs(node, active, needs):
                needs[name] = min(needs.get(name, Need.EXACT), need)
        return needs

    def _operand_needs(self, node: Node, active: frozenset[str], needs: Needs) -> Iterator[tuple[str, Need]]:
        exact = _exact(node)
        yield from ((node.inputs[i], Need.EXACT) for i in exact if node.inputs[i])
        yield from ((n, Need.ANY) for n in node.captures)
        if isinstance(node.target, Function):
            body = node.target.body
            wanted = {v.name: needs.get(o, Need.EXACT) for o, v in zip(node.outputs, body.outputs, strict=False)}
            inside = self.needs(body, frozenset(f for f, n in _formals(node) if n in active), wanted)
            yield from ((n, inside.get(f, Need.EXACT)) for f, n in _formals(node))
            return
        names = [n for i, n in _values(node) if i not in exact]
        wanted_here, need = self._wanted(node, needs), Need.ANY
        if _is_pinned(node):
            need = Need.OUTPUT
        elif node.operator.product:
            first = active.isdisjoint(n for _, n in _values(node))
            if first and wanted_here == Need.EXACT:
                need = wanted_here
        elif not node.graphs:
            need = max(wanted_here, Need.WIDE) if _is_wide(node) else wanted_here
        yield from ((n, need) for n in names)

    def _wanted(self, node: Node, needs: Needs) -> Need:
        return min((needs.get(o, Need.EXACT) for o in node.outputs if o), default=Need.EXACT)

    def of(
        self, graph: Graph, kinds: Mapping[str, Kind], active: frozenset[str], wanted: Needs | None
    ) -> tuple[Graph, list[Kind]]:
        """A graph with casts, and the kinds of its outputs.

        Args:
            graph: the main graph, one inside a node, or the body of a function.
            kinds: of its inputs and captures.
            active: those of them that are active.
            wanted: what the readers of a function's outputs need; None for outputs that have a type of their own,
                which is float32 unless the main graph declares them in the compute dtype.
        """
        declared = {v.name: self._declared(v) for v in graph.outputs} if wanted is None else {}
        if wanted is None:
            wanted = {n: Need.ANY if kind == Kind.NARROW else Need.OUTPUT for n, kind in declared.items()}
        needs = self.needs(graph, active, wanted)
        activity = self.active(graph, active)
        kinds = {**kinds, **dict.fromkeys(graph.initializers, Kind.CONSTANT), "": Kind.CONSTANT}
        products = [n for n in graph.nodes if n.operator.product and not _is_pinned(n)]
        multiplied = {n for node in products for i, n in _values(node) if i not in _exact(node)}
        multiplied.difference_update(n for node in graph.nodes if _is_pinned(node) for n in node.inputs)
        nodes = []
        for node in graph.nodes:
            new, kind = self._node(node, graph, kinds, activity, needs)
            if kind == Kind.LONG and not _is_pinned(node) and not multiplied.isdisjoint(node.outputs):
                kind = Kind.NARROW
            forced = [declared[o] for o in node.outputs if o in declared]
            if forced and (kind >= Kind.NARROW or (kind == Kind.GIVEN and min(forced) == Kind.NARROW)):
                kind = min(forced)
            nodes.append(replace(new, casts=self._casts(new, kind, kinds, graph.initializers)))
            kinds.update(dict.fromkeys(filter(None, node.outputs), kind))
        return replace(graph, nodes=tuple(nodes)), [kinds[v.name] for v in graph.outputs]

    def _declared(self, output: ValueInfo) -> Kind:
        narrow = isinstance(output.type, TensorType) and output.type.dtype == self.dtype
        return Kind.NARROW if narrow else Kind.LONG

    def _node(
        self, node: Node, graph: Graph, kinds: Mapping[str, Kind], active: frozenset[str], needs: Needs
    ) -> tuple[Node, Kind]:
        """The node with what is inside it narrowed, and the kind of its results."""
        names = [n for i, n in _values(node)]
        kind = max((kinds[n] for n in (*names, *node.captures)), default=Kind.CONSTANT)
        if isinstance(node.target, Function):
            function, results = self._function(node, kinds, active, needs)
            return replace(node, target=function), max(results, default=kind)
        if node.graphs:
            inside = []

            def narrow(body: Graph) -> Graph:
                # States are float32: they may be sums over all trips.
                formals = {v.name: max(kind, Kind.LONG) if kind > Kind.GIVEN else kind for v in body.inputs}
                reached = frozenset(active | {f for f in formals if kind > Kind.GIVEN})
                new, results = self.of(with_own_outputs(body, node.opset), {**kinds, **formals}, reached, None)
                inside.extend(results)
                return new

            attributes = with_graphs(node.attributes, narrow)
            result = max((kind, *inside))
            return replace(node, attributes=attributes), Kind.LONG if result > Kind.GIVEN else result
        if _is_pinned(node):
            return node, kind if kind == Kind.CONSTANT else Kind.LONG
        wanted = self._wanted(node, needs)
        if node.operator.product:
            if kind == Kind.CONSTANT or (wanted == Need.EXACT and kind == Kind.GIVEN and active.isdisjoint(names)):
                return node, kind
            return node, Kind.LONG if wanted >= Need.OUTPUT else Kind.NARROW
        if _is_lookup(node, graph.initializers, self.dtype) and kind == Kind.GIVEN:
            exact = wanted == Need.EXACT or _is_only_subtracted(graph, node.outputs[0])
            return node, kind if exact else Kind.NARROW
        if kind == Kind.NARROW and (wanted >= Need.WIDE or _is_wide(node)):
            kind = Kind.LONG
        return node, kind

    def _function(
        self, node: Node, kinds: Mapping[str, Kind], active: frozenset[str], needs: Needs
    ) -> tuple[Function, list[Kind]]:
        function: Any = node.target
        operand_kinds = {f: kinds[n] for f, n in _formals(node)}
        reached = frozenset(f for f, n in _formals(node) if n in active)
        outputs = zip(node.outputs, function.body.outputs, strict=False)
        wanted = {v.name: needs.get(o, Need.EXACT) for o, v in outputs}
        key = function, tuple(operand_kinds.items()), reached, tuple(wanted.items())
        if key not in self._functions:
            formals = {v.name: operand_kinds.get(v.name, Kind.CONSTANT) for v in function.body.inputs}
            body, results = self.of(function.body, formals, reached, wanted)
            self._functions[key] = replace(function, body=body), results
        return self._functions[key]

    def _casts(self, node: Node, kind: Kind, kinds: Mapping[str, Kind], weights: Mapping[str, Any]) -> Casts | None:
        if kind == Kind.CONSTANT and not _is_pinned(node):
            return None
        narrow, kept = self.dtype, frozenset[int]() if _is_wide(node) else _exact(node)
        result = narrow if kind == Kind.NARROW else WIDE
        if _is_pinned(node):
            return Casts(narrow, WIDE, result, kept, pinned=True)
        unrounded = {i: n for i, n in _values(node) if kinds[n] <= Kind.GIVEN and i not in kept}
        if node.operator.product and kind >= Kind.NARROW:
            return Casts(narrow, narrow, result, kept, frozenset(i for i, n in unrounded.items() if n not in weights))
        if kind == Kind.NARROW and not node.graphs:
            return Casts(narrow, None, narrow, kept, frozenset(unrounded if node.operator.broadcasts else ()))
        return Casts(narrow, WIDE, result, kept)


def _formals(node: Node) -> list[tuple[str, str]]:
    """The inputs of a function that a node calls, with what it passes."""
    function: Any = node.target
    return [(v.name, n) for v, n in zip(function.body.inputs, node.inputs, strict=False) if n]


def _is_lookup(node: Node, constants: Mapping[str, Any], dtype: np.dtype) -> bool:
    """Whether a node takes rows of a table of embeddings, that is, of anything but integers that ``dtype`` rounds.

    bfloat16 has no 257: as a position or an id it would be another one.

    Args:
        node: any node of a graph.
        constants: the graph's initializers, by name.
        dtype: the compute dtype.
    """
    table: Any = constants.get(node.inputs[0]) if node.op_type == "Gather" else None
    if getattr(table, "ndim", 0) < 2:
        return False
    rounds = False
    for i in range(0, len(table) if table.dtype == WIDE else 0, TABLE_ROWS):
        rows = load(table[i : i + TABLE_ROWS])
        if np.any(np.trunc(rows) != rows):
            return True
        with np.errstate(over="ignore"):
            rounds = rounds or bool(np.any(rows.astype(dtype) != rows))
    return not rounds


def _is_only_subtracted(graph: Graph, name: str) -> bool:
    """Whether subtractions alone read a value, or views of it: a difference of rounded operands may be all error."""
    readers = [node for node in graph.nodes if name in node.reads]
    return bool(readers) and all(
        node.op_type == "Sub" or (node.op_type in VIEWS and _is_only_subtracted(graph, node.outputs[0]))
        for node in readers
    )
