"""Rewrites the graph of a decoding step for fixed-length caches.

- ``Concat(past, new)`` becomes an in-place write into a buffer (``write_to_buffers``).
- Values computed from cache extents, such as positions in a model without position_ids, or the choice of a rotary table
  by text length, are shifted to the number of tokens present (``shift_positions``).
- In a model without a mask input, each Softmax over the cache masks empty slots (``mask_softmax``).

A graph may use extents in other ways, so the logits are verified before generating.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedError
from ..eval.abstract import Abstract, types_and_constants, without_data
from ..ir import analysis
from ..ir.analysis import static_names
from ..ir.graph import Graph, Node
from ..model.calls.cache_pairs import Pair
from ..model.model import Model
from ..ops.arrays import is_traced
from ..ops.registry import Operator
from ..proto.types import TensorType, ValueInfo
from . import cache as cached

BUFFER: Final = "\0buffer "
START: Final = "\0start"
SHIFT: Final = "\0shift"
LIVE: Final = "\0live"
DOMAIN: Final = "onnx2jax.caches"


def shift_by(value: Any, shift: Any, *, slope: float) -> Any:
    """A value derived from a cache extent, for ``shift`` more tokens."""
    value = jnp.asarray(value)
    return value + shift.astype(value.dtype) * np.asarray(slope, value.dtype)


def choose_tables(condition: Any, *, yes: Sequence[np.ndarray], no: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """The tables ``yes`` or ``no``, which are padded to equal shapes."""
    return tuple(jnp.where(jnp.reshape(condition, ()), a, b) for a, b in zip(yes, no, strict=True))


def mask_scores(scores: Any, live: Any, start: Any) -> Any:
    """Attention scores [batch, heads, new, slots] or [batch * heads, new, slots] with empty and future slots masked."""
    new, slots = scores.shape[-2:]
    at = start + jnp.arange(new, dtype=np.int32)
    seen = live[:, None] & (jnp.arange(slots, dtype=np.int32) <= at[:, None])
    seen = seen[:, None] if scores.ndim == 4 else jnp.repeat(seen, scores.shape[0] // len(live), axis=0)
    return jnp.where(seen, scores, jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype))


def operator(name: str, function: Any, inputs: Sequence[str], *attributes: str) -> Operator:
    """An operator that only rewritten graphs have."""
    return Operator(DOMAIN, name, 1, function, tuple(inputs), attributes=frozenset(attributes))


WRITE: Final = operator("Write", cached.write, ("buffer", "new", "start"), "axis")
SHIFTED: Final = operator("ShiftPositions", shift_by, ("value", "shift"), "slope")
CHOOSE: Final = operator("ChooseTables", choose_tables, ("condition",), "yes", "no")
MASK: Final = operator("MaskScores", mask_scores, ("scores", "live", "start"))


def write_to_buffers(graph: Graph, pairs: Mapping[str, Pair]) -> Graph | None:
    """The graph with the Concat of each cache as an in-place write; None if a cache is appended in another way."""
    producers = {p.producer: n for n, p in pairs.items()}
    if not producers or len(producers) < len(pairs):
        return None
    for producer, name in producers.items():
        if producer is None or (producer.op_type, producer.domain) != ("Concat", ""):
            return None
        if producer.inputs[0] != name or len(producer.inputs) != 2:
            return None

    def written(node: Node) -> Node:
        if node not in producers:
            return node
        inputs = BUFFER + producers[node], node.inputs[1], START
        return _with_operator(node, WRITE, inputs, axis=pairs[producers[node]].axis)

    buffers = [ValueInfo(BUFFER + n, TensorType(p.dtype, None)) for n, p in pairs.items()]
    inputs = (*graph.inputs, *buffers, _scalar(START))
    return replace(graph, nodes=tuple(map(written, graph.nodes)), inputs=inputs)


def reads_extents(graph: Graph, name: str) -> bool:
    """Whether a graph uses the extents of an input for anything but shapes."""
    derived: set[str] = set()
    static = static_names(graph)
    for node in graph.nodes:
        if node.op_type in ("Shape", "Size") and node.inputs[0] == name and not node.domain:
            derived.update(node.outputs)
        elif any(_reads_value(node, i, static) for i, n in enumerate(node.inputs) if n in derived):
            return True
        elif not derived.isdisjoint(node.inputs) and not static.isdisjoint(node.outputs):
            derived.update(node.outputs)
    return False


def shift_positions(graph: Graph, growing: Mapping[str, float], params: Mapping[str, Any]) -> Graph:
    """The graph with ``SHIFT`` times its slope added to each growing value, where that determines no shape.

    Args:
        graph: of a step.
        growing: values that grow with the length of the cache, and by how much per token.
        params: the parameters, for tables inside an If.
    """
    static = static_names(graph)
    nodes: list[Node] = []
    shifted: dict[str, str] = {}
    moved: set[str] = set()
    for node in graph.nodes:
        inputs = list(node.inputs)
        for i, name in enumerate(node.inputs):
            if name in moved or name not in growing or not _reads_value(node, i, static):
                continue
            if name not in shifted:
                shifted[name] = f"\0shifted {name}"
                nodes.append(applied(SHIFTED, (name, SHIFT), shifted[name], slope=growing[name]))
            inputs[i] = shifted[name]
        if tuple(inputs) != node.inputs or _reads_any(node, moved):
            node = replace(node, inputs=tuple(inputs))
            moved.update(filter(None, node.outputs))
        nodes.append(node)
    nodes = [_as_choice(n, params) if n.op_type == "If" and n.inputs[0] in moved else n for n in nodes]
    return replace(graph, nodes=tuple(nodes), inputs=(*graph.inputs, _scalar(SHIFT)))


def mask_softmax(graph: Graph, probes: Sequence[Values]) -> Graph:
    """The graph with empty slots masked in each Softmax over the cache."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type == "Softmax" and not node.domain:
            shapes = [values[node.inputs[0]].shape for values in probes if node.inputs[0] in values]
            if [s[-1:] for s in shapes] == [(n + 1,) for n in PROBED_LENGTHS] and len(shapes[0]) in (3, 4):
                masked = f"\0masked {node.inputs[0]}"
                nodes.append(applied(MASK, (node.inputs[0], LIVE, START), masked))
                node = replace(node, inputs=(masked,))
        nodes.append(node)
    live = ValueInfo(LIVE, TensorType(np.dtype(bool), None))
    return replace(graph, nodes=tuple(nodes), inputs=(*graph.inputs, live))


def _reads_value(node: Node, index: int, static: set[str]) -> bool:
    """Whether a node reads an input's values without deriving a shape from them."""
    operator = node.target
    if not isinstance(operator, Operator) or operator.parameter(index) in operator.static | operator.shaped:
        return False
    return static.isdisjoint(node.outputs)


def _reads_any(node: Node, values: set[str]) -> bool:
    """Whether a node reads more of some values than their shapes."""
    operator = node.target
    if not isinstance(operator, Operator):
        return not values.isdisjoint(node.reads)
    read = (n for i, n in enumerate(node.inputs) if operator.parameter(i) not in operator.shaped)
    return not values.isdisjoint((*read, *node.implicit_inputs))


def _as_choice(node: Node, params: Mapping[str, Any]) -> Node:
    """An If between constant tables as a select between tables padded to one length; any other If unchanged."""
    tables = []
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name]
        if branch.nodes or any(v.name not in branch.initializers for v in branch.outputs):
            return node
        constants = [params.get(branch.key(v.name), branch.initializers[v.name]) for v in branch.outputs]
        if is_traced(constants):
            raise UnsupportedError(
                f"{node} chooses between tables, which a decoder's programs have as constants: inside jit, call the "
                "decoder itself, decoder.step(params, cache, tokens), rather than one that is an argument of jit"
            )
        tables.append([np.asarray(v) for v in constants])
    if any(a.shape[1:] != b.shape[1:] or not a.ndim for a, b in zip(*tables, strict=True)):
        return node
    longest = max(len(t) for some in tables for t in some)
    yes, no = (tuple(np.pad(t, [(0, longest - len(t))] + [(0, 0)] * (t.ndim - 1)) for t in some) for some in tables)
    return _with_operator(node, CHOOSE, node.inputs, yes=yes, no=no)


def _with_operator(node: Node, operator: Operator, inputs: Sequence[str], **attributes: Any) -> Node:
    """The node with another operator."""
    return replace(
        node, target=operator, op_type=operator.name, domain=DOMAIN, inputs=tuple(inputs), attributes=attributes
    )


def applied(operator: Operator, inputs: Sequence[str], output: str, **attributes: Any) -> Node:
    """A node of such an operator."""
    return Node(output[1:], operator.name, DOMAIN, 1, tuple(inputs), (output,), attributes, operator)


def _scalar(name: str) -> ValueInfo:
    return ValueInfo(name, TensorType(np.dtype(np.int32), ()))


PROBED_LENGTHS: Final = (5, 6, 7)
"""Cache lengths, in tokens, with which a step is evaluated."""
ENCODER_LENGTH: Final = 3
"""Extent of an encoder's outputs in these evaluations."""

Values = Mapping[str, Any]
"""The values of a step by name: NumPy arrays where they follow from constants and shapes, otherwise types."""


class _Step(Abstract):
    """An evaluation that knows constants of any size, as tables of positions are."""

    largest_known = math.inf


def slopes(probes: Sequence[Values]) -> dict[str, float]:
    """The growth per token of each value that grows linearly over three probes, all elements equally.

    >>> slopes([{"end": np.array([n]), "mask": np.array(-np.inf)} for n in PROBED_LENGTHS])
    {'end': 1}
    """
    growing = {}
    for name in set.intersection(*map(set, probes)) if probes else ():
        a, b, c = (p[name] for p in probes)
        if not all(type(v) is np.ndarray for v in (a, b, c)) or not a.shape == b.shape == c.shape:
            continue
        if a.dtype.kind in "if" and a.size and np.isfinite([a, b, c]).all():
            growth = np.unique(np.stack([b - a, c - b]))
            if growth.size == 1 and growth[0]:
                growing[name] = growth[0].item()
    return growing


def probe(
    model: Model, past: Mapping[str, Any], others: Sequence[ValueInfo], length: int, feeds_of: Callable[..., Any]
) -> Values:
    """The values of a step of one sequence over a cache of ``length`` tokens.

    Args:
        model: of the step.
        past: shapes and dtypes of its caches.
        others: its inputs other than caches and those that ``feeds_of`` computes.
        length: the number of tokens in the cache.
        feeds_of: (model, tokens, positions, mask, slots) -> inputs by name.
    """
    values = dict[str, Any]()
    more = {v.name: _type(v) for v in others if v.name not in past}
    graph, params = model.graph, analysis.parameters(model.graph)
    arrays = {n: v for n, v in graph.initializers.items() if graph.key(n) in params}
    weights = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in arrays.items()}
    graph = replace(graph, initializers={n: v for n, v in graph.initializers.items() if n not in weights})

    def run(weights: Any, tokens: Any, mask: Any, inputs: Any) -> None:
        feeds = feeds_of(model, tokens, tokens, mask, tokens[0])
        values.update(types_and_constants(_Step().graph(graph, "", {**model.static, **feeds, **inputs}, weights)))

    tokens, mask = jax.ShapeDtypeStruct((1, 1), np.int32), jax.ShapeDtypeStruct((1, length + 1), bool)
    without_data(run, weights, tokens, mask, {**past, **more})
    return values


def _type(value: ValueInfo) -> jax.ShapeDtypeStruct:
    assert isinstance(value.type, TensorType)
    dims = [d if isinstance(d, int) else ENCODER_LENGTH if i else 1 for i, d in enumerate(value.shape or ())]
    return jax.ShapeDtypeStruct(dims, value.type.dtype)
