"""The graph of a step, written anew for caches of fixed length.

Three things that exporters write are changed:

- ``Concat(past, new)`` becomes a write into the array (``writing``).
- What a graph makes of extents rather than of inputs, such as positions where there are no position_ids, or which
  table of rotations serves a text of that length, follows the tokens that are there (``counting``).
- Where there is no mask among the inputs, a softmax over the cache sees the tokens that are there (``hiding``).

None of this is sure to be all that a graph does with its extents: whoever generates compares first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ..ir.analysis import needed
from ..ir.graph import Graph, Node
from ..model.calls.cache_pairs import Pair
from ..ops.registry import Operator
from ..proto.types import TensorType, ValueInfo
from . import cache as cached
from .traced import TRIED, Known

WHOLE: Final = "\0whole "
START: Final = "\0start"
SHIFT: Final = "\0shift"
LIVE: Final = "\0live"
DOMAIN: Final = "onnx2jax.caches"


def count(value: Any, shift: Any, *, slope: float) -> Any:
    """What a graph counts by an extent, for so many tokens more."""
    value = jnp.asarray(value)
    return value + shift.astype(value.dtype) * np.asarray(slope, value.dtype)


def choose(condition: Any, *, yes: Sequence[np.ndarray], no: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """One of two rows of tables, the shorter ones lengthened."""
    return tuple(jnp.where(jnp.reshape(condition, ()), a, b) for a, b in zip(yes, no, strict=True))


def hide(scores: Any, live: Any, start: Any) -> Any:
    """Scores [batch, heads, new, places] or [batch * heads, new, places], least where no token is or a later one."""
    new, places = scores.shape[-2:]
    at = start + jnp.arange(new, dtype=np.int32)
    seen = live[:, None] & (jnp.arange(places, dtype=np.int32) <= at[:, None])
    seen = seen[:, None] if scores.ndim == 4 else jnp.repeat(seen, scores.shape[0] // len(live), axis=0)
    return jnp.where(seen, scores, jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype))


def _operator(name: str, function: Any, inputs: Sequence[str], *attributes: str) -> Operator:
    return Operator(DOMAIN, name, 1, function, tuple(inputs), attributes=frozenset(attributes))


WRITE: Final = _operator("Write", cached.write, ("buffer", "new", "start"), "axis")
COUNT: Final = _operator("Count", count, ("value", "shift"), "slope")
CHOOSE: Final = _operator("Choose", choose, ("condition",), "yes", "no")
HIDE: Final = _operator("Hide", hide, ("scores", "live", "start"))


def writing(graph: Graph, pairs: Mapping[str, Pair]) -> Graph | None:
    """The graph with writes where it appends to caches; None where an appending node is not at hand."""
    makers = {p.maker: n for n, p in pairs.items()}
    if not makers or len(makers) < len(pairs):
        return None
    for maker, name in makers.items():
        if maker is None or maker.op_type != "Concat" or maker.domain or maker.inputs[0] != name:
            return None
        if len(maker.inputs) != 2:
            return None

    def written(node: Node) -> Node:
        if node not in makers:
            return node
        inputs = WHOLE + makers[node], node.inputs[1], START
        return _by(node, WRITE, inputs, axis=pairs[makers[node]].axis)

    wholes = [ValueInfo(WHOLE + n, TensorType(p.dtype, None)) for n, p in pairs.items()]
    inputs = (*graph.inputs, *wholes, _scalar(START))
    return replace(graph, nodes=tuple(map(written, graph.nodes)), inputs=inputs)


def depends(graph: Graph, inputs: Sequence[str]) -> bool:
    """Whether a graph makes anything but shapes of the extents of these inputs."""
    moved = set(inputs)
    known: set[str] = set()
    static = needed(graph)
    for node in graph.nodes:
        if node.op_type in ("Shape", "Size") and node.inputs[0] in moved and not node.domain:
            known.update(node.outputs)
        elif any(_cut(node, i, static) for i, n in enumerate(node.inputs) if n in known):
            return True
        elif not known.isdisjoint(node.inputs) and not static.isdisjoint(node.outputs):
            known.update(node.outputs)
    return False


def counting(graph: Graph, growing: Mapping[str, float], params: Mapping[str, Any]) -> Graph:
    """The graph in which what grows with the extents follows ``SHIFT`` besides, where that decides no shape."""
    static = needed(graph)
    nodes: list[Node] = []
    counted: dict[str, str] = {}
    moved: set[str] = set()
    for node in graph.nodes:
        inputs = list(node.inputs)
        for i, name in enumerate(node.inputs):
            if name in moved or name not in growing or not _cut(node, i, static):
                continue
            if name not in counted:
                counted[name] = f"\0counted {name}"
                nodes.append(_new(COUNT, (name, SHIFT), counted[name], slope=growing[name]))
            inputs[i] = counted[name]
        if tuple(inputs) != node.inputs or not moved.isdisjoint(node.reads):
            node = replace(node, inputs=tuple(inputs))
            moved.update(filter(None, node.outputs))
        nodes.append(node)
    nodes = [_chosen(n, params) if n.op_type == "If" and n.inputs[0] in moved else n for n in nodes]
    return replace(graph, nodes=tuple(nodes), inputs=(*graph.inputs, _scalar(SHIFT)))


def hiding(graph: Graph, known: Sequence[Known]) -> Graph:
    """The graph with what is no token hidden from each softmax over the cache and one token more."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type == "Softmax" and not node.domain:
            shapes = [k.scores.get(node.inputs[0], ()) for k in known]
            if [s[-1:] for s in shapes] == [(n + 1,) for n in TRIED] and len(shapes[0]) in (3, 4):
                hidden = f"\0hidden {node.inputs[0]}"
                nodes.append(_new(HIDE, (node.inputs[0], LIVE, START), hidden))
                node = replace(node, inputs=(hidden,))
        nodes.append(node)
    live = ValueInfo(LIVE, TensorType(np.dtype(bool), None))
    return replace(graph, nodes=tuple(nodes), inputs=(*graph.inputs, live))


def _cut(node: Node, place: int, static: set[str]) -> bool:
    """Whether a node reads an input as numbers from which no shape follows."""
    operator = node.target
    if not isinstance(operator, Operator) or operator.parameter(place) in operator.static | operator.shaped:
        return False
    return static.isdisjoint(node.outputs)


def _chosen(node: Node, params: Mapping[str, Any]) -> Node:
    """An If between tables as a choice between tables of one length; as it is where its branches compute."""
    tables = []
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name]
        if branch.nodes or any(v.name not in branch.initializers for v in branch.outputs):
            return node
        own = (params.get(branch.key(v.name), branch.initializers[v.name]) for v in branch.outputs)
        tables.append([np.asarray(v) for v in own])
    if any(a.shape[1:] != b.shape[1:] or not a.ndim for a, b in zip(*tables, strict=True)):
        return node
    longest = max(len(t) for some in tables for t in some)
    yes, no = (tuple(np.pad(t, [(0, longest - len(t))] + [(0, 0)] * (t.ndim - 1)) for t in some) for some in tables)
    return _by(node, CHOOSE, node.inputs, yes=yes, no=no)


def _by(node: Node, operator: Operator, inputs: Sequence[str], **attributes: Any) -> Node:
    """A node with another operator."""
    return replace(
        node, target=operator, op_type=operator.name, domain=DOMAIN, inputs=tuple(inputs), attributes=attributes
    )


def _new(operator: Operator, inputs: Sequence[str], output: str, **attributes: Any) -> Node:
    return Node(output[1:], operator.name, DOMAIN, 1, tuple(inputs), (output,), attributes, operator)


def _scalar(name: str) -> ValueInfo:
    return ValueInfo(name, TensorType(np.dtype(np.int32), ()))
