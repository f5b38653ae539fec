"""What weights alone decide is computed once for a set of weights, not in every call.

Before, a program of the weights w, s and the input x:

    a = convert_element_type w;  b = mul a s;  c = transpose b;  d = dot_general x c

After, what is prepared from w and s, by NumPy, and the program of that and x:

    a = convert_element_type w;  b = mul a s;  c = transpose b        d = dot_general x c
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ..thresholds import MOST_GROWTH, SMALL_GROWTH
from .on_numpy import compute, is_computable

CHEAP: Final = frozenset({"broadcast_in_dim", "iota", "pad", "reshape", "slice", "split", "squeeze"})
"""These cost less inside the program, where they fuse with what reads them, than their results as arguments."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program split in two.

    Attributes:
        equations: what weights alone decide, in order.
        weights: the places of those among the arguments, with the variables that they give values to.
        constants: values of other variables that ``equations`` read.
        handed: the variables that the program takes in place of the weights.
        main: the program of ``handed`` and the other arguments.
    """

    equations: Sequence[Any]
    weights: Mapping[int, Any]
    constants: Mapping[Any, Any]
    handed: Sequence[Any]
    main: ClosedJaxpr

    def prepare(self, arguments: Sequence[Any]) -> list[Any]:
        """What is handed to the program, from all arguments of the whole."""
        values = dict(self.constants)
        values |= {variable: arguments[place] for place, variable in self.weights.items()}
        if self.equations:
            read = {v for e in self.equations for v in _variables(e.invars)}
            values |= {v: np.asarray(values[v]) for v in read & values.keys()}
        for equation in self.equations:
            operands = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
            values.update(zip(equation.outvars, compute(equation, operands), strict=True))
        return [jax.device_put(values[v]) for v in self.handed]


def split(closed: ClosedJaxpr, weights: Sequence[bool]) -> Prepared:
    """The program split in what weights alone decide and the rest.

    Args:
        closed: the program.
        weights: for each of its arguments whether it is a weight.
    """
    jaxpr = closed.jaxpr
    given = {i: v for i, (v, is_weight) in enumerate(zip(jaxpr.invars, weights, strict=True)) if is_weight}
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known: dict[Any, Any] = dict.fromkeys((*given.values(), *constants))  # variable -> equation that makes it
    early, late = [], []
    names: dict[Any, Any] = {}
    for equation in _inlined(jaxpr.eqns, names, known, constants):
        if is_computable(equation) and all(v in known for v in _variables(equation.invars)):
            early.append(equation)
            known.update(dict.fromkeys(equation.outvars, equation))
        else:
            late.append(equation)
    roots: dict[Any, frozenset[Any]] = {v: frozenset((v,)) for v in given.values()}
    for equation in early:
        found = frozenset().union(*(roots.get(v, frozenset()) for v in _variables(equation.invars)))
        roots.update(dict.fromkeys(equation.outvars, found))
    outputs = [_renamed(v, names) for v in jaxpr.outvars]
    handed, back = _frontier(late, outputs, known, constants, roots)
    rest = [v for v, is_weight in zip(jaxpr.invars, weights, strict=True) if not is_weight]
    needed = _needed(early, handed)
    main = jaxpr.replace(
        constvars=[*constants],
        invars=[*handed, *rest],
        eqns=[*(e for e in early if id(e) in back), *late],
        outvars=outputs,
    )
    return Prepared(needed, given, constants, handed, ClosedJaxpr(main, [*constants.values()]))


def _frontier(
    late: Sequence[Any], outputs: Sequence[Any], known: Mapping[Any, Any], constants: Mapping[Any, Any],
    roots: Mapping[Any, frozenset[Any]],
) -> tuple[list[Any], set[int]]:  # fmt: skip
    """The variables to hand over, and (by id) the equations that the program computes after all.

    Those are equations that are cheap, that follow from no weight, and whose results are much larger than the weights
    they come from.
    """
    handed: dict[Any, None] = {}
    back: set[int] = set()
    wanted = _variables([*(v for e in late for v in e.invars), *outputs])
    for variable in wanted:  # which grows meanwhile
        if variable not in known or variable in handed or variable in constants:
            continue
        equation = known[variable]
        if equation is None or not _stays(equation, roots):
            handed[variable] = None
        elif id(equation) not in back:
            back.add(id(equation))
            wanted.extend(_variables(equation.invars))
    return list(handed), back


def _stays(equation: Any, roots: Mapping[Any, frozenset[Any]]) -> bool:
    """Whether an equation that could be prepared is left in the program."""
    made = sum(_bytes(v) for v in equation.outvars)
    source = sum(_bytes(v) for v in roots[equation.outvars[0]])
    return not source or equation.primitive.name in CHEAP or made > max(SMALL_GROWTH, MOST_GROWTH * source)


def _bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * np.dtype(variable.aval.dtype).itemsize


def _needed(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Those of the equations that lead to the results."""
    wanted, needed = set(results), []
    for equation in reversed(equations):
        if wanted.intersection(equation.outvars):
            needed.append(equation)
            wanted.update(_variables(equation.invars))
    return needed[::-1]


def _inlined(
    equations: Sequence[Any], names: dict[Any, Any], known: dict[Any, Any], constants: dict[Any, Any]
) -> Iterator[Any]:
    """The equations, with those of an inner jit in its place where it is given something known.

    Of a choice by platform there are those for the CPU. ``names`` says which variable, or literal, stands for one of
    the original; ``known`` and ``constants`` get what inner jits close over.
    """
    for equation in equations:
        operands = [_renamed(v, names) for v in equation.invars]
        inner, given = _inside(equation, operands)
        if inner is None or (given is operands and not any(v in known for v in _variables(operands))):
            results = [type(v)(v.aval) for v in equation.outvars]  # an inner jit can come twice
            names.update(zip(equation.outvars, results, strict=True))
            yield equation.replace(invars=operands, outvars=results)
            continue
        closed_over = [type(v)(v.aval) for v in inner.jaxpr.constvars]
        constants.update(zip(closed_over, inner.consts, strict=True))
        known.update(dict.fromkeys(closed_over))
        variables = (*inner.jaxpr.constvars, *inner.jaxpr.invars)
        within = dict(zip(variables, (*closed_over, *given), strict=True))
        yield from _inlined(inner.jaxpr.eqns, within, known, constants)
        names.update(zip(equation.outvars, (_renamed(v, within) for v in inner.jaxpr.outvars), strict=True))


def _inside(equation: Any, operands: Sequence[Any]) -> tuple[ClosedJaxpr | None, Sequence[Any]]:
    """The program that an equation stands for, and its operands; None where it stands for itself."""
    if equation.primitive.name == "jit":
        return equation.params["jaxpr"], operands
    platforms = equation.params.get("branches_platforms") if equation.primitive.name == "cond" else None
    if not platforms:
        return None, operands
    mine = next((i for i, names in enumerate(platforms) if names and "cpu" in names), None)
    chosen = platforms.index(None) if mine is None else mine
    return equation.params["branches"][chosen], operands[1:]


def _variables(operands: Sequence[Any]) -> list[Any]:
    """Those of the operands that are no literals."""
    return [v for v in operands if not isinstance(v, Literal)]


def _renamed(variable: Any, names: Mapping[Any, Any]) -> Any:
    return variable if isinstance(variable, Literal) else names.get(variable, variable)
