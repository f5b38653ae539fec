"""Reductions and selections: empty sets, integers, half precision, NaN, ties, gradients, old forms."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from onnx2jax import compat
from tests.support.branches import as_jax, assert_each, both, each_by_both, op
from tests.support.helpers import run_op
from tests.support.joined import joined

INF, NAN = np.inf, np.nan


def ints(*values):
    return np.array(values, np.int64)


NEUTRAL = [
    ("ReduceSum", np.float32, 0),
    ("ReduceProd", np.int32, 1),
    ("ReduceMax", np.float64, -INF),
    ("ReduceMax", np.uint8, 0),
    ("ReduceMax", np.int64, -(2**63)),
    ("ReduceMax", np.bool_, False),
    ("ReduceMin", np.float16, INF),
    ("ReduceMin", np.int8, 127),
    ("ReduceMin", np.bool_, True),
    ("ReduceMax", ml_dtypes.bfloat16, -INF),
    ("ReduceLogSum", np.float32, -INF),
    ("ReduceLogSumExp", np.float32, -INF),
    ("ReduceL2", np.float32, 0),
    ("ReduceMean", np.float32, NAN),
]


def test_empty_reductions_give_the_identity_element():
    cases = {}
    for name, dtype, neutral in NEUTRAL:
        call = op(name, np.zeros((2, 0, 3), dtype), ints(1))
        cases[f"{name} {np.dtype(dtype)}"] = call, np.full((2, 1, 3), neutral).astype(dtype)
    assert_each(cases, strict=True)


AXES = [
    ("ReduceSum", 1, (), {"axes": (0,), "keepdims": 0}, [4, 6]),  # axes as an attribute
    ("ReduceSum", 11, (), {"axes": (-1,), "keepdims": 1}, [[3], [7]]),
    ("ReduceSum", 13, (ints(-1),), {"keepdims": 0}, [3, 7]),
    ("ReduceMax", 17, (), {"axes": (0, 1), "keepdims": 0}, 4),
    ("ReduceMax", 18, (ints(1, 0),), {"keepdims": 0}, 4),
    ("ReduceSum", 13, (ints(),), {"keepdims": 0}, 10),  # no axes are all axes
    ("ReduceSum", 13, (ints(),), {"noop_with_empty_axes": 1}, [[1, 2], [3, 4]]),
    ("ReduceSumSquare", 18, (), {"noop_with_empty_axes": 1}, [[1, 4], [9, 16]]),  # the square is still taken
    ("ReduceMean", 7, (), {"axes": (0,), "keepdims": 0}, [2, 3]),
]


def test_axes_in_every_opset():
    cases = {}
    for dtype, (name, opset, inputs, attributes, expected) in itertools.product((np.int32, np.float32), AXES):
        call = op(name, np.array([[1, 2], [3, 4]], dtype), *inputs, opset=opset, **attributes)
        cases[f"{name} at {opset} of {inputs} {attributes} {np.dtype(dtype)}"] = call, np.array(expected, dtype)
    assert_each(cases, strict=True)


def test_axis_named_twice_is_an_error():
    with pytest.raises(ValueError, match="duplicates"):
        run_op("ReduceSum", np.ones((2, 2), np.float32), ints(0, -2))


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("ReduceMean", [-7, 2], -2),  # towards zero, where Python's // gives -3
        ("ReduceMean", [2**31 - 1, 2**31 - 1], 2**31 - 1),  # the sum does not fit in int32
        ("ReduceL2", [50000, 50000], 70710),  # nor do these squares
        ("ReduceLogSumExp", [1, 1], 1),
        ("ReduceLogSum", [2, -2], -(2**31)),  # -inf and NaN become the least integer, as in Cast and onnxruntime
        ("ReduceLogSum", [2, -3], -(2**31)),
        ("ReduceSum", [2**31 - 1, 1], -(2**31)),  # a sum wraps like every integer of ONNX
    ],
)
def test_integers_stay_integers(name, x, expected):
    np.testing.assert_array_equal(both(name, np.array(x, np.int32), keepdims=0), np.int32(expected), strict=True)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    ones = np.ones(4096, dtype)
    assert both("ReduceSum", ones, keepdims=0) == 4096
    assert both("ReduceMean", np.full(4096, 100, dtype), keepdims=0) == 100  # the sum overflows float16
    assert both("CumSum", ones, np.array(0))[-1] == 4096


def test_log_sum_exp_is_stable():
    x = np.array([[1000, 1000], [-INF, -INF], [-INF, 3], [INF, 0], [NAN, 0]], np.float32)
    expected = [1000 + np.log(2), -INF, 3, INF, NAN]
    np.testing.assert_allclose(both("ReduceLogSumExp", x, ints(1), keepdims=0), expected, rtol=1e-6)


def test_reduce_norm_gradients_are_finite_at_zero():
    names = ("ReduceL2", "ReduceLogSum", "ReduceProd", "ReduceMax", "ReduceLogSumExp")
    calls = {
        (name, value): (jax.grad(partial(run_op, name, keepdims=0)), (np.full(3, value, np.float64),))
        for name, value in [*((name, 0) for name in names), ("ReduceLogSumExp", -INF)]
    }
    assert [name for name, gradient in joined(calls).items() if not np.isfinite(gradient).all()] == []


def test_arg_extrema():
    x, cases = np.array([[1, 3, 1, 3], [7, 3, 0, 0]]), {}
    for attributes, highest, lowest in (
        ({"axis": 1, "keepdims": 0}, [1, 0], [0, 2]),
        ({"axis": -1, "keepdims": 0, "select_last_index": 1}, [3, 0], [2, 3]),
        ({"axis": 0}, [[1, 0, 0, 0]], [[0, 0, 1, 1]]),
    ):
        for dtype in (np.float32, np.int8, np.uint64, ml_dtypes.bfloat16):
            for name, expected in (("ArgMax", highest), ("ArgMin", lowest)):
                call = op(name, x.astype(dtype), **attributes)
                cases[f"{name} {attributes} {np.dtype(dtype)}"] = call, ints(*expected)
    assert_each(cases, strict=True)


def test_argmax_of_nan_and_of_empty_axes():
    x = np.array([1, NAN, 3, NAN], np.float32)
    assert both("ArgMax", x, keepdims=0) == both("ArgMin", x, keepdims=0) == 1
    with pytest.raises(ValueError, match="empty"):
        run_op("ArgMax", np.zeros((2, 0), np.float32), axis=1)


def test_cumulative_sums():
    x, cases = np.arange(1, 7, dtype=np.int32).reshape(2, 3), {}
    functions = (("CumSum", np.cumsum, 0), ("CumProd", np.cumprod, 1))
    for (name, run, start), axis, reverse in itertools.product(functions, (0, 1, -1), (0, 1)):
        turned = np.flip(x, axis) if reverse else x
        shifted = np.insert(turned, 0, start, axis)
        shifted = np.delete(shifted, -1, axis)
        for exclusive, y in ((0, turned), (1, shifted)):
            y = run(y, axis, dtype=np.int32)
            call = op(name, x, np.array(axis), reverse=reverse, exclusive=exclusive)
            cases[f"{name}, {axis=}, {reverse=}, {exclusive=}"] = call, np.flip(y, axis) if reverse else y
    assert_each(cases, strict=True)


def test_cumulative_sum_of_empty_arrays_and_infinities():
    assert both("CumSum", np.zeros((0, 2), np.float32), np.array(0), exclusive=1).shape == (0, 2)
    x = np.array([1, INF, 2], np.float32)  # an exclusive sum is no difference: INF - INF would be NaN
    np.testing.assert_array_equal(both("CumSum", x, np.array(0), exclusive=1), np.float32([0, 1, INF]))


TOP = [
    ([1, 3, 3, 2], 1, [1, 2, 3]),
    ([1, 3, 1, 2], 0, [0, 2, 3]),
    ([0.0, -0.0, 0.0], 1, [0, 1, 2]),  # equal, whatever their signs
    ([0.0, -0.0, 0.0], 0, [0, 1, 2]),
    ([1, NAN, INF, -NAN], 1, [1, 3, 2]),  # NaN is the greatest, of either sign
    ([-NAN, NAN, INF, 1, -INF], 0, [4, 3, 2, 0, 1]),
]


def assert_top(cases):
    """The positions of the greatest or least elements, by name: array, whether the greatest, positions."""
    calls = {n: op("TopK", x, ints(len(at)), n_outputs=2, largest=largest) for n, (x, largest, at) in cases.items()}
    for name, (values, indices) in each_by_both(calls).items():
        x, _, expected = cases[name]
        np.testing.assert_array_equal(indices, ints(*expected), err_msg=name, strict=True)
        np.testing.assert_array_equal(values.astype(np.float64), x[expected].astype(np.float64), err_msg=name)


def test_top_k_of_ties_zeros_and_nan():
    types = np.float32, np.float64, np.float16, ml_dtypes.bfloat16
    cases = {}
    for dtype, (x, largest, expected) in itertools.product(types, TOP):
        cases[f"{largest} of {x} {np.dtype(dtype)}"] = np.array(x).astype(dtype), largest, expected
    assert_top(cases)


def test_top_k_of_extreme_integers():
    cases = {}
    for dtype in (np.uint8, np.int8, np.int64, np.uint64):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        x = np.array([low, high, low + 1, high - 1], dtype)  # -low overflows: negation cannot turn the order round
        for largest, expected in ((1, [1, 3, 2, 0]), (0, [0, 2, 3, 1])):
            cases[f"{largest} of {np.dtype(dtype)}"] = x, largest, expected
    assert_top(cases)


def test_top_k_in_every_version():
    x = np.array([[1, 5, 3], [9, 2, 4]], np.float32)
    for opset, inputs, attributes in ((1, (), {"k": 1}), (10, (ints(1),), {}), (11, (ints(1),), {"sorted": 0})):
        values, indices = both("TopK", x, *inputs, opset=opset, n_outputs=2, axis=0, **attributes)
        np.testing.assert_array_equal(values, np.float32([[9, 5, 4]]), strict=True)
        np.testing.assert_array_equal(indices, ints([1, 0, 1]), strict=True)
    with pytest.raises(ValueError, match=r"K \(4\)"):
        run_op("TopK", x, ints(4), n_outputs=2)


def test_non_zero_of_scalars():
    assert run_op("NonZero", np.array(5.0)).shape == (0, 1)
    assert run_op("NonZero", np.array(False)).shape == (0, 0)


@pytest.mark.parametrize(
    ("x", "attributes", "expected"),
    [
        ([2, 1, 1, 3, 4, 3], {"sorted": 0}, ([2, 1, 3, 4], [0, 1, 3, 4], [0, 1, 1, 2, 3, 2], [1, 2, 2, 1])),
        ([[1, 3], [2, 3]], {}, ([1, 2, 3], [0, 2, 1], [0, 2, 1, 2], [1, 1, 2])),
        ([[2, 3], [1, 0], [1, 0]], {"axis": 0}, ([[1, 0], [2, 3]], [1, 0], [1, 0, 0], [2, 1])),
        ([[2, 3], [1, 0], [1, 0]], {"axis": 0, "sorted": 0}, ([[2, 3], [1, 0]], [0, 1], [0, 1, 1], [1, 2])),
        ([[1, 1, 2]], {"axis": -1}, ([[1, 2]], [0, 2], [0, 0, 1], [2, 1])),
    ],
)
@pytest.mark.parametrize("dtype", [np.int8, np.float32, ml_dtypes.bfloat16, object])
def test_unique(x, attributes, expected, dtype):
    to = (
        (lambda v: np.array(v).astype(str).astype(object)) if dtype is object else (lambda v: np.array(v).astype(dtype))
    )
    y, *others = run_op("Unique", to(x), n_outputs=4, **attributes)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, to(expected[0]))
    for got, want in zip(others, expected[1:], strict=True):
        np.testing.assert_array_equal(got, ints(*want), strict=True)


def test_reductions_under_jit_and_vmap():
    with compat.enable_x64():
        y = jax.vmap(lambda x: run_op("ReduceMean", x, keepdims=0))(as_jax(np.ones((3, 4), np.float32)))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(run_op("ReduceSum", np.ones((2, 2), np.float32), jit=True), [[4]])
