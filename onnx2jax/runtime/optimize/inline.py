"""The equations of a program in one row: what stands in inner calls is written in their place.

Before:                                        After:

    b = jit[jaxpr={lambda; p. q = neg p; q}] a      c = neg a
    c = custom_jvp_call[...f...] b                  d = max c 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

CALLS: Final = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Primitives that stand for a program -> the parameter that holds it."""


def inlined(
    equations: Sequence[Any],
    names: dict[Any, Any],
    constants: dict[Any, Any],
    opens: Callable[[Sequence[Any]], bool],
    branch: Callable[[Any], int],
    around: Any = None,
) -> Iterator[Any]:
    """The equations, with those of an inner program in its place.

    Args:
        equations: of a jaxpr.
        names: says which variable, or literal, stands for one of the original; it grows.
        constants: gets the values of variables that inner programs close over.
        opens: whether a program is opened that is called with these variables.
        branch: which of the branches of a choice by platform is taken.
        around: the scopes of names that the equations stand in, those of the nodes among them.
    """
    for equation in equations:
        scope = equation.source_info.name_stack if around is None else around + equation.source_info.name_stack
        operands = [renamed(v, names) for v in equation.invars]
        inner, given = _inside(equation, operands, opens, branch)
        if inner is None:
            results = [Var(v.aval) for v in equation.outvars]  # an inner program can come twice
            names.update(zip(equation.outvars, results, strict=True))
            source = equation.source_info.replace(name_stack=scope)
            yield equation.replace(invars=operands, outvars=results, source_info=source)
            continue
        closed_over = [Var(v.aval) for v in inner.jaxpr.constvars]
        constants.update(zip(closed_over, inner.consts, strict=True))
        places = (*inner.jaxpr.constvars, *inner.jaxpr.invars)
        within = dict(zip(places, (*closed_over, *given), strict=True))
        yield from inlined(inner.jaxpr.eqns, within, constants, opens, branch, scope)
        names.update(zip(equation.outvars, (renamed(v, within) for v in inner.jaxpr.outvars), strict=True))


def for_the_cpu(equation: Any) -> int:
    """The branch of a choice by platform that a CPU takes."""
    platforms = equation.params["branches_platforms"]
    mine = next((i for i, names in enumerate(platforms) if names and "cpu" in names), None)
    return int(platforms.index(None)) if mine is None else mine


def written(
    function: Callable[..., Any], equation: Any, operands: Sequence[Any], constants: dict[Any, Any]
) -> list[Any]:
    """The equations of a function of variables, or literals, that give the result of an equation in its place.

    ``constants`` gets the values that the function holds.
    """
    return placed(jax.make_jaxpr(lambda *xs: function(*xs))(*map(as_type, operands)), equation, operands, constants)


def as_type(variable: Any) -> jax.ShapeDtypeStruct:
    """What functions are traced with for a variable, or a literal."""
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)


def bytes_of(variable: Any) -> int:
    """What the value of a variable, or of a literal, takes in memory; 0 for what is no array."""
    aval = variable.aval
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize if hasattr(aval, "shape") else 0


def placed(closed: ClosedJaxpr, equation: Any, operands: Sequence[Any], constants: dict[Any, Any]) -> list[Any]:
    """The equations of a program of variables, or literals, that give the result of an equation in its place.

    ``constants`` gets the values that the program holds.
    """
    names = dict(zip(closed.jaxpr.invars, operands, strict=True))
    inside = list(inlined(closed.jaxpr.eqns, names, constants, lambda _: True, for_the_cpu))
    constants.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    (result,), made = equation.outvars, renamed(closed.jaxpr.outvars[0], names)
    return [
        e.replace(outvars=[result if v is made else v for v in e.outvars], source_info=equation.source_info)
        for e in inside
    ]


def _inside(
    equation: Any, operands: Sequence[Any], opens: Callable[[Sequence[Any]], bool], branch: Callable[[Any], int]
) -> tuple[ClosedJaxpr | None, Sequence[Any]]:
    """The program that an equation stands for, and its operands; None where it stands for itself."""
    name = equation.primitive.name
    if name == "cond" and equation.params.get("branches_platforms"):
        return equation.params["branches"][branch(equation)], operands[1:]
    if name in CALLS and opens(variables(operands)):
        return equation.params[CALLS[name]], operands
    return None, operands


def variables(operands: Sequence[Any]) -> list[Any]:
    """Those of the operands that are no literals."""
    return [v for v in operands if not isinstance(v, Literal)]


def renamed(variable: Any, names: Mapping[Any, Any]) -> Any:
    """What stands for a variable."""
    return variable if isinstance(variable, Literal) else names.get(variable, variable)
