"""Facts about activations and the softmax family that the official suite does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from ml_dtypes import bfloat16

from tests.ops.test_elementwise import both, f32, gradient
from tests.support.branches import assert_each, each_by_both, op
from tests.support.helpers import run_op
from tests.support.joined import differences, joined

WIDE = np.array([-1e30, -800, -90, -20, -1, -1e-4, 0, 1e-4, 1, 20, 90, 800, 1e30], np.float32)

SMOOTH = ["Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu", "Selu", "Sigmoid", "Softplus"]
SMOOTH += ["Softsign", "Swish", "ThresholdedRelu"]


def test_values_and_gradients_are_finite_for_large_inputs() -> None:
    calls = {}
    for name, dtype in itertools.product(SMOOTH, (np.float32, bfloat16, np.float64)):
        calls[name, dtype] = op(name, WIDE if dtype == np.float32 else WIDE[3:-3].astype(dtype))
    for (name, dtype), y in each_by_both(calls, rtol=2e-6, atol=1e-30).items():
        assert y.dtype == dtype, name
        assert dtype != np.float32 or np.isfinite(y).all(), name
    found = gradients(dict.fromkeys(SMOOTH, WIDE))
    assert [name for name, y in found.items() if not np.isfinite(y).all()] == []


def gradients(operands: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The gradients of the sums of operators, compiled together."""
    sums = {name: lambda x, name=name: run_op(name, x).sum() for name in operands}
    return joined({name: (jax.grad(sums[name]), (x,)) for name, x in operands.items()})


def test_derivative_at_the_kink() -> None:
    at_zero = {"Relu": 0, "LeakyRelu": 1, "Elu": 1, "Celu": 1, "ThresholdedRelu": 0}
    assert gradients({name: f32([0.0]) for name in at_zero}) == at_zero


def test_nan_propagates() -> None:
    names = "Relu", "LeakyRelu", "Elu", "Celu", "Selu", "Softplus", "HardSigmoid", "Sigmoid"
    assert_each({name: (op(name, f32([np.nan])), f32([np.nan])) for name in names})


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


def test_softmax_before_opset_13_flattens() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    functions = {
        "Softmax": partial(scipy.special.softmax, axis=-1),
        "LogSoftmax": partial(scipy.special.log_softmax, axis=-1),
        "Hardmax": lambda flat: np.eye(flat.shape[1])[flat.argmax(-1)],
    }
    shapes = {None: (2, 12), 0: (1, 24), 2: (6, 4), -1: (6, 4), -2: (2, 12)}
    calls = {
        (name, axis): op(name, x, opset=12, **({} if axis is None else {"axis": axis}))
        for name, axis in itertools.product(functions, shapes)
    }
    calls["Softmax", "opset 13"] = op("Softmax", x, opset=13, axis=0)
    found = each_by_both(calls)
    pairs = {("Softmax", "opset 13"): (found.pop(("Softmax", "opset 13")), scipy.special.softmax(x, 0))}
    for (name, axis), y in found.items():
        pairs[name, str(axis)] = y.reshape(shapes[axis]), functions[name](x.reshape(shapes[axis]))
    assert not differences(pairs, rtol=1e-6)


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
