"""Device configurations of a model, and its nodes' annotations, as frozen dataclasses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .messages import keep


@dataclass(frozen=True)
class Configuration:
    """A DeviceConfigurationProto."""

    name: str
    devices: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """A SimpleShardedDimProto, with the axis of which it shards the extent or a factor."""

    axis: int
    shards: int
    extent: int | str | None = None
    """The extent of the factor: a number, a dimension variable, or unspecified."""


Pattern = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""The devices that hold each shard, and the number of shards of each split."""


@dataclass(frozen=True)
class Sharding:
    """A ShardingSpecProto: the shards of a tensor of a node, and the devices that hold them."""

    tensor: str
    holders: tuple[tuple[int, ...], ...]
    """The devices of each entry of ``device``; an entry in index_to_device_group_map is a group (rule DV-06)."""
    splits: tuple[Split, ...]
    """In file order, which is the order of the shards, outermost first (rule DV-07)."""
    axes: tuple[int, ...]
    """All listed axes, including those without splits."""

    @property
    def pattern(self) -> Pattern:
        return self.holders, tuple(s.shards for s in self.splits)


@dataclass(frozen=True)
class NodeDevices:
    """A node's annotation for one configuration."""

    shardings: tuple[Sharding, ...] = ()
    stage: int | None = None
    """Its pipeline stage; None if unset, which differs from 0."""


def read_configurations(model: Any) -> tuple[Configuration, ...]:
    """The device configurations of a ModelProto."""
    return tuple(Configuration(c.name, c.num_devices, tuple(c.device)) for c in model.configuration)


def read_node(node: Any) -> dict[str, NodeDevices]:
    """The annotations of a NodeProto by configuration; several entries for one configuration are merged."""
    result: dict[str, NodeDevices] = {}
    for entry in node.device_configurations:
        previous = result.get(entry.configuration_id, NodeDevices())
        stage = entry.pipeline_stage if entry.HasField("pipeline_stage") else previous.stage
        specs = tuple(map(_sharding, entry.sharding_spec))
        result[entry.configuration_id] = NodeDevices(previous.shardings + specs, stage)
    return result


def _sharding(spec: Any) -> Sharding:
    groups = {entry.key: tuple(entry.value) for entry in spec.index_to_device_group_map}
    holders = tuple(groups.get(entry, (entry,)) for entry in spec.device)
    splits = tuple(
        Split(dim.axis, s.num_shards, getattr(s, s.WhichOneof("dim") or "", None))
        for dim in spec.sharded_dim
        for s in dim.simple_sharding
    )
    return Sharding(spec.tensor_name, holders, splits, tuple(dim.axis for dim in spec.sharded_dim))


def write_configuration(model: Any, configuration: Configuration) -> None:
    """Add a configuration to a ModelProto; replaces one of the same name, with its annotations."""
    keep(model.configuration, lambda c: c.name != configuration.name)
    model.configuration.add(name=configuration.name, num_devices=configuration.devices, device=configuration.labels)
    model.ir_version = max(model.ir_version, 11)  # the first with configurations (rule DV-27)
    for node in model.graph.node:
        keep(node.device_configurations, lambda e: e.configuration_id != configuration.name)


def write_node(node: Any, name: str, annotation: NodeDevices) -> None:
    """Add the annotation for a configuration to a NodeProto."""
    entry = node.device_configurations.add(configuration_id=name)
    if annotation.stage is not None:
        entry.pipeline_stage = annotation.stage
    for sharding in annotation.shardings:
        spec = entry.sharding_spec.add(tensor_name=sharding.tensor)
        for i, group in enumerate(sharding.holders):
            spec.device.append(group[0] if len(group) == 1 else -1 - i)
            if len(group) > 1:
                spec.index_to_device_group_map.add(key=-1 - i, value=group)
        for split in sharding.splits:
            spec.sharded_dim.add(axis=split.axis).simple_sharding.add(num_shards=split.shards)


def problems(sharding: Sharding, devices: int) -> Iterator[tuple[str, str]]:
    """The rules that a sharding violates regardless of its tensor's shape, each with a message."""
    members = [d for group in sharding.holders for d in group]
    if outside := [d for d in members if not 0 <= d < devices]:
        yield "DV-06", f"device {outside[0]} is neither one of 0 to {devices - 1} nor a group"
    if len(set(sharding.axes)) < len(sharding.axes):
        yield "DV-09", f"an axis is sharded twice in {list(sharding.axes)}"
    shards = [s.shards for s in sharding.splits]
    if any(n < 1 for n in shards):
        yield "DV-10", f"num_shards is {min(shards)}"
    elif shards and math.prod(shards) != len(sharding.holders):
        yield "DV-08", f"{math.prod(shards)} shards for {len(sharding.holders)} devices"


def shard_of(pattern: Pattern) -> dict[int, tuple[int, ...]] | None:
    """Device -> index of its shard along each split; None if a device holds two shards."""
    holders, shards = pattern
    result: dict[int, tuple[int, ...]] = {}
    for k, group in enumerate(holders):
        index = tuple(int(i) for i in np.unravel_index(k, shards)) if shards else ()
        for d in group:
            if result.setdefault(d, index) != index:
                return None
    return result
