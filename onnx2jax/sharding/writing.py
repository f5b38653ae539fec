"""Writes a placement as a device configuration (IR 11): the annotations of each node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import ShardingError
from ..ir.graph import Graph, Node
from ..proto.devices import Configuration, NodeDevices, Sharding, Split
from ..proto.types import TensorType, ValueInfo
from .constraints import is_excluded
from .plans import PlanConstraints
from .propagation import Key, key
from .put import mesh_axes
from .rules import Placement
from .stages import Staged, staged


def configured(
    graph: Graph, weights: Mapping[str, Any], placement: Placement, name: str
) -> tuple[Configuration, dict[Key, NodeDevices]]:
    """A configuration of this name, and the annotations of nodes of the main graph, by ``walk.key``.

    Devices are numbered in the order of their ids. Weights and inputs of the graph are annotated at every node that
    reads them; of a tensor plan also the outputs of products, attention and tables. Nodes without sharding in ONNX
    (normalizations, convolutions: rule DV-18) are not annotated.

    Raises:
        ShardingError: the placement follows a configuration, which is already in the file.
    """
    if placement.configuration is not None:
        raise ShardingError(
            f"the model follows {placement.configuration!r}, which is already in the file: save without configuration="
        )
    writer = _Writer(graph, weights, placement)
    stages: Sequence[int | None] = [None] * len(graph.nodes)
    if isinstance(placement, Staged):
        stages = staged(graph.nodes, placement.of_nodes)
    annotations: dict[Key, NodeDevices] = {}
    for node, stage in zip(graph.nodes, stages, strict=True):
        shardings = tuple(writer.annotations(node, stage))
        if shardings or stage is not None:
            annotations[key(node)] = NodeDevices(shardings, stage)
    return Configuration(name, placement.mesh.size), annotations


class _Writer:
    def __init__(self, graph: Graph, weights: Mapping[str, Any], placement: Placement) -> None:
        self.graph, self.weights, self.placement = graph, weights, placement
        self.numbers = {d: i for i, d in enumerate(sorted(placement.mesh.devices.flat, key=lambda d: d.id))}
        self.inputs = {v.name: v for v in graph.inputs if v.name not in graph.initializers}

    def annotations(self, node: Node, stage: int | None) -> Iterator[Sharding]:
        """The shardings of the weights and inputs that a node reads, and of its results in a plan."""
        if is_excluded(node):
            return
        part = self.placement.parts[stage or 0] if isinstance(self.placement, Staged) else self.placement
        for name in dict.fromkeys(filter(None, node.inputs)):
            sharding = self._weight(name, part) if name in self.graph.initializers else self._input(name, part)
            # In a pipeline, replicated inputs are annotated too, to name the devices of the stage.
            if sharding is not None and (stage is not None or not sharding.is_fully_replicated):
                yield _sharding(name, sharding, self.numbers)
        if isinstance(part.constrain, PlanConstraints):
            yield from self._outputs(node, part.constrain)

    def _weight(self, name: str, part: Placement) -> NamedSharding | None:
        param = self.graph.key(name)
        return part.of_params({param: self.weights[param]})[param] if param in self.weights else None

    def _input(self, name: str, part: Placement) -> NamedSharding | None:
        """The sharding of an input whose dynamic extents the devices divide; None if replicated."""
        info = self.inputs.get(name)
        if info is None or (type := _filled(info, self.placement.mesh.size)) is None:
            return None
        sharding = part.of_inputs({name: type}, False)[name]
        return None if sharding.is_fully_replicated else sharding

    def _outputs(self, node: Node, plan: PlanConstraints) -> Iterator[Sharding]:
        """The shardings of outputs in a tensor plan; their first axes are sharded like those of inputs."""
        for name, (axis, rank) in plan.results.get(key(node), {}).items():
            spec: list[Any] = [None] * rank
            if plan.batch is not None and (axis is None or rank > -axis):
                spec[0] = plan.batch
            if axis is not None:
                spec[axis] = plan.model
            yield _sharding(name, NamedSharding(plan.mesh, PartitionSpec(*spec)), self.numbers)


def _filled(info: ValueInfo, extent: int) -> jax.ShapeDtypeStruct | None:
    if not isinstance(info.type, TensorType) or info.type.shape is None or info.type.dtype.hasobject:
        return None
    return jax.ShapeDtypeStruct([d if isinstance(d, int) else extent for d in info.type.shape], info.type.dtype)


def _sharding(tensor: str, sharding: NamedSharding, numbers: Mapping[jax.Device, int]) -> Sharding:
    """A NamedSharding in ONNX's form: the devices of each shard, the first axis outermost (rule DV-07)."""
    mesh: Mesh = sharding.mesh  # type: ignore[assignment]
    over = [(axis, mesh_axes(entry)) for axis, entry in enumerate(sharding.spec) if entry is not None]
    splits = tuple(Split(axis, math.prod(mesh.shape[n] for n in names)) for axis, names in over)
    sharded = [n for _, names in over for n in names]
    order = [mesh.axis_names.index(n) for n in (*sharded, *(n for n in mesh.axis_names if n not in sharded))]
    groups = mesh.devices.transpose(order).reshape(math.prod(s.shards for s in splits), -1)
    holders = tuple(tuple(sorted(numbers[d] for d in group)) for group in groups)
    return Sharding(tensor, holders, splits, tuple(axis for axis, _ in over))
