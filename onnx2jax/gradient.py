"""Operators that name values of their graph and differentiate one with respect to others: Gradient.

The nodes between the named values are found in the graph. Where the operands are the named values themselves, a tape
records these nodes while they run, so that the forward pass is computed once. Everywhere else (other operands, nodes
of an enclosing graph, a derivative of a derivative) they are evaluated again, with the random draws they had.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .errors import ModelError
from .graph import Graph, Node, Reference
from .ops.arrays import is_known
from .rules import quoted

Run = Callable[[Node, Any], Sequence[Any]]
"""Evaluates a node in a scope, and returns its outputs."""


def between(starts: Collection[str], target: str, nodes: Sequence[Node]) -> list[Node]:
    """The nodes through which ``target`` depends on ``starts``, in order; every path ends at a start (rule TR-31)."""
    wanted, above = {target} - set(starts), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            above.append(node)
            wanted.update(name for name in node.reads if name not in starts)
    reached, found = set(starts), []
    for node in reversed(above):
        if reached.intersection(node.reads):
            found.append(node)
            reached.update(node.outputs)
    return found


def prepared(graph: Graph, before: tuple[Node, ...] = (), visible: Iterable[str] = ()) -> Graph:
    """The graph, in which nodes that name values know what these depend on (``Node.hidden``).

    Args:
        graph: a main graph or the body of a function; graphs inside its nodes are prepared with it.
        before: the nodes of the enclosing graphs that come before.
        visible: the names that the enclosing graphs define.

    Raises:
        ModelError: a name is not defined before the node (rule TR-30), or is no independent value (rule TR-31).
    """
    if not graph.differentiates:
        return graph
    names = {*visible, *(v.name for v in graph.inputs), *graph.initializers}
    nodes: list[Node] = []
    for node in graph.nodes:
        around = (*before, *nodes)
        if node.graphs:
            node = replace(node, attributes={k: _prepared(v, around, names) for k, v in node.attributes.items()})
        if node.differentiates and not _referring(node):
            node = replace(node, hidden=_hidden(node, around, names))
        nodes.append(node)
        names.update(node.outputs)
    return replace(graph, nodes=tuple(nodes))


def _prepared(value: Any, before: tuple[Node, ...], visible: Iterable[str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_prepared(v, before, visible) for v in value)
    return prepared(value, before, visible) if isinstance(value, Graph) else value


def _referring(node: Node) -> bool:
    """Whether a caller's attributes say which values the node names."""
    return any(isinstance(v, Reference) for v in node.attributes.values())


def _named(node: Node) -> tuple[tuple[str, ...], str]:
    """The independent values and the target."""
    return (*node.attributes["xs"], *node.attributes.get("zs", ())), node.attributes["y"]


def _hidden(node: Node, before: Sequence[Node], visible: Collection[str]) -> tuple[str, ...]:
    names, target = _named(node)
    if unknown := {*names, target}.difference(visible):
        raise ModelError(f"{quoted(unknown)} named by {node} but not defined before it (rule TR-30)")
    if len(node.inputs) != len(names) or not all(node.inputs):
        raise ModelError(f"{node} has inputs {list(node.inputs)} for the values {list(names)} (rule TR-30)")
    for name in names:
        others = set(names) - {name}
        if names.count(name) > 1 or between(others, name, before):
            raise ModelError(
                f"{node}: {name!r} of xs and zs ({list(names)}) depends on another of them, so they are no independent "
                f"variables of {target!r}: leave it out, or name only values that do not follow from it (rule TR-31)"
            )
    through = between(names, target, before)
    made = {*names, *(name for step in through for name in step.outputs)}
    return tuple(dict.fromkeys(name for step in through for name in step.reads if name not in made)) or (target,)


@dataclass(frozen=True)
class Frame:
    """A graph that is being evaluated, as seen from a node inside it."""

    nodes: tuple[Node, ...]
    run: Run
    """Evaluates a node of this graph again."""


@dataclass(frozen=True)
class Derivatives:
    """What a node that names values asks of the evaluator: the derivatives of one of them, at given points."""

    node: Node
    scope: MutableMapping[str, Any]
    frames: tuple[Frame, ...]
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
        owners = {node: frame for frame in self.frames for node in frame.nodes}
        through = between(points, target, tuple(owners))

        def forward(moving: Mapping[str, Any]) -> Any:
            scope = ChainMap({**points, **moving}, self.scope)
            for node in through:
                results = owners[node].run(node, scope)
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
        differentiating = [n for n in graph.nodes if n.differentiates and not _referring(n)]
        for node in differentiating:
            names, target = _named(node)
            through = between(names, target, graph.nodes)
            here = target in names or any(target in n.outputs for n in through)
            if names == node.inputs and here and set(through) <= set(nodes):
                self.segments[node] = through
                self._moving.update(names, *(step.outputs for step in through))
        # A derivative of a derivative is taken of the evaluation anew.
        self.recorded = {step for through in self.segments.values() for step in through}

    def record(self, node: Node, scope: MutableMapping[str, Any], run: Run) -> Sequence[Any]:
        """The node's outputs; remembers how to differentiate them."""
        moving = {n: scope[n] for n in node.reads if n in self._moving and _is_floating(scope[n])}
        known: dict[int, Any] = {}

        def forward(moving: dict[str, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
            results = dict(enumerate(run(node, ChainMap(moving, scope))))
            known.update((i, r) for i, r in results.items() if is_known(r))
            floating = {i: r for i, r in results.items() if i not in known and _is_floating(r)}
            return floating, {i: r for i, r in results.items() if i not in known and i not in floating}

        floating, pullback, others = jax.vjp(forward, moving, has_aux=True)
        self._pullbacks[node] = floating, pullback
        return [value for _, value in sorted({**known, **floating, **others}.items())]

    def pull(self, node: Node, target: str, value: Any) -> Mapping[str, Any]:
        """The derivatives of ``target`` by every value between it and the independent ones of the node."""
        cotangents = {target: jnp.ones_like(value)}
        for step in reversed(self.segments[node]):
            floating, pullback = self._pullbacks[step]
            names = {i: step.outputs[i] for i in floating if i < len(step.outputs)}
            if not cotangents.keys() & set(names.values()):
                continue
            given = {i: cotangents.get(names.get(i, ""), jax.tree.map(jnp.zeros_like, v)) for i, v in floating.items()}
            for name, part in pullback(given)[0].items():
                cotangents[name] = jax.tree.map(jnp.add, cotangents[name], part) if name in cotangents else part
        return cotangents


def _is_floating(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating) for v in leaves)


def _check_floating(name: str, value: Any) -> None:
    if isinstance(value, list) or not _is_floating(value):
        kind = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"{name!r} is {kind}; only tensors of floating type have derivatives (rule TR-35)")
