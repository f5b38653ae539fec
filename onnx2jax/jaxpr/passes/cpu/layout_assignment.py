"""Layout assignment: images channels last (NHWC), for which XLA:CPU has convolutions several times as fast.

Before, a convolution of an image channels first, and its consumers:

    c:f32[1,64,56,56] = conv_general_dilated[NCHW, OIHW] x w
    d:f32[1,64,56,56] = max c 0.0
    e:f32[1,64,28,28] = reduce_window_max[window_dimensions=(1, 1, 2, 2)] d

After; the producer of x left it channels last, and the transpose of w, a parameter, is hoisted:

    v:f32[3,3,64,64] = transpose[permutation=(2, 3, 1, 0)] w
    c:f32[1,56,56,64] = conv_general_dilated[NHWC, HWIO] x v
    d:f32[1,56,56,64] = max c 0.0
    e:f32[1,28,28,64] = reduce_window_max[window_dimensions=(1, 2, 2, 1)] d

Each value knows the axis orders in which it exists. A transpose renames axes; equations along axes, or on each element,
are rewritten for the current order; an equation without a rule gets its operands in the order of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....limits import SHORT
from ...axis_orders import Order, OrderedArray, permuted, places, plain, without
from ...const_eval import can_evaluate
from ...program import Equation, Program, is_literal, literal_value, type_of
from .conv_lowering import convolve, weighted

Rule = Callable[[Equation, "Sequence[OrderedArray]"], "list[OrderedArray] | None"]
"""Rewrites an equation; None where its operands must have the axis order that they were traced with."""


def assign_layouts(program: Program, onednn: Callable[[], bool] = lambda: False) -> Program:
    """The program of a call with its images channels last; the same object where it has no convolution.

    ``onednn``: whether oneDNN may compute convolutions; not in short programs, which ``run`` loads a second time.
    """

    def rule(convolutions: Sequence[Equation]) -> Rule:
        return partial(_convolution, sum(2 * e.convolution.products for e in convolutions) > SHORT and onednn())

    return channels_last(program, rule, _can_lower, known=program.parameters)


def channels_last(
    program: Program, choose: Callable[[Sequence[Equation]], Rule | None], can_lower: Callable[[Equation], bool],
    known: int = 0, stays: int = 0,
) -> Program:  # fmt: skip
    """The program with images channels last.

    Args:
        program: a program.
        choose: the rule for a program with these convolutions; None where it gains nothing.
        can_lower: whether an equation is a convolution that the rule lowers.
        known, stays: how many inputs are parameters, and how many keep their layout with what is computed of them.
    """
    if not program.has("conv_general_dilated"):
        return program
    flat = program.inlined()
    convolutions = [e for e in flat.equations if can_lower(e)]
    if (convolution := choose(convolutions)) is None:
        return program
    by_name = {**RULES, "conv_general_dilated": convolution}

    def run(*arguments: Any) -> list[Any]:
        values = {v: OrderedArray(c, known=True) for v, c in flat.constants.items()}
        for i, (variable, x) in enumerate(zip(flat.inputs, arguments, strict=True)):
            values[variable] = OrderedArray(x, known=i < known, stays=i < stays)
        for equation in flat.equations:
            operands = _values(equation.inputs, values)
            is_known = all(v.known for v in operands) and can_evaluate(equation)
            rule = None if is_known and equation.name != "broadcast_in_dim" else by_name.get(equation.name)
            with equation.named_scope:
                results = rule(equation, operands) if rule else None
                results = _write(equation, [v.plain() for v in operands]) if results is None else results
            for result in results:
                result.known = is_known
            values.update(zip(equation.outputs, results, strict=True))
        with flat.equations[-1].named_scope:
            return [v.plain() for v in _values(flat.outputs, values)]

    return Program.of(jax.make_jaxpr(run)(*map(type_of, flat.inputs)), program.parameters).inlined()


def _values(operands: Sequence[Any], values: Mapping[Any, OrderedArray]) -> list[OrderedArray]:
    return [OrderedArray(literal_value(v), known=True) if is_literal(v) else values[v] for v in operands]


SUPPORTED_DTYPES: Final = frozenset(map(np.dtype, (np.float32, np.float16, jnp.bfloat16, np.int8)))


def _can_lower(equation: Equation) -> bool:
    """Whether it is a convolution that ``convolve`` computes."""
    if equation.name != "conv_general_dilated" or equation.inputs[0].aval.dtype not in SUPPORTED_DTYPES:
        return False
    problem = equation.convolution
    is_transposed = problem.groups == 1 and {*problem.window.strides, *problem.window.dilations} <= {1}
    return problem.batches == 1 and (not problem.is_apart or is_transposed)


def _write(
    equation: Equation, operands: Sequence[Any], orders: Sequence[Order] | None = None, **changed: Any
) -> list[OrderedArray]:
    """The results, in these axis orders, of an equation with other operands and parameters."""
    wanted = [None] * len(equation.outputs) if orders is None else orders
    results = zip(equation.bind(operands, **changed), wanted, equation.outputs, strict=True)
    return [OrderedArray(x, order, aval=v.aval) for x, order, v in results]


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def traced(function: Callable[..., Any], fixed: tuple[Any, ...], *operands: Any) -> Any:
    """The result of a function of arrays and, behind them, fixed arguments; for equal types it is traced once."""
    return function(*operands, *fixed)


# ------------------------------------------------------------------------------------------------------ rules


def _common(operands: Sequence[OrderedArray], rank: int) -> Order:
    """The axis order for operands of the same shape: that of one that would need a transpose otherwise."""
    whole = [v for v in operands if v.rank == rank and not v.known]
    if any(v.stays for v in whole):
        return plain(rank)
    for value in (*(v for v in whole if not v.lazy), *(v for v in whole if v.lazy)):
        if value.order != plain(rank):
            return value.order
    return plain(rank)


def _elementwise(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray]:
    order = _common(operands, len(equation.outputs[0].aval.shape))
    values = [v.within(order) if v.rank == len(order) else v.plain() for v in operands]
    results = _write(equation, values, [order] * len(equation.outputs))
    for result in results:
        result.stays = any(v.stays and v.rank == len(order) for v in operands)
    return results


def _reduce(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray]:
    (x,), axes = operands, equation.params["axes"]
    return _write(equation, [x.best()], [without(x.order, axes)], axes=tuple(sorted(places(axes, x.order))))


def _along(parameter: str) -> Rule:
    """The rule of equations along one axis of operands of the same rank."""

    def rule(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray]:
        order = _common(operands, operands[0].rank)
        changed = {parameter: order.index(equation.params[parameter])}
        return _write(equation, [v.within(order) for v in operands], [order] * len(equation.outputs), **changed)

    return rule


def _by_axis(*parameters: str) -> Rule:
    """The rule of equations whose parameters have an entry for each axis of the first operand; others are scalars."""

    def rule(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
        x, *others = operands
        if any(v.rank for v in others):
            return None
        entries = {n: equation.params[n] for n in parameters if equation.params.get(n) is not None}
        changed = {n: permuted(v, x.order) for n, v in entries.items()}
        return _write(equation, [x.best(), *(v.plain() for v in others)], [x.order] * len(equation.outputs), **changed)

    return rule


def _reverse(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray]:
    (x,) = operands
    return _write(equation, [x.best()], [x.order], dimensions=places(equation.params["dimensions"], x.order))


def _dynamic_slice(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
    x, *starts = operands
    if len(starts) != x.rank:
        return None
    placed = permuted([v.plain() for v in starts], x.order)
    sizes = permuted(equation.params["slice_sizes"], x.order)
    return _write(equation, [x.best(), *placed], [x.order], slice_sizes=sizes)


def _transpose(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray]:
    (x,) = operands
    return [x.renamed(equation.params["permutation"], equation.outputs[0].aval)]


def _broadcast(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
    """Lazy: materialised in the axis order of its consumer."""
    x, *more = operands
    if more:  # extents that only a call knows
        return None
    shape, along, aval = equation.params["shape"], equation.params["broadcast_dimensions"], equation.outputs[0].aval
    if math.prod(shape) == math.prod(x.shape) and x.rank and not x.known:
        return _reshaped(x, aval)

    def make(order: Order) -> Any:
        axes = tuple(sorted(range(x.rank), key=lambda axis: order.index(along[axis])))
        wanted, places = permuted(shape, order), tuple(order.index(along[axis]) for axis in axes)
        return traced(lax.broadcast_in_dim, (wanted, places), x.within(axes))

    return [OrderedArray(None, x.order if x.rank == len(shape) else None, aval=aval, make=make)]


def _reshape(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
    x, *more = operands
    if more or (equation.name == "reshape" and equation.params["dimensions"] is not None):
        return None
    return _reshaped(x, equation.outputs[0].aval)


def _reshaped(x: OrderedArray, aval: Any) -> list[OrderedArray]:
    """Axes fall into groups of equal extent before and after; a contiguous group in order needs no transpose."""
    shape, order = aval.shape, x.order
    if math.prod(shape) < 2:
        return [OrderedArray(traced(lax.reshape, (shape,), x.plain()), aval=aval)]
    groups = _groups(x.shape, shape)
    group_of = {axis: group for group in groups for axis in group[0]}
    stored = [axis for axis in order if x.shape[axis] != 1]
    stored_groups = list(dict.fromkeys(group_of[axis] for axis in stored))
    wanted = [axis for before, _ in stored_groups for axis in before]
    if wanted != stored:  # a group is torn apart: the ones may come first
        order = (*(axis for axis in range(x.rank) if x.shape[axis] == 1), *wanted)
    after = [axis for _, axes in stored_groups for axis in axes]
    for axis, extent in enumerate(shape):
        if extent == 1:
            after.insert(after.index(axis - 1) + 1 if axis and axis - 1 in after else 0, axis)
    new = traced(lax.reshape, (permuted(shape, after),), x.within(order))
    return [OrderedArray(new, tuple(after), aval=aval)]


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Runs of axes, those of extent 1 left out, that hold the same elements before and after a reshape.

    >>> _groups((2, 3, 4, 1, 5), (6, 2, 2, 5))
    [((0, 1), (0,)), ((2,), (1, 2)), ((4,), (3,))]
    """
    left = [axis for axis, extent in enumerate(before) if extent != 1]
    right = [axis for axis, extent in enumerate(after) if extent != 1]
    groups = []
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        while (m := math.prod(before[i] for i in a)) != (n := math.prod(after[i] for i in b)):
            if m < n:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        groups.append((tuple(a), tuple(b)))
    return groups


def _gather(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
    """Slices along one axis, which keep its place."""
    (x, indices), how, sizes = operands, equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if len(how.start_index_map) != 1 or how.collapsed_slice_dims != how.start_index_map or indices.rank != 2:
        return None
    (axis,) = how.start_index_map
    others = tuple(i for i in range(x.rank) if i != axis)
    if how.operand_batching_dims or how.offset_dims != others or any(sizes[i] != x.shape[i] for i in others):
        return None
    now = x.order.index(axis)
    rest, sizes = tuple(i for i in range(x.rank) if i != now), permuted(sizes, x.order)
    moved = how._replace(offset_dims=rest, collapsed_slice_dims=(now,), start_index_map=(now,))
    return _write(equation, [x.best(), indices.plain()], [x.order], dimension_numbers=moved, slice_sizes=sizes)


def _product(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray]:
    contracted, batch = equation.params["dimension_numbers"]
    numbers = tuple(
        tuple(places(axes, v.order) for axes, v in zip(pair, operands, strict=True)) for pair in (contracted, batch)
    )
    order, at = list(range(len(batch[0]))), len(batch[0])
    for v, *used in zip(operands, contracted, batch, strict=True):
        left = without(v.order, [*used[0], *used[1]])
        order += [at + axis for axis in left]
        at += len(left)
    if (first := _first_summed(operands, numbers)) is not None:
        y = traced(weighted, (first, equation.params["preferred_element_type"]), *(v.best() for v in operands))
        return [OrderedArray(y, tuple(order), aval=equation.outputs[0].aval)]
    return _write(equation, [v.best() for v in operands], [tuple(order)], dimension_numbers=numbers)


def _first_summed(operands: Sequence[OrderedArray], numbers: Any) -> int | None:
    """The first axis of a sum by weights of its axes' shape, such as the mean of all pixels, if others follow."""
    (x, weights), ((contracted, by), (batch, _)) = operands, numbers
    if batch or not by or by != plain(weights.rank) or contracted[-1] == x.rank - 1:
        return None
    if 0 in x.shape or {x.aval.dtype, weights.aval.dtype} != {np.dtype(np.float32)}:
        return None
    return contracted[0] if contracted == tuple(range(contracted[0], contracted[0] + len(by))) else None


def _convolution(onednn: bool, equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
    (x, w), aval = operands, equation.outputs[0].aval
    if not _can_lower(equation) or 0 in (*x.shape, *aval.shape):
        return None
    problem, (image, kernel, result) = equation.convolution, equation.params["dimension_numbers"]
    how = problem.window, problem.groups, problem.stretch, onednn, aval.dtype
    y = traced(convolve, how, x.within((image[0], *image[2:], image[1])), w.within(tuple(kernel)))
    return [OrderedArray(y, (result[0], *result[2:], result[1]), aval=aval)]


ELEMENTWISE: Final = (
    "abs", "add", "add_any", "and", "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2", "bitcast_convert_type",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "forward_only", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
)  # fmt: skip
WINDOWS: Final = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **{f"cum{kind}": _along("axis") for kind in ("sum", "prod", "max", "min", "logsumexp")},
    **{f"reduce_window{kind}": _by_axis(*WINDOWS) for kind in ("", "_sum", "_max", "_min")},
    "argmax": _reduce,
    "argmin": _reduce,
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "dot_general": _product,
    "dynamic_slice": _dynamic_slice,
    "expand_dims": _reshape,
    "gather": _gather,
    "pad": _by_axis("padding_config"),
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _by_axis("start_indices", "limit_indices", "strides"),
    "split": _along("axis"),
    "squeeze": _reshape,
    "transpose": _transpose,
}
