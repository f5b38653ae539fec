"""Unrolls short loops for releases of XLA:CPU that run the kernels inside of a loop on one thread.

Before, and after: each step is a kernel, which runs on all threads, and a barrier keeps XLA from fusing them all.

    c = scan[length=4, jaxpr={lambda; c w. d = add c w; d}] a ws

    b = add a ws[0];  b' = optimization_barrier b;  c = add b' ws[1];  ...

A loop of several results, such as a recurrent one, or of many steps stays.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jax import lax

from ....limits import UNROLLED_BYTES, UNROLLED_EQUATIONS, UNROLLED_STEPS
from ...program import Equation, Program, as_function, expand, nbytes


def unroll_loops(program: Program) -> Program:
    """The program with short loops unrolled."""
    short = list(map(_is_short, program.equations))
    if not any(short):
        return program
    constants, equations = dict(program.constants), list[Equation]()
    for equation, is_short in zip(program.equations, short, strict=True):
        if is_short:
            equations += expand(partial(_unrolled, equation), equation, equation.inputs, constants)
        else:
            equations.append(equation)
    return program.replace(equations=equations, constants=constants)


def _is_short(equation: Equation) -> bool:
    """Whether an equation is a loop of few steps that only updates one array."""
    if equation.name != "scan" or equation.has_effects or len(equation.outputs) != 1:
        return False
    (body,), (result,) = equation.inner, equation.outputs
    is_carried = result.aval.shape == body.outputs[0].aval.shape
    if not (is_carried and 1 < equation.params["length"] <= UNROLLED_STEPS and nbytes(result) >= UNROLLED_BYTES):
        return False
    return not body.any(lambda e: e.name in ("scan", "while")) and len(body.inlined().equations) <= UNROLLED_EQUATIONS


def _unrolled(loop: Equation, *operands: Any) -> Any:
    """The result of a loop, step by step."""
    (body,), length = loop.inner, loop.params["length"]
    whole = [v.aval.shape == inner.aval.shape for v, inner in zip(loop.inputs, body.inputs, strict=True)]
    *fixed, carry = (x for x, same in zip(operands, whole, strict=True) if same)
    stacked, step = operands[len(fixed) + 1 :], as_function(body.closed())
    for k in range(length)[:: -1 if loop.params["reverse"] else 1]:
        slices = (lax.index_in_dim(x, k, keepdims=False) for x in stacked)
        (carry,) = lax.optimization_barrier(step(*fixed, carry, *slices))
    return carry
