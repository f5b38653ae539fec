"""Constant folding: values computed from initializers and declared shapes become initializers; targets of Reshape."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ... import compat
from ...eval.interpreter import Context, run_node, run_nodes
from ...eval.known_values import Values
from ...eval.values import to_host
from ...ir.graph import Graph, Node, ancestors
from ...ops.registry import Operator
from ...proto.mapped import load, owned
from ...proto.messages import unused_name

SMALL: Final = 16 * 1024
"""Bytes of a node's results up to which they become initializers even if larger than the constants they replace."""
KEPT: Final = frozenset({"DequantizeLinear"})
"""Operators whose results take a multiple of their operands' memory, and which runtimes pattern-match."""


def is_pure(node: Node) -> bool:
    """Whether a node's outputs depend on its inputs alone, and the node can be saved."""
    target = node.target
    return (
        isinstance(target, Operator)
        and not node.graphs
        and target.fixtures.isdisjoint({"rng", "derivatives"})
        and target.domain == node.domain
        and not node.is_private
    )


def folded(graph: Graph, constants: Mapping[str, Any], weights: Collection[str], values: Values) -> Graph:
    """The graph with foldable nodes replaced by initializers, and without unread nodes.

    Args:
        graph: the graph.
        constants: the current values of the initializers that it has or captures, and that no caller can override.
        weights: names of parameters. One that another node reads too is not folded: it would be duplicated.
        values: its known values.
    """
    known, new = _Constants(graph, constants, weights, values), set[str]()
    outputs = {v.name for v in graph.outputs}
    wanted, nodes = set(outputs), list[Node]()
    for node in reversed(graph.nodes):
        results = wanted.intersection(node.outputs)
        if results and results.isdisjoint(outputs) and known.is_foldable(results):
            new |= results
        elif results:
            nodes.append(node)
            wanted.update(node.reads)
    arrays = known.arrays(new)
    of_weights = {n for n in new if any(w in weights for w in known.leaves[n])}
    return replace(
        graph,
        nodes=tuple(nodes[::-1]),
        initializers={**graph.initializers, **arrays},
        lifted=graph.lifted | {n for n in arrays.keys() - of_weights if arrays[n].size <= 1},
    )


class _Constants:
    """Values computed from constants.

    Attributes:
        leaves: the initializers that each value is computed from; none for values computed from shapes alone.
    """

    def __init__(self, graph: Graph, constants: Mapping[str, Any], weights: Collection[str], values: Values) -> None:
        self._graph, self._constants, self._values = graph, constants, values
        known = (n for n in graph.captures if type(values.get(n)) is np.ndarray)
        self.leaves: dict[str, frozenset[str]] = dict.fromkeys(known, frozenset())
        self.leaves |= {n: frozenset({n}) for n in constants}
        read = {*graph.captures, *(v.name for v in graph.outputs)}
        for node in graph.nodes:
            outputs = [n for n in node.outputs if n]
            is_constant = self.leaves.keys() >= set(filter(None, node.inputs))
            is_constant = is_constant or all(type(values.get(n)) is np.ndarray for n in outputs)
            if is_constant and is_pure(node) and node.op_type not in KEPT:
                leaves = frozenset[str]().union(*(self.leaves.get(n, ()) for n in _values_read(node)))
                self.leaves.update(dict.fromkeys(outputs, leaves))
            else:
                read.update(node.reads)
        self._shared = {n for n in read if n in constants}
        self._tied = {n for n in self._shared.intersection(weights) if constants[n].size > 1}

    def is_foldable(self, names: set[str]) -> bool:
        """Whether a node's outputs are constants that take little memory, or no more than they replace."""
        if not self.leaves.keys() >= names:
            return False
        types = [self._values.get(n) for n in names]
        if not all(type(d) is int for t in types for d in getattr(t, "shape", (None,))):
            return False
        leaves = frozenset().union(*(self.leaves[n] for n in names))
        replaced = sum(self._constants[n].nbytes for n in leaves - self._shared)
        size = sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in types if t is not None)
        return size <= max(SMALL, replaced) and leaves.isdisjoint(self._tied)

    def arrays(self, names: set[str]) -> dict[str, np.ndarray]:
        """The values, computed by the operators in NumPy."""
        scope: dict[str, Any] = {n: v for n, v in self._values.items() if type(v) is np.ndarray}
        nodes, context = ancestors(self._graph.nodes, names, roots=scope.keys() | self._constants.keys()), Context({})
        read = {n for node in nodes for n in node.inputs if n not in scope and n in self._constants}
        scope |= {n: load(self._constants[n]) for n in read}
        with compat.outside(), compat.enable_x64():
            run_nodes(nodes, scope, context, lambda *node: list(map(to_host, run_node(*node))))
        return {n: owned(v) for n, v in scope.items() if n in names}  # of a set the order differs by process


def _values_read(node: Node) -> Iterator[str]:
    """The inputs of which a node reads more than the shape."""
    operator: Any = node.target
    return (n for i, n in enumerate(node.inputs) if n and operator.parameter(i) not in operator.shaped)


def with_constant_targets(
    graph: Graph, values: Values, extents: Mapping[str, tuple[Any, ...]], taken: set[str]
) -> Graph:
    """The graph with constants in place of shapes that are computed from dimension variables.

    Args:
        graph: the graph.
        values: what is known of its values.
        extents: vectors of extents, some of which are symbols, by name.
        taken: names that new initializers may not have; theirs are added.
    """
    nodes, new = list[Node](), dict[str, np.ndarray]()
    for node in graph.nodes:
        target = _target(node, values, extents)
        if target is not None:
            name = unused_name(f"{node.outputs[0]}.shape", taken)
            taken.add(name)
            new[name] = np.array(target, np.int64)
            node = replace(node, inputs=(node.inputs[0], name))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), initializers={**graph.initializers, **new})


def _target(node: Node, values: Values, extents: Mapping[str, tuple[Any, ...]]) -> Sequence[int] | None:
    if (node.domain, node.op_type) != ("", "Reshape") or len(node.inputs) < 2 or node.attributes.get("allowzero", 0):
        return None
    data, target = values.get(node.inputs[0]), extents.get(node.inputs[1])
    if data is None or target is None:
        return None
    numbers = [d for d in target if isinstance(d, int)]
    if all(isinstance(d, int) or (i < len(data.shape) and d == data.shape[i]) for i, d in enumerate(target)):
        return [d if isinstance(d, int) else 0 for d in target]
    if len(numbers) == len(target) - 1 and min(numbers, default=1) > 0:
        return [d if isinstance(d, int) else -1 for d in target]
    return None
