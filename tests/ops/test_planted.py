"""What the property of both branches finds: bugs planted in the NumPy branch, none of which may pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnx2jax.ops import registry
from onnx2jax.ops.arrays import is_known
from tests.ops import test_branches
from tests.support.drawing import is_float, limits
from tests.support.registered import spoil
from tests.tables.folding import ELEMENTWISE


def _without_nan(x: np.ndarray, instead: float) -> np.ndarray:
    return np.where(x != x, np.array(instead).astype(x.dtype), x) if is_float(x.dtype) else x


def _top_k(right: Any, x: np.ndarray, k: Any, *, axis: int, largest: int, **_: Any) -> Any:
    if largest:
        return right[0], np.flip(np.argsort(_without_nan(x, -np.inf), axis), axis).take(range(int(k[0])), axis)
    return right


def _arg_max(x: np.ndarray, axis: int, keepdims: int) -> np.ndarray:
    return np.argmax(_without_nan(x, -np.inf), axis, keepdims=bool(keepdims))


def _reduced(function: np.ufunc, empty: float | None = None) -> Callable[..., Any]:
    """A reduction that leaves NaN out, or has its own idea of nothing."""

    def wrong(right: Any, x: np.ndarray, axes: Any = None, *, keepdims: int, noop_with_empty_axes: int) -> Any:
        axes = None if axes is None or not len(axes) else tuple(axes)
        if (axes is None and noop_with_empty_axes) or (empty is not None and x.size):
            return right
        if not x.size:
            return right if empty is None else np.full_like(right, empty)
        return function.reduce(x, axes, keepdims=bool(keepdims))

    return wrong


def _integers(wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Only integers come out wrong."""

    def function(right: Any, x: Any, *others: Any, **attributes: Any) -> Any:
        return right if is_float(x.dtype) else wrong(right, x, *others, **attributes).astype(right.dtype)

    return function


def _quotient(right: Any, a: np.ndarray, b: np.ndarray) -> Any:
    lowest, highest = limits(a.dtype)
    return np.where((a == lowest) & (b == np.array(-1).astype(b.dtype)) & (a != 0), highest, right)


def _shifted(_: Any, x: np.ndarray, y: np.ndarray, *, direction: str) -> Any:
    y = y % np.array(8 * y.dtype.itemsize, y.dtype)
    return (np.left_shift if direction == "LEFT" else np.right_shift)(x, y)


def _saturated(right: Any, x: np.ndarray, **_: Any) -> Any:
    """As ARM's processors do."""
    if right.dtype.kind not in "iu" or not is_float(x.dtype):
        return right
    return np.where(x == np.inf, np.iinfo(right.dtype).max, right).astype(right.dtype)


def _scattered(right: Any, x: np.ndarray, *_: Any, reduction: str, **__: Any) -> Any:
    return np.where(right != right, x, right) if reduction == "max" and is_float(x.dtype) else right


def _elements(right: Any, x: np.ndarray, at: np.ndarray, **_: Any) -> Any:
    return right if not at.size else np.where(at < 0, x.reshape(-1)[0], right)


def _summed(right: Any, x: np.ndarray, axis: Any, *, exclusive: int, reverse: int) -> Any:
    return right if reverse or not exclusive else np.cumsum(x, int(axis)).astype(x.dtype)


def _positive_zero(right: Any, *_: Any) -> Any:
    return right + right.dtype.type(0)


def _zero_for_nan(right: Any, *_: Any, **__: Any) -> Any:
    return (_without_nan(right[0], 0), *right[1:]) if isinstance(right, tuple) else _without_nan(right, 0)


# operator, what is wrong with it, and its wrong result from the right one and from the operands
PLANTED: list[tuple[str, str, Callable[..., Any]]] = [
    ("Max", "NaN left out", lambda _, *xs: functools.reduce(np.fmax, xs)),
    ("Min", "NaN left out", lambda _, *xs: functools.reduce(np.fmin, xs)),
    (
        "Clip",
        "NaN becomes the bound",
        lambda right, _, low=None, high=None: functools.reduce(
            np.fmax, [b for b in (low, high) if b is not None], right
        ),
    ),
    ("Relu", "NaN becomes 0", _zero_for_nan),
    ("Sign", "NaN becomes 0", _zero_for_nan),
    ("Equal", "NaN equals NaN", lambda right, a, b: right | ((a != a) & (b != b))),
    ("Greater", "NaN is greatest", lambda right, a, b: right | ((a != a) & (b == b))),
    ("TopK", "NaN is least", _top_k),
    ("ArgMax", "NaN left out", lambda _, x, *, axis, keepdims, **__: _arg_max(x, axis, keepdims)),
    ("ReduceMax", "NaN left out", _reduced(np.fmax)),
    ("ReduceMin", "NaN left out", _reduced(np.fmin)),
    ("ReduceMax", "of nothing it is 0", _reduced(np.fmax, 0)),
    ("ReduceProd", "of nothing it is 0", _reduced(np.multiply, 0)),
    ("ReduceLogSumExp", "of nothing it is 0", _reduced(np.logaddexp, 0)),
    ("Div", "the least number by -1 saturates", _integers(_quotient)),
    ("Div", "rounds down", _integers(lambda right, a, b: np.where(b == 0, right, a // np.where(b == 0, 1, b)))),
    ("Mod", "has the dividend's sign", _integers(lambda right, a, b, **_: np.where(b == 0, right, np.fmod(a, b)))),
    ("Abs", "the least number saturates", _integers(lambda right, x: np.where(right < 0, limits(x.dtype)[1], right))),
    ("Neg", "0 has no sign", _positive_zero),
    ("Ceil", "0 has no sign", _positive_zero),
    ("Round", "halves go up", lambda _, x: np.floor(x + x.dtype.type(0.5))),
    ("IsInf", "both or none", lambda _, x, **__: abs(x.astype(np.float32)) == np.inf),
    ("BitShift", "by the width modulo the width", _shifted),
    ("Pow", "1 / x of an integer is 0", _integers(lambda right, _, y: np.where(y < 0, 0, right))),
    ("Gather", "a negative index is 0", lambda _, x, at, *, axis: np.take(x, np.maximum(at, 0), axis)),
    ("GatherElements", "a negative index is 0", _elements),
    ("ScatterElements", "max leaves NaN out", _scattered),
    ("Softmax", "NaN becomes 0", _zero_for_nan),
    ("CumSum", "what is exclusive is not", _summed),
    ("Cast", "infinity becomes the greatest number", _saturated),
    ("Where", "NaN becomes 0", _zero_for_nan),
    ("LayerNormalization", "NaN becomes 0", _zero_for_nan),
]


@pytest.mark.parametrize(("name", "wrong"), [pytest.param(n, w, id=f"{n}: {t}") for n, t, w in PLANTED])
def test_a_planted_bug_is_found(name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    operator = registry.resolve("", name, test_branches.NEWEST)
    assert operator is not None and operator.function is not None
    right = operator.function

    @functools.wraps(right)
    def spoilt(*inputs: Any, **attributes: Any) -> Any:
        results = right(*inputs, **attributes)
        if not is_known(inputs):
            return results
        with np.errstate(all="ignore"):
            return wrong(results, *inputs, **{k: v for k, v in attributes.items() if k != "n_outputs"})

    spoil(monkeypatch, "", name, spoilt, operator.since)
    extremes = [test_branches.of_extremes(name)] if name in ELEMENTWISE else []
    with pytest.raises(AssertionError):
        test_branches.check([*extremes, test_branches.of_cases(("", name))])
