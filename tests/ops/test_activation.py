"""Facts about activations and the softmax family that the official suite does not hold."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from ml_dtypes import bfloat16

from tests.ops.test_elementwise import both, f32, gradient
from tests.support.helpers import run_op

WIDE = np.array([-1e30, -800, -90, -20, -1, -1e-4, 0, 1e-4, 1, 20, 90, 800, 1e30], np.float32)

SMOOTH = ["Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu", "Selu", "Sigmoid", "Softplus"]
SMOOTH += ["Softsign", "Swish", "ThresholdedRelu"]


@pytest.mark.parametrize("name", SMOOTH)
def test_values_and_gradients_are_finite_for_large_inputs(name: Any) -> None:
    assert np.isfinite(both(name, WIDE)).all()
    assert np.isfinite(gradient(name, WIDE)).all()
    for dtype in (bfloat16, np.float64):
        assert both(name, WIDE[3:-3].astype(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("name", "at_zero"), [("Relu", 0), ("LeakyRelu", 1), ("Elu", 1), ("Celu", 1), ("ThresholdedRelu", 0)]
)
def test_derivative_at_the_kink(name: Any, at_zero: Any) -> None:
    assert gradient(name, f32([0.0])) == at_zero


@pytest.mark.parametrize("name", ["Relu", "LeakyRelu", "Elu", "Celu", "Selu", "Softplus", "HardSigmoid", "Sigmoid"])
def test_nan_propagates(name: Any) -> None:
    assert np.isnan(both(name, f32([np.nan]))).all()


def test_values_against_scipy() -> None:
    x = np.linspace(-6, 6, 41)
    np.testing.assert_allclose(both("Gelu", x), x * scipy.special.ndtr(x), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(both("Softplus", x), np.logaddexp(x, 0), rtol=1e-14)
    np.testing.assert_allclose(both("Celu", x, alpha=-2.0), np.where(x < 0, -2 * np.expm1(x / -2), x), rtol=1e-13)
    np.testing.assert_allclose(both("SwiGLU", x, x, alpha=2.0), x * x * scipy.special.expit(2 * x), rtol=1e-13)
    with pytest.raises(ValueError, match="approximate"):
        run_op("Gelu", x, approximate="fast")
    with pytest.raises(ValueError, match="does not broadcast"):
        run_op("SwiGLU", x, x[:1])


def test_selu_changed_its_constants_at_opset_6() -> None:
    x = np.array([1.0])
    assert run_op("Selu", x, opset=5) == np.float32(1.0507) and run_op("Selu", x, opset=6) == np.float32(
        1.0507010221481323
    )


def test_prelu_slopes() -> None:
    x = -np.ones((2, 3, 4), np.float32)
    slope = f32([1, 2, 3])
    np.testing.assert_array_equal(both("PRelu", x, slope, opset=6), x * slope.reshape(3, 1))  # one a channel
    np.testing.assert_array_equal(both("PRelu", x, f32([2]), opset=6), x * 2)
    np.testing.assert_array_equal(both("PRelu", x, slope.reshape(3, 1), opset=7), x * slope.reshape(3, 1))
    with pytest.raises(ValueError, match="slope"):
        run_op("PRelu", x[0, 0, :2], np.ones((3, 2), np.float32))


def test_shrink_of_integers_truncates_real_numbers() -> None:
    assert both("Shrink", np.array([-3, -1, 0, 2, 3], np.int32), lambd=1.5, bias=1.5).tolist() == [-1, 0, 0, 0, 1]


@pytest.mark.parametrize(("axis", "rows"), [(None, (2, 12)), (0, (1, 24)), (2, (6, 4)), (-1, (6, 4)), (-2, (2, 12))])
def test_softmax_before_opset_13_flattens(axis: Any, rows: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    settings = {"opset": 12} | ({} if axis is None else {"axis": axis})
    flat = x.reshape(rows)
    np.testing.assert_allclose(both("Softmax", x, **settings).reshape(rows), scipy.special.softmax(flat, -1), rtol=1e-6)
    np.testing.assert_allclose(
        both("LogSoftmax", x, **settings).reshape(rows), scipy.special.log_softmax(flat, -1), rtol=1e-6
    )
    np.testing.assert_array_equal(both("Hardmax", x, **settings).reshape(rows), np.eye(rows[1])[flat.argmax(-1)])
    np.testing.assert_allclose(both("Softmax", x, opset=13, axis=0), scipy.special.softmax(x, 0), rtol=1e-6)


def test_softmax_of_empty_masked_and_long_axes() -> None:
    assert both("Softmax", np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert both("Hardmax", np.zeros((3, 0), np.float32)).shape == (3, 0)
    assert both("Hardmax", f32([[1, 3, 3], [2, 2, 1]])).tolist() == [[0, 1, 0], [1, 0, 0]]
    masked = f32([[0, -np.inf, 1]])
    assert np.isfinite(gradient("Softmax", masked)).all()
    long = np.full(4096, 3, np.float16)  # a float16 sum would stop growing at 2048
    np.testing.assert_allclose(both("Softmax", long).astype(np.float32), 1 / 4096, rtol=1e-3)
    longer = np.full(100_000, 3, np.float16)  # the sum is above float16's range
    np.testing.assert_allclose(both("Softmax", longer).astype(np.float32), 1e-5, rtol=5e-3)
    with pytest.raises(ValueError, match="axis 1"):
        run_op("Softmax", long, opset=12)


def test_narrow_floats_round_once() -> None:
    x = jnp.linspace(-4, 4, 101).astype(jnp.bfloat16)
    exact = scipy.special.expit(np.asarray(x, np.float64))
    np.testing.assert_array_equal(np.asarray(run_op("Sigmoid", x, jit=True)), exact.astype(bfloat16))


def test_experimental_activations() -> None:
    x = f32([-1, 0, 2])
    np.testing.assert_allclose(both("ScaledTanh", x, opset=1, alpha=2.0, beta=0.5), 2 * np.tanh(x / 2), rtol=1e-6)
    np.testing.assert_allclose(
        both("ParametricSoftplus", x, opset=1, alpha=2.0, beta=0.5), 2 * np.log1p(np.exp(x / 2)), rtol=1e-6
    )
    np.testing.assert_array_equal(both("ThresholdedRelu", x, opset=1, alpha=1.5), [0, 0, 2])


def test_hardmax_of_an_empty_array_along_a_nonempty_axis() -> None:
    x = np.zeros((2, 0, 3), np.float32)
    for axis in (0, 1, -1):
        np.testing.assert_array_equal(both("Hardmax", x, axis=axis), x, strict=True)
