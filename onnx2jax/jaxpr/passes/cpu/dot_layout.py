"""Matrix products whose operands XLA:CPU reads faster in another layout.

``transpose_row_weights``: of one row by a weight, sums run along the weight's rows where it is stored as [out, in].

    y:f32[1,128] = dot_general[([1], [0])] x w       v:f32[128,784] = transpose w                 (hoisted)
                                                     y:f32[1,128] = dot_general[([1], [1])] x v

``swap_transposed``: a product that is only read transposed, as JAX writes gradients of weights, swaps its operands.

    d:f32[512,128] = dot_general[((0, 1), (0, 1))] g x
    e:f32[128,512] = transpose[permutation=(1, 0)] d            e:f32[128,512] = dot_general[((0, 1), (0, 1))] x g
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from ....limits import TRANSPOSED_WEIGHT
from ...const_eval import can_evaluate
from ...program import Equation, Program, variables


def transpose_row_weights(program: Program) -> Program:
    """The program with weights transposed that one row is multiplied by."""
    known = {*program.inputs[: program.parameters], *program.constants}
    equations: list[Equation] = []
    for equation in program.equations:
        if all(v in known for v in variables(equation.inputs)) and can_evaluate(equation):
            known.update(equation.outputs)
        if _is_row_by_matrix(equation) and equation.inputs[1] in known and equation.inputs[0] not in known:
            x, w = equation.inputs
            transpose = equation.transpose(w, (1, 0))
            numbers = (((x.aval.ndim - 1,), (1,)), ((), ()))
            equations += [transpose, equation.replace([x, *transpose.outputs], dimension_numbers=numbers)]
        else:
            equations.append(equation)
    return program.replace(equations=equations)


def _is_row_by_matrix(equation: Equation) -> bool:
    if equation.name != "dot_general":
        return False
    x, w = (v.aval for v in equation.inputs)
    contracted, batch = ([tuple(axes) for axes in pair] for pair in equation.params["dimension_numbers"])
    one_row = math.prod(x.shape[:-1]) == 1 and contracted == [(x.ndim - 1,), (0,)] and batch == [(), ()]
    return one_row and w.ndim == 2 and w.size <= TRANSPOSED_WEIGHT and x.dtype == w.dtype == np.float32


def swap_transposed(program: Program) -> Program:
    """The program, inlined, with the operands of products swapped that only a transpose reads."""
    program = program.inlined()
    reads = Counter(variables([*(v for e in program.equations for v in e.inputs), *program.outputs]))
    products = {e.outputs[0]: e for e in program.equations if _can_swap(e) and reads[e.outputs[0]] == 1}
    equations: dict[int, Equation] = {id(e): e for e in program.equations}
    for equation in program.equations:
        if equation.name != "transpose" or (product := products.get(equation.inputs[0])) is None:
            continue
        if equation.params["permutation"] == _halves_swapped(product):
            del equations[id(product)]
            equations[id(equation)] = _swapped(product, equation.outputs)
    return program.replace(equations=[*equations.values()])


def _can_swap(equation: Equation) -> bool:
    """Whether it is a product without batch axes."""
    if equation.name != "dot_general":
        return False
    batch, precision = equation.params["dimension_numbers"][1], equation.params["precision"]
    return batch == ((), ()) and (precision is None or isinstance(precision, tuple))


def _halves_swapped(product: Equation) -> tuple[int, ...]:
    """The permutation that puts the right operand's free axes before those of the left one."""
    left = len(product.inputs[0].aval.shape) - len(product.params["dimension_numbers"][0][0])
    rank = len(product.outputs[0].aval.shape)
    return (*range(left, rank), *range(left))


def _swapped(product: Equation, outputs: Any) -> Equation:
    (left, right), batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    return product.replace(
        product.inputs[::-1], outputs,
        dimension_numbers=((right, left), batch), precision=precision and precision[::-1],
    )  # fmt: skip
