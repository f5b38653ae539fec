"""Multi-device annotations of nodes: configurations named, devices that exist, shards that add up."""

from __future__ import annotations

import math
from typing import Any

from .report import Note


def check_devices(node: Any, path: str, configurations: dict[str, int], note: Note) -> None:
    """The device_configurations of a node; ``configurations`` has the number of devices of each of the model's."""
    for configuration in node.device_configurations:
        name = configuration.configuration_id
        if name not in configurations:
            note("DV-04", "error", path, f"configuration {name!r} is none of the model's {sorted(configurations)}")
            continue
        for spec in configuration.sharding_spec:
            where = f"{path}, sharding of {spec.tensor_name!r}"
            if not spec.tensor_name or spec.tensor_name not in {*node.input, *node.output}:
                note("DV-05", "error", where, f"{spec.tensor_name!r} is no input or output of the node")
            _spec(spec, where, configurations[name], note)


def _spec(spec: Any, path: str, devices: int, note: Note) -> None:
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    members = [d for entry in spec.device for d in groups.get(entry, [entry])]
    if outside := [d for d in members if not 0 <= d < devices]:
        note("DV-06", "error", path, f"device {outside[0]} is not one of 0 to {devices - 1}, nor a group")
    axes = [dim.axis for dim in spec.sharded_dim]
    if len(set(axes)) < len(axes):
        note("DV-09", "error", path, f"an axis is sharded twice in {axes}")
    shards = [s.num_shards for dim in spec.sharded_dim for s in dim.simple_sharding]
    if any(n < 1 for n in shards):
        note("DV-10", "error", path, f"num_shards is {min(shards)}")
    elif shards and spec.device and math.prod(shards) != len(spec.device):
        note("DV-08", "error", path, f"{math.prod(shards)} shards for {len(spec.device)} devices")
