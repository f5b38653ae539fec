"""Weights that each step of a loop multiplies rows of int8 by, in another form, made once outside of the loop.

Before, and after, where p is hoisted with whatever follows from parameters alone:

    scan[jaxpr={lambda; w n x. y:i32[1,1024] = dot_general x w; ...}] w 0 xs

    p = prepare w;  scan[jaxpr={lambda; p n x. y:i32[1,1024] = multiply x p; ...}] p 0 xs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from ...program import Equation, Program, branch_for, expand, is_literal, new_variable, splice, variables


class WeightForm(NamedTuple):
    """How a weight is stored for a loop."""

    prepare: Callable[[Any], Any]
    """The stored weight, of that in int8."""
    multiply: Callable[[Any, Any], Any]
    """The product of rows of int8 and the stored weight, in int32."""


def with_prepared(
    scan: Equation, known: Collection[Any], constants: dict[Any, Any], form: Callable[[int, Any], WeightForm | None]
) -> list[Equation]:
    """The equations that prepare weights, and the loop over those.

    Args:
        scan: the loop.
        known: variables that follow from parameters alone.
        constants: gets the values that functions of forms close over.
        form: that of a weight, given the rows that a step multiplies by it and its aval; None to leave it.
    """
    (body,) = scan.inner
    body, count = body.inlined(branch_for("cpu")), fixed_operands(scan)
    read = Counter(variables([*(v for e in body.equations for v in e.inputs), *body.outputs]))
    before, outside, inside, equations = list[Equation](), [*scan.inputs], [*body.inputs], [*body.equations]
    for place, (w, inner) in enumerate(zip(scan.inputs[:count], body.inputs, strict=False)):
        at = [i for i, e in enumerate(equations) if is_product(e) and e.inputs[1] is inner]
        if is_literal(w) or w not in known or read[inner] != 1 or not at:
            continue
        product = equations[at[0]]
        if (chosen := form(product.outputs[0].aval.size // w.aval.shape[1], w.aval)) is None:
            continue
        preparing = Program.traced(chosen.prepare, w)
        outside[place], inside[place] = (new_variable(preparing.outputs[0]) for _ in range(2))
        before += splice(preparing, scan.replace(outputs=[outside[place]]), [w], constants)
        operands = [product.inputs[0], inside[place]]
        equations[at[0] : at[0] + 1] = expand(chosen.multiply, product, operands, constants)
    return [*before, scan.replace(outside, jaxpr=body.replace(inputs=inside, equations=equations).closed())]


def fixed_operands(scan: Equation) -> int:
    """The number of leading operands that every step of a loop reads unchanged."""
    (body,) = scan.inner
    steps = sum(v.aval.ndim > inner.aval.ndim for v, inner in zip(scan.inputs, body.inputs, strict=True))
    states = sum(v.aval.ndim == inner.aval.ndim for v, inner in zip(scan.outputs, body.outputs, strict=True))
    return len(scan.inputs) - steps - states


def is_product(equation: Equation) -> bool:
    """Whether it is a product of rows of int8 by a matrix, in int32."""
    if equation.name != "dot_general":
        return False
    x, w, y = (v.aval for v in (*equation.inputs, *equation.outputs))
    plain = (((x.ndim - 1,), (0,)), ((), ()))
    in_bytes = [a.dtype for a in (x, w, y)] == [np.int8, np.int8, np.int32] and w.ndim == 2 and y.size > 0 < x.size
    return in_bytes and tuple(tuple(map(tuple, pair)) for pair in equation.params["dimension_numbers"]) == plain
