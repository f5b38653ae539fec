"""A step of training as it is compiled for a CPU: passes over a program whose weights change with every call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ...ops.arrays import is_traced
from .gradients import in_steps
from .inline import for_the_cpu, inlined, renamed
from .layout import channels_last
from .products import turned


def on_one_cpu(args: Any) -> bool:
    """Whether arguments are those of a program for a single CPU, and nobody transforms the call."""
    leaves = jax.tree.leaves(args)
    devices = {d for v in leaves if isinstance(v, jax.Array) and not is_traced(v) for d in v.devices()}
    return not is_traced(leaves) and len(devices) == 1 and next(iter(devices)).platform == "cpu"


def optimised(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a state and other arrays, for jax.jit to trace, as a program that a CPU runs faster."""

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        state = [i < len(jax.tree.leaves(args[0])) for i in range(len(leaves))]
        values = jaxpr_as_fun(_improved(closed, state))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(results), values)

    return inside


def _improved(closed: ClosedJaxpr, state: Sequence[bool]) -> ClosedJaxpr:
    if closed.effects:  # such as a user's jax.debug.print, whose order counts
        return closed
    changed = channels_last(closed, [False] * len(state), stays=state, way=in_steps(closed))
    return turned(_in_one_row(closed) if changed is closed else changed)


def _in_one_row(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr, names = closed.jaxpr, dict[Any, Any]()
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    equations = [*inlined(jaxpr.eqns, names, constants, lambda _: True, for_the_cpu)]
    outputs = [renamed(v, names) for v in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(constvars=[*constants], eqns=equations, outvars=outputs), [*constants.values()])
