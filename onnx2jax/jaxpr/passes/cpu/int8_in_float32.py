"""Multiplies int8 in float32 on processors for which XLA:CPU has no kernels of int8, and the sums stay exact.

Before, x and w in int8:                           After, x' and w' in float32:

    y:i32[196,2048] = dot_general x w                  a:f32[196,2048] = dot_general x'[:, :1024] w'[:1024]
                                                       b:f32[196,2048] = dot_general x'[:, 1024:] w'[1024:]
                                                       y:i32 = add (i32 a) (i32 b)

A product of two int8 is at most 2**14, so every sum of 1024 of them is an integer that float32 holds. Without VNNI
or AMX (``compat.has_int8_kernels``) XLA multiplies int8 in loops of its own: opennsfw in int8 takes 290 ms of processor
time, and 57 so (AMD EPYC with XLA held to AVX2, jax 0.10). An AVX2 processor took 257, and 51 without any pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from jax import lax

from ....limits import INT8_ROWS
from ...program import Equation, Program, expand
from .onednn import PRODUCTS, multiplies_bytes

SUMMANDS: Final = 2**24 // 2**14
"""Products of two int8 values whose sums float32 holds."""


def multiply_in_float32(program: Program) -> Program:
    """The program with products and convolutions of int8 in float32."""
    if not multiplies_bytes(program):
        return program
    program = program.inlined()
    constants, equations = dict(program.constants), list[Equation]()
    for equation in program.equations:
        kernel = _kernel(equation)
        equations += [equation] if kernel is None else expand(kernel, equation, equation.inputs, constants)
    return program.replace(equations=equations, constants=constants)


def _kernel(equation: Equation) -> Callable[..., Any] | None:
    """The function of the operands that replaces an equation; None where it stays."""
    if equation.name not in PRODUCTS:
        return None
    x, w, y = (v.aval for v in (*equation.inputs, *equation.outputs))
    if [a.dtype for a in (x, w, y)] != [np.int8, np.int8, np.int32] or not (x.size and w.size and y.size):
        return None
    numbers = equation.params["dimension_numbers"]
    if equation.name == "conv_general_dilated":
        problem, axes = equation.convolution, (numbers.lhs_spec[1], numbers.rhs_spec[1])
        summed = problem.summands
        if summed > SUMMANDS and problem.groups * problem.batches > 1:
            return None
    else:
        contracted = [*zip(*numbers[0], strict=True)]
        summed = math.prod(x.shape[i] for i, _ in contracted)
        if not contracted or y.size * summed < INT8_ROWS * w.size:
            return None
        axes = max(contracted, key=lambda pair: x.shape[pair[0]])
    count = x.shape[axes[0]]
    step = count if summed <= SUMMANDS else SUMMANDS * count // summed
    return partial(_in_float32, equation, axes, range(0, count, step)) if step else None


def _in_float32(equation: Equation, axes: tuple[int, int], starts: range, *operands: Any) -> Any:
    """The sum of products over pieces of the axes that are summed."""
    total: Any = None
    for start in starts:
        pieces = (
            lax.slice_in_dim(x, start, min(start + starts.step, x.shape[i]), axis=i)
            for x, i in zip(operands, axes, strict=True)
        )
        values = [lax.convert_element_type(x, np.float32) for x in pieces]
        (y,) = equation.bind(values, preferred_element_type=np.dtype(np.float32), precision=lax.Precision.HIGHEST)
        y = lax.convert_element_type(y, np.int32)
        total = y if total is None else lax.add(total, y)
    return total
