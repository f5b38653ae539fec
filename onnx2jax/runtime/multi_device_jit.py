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
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..jaxpr.program import Equation, Program, as_function, is_literal, literal_value, variables
from .dispatch import DispatchCache, signature_of
from .jitted import persistent
from .program_cache import Store

Place = Sharding | None
"""Whole on the devices on which an array lies; None where it may lie anywhere."""


class Spread:
    """The function, traced once for each signature of its arguments, and compiled in parts."""

    def __init__(self, function: Callable[..., Any], store: Store | None = None) -> None:
        """``store`` keeps the compiled parts."""
        self._function, self._store = function, store
        self._programs: DispatchCache[_MultiDeviceProgram] = DispatchCache()

    def __call__(self, *args: Any) -> Any:
        """What the function returns, each array where the devices computed it."""
        leaves, key = jax.tree.leaves(args), signature_of((), args)
        program = self._programs.program(
            key, lambda: _MultiDeviceProgram(self._function, args, list(map(_place, leaves)), self._store)
        )
        return program(leaves)


class _MultiDeviceProgram:
    """The parts of a function for one signature."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], places: Sequence[Place], store: Store | None
    ) -> None:
        types = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), tuple(args))
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*types)
        self.structure, self.program = jax.tree.structure(shape), Program.of(closed)
        where: dict[Any, tuple[int, Place]] = {v: (0, p) for v, p in zip(self.program.inputs, places, strict=True)}
        where |= dict.fromkeys(self.program.constants, (0, None))
        groups: dict[tuple[int, Place], list[Equation]] = {}
        for equation in self.program.equations:
            known = [(v, *where[v]) for v in variables(equation.inputs)]
            placed = [(math.prod(v.aval.shape), -i) for i, (v, _, place) in enumerate(known) if place is not None]
            place = known[-max(placed)[1]][2] if placed else None
            level = max((depth + (other not in (None, place)) for _, depth, other in known), default=0)
            groups.setdefault((level, place), []).append(equation)
            where.update(dict.fromkeys(equation.outputs, (level, place)))
        order = sorted(groups, key=lambda group: group[0])
        self.parts = [_DeviceProgram(self.program, groups[group], group[1], store) for group in _anywhere_first(order)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values = {**self.program.constants, **dict(zip(self.program.inputs, leaves, strict=True))}
        for part in self.parts:
            values.update(part(values))
        results = [literal_value(v) if is_literal(v) else values[v] for v in self.program.outputs]
        return jax.tree.unflatten(self.structure, results)


def _anywhere_first(order: Sequence[tuple[int, Place]]) -> list[tuple[int, Place]]:
    """Within a level what may run anywhere comes first: the others of the level may read it."""
    return sorted(order, key=lambda group: (group[0], group[1] is not None))


class _DeviceProgram:
    """Some equations as a program on the devices of one place."""

    def __init__(self, program: Program, equations: Sequence[Equation], place: Place, store: Store | None) -> None:
        others = {*program.equations}.difference(equations)
        later = {*variables([*program.outputs, *(v for e in others for v in e.inputs)])}
        part = program.replace(constants={}).part(equations, later)  # constants are among its inputs
        self.place, self.takes, self.gives = place, part.inputs, part.outputs
        self.program = persistent(jax.jit(as_function(part.closed())), store)

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
