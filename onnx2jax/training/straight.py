"""Gradients past rounding: which weights get none, and straight-through estimation, which makes some up."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..errors import TrainingFormError
from ..ir.graph import Graph, Node
from ..ops.cast import is_integer
from ..ops.quant import broadcast_qparam
from ..ops.registry import Operator
from ..proto.dtypes import to_dtype
from .form import PRIVATE, everywhere

ROUNDING: Final = {"QuantizeLinear", "DynamicQuantizeLinear", "Round", "Floor", "Ceil", "Sign"}


class ZeroGradientWarning(UserWarning):
    """Weights that were to be trained stay as they are, because all that they decide is rounded."""


def _rounds(node: Node) -> bool:
    """Whether the outputs of a node do not move with its inputs, but jump."""
    if node.op_type == "Cast":
        kind = to_dtype(node.attributes["to"])
        return is_integer(kind) or kind == np.bool_
    return node.op_type in ROUNDING or node.op_type.startswith("QLinear")


def rounded_away(graph: Graph, names: Collection[str]) -> dict[str, Node]:
    """Of some parameters (by Graph.key), those from which all ways to the outputs lead over a rounding; and over which.

    What is read inside a node's graphs, or by a function, counts as felt.
    """
    felt = {v.name for v in graph.outputs}
    walls: dict[str, Node] = {}
    for node in reversed(graph.nodes):
        if felt.isdisjoint(node.outputs):
            walls.update({n: walls[v] for v in node.outputs if v in walls for n in node.reads})
        elif _rounds(node):
            walls.update(dict.fromkeys(node.reads, node))
        else:
            felt.update(node.reads)
    own = {graph.key(n): n for n in graph.initializers}
    return {n: walls[own[n]] for n in names if n in own and own[n] in walls and own[n] not in felt}


def warn_of_rounding(graph: Graph, names: Collection[str], straight_through: bool) -> None:
    """Say which of the weights to train will not move."""
    if found := rounded_away(graph, names):
        shown = ", ".join(f"{name!r} ({node})" for name, node in list(found.items())[:4])
        cure = (
            "only a QuantizeLinear that a DequantizeLinear follows passes gradients on. Leave them out of trainable="
            if straight_through
            else "finetune(..., straight_through=True) passes gradients through QuantizeLinear and DequantizeLinear as "
            "though nothing were rounded; or leave them out of trainable="
        )
        warnings.warn(
            f"{len(found)} of {len(names)} trained parameters have gradients of zero and will not move, for all that "
            f"they decide passes a node that rounds: {shown}{', ...' if len(found) > 4 else ''}. {cure}",
            ZeroGradientWarning,
            stacklevel=3,
        )


@jax.custom_jvp
def _carrying(y: Any, smooth: Any) -> Any:
    """y, which moves as ``smooth`` does."""
    del smooth
    return y


_carrying.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _straight(y, q, x, y_scale, y_zero_point, x_scale, x_zero_point, *, axis, block_size, back_axis, back_block_size):  # type: ignore[no-untyped-def]
    """What DequantizeLinear made (y) of what QuantizeLinear made (q) of x, with the derivatives of no rounding.

    Beyond the range of q's type they are zero in x.
    """
    if not isinstance(y, jax.Array) and not isinstance(x, jax.Array):
        return y
    work = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)

    def laid(parameter: Any, axis: int, block_size: int) -> Any:
        return 0 if parameter is None else broadcast_qparam(parameter, x.shape, axis, block_size).astype(work)

    exact = x.astype(work) / laid(y_scale, axis, block_size) + laid(y_zero_point, axis, block_size)
    info = ml_dtypes.iinfo(q.dtype) if is_integer(q.dtype) else ml_dtypes.finfo(q.dtype)
    near = jnp.rint(jax.lax.stop_gradient(exact)) if is_integer(q.dtype) else jax.lax.stop_gradient(exact)
    inside = (near >= float(info.min)) & (near <= float(info.max))
    whole = jax.lax.stop_gradient(jnp.asarray(q).astype(work))
    moving = whole + jnp.where(inside, exact - jax.lax.stop_gradient(exact), 0)
    smooth = (moving - laid(x_zero_point, back_axis, back_block_size)) * laid(x_scale, back_axis, back_block_size)
    return _carrying(jnp.asarray(y), smooth.astype(y.dtype))


STRAIGHT: Final = Operator(
    PRIVATE, "StraightThrough", 1, _straight,
    attributes=frozenset({"axis", "block_size", "back_axis", "back_block_size"}),
)  # fmt: skip


def with_straight_through(graph: Graph) -> Graph:
    """The graph with gradients through every QuantizeLinear that a DequantizeLinear follows; the same numbers.

    Raises:
        TrainingFormError: there is no such pair.
    """
    count = 0

    def change(graph: Graph) -> Graph:
        nonlocal count
        makers = {n.outputs[0]: n for n in graph.nodes if n.op_type == "QuantizeLinear"}
        nodes = []
        for node in graph.nodes:
            before = makers.get(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
            if before is None:
                nodes.append(node)
                continue
            count += 1
            rounded = f"{node.outputs[0]}/rounded"
            x, q = before.inputs[0], node.inputs[0]
            parameters = (*before.inputs[1:], "")[:2] + (*node.inputs[1:], "")[:2]
            attributes = {
                f"{side}{key}": of.attributes.get(key, default)
                for side, of in (("", before), ("back_", node))
                for key, default in (("axis", 1), ("block_size", 0))
            }
            nodes.append(replace(node, outputs=(rounded,)))
            nodes.append(
                Node(
                    f"{node.name}/straight", "StraightThrough", PRIVATE, 1, (rounded, q, x, *parameters), node.outputs,
                    attributes, STRAIGHT,
                )
            )  # fmt: skip
        return replace(graph, nodes=tuple(nodes))

    changed = everywhere(graph, change)
    if not count:
        raise TrainingFormError(
            "straight_through=True passes gradients through a QuantizeLinear that a DequantizeLinear follows, and the "
            "model has no such pair: leave it out. Integers that were stored, and products of integers (QLinearConv, "
            "MatMulInteger), have no gradients; adapters learn beside stored ones: finetune(..., lora=8)"
        )
    return changed
