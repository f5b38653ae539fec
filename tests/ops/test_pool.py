"""Pools: what the official cases leave open: rounding up, indices, ties, integers, old forms, derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx2jax.ops import pool
from onnx2jax.ops.window import Window
from tests.support.helpers import run_op
from tests.support.joined import joined

ROW = np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5)


@pytest.mark.parametrize(
    ("name", "attributes", "expected"),
    [
        ("MaxPool", {"strides": [2]}, [2, 4]),
        ("MaxPool", {"strides": [2], "ceil_mode": 1}, [2, 4, 5]),
        # the last window would start in the padding behind the input
        ("MaxPool", {"strides": [3], "pads": [0, 1], "ceil_mode": 1}, [2, 5]),
        ("MaxPool", {"strides": [2], "pads": [1, 1], "ceil_mode": 1}, [1, 3, 5]),
        ("MaxPool", {"strides": [2], "auto_pad": "VALID", "ceil_mode": 1}, [2, 4]),
        ("AveragePool", {"strides": [2], "ceil_mode": 1}, [1.5, 3.5, 5]),
        # what ceil_mode adds is no padding: the last window holds one element
        ("AveragePool", {"strides": [2], "ceil_mode": 1, "count_include_pad": 1}, [1.5, 3.5, 5]),
        ("AveragePool", {"strides": [2], "pads": [1, 1], "count_include_pad": 1}, [0.5, 2.5, 4.5]),
        ("AveragePool", {"strides": [2], "pads": [1, 1]}, [1, 2.5, 4.5]),
        ("LpPool", {"strides": [2], "p": 1}, [3, 7]),
    ],
)
def test_windows_of_two(name, attributes, expected):
    for jit in (False, True):
        got = run_op(name, ROW, kernel_shape=[2], jit=jit, **attributes)
        np.testing.assert_allclose(np.ravel(got), expected, rtol=1e-6)


def test_same_padding_counts_dilation():
    got = run_op("MaxPool", ROW, kernel_shape=[2], dilations=[3], auto_pad="SAME_UPPER")
    assert np.ravel(got).tolist() == [3, 4, 5, 3, 4]


@pytest.mark.parametrize(("order", "expected"), [(0, [4, 5, 7, 8, 13, 14, 16, 17]), (1, [4, 7, 5, 8, 13, 16, 14, 17])])
def test_indices_count_rows_or_columns_first_within_a_channel(order, expected):
    x = np.arange(18, dtype=np.float32).reshape(1, 2, 3, 3)
    _, places = run_op("MaxPool", x, kernel_shape=[2, 2], storage_order=order, n_outputs=2, opset=8)
    assert places.dtype == np.int64
    assert np.ravel(places).tolist() == expected


@pytest.mark.parametrize(
    "value", [np.float32(-np.inf), np.int8(-128), np.uint8(0), np.float32(np.nan), np.float16(7)], ids=str
)
def test_an_index_never_points_into_the_padding(value):
    x = np.full((1, 1, 3, 3), value)
    y, places = run_op("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], n_outputs=2)
    np.testing.assert_array_equal(y, x)
    assert np.ravel(places).tolist() == [0, 0, 1, 0, 0, 1, 3, 3, 4]


def test_unpooling_undoes_pooling():
    x = np.random.default_rng(0).permutation(72).reshape(2, 1, 6, 6).astype(np.float32)
    window: Any = {"kernel_shape": [2, 2], "strides": [2, 2]}
    y, places = run_op("MaxPool", x, n_outputs=2, **window)
    back = run_op("MaxUnpool", y, places, opset=9, **window)
    np.testing.assert_array_equal(back, np.where(np.isin(x, y), x, 0))
    wide = run_op("MaxUnpool", y, places, np.array([2, 1, 7, 8]), **window)
    np.testing.assert_array_equal(wide, np.pad(back, ((0, 0), (0, 0), (0, 1), (0, 2))))


@pytest.mark.parametrize("index", [-1, -16, -100, 16])
def test_unpooling_writes_nothing_out_of_range(index):
    """As onnxruntime, which raises; a compiled function cannot."""
    x, places = np.float32([[[[1, 2], [3, 4]]]]), np.array([[[[0, 3], [8, index]]]])
    window: Any = {"kernel_shape": [2, 2], "strides": [2, 2]}
    with pytest.raises(ValueError, match=r"are outside \[0, 15\] of the flattened output"):
        run_op("MaxUnpool", x, places, **window)
    traced = jax.jit(lambda places: run_op("MaxUnpool", x, places, **window))(places)
    np.testing.assert_array_equal(np.ravel(traced), [1, 0, 0, 2, 0, 0, 0, 0, 3, *[0] * 7])


@pytest.mark.parametrize(
    "geometry", [((3, 2), (2, 1), (1, 1), ((1, 1), (0, 1))), ((2, 2), (1, 2), (2, 1), ((0, 0),) * 2)]
)
def test_both_lowerings_of_a_window_agree(geometry):
    x = np.random.default_rng(1).standard_normal((2, 3, 7, 6)).astype(np.float32)
    kernel, strides, dilations, pads = geometry
    window = Window(kernel, strides, pads, dilations)

    @jax.jit
    def call(x):
        combined = ((0, jax.lax.add), (-np.inf, jax.lax.max))
        return [[form(x, *how, window) for form in (pool._reduce, pool._reduce_by_axis)] for how in combined]

    for a, b in call(x):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dilations", "expected"), [([1], [1, 1, 0]), ([2], [1, 0, 0])])
def test_the_derivative_goes_to_the_first_of_equal_maxima(dilations, expected):
    loss = lambda x: run_op("MaxPool", x, kernel_shape=[2], dilations=dilations).sum()  # noqa: E731
    assert np.ravel(jax.jit(jax.grad(loss))(np.zeros((1, 1, 3), np.float32))).tolist() == expected


def test_the_derivative_of_maxima_is_that_of_reduce_window():
    rng = np.random.default_rng(2)
    x = rng.integers(0, 3, (2, 3, 7, 6)).astype(np.float32)  # many are equal
    window = Window((3, 2), (2, 1), ((1, 1), (0, 1)), (1, 1))
    seed = rng.normal(size=(2, 3, 4, 6)).astype(np.float32)

    @jax.jit
    def call(x):
        y, pull = jax.vjp(lambda x: pool._reduce(x, -np.inf, jax.lax.max, window), x)
        ours, back = jax.vjp(lambda x: pool._maxima(x, window), x)
        return (ours, y), (back(seed)[0], pull(seed)[0])

    values, gradients = call(x)
    np.testing.assert_array_equal(*values)
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_max_pool_propagates_nan_under_differentiation():
    x = np.float32([[[[1, np.nan, 2, 3, np.nan]]]])
    y, _ = jax.jit(lambda x: jax.jvp(lambda x: run_op("MaxPool", x, kernel_shape=[1, 2]), (x,), (x,)))(x)
    assert np.ravel(np.isnan(y)).tolist() == [True, True, False, True]


def test_lp_pool_of_zeros_has_a_finite_gradient():
    calls = {}
    for name, attributes in (("LpPool", {"kernel_shape": [2]}), ("GlobalLpPool", {})):
        for p in (1, 2, 3):
            sums = lambda x, name=name, options={"p": p, **attributes}: run_op(name, x, **options).sum()  # noqa: E731
            calls[name, p] = jax.grad(sums), (np.zeros((1, 1, 4)),)
    assert [name for name, gradient in joined(calls).items() if not np.isfinite(gradient).all()] == []


@pytest.mark.parametrize(("name", "attributes"), [("LpPool", {"kernel_shape": [2]}), ("GlobalLpPool", {})])
def test_the_norm_of_opset_1_may_be_fractional(name, attributes):
    got = run_op(name, np.array([[[1.0, -4.0]]]), opset=1, p=0.5, **attributes)
    np.testing.assert_allclose(np.ravel(got), 9)


@pytest.mark.parametrize("name", ["AveragePool", "GlobalAveragePool"])
def test_half_precision_averages_in_float32(name):
    attributes: Any = {"kernel_shape": [70, 70]} if name == "AveragePool" else {}
    got = run_op(name, np.full((1, 1, 70, 70), 40, np.float16), **attributes)
    assert got.dtype == np.float16
    assert np.ravel(got).tolist() == [40]


def test_the_average_of_the_largest_numbers_is_finite():
    """Their sum is not."""
    got = run_op("GlobalAveragePool", np.full((1, 1, 2, 2), 3e38, np.float32), jit=True)
    np.testing.assert_allclose(np.ravel(got), 3e38, rtol=1e-6)


@pytest.mark.parametrize(
    ("opset", "attributes", "words"),
    [(1, {}, "kernel_shape"), (22, {"kernel_shape": [6]}, "fit"), (22, {"kernel_shape": [2, 2]}, "kernel_shape")],
)
def test_errors_name_the_invalid_window_attribute(opset, attributes, words):
    with pytest.raises(ValueError, match=words):
        run_op("LpPool", ROW, opset=opset, **attributes)


@pytest.mark.parametrize("side", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_float16_maxima_are_exact(dtype: Any, side: int) -> None:
    """Those of float32, in which they are taken: with infinities, NaN and padding among them."""
    x = np.random.default_rng(0).normal(size=(1, 2, 9, 9)).astype(dtype)
    x[0, 0, 4, 4:7] = np.nan, np.inf, -np.inf
    x[0, 1, :4, :4] = -np.inf
    given = {"kernel_shape": [side, side], "strides": [2, 1], "pads": [1] * 4, "jit": True}
    half, single = run_op("MaxPool", x, **given), run_op("MaxPool", x.astype(np.float32), **given)
    assert half.dtype == dtype
    np.testing.assert_array_equal(np.asarray(half, np.float32), single)
