"""Keeps weights behind DequantizeLinear packed: ``convert(..., weights="packed")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...ir.analysis import read_counts
from ...ir.graph import Graph, Imported, Node, ancestors
from ...ops import registry
from ...proto.mapped import load
from ...proto.messages import unused_name

MICROSOFT: Final = "com.microsoft"
BITS: Final = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
BLOCK: Final = 128
"""Block size for a scale that covers a whole column or matrix: MatMulNBits takes powers of 2 from 16 on."""


def with_packed(imported: Imported) -> Imported:
    """The model with MatMulNBits in place of DequantizeLinear and MatMul or Gemm in its main graph.

    That covers matrices of 2, 4 or 8 bits with one reader, and with one scale, a scale for each column of the product,
    or for each block of 16, 32, 64, ... rows. Unpacked to float32, 4 bits take eight times the memory. Packed weights
    keep their names.
    """
    graph = imported.graph
    initializers, nodes = dict(graph.initializers), list(graph.nodes)
    producers = {v: n for n in nodes for v in n.outputs}
    readers = read_counts(graph)
    taken = {n for g in graph.walk() for n in g.defines}
    for i, node in enumerate(graph.nodes):
        matrix = _quantized_operand(graph, node, producers, readers)
        if matrix is not None:
            packed = {unused_name(n, taken - {matrix.name}, ".packed"): v for n, v in matrix.packed().items()}
            initializers |= packed
            nodes[i] = matrix.product(node, list(packed))
    others = (n.outputs for n in nodes if n.op_type not in ("DequantizeLinear", "Transpose"))
    read = ancestors(nodes, {v.name for v in graph.outputs}.union(*others))
    return with_nodes(imported, read, initializers)


def with_nodes(imported: Imported, nodes: Sequence[Node], initializers: Mapping[str, Any]) -> Imported:
    """The model with other nodes in its main graph, and without the initializers that only the old ones read."""
    graph = imported.graph
    before, after = ({n for node in each for n in node.reads} for each in (graph.nodes, nodes))
    gone = before - after - {v.name for v in graph.outputs}
    kept = {n: v for n, v in initializers.items() if n not in gone}
    return replace(imported, graph=replace(graph, nodes=tuple(nodes), initializers=kept))


@dataclass(frozen=True)
class _QuantizedMatrix:
    """A weight [out, in], quantised to unsigned integers in blocks along its rows.

    Attributes:
        name: the initializer's name.
        bits: bits of a number.
        numbers: uint8[out, in].
        scales: [out, blocks].
        zeros: uint8[out, blocks].
        block: numbers in a block.
    """

    name: str
    bits: int
    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    block: int

    def packed(self) -> dict[str, np.ndarray]:
        """Weight, scales and, unless they are the middle of the range, zero points, in the format of MatMulNBits."""
        columns, blocks = self.numbers.shape[1], self.scales.shape[1]
        whole = np.pad(self.numbers, ((0, 0), (0, blocks * self.block - columns)))
        arrays = {
            self.name: _pack_bits(whole, self.bits).reshape(len(whole), blocks, -1),
            f"{self.name}.scales": np.ascontiguousarray(self.scales),
        }
        if (self.zeros != 2 ** (self.bits - 1)).any():
            arrays[f"{self.name}.zero_points"] = _pack_bits(self.zeros, self.bits)
        return arrays

    def product(self, node: Node, packed: list[str]) -> Node:
        """The MatMulNBits in place of a node; ``packed`` are the names of ``self.packed()``."""
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        inputs = (node.inputs[0], *packed)
        if bias:
            inputs = (*inputs, *[""] * (5 - len(inputs)), bias)
        rows, columns = self.numbers.shape
        attributes = {"K": columns, "N": rows, "bits": self.bits, "block_size": self.block}
        target = registry.resolve(MICROSOFT, "MatMulNBits", 1)
        return replace(
            node, op_type="MatMulNBits", domain=MICROSOFT, opset=1, inputs=inputs, attributes=attributes, target=target
        )


def _quantized_operand(
    graph: Graph, node: Node, producers: Mapping[str, Node], readers: Mapping[str, int]
) -> _QuantizedMatrix | None:
    """The quantised matrix that a MatMul or Gemm multiplies by; None for other nodes."""
    if (node.domain, node.op_type) not in {("", "MatMul"), ("", "Gemm")} or not _is_plain(graph, node):
        return None
    name, transposed, constants = node.inputs[1], bool(node.attributes.get("transB", 0)), graph.initializers
    while name in producers and readers[name] == 1:
        producer = producers[name]
        name = producer.inputs[0]
        perm = tuple(producer.attributes.get("perm", (1, 0)))
        if (producer.domain, producer.op_type) == ("", "Transpose") and perm == (1, 0):
            transposed = not transposed
        elif producer.op_type == "DequantizeLinear":
            scale_and_zero = producer.inputs[1:]
            if name not in constants or readers[name] != 1 or any(n and n not in constants for n in scale_and_zero):
                return None
            return _quantized_matrix(
                name, producer, [load(constants[n]) if n else None for n in (name, *scale_and_zero)], transposed
            )
        else:
            return None
    return None


def _is_plain(graph: Graph, node: Node) -> bool:
    """Whether a node computes just a product and a bias, without devices assigned to it."""
    get = node.attributes.get
    if node.devices or get("transA", 0) or get("alpha", 1.0) != 1 or get("beta", 1.0) != 1:
        return False
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    return not bias or (bias in graph.initializers and graph.initializers[bias].ndim == 1)


def _quantized_matrix(name: str, producer: Node, operands: list[Any], transposed: bool) -> _QuantizedMatrix | None:
    """The operands of a DequantizeLinear as a matrix; ``transposed`` if they are stored as [out, in]."""
    weight, scale, zero = (*operands, None)[:3]
    bits, attributes = BITS.get(weight.dtype.name), producer.attributes
    if bits is None or weight.ndim != 2 or attributes.get("output_dtype", 0) or scale.dtype.itemsize not in (2, 4):
        return None
    middle = 0 if weight.dtype.name[0] == "u" else 2 ** (bits - 1)
    zero = np.zeros(scale.shape, np.int16) if zero is None else zero.astype(np.int16)
    numbers, axis = weight.astype(np.int16) + middle, attributes.get("axis", 1) % 2
    if not transposed:
        numbers, axis = numbers.T, 1 - axis  # now axis 0 is the product's columns
    rows, columns = numbers.shape
    if scale.ndim == 2:
        block = attributes.get("block_size", 0)
        parts = (v if transposed else v.T for v in (scale, zero))
        if axis != 1 or block < 16 or block & (block - 1):
            return None
        scale, zero = parts
    else:
        if scale.size > 1 and (axis != 0 or scale.size != rows):
            return None
        block = min(BLOCK, max(16, 1 << (columns - 1).bit_length()))
        extents = rows, -(-columns // block)
        scale, zero = (np.broadcast_to(v.reshape(-1, 1), extents) for v in (scale, zero))
    return _QuantizedMatrix(name, bits, numbers.astype(np.uint8), scale, (zero + middle).astype(np.uint8), block)


def _pack_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers packed into rows of bytes, low bits first."""
    per = 8 // bits
    whole = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per))).reshape(len(numbers), -1, per)
    shifted = whole << (np.arange(per, dtype=np.uint8) * np.uint8(bits))
    joined: np.ndarray = np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint8)
    return joined
