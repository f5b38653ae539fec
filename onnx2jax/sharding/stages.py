"""Pipeline parallelism: splits a graph into stages, each on its own devices.

A stage is a subset of the nodes with the weights that they read. It is placed on one slice of a mesh along the axis
"stage", where its own placement may shard it further, as on a mesh without stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..errors import ShardingError
from ..ir.graph import Graph, Node
from .propagation import Key, key
from .rules import Arrays, Placement, Shardings

AXIS: Final = "stage"
SLACK: Final = 0.1
"""How far a cut may deviate from an even split, as a fraction of a stage's cost, if fewer values cross it."""


@dataclass(frozen=True)
class Staged(Placement):
    """The placement of a model in pipeline stages.

    Attributes:
        parts: the placement of each stage.
        of_nodes: ``walk.key`` of a node of the main graph -> stage.
        homes: parameter -> stage of the first node that reads it.
        microbatches: the number of microbatches that a batch is split into.
    """

    parts: tuple[Placement, ...] = ()
    of_nodes: Mapping[Key, int] = field(default_factory=dict)
    homes: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 1

    @property
    def replicated(self) -> NamedSharding:
        """Replicated over the devices of the last stage, where a loss is computed."""
        return self.parts[-1].replicated

    def put_inputs(self, values: Arrays) -> dict[str, Any]:
        """The inputs unchanged: each stage transfers what it reads."""
        return dict(values)

    def put_batch(self, values: Arrays) -> dict[str, Any]:
        """Place a training batch on the last stage, where the loss is computed."""
        return self.parts[-1].put_batch(values)

    def segments(self, graph: Graph) -> list[tuple[int, list[Node]]]:
        """The nodes of a graph as (stage, nodes) segments, each of which reads only outputs of earlier ones.

        A stage is one segment, unless it reads outputs of a later stage: then it has several.
        """
        stages = staged(graph.nodes, self.of_nodes)
        levels: dict[str, tuple[int, int]] = {}
        segments: dict[tuple[int, int], list[Node]] = {}
        for node, stage in zip(graph.nodes, stages, strict=True):
            before = [levels[n] for n in node.reads if n in levels]
            level = max((producer + (other != stage) for producer, other in before), default=0)
            place = max(level, stage), stage
            segments.setdefault(place, []).append(node)
            levels.update((n, place) for n in node.outputs if n)
        return [(stage, nodes) for (_, stage), nodes in sorted(segments.items(), key=lambda item: item[0])]

    def __str__(self) -> str:
        """A table of the mesh, devices and number of parameters of each stage, and notes."""
        lines = [super().__str__().split("\n")[0]]
        for k, part in enumerate(self.parts):
            devices = ", ".join(str(d.id) for d in part.mesh.devices.flat)
            lines.append(f"stage {k} on devices {devices}: {sum(h == k for h in self.homes.values())} parameters")
        return "\n".join([*lines, *self.notes])


def staged(nodes: Sequence[Node], of_nodes: Mapping[Key, int]) -> list[int]:
    """The stage of each node; one without joins the last producer that it reads, or its first consumer."""
    stages: list[int | None] = []
    produced: dict[str, int] = {}
    for node in nodes:
        stage = of_nodes.get(key(node), max((produced[n] for n in node.reads if n in produced), default=None))
        stages.append(stage)
        if stage is not None:
            produced.update((n, stage) for n in node.outputs if n)
    read: dict[str, int] = {}
    for i, node in reversed(list(enumerate(nodes))):
        stage = stages[i]
        if stage is None:
            stage = stages[i] = min((read[n] for n in node.outputs if n in read), default=0)
        read.update((n, stage) for n in node.reads)
    return [stage or 0 for stage in stages]


def homes(graph: Graph, stages: Sequence[int]) -> dict[str, int]:
    """``Graph.key`` of each initializer -> the first stage that reads it."""
    first: dict[str, int] = {}
    for stage, node in sorted(zip(stages, graph.nodes, strict=True), key=lambda pair: pair[0]):
        first |= {name: stage for name in weights_read(graph, node) if name not in first}
    return first


def weights_read(graph: Graph, node: Node) -> Iterator[str]:
    """``Graph.key`` of the initializers that a node and its subgraphs read."""
    yield from (graph.key(n) for n in node.reads if n in graph.initializers)
    yield from (inner.key(n) for body in node.bodies for inner in body.walk() for n in inner.initializers)


def cut(graph: Graph, costs: Sequence[float], count: int) -> list[int]:
    """The stage of each node: contiguous stages balanced by cost, cut where few values cross.

    Args:
        graph: the main graph.
        costs: the cost of each node.
        count: the number of stages.

    Raises:
        ShardingError: there are fewer nodes than stages.
    """
    if count > len(costs):
        raise ShardingError(
            f"{count} stages for {len(costs)} nodes: each stage needs a node, so stages={len(costs)} is the maximum"
        )
    sums = list(accumulate(costs if sum(costs) > 0 else [1] * len(costs)))
    crossing = _crossing(graph)
    ends: list[int] = []
    for k in range(1, count):
        wanted, first = sums[-1] * k / count, (ends[-1] if ends else 0) + 1
        places = range(first, len(costs) - (count - k) + 1)
        nearest = min(abs(sums[p - 1] - wanted) for p in places)
        limit = max(nearest, SLACK * sums[-1] / count)
        near = [p for p in places if abs(sums[p - 1] - wanted) <= limit]
        ends.append(min(near, key=lambda p: (crossing[p], abs(sums[p - 1] - wanted))))
    return [sum(i >= end for end in ends) for i in range(len(costs))]


def _crossing(graph: Graph) -> list[int]:
    """For each cut between nodes, the number of values that cross it."""
    last: dict[str, int] = {v.name: len(graph.nodes) for v in graph.outputs}
    for i, node in enumerate(graph.nodes):
        last.update((n, max(i, last.get(n, 0))) for n in node.reads)
    spans = [(i, last.get(n, i)) for i, node in enumerate(graph.nodes) for n in node.outputs if n]
    begins, ends = (np.bincount(places, minlength=len(graph.nodes) + 1) for places in zip(*spans, strict=True))
    return [0, *np.cumsum(begins - ends).tolist()]


def _divided(mesh: Mesh, count: int) -> dict[str, int]:
    """The axes of a mesh of as many devices, with an axis "stage": the largest axis that ``count`` divides is divided.

    Where it divides none, the first axis has the devices that remain for each stage.
    """
    largest = max(mesh.axis_names, key=lambda name: (mesh.shape[name] % count == 0, mesh.shape[name]))
    if mesh.shape[largest] % count == 0:
        return {AXIS: count, **mesh.shape, largest: mesh.shape[largest] // count}
    first, *others = mesh.axis_names
    return {AXIS: count, first: max(1, mesh.size // count), **dict.fromkeys(others, 1)}


def slices(mesh: Mesh | None, count: int) -> tuple[Mesh, list[Mesh]]:
    """A mesh with an axis "stage", and its slices along that axis.

    Args:
        mesh: the user's mesh; by default the first devices, one per stage.
        count: the number of stages.

    Raises:
        ShardingError: the mesh lacks the axis, its extent differs from ``count``, or there are too few devices.
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ShardingError(f"stages is {count!r}; it is a number of stages from 1, or None for no stages")
    devices = jax.devices()
    if (mesh is None or AXIS not in mesh.axis_names) and count > len(devices):
        raise ShardingError(f"stages={count}: each stage needs a device, and there are {len(devices)}")
    if mesh is None:
        mesh = Mesh(np.array(devices[:count]), (AXIS,))
    if AXIS not in mesh.axis_names:
        axes = _divided(mesh, count)
        raise ShardingError(
            f"stages={count} need an axis {AXIS!r} of the mesh, which has {list(mesh.axis_names)}: "
            f"jax.make_mesh({tuple(axes.values())}, {tuple(axes)})"
        )
    if mesh.shape[AXIS] != count:
        raise ShardingError(
            f"stages={count}, and axis {AXIS!r} of the mesh has {mesh.shape[AXIS]} devices: stages={mesh.shape[AXIS]}"
        )
    axes = {n: extent for n, extent in mesh.shape.items() if n != AXIS} or {"data": 1}
    parts = np.split(mesh.devices, count, mesh.axis_names.index(AXIS))
    return mesh, [Mesh(part.reshape(tuple(axes.values())), tuple(axes)) for part in parts]


def in_stages(
    graph: Graph,
    weights: Arrays,
    of_nodes: Sequence[int],
    mesh: Mesh,
    parts: Sequence[Placement],
    microbatches: int,
    **options: Any,
) -> Staged:
    """The placement of a graph with the given stages.

    Args:
        graph: the main graph.
        weights: the parameters by name.
        of_nodes: the stage of each node.
        mesh: all devices.
        parts: the placement of each stage.
        microbatches: the number of microbatches that a batch is split into.
        **options: other fields of Placement: ``configuration``, ``stages``, ``notes``.

    Raises:
        ShardingError: ``microbatches`` is less than 1.
    """
    if microbatches < 1:
        raise ShardingError(f"microbatches={microbatches}; it must be at least 1")
    readers = homes(graph, of_nodes)
    of_params = _OfParams(tuple(parts), readers)
    return Staged(
        *(mesh, of_params(weights), of_params, parts[-1].of_inputs),
        **{"reasons": parts[0].reasons, "notes": parts[0].notes, **options},
        parts=tuple(parts),
        of_nodes={key(node): stage for node, stage in zip(graph.nodes, of_nodes, strict=True)},
        homes={n: readers.get(n, len(parts) - 1) for n in weights},
        microbatches=microbatches,
    )


@dataclass(frozen=True)
class _OfParams:
    """Shardings of arrays with the names of parameters, by the stage of each."""

    parts: tuple[Placement, ...]
    homes: Mapping[str, int]

    def __call__(self, values: Arrays) -> Shardings:
        last = len(self.parts) - 1
        return {n: self.parts[self.homes.get(n, last)].of_params({n: v})[n] for n, v in values.items()}
