"""Runs tiny programs in NumPy when dispatch would cost more than the computation.

JAX's dispatch takes 14 us, and 0.4 us for each array; a call of NumPy on a small array takes 0.4 to 1. So where a
caller wants NumPy arrays, the few equations of such a program are evaluated one after the other.
Results are as exact as XLA's; of sums and of functions like exp the last bits may differ.

Calls of an MLP of 4, 24, 24 and 3 with ten rows: 22 us as a program, 10 us by NumPy; of 784, 128 and 10 with one row:
28 and 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from jax.lax import GatherScatterMode

from ..jaxpr.const_eval import ELEMENTWISE, RULES, aligned, can_evaluate, index_of
from ..jaxpr.program import Equation, Program, is_literal, literal_value, variables
from ..limits import AN_ARRAY, NUMPY_PRODUCT, SMALL_PROGRAM
from .inline_dispatch import Synchronous

_CALL: Final = 0.55
"""Microseconds of a call of NumPy and of finding its operands."""
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "ceil": np.ceil, "cos": np.cos, "exp": np.exp, "expm1": np.expm1, "floor": np.floor, "log": np.log,
    "log1p": np.log1p, "logistic": lambda x: 1 / (1 + np.exp(-x)), "sin": np.sin, "tanh": np.tanh,
}  # fmt: skip
"""Elementwise functions of floats, whose last bits may differ."""
_REDUCTIONS: Final = {"reduce_max": np.maximum.reduce, "reduce_min": np.minimum.reduce, "reduce_sum": np.add.reduce}
_ARG: Final[Mapping[str, Callable[..., Any]]] = {"argmax": np.ndarray.argmax, "argmin": np.ndarray.argmin}
"""Methods, as of ``dot``: the functions of the same names look them up first, for 0.2 to 0.9 us."""
_VIEWS: Final = {"broadcast_in_dim", "copy", "reshape", "slice", "split", "squeeze", "stop_gradient", "transpose"}
"""Primitives whose result may be a view of their operand."""
_TYPES: Final = frozenset(map(np.dtype, (np.float32, np.float64, np.int32, np.int64, np.bool_)))

_Step = tuple[Callable[..., Any], tuple[int, ...], int]
"""A function, the places of its operands, and that of its result."""
_MOST_ELEMENTS: Final = 4096
"""Elements of a constant that is broadcast before the calls."""


def numpy_program(closed: Any, hoisted: int, limit: float | None = None) -> NumpyProgram | None:
    """The program as NumPy calls; None where XLA would be faster, or an equation has no NumPy implementation.

    Args:
        closed: the program.
        hoisted: number of leading arguments that are hoisted, so the same in many calls.
        limit: the most microseconds of NumPy calls; None for what XLA's dispatch takes.
    """
    program = Program.of(closed, hoisted)
    if limit is None:
        limit = SMALL_PROGRAM + AN_ARRAY * (len(program.inputs) + len(program.outputs))
    if program.effects or len(program.equations) > limit / _CALL * 4:
        return None
    program = program.inlined()
    same = {*program.inputs[:hoisted], *program.constants}
    cost = 0.0
    for equation in program.equations:
        if not _is_known(equation):
            return None
        if same.issuperset(variables(equation.inputs)):
            same.update(equation.outputs)
        else:
            cost += _cost(equation)
    if cost > limit or any(map(is_literal, program.outputs)):
        return None
    return NumpyProgram(program, same)


class NumpyProgram:
    """A program as NumPy calls; those that depend on hoisted arguments alone run once, when it is bound."""

    def __init__(self, program: Program, same: set[Any]) -> None:
        equations, outputs = program.equations, program.outputs
        places: dict[Any, int] = {}
        self._literals: list[tuple[int, Any]] = []

        def place(variable: Any) -> int:
            if is_literal(variable):
                self._literals.append((len(places), literal_value(variable)[()]))
                return places.setdefault(object(), len(places))
            return places.setdefault(variable, len(places))

        self._places = list(map(place, program.inputs))
        self._own = [(place(v), np.asarray(c)) for v, c in program.constants.items()]
        narrow = _narrow(equations, outputs, same)
        self._before: list[_Step] = []
        self._steps: list[_Step] = []
        self._shapes: dict[int, tuple[int, ...]] = {}
        """Those of results that are elementwise, by their places."""
        for equation in equations:
            (result,) = equation.outputs
            step = _function(equation, result in narrow), tuple(map(place, equation.inputs)), place(result)
            (self._before if result in same else self._steps).append(step)
            if equation.name in ELEMENTWISE and 1 < math.prod(result.aval.shape) <= _MOST_ELEMENTS:
                self._shapes[step[2]] = result.aval.shape
        self._results = list(map(place, outputs))
        made = {e.outputs[0] for e in equations if e.name not in _VIEWS} - same
        self._copied = [v not in made or v in outputs[:i] for i, v in enumerate(outputs)]
        self._size = len(places)

    def bound(self, hoisted: Sequence[Any]) -> Synchronous:
        """The program bound to its hoisted arguments: a function of the others, which may warn of overflow."""
        first: list[Any] = [None] * self._size
        for place, value in (*self._own, *self._literals, *zip(self._places, map(np.asarray, hoisted), strict=False)):
            first[place] = value
        others = self._places[len(hoisted) :]
        with np.errstate(all="ignore"):
            for function, operands, result in self._before:
                first[result] = np.array(function(*[first[i] for i in operands]), order="C")
        places = [(function, self._whole(first, operands, r), r) for function, operands, r in self._steps]
        steps = [(function, len(p), p[0], p[-1], p, r) for function, p, r in places]
        ends = list(zip(self._results, self._copied, strict=True))

        def call(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
            values = first.copy()
            for place, value in zip(others, leaves, strict=True):
                values[place] = value
            for function, count, a, b, operands, result in steps:
                if count == 1:  # most have one operand or two, which need no list
                    values[result] = function(values[a])
                elif count == 2:
                    values[result] = function(values[a], values[b])
                else:
                    values[result] = function(*[values[i] for i in operands])
            return [np.array(values[i]) if copied else np.asarray(values[i]) for i, copied in ends]

        return call

    def _whole(self, first: list[Any], operands: tuple[int, ...], result: int) -> tuple[int, ...]:
        """The operands' places, with constants broadcast to the result: NumPy would take twice as long."""
        shape, places = self._shapes.get(result), []
        for place in operands:
            if shape is not None and first[place] is not None and first[place].shape != shape:
                first.append(np.ascontiguousarray(np.broadcast_to(first[place], shape)))
                place = len(first) - 1
            places.append(place)
        return tuple(places)


def without_warnings(call: Synchronous) -> Synchronous:
    """The call without NumPy's warnings of overflow and invalid values."""

    def quiet(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            return call(leaves)

    return quiet


def _is_known(equation: Equation) -> bool:
    """Whether ``_function`` has it: arrays of common types, and nothing that NumPy defines otherwise."""
    name, params = equation.name, equation.params
    variables = (*equation.inputs, *equation.outputs)
    if len(equation.outputs) != 1 or equation.has_effects:
        return False
    types = [getattr(v.aval, "dtype", None) for v in variables]  # None of what is no array
    if not _TYPES.issuperset(types) or any(0 in v.aval.shape for v in variables):
        return False
    floating = np.issubdtype(types[0], np.floating)
    if name == "dot_general":
        (left, right), batch = params["dimension_numbers"]
        a, b = (v.aval for v in equation.inputs)
        same = a.dtype == b.dtype == equation.outputs[0].aval.dtype
        return floating and same and batch == ((), ()) and tuple(left) == (a.ndim - 1,) and len(right) == 1
    if name in _FUNCTIONS or name in _REDUCTIONS or name == "stop_gradient":
        return floating or name == "stop_gradient"
    if name in _ARG:
        return len(params["axes"]) == 1
    if name == "gather":
        return _axis_of(equation) is not None
    if name == "integer_pow":
        return floating and params["y"] in (2, 3)
    return can_evaluate(equation)


def _function(equation: Equation, narrow: bool) -> Callable[..., Any]:
    """The equation as a function of its operands; ``narrow``: readers broadcast its result themselves."""
    name, params, shape = equation.name, equation.params, equation.outputs[0].aval.shape
    if name in ELEMENTWISE:
        return ELEMENTWISE[name]
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name in _REDUCTIONS:
        return partial(_REDUCTIONS[name], axis=tuple(params["axes"]))
    match name:
        case "dot_general":
            ((_, (axis,)), _) = params["dimension_numbers"]
            ndim = equation.inputs[1].aval.ndim
            if axis == max(ndim - 2, 0):  # which dot contracts
                return np.ndarray.dot
            return (lambda x, w: x.dot(w.T)) if ndim == 2 else lambda x, w: np.tensordot(x, w, (-1, axis))
        case "select_n":
            return lambda which, no, yes: np.where(which, yes, no)
        case "stop_gradient":
            return lambda x: x
        case "integer_pow":
            return _square if params["y"] == 2 else _cube
        case "gather":
            return partial(_take, axis=_axis_of(equation) or 0, mode=params["mode"], filler=params["fill_value"])
        case "argmax" | "argmin":
            (axis,), dtype = params["axes"], params["index_dtype"]
            arg = _ARG[name]
            return lambda x: arg(x, axis).astype(dtype)
        case "convert_element_type":
            new = np.dtype(params["new_dtype"])
            return lambda x: x.astype(new)
        case "broadcast_in_dim":
            inner = aligned(equation.inputs[0].aval.shape, shape, params["broadcast_dimensions"])
            if narrow:
                return lambda x: x.reshape(inner)
            if math.prod(shape) <= _MOST_ELEMENTS:
                return lambda x: _filled(shape, x.reshape(inner))
        case "reshape" | "squeeze":
            return lambda x: x.reshape(shape)
        case "slice":
            index = index_of(**params)
            return lambda x: x[index]
    return partial(RULES[name], **params)


def _filled(shape: tuple[int, ...], x: Any) -> Any:
    """x broadcast; by np.broadcast_to a small array takes 4 us rather than 1."""
    result = np.empty(shape, x.dtype)
    result[...] = x
    return result


def _square(x: Any) -> Any:
    return x * x


def _cube(x: Any) -> Any:
    return x * x * x


def _axis_of(equation: Equation) -> int | None:
    """The axis along which a gather takes whole slices, as ``numpy.take`` does; None where it does something else."""
    (x, at), params = (v.aval for v in equation.inputs), equation.params
    how = params["dimension_numbers"]
    if len(how.start_index_map) != 1 or how.operand_batching_dims or params["mode"] is GatherScatterMode.ONE_HOT:
        return None
    (axis,), rank = how.start_index_map, at.ndim - 1
    others = tuple(d for d in range(x.ndim - 1 + rank) if not axis <= d < axis + rank)
    sizes = tuple(1 if d == axis else n for d, n in enumerate(x.shape))
    plain = how.collapsed_slice_dims == (axis,) and how.offset_dims == others and params["slice_sizes"] == sizes
    return int(axis) if plain else None


def _take(x: Any, at: Any, *, axis: int, mode: Any, filler: Any) -> Any:
    """Slices of x along an axis; places outside give the last, the first, or what they are to be filled with."""
    at = at[..., 0]
    taken = x.take(at, axis, mode="clip")
    if mode is GatherScatterMode.FILL_OR_DROP and (outside := (at < 0) | (at >= x.shape[axis])).any():
        where = outside.reshape([*outside.shape, *[1] * (x.ndim - 1 - axis)])
        return np.where(where, taken.dtype.type(filler), taken)
    return taken


def _narrow(equations: Sequence[Equation], outputs: Sequence[Any], same: set[Any]) -> set[Any]:
    """Results of broadcasting that need not be: all readers are elementwise, beside an operand that is as large."""
    readers: dict[Any, list[Equation]] = {}
    for equation in equations:
        for variable in variables(equation.inputs):
            readers.setdefault(variable, []).append(equation)
    narrow: set[Any] = set()

    def broadcasts(equation: Equation) -> Iterator[bool]:
        for reader in readers[equation.outputs[0]]:
            others = (v for v in reader.inputs if v is not equation.outputs[0])
            full = [v for v in others if is_literal(v) or v not in narrow]
            shape = reader.outputs[0].aval.shape
            yield reader.name in {*ELEMENTWISE, "select_n"} and any(v.aval.shape == shape for v in full)

    for equation in equations:
        (result,) = equation.outputs
        if equation.name == "broadcast_in_dim" and result not in same:
            whole = np.prod(result.aval.shape) == np.prod(equation.inputs[0].aval.shape)
            if whole or (not any(result is v for v in outputs) and all(broadcasts(equation))):
                narrow.add(result)
    return narrow


def _cost(equation: Equation) -> float:
    """Microseconds that it takes NumPy, but for what XLA needs as well: measured on arrays of up to 10 000 elements."""
    name, (result,) = equation.name, equation.outputs
    elements = math.prod(result.aval.shape)
    if name in _REDUCTIONS or name in _ARG:
        return _CALL + 0.6 + 0.04 * elements
    if name in {"select_n", "gather"}:
        return _CALL + 0.9 + 0.0011 * elements
    if name in {"pad", "concatenate"}:
        return _CALL + 1.2 + 0.0011 * elements
    if name == "dot_general":
        return _CALL if elements * equation.inputs[0].aval.shape[-1] <= NUMPY_PRODUCT else math.inf
    if name in _VIEWS:
        return _CALL
    return _CALL + elements * (0.0005 if name in _FUNCTIONS else 0.00015)
