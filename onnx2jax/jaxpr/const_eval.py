"""Const-eval: equations that NumPy evaluates with XLA's numbers, such as exporters apply to weights; no compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..limits import MOST_CANCELLED
from ..ops.window import pad_numpy
from .program import Equation, is_literal, literal_value

Rule = Callable[..., Any]


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    return np.broadcast_to(np.reshape(x, aligned(np.shape(x), shape, broadcast_dimensions)), shape)


def aligned(extents: Any, shape: Any, broadcast_dimensions: Any) -> tuple[int, ...]:
    """The extents at their axes of the shape to broadcast to, and 1 elsewhere."""
    along = dict(zip(broadcast_dimensions, extents, strict=True))
    return tuple(along.get(axis, 1) for axis in range(len(shape)))


def _bitcast(x: Any, dtype: np.dtype[Any]) -> Any:
    """Its bits as another type; to a wider one along the last axis."""
    wider = dtype.itemsize > x.dtype.itemsize
    return np.ascontiguousarray(x).view(dtype)[..., 0] if wider else x.view(dtype)


def index_of(start_indices: Any, limit_indices: Any, strides: Any) -> tuple[slice, ...]:
    """The index of what lax.slice takes."""
    return tuple(map(slice, start_indices, limit_indices, strides or (1,) * len(start_indices)))


class Unfoldable(Exception):
    """Scales that cannot be folded into weights: products leave the range of float32, or sums round on purpose."""


LEAST, MOST = 2.0**-100, 2.0**60
"""Range of a channel's largest scaled weight: weights a millionth of it keep their digits, and sums stay finite."""


def is_foldable(largest: Any, shift: Any, most: Any) -> bool:
    """Whether scales can be folded into weights, in a traced program or in a graph (``model/changes/affine.py``).

    Args:
        largest: the magnitude of the largest scaled weight; of all channels, or of each.
        shift: what is added to the result, by channel.
        most: the largest sum on the way there: beside it the others may not round to its digits.
    """
    in_range = (largest == 0) | ((largest >= LEAST) & (largest <= MOST))
    is_exact = most <= MOST_CANCELLED * np.maximum(abs(shift), largest)
    return bool(in_range.all() and np.isfinite(shift).all() and is_exact.all())


def _scaled(w: Any, by: Any, shift: Any, most: Any) -> Any:
    """w * by, one factor a channel, for ``fold_batchnorm``; raises Unfoldable."""
    others = tuple(axis for axis, n in enumerate(by.shape) if n == 1)
    largest = np.maximum(w.max(others, keepdims=True), -w.min(others, keepdims=True)) * abs(by.astype(np.float64))
    if not is_foldable(largest.reshape(-1), shift, most):
        raise Unfoldable
    return w * by


def _elementwise(function: Any) -> Rule:
    return lambda *operands, **_: function(*operands)


ELEMENTWISE: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": np.divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
"""Primitive -> the function of its operands, which may broadcast against each other."""

RULES: Final[Mapping[str, Rule]] = {
    **{name: _elementwise(function) for name, function in ELEMENTWISE.items()},
    "bitcast_convert_type": lambda x, *, new_dtype: _bitcast(x, np.dtype(new_dtype)),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "copy": lambda x: x,
    "iota": lambda *, dtype, shape, dimension, **_: _broadcast(
        np.arange(shape[dimension], dtype=dtype), shape=shape, broadcast_dimensions=(dimension,)
    ),
    "pad": lambda x, value, *, padding_config: pad_numpy(x, value, padding_config),
    "reduce_sum": lambda x, *, axes, **_: x.sum(axes, dtype=x.dtype),
    "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "scaled": _scaled,
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
    "shift_left": _elementwise(np.left_shift),
    "shift_right_logical": _elementwise(np.right_shift),
    "slice": lambda x, **bounds: x[index_of(**bounds)],
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
}
"""Primitive -> its NumPy function of operands and parameters; without primitives that NumPy rounds differently."""


def can_evaluate(equation: Equation) -> bool:
    """Whether NumPy gives what XLA gives."""
    name, variables = equation.name, (*equation.inputs, *equation.outputs)
    if name not in RULES or equation.has_effects or not all(map(_is_plain, variables)):
        return False
    dtypes = [np.dtype(v.aval.dtype) for v in variables]
    match name:
        case "bitcast_convert_type":
            return dtypes[0].itemsize <= dtypes[1].itemsize
        case "pad":
            return all(low >= 0 and high >= 0 and not inside for low, high, inside in equation.params["padding_config"])
        case "reduce_sum":  # of floats depends on the order
            return not _is_floating(dtypes[0])
        case "div":  # of integers it rounds towards zero here, and downwards in NumPy
            return _is_floating(dtypes[0])
        case "convert_element_type":  # beyond the range of integers, and of 8-bit floats, they differ
            new = dtypes[-1]
            return new == bool or (new.itemsize > 1 if _is_floating(new) else not _is_floating(dtypes[0]))
        case "select_n":
            return len(equation.inputs) == 3 and dtypes[0] == bool
        case "shift_left" | "shift_right_logical":
            return np.issubdtype(dtypes[0], np.unsignedinteger)
        case "reshape":
            return equation.params.get("dimensions") is None
        case _:
            return True


@dataclass(frozen=True, eq=False)
class Step:
    """An equation for NumPy, apart from its program: it can be pickled.

    Attributes:
        name, parameters: of the primitive.
        operands: the number of a variable, or a literal's value.
        results: the numbers of variables.
        dtypes: of these.
    """

    name: str
    parameters: Mapping[str, Any]
    operands: tuple[int | np.ndarray, ...]
    results: tuple[int, ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, equation: Equation, numbers: Mapping[Any, int]) -> Step:
        """The step of an equation that NumPy ``can_evaluate``, with a number for each of its variables."""
        operands = tuple(literal_value(v) if is_literal(v) else numbers[v] for v in equation.inputs)
        results = tuple(numbers[v] for v in equation.outputs)
        dtypes = tuple(v.aval.dtype for v in equation.outputs)
        return cls(equation.name, equation.params, operands, results, dtypes)

    @property
    def reads(self) -> list[int]:
        """The numbers of the variables among its operands."""
        return [v for v in self.operands if isinstance(v, int)]

    def evaluate(self, values: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Its results, from the values of variables."""
        arrays = [values[v] if isinstance(v, int) else v for v in self.operands]
        with np.errstate(all="ignore"):
            results = RULES[self.name](*arrays, **self.parameters)
        several = results if isinstance(results, list) else [results]
        return {n: np.asarray(r, t) for n, r, t in zip(self.results, several, self.dtypes, strict=True)}

    def identity(self, known: Mapping[int, int]) -> tuple[Any, ...]:
        """A key that is equal for equal computations; ``known`` numbers the values of its operands."""
        literals = {id(v): (v.dtype.name, v.shape, v.tobytes()) for v in self.operands if isinstance(v, np.ndarray)}
        operands = tuple(known[v] if isinstance(v, int) else literals[id(v)] for v in self.operands)
        return self.name, repr(sorted(self.parameters.items())), operands


def _is_plain(variable: Any) -> bool:
    """Whether it is an array of numbers whose extents are known."""
    aval = variable.aval
    return (
        hasattr(aval, "shape")
        and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        and all(isinstance(d, int) for d in aval.shape)
    )


def _is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.floating))
