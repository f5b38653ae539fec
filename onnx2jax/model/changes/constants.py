"""Constant folding: what initializers and declared shapes determine becomes initializers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ... import compat
from ...ir.graph import Graph, Node, ancestors
from ...ops.registry import Operator
from ...proto.immutable import owned
from ...proto.mapped import load
from ...runtime.interpreter import Context, run_node
from ...runtime.values import to_host
from .known_values import Values

SMALL: Final = 16 * 1024
"""Bytes up to which a node's results may become initializers although they are larger than what they are made of."""
KEPT: Final = frozenset({"DequantizeLinear"})
"""Operators whose results take a multiple of their operands' memory, and which runtimes look for."""


def is_pure(node: Node) -> bool:
    """Whether a node's outputs follow from its inputs, and a file can hold the node."""
    target = node.target
    return (
        isinstance(target, Operator)
        and not node.graphs
        and target.fixtures.isdisjoint({"rng", "derivatives"})
        and target.domain == node.domain
        and not node.domain.startswith("onnx2jax.")
    )


def folded(graph: Graph, constants: Mapping[str, Any], weights: Collection[str], values: Values) -> Graph:
    """The graph without the nodes whose outputs are known, and without those that nothing reads.

    Args:
        graph: the graph.
        constants: the current values of the initializers that it has or captures, and that no caller can override.
        weights: those that are parameters. One that another node reads as well is not folded: it would be two.
        values: what is known of its values.
    """
    made, new = _Made(graph, constants, weights, values), set[str]()
    outputs = {v.name for v in graph.outputs}
    wanted, nodes = set(outputs), list[Node]()
    for node in reversed(graph.nodes):
        results = wanted.intersection(node.outputs)
        if results and results.isdisjoint(outputs) and made.is_worth(results):
            new |= results
        elif results:
            nodes.append(node)
            wanted.update(node.reads)
    arrays = made.arrays(new)
    of_weights = {n for n in new if any(w in weights for w in made.leaves[n])}
    return replace(
        graph,
        nodes=tuple(nodes[::-1]),
        initializers={**graph.initializers, **arrays},
        lifted=graph.lifted | {n for n in arrays.keys() - of_weights if arrays[n].size <= 1},
    )


class _Made:
    """Values that follow from constants.

    Attributes:
        leaves: the initializers of which each is made; none of those that follow from shapes alone.
    """

    def __init__(self, graph: Graph, constants: Mapping[str, Any], weights: Collection[str], values: Values) -> None:
        self._graph, self._constants, self._values = graph, constants, values
        known = (n for n in graph.captures if type(values.get(n)) is np.ndarray)
        self.leaves: dict[str, frozenset[str]] = dict.fromkeys(known, frozenset())
        self.leaves |= {n: frozenset({n}) for n in constants}
        read = {*graph.captures, *(v.name for v in graph.outputs)}
        for node in graph.nodes:
            outputs = [n for n in node.outputs if n]
            made = self.leaves.keys() >= set(filter(None, node.inputs))
            made = made or all(type(values.get(n)) is np.ndarray for n in outputs)
            if made and is_pure(node) and node.op_type not in KEPT:
                leaves = frozenset[str]().union(*(self.leaves.get(n, ()) for n in _values_read(node)))
                self.leaves.update(dict.fromkeys(outputs, leaves))
            else:
                read.update(node.reads)
        self._shared = {n for n in read if n in constants}
        self._tied = {n for n in self._shared.intersection(weights) if constants[n].size > 1}

    def is_worth(self, names: set[str]) -> bool:
        """Whether outputs of a node are known, and take little memory or that of what they replace."""
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
        nodes, context = ancestors(self._graph.nodes, names, given=scope.keys() | self._constants.keys()), Context({})
        with compat.outside(), compat.enable_x64(), np.errstate(all="ignore"):
            for node in nodes:
                for name in filter(None, node.inputs):
                    if name not in scope:
                        scope[name] = load(self._constants[name])
                results = map(to_host, run_node(node, scope, context))
                scope.update((n, v) for n, v in zip(node.outputs, results, strict=False) if n)
        return {n: owned(scope[n]) for n in names}


def _values_read(node: Node) -> Iterator[str]:
    """The inputs of which more than the shape counts."""
    operator: Any = node.target
    return (n for i, n in enumerate(node.inputs) if n and operator.parameter(i) not in operator.shaped)
