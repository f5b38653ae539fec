"""A function of arrays that lie on different devices, each step of it computed where its operands are.

JAX wants all operands of a program on the same devices. What an optimizer does to the parameters of a model in stages
is many small computations, most of them on one parameter each; a few, such as a norm over all gradients, take something
of each stage. So the function is traced, its equations are divided by the devices on which the largest of their
operands lies, and run as one program for each group of equations that wait for nothing new from other devices:

    a = mul x x         stage 0        program 1, on stage 0: a = mul x x;  b = sum a
    b = sum a           stage 0        program 2, on stage 1: c = mul y y;  d = sum c
    c = mul y y         stage 1        program 3, on stage 0: e = add b d,  where d has been moved to
    d = sum c           stage 1
    e = add b d         stage 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Place = Sharding | None
"""Whole on the devices on which an array lies; None where it may lie anywhere."""


@dataclass(eq=False)
class Spread:
    """The function, which is traced once for each signature of its arguments, and compiled in parts."""

    function: Callable[..., Any]
    _plans: dict[Any, _Plan] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """What the function returns, each array where the devices computed it."""
        leaves, structure = jax.tree.flatten(args)
        places = tuple(map(_place, leaves))
        types = tuple((v.shape, v.dtype, getattr(v, "weak_type", False)) for v in leaves)
        key = structure, types, places
        if key not in self._plans:
            self._plans[key] = _Plan(self.function, args, places)
        return self._plans[key](leaves)


class _Plan:
    """The parts of a function for one signature."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], places: Sequence[Place]) -> None:
        types = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), tuple(args))
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*types)
        self.structure, jaxpr = jax.tree.structure(shape), closed.jaxpr
        self.inputs, self.outputs = jaxpr.invars, jaxpr.outvars
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        where: dict[Any, tuple[int, Place]] = {v: (0, p) for v, p in zip(jaxpr.invars, places, strict=True)}
        where |= dict.fromkeys(self.constants, (0, None))
        groups: dict[tuple[int, Place], list[Any]] = {}
        for equation in jaxpr.eqns:
            known = [(v, *where[v]) for v in equation.invars if not isinstance(v, Literal)]
            placed = [(math.prod(v.aval.shape), -i) for i, (v, _, place) in enumerate(known) if place is not None]
            place = known[-max(placed)[1]][2] if placed else None
            level = max((own + (other not in (None, place)) for _, own, other in known), default=0)
            groups.setdefault((level, place), []).append(equation)
            where.update(dict.fromkeys(equation.outvars, (level, place)))
        order = sorted(groups, key=lambda group: group[0])
        self.parts = [_Part(closed, groups[group], group[1], self.outputs) for group in _anywhere_first(order)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values: dict[Any, Any] = self.constants | dict(zip(self.inputs, leaves, strict=True))
        for part in self.parts:
            values.update(part(values))
        return jax.tree.unflatten(
            self.structure, [v.val if isinstance(v, Literal) else values[v] for v in self.outputs]
        )


def _anywhere_first(order: Sequence[tuple[int, Place]]) -> list[tuple[int, Place]]:
    """Within a level what may run anywhere comes first: the others of the level may read it."""
    return sorted(order, key=lambda group: (group[0], group[1] is not None))


class _Part:
    """Some equations as a program on the devices of one place."""

    def __init__(self, closed: ClosedJaxpr, equations: Sequence[Any], place: Place, outputs: Sequence[Any]) -> None:
        self.place = place
        inside = {v for e in equations for v in e.outvars}
        reads = dict.fromkeys(v for e in equations for v in e.invars if not isinstance(v, Literal))
        self.takes = [v for v in reads if v not in inside]
        mine = {id(e) for e in equations}
        later = {v for e in closed.jaxpr.eqns if id(e) not in mine for v in e.invars if not isinstance(v, Literal)}
        later |= {v for v in outputs if not isinstance(v, Literal)}
        self.gives = [v for e in equations for v in e.outvars if v in later]
        jaxpr = closed.jaxpr.replace(constvars=[], invars=self.takes, outvars=self.gives, eqns=list(equations))
        self.program = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, [])))

    def __call__(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        taken = [self._here(values[v]) for v in self.takes]
        return dict(zip(self.gives, self.program(*taken), strict=True))

    def _here(self, value: Any) -> Any:
        return value if _place(value) in (None, self.place) else jax.device_put(value, self.place)


def _place(value: Any) -> Place:
    if not getattr(value, "committed", False):
        return None
    sharding = value.sharding
    if sharding.num_devices == 1:
        return SingleDeviceSharding(*sharding.device_set)
    return NamedSharding(sharding.mesh, PartitionSpec())
