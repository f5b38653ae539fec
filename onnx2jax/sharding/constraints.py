"""Sharding constraints on the values of nodes, from a device configuration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import ShardingError, ShardingWarning
from ..ir.graph import Node
from ..ops.arrays import is_traced
from ..ops.registry import Operator, Shards
from ..proto.devices import Sharding
from .rules import Constraint

Axes = tuple[tuple[str, ...], ...]
"""For each split of a sharding, the mesh axes that it is over, outermost first."""

ALONG: Final = {"MatMulNBits": (1, 1, "in"), "MoE": (2, 0, "experts"), "QMoE": (2, 0, "experts")}
"""Operators that need to know how a weight is sharded: the weight's input, its axis, and ``Shards.along``."""


def is_excluded(node: Node) -> bool:
    """Whether ONNX defines no sharding of the operator (rule DV-18)."""
    return isinstance(node.target, Operator) and node.target.unsharded


def factored(sharding: Sharding, axes: Axes, shape: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """The shape in which every sharded factor is an axis, and the PartitionSpec entries for it."""
    factored: list[Any] = []
    spec: list[Any] = []
    by_axis = _by_axis(sharding, len(shape))
    for axis, extent in enumerate(shape):
        splits = by_axis.get(axis, [])
        spec += [axes[i] for i in splits] or [None]
        if len(splits) < 2:
            factored.append(extent)
            continue
        factors = [sharding.splits[i].extent for i in splits]
        free = [f for f in factors if not isinstance(f, int)]
        known = math.prod(f for f in factors if isinstance(f, int))
        if len(free) > 1 or known < 1 or extent % known or (not free and known != extent):
            raise ShardingError(f"axis {axis} of {extent} is not the product of {factors}", rule="DV-10")
        factored += [f if isinstance(f, int) else extent // known for f in factors]
    return tuple(factored), spec


def _by_axis(sharding: Sharding, rank: int) -> dict[int, list[int]]:
    """Axis, counted from the first -> indices of its splits (rule DV-09)."""
    axes = [a + rank if a < 0 else a for a in sharding.axes]
    if not all(0 <= a < rank for a in axes):
        raise ShardingError(f"axes {list(sharding.axes)} of a tensor of rank {rank}", rule="DV-09")
    if len(set(axes)) < len(axes):
        raise ShardingError(f"axes {list(sharding.axes)} of a tensor of rank {rank} name one twice", rule="DV-09")
    result: dict[int, list[int]] = {}
    for i, split in enumerate(sharding.splits):
        result.setdefault(split.axis + rank if split.axis < 0 else split.axis, []).append(i)
    return result


class Constraints(Constraint):
    """Applies sharding constraints to the inputs and outputs of annotated nodes.

    Attributes:
        axes: the mesh axes of each applied sharding.
        sharded: names of the sharded weights.
    """

    def __init__(self, name: str, mesh: Mesh, axes: Mapping[Sharding, Axes], sharded: Collection[str] = ()) -> None:
        self.name, self.mesh, self.axes, self.sharded = name, mesh, axes, frozenset(sharded)
        self._warned: set[tuple[str, str]] = set()

    def __call__(self, node: Node, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        values = list(values)
        if self.name not in node.devices or is_excluded(node):
            return values
        for s in node.devices[self.name].shardings:
            for i, (name, value) in enumerate(zip(names, values, strict=False)):
                if name == s.tensor and s in self.axes and is_traced(value) and hasattr(value, "ndim"):
                    values[i] = self._constrained(node, s, value)
        return values

    def shards(self, node: Node, /) -> Shards:
        if node.op_type in ALONG and self.name in node.devices:
            position, axis, along = ALONG[node.op_type]
            weight = node.inputs[position]
            for s in node.devices[self.name].shardings if weight in self.sharded else ():
                if (s.tensor, s.axes, len(s.splits)) == (weight, (axis,), 1):
                    return Shards(s.splits[0].shards, along, True)
        return Shards(spread=True)

    def _constrained(self, node: Node, sharding: Sharding, value: Any) -> Any:
        try:
            factors, spec = factored(sharding, self.axes[sharding], value.shape)
        except ShardingError as e:
            if (node.name, sharding.tensor) not in self._warned:
                self._warned.add((node.name, sharding.tensor))
                warn(f"{node}, sharding of {sharding.tensor!r} is ignored: {e}")
            return value
        constrain = jax.lax.with_sharding_constraint
        target = NamedSharding(self.mesh, PartitionSpec(*spec))
        if len(factors) == value.ndim:
            return constrain(value, target)
        # The factors of a fused axis are sharded separately, so its shards are not contiguous (rule DV-11).
        return constrain(value.reshape(factors), target).reshape(value.shape)


def warn(text: str) -> None:
    warnings.warn(text, ShardingWarning, stacklevel=2)
