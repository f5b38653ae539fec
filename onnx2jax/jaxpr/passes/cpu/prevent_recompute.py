"""Materialises what several equations read: XLA:CPU recomputes it in every consumer that can be fused with it.

Before, with a residual that a product reads, too:    After:

    c:f32[784,256] = add a b                              c:f32[784,256] = add a b
    d:f32[784,256] = max c 0.0                            d:f32[784,256] = max c 0.0
    e:f32[784,64] = dot_general d w                       m:bool[784,256] = eq d 0.0
    ...                                                   n:f32[784,256] = select_n m d 0.0
    g:f32[784,256] = add d f                              e:f32[784,64] = dot_general n w
                                                          ...
                                                          g:f32[784,256] = add n f

XLA recomputes a producer with one large operand, such as ``d``, in ``g``, with all that was fused into it: the last of
six residuals becomes a sum of seven arrays. It materialises a producer with two, such as ``n``, whose numbers are
equal: those that meet a bound are the bound.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ....limits import RECOMPUTED
from ...program import Equation, Program, expand, is_literal, literal_value, new_variable, variables


def materialise_shared(program: Program) -> Program:
    """The program with bounded values that several equations read as a select, which XLA does not recompute."""
    readers = Counter(v for e in program.equations for v in set(variables(e.inputs)))
    producers: dict[Any, Equation] = {}
    constants = dict(program.constants)
    equations: list[Equation] = []
    for equation in program.equations:
        producers.update(dict.fromkeys(equation.outputs, equation))
        shared = any(readers[v] > 1 and math.prod(getattr(v.aval, "shape", ())) >= RECOMPUTED for v in equation.outputs)
        bounded = _bounded(equation, producers) if shared else None
        equations += [equation] if bounded is None else _selected(equation, *bounded, constants)
    return program.replace(equations=equations, constants=constants)


def _bounded(equation: Equation, producers: dict[Any, Equation]) -> tuple[Any, Any] | None:
    """The value that an equation gives or converts, and a number that bounds it; None where no number does.

    Beyond the range of integers XLA's ways of converting differ.
    """
    dtype = equation.outputs[0].aval.dtype
    source = producers.get(equation.inputs[0]) if equation.name == "convert_element_type" else equation
    if source is None or source.name not in ("max", "min", "clamp"):
        return None
    bounds = [literal_value(v) for v in source.inputs if is_literal(v) and not v.aval.shape]
    if np.issubdtype(dtype, np.integer):
        bounds = [v for v in bounds if np.iinfo(dtype).min <= v <= np.iinfo(dtype).max]
    return (source.outputs[0], bounds[-1]) if bounds else None


def _selected(equation: Equation, bounded: Any, bound: Any, constants: dict[Any, Any]) -> list[Equation]:
    """The equation, and a select between its result and what the bound becomes."""
    (result,) = equation.outputs
    plain = new_variable(result)
    bounded = plain if bounded is result else bounded

    def select(x: Any, y: Any) -> Any:
        number = np.asarray(bound, x.dtype)
        return lax.select(x == number, jnp.full(y.shape, number.astype(y.dtype)), y)

    return [equation.replace(outputs=[plain]), *expand(select, equation, [bounded, plain], constants)]
