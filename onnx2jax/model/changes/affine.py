"""Folds BatchNormalization, and constants multiplied or added per channel, into the weights of convolutions and Gemm.

    Conv(x, W, b) * scale + shift  =  Conv(x, scale * W, scale * b + shift)
    Conv(x * scale + shift, W, b)  =  Conv(x, W * scale, b + sum(W * shift))         without padding

Scaled weights are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from ...ir import analysis
from ...ir.graph import Graph, Node
from ...jaxpr.const_eval import is_foldable
from ...proto.mapped import owned
from ...proto.messages import unused_name
from .no_ops import with_inputs

ARITHMETIC: Final = frozenset(("Add", "Sub", "Mul", "Div"))


class _Affine(NamedTuple):
    """A node as an affine function of each channel of its non-constant operand: ``x * scale + shift``."""

    data: str
    scale: Any
    """One number, or a vector over channels, in float64; so is ``shift``."""
    shift: Any
    name: str
    """The initializer of the shift, whose name the new bias takes."""


def with_affine_folded(graph: Graph, constant: Callable[[str], Any], taken: set[str]) -> Graph:
    """The graph with scales and shifts in the weights beside them, where nothing else reads those.

    Args:
        graph: the graph.
        constant: the value of an initializer, one that the graph captures included; None for other names.
        taken: names that new initializers may not have; theirs are added.
    """
    folding = _Folding(graph, constant, taken)
    with np.errstate(all="ignore"):  # numbers that are not finite stay where they are
        for node in graph.nodes:
            folding.add(node)
    return replace(graph, nodes=tuple(folding.nodes.values()), initializers={**graph.initializers, **folding.new})


class _Folding:
    """The nodes so far, by their first output.

    Attributes:
        nodes: the nodes in order.
        new: initializers that are new, or have new values.
    """

    def __init__(self, graph: Graph, constant: Callable[[str], Any], taken: set[str]) -> None:
        self.nodes, self.new = dict[str, Node](), dict[str, np.ndarray]()
        self._constant, self._taken = constant, taken
        self._readers = analysis.read_counts(graph)

    def add(self, node: Node) -> None:
        """Add a node, folded with its producer if possible."""
        for name in dict.fromkeys(node.inputs):
            before = self.nodes.get(name) if self._readers[name] == 1 else None
            if before is None:
                continue
            merged = self._behind(before, node) or self._in_front(before, node)
            if merged is not None:
                del self.nodes[name]
                node = merged
                break
        self.nodes[next(filter(None, node.outputs), node.name)] = node

    def value(self, name: str) -> np.ndarray | None:
        """The value of an initializer."""
        return self.new[name] if name in self.new else self._constant(name)

    def _behind(self, product: Node, node: Node) -> Node | None:
        """A product whose result is scaled or shifted, as one node; None where they are others."""
        size, rank = self._channels(product)
        affine = self._affine(node, product.outputs[0], size, rank) if size else None
        if affine is None:
            return None
        scaled: Any = self.value(product.inputs[1])
        if np.any(affine.scale != 1):
            if self._readers[product.inputs[1]] != 1:
                return None
            by, groups = np.broadcast_to(affine.scale, size), _groups(product)
            first = by.reshape(-1, *[1] * (rank - 1))
            by = first if _is_out_first(product) else _by_second_axis(by, scaled, groups)
            scaled = by * scaled.astype(np.float64)
        return self._rewritten(product, node.outputs, scaled, affine, size)

    def _in_front(self, before: Node, conv: Node) -> Node | None:
        """A convolution without padding of a normalised input, as one node; None where they are others."""
        affine = self._normalization(before)
        if affine is None or (conv.domain, conv.op_type) != ("", "Conv") or conv.inputs[0] != before.outputs[0]:
            return None
        if any(conv.attributes.get("pads", ())) or conv.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            return None
        weight, groups = self.value(conv.inputs[1]), _groups(conv)
        if weight is None or not _is_floating(weight) or self._readers[conv.inputs[1]] != 1:
            return None
        if weight.shape[1] * groups != affine.scale.size:
            return None
        scale, shift = (_by_second_axis(v, weight, groups) for v in (affine.scale, affine.shift))
        exact = weight.astype(np.float64)
        added = (exact * shift).sum(tuple(range(1, weight.ndim)))
        conv = with_inputs(conv, {conv.inputs[0]: affine.data})
        affine = affine._replace(scale=1.0, shift=added)
        return self._rewritten(conv, conv.outputs, exact * scale, affine, len(weight))

    def _rewritten(
        self, product: Node, outputs: tuple[str, ...], weight: np.ndarray, affine: _Affine, size: int
    ) -> Node | None:
        """The product with another weight, and its bias scaled and shifted; None where numbers would be lost."""
        stored: Any = self.value(product.inputs[1])
        name = product.inputs[2] if len(product.inputs) > 2 else ""
        bias: Any = self.value(name) if name else np.zeros((), stored.dtype)
        scaled = bias.astype(np.float64) * affine.scale
        moved = np.broadcast_to(scaled + affine.shift, (size,))
        new = [v.astype(stored.dtype) for v in (weight, moved)]
        largest, most = abs(new[0].astype(np.float64)).max(initial=0), abs(scaled)
        if not is_foldable(largest, new[1], most) or np.any((new[0] == 0) & (weight != 0)):
            return None
        if weight is not stored:
            self.new[product.inputs[1]] = owned(new[0])
        if not name and not np.any(moved):
            return replace(product, outputs=outputs)
        if not name or self._readers[name] != 1:
            reused = self._readers[affine.name] == 1
            name = affine.name if reused else unused_name(f"{product.inputs[1]}.bias", self._taken)
            self._taken.add(name)
        self.new[name] = owned(new[1])
        self._readers[name] = 1
        return replace(product, inputs=(*product.inputs[:2], name), outputs=outputs)

    def _channels(self, node: Node) -> tuple[int, int]:
        """Of a product by a constant weight: its channels, on axis 1, and the rank of its result; (0, 0) of others."""
        if node.domain or node.op_type not in ("Conv", "ConvTranspose", "Gemm"):
            return 0, 0
        weight, bias = self.value(node.inputs[1]), node.inputs[2] if len(node.inputs) > 2 else ""
        added: Any = self.value(bias) if bias else None
        if weight is None or not _is_floating(weight) or (bias and added is None):
            return 0, 0
        if node.op_type == "Gemm" and (node.opset < 7 or node.attributes.get("beta", 1.0) != 1 or np.ndim(added) > 1):
            return 0, 0
        return len(weight) if _is_out_first(node) else weight.shape[1] * _groups(node), weight.ndim

    def _affine(self, node: Node, data: str, channels: int, rank: int) -> _Affine | None:
        """What a node does to the channels of ``data``; None where that is anything else."""
        affine = self._normalization(node)
        if affine is not None:
            return affine if affine.data == data and affine.scale.size == channels else None
        if node.domain or node.op_type not in ARITHMETIC or len(node.inputs) != 2 or node.opset < 7:
            return None
        first = node.inputs[0] == data
        if not first and node.op_type in ("Sub", "Div"):
            return None
        name = node.inputs[1 if first else 0]
        value = self.value(name)
        if value is None or not _is_floating(value) or value.ndim > rank:
            return None
        extents, along = (1,) * (rank - value.ndim) + value.shape, (1, channels, *(1,) * (rank - 2))
        if any(n not in (1, m) for n, m in zip(extents, along, strict=False)):
            return None
        by = value.astype(np.float64).reshape(-1)
        if node.op_type in ("Add", "Sub"):
            shift, like = (by if node.op_type == "Add" else -by), (name if value.shape == (channels,) else "")
            return _Affine(data, 1.0, shift, like)
        return _Affine(data, by if node.op_type == "Mul" else 1 / by, 0.0, "") if by.all() else None

    def _normalization(self, node: Node) -> _Affine | None:
        """What BatchNormalization does in inference; None for other nodes."""
        if node.domain or node.op_type != "BatchNormalization" or len(node.outputs) != 1 or len(node.inputs) != 5:
            return None
        if node.attributes.get("training_mode", 0) or not node.attributes.get("spatial", 1):
            return None
        parameters = [self.value(n) for n in node.inputs[1:]]
        if any(v is None or not _is_floating(v) for v in parameters):
            return None
        scale, bias, mean, variance = (v.astype(np.float64) for v in parameters if v is not None)
        scale = scale / np.sqrt(variance + np.float64(np.float32(node.attributes.get("epsilon", 1e-5))))
        return _Affine(node.inputs[0], scale, bias - mean * scale, node.inputs[2])


def _is_floating(value: np.ndarray) -> bool:
    """Whether an array is of float16, bfloat16, float32 or float64."""
    return value.dtype.name in ("float16", "bfloat16", "float32", "float64")


def _groups(product: Node) -> int:
    return int(product.attributes.get("group", 1))


def _is_out_first(product: Node) -> bool:
    """Whether the channels of a product's result are the first axis of its weight; else the second, by groups."""
    return product.op_type == "Conv" or bool(product.attributes.get("transB", 0))


def _by_second_axis(vector: np.ndarray, weight: np.ndarray, groups: int) -> np.ndarray:
    """A vector over channels that are the second axis of a weight, by groups, to broadcast against the weight."""
    rows = np.repeat(vector.reshape(groups, -1), len(weight) // groups, axis=0)
    return rows.reshape(*rows.shape, *[1] * (weight.ndim - 2))
