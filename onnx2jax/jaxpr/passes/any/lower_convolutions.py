"""Lowers convolutions one by one to the form that is fastest on the platform (see ``ops/conv_rules``).

Programs are traced with ``lax.conv_general_dilated`` for Conv (``compat.keeps_convolutions``), which earlier passes
read; on a CPU ``layout_assignment`` has lowered those outside of loops. Before, and after on a GPU:

    y:f32[1,64,56,56] = conv_general_dilated[NCHW, OIHW] x w            w:f32[64,32,1,1]

    a:f32[1,56,56,32] = transpose x;  b:f32[64,32] = reshape w
    c:f32[1,56,56,64] = dot_general a b;  y = transpose c
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from .... import compat
from ....ops.conv import conv, on_cpu
from ...axis_orders import plain
from ...program import Equation, Program, expand, is_convolution


def lower(program: Program) -> Program:
    """The program with its convolutions lowered, in inner programs, too; the same object where it has none."""
    return _lowered(program, program.platform, {})


def _lowered(program: Program, platform: str, done: dict[int, Any]) -> Program:
    if not program.any(is_convolution):
        return program
    constants, equations = dict(program.constants), list[Equation]()
    for equation in program.equations:
        if (form := _form(equation, platform)) is None:
            equations.append(equation.with_inner(partial(_lowered, platform=platform, done=done), done))
        else:
            with compat.on_platform(platform):
                new = expand(form, equation, equation.inputs, constants)
            equations += [_with_precision(e, equation.params["precision"]) for e in new]
    return program.replace(equations=equations, constants=constants)


def _form(equation: Equation, platform: str) -> Callable[..., Any] | None:
    """The function of the operands that replaces an equation; None where it stays."""
    result, params = equation.outputs[0].aval, equation.params
    if not is_convolution(equation) or 0 in result.shape:  # as of windows that are larger than the image
        return None
    if params["batch_group_count"] != 1 or any(spec != plain(len(spec)) for spec in params["dimension_numbers"]):
        return None
    problem = equation.convolution
    how = problem.window, problem.groups, problem.stretch if problem.is_apart else ()
    if (problem.dtype, result.dtype) == (np.int8, np.int32) and platform == "cpu":
        return lambda x, w: on_cpu(x, w, *how, dtype=np.int32)
    is_float = jnp.issubdtype(result.dtype, jnp.floating)  # conv returns sums of integers in a wider type
    return (lambda x, w: conv(x, w, *how)) if is_float and result.dtype == problem.dtype else None


def _with_precision(equation: Equation, precision: Any) -> Equation:
    def within(program: Program) -> Program:
        return program.replace(equations=[_with_precision(e, precision) for e in program.equations])

    new = equation.with_inner(within, {})
    return new.replace(precision=precision) if "precision" in new.params else new
