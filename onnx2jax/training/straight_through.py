"""Gradients through rounding: warns of weights without gradient, and adds straight-through estimators."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..errors import TrainingFormError, ZeroGradientWarning
from ..ir.graph import Graph, Node
from ..ops import qonnx
from ..ops.cast import is_integer
from ..ops.quant import broadcast_qparam
from ..ops.registry import Operator
from ..proto.types import to_dtype
from .form import PRIVATE, map_graphs

ROUNDING: Final = {"QuantizeLinear", "DynamicQuantizeLinear", "Round", "Floor", "Ceil", "Sign"}


def _rounds(node: Node) -> bool:
    """Whether a node is piecewise constant, so that its derivative is zero."""
    if node.op_type == "Cast":
        dtype = to_dtype(node.attributes["to"])
        return is_integer(dtype) or dtype == np.bool_
    return node.op_type in ROUNDING or node.op_type.startswith("QLinear")


def blocked_by_rounding(graph: Graph, names: Collection[str]) -> dict[str, Node]:
    """The parameters (by Graph.key) whose every path to an output passes a rounding node, with that node.

    Parameters read by nested graphs or functions count as unblocked.
    """
    reached = {v.name for v in graph.outputs}
    blocked: dict[str, Node] = {}
    for node in reversed(graph.nodes):
        if reached.isdisjoint(node.outputs):
            blocked.update({n: blocked[v] for v in node.outputs if v in blocked for n in node.reads})
        elif _rounds(node):
            blocked.update(dict.fromkeys(node.reads, node))
        else:
            reached.update(node.reads)
    untrained = {graph.key(n): blocked[n] for n in graph.initializers if n in blocked and n not in reached}
    return {key: untrained[key] for key in names if key in untrained}


def warn_of_zero_gradients(graph: Graph, names: Collection[str], straight_through: bool) -> None:
    """Warns of trained parameters that get zero gradients from rounding."""
    if blocked := blocked_by_rounding(graph, names):
        shown = ", ".join(f"{name!r} ({node})" for name, node in list(blocked.items())[:4])
        fix = (
            "only a QuantizeLinear followed by a DequantizeLinear passes gradients. Exclude them from trainable="
            if straight_through
            else "finetune(..., straight_through=True) passes gradients through QuantizeLinear and DequantizeLinear "
            "as if nothing were rounded; or exclude them from trainable="
        )
        warnings.warn(
            f"{len(blocked)} of {len(names)} trained parameters have zero gradients and will not change, because "
            f"every path to the outputs passes a node that rounds: {shown}{', ...' if len(blocked) > 4 else ''}. {fix}",
            ZeroGradientWarning,
            stacklevel=4,
        )


@jax.custom_jvp
def _with_tangent(y: Any, smooth: Any) -> Any:
    """The value ``y`` with the tangent of ``smooth``."""
    del smooth
    return y


_with_tangent.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _straight(y, q, x, y_scale, y_zero_point, x_scale, x_zero_point, *, axis, block_size, back_axis, back_block_size):  # type: ignore[no-untyped-def]
    """The result y of DequantizeLinear(q), q = QuantizeLinear(x), with the derivative of the unrounded expression.

    With respect to x it is zero where q saturates.
    """
    if not isinstance(y, jax.Array) and not isinstance(x, jax.Array):
        return y
    work = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)

    def broadcast(parameter: Any, axis: int, block_size: int) -> Any:
        return 0 if parameter is None else broadcast_qparam(parameter, x.shape, axis, block_size).astype(work)

    unrounded = x.astype(work) / broadcast(y_scale, axis, block_size) + broadcast(y_zero_point, axis, block_size)
    info = ml_dtypes.iinfo(q.dtype) if is_integer(q.dtype) else ml_dtypes.finfo(q.dtype)
    near = jnp.rint(jax.lax.stop_gradient(unrounded)) if is_integer(q.dtype) else jax.lax.stop_gradient(unrounded)
    inside = (near >= float(info.min)) & (near <= float(info.max))
    quantised = jax.lax.stop_gradient(jnp.asarray(q).astype(work))
    differentiable = quantised + jnp.where(inside, unrounded - jax.lax.stop_gradient(unrounded), 0)
    zero_point = broadcast(x_zero_point, back_axis, back_block_size)
    smooth = (differentiable - zero_point) * broadcast(x_scale, back_axis, back_block_size)
    return _with_tangent(jnp.asarray(y), smooth.astype(y.dtype))


STRAIGHT: Final = Operator(
    PRIVATE, "StraightThrough", 1, _straight,
    attributes=frozenset({"axis", "block_size", "back_axis", "back_block_size"}),
)  # fmt: skip


def with_straight_through(graph: Graph) -> Graph:
    """The graph with a straight-through estimator for each QuantizeLinear followed by a DequantizeLinear.

    The outputs are unchanged. Operators of QONNX have such gradients by themselves.

    Raises:
        TrainingFormError: there is neither such a pair nor one of these operators.
    """

    def change(graph: Graph) -> Graph:
        producers = {n.outputs[0]: n for n in graph.nodes if n.op_type == "QuantizeLinear"}
        nodes = list[Node]()
        for node in graph.nodes:
            before = producers.get(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
            nodes += [node] if before is None else _with_estimator(before, node)
        return replace(graph, nodes=tuple(nodes))

    changed = map_graphs(graph, change)
    every = [node for inner in changed.walk() for node in inner.nodes]
    if not any(node.target is STRAIGHT or node.domain in qonnx.DOMAINS for node in every):
        raise TrainingFormError(
            "straight_through=True needs a QuantizeLinear followed by a DequantizeLinear, and the model has no such "
            "pair: leave it out. Stored integers and integer products (QLinearConv, MatMulInteger) have no gradients; "
            "to train adapters for stored integers: finetune(..., lora=8)"
        )
    return changed


def _with_estimator(quantize: Node, dequantize: Node) -> tuple[Node, Node]:
    """A DequantizeLinear, and the straight-through estimator that replaces its output."""
    rounded = f"{dequantize.outputs[0]}/rounded"
    parameters = (*quantize.inputs[1:], "")[:2] + (*dequantize.inputs[1:], "")[:2]
    attributes = {
        f"{side}{key}": node.attributes.get(key, default)
        for side, node in (("", quantize), ("back_", dequantize))
        for key, default in (("axis", 1), ("block_size", 0))
    }
    inputs = (rounded, dequantize.inputs[0], quantize.inputs[0], *parameters)
    name = f"{dequantize.name}/straight"
    estimator = Node(name, "StraightThrough", PRIVATE, 1, inputs, dequantize.outputs, attributes, STRAIGHT)
    return replace(dequantize, outputs=(rounded,)), estimator
