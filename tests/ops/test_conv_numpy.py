"""Convolutions, pooling and recurrences of NumPy arrays beside the same operators as XLA runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from onnx2jax import compat
from onnx2jax.ops import conv_numpy
from onnx2jax.ops.registry import resolve

RNG = np.random.default_rng(0)


def both(op_type: str, inputs: list[Any], attributes: Mapping[str, Any], domain: str = "", opset: int = 22) -> Any:
    """The results by NumPy, which must not call XLA, and by XLA."""
    operator = resolve(domain, op_type, opset)
    assert operator is not None and operator.function is not None
    function = operator.function
    with compat.enable_x64():
        ours = function(*inputs, **attributes)
        theirs = jax.jit(lambda *values: function(*values, **attributes))(*inputs)
    ours, theirs = (v if isinstance(v, tuple) else (v,) for v in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is np.ndarray and (a.dtype, a.shape) == (b.dtype, b.shape)
    return list(zip(ours, map(np.asarray, theirs), strict=True))


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


WINDOWS: list[dict[str, Any]] = [
    {"strides": s, "dilations": d, "pads": p}
    for s, d, p in itertools.product(([1, 1], [2, 3]), ([1, 1], [2, 1]), ([0, 0, 0, 0], [1, 2, 0, 3]))
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("channels", "outputs", "groups"), [(4, 6, 1), (4, 6, 2), (4, 4, 4), (4, 8, 4)])
def test_convolutions(window: dict[str, Any], channels: int, outputs: int, groups: int) -> None:
    x, w, b = normal(2, channels, 9, 10), normal(outputs, channels // groups, 3, 2), normal(outputs)
    ((ours, theirs),) = both("Conv", [x, w, b], {**window, "group": groups})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_pieces_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(2, 3, 17, 5), normal(4, 3, 3, 3)
    whole = both("Conv", [x, w], {"pads": [1] * 4, "strides": [2, 1]})[0][0]
    monkeypatch.setattr(conv_numpy, "CACHED", 300)
    ((pieces, theirs),) = both("Conv", [x, w], {"pads": [1] * 4, "strides": [2, 1]})
    np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pieces, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_convolutions_of_every_rank_and_type(shape: tuple[int, ...], dtype: Any) -> None:
    x, w = normal(2, 3, *shape).astype(dtype), normal(4, 3, *[2] * len(shape)).astype(dtype)
    ((ours, theirs),) = both("Conv", [x, w], {"auto_pad": "SAME_UPPER"})
    bound = {2: 2e-2, 8: 1e-12}[ours.dtype.itemsize]
    np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=bound, atol=bound)


@pytest.mark.parametrize("strides", [[1, 1], [2, 3], [4, 1]])
@pytest.mark.parametrize("dilations", [[1, 1], [2, 3]])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [2, 1, 3, 0]])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(strides: list[int], dilations: list[int], pads: list[int], groups: int) -> None:
    x, w = normal(2, 4, 5, 6), normal(4, 3, 3, 2)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
    ((ours, theirs),) = both("ConvTranspose", [x, w], attributes)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(-128, 128), (0, 256)])
def test_quantised_convolutions_are_exact(low: int, high: int) -> None:
    kind = np.int8 if low < 0 else np.uint8
    x = RNG.integers(low, high, (1, 300, 5, 5)).astype(kind)
    w = RNG.integers(-128, 128, (3, 300, 3, 3)).astype(np.int8)
    zero = np.array(high - 1, kind)
    ((ours, theirs),) = both("ConvInteger", [x, w, zero], {})
    np.testing.assert_array_equal(ours, theirs)
    image = x.astype(np.int64) - int(zero)
    first = (image[0, :, :3, :3] * w[0].astype(np.int64)).sum()
    assert ours[0, 0, 0, 0] == first


@pytest.mark.parametrize("depth", [3, 1500])
def test_integer_products_are_exact(depth: int) -> None:
    a, b = np.full((2, depth), 255, np.uint8), np.full((depth, 3), -128, np.int8)
    ((ours, theirs),) = both("MatMulInteger", [a, b, np.array(3, np.uint8), np.array(5, np.int8)], {})
    np.testing.assert_array_equal(ours, theirs)
    assert ours[0, 0] == depth * 252 * -133


@pytest.mark.parametrize("window", [w | {"ceil_mode": c} for w in WINDOWS[::3] for c in (0, 1)])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_pooling(op_type: str, window: dict[str, Any]) -> None:
    attributes = {**window, "kernel_shape": [3, 4]} | {"pads": [min(p, 2) for p in window["pads"]]}
    ((ours, theirs),) = both(op_type, [normal(2, 3, 11, 12)], attributes)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


LAYERS: list[Any] = [
    *itertools.product(("RNN",), (1,), ({}, {"clip": 0.4}, {"layout": 1})),
    *itertools.product(("GRU",), (3,), ({}, {"clip": 0.4}, {"layout": 1}, {"linear_before_reset": 1})),
    *itertools.product(("LSTM",), (4,), ({}, {"clip": 0.4}, {"layout": 1}, {"input_forget": 1})),
]


@pytest.mark.parametrize(("op_type", "gates", "options"), LAYERS)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, [5, 2, 0]])
def test_recurrent_layers(op_type: str, gates: int, options: dict[str, Any], direction: str, lengths: Any) -> None:
    count, size = 2 if direction == "bidirectional" else 1, 3
    x = normal(3, 5, 4) if "layout" in options else normal(5, 3, 4)
    weights = normal(count, gates * size, 4), normal(count, gates * size, size), normal(count, 2 * gates * size)
    state = normal(3, count, size) if "layout" in options else normal(count, 3, size)
    inputs = [x, *weights, None if lengths is None else np.array(lengths, np.int32), state]
    inputs += [state, normal(count, 3 * size)] if op_type == "LSTM" else []
    for ours, theirs in both(op_type, inputs, {"hidden_size": size, "direction": direction, **options}):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_erf_of_float32_is_within_a_unit_in_the_last_place() -> None:
    x = np.concatenate([normal(4000) * 3, [0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 3.9, 4.1]]).astype(np.float32)
    ((ours, _),) = both("Erf", [x], {})
    exact = np.array([math.erf(v) for v in x.tolist()], np.float32)
    np.testing.assert_array_max_ulp(ours[~np.isnan(x)], exact[~np.isnan(x)], 1)
    assert np.isnan(ours[np.isnan(x)]).all() and np.signbit(ours[x == 0]).tolist() == np.signbit(x[x == 0]).tolist()
