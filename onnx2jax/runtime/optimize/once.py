"""What several equations read is computed once: XLA:CPU copies it into all that can be fused with it.

Before, with a residual that a product reads, too:    After:

    c:f32[784,256] = add a b                              c:f32[784,256] = add a b
    d:f32[784,256] = max c 0.0                            d:f32[784,256] = max c 0.0
    e:f32[784,64] = dot_general d w                       m:bool[784,256] = eq d 0.0
    ...                                                   n:f32[784,256] = select_n m d 0.0
    g:f32[784,256] = add d f                              e:f32[784,64] = dot_general n w
                                                          ...
                                                          g:f32[784,256] = add n f

XLA computes what has one large operand, such as ``d``, again for ``g`` rather than keeping it, with all that was fused
into it before: the last of six residuals is the sum of seven arrays. It keeps what has two, such as ``n``, whose
numbers are the same: those that meet a bound are the bound.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var

from .inline import variables, written

FEWEST: Final = 1 << 14
"""Numbers of a value: of smaller ones it makes no difference."""


def computed_once(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program in which XLA keeps what it has to write for one reader, for the others too."""
    jaxpr = closed.jaxpr
    readers = Counter(v for e in jaxpr.eqns for v in set(variables(e.invars)))
    makers: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        makers.update(dict.fromkeys(equation.outvars, equation))
        several = any(readers[v] > 1 and math.prod(getattr(v.aval, "shape", ())) >= FEWEST for v in equation.outvars)
        limited = _limited(equation, makers) if several else None
        if limited is None:
            equations.append(equation)
        else:
            equations += _kept(equation, *limited, constants)
    program = jaxpr.replace(eqns=equations, constvars=[*jaxpr.constvars, *constants])
    return ClosedJaxpr(program, [*closed.consts, *constants.values()])


def _limited(equation: Any, makers: dict[Any, Any]) -> tuple[Any, Any] | None:
    """What an equation gives or converts, and a number that bounds it; None where it is not bounded by one.

    A number beyond the range of integers becomes another one in each of XLA's ways of converting.
    """
    dtype = equation.outvars[0].aval.dtype
    if equation.primitive.name == "convert_element_type":
        equation = makers.get(equation.invars[0])
    name = None if equation is None else equation.primitive.name
    if name not in ("max", "min", "clamp"):
        return None
    bounds = [v.val for v in equation.invars if isinstance(v, Literal) and np.ndim(v.val) == 0]
    if np.issubdtype(dtype, np.integer):
        bounds = [v for v in bounds if np.iinfo(dtype).min <= v <= np.iinfo(dtype).max]
    return (equation.outvars[0], bounds[-1]) if bounds else None


def _kept(equation: Any, limited: Any, bound: Any, constants: dict[Any, Any]) -> list[Any]:
    """The equation, and a choice between its result and what the bound becomes."""
    (result,) = equation.outvars
    plain = Var(result.aval)
    limited = plain if limited is result else limited

    def chosen(x: Any, y: Any) -> Any:
        number = np.asarray(bound, x.dtype)
        return lax.select(x == number, jnp.full(y.shape, number.astype(y.dtype)), y)

    return [equation.replace(outvars=[plain]), *written(chosen, equation, [limited, plain], constants)]
