"""Elementwise arithmetic, logic, bitwise operators and selection.

Most operators are a pair of functions: NumPy's for known values, one of `jax.lax` otherwise.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from .arrays import axis_of, dims, is_known, is_string, needs_known, xp
from .cast import as_host_array, cast_to, is_float, is_integer, materialize_dims
from .registry import Static, op, taking

WITHDRAWN = "experimental, removed in ONNX 1.5"
_DIVISOR = "symbolic dimensions support positive divisors only"


def broadcast_operands(*values):
    """The values broadcast to one shape by NumPy's rules, as lax functions require."""
    types = {v.dtype for v in values if v.dtype != object}
    arrays = [materialize_dims(v, *types) if len(types) == 1 else materialize_dims(v) for v in values]
    shape = lax.broadcast_shapes(*(v.shape for v in arrays))
    rank = len(shape)
    return [v if v.shape == shape else lax.broadcast_in_dim(v, shape, range(rank - v.ndim, rank)) for v in arrays]


def numpy_or_jax(numpy_function, jax_function, object_function=None):
    """A function that calls the first if all operands are known, otherwise the second.

    The third handles known operands with objects: symbolic dimensions or strings.
    """

    def function(*values):
        types = {v.dtype for v in values if v.dtype != object}
        if len(types) > 1:
            raise ValueError(f"the inputs have different element types ({', '.join(map(str, types))}); Cast them first")
        if not is_known(values):
            return jax_function(*broadcast_operands(*values))
        objects = object_function is not None and any(v.dtype == object for v in values)
        result = as_host_array((object_function if objects else numpy_function)(*values))
        if is_float(result.dtype) and not is_float(values[0].dtype) and values[0].dtype.kind != "c":
            raise ValueError(f"the input ({values[0].dtype}) must have a floating type; Cast it first")
        return result

    return function


def binary(name, *functions, since=7, **traits):
    """Register a broadcasting operator of A and B, and its form before opset 7, which aligned B by ``axis``."""
    function = functions[0] if len(functions) == 1 else numpy_or_jax(*functions)
    modern = op(name, since=since, broadcasts=True, **traits)(taking("A", "B")(function))
    if since == 7:
        op(name)(with_limited_broadcast(modern, "A", "B"))
    return modern


def with_limited_broadcast(modern, *inputs):
    @taking(*inputs, axis=None, broadcast=0)
    def legacy(*operands, axis, broadcast):
        return modern(operands[0], limited_broadcast(*operands, axis, broadcast))

    return legacy


def limited_broadcast(A, B, axis, broadcast):
    """B reshaped so that NumPy's broadcasting matches opsets 1 to 6.

    B's shape is a slice of A's that starts at ``axis``, or ends at A's last axis without one. Extents of 1 inside B
    broadcast, because old exporters relied on it.
    """
    if A.shape == B.shape:
        return B
    if not broadcast:
        raise ValueError(f"shapes {A.shape} and {B.shape} need broadcast=1 before opset 7; set it or use a newer opset")
    if math.prod(B.shape) == 1:
        return B.reshape(())
    start = A.ndim - B.ndim if axis is None else axis_of(axis, A.ndim)
    part = A.shape[start : start + B.ndim]
    if start < 0 or len(part) < B.ndim or any(b not in (a, 1) for a, b in zip(part, B.shape, strict=True)):
        raise ValueError(f"B {B.shape} does not match the extents of A {A.shape} from axis {start} on")
    return B.reshape(B.shape + (1,) * (A.ndim - start - B.ndim))


UNARY = {
    "Abs": (1, "X", np.abs, jnp.abs),
    "Acos": (7, "input", np.arccos, lax.acos),
    "Acosh": (9, "input", np.arccosh, lax.acosh),
    "Asin": (7, "input", np.arcsin, lax.asin),
    "Asinh": (9, "input", np.arcsinh, lax.asinh),
    "Atan": (7, "input", np.arctan, lax.atan),
    "Atanh": (9, "input", np.arctanh, lax.atanh),
    "Ceil": (1, "X", np.ceil, lax.ceil),
    "Cos": (7, "input", np.cos, lax.cos),
    "Cosh": (9, "input", np.cosh, lax.cosh),
    "Exp": (1, "input", np.exp, lax.exp),
    "Floor": (1, "X", np.floor, lax.floor),
    "IsNaN": (9, "X", lambda x: x != x, lambda x: lax.ne(x, x)),
    "Log": (1, "input", np.log, lax.log),
    "Neg": (1, "X", np.negative, lax.neg),
    "Reciprocal": (1, "X", np.reciprocal, lambda x: lax.div(lax.full_like(x, 1), x)),
    "Round": (11, "X", np.rint, lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    "Sign": (9, "input", np.sign, lax.sign),
    "Sin": (7, "input", np.sin, lax.sin),
    "Sinh": (9, "input", np.sinh, lax.sinh),
    "Sqrt": (1, "X", np.sqrt, lax.sqrt),
    "Tan": (7, "input", np.tan, lax.tan),
    "Tanh": (1, "input", np.tanh, lax.tanh),
}
_WIDE = frozenset({"Cosh", "Exp", "Log", "Reciprocal", "Sinh", "Sqrt", "Tanh"})
_EXACT = frozenset({"Ceil", "Cos", "Floor", "Round", "Sin", "Tan"})
for _name, (_since, _input, *_functions) in UNARY.items():
    _traits: Any = {"wide": _name in _WIDE, "exact": (_input,) if _name in _EXACT else ()}
    op(_name, since=_since, **_traits)(taking(_input)(numpy_or_jax(*_functions)))


def _on_dims(function):
    """``function`` on symbolic dimensions, whose floor division equals ONNX's truncation for equal signs."""

    def checked(a, b):
        if not (a >= 0 and b > 0):
            raise NotImplementedError(f"division of {a} by {b}: {_DIVISOR}")
        return function(a, b)

    return np.frompyfunc(checked, 2, 1)


def _quotient(a, b):
    if not is_integer(a.dtype):
        return np.divide(a, b)
    result = a // b + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), result)  # undefined in ONNX; all bits set, as in XLA


def _remainder(a, b):
    """The remainder with the dividend's sign; an integer modulo zero is the dividend, as in XLA."""
    return np.where(b == 0, a, np.fmod(a, b)) if is_integer(a.dtype) else np.fmod(a, b)


def _division(numpy_function, jax_function, object_function, by_zero):
    """Division with a result for integers by zero, of the dividend, that XLA does not compute.

    XLA:CPU ends the process where it divides by a zero that it knows at compile time, such as the sum of no elements.
    """

    def guarded(a, b):
        is_zero = lax.eq(b, lax.full_like(b, 0))
        return lax.select(is_zero, by_zero(a), jax_function(a, lax.select(is_zero, lax.full_like(b, 1), b)))

    any_divisor = numpy_or_jax(numpy_function, guarded, object_function)
    no_zero = numpy_or_jax(numpy_function, jax_function, object_function)

    def function(*operands):
        divisor = operands[1]
        is_safe = not is_integer(divisor.dtype) or (is_known(divisor) and divisor.dtype != object and divisor.all())
        return (no_zero if is_safe else any_divisor)(*operands)

    return function


binary("Add", np.add, lax.add, merges="sums")
binary("Sub", np.subtract, lax.sub, merges="sums")
binary("Mul", np.multiply, lax.mul, merges="products")
_MOD_LIMITS = f"integers by zero give the dividend, as in XLA; {_DIVISOR}"
_DIVIDE_LIMITS = f"integers by zero give -1 (all bits set), as in XLA; {_DIVISOR}"
_divided = _division(_quotient, lax.div, _on_dims(operator.floordiv), lambda a: lax.full_like(a, ~a.dtype.type(0)))
divide = binary("Div", _divided, merges="products", limits=_DIVIDE_LIMITS)
remainder = _division(_remainder, lax.rem, _on_dims(operator.mod), lambda a: a)


@op("Mod", since=10, broadcasts=True, exact=("A", "B"), limits=_MOD_LIMITS)
def mod(A, B, *, fmod=0):
    """A - B * quotient; fmod=1 truncates the quotient, fmod=0 floors it (the result has the sign of B)."""
    result = remainder(A, B)
    if fmod or object in (A.dtype, B.dtype):
        return result
    result = xp.where((result != 0) & ((result < 0) != (B < 0)), result + B, result)
    return xp.where(result == 0, xp.copysign(result, B), result) if is_float(A.dtype) else result


_POWERS = "integers to a negative power truncate; the derivative with respect to Y is 0 where X < 0"


@op("Pow", since=7, broadcasts=True, wide=True, limits=_POWERS)
def pow(X, Y):
    """X ** Y in the dtype of X."""
    if is_known(Y) and not is_known(X) and math.prod(Y.shape) == 1 and Y.dtype != object:
        exponent = float(Y.reshape(()))
        # Not to -2, -3, ...: X**2 leaves the range of its type where X**-2 does not.
        if exponent.is_integer() and (0 if is_integer(X.dtype) else -1) <= exponent <= 16:
            return broadcast_operands(lax.integer_pow(X, int(exponent)), Y)[0]  # exact, and differentiable at zero
    if is_integer(X.dtype):
        if is_float(Y.dtype):
            return cast_to(_float_pow(X.astype(np.float64), Y.astype(np.float64)), X.dtype)
        return _integer_pow(X, Y)
    narrow = X.dtype.itemsize < 4 and Y.dtype.itemsize < 4
    wide = X.dtype if X.dtype == Y.dtype else np.dtype(np.float32 if narrow else np.float64)
    return cast_to(_float_pow(X.astype(wide), Y.astype(wide)), X.dtype)


op("Pow")(with_limited_broadcast(pow, "X", "Y"))


def _lax_pow(x, y):
    # The derivative with respect to y is NaN where x < 0; 0 there lets a constant exponent be a parameter.
    return lax.pow(x, lax.select(lax.lt(x, lax.full_like(x, 0)), lax.stop_gradient(y), y))


_float_pow = numpy_or_jax(np.power, _lax_pow)


def _pow_by_squaring(x, y):
    def step(i, carry):
        result, power = carry
        return lax.select(y >> i & 1 != 0, result * power, result), power * power

    return lax.fori_loop(0, 63, step, (lax.full_like(x, 1), x))[0]


_exact_pow = numpy_or_jax(np.power, _pow_by_squaring)


def _integer_pow(X, Y):
    """X ** Y modulo 2**bits; a negative exponent truncates 1 / X**-Y."""
    if object in (X.dtype, Y.dtype):
        return as_host_array(np.power(X, Y))
    y = Y.astype(np.int64)
    result = _exact_pow(X.astype(np.int64), xp.maximum(y, 0)).astype(X.dtype)
    odd = xp.where(y & 1 == 1, X, X * X)
    return xp.where(y >= 0, result, xp.where(abs(X) == 1, odd, xp.zeros_like(X)))


def _variadic(*functions):
    function = numpy_or_jax(*functions)
    return lambda *data_0: reduce(function, data_0)


total = op("Sum", broadcasts=True)(_variadic(np.add, lax.add))
greatest = op("Max", broadcasts=True)(_variadic(np.maximum, lax.max, np.frompyfunc(jax.core.max_dim, 2, 1)))
least = op("Min", broadcasts=True)(_variadic(np.minimum, lax.min, np.frompyfunc(jax.core.min_dim, 2, 1)))


@op("Mean", broadcasts=True)
def mean(*data_0):
    """The elementwise mean of several tensors."""
    return total(*data_0) / data_0[0].dtype.type(len(data_0))


@op("Clip", limits="an absent bound is the extreme of the dtype, so infinity becomes finite")
def clip(input, min=None, max=None):
    """min(max, max(input, min)); an absent bound is the extreme of the dtype, so infinity becomes finite."""
    if input.dtype == object:
        raised = input if min is None else greatest(input, min)
        return raised if max is None else least(raised, max)
    dtype, info = input.dtype, (jnp.finfo if is_float(input.dtype) else jnp.iinfo)(input.dtype)
    bounds = (min, info.min), (max, info.max)
    low, high = (np.asarray(d, dtype) if b is None else b.reshape(()).astype(dtype) for b, d in bounds)
    if is_known((input, low, high)):
        return np.minimum(np.maximum(input, low), high)
    # JAX differentiates with respect to the bounds only if they have the operand's shape.
    return lax.clamp(jnp.broadcast_to(low, input.shape), input, jnp.broadcast_to(high, input.shape))


_EXACT_ERF = np.vectorize(math.erf, otypes=[np.float64])
_ERF_ABOVE = (-1.3202428122e-08, 4.6848165968e-06, 0.000379610300918, 0.00384961399325, 0.0543169390517,
              0.185203167892, 1.12837916938)  # fmt: skip
_ERF_BELOW = 6.31109511038e-05, 0.00130757231939, 0.0154620995474, 0.113958424732, 0.497465447916, 1.0


def _erf_numpy(x):
    """erf of a NumPy array: of float64 element by element, of narrower types within 2e-9 of it."""
    if x.dtype.itemsize > 4:
        return _EXACT_ERF(x)
    y, flat, step = np.empty(x.size, np.float64), x.reshape(-1), 2**14
    for start in range(0, x.size, step):  # pieces that stay in the cache
        part = np.clip(flat[start : start + step].astype(np.float64), -4, 4)  # beyond, float32 has no value below 1
        square = part * part
        y[start : start + step] = part * np.polyval(_ERF_ABOVE, square) / np.polyval(_ERF_BELOW, square)
    return y.reshape(x.shape)


_gauss = numpy_or_jax(_erf_numpy, compat.erf)


@op("Erf", since=9, wide=True)
def erf(input):
    """The error function; integers (opset 9) are truncated."""
    return cast_to(_gauss(input if is_float(input.dtype) else input.astype(np.float64)), input.dtype)


@op("IsInf", since=10, exact=("X",))
def is_inf(X, *, detect_negative=1, detect_positive=1):
    x = X.astype(np.float32) if X.dtype.itemsize == 1 else X
    return (x == np.inf) & bool(detect_positive) | (x == -np.inf) & bool(detect_negative)


# Experimental operators of ONNX 1.0 to 1.4, still found in models from old converters such as CoreML's.


op("Affine", limits=WITHDRAWN)(lambda X, *, alpha=1.0, beta=0.0: X * X.dtype.type(alpha) + X.dtype.type(beta))
op("Scale", limits=WITHDRAWN)(lambda input, *, scale=1.0: input * input.dtype.type(scale))


@op("ImageScaler", limits=WITHDRAWN)
def image_scaler(input, *, bias=(), scale=1.0):
    """Images [N, C, H, W] times ``scale``, plus one ``bias`` per channel."""
    scaled = input * input.dtype.type(scale)
    return scaled + np.asarray(bias, input.dtype).reshape(input.shape[1], 1, 1) if bias else scaled


@op("Crop", limits=WITHDRAWN)
def crop(input, *, border=(0, 0, 0, 0), scale=None):
    """Images [N, C, H, W] without a border (left, top, right, bottom); ``scale`` gives the output (height, width)."""
    left, top, right, bottom = border
    height, width = scale or (input.shape[2] - top - bottom, input.shape[3] - left - right)
    if top + height > input.shape[2] or left + width > input.shape[3]:
        raise ValueError(f"border {tuple(border)} and scale {scale} exceed the image of shape {input.shape}")
    return input[:, :, top : top + height, left : left + width]


@op("GivenTensorFill", limits=WITHDRAWN)
def given_tensor_fill(shape: Static = None, *, values, input_as_shape=0, extra_shape=()):
    """``values`` in the input's shape, or (input_as_shape) in the shape that the input contains."""
    extents = dims(shape) if input_as_shape or shape.dtype.kind == "i" else shape.shape
    return np.asarray(values, np.float32).reshape(*extents, *extra_shape)


def _certainly_equal(a, b):
    """Equality of dimensions or strings; symbolic dimensions that cannot be compared raise JAX's error."""
    return a == b or not (isinstance(a, str) or a < b or a > b)


binary("And", np.logical_and, lax.bitwise_and)
binary("Or", np.logical_or, lax.bitwise_or)
binary("Xor", np.logical_xor, lax.bitwise_xor)
binary("Equal", np.equal, lax.eq, np.vectorize(_certainly_equal, otypes=[bool]), exact=("A", "B"))
binary("Greater", np.greater, lax.gt, exact=("A", "B"))
binary("Less", np.less, lax.lt, exact=("A", "B"))
binary("GreaterOrEqual", np.greater_equal, lax.ge, since=12, exact=("A", "B"))
binary("LessOrEqual", np.less_equal, lax.le, since=12, exact=("A", "B"))
binary("BitwiseAnd", np.bitwise_and, lax.bitwise_and, since=18)
binary("BitwiseOr", np.bitwise_or, lax.bitwise_or, since=18)
binary("BitwiseXor", np.bitwise_xor, lax.bitwise_xor, since=18)
op("Not")(taking("X")(numpy_or_jax(np.logical_not, lax.bitwise_not)))
op("BitwiseNot", since=18)(taking("X")(numpy_or_jax(np.invert, lax.bitwise_not)))


def _shift_right(x, y):
    return (lax.shift_right_logical if x.dtype.kind == "u" else lax.shift_right_arithmetic)(x, y)


# Shifted by the width or more, or by a negative count, NumPy and XLA both yield all sign bits, as ONNX requires.
_SHIFTS = {"LEFT": numpy_or_jax(np.left_shift, lax.shift_left), "RIGHT": numpy_or_jax(np.right_shift, _shift_right)}


@op("BitShift", since=11, broadcasts=True, limits="by the width or more: 0")
def bit_shift(X, Y, *, direction: Literal["LEFT", "RIGHT"]):
    return _SHIFTS[direction](X, Y)


@op("Where", since=9, broadcasts=True, limits="strings on the host")
def where(condition, X, Y):
    if is_string(X):
        condition = needs_known(condition, "X and Y are strings")
    if is_known((condition, X, Y)):
        return as_host_array(np.where(condition, X, Y))
    return lax.select(*broadcast_operands(condition, *broadcast_operands(X, Y)))
