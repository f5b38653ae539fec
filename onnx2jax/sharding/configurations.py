"""ONNX device configurations (IR 11): one mesh for each, and every sharding in it as axes of that mesh.

Annotations are hints (rule DV-01). What cannot be said by one mesh is left out, and said so.
"""

from __future__ import annotations

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
from .mesh import best
from .plans import Plan, as_plan, by_plan
from .rules import (
    Arrays,
    Placement,
    Rules,
    Shardings,
    by_rules,
    fitting,
    own_rules,
)
from .shapes import Evaluate
from .stages import AXIS, cut, in_stages, slices, staged
from .walk import key as of_node

Kept = tuple[Node, Sharding, str | None]
"""What is said: the node, the sharding, and the key of the initializer that it is about."""


def placement(
    imported: Imported,
    configuration: str | None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None,
    mesh: Mesh | None,
    rules: Rules | str | Plan | None,
    training: tuple[Sequence[Graph], Mapping[str, np.ndarray]] | None = None,
    microbatches: int = 1,
    evaluate: Evaluate | None = None,
) -> Placement | None:
    """Where a model's arrays lie: by one of its own configurations, by a user's rules, or None: on one device.

    ``training`` gives the graphs and the arrays of a model that trains; those of a Model follow from ``imported``.
    ``microbatches`` go through the stages of a configuration one behind the other. ``evaluate`` evaluates the graph
    abstractly, for plans.

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
    if microbatches != 1 and configuration is None:
        raise ShardingError(f"microbatches={microbatches} go through stages, of which there are none: stages=n")
    if configuration is None and mesh is None:
        return None
    graphs, weights = training or ((imported.graph,), analysis.parameters(imported.graph))
    if configuration is not None:
        return _configured(imported, configuration, devices, graphs, weights, training is not None, microbatches)
    assert mesh is not None
    plan = as_plan(rules)
    if plan is not None and training:
        raise ShardingError(
            f"plan {plan.kind!r} is for convert; training_info takes patterns over names: shardings={{}}"
        )
    if plan is not None:
        assert evaluate is not None
        return by_plan(imported.graph, weights, mesh, plan, evaluate)
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
        raise ShardingError(f"device_configuration {name!r} is none of the model's, which are {known}", rule="DV-03")
    if configuration.devices < 1:
        raise ShardingError(f"configuration {name!r} has {configuration.devices} devices", rule="DV-02")
    devices = _devices(configuration, table)
    if len(devices) < configuration.devices:
        wants = f"it wants {configuration.devices} devices, there are {len(devices)}"
        warn(with_rules(f"configuration {name!r} is ignored: {wants}", "DV-22"))
        return None
    said = _Said(imported, configuration, graphs)
    stages = None if training else _stages(imported.graph, said, name, configuration.devices)
    if stages is None:
        if microbatches != 1:
            raise ShardingError(
                f"microbatches={microbatches} go through stages with devices of their own, which {name!r} does not have"
            )
        result = _over(range(configuration.devices), devices, said.kept, said, name, weights)
        result = replace(result, stages=said.stages)
    else:
        of_nodes, groups = stages
        own = {id(node): stage for node, stage in zip(imported.graph.nodes, of_nodes, strict=True)}

        def kept(stage: int) -> list[Kept]:
            """What is said of its nodes, and of nodes inside others, by whether it is for its devices."""
            return [k for k in said.kept if own.get(id(k[0]), stage) == stage and _members(k[1]) <= {*groups[stage]}]

        parts = [_over(group, devices, kept(k), said, name, weights) for k, group in enumerate(groups)]
        mesh = Mesh(np.array([devices[d] for group in groups for d in group]), ("devices",))
        told = {"configuration": name, "stages": said.stages}
        result = in_stages(imported.graph, weights, of_nodes, mesh, parts, microbatches, **told)
    if said.misses:
        more = f"\nand {len(said.misses) - 5} more: model.placement.notes" if len(said.misses) > 5 else ""
        warn("\n".join([f"configuration {name!r} is followed in part; results are the same:", *said.misses[:5]]) + more)
    return replace(result, notes=(*said.misses, *said.notes))


def _over(
    numbers: Sequence[int],
    devices: Sequence[jax.Device],
    kept: Sequence[Kept],
    said: _Said,
    name: str,
    weights: Mapping[str, np.ndarray],
) -> Placement:
    """What is said, over one mesh of the devices with these numbers."""
    place = {d: i for i, d in enumerate(numbers)}
    patterns = {s: (tuple(tuple(place[d] for d in g) for g in s.holders), s.pattern[1]) for _, s, _ in kept}
    layout = best([patterns[s] for _, s, _ in kept], len(numbers))
    order = [numbers[i] for i in layout.order]
    mesh = compat.auto(Mesh(np.array([devices[d] for d in order]).reshape(layout.shape), layout.axis_names))
    axes = {s: layout.named(pattern) for s, pattern in patterns.items() if pattern in layout.uses}
    for node, s, _ in kept:
        members = sorted(_members(s))
        where = f"{node}, sharding of {s.tensor!r}"
        if s not in axes:
            held = [list(group) if len(group) > 1 else group[0] for group in s.holders]
            others = f"{dict(mesh.shape)} over devices {order}"
            said.miss(f"{where}: shards on devices {held} cannot be said by the mesh of the others, {others}", "DV-23")
        elif members and len(members) < len(numbers):
            said.miss(f"{where}: it is for devices {members}; the others hold copies", "DV-23")
    params = _params(weights, mesh, [(k, s, axes[s]) for _, s, k in kept if k and s in axes], said.notes)
    # An input lies where the first node that reads it wants it, as a weight does, and else whole (rule DV-13).
    made = {n for node, _, _ in kept for n in node.outputs}
    read = {s.tensor: s for node, s, k in reversed(kept) if not k and s in axes and s.tensor not in made}
    of_params = partial(_everywhere, mesh, params)
    of_inputs = partial(_inputs, mesh, {n: (s, axes[s]) for n, s in read.items()})
    divided = [n for n, sharding in params.items() if not sharding.is_fully_replicated]
    constrain = Constraints(name, mesh, axes, divided)
    return Placement(mesh, params, of_params, of_inputs, name, constrain=constrain)


def _inputs(mesh: Mesh, asked: Mapping[str, tuple[Sharding, Axes]], values: Arrays, _batch: bool = False) -> Shardings:
    return {n: _asked(mesh, *asked[n], v.shape) if n in asked else whole_on(mesh) for n, v in values.items()}


def _asked(mesh: Mesh, sharding: Sharding, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    try:
        factors, places = factored(sharding, axes, shape)
        fits = len(factors) == len(shape)
        return fitting("", shape, mesh, PartitionSpec(*places), "its node") if fits else whole_on(mesh)
    except ShardingError:  # extents that the devices do not divide
        return whole_on(mesh)


def whole_on(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _members(sharding: Sharding) -> set[int]:
    return {d for group in sharding.holders for d in group}


def _stages(graph: Graph, said: _Said, name: str, devices: int) -> tuple[list[int], list[list[int]]] | None:
    """The stage of each node, counted from 0, and the devices of each stage.

    Those are the devices that hold what is said of its nodes; stages of which nothing is said share the others evenly.
    None where there is one stage, or where stages have devices in common: then all nodes are one program.
    """
    given = {of_node(n): n.devices[name].stage for n in graph.nodes if name in n.devices}
    numbers = sorted({s for s in given.values() if s is not None})
    if len(numbers) < 2:
        return None
    stages = staged(graph.nodes, {k: numbers.index(s) for k, s in given.items() if s is not None})
    own = {id(node): stage for node, stage in zip(graph.nodes, stages, strict=True)}
    held: list[set[int]] = [set() for _ in numbers]
    for node, sharding, _ in said.kept:
        if id(node) in own:
            held[own[id(node)]] |= _members(sharding)
    taken = set().union(*held)
    if sum(map(len, held)) > len(taken):
        return None
    free, bare = [d for d in range(devices) if d not in taken], [k for k, group in enumerate(held) if not group]
    if bare and (len(free) < len(bare) or len(free) % len(bare)):
        said.miss(f"{len(bare)} pipeline stages share {len(free)} devices unevenly: all nodes are one program", "DV-20")
        return None
    each = len(free) // len(bare) if bare else 0
    return stages, [
        sorted(group) if group else free[bare.index(k) * each : (bare.index(k) + 1) * each]
        for k, group in enumerate(held)
    ]


def by_count(
    imported: Imported,
    count: int,
    microbatches: int,
    mesh: Mesh | None,
    rules: Rules | str | Plan | None,
    costs: Callable[[], Sequence[float]],
    evaluate: Evaluate,
) -> Placement:
    """The placement of a model in as many stages as wanted, each divided as ``rules`` say.

    Raises:
        ShardingError: there are too few devices or nodes, or the rules do not fit.
    """
    whole, parts = slices(mesh, count)
    if mesh is None and rules is not None:
        raise ShardingError(
            f"shardings= divide each stage over a mesh: mesh=jax.make_mesh(({count}, 2), ('{AXIS}', 'data'))"
        )
    placed = [placement(imported, None, None, part, rules, evaluate=evaluate) for part in parts]
    stages = cut(imported.graph, costs(), count)
    weights = analysis.parameters(imported.graph)
    return in_stages(imported.graph, weights, stages, whole, [p for p in placed if p], microbatches)


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
        self.kept: list[Kept] = []
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
        elif is_excluded(node):
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
            factors, places = factored(sharding, axes, shape)
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
