"""Plans: where the arrays of a model lie by the way in which it is to be divided, found in its graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from .rules import Arrays, Constraint, Placement, Rules, Shardings, check_patterns, entries, fitting
from .shapes import Evaluate
from .tensor import pairs
from .walk import Found, How, Key, key

KINDS: Final = ("data", "fsdp", "tensor", "data+tensor", "fsdp+tensor")

Specs = dict[str, tuple[tuple[int, ...], PartitionSpec]]
"""For each parameter its shape and where it lies."""


@dataclass(frozen=True)
class Plan:
    """A way to divide a model over the axes of a mesh: ``convert(..., mesh=mesh, shardings=Plan("tensor"))``.

    Attributes:
        kind: "data": inputs along their first axis, weights on every device. "fsdp": inputs likewise, and each weight
            along its largest axis that can be divided; it is gathered where it is used. "tensor": products in pairs,
            by columns and by rows, attention by heads, mixtures by experts, the largest table by rows. "data+tensor"
            and "fsdp+tensor": both.
        data: the axis of the mesh for inputs, and for "fsdp".
        model: the axis of the mesh for "tensor".
        rules: patterns over the names of weights and inputs with specs, as ``convert`` takes them; they win.

    Raises:
        ShardingError: there is no such kind, or both axes are one.

    >>> Plan("tensor", model="tp").axes
    ('tp',)
    """

    kind: str
    data: str = "data"
    model: str = "model"
    rules: Rules = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShardingError(f"there is no plan {self.kind!r}; the plans are {', '.join(map(repr, KINDS))}")
        if len(set(self.axes)) < len(self.axes):
            raise ShardingError(f"plan {self.kind!r} divides over two axes of a mesh, and both are {self.data!r}")

    @property
    def tensor(self) -> bool:
        """Whether products are divided."""
        return self.kind.endswith("tensor")

    @property
    def fsdp(self) -> bool:
        """Whether each weight is divided and gathered where it is used."""
        return self.kind.startswith("fsdp")

    @property
    def batch(self) -> bool:
        """Whether inputs are divided along their first axis."""
        return self.kind != "tensor"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the mesh must have."""
        return (self.data,) * self.batch + (self.model,) * self.tensor


def as_plan(shardings: Any) -> Plan | None:
    """The plan that a user names; None for rules of the user's own.

    Raises:
        ShardingError: there is no such plan.
    """
    return Plan(shardings) if isinstance(shardings, str) else shardings if isinstance(shardings, Plan) else None


def by_plan(graph: Graph, params: Mapping[str, np.ndarray], mesh: Mesh, plan: Plan, evaluate: Evaluate) -> Placement:
    """The placement that a plan finds for a graph.

    Args:
        graph: the main graph.
        params: the parameters, by the name of their initializer or, inside other graphs, by ``Graph.key``.
        mesh: the devices. Its axes are taken as Auto.
        plan: how to divide.
        evaluate: evaluates the graph abstractly.

    Raises:
        ShardingError: the mesh lacks an axis, or a rule of the plan does not fit.
    """
    if missing := [a for a in plan.axes if a not in mesh.axis_names]:
        raise ShardingError(
            f"plan {plan.kind!r} divides over axis {missing[0]!r}, the mesh has {list(mesh.axis_names)}: make the mesh "
            f"jax.make_mesh(..., {plan.axes}), or name its axes: Plan({plan.kind!r}, data=..., model=...)"
        )
    mesh = compat.auto(mesh)
    inputs = [v.name for v in graph.inputs]
    check_patterns(plan.rules, [*params, *inputs])
    found = pairs(graph, params, mesh.shape[plan.model], evaluate) if plan.tensor else Found()
    specs: Specs = {n: (v.shape, _spec(v.shape, mesh, plan, found.weights.get(n))) for n, v in params.items()}
    of_params = partial(_of_params, mesh, plan, specs)
    reasons = {
        n: _reason(n, shape, spec, plan, mesh, found) for n, (shape, spec) in specs.items() if not _ruled(plan, n)
    }
    reasons = {n: why for n, why in reasons.items() if why}
    notes = tuple(f"{n!r} {why}" for n, why in reasons.items() if len(specs[n][0]) > 1 and plan.kind != "data")
    constrain = Constraints(mesh, plan, graph, found, specs)
    of_inputs = partial(_of_inputs, mesh, plan, found.inputs)
    return Placement(mesh, of_params(params), of_params, of_inputs, notes=notes, constrain=constrain, reasons=reasons)


def _spec(shape: Sequence[int], mesh: Mesh, plan: Plan, axis: int | None) -> PartitionSpec:
    """Where a parameter lies, given the axis that is divided over the plan's ``model``."""
    axes: list[tuple[str, ...]] = [(plan.model,) if i == axis else () for i in range(len(shape))]
    if plan.fsdp and math.prod(shape) > 1:
        parts = mesh.shape[plan.data]
        left = [n // mesh.shape[plan.model] if i == axis else n for i, n in enumerate(shape)]
        whole = [i for i, n in enumerate(left) if n % parts == 0]
        if whole:
            best = max(whole, key=lambda i: (i != axis, left[i]))
            axes[best] = (*axes[best], plan.data)
    while axes and not axes[-1]:
        axes.pop()
    return PartitionSpec(*map(entries, axes))


def _reason(name: str, shape: Sequence[int], spec: PartitionSpec, plan: Plan, mesh: Mesh, found: Found) -> str:
    """Why a parameter is not divided, or not over both axes."""
    if not plan.tensor and not plan.fsdp:
        return "is whole: the plan divides inputs alone"
    why = []
    if plan.tensor and name not in found.weights:
        reason = found.reasons.get(name, "it stands in a graph inside a node")
        why.append(f"is not divided over {plan.model!r}: {reason}")
    if plan.fsdp and plan.data not in [a for e in spec for a in (e if isinstance(e, tuple) else (e,))]:
        parts = mesh.shape[plan.data]
        why.append(f"is not divided over {plan.data!r}: no axis of {list(shape)} is a multiple of {parts}")
    return "; it ".join(why)


def _ruled(plan: Plan, name: str) -> str | None:
    """The user's own rule for a name."""
    return next((p for p in plan.rules if p == name or fnmatchcase(name, p)), None)


def _of_params(mesh: Mesh, plan: Plan, specs: Specs, values: Arrays) -> Shardings:
    found = {}
    for name, value in values.items():
        shape, rule = tuple(np.shape(value)), _ruled(plan, name)
        planned, spec = specs.get(name, (None, PartitionSpec()))
        if rule is not None:
            found[name] = fitting(name, shape, mesh, plan.rules[rule], f"rule {rule!r}")
        else:
            found[name] = NamedSharding(mesh, spec if planned == shape else _spec(shape, mesh, plan, None))
    return found


def _of_inputs(mesh: Mesh, plan: Plan, caches: Mapping[str, int], values: Arrays, batch: bool) -> Shardings:
    """Inputs along their first axis where that can be divided (a batch to train on must be), caches by heads."""
    found = {}
    for name, value in values.items():
        rule, axes = _ruled(plan, name), [None] * value.ndim if hasattr(value, "ndim") else []
        if rule is not None and not batch:
            found[name] = fitting(name, value.shape, mesh, plan.rules[rule], f"rule {rule!r}")
            continue
        places: list[str | None] = list(axes)
        if places and plan.batch and (batch or value.shape[0] % mesh.shape[plan.data] == 0):
            places[0] = plan.data
        axis = caches.get(name)
        if axis is not None and -value.ndim < axis and value.shape[axis] % mesh.shape[plan.model] == 0:
            places[axis] = plan.model
        found[name] = fitting(name, value.shape, mesh, PartitionSpec(*places), "the batch")
    return found


class Constraints(Constraint):
    """What the evaluation loop asks at each node: the results of products are divided as the plan says, and a weight
    that lies over the axis of the data is gathered where it is used.
    """

    def __init__(self, mesh: Mesh, plan: Plan, graph: Graph, found: Found, specs: Specs) -> None:
        self.mesh, self.model, self.batch = mesh, plan.model, plan.data if plan.batch else None
        self.results, self.ranks = found.values, found.ranks
        self.along = found.shards
        self.parts = mesh.shape[plan.model] if plan.tensor else 1
        gathered = {}
        for name, (shape, spec) in specs.items():
            without = _without(spec, plan.data) if plan.fsdp else spec
            if without != spec and _ruled(plan, name) is None:
                gathered[name] = shape, without
        self.operands: dict[Key, Specs] = {}
        for node in graph.nodes:
            if own := {n: gathered[n] for n in node.inputs if n in gathered}:
                self.operands[key(node)] = own

    def __call__(self, node: Node, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        own = key(node)
        results, operands = self.results.get(own, {}), self.operands.get(own, {})
        return [self._placed(n, v, results, operands) for n, v in zip(names, values, strict=False)]

    def shards(self, node: Node, /) -> Shards:
        along = self.along.get(key(node))
        return Shards(spread=True) if along is None else Shards(self.parts, along, True)

    def _placed(self, name: str, value: Any, results: Mapping[str, tuple[int, How]], operands: Specs) -> Any:
        if not is_traced(value) or not hasattr(value, "ndim"):
            return value
        if name in operands and operands[name][0] == value.shape:
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, operands[name][1]))
        axis, how = results.get(name, (0, "whole"))
        if axis == 0 or value.ndim < -axis or (how != "whole" and value.shape[axis] % self.parts):
            return value
        for own in {"divided": (self.model,), "whole": (None,), "taken": (None, self.model)}[how]:
            places: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
            places[axis] = own
            value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, PartitionSpec(*places)))
        return value


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """A spec without an axis of the mesh."""
    axes = [tuple(a for a in (e if isinstance(e, tuple) else (e,)) if a not in (axis, None)) for e in spec]
    return PartitionSpec(*map(entries, axes))
