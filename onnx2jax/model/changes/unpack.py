"""Packed weights unpacked once, when a model is converted: ``convert(..., weights="float32")``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ...errors import InputTypeError
from ...ir.graph import Graph, Imported, Node
from ...ops import registry
from ...ops.microsoft.quant import unpack, unpacked
from ...proto.dtypes import to_code
from ...proto.mapped import load

PACKED: Final = ("com.microsoft", "MatMulNBits")
OPSET: Final = 21
"""Of the operators that stand in its place."""


def with_weights(imported: Imported, dtype: Any) -> Imported:
    """The model with MatMul by floating weights where its main graph has MatMulNBits by constant ones.

    It takes eight times the memory of 4 bits, and is faster where many rows are multiplied at a time. The weights have
    the names of the packed ones.

    Args:
        imported: the model.
        dtype: of the weights; what they multiply has its own.

    Raises:
        InputTypeError: it is no floating type.
    """
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if not jnp.issubdtype(kind, jnp.floating):
        raise InputTypeError(
            f"weights is {dtype!r}: 'float32', 'bfloat16' or 'float16' say how to keep packed weights, and 'packed' "
            "keeps those behind DequantizeLinear as they are"
        )
    graph, nodes, initializers = imported.graph, list[Node](), dict(imported.graph.initializers)
    for node in graph.nodes:
        packed = _operands(graph, node)
        if packed is None:
            nodes.append(node)
            continue
        initializers[node.inputs[1]] = _weight(node, packed).astype(kind)
        nodes += _product(node, kind, graph.initializers[node.inputs[2]].dtype)
    gone = {n for node in graph.nodes for n in node.reads} - {n for node in nodes for n in node.reads}
    gone -= {v.name for v in graph.outputs}
    initializers = {n: v for n, v in initializers.items() if n not in gone}
    return replace(imported, graph=replace(graph, nodes=tuple(nodes), initializers=initializers))


def _operands(graph: Graph, node: Node) -> Sequence[np.ndarray | None] | None:
    """Weight, scales and zero points of a product whose weight nothing else reads; None where it is another."""
    if (node.domain, node.op_type) != PACKED or (len(node.inputs) > 4 and node.inputs[4]):
        return None
    names = (*node.inputs, "")[1:4]
    readers = [n for n in graph.nodes if names[0] in n.reads]
    if any(n and n not in graph.initializers for n in names) or len(readers) > 1:
        return None
    return [load(graph.initializers[n]) if n else None for n in names]


def _weight(node: Node, operands: Sequence[np.ndarray | None]) -> np.ndarray:
    """The weight [K, N]."""
    rows, columns, bits = (int(node.attributes.get(n, 4)) for n in ("N", "K", "bits"))
    blocks = -(-columns // int(node.attributes["block_size"]))
    packed, scales, zeros = operands
    assert packed is not None and scales is not None
    numbers = unpack(packed.reshape(rows, blocks, -1), bits).astype(np.float32)
    shift = unpacked(zeros, (rows, blocks), bits).astype(np.float32)[..., None]
    weight = (numbers - shift) * scales.reshape(rows, blocks, 1).astype(np.float32)
    return np.ascontiguousarray(weight.reshape(rows, -1)[:, :columns].T)


def _product(node: Node, kept: np.dtype[Any], used: np.dtype[Any]) -> list[Node]:
    """MatMul by a weight ``used`` in this type, behind Cast where it is ``kept`` in another; Add where there is a bias.

    MatMulNBits has its scales in the type of what it multiplies.
    """
    bias = node.inputs[5] if len(node.inputs) > 5 else ""
    weight, out = node.inputs[1], node.outputs[0]
    own = f"{node.name}/{weight}"
    cast = weight if kept == used else own
    steps: list[tuple[str, tuple[str, ...], str, dict[str, Any]]]
    steps = [] if cast == weight else [("Cast", (weight,), own, {"to": to_code(used)})]
    steps += [("MatMul", (node.inputs[0], cast), f"{own}/product" if bias else out, {})]
    steps += [("Add", (f"{own}/product", bias), out, {})] if bias else []
    return [
        Node(node.name, op_type, "", OPSET, inputs, (output,), attributes, registry.resolve("", op_type, OPSET))
        for op_type, inputs, output, attributes in steps
    ]
