"""Unpacks packed weights once, when a model is converted: ``convert(..., weights="float32")``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...errors import InputTypeError
from ...ir.graph import Graph, Imported, Node
from ...ops.microsoft.quant import dequantized_nbits, unpack, unpacked
from ...ops.microsoft.weights import E2M1, dequantized_bnb4
from ...proto.mapped import load
from ...proto.types import to_code
from .pack import MICROSOFT, with_nodes
from .rewritten import new_node

OPSET: Final = 21
"""The opset of the nodes that replace a packed product."""


def with_weights(imported: Imported, dtype: Any) -> Imported:
    """The model with MatMul in place of products by packed constant weights in its main graph.

    float32 takes eight times the memory of 4 bits, and is faster where many rows are multiplied at a time. Weights keep
    their names.

    Args:
        imported: the model.
        dtype: the type of the weights; activations keep theirs.

    Raises:
        InputTypeError: ``dtype`` is no floating type.
    """
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if not jnp.issubdtype(kind, jnp.floating):
        raise InputTypeError(
            f"weights is {dtype!r}; pass 'float32', 'bfloat16' or 'float16' to unpack packed weights, or 'packed' to "
            "keep weights behind DequantizeLinear packed"
        )
    graph, nodes, initializers = imported.graph, list[Node](), dict(imported.graph.initializers)
    for node in graph.nodes:
        packed = _operands(graph, node)
        if packed is None:
            nodes.append(node)
            continue
        weight = PRODUCTS[node.op_type].weight(node, packed)
        initializers[node.inputs[1]] = np.ascontiguousarray(weight.T).astype(kind)
        nodes += _product(graph, node, kind)
    return with_nodes(imported, nodes, initializers)


def _operands(graph: Graph, node: Node) -> Sequence[Any] | None:
    """The constants of a product's packed weight; None if it has none, or another node reads them."""
    product = PRODUCTS.get(node.op_type)
    if node.domain != MICROSOFT or product is None:
        return None
    names = [_input(node, place) for place in product.constants]
    readers = [n for n in graph.nodes if names[0] in n.reads]
    if any(n and n not in graph.initializers for n in names) or len(readers) > 1:
        return None
    return [load(graph.initializers[n]) if n else None for n in names]


def _input(node: Node, place: int | None) -> str:
    """The name of an input; empty if it is absent."""
    return "" if place is None or place >= len(node.inputs) else node.inputs[place]


def _of_integers(node: Node, operands: Sequence[Any]) -> np.ndarray:
    """The weight [N, K] of MatMulNBits."""
    rows, columns, bits = (int(node.attributes.get(n, 4)) for n in ("N", "K", "bits"))
    size = int(node.attributes["block_size"])
    shape = rows, -(-columns // size)
    packed, scales, zeros, groups = operands
    groups = np.arange(columns) // size if groups is None else groups[:columns]
    scales, zeros = scales.reshape(shape).astype(np.float32), unpacked(zeros, shape, bits)
    return np.asarray(dequantized_nbits(packed.reshape(*shape, -1), scales, zeros, groups, bits))


def _of_bnb4(node: Node, operands: Sequence[Any]) -> np.ndarray:
    sizes = (int(node.attributes[n]) for n in ("N", "K", "block_size", "quant_type"))
    weight = np.asarray(dequantized_bnb4(*operands, *sizes))
    return weight if node.attributes.get("transB", 1) else weight.T


def _of_e2m1(node: Node, operands: Sequence[Any]) -> np.ndarray:
    packed, scales, scale = operands
    scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale.reshape(())
    return _scaled(E2M1[unpack(packed, 4)], scales, node.attributes.get("block_size", 16))


def _of_e4m3(node: Node, operands: Sequence[Any]) -> np.ndarray:
    packed, scales = operands
    return _scaled(packed.astype(np.float32), scales, node.attributes.get("block_size", 128))


def _scaled(numbers: np.ndarray, scales: np.ndarray, block_size: int) -> np.ndarray:
    return np.asarray(numbers * np.repeat(scales, block_size, axis=1)[:, : numbers.shape[1]])


@dataclass(frozen=True)
class _Product:
    """An operator that multiplies by a packed weight.

    Attributes:
        weight: computes the weight [out, in] from a node and its constants.
        constants: their input positions, the packed weight first.
        typed: the position of a constant that has the type of A, if any.
        bias, rounding: the positions of a bias, and of the scale by which A is rounded to E4M3, if any.
    """

    weight: Callable[[Node, Sequence[Any]], np.ndarray]
    constants: tuple[int, ...]
    typed: int | None = None
    bias: int | None = None
    rounding: int | None = None


PRODUCTS: Final = {
    "MatMulNBits": _Product(_of_integers, (1, 2, 3, 4), typed=2, bias=5),
    "MatMulBnb4": _Product(_of_bnb4, (1, 2), typed=2),
    "MatMulBlockQuantizedFp4Weight": _Product(_of_e2m1, (1, 2, 3), bias=5),
    "MatMulBlockQuantizedFp8Weight": _Product(_of_e4m3, (1, 2), bias=4, rounding=3),
}


def _product(graph: Graph, node: Node, kept: np.dtype[Any]) -> list[Node]:
    """MatMul by a weight stored as ``kept`` and cast to the type of A, and Add if there is a bias."""
    product, A, weight = PRODUCTS[node.op_type], node.inputs[0], node.inputs[1]
    bias, rounding = _input(node, product.bias), _input(node, product.rounding)
    steps: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []

    def step(op_type: str, *inputs: str, **attributes: Any) -> str:
        steps.append((op_type, inputs, attributes))
        return f"{node.name}/{weight}/{len(steps)}"

    def cast(name: str, dtype: Any) -> str:
        return step("Cast", name, to=to_code(np.dtype(dtype)))

    if rounding:  # in float32
        x = step("Div", cast(A, np.float32), rounding)
        x = step("Mul", cast(cast(x, ml_dtypes.float8_e4m3fn), np.float32), rounding)
        y = step("CastLike", step("MatMul", x, cast(weight, np.float32)), A)
    elif product.typed is None:
        y = step("MatMul", A, step("CastLike", weight, A))
    else:
        used = graph.initializers[node.inputs[product.typed]].dtype
        y = step("MatMul", A, weight if used == kept else cast(weight, used))
    if bias:
        step("Add", y, bias)
    outputs = [f"{node.name}/{weight}/{i}" for i in range(1, len(steps))] + [node.outputs[0]]
    return [
        new_node(node.name, op_type, OPSET, *inputs, outputs=(output,), **attributes)
        for (op_type, inputs, attributes), output in zip(steps, outputs, strict=True)
    ]
