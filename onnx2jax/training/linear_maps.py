"""Finds the linear maps of a graph: products with a stored matrix, packed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import jax.numpy as jnp
import numpy as np

from ..ir.graph import Graph, Node
from ..proto.types import to_dtype

MICROSOFT: Final = "com.microsoft"
PRODUCTS: Final = {("", "MatMul"), ("", "Gemm")} | {(MICROSOFT, n) for n in ("FusedMatMul", "TransposeMatMul")}
CODES: Final = {(MICROSOFT, "MatMulBlockQuantizedFp4Weight"): 2, (MICROSOFT, "MatMulBlockQuantizedFp8Weight"): 1}
"""Products with a weight [out, in] of 4- or 8-bit floating numbers in blocks, and how many numbers a byte holds."""
PACKED: Final = {(MICROSOFT, "MatMulNBits"), (MICROSOFT, "MatMulBnb4"), *CODES}
"""Products with a packed weight [out, in], with extents from the attributes K and N, or from its bytes."""
QUANTIZERS: Final = {"DequantizeLinear", "QuantizeLinear"}
BETWEEN: Final = QUANTIZERS | {"Cast", "CastLike", "Identity", "Transpose"}
"""Operators allowed between a stored weight and its product."""
BY_HAND: Final = {"Mul", "Sub"}
"""Also allowed for an integer weight: ``Mul(Sub(Cast(w), zero_point), scale)``."""


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A node that multiplies by a stored weight: ``y = factor * x W``, optionally with a bias.

    Attributes:
        name: the name of the stored weight.
        between: the nodes between the stored weight and W.
        shape: the shape of W, [in, out].
        transposed: whether the weight is stored as [out, in].
        dtype: the element type of x and y; None if no constant determines it.
    """

    node: Node
    name: str
    between: tuple[Node, ...]
    shape: tuple[int, int]
    transposed: bool
    dtype: np.dtype | None
    factor: float = 1.0

    @property
    def is_packed(self) -> bool:
        """Whether the weight is stored or used as integers, so that an adapter cannot be merged into it."""
        kinds = {n.op_type for n in self.between}
        return (self.node.domain, self.node.op_type) in PACKED or not kinds.isdisjoint(QUANTIZERS | BY_HAND)

    def matches(self, pattern: str) -> bool:
        return any(n == pattern or fnmatchcase(n, pattern) for n in (self.name, self.node.name))

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)} of {self.node}"


def linear_maps(graph: Graph) -> Iterator[LinearMap]:
    """The products with a stored matrix in the main graph."""
    constants = graph.initializers
    for node in graph.nodes:
        operator = node.domain, node.op_type
        if operator not in PRODUCTS | PACKED or node.inputs[0] in constants:
            continue
        name, between = stored_weight(node.inputs[1], graph)
        if name in constants:
            packed = operator in PACKED
            linear = _packed_map(node, name, constants) if packed else _product_map(node, name, between, constants)
            if linear is not None and (linear.dtype is None or jnp.issubdtype(linear.dtype, jnp.floating)):
                yield linear


def stored_weight(name: str, graph: Graph) -> tuple[str, list[Node]]:
    """The name of the stored array from which a weight is computed, and the nodes between, last first."""
    between: list[Node] = []
    while node := graph.producers.get(name):
        if node.op_type in BY_HAND:  # follow the stored integer matrix, not the scale or zero point
            operands = node.inputs[: 1 + (node.op_type == "Mul")]
            sources = [stored_weight(operand, graph) for operand in operands]
            matrices = [source for source in sources if _is_integer_matrix(graph.initializers.get(source[0]))]
            if len(matrices) != 1:
                break
            return matrices[0][0], [*between, node, *matrices[0][1]]
        if node.op_type not in BETWEEN:
            break
        between.append(node)
        name = node.inputs[0]
    return name, between


def _is_integer_matrix(stored: np.ndarray | None) -> bool:
    return stored is not None and stored.ndim == 2 and not jnp.issubdtype(stored.dtype, jnp.floating)


def _packed_map(node: Node, name: str, constants: Mapping[str, np.ndarray]) -> LinearMap | None:
    if codes := CODES.get((node.domain, node.op_type)):
        rows, columns = constants[name].shape[:2]
        return LinearMap(node, name, (), (columns * codes, rows), True, None)
    scales = constants.get(node.inputs[2])
    if scales is None or not node.attributes.get("transB", 1):
        return None
    return LinearMap(node, name, (), (node.attributes["K"], node.attributes["N"]), True, scales.dtype)


def _product_map(node: Node, name: str, between: list[Node], constants: Mapping[str, np.ndarray]) -> LinearMap | None:
    weight, transposed, attributes = constants[name], False, node.attributes
    dtype: np.dtype | None = weight.dtype
    for step in reversed(between):
        if step.op_type == "Transpose":
            transposed ^= tuple(step.attributes.get("perm", (1, 0))) == (1, 0)
        elif step.op_type == "CastLike":
            dtype = None
        elif step.op_type == "Cast":
            dtype = to_dtype(step.attributes["to"])
        elif step.op_type == "DequantizeLinear":
            scale, code = constants.get(step.inputs[1]), step.attributes.get("output_dtype", 0)
            if scale is None and not code:
                return None
            dtype = to_dtype(code) if scale is None or code else scale.dtype
    factor = attributes.get("alpha", 1.0)
    moved = any(attributes.get(k, 0) for k in ("transA", "transBatchA", "transBatchB"))
    if weight.ndim != 2 or moved or not factor:
        return None
    transposed ^= bool(attributes.get("transB", 0))
    rows, columns = weight.shape[::-1] if transposed else weight.shape
    return LinearMap(node, name, tuple(between), (rows, columns), transposed, dtype, factor)
