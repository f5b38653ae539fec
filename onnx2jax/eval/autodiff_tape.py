"""Derivatives that a node of the graph asks for (Gradient): of nodes while they run, or of nodes run again."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import with_rules
from ..ir.derivatives import between, has_references, named_values
from ..ir.graph import Graph, Node
from .values import marked_constants, with_constants

Rerun = Callable[[Node, Any], Sequence[Any]]
"""Evaluates a node again in a scope, and returns its outputs."""


@dataclass(frozen=True)
class Derivatives:
    """What a node that names values asks of the evaluator: the derivatives of one of them, at given points."""

    node: Node
    scope: MutableMapping[str, Any]
    reruns: Mapping[Node, Rerun]
    """The nodes of the graphs around, in order, outermost first -> what evaluates each again."""
    tape: Tape | None

    def __call__(self, target: str, sought: Sequence[str], points: Mapping[str, Any]) -> tuple[Any, ...]:
        """d target / d x at ``points`` for each x of ``sought``; the elements of a target count as their sum.

        Raises:
            ValueError: a value is not floating (rule TR-35).
        """
        for name in sought:
            _check_floating(name, points[name])
        if self.tape is not None and self.node in self.tape.segments:
            _check_floating(target, self.scope[target])
            gradients = self.tape.pull(self.node, target, self.scope[target])
        else:
            gradients = self._again(target, sought, points)
        return tuple(gradients[x] if x in gradients else jnp.zeros_like(points[x]) for x in sought)

    def _again(self, target: str, sought: Sequence[str], points: Mapping[str, Any]) -> Mapping[str, Any]:
        through = between(points, target, tuple(self.reruns))

        def forward(moving: Mapping[str, Any]) -> Any:
            scope = ChainMap({**points, **moving}, self.scope)
            for node in through:
                results = self.reruns[node](node, scope)
                scope.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)
            _check_floating(target, scope[target])
            return scope[target]

        value, pullback = jax.vjp(forward, {x: jnp.asarray(points[x]) for x in sought})
        return pullback(jnp.ones_like(value))[0]


class Tape:
    """The nodes of one evaluation that will be differentiated at the values they are evaluated at."""

    def __init__(self, graph: Graph, nodes: Collection[Node]) -> None:
        """``nodes`` are those of the graph that this evaluation runs."""
        self.segments: dict[Node, list[Node]] = {}
        self._pullbacks: dict[Node, tuple[Mapping[int, Any], Callable[..., Any]]] = {}
        self._moving: set[str] = set()
        differentiating = [n for n in graph.nodes if n.differentiates and not has_references(n)]
        for node in differentiating:
            names, target = named_values(node)
            through = between(names, target, graph.nodes)
            here = target in names or any(target in n.outputs for n in through)
            if names == node.inputs and here and set(through) <= set(nodes):
                self.segments[node] = through
                self._moving.update(names, *(step.outputs for step in through))
        # A derivative of a derivative is taken of the evaluation anew.
        self.recorded: set[Node] = {step for through in self.segments.values() for step in through}

    def record(self, node: Node, scope: MutableMapping[str, Any], run: Rerun) -> Sequence[Any]:
        """The node's outputs; remembers how to differentiate them."""
        moving = {n: scope[n] for n in node.reads if n in self._moving and _is_floating(scope[n])}

        def forward(moving: dict[str, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
            results = dict(enumerate(marked_constants(run(node, ChainMap(moving, scope)))))
            floating = {i: r for i, r in results.items() if _is_floating(r)}
            return floating, {i: r for i, r in results.items() if i not in floating}

        floating, pullback, others = jax.vjp(forward, moving, has_aux=True)
        self._pullbacks[node] = floating, pullback
        return with_constants([value for _, value in sorted({**floating, **others}.items())])

    def pull(self, node: Node, target: str, value: Any) -> Mapping[str, Any]:
        """The derivatives of ``target`` by every value between it and the independent ones of the node."""
        cotangents = {target: jnp.ones_like(value)}
        for step in reversed(self.segments[node]):
            floating, pullback = self._pullbacks[step]
            names = {i: step.outputs[i] for i in floating if i < len(step.outputs)}
            if not cotangents.keys() & set(names.values()):
                continue
            incoming = {
                i: cotangents.get(names.get(i, ""), jax.tree.map(jnp.zeros_like, v)) for i, v in floating.items()
            }
            for name, part in pullback(incoming)[0].items():
                cotangents[name] = jax.tree.map(jnp.add, cotangents[name], part) if name in cotangents else part
        return cotangents


def _is_floating(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating) for v in leaves)


def _check_floating(name: str, value: Any) -> None:
    if isinstance(value, list) or not _is_floating(value):
        kind = getattr(value, "dtype", type(value).__name__)
        raise ValueError(with_rules(f"{name!r} is {kind}; only tensors of floating type have derivatives", "TR-35"))
