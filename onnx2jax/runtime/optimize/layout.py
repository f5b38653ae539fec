"""Images channels last: XLA:CPU computes convolutions several times as fast when the channels lie next to each other.

Before, a convolution of an image that lies channels first, and what follows it:

    c:f32[1,64,56,56] = conv_general_dilated[NCHW, OIHW] x w
    d:f32[1,64,56,56] = max c 0.0
    e:f32[1,64,28,28] = reduce_window_max[window_dimensions=(1, 1, 2, 2)] d

After; what computed x left it channels last, and w, a weight, is transposed once and not in every call:

    v:f32[3,3,64,64] = transpose[permutation=(2, 3, 1, 0)] w
    c:f32[1,56,56,64] = conv_general_dilated[NHWC, HWIO] x v
    d:f32[1,56,56,64] = max c 0.0
    e:f32[1,28,28,64] = reduce_window_max[window_dimensions=(1, 2, 2, 1)] d

Each value knows the orders of axes in which it exists. A transpose gives the axes other names; what works along some
axes, or on each element, is told where they lie now; whatever has no rule here gets the order that it was traced with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.extend.core.primitives import transpose_p

from ...ops.conv import Window
from ..thresholds import SHORT
from .convolution import convolve, weighted
from .fold import folded
from .inline import for_the_cpu, inlined, renamed
from .on_numpy import is_computable
from .orders import Order, Value, permuted, places, plain, without

Rule = Callable[["Layout", Any, "Sequence[Value]"], "list[Value] | None"]
"""What an equation becomes; None where its operands have to lie as they were traced."""


class Way(NamedTuple):
    """How convolutions are treated."""

    rule: Rule
    is_served: Callable[[Any], bool]
    branch: Callable[[Any], int]
    """Which branch of a choice by platform is taken."""


def channels_last(
    closed: ClosedJaxpr,
    weights: Sequence[bool],
    *,
    onednn: bool = False,
    folds: bool = False,
    stays: Sequence[bool] | None = None,
    way: Way | None = None,
) -> ClosedJaxpr:
    """The program with its images channels last; the same object where it has no convolution.

    Args:
        closed: the program.
        weights: for each of its arguments whether it is a weight: its transpose is computed once.
        onednn: whether oneDNN may serve; short programs do without, since such ones are not loaded for ``run``.
        folds: whether convolutions take over the scale of what follows them.
        stays: for each argument whether what is computed of it by element lies as it does: a step's state.
        way: how convolutions are treated; those of a call when left out.
    """
    way = way or Way(_convolution, _is_served, with_convolutions)
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    names: dict[Any, Any] = {}
    equations = list(inlined(jaxpr.eqns, names, constants, lambda _: True, way.branch))
    if not any(map(way.is_served, equations)):
        return closed
    outputs = [renamed(v, names) for v in jaxpr.outvars]
    if folds:
        equations = folded(equations, list(itertools.compress(jaxpr.invars, weights)), outputs, constants)
    convolutions = [e for e in equations if way.is_served(e)]
    layout = Layout(constants, way.rule, onednn and sum(map(_operations, convolutions)) > SHORT)
    for i, (variable, is_weight) in enumerate(zip(jaxpr.invars, weights, strict=True)):
        layout.values[variable] = layout.holding(variable, known=is_weight, stays=stays is not None and stays[i])
    for equation in equations:
        layout.add(equation)
    results = [layout.value(v).plain() for v in outputs]
    changed = jaxpr.replace(constvars=[*constants], eqns=layout.equations, outvars=results)
    return ClosedJaxpr(changed, [*constants.values()])


SERVED: Final = frozenset(map(np.dtype, (np.float32, np.float16, jnp.bfloat16, np.int8)))


def _is_served(equation: Any) -> bool:
    """Whether it is a convolution that has a lowering here."""
    given = equation.params
    return (
        equation.primitive.name == "conv_general_dilated"
        and given["batch_group_count"] == 1
        and equation.invars[0].aval.dtype in SERVED
        and (set(given["lhs_dilation"]) <= {1} or _is_transposed(given))
    )


def _is_transposed(given: Mapping[str, Any]) -> bool:
    """Whether only the pixels are drawn apart."""
    return given["feature_group_count"] == 1 and {*given["window_strides"], *given["rhs_dilation"]} <= {1}


def with_convolutions(equation: Any) -> int:
    """The branch of a choice by platform: one that is a convolution, which is lowered here, of integers if there is."""
    platforms, branches = equation.params["branches_platforms"], equation.params["branches"]
    for at, names in enumerate(platforms):
        if (names is None or "tpu" in names) and any(map(_is_served, branches[at].jaxpr.eqns)):
            return at
    return for_the_cpu(equation)


class Layout:
    """A program that is written anew, equation by equation."""

    def __init__(self, constants: dict[Any, Any], convolution: Rule, onednn: bool) -> None:
        self.rules = {**RULES, "conv_general_dilated": convolution}
        self.onednn = onednn
        self.equations: list[Any] = []
        self.values: dict[Any, Value] = {}
        self.constants = constants
        self._traced: dict[Any, Any] = {}
        self._at: Any = None
        """The equation that is at work: what is written stands at its place in the model."""

    def value(self, variable: Any) -> Value:
        """The value of a variable of the old program."""
        if isinstance(variable, Literal):
            return self.holding(variable, known=True)
        if variable not in self.values:
            self.values[variable] = self.holding(variable, known=variable in self.constants)
        return self.values[variable]

    def holding(self, form: Any, order: Order | None = None, **attributes: Any) -> Value:
        """The value that a variable of the new program holds, in an order of axes."""
        return Value(self._transpose, form, order, **attributes)

    def add(self, equation: Any) -> None:
        """Write an equation of the old program."""
        self._at = equation
        operands = [self.value(v) for v in equation.invars]
        known = all(v.known for v in operands) and is_computable(equation)
        name = equation.primitive.name
        rule = None if known and name != "broadcast_in_dim" else self.rules.get(name)
        results = rule(self, equation, operands) if rule else None
        if results is None:
            results = self.write([v.plain() for v in operands])
        for variable, result in zip(equation.outvars, results, strict=True):
            result.known = known
            self.values[variable] = result

    def write(self, operands: Sequence[Any], orders: Sequence[Order] | None = None, **changed: Any) -> list[Value]:
        """The equation at work with other operands and parameters; its results lie in the orders."""
        old = self._at
        orders = orders or [plain(len(getattr(v.aval, "shape", ()))) for v in old.outvars]
        new = [
            Var(v.aval.update(shape=permuted(v.aval.shape, order)) if order else v.aval)
            for v, order in zip(old.outvars, orders, strict=True)
        ]
        self.equations.append(old.replace(invars=[*operands], outvars=new, params={**old.params, **changed}))
        return [self.holding(n, order, aval=v.aval) for v, n, order in zip(old.outvars, new, orders, strict=True)]

    def trace(self, function: Callable[..., Any], fixed: tuple[Any, ...], *operands: Any) -> Any:
        """The variable of what a function gives of variables and of fixed arguments behind them.

        Its equations are written; those for operands of the same types are traced once.
        """
        types = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands)
        if (closed := self._traced.get((function, fixed, types))) is None:
            closed = jax.make_jaxpr(lambda *xs: function(*xs, *fixed))(*types)
            self._traced[function, fixed, types] = closed
        names = dict(zip(closed.jaxpr.invars, operands, strict=True))
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        for equation in inlined(closed.jaxpr.eqns, names, constants, lambda _: True, for_the_cpu):
            self.equations.append(equation.replace(source_info=self._at.source_info))
        self.constants.update(constants)
        return renamed(closed.jaxpr.outvars[0], names)

    def _transpose(self, form: Any, permutation: tuple[int, ...]) -> Any:
        new = Var(form.aval.update(shape=permuted(form.aval.shape, permutation), weak_type=False))
        self.equations.append(
            self._at.replace(
                primitive=transpose_p, invars=[form], outvars=[new], params={"permutation": permutation}, effects=set()
            )
        )
        return new


# ------------------------------------------------------------------------------------------------------ rules


def _common(operands: Sequence[Value], rank: int) -> Order:
    """The order that suits operands of the same shape: that of one that would have to be transposed."""
    whole = [v for v in operands if v.rank == rank and not v.known]
    if any(v.stays for v in whole):
        return plain(rank)
    for value in (*(v for v in whole if not v.lazy), *(v for v in whole if v.lazy)):
        if value.order != plain(rank):
            return value.order
    return plain(rank)


def _elementwise(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value]:
    order = _common(operands, len(equation.outvars[0].aval.shape))
    results = layout.write(
        [v.within(order) if v.rank == len(order) else v.plain() for v in operands], [order] * len(equation.outvars)
    )
    for result in results:
        result.stays = any(v.stays and v.rank == len(order) for v in operands)
    return results


def _reduce(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value]:
    (x,), axes = operands, equation.params["axes"]
    return layout.write([x.best()], [without(x.order, axes)], axes=tuple(sorted(places(axes, x.order))))


def _along(parameter: str) -> Rule:
    """The rule of what works along one axis of operands of the same rank."""

    def rule(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value]:
        order = _common(operands, operands[0].rank)
        where = order.index(equation.params[parameter])
        return layout.write([v.within(order) for v in operands], [order] * len(equation.outvars), **{parameter: where})

    return rule


def _by_axis(*parameters: str) -> Rule:
    """The rule of what has parameters with an entry for each axis of the first operand; the others are scalars."""

    def rule(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
        x, *others = operands
        if any(v.rank for v in others):
            return None
        given = {n: equation.params[n] for n in parameters if equation.params.get(n) is not None}
        changed = {n: permuted(v, x.order) for n, v in given.items()}
        return layout.write([x.best(), *(v.plain() for v in others)], [x.order] * len(equation.outvars), **changed)

    return rule


def _reverse(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value]:
    (x,) = operands
    return layout.write([x.best()], [x.order], dimensions=places(equation.params["dimensions"], x.order))


def _dynamic_slice(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    x, *starts = operands
    if len(starts) != x.rank:
        return None
    placed = permuted([v.plain() for v in starts], x.order)
    sizes = permuted(equation.params["slice_sizes"], x.order)
    return layout.write([x.best(), *placed], [x.order], slice_sizes=sizes)


def _transpose(_layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value]:
    (x,) = operands
    return [x.renamed(equation.params["permutation"], equation.outvars[0].aval)]


def _broadcast(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Made in the order that what reads it asks for."""
    x, *more = operands
    if more:  # extents that only a call knows
        return None
    shape, along, aval = equation.params["shape"], equation.params["broadcast_dimensions"], equation.outvars[0].aval
    if math.prod(shape) == math.prod(x.shape) and x.rank and not x.known:
        return _reshaped(layout, x, aval)

    def make(order: Order) -> Any:
        axes = tuple(sorted(range(x.rank), key=lambda axis: order.index(along[axis])))
        wanted, places = permuted(shape, order), tuple(order.index(along[axis]) for axis in axes)
        return layout.trace(lax.broadcast_in_dim, (wanted, places), x.within(axes))

    return [layout.holding(None, x.order if x.rank == len(shape) else None, aval=aval, make=make)]


def _reshape(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    x, *more = operands
    if more or (equation.primitive.name == "reshape" and equation.params["dimensions"] is not None):
        return None
    return _reshaped(layout, x, equation.outvars[0].aval)


def _reshaped(layout: Layout, x: Value, aval: Any) -> list[Value]:
    """Axes fall into groups of equal extent before and after. One that lies together, in order, can stay there."""
    shape, order = aval.shape, x.order
    if math.prod(shape) < 2:
        return [layout.holding(layout.trace(lax.reshape, (shape,), x.plain()), aval=aval)]
    groups = _groups(x.shape, shape)
    group_of = {axis: group for group in groups for axis in group[0]}
    stored = [axis for axis in order if x.shape[axis] != 1]
    lying = list(dict.fromkeys(group_of[axis] for axis in stored))
    wanted = [axis for before, _ in lying for axis in before]
    if wanted != stored:  # a group is torn apart: the ones may come first
        order = (*(axis for axis in range(x.rank) if x.shape[axis] == 1), *wanted)
    after = [axis for _, axes in lying for axis in axes]
    for axis, extent in enumerate(shape):
        if extent == 1:
            after.insert(after.index(axis - 1) + 1 if axis and axis - 1 in after else 0, axis)
    new = layout.trace(lax.reshape, (permuted(shape, after),), x.within(order))
    return [layout.holding(new, tuple(after), aval=aval)]


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


def _gather(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Slices taken along one axis, which stay at its place."""
    (x, indices), how, sizes = operands, equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if len(how.start_index_map) != 1 or how.collapsed_slice_dims != how.start_index_map or indices.rank != 2:
        return None
    (axis,) = how.start_index_map
    others = tuple(i for i in range(x.rank) if i != axis)
    if how.operand_batching_dims or how.offset_dims != others or any(sizes[i] != x.shape[i] for i in others):
        return None
    now = x.order.index(axis)
    moved = how._replace(
        offset_dims=tuple(i for i in range(x.rank) if i != now), collapsed_slice_dims=(now,), start_index_map=(now,)
    )
    return layout.write(
        [x.best(), indices.plain()], [x.order], dimension_numbers=moved, slice_sizes=permuted(sizes, x.order)
    )


def _product(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value]:
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
        y = layout.trace(weighted, (first, equation.params["preferred_element_type"]), *(v.best() for v in operands))
        return [layout.holding(y, tuple(order), aval=equation.outvars[0].aval)]
    return layout.write([v.best() for v in operands], [tuple(order)], dimension_numbers=numbers)


def _first_summed(operands: Sequence[Value], numbers: Any) -> int | None:
    """The first axis of a sum by weights of its axes' shape, such as the mean of all pixels, if others lie behind."""
    (x, weights), ((contracted, by), (batch, _)) = operands, numbers
    if batch or not by or by != plain(weights.rank) or contracted[-1] == x.rank - 1:
        return None
    if 0 in x.shape or {x.aval.dtype, weights.aval.dtype} != {np.dtype(np.float32)}:
        return None
    return contracted[0] if contracted == tuple(range(contracted[0], contracted[0] + len(by))) else None


def _convolution(layout: Layout, equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    (x, w), given = operands, equation.params
    if not _is_served(equation) or 0 in (*x.shape, *equation.outvars[0].aval.shape):
        return None
    numbers, aval = given["dimension_numbers"], equation.outvars[0].aval
    image, kernel, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    strides, pads, dilations = (tuple(given[n]) for n in ("window_strides", "padding", "rhs_dilation"))
    window = Window(permuted(w.shape, kernel[2:]), strides, tuple(map(tuple, pads)), dilations)
    how = window, given["feature_group_count"], tuple(given["lhs_dilation"]), layout.onednn, aval.dtype
    operands = x.within((image[0], *image[2:], image[1])), w.within((*kernel[2:], kernel[1], kernel[0]))
    y = layout.trace(_convolved, how, *operands)
    return [layout.holding(y, (result[0], *result[2:], result[1]), aval=aval)]


def _convolved(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...], onednn: bool, dtype: Any) -> Any:
    return convolve(x, w, window, groups, stretch, onednn=onednn).astype(dtype)


def _operations(equation: Any) -> int:
    """Of a convolution, multiplications and additions."""
    w, y = equation.invars[1].aval, equation.outvars[0].aval
    return int(2 * y.size * w.size // max(w.shape[equation.params["dimension_numbers"].rhs_spec[0]], 1))


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
