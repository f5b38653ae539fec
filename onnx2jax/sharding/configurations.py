"""ONNX device configurations (IR 11): one mesh for each, and every sharding in it as axes of that mesh.

Annotations are hints (rule DV-01). What cannot be said by one mesh is left out, and said so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..errors import ShardingError, with_rules
from ..ir import analysis
from ..ir.graph import Graph, Imported, Node
from ..ops.arrays import is_traced
from ..ops.registry import Operator
from ..proto.devices import Configuration, NodeDevices, Sharding, problems
from .mesh import best
from .plans import Plan, as_plan, by_plan
from .rules import (
    Arrays,
    Constraint,
    Placement,
    Rules,
    Shardings,
    ShardingWarning,
    by_rules,
    entries,
    fitting,
    own_rules,
)

Axes = tuple[tuple[str, ...], ...]
"""For each split of a sharding the axes of the mesh that make it, outermost first."""


def placement(
    imported: Imported,
    configuration: str | None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None,
    mesh: Mesh | None,
    rules: Rules | str | Plan | None,
    training: tuple[Sequence[Graph], Mapping[str, np.ndarray]] | None = None,
) -> Placement | None:
    """Where a model's arrays lie: by one of its own configurations, by a user's rules, or None: on one device.

    ``training`` gives the graphs and the arrays of a model that trains; those of a Model follow from ``imported``.

    Raises:
        ShardingError: the arguments contradict one another or the model.
    """
    if configuration is not None and (mesh is not None or rules is not None):
        raise ShardingError(
            "mesh= and shardings= are rules of your own, device_configuration= takes those of the file: give one"
        )
    if configuration is None and devices is not None:
        raise ShardingError("devices= maps the labels of a device_configuration=, which is not given")
    if mesh is None and rules is not None:
        raise ShardingError("shardings= needs the mesh that its specs name: mesh=jax.make_mesh((8,), ('data',))")
    if configuration is None and mesh is None:
        return None
    graphs, weights = training or ((imported.graph,), analysis.parameters(imported.graph))
    if configuration is not None:
        return _configured(imported, configuration, devices, graphs, weights)
    assert mesh is not None
    plan = as_plan(rules)
    if plan is not None and training:
        raise ShardingError(
            f"plan {plan.kind!r} is for convert; training_info takes patterns over names: shardings={{}}"
        )
    if plan is not None:
        return by_plan(imported.graph, weights, mesh, plan)
    inputs = () if training else [v.name for v in imported.graph.inputs]
    return by_rules(weights, inputs, mesh, own_rules(rules))


def _configured(
    imported: Imported, name: str, table: Any, graphs: Sequence[Graph], weights: Mapping[str, np.ndarray]
) -> Placement | None:
    configuration = next((c for c in imported.configurations if c.name == name), None)
    if configuration is None:
        known = [c.name for c in imported.configurations]
        raise ShardingError(f"device_configuration {name!r} is none of the model's, which are {known}", rule="DV-03")
    if configuration.devices < 1:
        raise ShardingError(f"configuration {name!r} has {configuration.devices} devices", rule="DV-02")
    devices = _devices(configuration, table)
    if len(devices) < configuration.devices:
        wants = f"it wants {configuration.devices} devices, there are {len(devices)}"
        _warn(with_rules(f"configuration {name!r} is ignored: {wants}", "DV-22"))
        return None
    said = _Said(imported, configuration, graphs)
    layout = best([s.pattern for _, s, _ in said.kept], configuration.devices)
    array = np.array([devices[i] for i in layout.order]).reshape(layout.shape)
    mesh = compat.auto(Mesh(array, layout.axis_names))
    axes = {s: layout.named(s.pattern) for _, s, _ in said.kept if s.pattern in layout.uses}
    for node, s, _ in said.kept:
        members = sorted({d for group in s.holders for d in group})
        where = f"{node}, sharding of {s.tensor!r}"
        if s not in axes:
            held = [list(group) if len(group) > 1 else group[0] for group in s.holders]
            others = f"{dict(mesh.shape)} over devices {list(layout.order)}"
            said.miss(f"{where}: shards on devices {held} cannot be said by the mesh of the others, {others}", "DV-23")
        elif members and len(members) < configuration.devices:
            said.miss(f"{where}: it is for devices {members}; the others hold copies", "DV-23")
    if said.misses:
        more = f"\nand {len(said.misses) - 5} more: model.placement.notes" if len(said.misses) > 5 else ""
        _warn(
            "\n".join([f"configuration {name!r} is followed in part; results are the same:", *said.misses[:5]]) + more
        )
    params = _params(weights, mesh, [(k, s, axes[s]) for _, s, k in said.kept if k and s in axes], said.notes)
    notes = (*said.misses, *said.notes)
    # A configuration says nothing about inputs, so each device gets them whole (rule DV-13).
    of_params, of_inputs = (partial(_everywhere, mesh, but) for but in (params, {}))
    return Placement(mesh, params, of_params, of_inputs, name, said.stages, notes, Constraints(name, mesh, axes))


def _everywhere(mesh: Mesh, but: Shardings, values: Arrays, _batch: bool = False) -> Shardings:
    whole = NamedSharding(mesh, PartitionSpec())
    return {n: but.get(n, whole) for n in values}


class _Said:
    """What the nodes of a model say about one configuration.

    Attributes:
        kept: node, sharding, and the key of the initializer that it is about.
        stages: pipeline stages by node.
        misses: what breaks a rule.
        notes: what means nothing.
    """

    def __init__(self, imported: Imported, configuration: Configuration, graphs: Sequence[Graph]) -> None:
        self.kept: list[tuple[Node, Sharding, str | None]] = []
        self.stages: dict[str, int] = {}
        self.misses: list[str] = []
        self.notes: list[str] = []
        if imported.ir_version < 11:
            self.miss(f"configurations exist since IR 11, the model is of IR {imported.ir_version}", "DV-27")
        listed = {c.name for c in imported.configurations}
        for node, keys in _annotated(graphs):
            for other in sorted(node.devices.keys() - listed):
                self.miss(f"{node}: configuration {other!r} is none of {sorted(listed)}", "DV-04")
            hints = node.devices.get(configuration.name, NodeDevices())
            if hints.stage is not None:
                self.stages[node.name] = hints.stage
            for sharding in hints.shardings:
                self._sharding(node, sharding, configuration.devices, keys)

    def miss(self, text: str, rule: str) -> None:
        self.misses.append(with_rules(text, rule))

    def _sharding(self, node: Node, sharding: Sharding, devices: int, keys: Mapping[str, str]) -> None:
        where = f"{node}, sharding of {sharding.tensor!r}"
        if not sharding.tensor or sharding.tensor not in {*node.inputs, *node.outputs}:
            self.miss(f"{where}: it is no input or output of the node", "DV-05")
        elif wrong := list(problems(sharding, devices)):
            for rule, text in wrong:
                self.miss(f"{where}: {text}", rule)
        elif _is_excluded(node):
            self.notes.append(with_rules(f"{where}: ONNX gives it no meaning for {node.op_type}", "DV-18"))
        else:
            self.kept.append((node, sharding, keys.get(sharding.tensor) if sharding.tensor in node.inputs else None))


def _params(
    weights: Mapping[str, np.ndarray], mesh: Mesh, asked: Sequence[tuple[str, Sharding, Axes]], notes: list[str]
) -> dict[str, NamedSharding]:
    """Each weight where its first consumer wants it (rule DV-25), the others on every device."""
    params: dict[str, NamedSharding] = {}
    for key, sharding, axes in asked:
        if key not in weights or key in params:
            continue
        shape = weights[key].shape
        try:
            factors, places = _factored(sharding, axes, shape)
            if len(factors) > len(shape):
                raise ShardingError(f"its axes are fused from {list(factors)}")
            params[key] = fitting(key, shape, mesh, PartitionSpec(*places), "its node")
        except ShardingError as e:
            notes.append(f"{key!r} lies whole on every device: {e}")
    return {n: params.get(n, NamedSharding(mesh, PartitionSpec())) for n in weights}


def _devices(configuration: Configuration, table: Any) -> list[jax.Device]:
    """The device of each number, in order (rule DV-22)."""
    if table is None:
        return jax.devices()[: configuration.devices]
    if isinstance(table, Mapping):
        numbers = range(configuration.devices)
        labels = configuration.labels if len(configuration.labels) == len(numbers) else numbers
        found = [table.get(label, table.get(i)) for i, label in zip(numbers, labels, strict=True)]
        if lacking := [label for label, device in zip(labels, found, strict=True) if device is None]:
            raise ShardingError(
                f"devices= has {list(table)}, configuration {configuration.name!r} also wants {lacking}: labels "
                f"{list(configuration.labels)}, or numbers 0 to {configuration.devices - 1}"
            )
    else:
        found = list(table)[: configuration.devices]
    if len(set(found)) < len(found):
        raise ShardingError(f"devices= has a device twice among {found}; each number is a device of its own")
    return found


def _is_excluded(node: Node) -> bool:
    return isinstance(node.target, Operator) and node.target.unsharded


def _annotated(graphs: Iterable[Graph]) -> Iterator[tuple[Node, dict[str, str]]]:
    """Annotated nodes of graphs, all graphs inside and functions, once each, with the keys of the weights they see."""
    seen: set[int] = set()

    def visit(graph: Graph, outer: dict[str, str]) -> Iterator[tuple[Node, dict[str, str]]]:
        seen.add(id(graph))
        visible = outer | {n: graph.key(n) for n in graph.initializers}
        for node in graph.nodes:
            if node.devices and id(node) not in seen:
                seen.add(id(node))
                yield node, visible
            for inner in node.bodies:
                if id(inner) in seen:
                    continue
                if inner in node.graphs:
                    yield from visit(inner, {n: k for n, k in visible.items() if n not in inner.defines})
                else:
                    operands = zip(inner.inputs, node.inputs, strict=False)
                    yield from visit(inner, {formal.name: visible[n] for formal, n in operands if n in visible})

    for graph in graphs:
        yield from visit(graph, {})


def _factored(sharding: Sharding, axes: Axes, shape: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """The shape in which every divided factor is an axis, and the axes of the mesh for each."""
    factored: list[Any] = []
    places: list[Any] = []
    by_axis = _by_axis(sharding, len(shape))
    for axis, extent in enumerate(shape):
        splits = by_axis.get(axis, [])
        places += [entries(axes[i]) for i in splits] or [None]
        if len(splits) < 2:
            factored.append(extent)
            continue
        factors = [sharding.splits[i].extent for i in splits]
        free = [f for f in factors if not isinstance(f, int)]
        known = math.prod(f for f in factors if isinstance(f, int))
        if len(free) > 1 or known < 1 or extent % known or (not free and known != extent):
            raise ShardingError(f"axis {axis} of {extent} is no product of {factors}", rule="DV-10")
        factored += [f if isinstance(f, int) else extent // known for f in factors]
    return tuple(factored), places


def _by_axis(sharding: Sharding, rank: int) -> dict[int, list[int]]:
    """The positions of the splits of each axis, axes counted from the front (rule DV-09)."""
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
    """What the evaluation loop asks about a node's inputs and outputs: constraints on where they lie, never values.

    Attributes:
        axes: the axes of the mesh for each sharding that is followed.
    """

    def __init__(self, name: str, mesh: Mesh, axes: Mapping[Sharding, Axes]) -> None:
        self.name, self.mesh, self.axes = name, mesh, axes
        self._said: set[tuple[str, str]] = set()

    def __call__(self, node: Node, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        values = list(values)
        if self.name not in node.devices or _is_excluded(node):
            return values
        for s in node.devices[self.name].shardings:
            for i, (name, value) in enumerate(zip(names, values, strict=False)):
                if name == s.tensor and s in self.axes and is_traced(value) and hasattr(value, "ndim"):
                    values[i] = self._constrained(node, s, value)
        return values

    def _constrained(self, node: Node, sharding: Sharding, value: Any) -> Any:
        try:
            factors, places = _factored(sharding, self.axes[sharding], value.shape)
        except ShardingError as e:
            if (node.name, sharding.tensor) not in self._said:
                self._said.add((node.name, sharding.tensor))
                _warn(f"{node}, sharding of {sharding.tensor!r} is left out: {e}")
            return value
        constrain = jax.lax.with_sharding_constraint
        spec = NamedSharding(self.mesh, PartitionSpec(*places))
        if len(factors) == value.ndim:
            return constrain(value, spec)
        # The factors of a fused axis are divided one by one, so that its shards are not contiguous (rule DV-11).
        return constrain(value.reshape(factors), spec).reshape(value.shape)


def _warn(text: str) -> None:
    warnings.warn(text, ShardingWarning, stacklevel=2)
