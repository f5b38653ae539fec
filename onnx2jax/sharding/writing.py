"""A placement as a device configuration for a file (IR 11): what each node says of its weights and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import ShardingError
from ..ir.graph import Graph, Node
from ..proto.devices import Configuration, NodeDevices, Sharding, Split
from ..proto.types import TensorType, ValueInfo
from .constraints import is_excluded
from .plans import Constraints
from .rules import Placement
from .stages import Staged, staged
from .walk import Key, key


def configured(
    graph: Graph, weights: Mapping[str, Any], placement: Placement, name: str
) -> tuple[Configuration, dict[Key, NodeDevices]]:
    """A configuration of this name, and what nodes of the main graph say about it, by ``walk.key``.

    Devices are counted in the order of their ids. A weight is divided at every node that reads it, as is an input of
    the graph; what a plan says of values stands at the nodes that make them. Of nodes for which ONNX gives shardings no
    meaning (normalizations, convolutions: rule DV-18) nothing is said.

    Raises:
        ShardingError: the placement is that of a configuration, which is in the file already.
    """
    if placement.configuration is not None:
        raise ShardingError(
            f"the model follows {placement.configuration!r}, which is in the file already: save without configuration="
        )
    writer = _Writer(graph, weights, placement)
    stages: Sequence[int | None] = [None] * len(graph.nodes)
    if isinstance(placement, Staged):
        stages = staged(graph.nodes, placement.of_nodes)
    said: dict[Key, NodeDevices] = {}
    for node, stage in zip(graph.nodes, stages, strict=True):
        found = tuple(writer.said(node, stage))
        if found or stage is not None:
            said[key(node)] = NodeDevices(found, stage)
    return Configuration(name, placement.mesh.size), said


class _Writer:
    def __init__(self, graph: Graph, weights: Mapping[str, Any], placement: Placement) -> None:
        self.graph, self.weights, self.placement = graph, weights, placement
        self.numbers = {d: i for i, d in enumerate(sorted(placement.mesh.devices.flat, key=lambda d: d.id))}
        self.inputs = {v.name: v for v in graph.inputs if v.name not in graph.initializers}

    def said(self, node: Node, stage: int | None) -> Iterator[Sharding]:
        """The shardings of what a node reads and makes, but for what every device has whole."""
        if is_excluded(node):
            return
        part = self.placement.parts[stage or 0] if isinstance(self.placement, Staged) else self.placement
        for name in dict.fromkeys(filter(None, node.inputs)):
            sharding = self._weight(name, part) if name in self.graph.initializers else self._input(name, part)
            # In a pipeline what is whole says, too, on which devices its stage is.
            if sharding is not None and (stage is not None or not sharding.is_fully_replicated):
                yield _sharding(name, sharding, self.numbers)
        if isinstance(part.constrain, Constraints):
            yield from self._made(node, part.constrain)

    def _weight(self, name: str, part: Placement) -> NamedSharding | None:
        own = self.graph.key(name)
        return part.of_params({own: self.weights[own]})[own] if own in self.weights else None

    def _input(self, name: str, part: Placement) -> NamedSharding | None:
        """Where an input lies whose free extents the devices divide."""
        info = self.inputs.get(name)
        if info is None or (type := _filled(info, self.placement.mesh.size)) is None:
            return None
        found = part.of_inputs({name: type}, False)[name]
        return None if found.is_fully_replicated else found

    def _made(self, node: Node, plan: Constraints) -> Iterator[Sharding]:
        """What a plan says of a node's outputs; their first axes lie over the data where inputs do."""
        for name, (axis, how) in plan.results.get(key(node), {}).items():
            rank = plan.ranks.get(name, 0)
            if rank < -axis:
                continue
            places: list[Any] = [None] * rank
            if plan.batch is not None and (rank > -axis or how == "whole"):
                places[0] = plan.batch
            if how != "whole":
                places[axis] = plan.model
            yield _sharding(name, NamedSharding(plan.mesh, PartitionSpec(*places)), self.numbers)


def _filled(info: ValueInfo, extent: int) -> jax.ShapeDtypeStruct | None:
    if not isinstance(info.type, TensorType) or info.type.shape is None or info.type.dtype.hasobject:
        return None
    return jax.ShapeDtypeStruct([d if isinstance(d, int) else extent for d in info.type.shape], info.type.dtype)


def _sharding(tensor: str, sharding: NamedSharding, numbers: Mapping[jax.Device, int]) -> Sharding:
    """A NamedSharding as ONNX says it: the devices that hold each shard, the first axis outermost (rule DV-07)."""
    mesh: Mesh = sharding.mesh  # type: ignore[assignment]
    over = [(i, e if isinstance(e, tuple) else (e,)) for i, e in enumerate(sharding.spec) if e is not None]
    counts = [int(np.prod([mesh.shape[n] for n in names])) for _, names in over]
    holders: dict[tuple[int, ...], list[int]] = {index: [] for index in np.ndindex(*counts)}
    for place, device in np.ndenumerate(mesh.devices):
        at = dict(zip(mesh.axis_names, place, strict=True))
        index = tuple(
            int(np.ravel_multi_index([at[n] for n in names], [mesh.shape[n] for n in names])) for _, names in over
        )
        holders[index].append(numbers[device])
    splits = tuple(Split(axis, count) for (axis, _), count in zip(over, counts, strict=True))
    return Sharding(tensor, tuple(tuple(sorted(g)) for g in holders.values()), splits, tuple(a for a, _ in over))
