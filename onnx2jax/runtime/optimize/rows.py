"""One row by a matrix of weights: XLA:CPU is faster where the matrix lies [out, in], and sums run along its rows.

Before, where w is a weight:                     After; w is transposed once and not in every call:

    y:f32[1,128] = dot_general[([1], [0])] x w       v:f32[128,784] = transpose w
                                                     y:f32[1,128] = dot_general[([1], [1])] x v

784 x 128: 0.021 ms rather than 0.059; 3072 x 768: 0.17 rather than 0.23. Of several rows it is the other way round:
128 rows by 768 x 3072 take 6.0 ms rather than 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jax.extend.core import ClosedJaxpr, Var
from jax.extend.core.primitives import transpose_p

from .inline import variables
from .on_numpy import is_computable

LARGEST: Final = 1 << 24
"""Numbers of a matrix. Larger ones are read from memory either way (768 x 32000: 3.7 ms as it lies, 4.7 transposed),
and a second copy of them is what a decoder's table of tokens would cost."""


def rows_by_rows(closed: ClosedJaxpr, weights: Sequence[bool]) -> ClosedJaxpr:
    """The program with the weights transposed that one row is multiplied by.

    Args:
        closed: the program.
        weights: for each of its arguments whether it is a weight.
    """
    jaxpr = closed.jaxpr
    known = {v for v, is_weight in zip(jaxpr.invars, weights, strict=True) if is_weight} | {*jaxpr.constvars}
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        if all(v in known for v in variables(equation.invars)) and is_computable(equation):
            known.update(equation.outvars)
        if _is_served(equation) and equation.invars[1] in known and equation.invars[0] not in known:
            equations += _transposed(equation)
        else:
            equations.append(equation)
    return ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)


def _is_served(equation: Any) -> bool:
    """Whether it is the product of one row and a matrix."""
    if equation.primitive.name != "dot_general":
        return False
    x, w = (v.aval for v in equation.invars)
    contracted, batch = ([tuple(axes) for axes in pair] for pair in equation.params["dimension_numbers"])
    one_row = math.prod(x.shape[:-1]) == 1 and contracted == [(x.ndim - 1,), (0,)] and batch == [(), ()]
    return one_row and w.ndim == 2 and w.size <= LARGEST and x.dtype == w.dtype == np.float32


def _transposed(equation: Any) -> list[Any]:
    x, w = equation.invars
    turned = Var(w.aval.update(shape=w.aval.shape[::-1]))
    numbers = (((x.aval.ndim - 1,), (1,)), ((), ()))
    return [
        equation.replace(primitive=transpose_p, invars=[w], outvars=[turned], params={"permutation": (1, 0)}),
        equation.replace(invars=[x, turned], params={**equation.params, "dimension_numbers": numbers}),
    ]
