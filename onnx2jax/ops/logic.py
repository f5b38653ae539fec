"""Logic, comparisons, bits and Where."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jax import lax

from .arrays import is_known, is_string
from .cast import settled
from .control import needs_known
from .math import aligned, binary, two_columns
from .registry import op, taking


def _same(a, b):
    """Equality that is certain: symbolic dimensions that may or may not be equal raise JAX's own explanation."""
    return a == b or not (isinstance(a, str) or a < b or a > b)


_same_objects = np.frompyfunc(_same, 2, 1)


def _equal(a, b):
    return np.asarray(_same_objects(a, b), bool) if object in (a.dtype, b.dtype) else np.equal(a, b)


binary("And", np.logical_and, lax.bitwise_and)
binary("Or", np.logical_or, lax.bitwise_or)
binary("Xor", np.logical_xor, lax.bitwise_xor)
binary("Equal", _equal, lax.eq)
binary("Greater", np.greater, lax.gt)
binary("Less", np.less, lax.lt)
binary("GreaterOrEqual", np.greater_equal, lax.ge, since=12)
binary("LessOrEqual", np.less_equal, lax.le, since=12)
binary("BitwiseAnd", np.bitwise_and, lax.bitwise_and, since=18)
binary("BitwiseOr", np.bitwise_or, lax.bitwise_or, since=18)
binary("BitwiseXor", np.bitwise_xor, lax.bitwise_xor, since=18)
op("Not")(taking("X")(two_columns(np.logical_not, lax.bitwise_not)))
op("BitwiseNot", since=18)(taking("X")(two_columns(np.invert, lax.bitwise_not)))


def _shift_right(x, y):
    return (lax.shift_right_logical if x.dtype.kind == "u" else lax.shift_right_arithmetic)(x, y)


# By the width or more, or by a negative count, NumPy and XLA both leave what the sign alone gives, as ONNX asks.
_SHIFTS = {"LEFT": two_columns(np.left_shift, lax.shift_left), "RIGHT": two_columns(np.right_shift, _shift_right)}


@op("BitShift", since=11)
def bit_shift(X, Y, *, direction: Literal["LEFT", "RIGHT"]):
    return _SHIFTS[direction](X, Y)


@op("Where", since=9)
def where(condition, X, Y):
    if is_string(X):
        condition = needs_known(condition, "X and Y are strings")
    if is_known((condition, X, Y)):
        return settled(np.where(condition, X, Y))
    X, Y = aligned(X, Y)
    return lax.select(*aligned(condition, X, Y))
