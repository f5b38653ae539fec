"""Plans: shardings by a user's rules over names, or derived from the graph for data, FSDP and tensor parallelism.

Tensor parallelism shards matrix products in pairs, by columns and by rows. The result of a product sharded by columns
is sharded along its last axis. That axis is propagated through elementwise operators, heads (Reshape, Transpose) and
attention to the next product, which is sharded by rows: one all-reduce per pair. If it ends elsewhere, such as at a
normalization, the first product stays replicated, and propagation restarts without it, until every sharding ends at a
product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import compat
from ..errors import ShardingError
from ..ir.graph import Graph, Node
from ..ops.arrays import is_traced
from ..ops.registry import Shards
from .node_rules import ATTENTION, BEGINS, PRODUCTS, RULES
from .propagation import Key, ShardedAxes, ValueFacts, Walk, key
from .put import mesh_axes
from .rules import Arrays, Constraint, Placement, Rules, Shardings, check_patterns, fitting, own_rules
from .stages import AXIS

KINDS: Final = ("data", "fsdp", "tensor", "data+tensor", "fsdp+tensor")

Specs = dict[str, tuple[tuple[int, ...], PartitionSpec]]
"""Parameter -> its shape and PartitionSpec."""


@dataclass(frozen=True)
class Plan:
    """A kind of parallelism over the axes of a mesh: ``convert(..., mesh=mesh, shardings=Plan("tensor"))``.

    Attributes:
        kind: "data": shards inputs along their first axis, replicates weights. "fsdp": shards inputs likewise, and each
            weight along its largest divisible axis, and gathers weights where they are used. "tensor": shards matrix
            products in pairs, by columns and by rows, attention by heads, mixtures by experts, and the largest table
            by rows. "data+tensor" and "fsdp+tensor" combine them.
        data: the mesh axis for inputs, and for "fsdp".
        model: the mesh axis for "tensor".
        rules: patterns over names of weights and inputs with specs, as for ``convert``; they take precedence.

    Raises:
        ShardingError: the kind is unknown, or both mesh axes are the same.

    >>> Plan("tensor", model="tp").axes
    ('tp',)
    """

    kind: str
    data: str = "data"
    model: str = "model"
    rules: Mapping[str, PartitionSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShardingError(f"there is no plan {self.kind!r}; the plans are {', '.join(map(repr, KINDS))}")
        if len(set(self.axes)) < len(self.axes):
            raise ShardingError(f"plan {self.kind!r} needs two different mesh axes, and both are {self.data!r}")

    @property
    def tensor(self) -> bool:
        """Whether matrix products are sharded."""
        return self.kind.endswith("tensor")

    @property
    def fsdp(self) -> bool:
        """Whether weights are sharded, and gathered where they are used."""
        return self.kind.startswith("fsdp")

    @property
    def batch(self) -> bool:
        """Whether inputs are sharded along their first axis."""
        return self.kind != "tensor"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the plan uses."""
        return (self.data,) * self.batch + (self.model,) * self.tensor


def as_plan(shardings: Any) -> Plan | None:
    """The plan, if ``shardings`` is one or its kind; None for a user's rules.

    Raises:
        ShardingError: the kind is unknown.
    """
    return Plan(shardings) if isinstance(shardings, str) else shardings if isinstance(shardings, Plan) else None


def mesh_of(shardings: Rules | str | Plan | None, stages: int | None = None) -> str:
    """The code for a mesh of all devices with the axes that shardings name, and an axis for pipeline stages.

    Raises:
        ShardingError: they are neither a plan nor rules.
    """
    plan = as_plan(shardings)
    specs = (plan.rules if plan else own_rules(shardings)).values()
    of_rules = (a for spec in specs if isinstance(spec, PartitionSpec) for entry in spec for a in mesh_axes(entry))
    first, *others = dict.fromkeys([*(plan.axes if plan else ()), *of_rules]) or ("data",)
    axes = {} if stages is None else {AXIS: stages}
    axes[first] = jax.device_count() // (stages or 1)
    for name in others:
        axes[name] = 2 - axes[first] % 2
        axes[first] //= axes[name]
    return f"jax.make_mesh({tuple(axes.values())}, {tuple(axes)})"


def check_axes(plan: Plan, mesh: Mesh, stages: int | None = None) -> None:
    """Raise ShardingError if a mesh lacks an axis of a plan."""
    if missing := [a for a in plan.axes if a not in mesh.axis_names]:
        raise ShardingError(
            f"plan {plan.kind!r} shards over axis {missing[0]!r}, the mesh has {list(mesh.axis_names)}: "
            f"mesh={mesh_of(plan, stages)}, or name its axes: Plan({plan.kind!r}, data=..., model=...)"
        )


def by_plan(graph: Graph, params: Mapping[str, np.ndarray], mesh: Mesh, plan: Plan) -> Placement:
    """The placement of a graph by a plan.

    Args:
        graph: the main graph.
        params: the parameters, by the name of their initializer or, inside other graphs, by ``Graph.key``.
        mesh: the devices; all its axes become Auto.
        plan: the plan.

    Raises:
        ShardingError: the mesh lacks an axis, or a rule of the plan does not fit.
    """
    check_axes(plan, mesh)
    sharded = pairs(graph, params, mesh.shape[plan.model]) if plan.tensor else ShardedAxes()
    placement, specs = _placement(params, [v.name for v in graph.inputs], mesh, plan, sharded)
    reasons = {
        n: why
        for n, (shape, spec) in specs.items()
        if not _ruled(plan, n) and (why := _reason(n, shape, spec, plan, mesh, sharded))
    }
    notes = tuple(f"{n!r} {why}" for n, why in reasons.items() if len(specs[n][0]) > 1 and plan.kind != "data")
    constrain = PlanConstraints(placement.mesh, plan, graph, sharded, specs)
    return replace(placement, notes=notes, constrain=constrain, reasons=reasons)


def by_rules(params: Arrays, inputs: Iterable[str], mesh: Mesh, rules: Rules) -> Placement:
    """The placement by a user's rules: of parameters and inputs by the first rule whose pattern matches their name.

    Other parameters are replicated, and other inputs sharded along their first axis over the mesh's first, as a
    training batch is, if that divides it.

    Args:
        params: name -> anything with a shape.
        inputs: the names of inputs.
        mesh: the devices; all its axes become Auto, so the compiler chooses shardings of intermediate values.
        rules: patterns (``"*.weight"``; fnmatch) with specs.

    Raises:
        ShardingError: a rule fits no array, or does not fit the mesh.

    >>> import jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
    >>> params = {"fc.weight": np.zeros((4, 8)), "fc.bias": np.zeros(8)}
    >>> placement = by_rules(params, (), mesh, {"*.weight": P(None, "model")})
    >>> [s.spec for s in placement.params.values()]
    [P(None, 'model'), P()]
    """
    return _placement(params, inputs, mesh, Plan("data", data=mesh.axis_names[0], rules=rules), ShardedAxes())[0]


def _placement(
    params: Arrays, inputs: Iterable[str], mesh: Mesh, plan: Plan, sharded: ShardedAxes
) -> tuple[Placement, Specs]:
    check_patterns(plan.rules, [*params, *inputs])
    mesh = compat.auto(mesh)
    specs: Specs = {}
    for name, value in params.items():
        shape = tuple(np.shape(value))
        specs[name] = shape, _spec(shape, mesh, plan, sharded.weights.get(name))
    of_params = partial(_of_params, mesh, plan, specs)
    return Placement(mesh, of_params(params), of_params, partial(_of_inputs, mesh, plan, sharded.inputs)), specs


def _spec(shape: Sequence[int], mesh: Mesh, plan: Plan, axis: int | None) -> PartitionSpec:
    """The PartitionSpec of a parameter, given its axis that is sharded over ``plan.model``."""
    axes: list[tuple[str, ...]] = [(plan.model,) if i == axis else () for i in range(len(shape))]
    if plan.fsdp and math.prod(shape) > 1:
        parts = mesh.shape[plan.data]
        left = [n // mesh.shape[plan.model] if i == axis else n for i, n in enumerate(shape)]
        if divisible := [i for i, n in enumerate(left) if n % parts == 0]:
            best = max(divisible, key=lambda i: (i != axis, left[i]))
            axes[best] = (*axes[best], plan.data)
    return _trimmed(axes)


def _trimmed(spec: list[Any]) -> PartitionSpec:
    """The spec without the last axes that are not sharded."""
    while spec and not spec[-1]:
        spec.pop()
    return PartitionSpec(*spec)


def _reason(name: str, shape: Sequence[int], spec: PartitionSpec, plan: Plan, mesh: Mesh, sharded: ShardedAxes) -> str:
    """Why a parameter is not sharded over each of the plan's axes; empty if it is."""
    if not plan.tensor and not plan.fsdp:
        return "is replicated: the plan shards inputs only"
    why = []
    if plan.tensor and name not in sharded.weights:
        reason = sharded.reasons.get(name, "it belongs to a subgraph")
        why.append(f"is not sharded over {plan.model!r}: {reason}")
    if plan.fsdp and plan.data not in [a for entry in spec for a in mesh_axes(entry)]:
        parts = mesh.shape[plan.data]
        why.append(f"is not sharded over {plan.data!r}: no axis of {list(shape)} is a multiple of {parts}")
    return "; it ".join(why)


def _ruled(plan: Plan, name: str) -> str | None:
    """The pattern of the user's rule for a name, if any."""
    return next((p for p in plan.rules if p == name or fnmatchcase(name, p)), None)


def _of_params(mesh: Mesh, plan: Plan, specs: Specs, values: Arrays) -> Shardings:
    shardings = {}
    for name, value in values.items():
        shape, rule = tuple(np.shape(value)), _ruled(plan, name)
        planned, spec = specs.get(name, (None, PartitionSpec()))
        if rule is not None:
            shardings[name] = fitting(name, shape, mesh, plan.rules[rule], f"rule {rule!r}")
        else:
            shardings[name] = NamedSharding(mesh, spec if planned == shape else _spec(shape, mesh, plan, None))
    return shardings


def _of_inputs(mesh: Mesh, plan: Plan, caches: Mapping[str, int], values: Arrays, batch: bool) -> Shardings:
    """Shardings of inputs along their first axis if it is divisible (a training batch must be), of caches by heads."""
    shardings = {}
    for name, value in values.items():
        rule, shape = _ruled(plan, name), tuple(np.shape(value))
        if rule is not None and not batch:
            shardings[name] = fitting(name, shape, mesh, plan.rules[rule], f"rule {rule!r}")
            continue
        spec: list[str | None] = [None] * len(shape)
        if spec and plan.batch and (batch or shape[0] % mesh.shape[plan.data] == 0):
            spec[0] = plan.data
        axis = caches.get(name)
        if axis is not None and -len(shape) < axis and shape[axis] % mesh.shape[plan.model] == 0:
            spec[axis] = plan.model
        shardings[name] = fitting(name, shape, mesh, _trimmed(spec), "the batch")
    return shardings


class PlanConstraints(Constraint):
    """Slices shards from replicated values where the plan does, and gathers FSDP weights where they are used.

    XLA propagates the shardings of weights and inputs to all other values.
    """

    def __init__(self, mesh: Mesh, plan: Plan, graph: Graph, sharded: ShardedAxes, specs: Specs) -> None:
        self.mesh, self.model, self.batch = mesh, plan.model, plan.data if plan.batch else None
        self.sliced, self.results, self.along = sharded.sliced, sharded.results, sharded.shards
        self.parts = mesh.shape[plan.model] if plan.tensor else 1
        gathered: Specs = {}
        for name, (shape, spec) in specs.items() if plan.fsdp else ():
            whole = PartitionSpec(*(tuple(a for a in mesh_axes(entry) if a != plan.data) for entry in spec))
            if whole != spec and _ruled(plan, name) is None:
                gathered[name] = shape, whole
        self.operands: dict[Key, Specs] = {}
        for node in graph.nodes:
            if weights := {n: gathered[n] for n in node.inputs if n in gathered}:
                self.operands[key(node)] = weights

    def __call__(self, node: Node, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        sliced, operands = self.sliced.get(key(node), {}), self.operands.get(key(node), {})
        return [self._placed(n, v, sliced, operands) for n, v in zip(names, values, strict=False)]

    def shards(self, node: Node, /) -> Shards:
        along = self.along.get(key(node))
        return Shards(spread=True) if along is None else Shards(self.parts, along, True)

    def _placed(self, name: str, value: Any, sliced: Mapping[str, int], operands: Specs) -> Any:
        if not is_traced(value) or not hasattr(value, "ndim"):
            return value
        if name in operands and operands[name][0] == value.shape:
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, operands[name][1]))
        axis = sliced.get(name, 0)
        if axis == 0 or value.ndim < -axis or value.shape[axis] % self.parts:
            return value
        for entry in (None, self.model):
            spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
            spec[axis] = entry
            value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, PartitionSpec(*spec)))
        return value


def pairs(graph: Graph, weights: Mapping[str, Any], parts: int) -> ShardedAxes:
    """Pair the matrix products of a graph and shard them over a number of devices.

    Args:
        graph: a main graph.
        weights: anything with a shape, by the name of an initializer.
        parts: the number of shards.
    """
    facts, rejected = ValueFacts(graph, weights), dict[int, str]()
    while True:
        walk = Walk(graph, facts, weights, parts, rejected)
        walk.run(BEGINS, RULES)
        if rejected.keys() >= walk.failed.keys():
            walk.annotate({"MatMulNBits", *PRODUCTS, *ATTENTION}, {"Gather", "MoE", "QMoE"})
            walk.explain()
            return walk.sharded
        rejected = walk.failed | rejected
