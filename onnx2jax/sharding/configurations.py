"""ONNX device configurations (IR 11): one mesh per configuration, and every sharding in terms of its axes.

Annotations are hints (rule DV-01). Those that one mesh cannot express are ignored, with a warning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..errors import ShardingError, with_rules
from ..ir import analysis
from ..ir.graph import Graph, Imported, Node
from ..proto.devices import Configuration, NodeDevices, Sharding, problems
from .constraints import Axes, Constraints, factored, is_excluded, warn
from .mesh_layout import best
from .plans import Plan, as_plan, by_plan, by_rules, check_axes, mesh_of
from .propagation import key as of_node
from .rules import Arrays, Placement, Rules, Shardings, fitting, own_rules
from .stages import cut, in_stages, slices, staged

Annotation = tuple[Node, Sharding, str | None]
"""A valid annotation: the node, the sharding, and the key of the sharded initializer, if it is one."""
Wanted = list[tuple[Sharding, Axes]]
"""The shardings of a tensor at its annotated consumers."""


def placement(
    imported: Imported,
    configuration: str | None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None,
    mesh: Mesh | None,
    rules: Rules | str | Plan | None,
    training: tuple[Sequence[Graph], Mapping[str, np.ndarray]] | None = None,
    microbatches: int = 1,
) -> Placement | None:
    """The placement of a model by one of its configurations or a user's rules; None for a single device.

    Args:
        imported: the model.
        configuration: the name of one of its device configurations.
        devices: the devices of the configuration.
        mesh, rules: a user's mesh, and rules or a plan.
        training: the graphs and arrays of a training model; those of a Model follow from ``imported``.
        microbatches: parts of a batch that pass through the stages of a configuration in turn.

    Raises:
        ShardingError: the arguments contradict one another or the model.
    """
    if configuration is not None and (mesh is not None or rules is not None):
        raise ShardingError(
            "mesh= and shardings= are your own rules, device_configuration= selects those of the file: pass one of them"
        )
    if configuration is None and devices is not None:
        raise ShardingError("devices= maps the labels of a device_configuration=, which is missing")
    plan = as_plan(rules)
    if plan is not None and training:
        raise ShardingError(
            f"plan {plan.kind!r} is for convert; training_info takes patterns over names: shardings={{}}"
        )
    if mesh is None and rules is not None:
        raise ShardingError(f"shardings= needs the mesh whose axes it names: mesh={mesh_of(rules)}")
    if microbatches != 1 and configuration is None:
        raise ShardingError(f"microbatches={microbatches} need pipeline stages: stages=n")
    if configuration is None and mesh is None:
        return None
    graphs, weights = training or ((imported.graph,), analysis.parameters(imported.graph))
    if configuration is not None:
        return _configured(imported, configuration, devices, graphs, weights, training is not None, microbatches)
    assert mesh is not None
    if plan is not None:
        return by_plan(imported.graph, weights, mesh, plan)
    inputs = () if training else [v.name for v in imported.graph.inputs]
    return by_rules(weights, inputs, mesh, own_rules(rules))


def _configured(
    imported: Imported,
    name: str,
    table: Any,
    graphs: Sequence[Graph],
    weights: Mapping[str, np.ndarray],
    training: bool,
    microbatches: int,
) -> Placement | None:
    configuration = next((c for c in imported.configurations if c.name == name), None)
    if configuration is None:
        known = [c.name for c in imported.configurations]
        raise ShardingError(f"device_configuration {name!r} is not one of the model's, which are {known}", rule="DV-03")
    if configuration.devices < 1:
        raise ShardingError(f"configuration {name!r} has {configuration.devices} devices", rule="DV-02")
    devices = _devices(configuration, table)
    if len(devices) < configuration.devices:
        wants = f"it needs {configuration.devices} devices, there are {len(devices)}"
        warn(with_rules(f"configuration {name!r} is ignored: {wants}", "DV-22"))
        return None
    annotations = _Annotations(imported, configuration, graphs)
    stages = None if training else _stages(imported.graph, annotations, name, configuration.devices)
    if stages is None:
        if microbatches != 1:
            raise ShardingError(
                f"microbatches={microbatches} need stages on separate devices, which {name!r} does not have"
            )
        result = _over(range(configuration.devices), devices, annotations.valid, annotations, name, weights)
        result = replace(result, stages=annotations.stages)
    else:
        of_nodes, groups = stages
        stage_of = {id(node): stage for node, stage in zip(imported.graph.nodes, of_nodes, strict=True)}

        def of_stage(k: int) -> list[Annotation]:
            """The annotations of its nodes, and those of nodes in subgraphs that are for its devices."""
            return [a for a in annotations.valid if stage_of.get(id(a[0]), k) == k and _members(a[1]) <= {*groups[k]}]

        parts = [_over(group, devices, of_stage(k), annotations, name, weights) for k, group in enumerate(groups)]
        mesh = Mesh(np.array([devices[d] for group in groups for d in group]), ("devices",))
        options = {"configuration": name, "stages": annotations.stages}
        result = in_stages(imported.graph, weights, of_nodes, mesh, parts, microbatches, **options)
    if ignored := annotations.ignored:
        head = f"configuration {name!r} is applied in part; results are the same:"
        more = [f"and {len(ignored) - 5} more: model.placement.notes"] if len(ignored) > 5 else []
        warn("\n".join([head, *ignored[:5], *more]))
    return replace(result, notes=(*ignored, *annotations.notes))


def _over(
    numbers: Sequence[int],
    devices: Sequence[jax.Device],
    annotations: Sequence[Annotation],
    report: _Annotations,
    name: str,
    weights: Mapping[str, np.ndarray],
) -> Placement:
    """The placement by annotations over one mesh of the devices with these numbers; reports what is not applied."""
    place = {d: i for i, d in enumerate(numbers)}
    patterns = {s: (tuple(tuple(place[d] for d in g) for g in s.holders), s.pattern[1]) for _, s, _ in annotations}
    layout = best([patterns[s] for _, s, _ in annotations], len(numbers))
    order = [numbers[i] for i in layout.order]
    mesh = compat.auto(Mesh(np.array([devices[d] for d in order]).reshape(layout.shape), layout.axis_names))
    axes = {s: layout.named(pattern) for s, pattern in patterns.items() if pattern in layout.uses}
    for node, s, _ in annotations:
        members = sorted(_members(s))
        where = f"{node}, sharding of {s.tensor!r}"
        if s not in axes:
            holders = [list(group) if len(group) > 1 else group[0] for group in s.holders]
            others = f"{dict(mesh.shape)} over devices {order}"
            text = f"shards on devices {holders} cannot be expressed by the mesh of the others, {others}"
            report.ignore(f"{where}: {text}", "DV-23")
        elif members and len(members) < len(numbers):
            report.ignore(f"{where}: it is for devices {members}; the others hold replicas", "DV-23")
    computed = {n for node, _, _ in annotations for n in node.outputs}
    of_weights, of_inputs = defaultdict[str, Wanted](list), defaultdict[str, Wanted](list)
    for _, s, k in annotations:
        if s in axes and k:
            of_weights[k].append((s, axes[s]))
        elif s in axes and s.tensor not in computed:
            of_inputs[s.tensor].append((s, axes[s]))
    params = _shardings(mesh, of_weights, weights, notes=report.notes)
    sharded = [n for n, sharding in params.items() if not sharding.is_fully_replicated]
    constrain = Constraints(name, mesh, axes, sharded)
    placing = partial(_shardings, mesh)
    return Placement(mesh, params, partial(placing, of_weights), partial(placing, of_inputs), name, constrain=constrain)


def _shardings(
    mesh: Mesh, wanted: Mapping[str, Wanted], arrays: Arrays, _batch: bool = False, notes: list[str] | None = None
) -> Shardings:
    """The shardings of weights or inputs: as at their first annotated consumer that fits, else replicated.

    Adds to ``notes`` why those are replicated that do not fit (rules DV-13, DV-25).
    """
    shardings = dict.fromkeys(arrays, NamedSharding(mesh, PartitionSpec()))
    for name, array in arrays.items():
        reasons = []
        for sharding, axes in wanted.get(name, ()):
            try:
                shardings[name] = _fitted(name, mesh, sharding, axes, np.shape(array))
                break
            except ShardingError as e:
                reasons.append(f"{name!r} is replicated: {e}")
        else:
            if notes is not None:
                notes += reasons
    return shardings


def _fitted(name: str, mesh: Mesh, sharding: Sharding, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding over the mesh.

    Raises:
        ShardingError: it does not fit the shape.
    """
    factors, spec = factored(sharding, axes, shape)
    if len(factors) > len(shape):
        raise ShardingError(f"its axes are fused from {list(factors)}")
    return fitting(name, shape, mesh, PartitionSpec(*spec), "its node")


def _members(sharding: Sharding) -> set[int]:
    return {d for group in sharding.holders for d in group}


def _stages(
    graph: Graph, annotations: _Annotations, name: str, devices: int
) -> tuple[list[int], list[list[int]]] | None:
    """The stage of each node, counted from 0, and the devices of each stage.

    These are the devices in annotations of its nodes; stages without annotations share the other devices evenly.
    None if there is one stage, or if stages share devices: then all nodes are one program.
    """
    annotated = {of_node(n): s for n in graph.nodes if name in n.devices and (s := n.devices[name].stage) is not None}
    numbers = sorted({*annotated.values()})
    if len(numbers) < 2:
        return None
    stages = staged(graph.nodes, {node: numbers.index(s) for node, s in annotated.items()})
    stage_of = {id(node): stage for node, stage in zip(graph.nodes, stages, strict=True)}
    groups: list[set[int]] = [set() for _ in numbers]
    for node, sharding, _ in annotations.valid:
        if id(node) in stage_of:
            groups[stage_of[id(node)]] |= _members(sharding)
    used = set().union(*groups)
    if sum(map(len, groups)) > len(used):
        return None
    free, bare = [d for d in range(devices) if d not in used], [k for k, group in enumerate(groups) if not group]
    if bare and (len(free) < len(bare) or len(free) % len(bare)):
        annotations.ignore(
            f"{len(bare)} pipeline stages share {len(free)} devices unevenly: all nodes are one program", "DV-20"
        )
        return None
    shares = iter(np.split(np.array(free, int), len(bare)) if bare else ())
    return stages, [sorted(group) or next(shares).tolist() for group in groups]


def by_count(
    imported: Imported,
    count: int,
    microbatches: int,
    mesh: Mesh | None,
    rules: Rules | str | Plan | None,
    costs: Callable[[], Sequence[float]],
) -> Placement:
    """The placement of a model in ``count`` pipeline stages, each sharded by ``rules``.

    Raises:
        ShardingError: there are too few devices or nodes, or the rules do not fit.
    """
    whole, parts = slices(mesh, count)
    if mesh is None and rules is not None:
        raise ShardingError(f"shardings= shard each stage over a mesh: mesh={mesh_of(rules, count)}")
    if plan := as_plan(rules):
        check_axes(plan, whole, count)
    placed = [placement(imported, None, None, part, rules) for part in parts]
    stages = cut(imported.graph, costs(), count)
    weights = analysis.parameters(imported.graph)
    return in_stages(imported.graph, weights, stages, whole, [p for p in placed if p], microbatches)


class _Annotations:
    """The annotations of a model's nodes for one configuration.

    Attributes:
        valid: the valid shardings.
        stages: pipeline stages by node.
        ignored: messages about annotations that violate a rule or cannot be applied.
        notes: messages about annotations without a meaning.
    """

    def __init__(self, imported: Imported, configuration: Configuration, graphs: Sequence[Graph]) -> None:
        self.valid: list[Annotation] = []
        self.stages: dict[str, int] = {}
        self.ignored: list[str] = []
        self.notes: list[str] = []
        if imported.ir_version < 11:
            self.ignore(f"configurations exist since IR 11, the model is of IR {imported.ir_version}", "DV-27")
        listed = {c.name for c in imported.configurations}
        for node, keys in _annotated(graphs):
            for other in sorted(node.devices.keys() - listed):
                self.ignore(f"{node}: configuration {other!r} is not one of {sorted(listed)}", "DV-04")
            hints = node.devices.get(configuration.name, NodeDevices())
            if hints.stage is not None:
                self.stages[node.name] = hints.stage
            for sharding in hints.shardings:
                self._sharding(node, sharding, configuration.devices, keys)

    def ignore(self, text: str, rule: str) -> None:
        self.ignored.append(with_rules(text, rule))

    def _sharding(self, node: Node, sharding: Sharding, devices: int, keys: Mapping[str, str]) -> None:
        where = f"{node}, sharding of {sharding.tensor!r}"
        if not sharding.tensor or sharding.tensor not in {*node.inputs, *node.outputs}:
            self.ignore(f"{where}: it is not an input or output of the node", "DV-05")
        elif wrong := list(problems(sharding, devices)):
            for rule, text in wrong:
                self.ignore(f"{where}: {text}", rule)
        elif is_excluded(node):
            self.notes.append(with_rules(f"{where}: ONNX defines no sharding of {node.op_type}", "DV-18"))
        else:
            self.valid.append((node, sharding, keys.get(sharding.tensor) if sharding.tensor in node.inputs else None))


def _devices(configuration: Configuration, table: Any) -> list[jax.Device]:
    """The device of each number, in order (rule DV-22)."""
    if table is None:
        return jax.devices()[: configuration.devices]
    if isinstance(table, Mapping):
        numbers = range(configuration.devices)
        labels = configuration.labels if len(configuration.labels) == len(numbers) else numbers
        chosen = [table.get(label, table.get(i)) for i, label in zip(numbers, labels, strict=True)]
        if lacking := [label for label, device in zip(labels, chosen, strict=True) if device is None]:
            raise ShardingError(
                f"devices= has {list(table)}, configuration {configuration.name!r} also needs {lacking}: labels "
                f"{list(configuration.labels)}, or numbers 0 to {configuration.devices - 1}"
            )
    else:
        chosen = list(table)[: configuration.devices]
    if len(set(chosen)) < len(chosen):
        raise ShardingError(f"devices= repeats a device in {chosen}; each number needs its own device")
    return chosen


def _annotated(graphs: Iterable[Graph]) -> Iterator[tuple[Node, dict[str, str]]]:
    """Annotated nodes, including those of subgraphs and functions, once each, and the keys of weights visible there."""
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
