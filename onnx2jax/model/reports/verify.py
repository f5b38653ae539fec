"""Compares a model with another implementation of ONNX, and finds the node that differs.

Outputs are compared first. If they differ, or on request, every node of the main graph runs on the other
implementation's operands, all in one program: this separates a wrong node from its consumers, and rounding errors do
not accumulate. In the body of a loop or branch the search continues call by call. In a quantised graph, a number
between two steps is rounded up here and down there, and the outputs part although every node is right.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ... import progress
from ...errors import InputNameError, InputValueError, UnsupportedError, did_you_mean
from ...eval.values import to_host
from ...ir import analysis
from ...ir.casts import NARROWER
from ...ir.graph import Graph, Node, ancestors, descendants
from ...proto.types import ValueInfo, to_value_info
from ...runtime.specialise import is_small
from ..changes.parts import node_outputs, with_graph
from .comparison import Comparison, Difference, Verification, compared, described, magnitude
from .explanations import CLASSIFIERS, SATURATES, SCALES, TIED, amplified, distances, in_double, tied, unsaturated
from .peers import NAMES, InnerGraph, Peer, calls, step_into
from .sample_inputs import sample_extents, sample_inputs
from .samples import data_sets, in_types, read_values

COMPARABLE: Final = 10
"""Relative errors up to so many times smaller than the largest are as wrong: the first node of them is reported."""
OPTIMISED: Final = "the test data are from onnxruntime, whose optimisations or threads change this"
OURS: Final = "/ours"
ROUNDING: Final = re.compile(r"QuantizeLinear|DynamicQuantizeLinear|QLinear\w+|QGemm|QAttention|QOrdered\w+")
"""Operators that round sums of floats to integers."""
AMPLIFIES: Final = "roundings inside the node amplify the last digits of its operands"
ROUNDED_ONCE: Final = {"Add", "Sub", "Mul"}
"""Operators whose results are exact but for their own last digit, even where large operands cancel."""
PRODUCTS: Final = {"Mul", "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"}


def verify(
    model: Any,
    inputs: Mapping[str, Any] | None,
    against: str | os.PathLike[str] | None,
    each_node: bool,
    rtol: float | None,
    atol: float | None,
    seed: int,
) -> Verification:
    """See ``Model.verify``."""
    _check(model)
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise InputValueError(f"{name} is {tolerance!r}; it is a finite number, 0 or more")
    folder = None if inputs is not None else model.origin.open().files.folder
    sets = data_sets(folder) if folder is not None else []
    recorded = against is None and bool(sets)
    if against is None:
        against = str(folder) if recorded else NAMES[0]
    elif os.path.isdir(against) and str(against) not in NAMES:
        sets, recorded = data_sets(against), True
        if not sets:
            raise FileNotFoundError(f"{str(against)!r} has no test data: no input_0.pb, and no test_data_set_0")
    if not recorded and against not in NAMES:
        valid = f"{' or '.join(map(repr, NAMES))}, or a folder of test data"
        raise InputNameError(f"against is {str(against)!r}; pass {valid}{did_you_mean(str(against), NAMES)}")
    if inputs is not None:
        sets = sets[:1]
    feeds_of_sets: dict[str, tuple[dict[str, Any], Path | None]] = {}
    # in the order of the file, which is the order of test data
    required = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    for data_set in sets:
        feeds = read_values(data_set, "input", required) if inputs is None else dict(inputs)
        feeds_of_sets[data_set.name] = feeds, data_set if recorded else None
    if not sets:
        feeds = sample_inputs(model, {}, seed, sample_extents(model, {})) if inputs is None else dict(inputs)
        feeds_of_sets["inputs"] = feeds, None
    limits = {"rtol": rtol, "atol": atol, "dtype": model.settings.dtype}
    with progress.stage(f"comparing with {against}"):
        return _Verifier(model, str(against), each_node, limits).run(feeds_of_sets)


def _check(model: Any) -> None:
    if model.origin is None:
        raise UnsupportedError("the model was not created by onnx2jax.convert: there is no file to compare it with")
    if model.spec.max_size or model.spec.groups:
        raise UnsupportedError(
            "a model converted with max_size= or rebatch= computes something else than its file: verify it without them"
        )


def in_types_of_file(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with tensors as NumPy arrays of the types in the file, which other implementations require."""
    return in_types(feeds, (*model.inputs, *map(to_value_info, model.origin.open().message.graph.input)))


@dataclass(frozen=True)
class _ComparedGraph:
    """A graph in both implementations: each node of ours reads the other's values.

    Attributes:
        graph: a main graph, or the inner one to which ``steps`` lead.
        steps: see ``Peer``.
        scope: the graph's inputs, outer values that it reads, and the other's results, by name.
        ours: our results by name.
        nodes: their comparisons.
    """

    graph: Graph
    steps: tuple[InnerGraph, ...]
    scope: Mapping[str, Any]
    ours: Mapping[str, Any]
    nodes: Sequence[Comparison]


class _Verifier:
    """One verification of a model against another implementation or test data."""

    def __init__(self, model: Any, against: str, each_node: bool, limits: Mapping[str, Any]) -> None:
        self.model, self.against, self.each_node, self.limits = model, against, each_node, limits
        self.peer = against if against in NAMES else NAMES[0]
        self.notes: list[str] = []
        self.saturated: set[str] = set()
        self.drawn = {n for node in model.graph.nodes if _draws(node) for n in node.outputs}
        self.random = self.drawn | {n for node in descendants(model.graph.nodes, self.drawn) for n in node.outputs}
        if self.random:
            self.notes.append("random numbers, and what is computed from them, are compared by type and shape only")

    def run(self, feeds_of_sets: Mapping[str, tuple[dict[str, Any], Path | None]]) -> Verification:
        """The verification for some sets of inputs, by name, with the folder of the outputs if these are recorded."""
        outputs: dict[str, list[Comparison]] = {}
        nodes: dict[str, list[Comparison]] = {}
        first: Difference | None = None
        whole = None if self.against not in NAMES else Peer(self.peer, self.model)
        producers, names = self.model.graph.producers, [v.name for v in self.model.outputs]
        for title, (inputs, folder) in feeds_of_sets.items():
            feeds = {n: v for n, v in inputs.items() if n not in self.model.static}
            if self.model.settings.dtype in NARROWER:  # both read the numbers of the file's types
                feeds = in_types_of_file(self.model, feeds)
            ours = dict(zip(names, self.model.run(None, feeds), strict=True))
            feeds = in_types_of_file(self.model, feeds) | self.model.static
            if whole is not None:
                theirs = whole.run(feeds)
            else:
                theirs = read_values(folder, "output", self.model.outputs) if folder is not None else {}
            outputs[title] = [
                self._compared(producers.get(n), n, ours[n], theirs[n], self.random) for n in names if n in theirs
            ]
            if self.each_node or not all(c.ok for c in outputs[title]):
                try:
                    nodes[title], difference, reasons = self._by_node(feeds, outputs[title])
                    if whole is None and reasons:
                        reasons = self._recorded_reasons(reasons, feeds, theirs)
                    outputs[title] = [reasons.get(c.value, c) for c in outputs[title]]
                except (UnsupportedError, ImportError) as e:
                    if whole is not None and self.each_node:
                        raise
                    self.notes.append(f"which node differs could not be found: {e}")
                    continue
                first = first or difference
        return Verification(self.against, outputs, nodes, first, self.notes)

    def _compared(self, node: Node | None, name: str, ours: Any, theirs: Any, drawn: Any, **how: Any) -> Comparison:
        """The comparison of a node's output, by type and shape only if it is drawn."""
        return compared(name, ours, theirs, only_types=name in drawn, node=str(node or ""), **self.limits, **how)

    def _by_node(
        self, feeds: Mapping[str, Any], outputs: Sequence[Comparison]
    ) -> tuple[list[Comparison], Difference | None, dict[str, Comparison]]:
        """Comparisons of the main graph's nodes on the other's operands, the difference, and outputs it explains."""
        run = self._node_by_node(self.model.graph, feeds)
        first, scope = self._first(run), run.scope
        nodes = [replace(c, ok=True, why=SATURATES) if not c.ok and c.value in self.saturated else c for c in run.nodes]
        if first is not None or run.graph.differentiates or all(c.ok for c in outputs):
            return nodes, first, {}
        inputs = {n: v for n, v in feeds.items() if n not in self.model.static}
        values = {n: to_host(v) for n, v in self.model.values(**inputs).items()}
        reasons = self._reasons(values, scope, outputs)
        left = [c for c in outputs if not c.ok and c.value not in reasons]
        if told := [c.value for c in left if c.value in values and c.value in scope]:
            exact = in_double(self.model, inputs)
            texts = {n: distances(exact.get(n), values[n], scope[n]) for n in told}
            self.notes.extend(f"{n!r}: {text}" for n, text in texts.items() if text)
        return nodes, self._accumulated(replace(run, ours=values)) if left else None, reasons

    def _reasons(
        self, ours: Mapping[str, Any], theirs: Mapping[str, Any], outputs: Sequence[Comparison]
    ) -> dict[str, Comparison]:
        """The outputs that differ although no node does, where roundings explain it."""
        reasons: dict[str, Comparison] = {}
        values = self._values(self.model.graph, theirs)
        for c in outputs:
            if c.ok or c.value not in theirs or c.value not in ours:
                continue
            behind = ancestors(self.model.graph.nodes, [c.value])
            if tied(behind, ours[c.value], theirs[c.value], theirs):
                reasons[c.value] = replace(c, ok=True, why=TIED)
            if c.absolute is None or c.value in reasons:
                continue
            again = self._on_operands(behind[-1], c.value, ours[c.value], values, self.random) if behind else c
            rounding = [node for node in behind if _rounds(node) or node.op_type in SCALES]
            saturated = sum(not self.saturated.isdisjoint(node.outputs) for node in behind)
            if again.ok:
                reasons[c.value] = again
            elif saturated:
                reasons[c.value] = replace(c, ok=True, why=f"onnxruntime saturates in {saturated} nodes")
            elif _flips(rounding, ours, theirs):
                reasons[c.value] = replace(c, ok=True, why=f"roundings add up over {len(rounding)} quantised nodes")
        return reasons

    def _recorded_reasons(
        self, reasons: Mapping[str, Comparison], feeds: Mapping[str, Any], recorded: Mapping[str, Any]
    ) -> dict[str, Comparison]:
        """The reasons that explain recorded outputs too: of those that are the other implementation's own."""
        usual = Peer(self.peer, self.model, optimised=True).run(feeds)
        known = {n: c for n, c in reasons.items() if compared(n, usual[n], recorded[n], **self.limits).ok}
        return {n: c if c.why else replace(c, why=OPTIMISED) for n, c in known.items()}

    def _on_operands(self, node: Node, name: str, ours: Any, values: Mapping[str, Any], drawn: Any) -> Comparison:
        """The comparison of a node's output, by the size of its operands too if that matters."""
        comparison = self._compared(node, name, ours, values[name], drawn)
        if not comparison.ok and node.op_type in CLASSIFIERS and tied([node], ours, values[name], values):
            return replace(comparison, ok=True, why=TIED)
        if comparison.ok or comparison.absolute is None:
            return comparison
        sizes = [magnitude(to_host(values[n])) for n in node.inputs if n in values]
        scale = math.prod(sizes[:2]) if node.op_type in PRODUCTS else max(sizes, default=0.0)
        if node.op_type == "Div" or (node.op_type in ROUNDED_ONCE and self.limits["dtype"] is None):
            scale = 0.0
        comparison = self._compared(node, name, ours, values[name], (), scale=scale, rounds=_rounds(node))
        if comparison.ok or comparison.absolute is None or node.op_type not in SCALES:
            return comparison
        nearer = amplified(self.model, node, values, name, ours, values[name])
        explained = compared(name, nearer, values[name], **self.limits).ok
        return replace(comparison, ok=True, why=AMPLIFIES) if explained else comparison

    def _accumulated(self, run: _ComparedGraph) -> Difference | None:
        """The first output of a node that differs in a run of the whole model."""
        for node in run.graph.nodes:
            for name in node.outputs:
                if name in run.scope:
                    comparison = self._compared(node, name, run.ours[name], run.scope[name], self.random)
                    if not comparison.ok:
                        return Difference(str(node), name, comparison, self._operands(run, node), accumulated=True)
        return None

    def _node_by_node(
        self, graph: Graph, feeds: Mapping[str, Any], steps: tuple[InnerGraph, ...] = ()
    ) -> _ComparedGraph:
        """The run of a graph, the main one or an inner one, on its inputs and the outer values that it reads.

        Values that nothing reads are left out: a mask of Dropout from opset 7, say, which implementations fill as they
        like.
        """
        theirs = Peer(self.peer, self.model, every=True, steps=steps, feeds=feeds).run(feeds)
        scope = {**feeds, **theirs}
        read = {n for node in graph.nodes for n in node.reads} | {v.name for v in graph.outputs}
        names = [n for n in node_outputs(graph) if n in theirs and (n in read or graph.differentiates)]
        alone = graph if graph.differentiates else isolated(graph, names, scope)
        suffix = "" if alone is graph else OURS
        shown = replace(alone, outputs=tuple(ValueInfo(n + suffix) for n in names))
        operands = {v.name: scope[v.name] for v in shown.inputs if v.name in scope}
        program, operands = specialised(self.model, shown, operands)
        rng = jax.random.key(0) if graph.draws else None
        ours = dict(zip(names, program.run(None, operands, rng=rng), strict=True))
        values = self._values(graph, scope)
        drawn = self.drawn if not steps else names if graph.draws else ()
        nodes = [self._on_operands(graph.producers[n], n, ours[n], values, drawn) for n in names]
        if self.peer == "onnxruntime":
            nodes = [c if c.ok else self._saturating(c, graph.producers[c.value], ours, values, steps) for c in nodes]
        return _ComparedGraph(graph, steps, scope, ours, nodes)

    def _saturating(
        self, c: Comparison, node: Node, ours: Mapping[str, Any], values: Mapping[str, Any], steps: Any
    ) -> Comparison:
        """The comparison of a node's output with onnxruntime's exact one where its usual one is saturated."""
        exact = unsaturated(self.model, node, values, steps)
        if c.value not in exact or not self._on_operands(node, c.value, ours[c.value], {**values, **exact}, ()).ok:
            return c
        if c.value not in self.saturated:
            self.saturated.add(c.value)
            self.notes.append(f"{node}: {SATURATES}")
        return replace(c, ok=True, why=SATURATES)

    def _first(self, run: _ComparedGraph) -> Difference | None:
        """The difference among the nodes of a graph, or inside one of them."""
        wrong = {c.value: c for c in run.nodes if not c.ok}
        if not wrong:
            return None
        sizes = {n: np.inf if c.relative is None else c.relative for n, c in wrong.items()}
        value = next(n for n, size in sizes.items() if size >= min(max(sizes.values()) / COMPARABLE, 1))
        node = run.graph.producers[value]
        before = len(self.saturated)
        inside = self._inside(run, node)
        if inside is None and len(self.saturated) > before:  # the graph is right but for these nodes
            self.saturated.update(node.outputs)
            return self._first(replace(run, nodes=[c for c in run.nodes if c.value not in node.outputs]))
        if inside is not None:
            return replace(inside, node=f"{node}, inside it {inside.node}")
        return Difference(str(node), value, wrong[value], self._operands(run, node))

    def _values(self, graph: Graph, scope: Mapping[str, Any]) -> dict[str, Any]:
        """What nodes of a graph read: some values, and initializers with the model's present parameters."""
        weights = {n: self.model.params.get(graph.key(n), v) for n, v in graph.initializers.items()}
        return {**self.model.graph.initializers, **self.model.params, **weights, **scope}

    def _operands(self, run: _ComparedGraph, node: Node) -> dict[str, Any]:
        """See ``Difference``."""
        values = self._values(run.graph, run.scope)
        operands = {n: to_host(values[n]) for n in node.reads if n in values}
        results = [n for n in node.outputs if n in run.ours and n in run.scope]
        operands |= {f"ours/{n}": to_host(run.ours[n]) for n in results}
        return operands | {f"theirs/{n}": run.scope[n] for n in results}

    def _inside(self, run: _ComparedGraph, node: Node) -> Difference | None:
        """The first difference in the graphs of a node, over their calls in order."""
        for graph, named, around in calls(self.model, node, run.scope) if node.graphs else ():
            feeds = {n: to_host(v) for n, v in {**{n: around[n] for n in graph.captures}, **named}.items()}
            try:
                inner = self._node_by_node(graph, feeds, (*run.steps, step_into(node, graph)))
            except UnsupportedError as e:
                self.notes.append(f"the graphs of {node} could not be compared: {str(e).splitlines()[0]}")
                return None
            if (first := self._first(inner)) is not None:
                return first
        return None


def specialised(model: Any, graph: Graph, feeds: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model with another graph, specialised on its small inputs of which values must be known; the other inputs."""
    known = analysis.static_names(graph) & feeds.keys()
    static = {n: feeds[n] for n in known if isinstance(feeds[n], np.ndarray) and is_small(feeds[n])}
    program = with_graph(model, graph, static)
    return program, {n: v for n, v in feeds.items() if n not in program.static}


def isolated(graph: Graph, names: Sequence[str], scope: Mapping[str, Any]) -> Graph:
    """The graph in which nodes read given values as inputs, rather than other nodes' outputs.

    before:   x -> [a] -> h -> [b] -> y                    after:   x -> [a] -> h/ours,   h -> [b] -> y/ours

    Args:
        graph: a main graph, or an inner one.
        names: the node outputs that are given.
        scope: all values that may be read, those of outer graphs included.
    """
    renamed = {n: n + OURS for n in names}
    nodes = tuple(replace(node, outputs=tuple(renamed.get(n, n) for n in node.outputs)) for node in graph.nodes)
    declared = {*graph.initializers, *(v.name for v in graph.inputs)}
    read = dict.fromkeys(n for node in nodes for n in node.reads)
    more = [ValueInfo(n) for n in read if n in scope and n not in declared]
    inputs = tuple(ValueInfo(v.name) if graph.path else v for v in graph.inputs)
    return replace(graph, inputs=(*inputs, *more), nodes=nodes, value_info={})


def _rounds(node: Node) -> bool:
    return ROUNDING.fullmatch(node.op_type) is not None


def _flips(rounding: Sequence[Node], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether the first rounding nodes that differ do so as equal programs may.

    This is by one step in few numbers, or on nearly equal operands if the node rounds inside.
    """

    def agree(n: str, **how: Any) -> bool:
        return n not in ours or n not in theirs or compared(n, ours[n], theirs[n], **how).ok

    for node in rounding:
        inside = node.op_type in SCALES
        for n in node.outputs:
            if not agree(n) and (inside or "int" in described(theirs[n])):
                return agree(node.inputs[0]) if inside else agree(n, rounds=True)
    return False


def _draws(node: Node) -> bool:
    return "rng" in node.operator.fixtures or any(graph.draws for graph in node.bodies)
