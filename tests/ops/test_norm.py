"""Normalization: the statistics of every opset, precisions, zero variance; dropout in and out of training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from onnx2jax import compat
from tests.support.branches import both
from tests.support.helpers import run_op

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 3, 2, 5))
SCALE, BIAS, MEAN = RNG.standard_normal((3, 3))
VAR = RNG.uniform(0.5, 2, 3)


def channels(v):
    return v[:, None, None]


@pytest.mark.parametrize("opset", [1, 6, 7, 9, 14, 15])
def test_batch_normalization_in_inference(opset):
    attributes: Any = {"is_test": 1} if opset < 7 else {}
    got = both("BatchNormalization", X, SCALE, BIAS, MEAN, VAR, opset=opset, **attributes)
    expected = (X - channels(MEAN)) / np.sqrt(channels(VAR) + 1e-5) * channels(SCALE) + channels(BIAS)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("opset", [1, 6, 7, 9, 14, 15])
def test_batch_normalization_in_training(opset):
    n_outputs = 5 if opset < 14 else 3
    training: Any = {"training_mode": 1} if opset >= 14 else {}
    y, mean, var, *saved = both(
        "BatchNormalization", X, SCALE, BIAS, MEAN, VAR, opset=opset, n_outputs=n_outputs, momentum=0.75, **training
    )
    now, spread = X.mean((0, 2, 3)), X.var((0, 2, 3))
    np.testing.assert_allclose(
        y, (X - channels(now)) / np.sqrt(channels(spread) + 1e-5) * channels(SCALE) + channels(BIAS)
    )
    np.testing.assert_allclose(mean, MEAN * 0.75 + now * 0.25)
    np.testing.assert_allclose(var, VAR * 0.75 + spread * 0.25)
    for got, expected in zip(saved, (now, spread), strict=opset < 14):
        np.testing.assert_allclose(got, expected)


@pytest.mark.parametrize("n_outputs", [1, 5])
def test_batch_statistics_with_every_activation(n_outputs):
    shape = X.shape[1:]
    scale, bias, mean, var = RNG.uniform(0.5, 2, (4, *shape))
    got = both("BatchNormalization", X, scale, bias, mean, var, opset=7, spatial=0, n_outputs=n_outputs)
    y = got[0] if n_outputs > 1 else got
    now, spread = (X.mean(0), X.var(0)) if n_outputs > 1 else (mean, var)
    np.testing.assert_allclose(y, (X - now) / np.sqrt(spread + 1e-5) * scale + bias, rtol=1e-6)


@pytest.mark.parametrize(("opset", "attributes"), [(6, {"is_test": 1}), (14, {})])
def test_no_statistics_outputs_in_inference(opset, attributes):
    with pytest.raises(ValueError, match="one output"):
        run_op("BatchNormalization", X, SCALE, BIAS, MEAN, VAR, opset=opset, n_outputs=3, **attributes)


def test_batch_normalization_keeps_each_dtype():
    half = X.astype(np.float16)
    y, mean, _ = run_op(
        "BatchNormalization",
        half,
        *(v.astype(np.float32) for v in (SCALE, BIAS, MEAN, VAR)),
        training_mode=1,
        n_outputs=3,
    )
    assert (y.dtype, mean.dtype) == (np.float16, np.float32)
    one = run_op("BatchNormalization", X[:, 0, 0, 0], *(v[:1] for v in (SCALE, BIAS, MEAN, VAR)), opset=9)
    np.testing.assert_allclose(one, (X[:, 0, 0, 0] - MEAN[0]) / np.sqrt(VAR[0] + 1e-5) * SCALE[0] + BIAS[0])


@pytest.mark.parametrize(
    ("dtype", "stash_type", "stash"),
    [
        (np.float16, 1, np.float32),
        (ml_dtypes.bfloat16, 1, np.float32),
        (np.float64, 1, np.float32),
        (np.float32, 16, ml_dtypes.bfloat16),
        (np.float64, 11, np.float64),
    ],
)
def test_layer_normalization_takes_statistics_in_the_stash_type(dtype, stash_type, stash):
    x = (X * 300).astype(dtype)  # whose squares overflow float16
    scale = np.ones(5, dtype)
    y, mean, inverse = both("LayerNormalization", x, scale, n_outputs=3, stash_type=stash_type)
    assert (y.dtype, mean.dtype, inverse.dtype) == (dtype, stash, stash)
    assert mean.shape == inverse.shape == (4, 3, 2, 1)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    np.testing.assert_allclose(y.astype(np.float64), expected, atol=0.05 if stash_type == 16 else 0.01)


def test_variance_is_accurate_for_large_means():
    x = (np.arange(4) + 1e4).astype(np.float32).reshape(1, 2, 2)
    expected = (np.arange(4) - 1.5) / np.std(np.arange(4))
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    for name, got in (
        ("LayerNormalization", run_op("LayerNormalization", x, np.ones((2, 2), np.float32), axis=1)),
        ("GroupNormalization", run_op("GroupNormalization", x, ones, zeros, num_groups=1)),
    ):
        np.testing.assert_allclose(np.ravel(got), expected, rtol=1e-3, err_msg=name)


def test_rms_normalization_has_the_dtype_of_its_scale():
    y = both("RMSNormalization", X.astype(np.float16), np.ones(5, np.float32), opset=23)
    assert y.dtype == np.float32


def test_group_normalization_of_opset_18_is_rejected():
    with pytest.raises(Exception, match="21"):
        run_op("GroupNormalization", X, SCALE, BIAS, opset=18, num_groups=3)
    with pytest.raises(ValueError, match="divide"):
        run_op("GroupNormalization", X, SCALE, BIAS, num_groups=2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10**12])
def test_lrn_with_an_even_size_is_asymmetric(size):
    x = RNG.standard_normal((1, 6, 2))
    low, high = (size - 1) // 2, size - (size - 1) // 2
    squares = [np.square(x[:, max(c - low, 0) : c + high]).sum(1) for c in range(6)]
    expected = x / (2 + 0.5 / size * np.stack(squares, 1)) ** 0.6
    np.testing.assert_allclose(run_op("LRN", x, alpha=0.5, beta=0.6, bias=2.0, size=size), expected)


def test_group_normalization_of_no_samples():
    assert both("GroupNormalization", np.zeros((0, 4, 3)), np.ones(4), np.ones(4), num_groups=2).shape == (0, 4, 3)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("LpNormalization", {"p": 2}), ("LpNormalization", {"p": 1}), ("MeanVarianceNormalization", {"axes": [0, 1]})],
)
def test_zero_norm_gives_zero_and_zero_gradient(name, attributes):
    np.testing.assert_array_equal(both(name, np.zeros((2, 3)), **attributes), 0)
    with compat.enable_x64():
        assert np.isfinite(jax.grad(lambda x: run_op(name, x, **attributes).sum())(jnp.zeros((2, 3)))).all()


KEY = jax.random.key(0)
ONES = np.ones((40, 50), np.float32)


@pytest.mark.parametrize(("opset", "mask"), [(1, np.float32), (6, np.float32), (7, np.float32), (10, bool), (22, bool)])
def test_dropout_in_inference_keeps_everything(opset, mask):
    attributes: Any = {"is_test": 1} if opset < 7 else {}
    got = both("Dropout", ONES, opset=opset, n_outputs=2, rng=KEY, **attributes)
    np.testing.assert_array_equal(got[0], ONES)
    np.testing.assert_array_equal(got[1], np.ones(ONES.shape, mask), strict=True)


@pytest.mark.parametrize("opset", [1, 6, 12, 13, 22])
def test_dropout_in_training_scales_what_it_keeps(opset):
    inputs = () if opset < 12 else (np.array(0.25, np.float64), np.array(True))
    ratio: Any = {"ratio": 0.25} if opset < 12 else {}
    y, mask = run_op("Dropout", ONES, *inputs, opset=opset, n_outputs=2, rng=KEY, **ratio)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, np.asarray(mask) / np.float32(0.75), rtol=1e-6)
    assert abs(np.mean(np.asarray(mask)) - 0.75) < 0.05


def test_seed_overrides_the_key():
    def draw(key, **seed):
        half = (np.array(0.5, np.float32), np.array(True))
        return np.asarray(run_op("Dropout", ONES, *half, rng=jax.random.key(key), **seed)) > 0

    np.testing.assert_array_equal(draw(1, seed=3), draw(2, seed=3))
    assert (draw(1) != draw(2)).any()
    assert (draw(1, seed=3) != draw(1, seed=4)).any()


@pytest.mark.parametrize("training", [None, np.array(False), np.array(True)])
def test_dropout_ratio_defaults_to_one_half(training):
    kept = np.asarray(run_op("Dropout", ONES, None, training, rng=KEY)) > 0
    assert abs(kept.mean() - (0.5 if training is not None and training else 1)) < 0.05
