"""Convolutions, pooling and recurrences of NumPy arrays beside the same operators as XLA runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnx2jax import compat
from onnx2jax.ops import conv
from onnx2jax.ops.registry import resolve
from tests.support.joined import differences, joined
from tests.support.tiers import extended

RNG = np.random.default_rng(0)


Call = tuple[str, list[Any], Mapping[str, Any]]
"""An operator, its inputs, and its attributes."""


def each_by_both(calls: Mapping[str, Call]) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """The results of each call by NumPy, which must not call XLA, and by XLA, as one program."""
    functions = {name: partial(_function(op_type), **attributes) for name, (op_type, _, attributes) in calls.items()}
    compiled = joined({name: (functions[name], inputs) for name, (_, inputs, _) in calls.items()})
    pairs = {}
    for name, theirs in compiled.items():
        with compat.enable_x64():
            ours = functions[name](*calls[name][1])
        ours, theirs = (v if isinstance(v, tuple) else (v,) for v in (ours, theirs))
        pairs[name] = list(zip(ours, map(np.asarray, theirs), strict=True))
        assert all(type(a) is np.ndarray and (a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs[name]), name
    return pairs


def _function(op_type: str) -> Callable[..., Any]:
    operator = resolve("", op_type, 22)
    assert operator is not None and operator.function is not None
    return operator.function


def both(*call: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The results of an operator by NumPy and by XLA."""
    return each_by_both({"": call})[""]


def assert_close(calls: Mapping[str, Call], bound: float) -> None:
    pairs = {f"{n}, output {i}": pair for n, each in each_by_both(calls).items() for i, pair in enumerate(each)}
    assert not differences(pairs, rtol=bound, atol=bound)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


WINDOWS: list[dict[str, Any]] = [
    {"strides": s, "dilations": d, "pads": p}
    for s, d, p in itertools.product(([1, 1], [2, 3]), ([1, 1], [2, 1]), ([0, 0, 0, 0], [1, 2, 0, 3]))
]


def test_convolutions() -> None:
    calls: dict[str, Call] = {}
    for window, (channels, outputs, groups) in itertools.product(WINDOWS, [(4, 6, 1), (4, 6, 2), (4, 4, 4), (4, 8, 4)]):
        inputs = [normal(2, channels, 9, 10), normal(outputs, channels // groups, 3, 2), normal(outputs)]
        calls[f"{window} of {channels} to {outputs} in {groups}"] = "Conv", inputs, {**window, "group": groups}
    assert_close(calls, 1e-5)


def test_pieces_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(2, 3, 17, 5), normal(4, 3, 3, 3)
    whole = both("Conv", [x, w], {"pads": [1] * 4, "strides": [2, 1]})[0][0]
    monkeypatch.setattr(conv, "CACHED", 300)
    ((pieces, theirs),) = both("Conv", [x, w], {"pads": [1] * 4, "strides": [2, 1]})
    np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pieces, theirs, rtol=1e-5, atol=1e-5)


def test_convolutions_of_every_rank_and_type() -> None:
    calls: dict[str, Call] = {}
    for shape, dtype in itertools.product([(7,), (5, 4), (3, 4, 5)], [np.float16, ml_dtypes.bfloat16, np.float64]):
        x, w = normal(2, 3, *shape).astype(dtype), normal(4, 3, *[2] * len(shape)).astype(dtype)
        calls[f"{shape} {w.dtype}"] = "Conv", [x, w], {"auto_pad": "SAME_UPPER"}
    for name, ((ours, theirs),) in each_by_both(calls).items():
        bound = {2: 2e-2, 8: 1e-12}[ours.dtype.itemsize]
        np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=bound, atol=bound, err_msg=name)


def test_transposed_convolutions() -> None:
    calls: dict[str, Call] = {}
    for strides, dilations, pads, groups in itertools.product(
        [[1, 1], [2, 3], [4, 1]], [[1, 1], [2, 3]], [[0, 0, 0, 0], [2, 1, 3, 0]], [1, 2]
    ):
        attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
        calls[str(attributes)] = "ConvTranspose", [normal(2, 4, 5, 6), normal(4, 3, 3, 2)], attributes
    assert_close(calls, 1e-5)


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


def test_pooling() -> None:
    calls: dict[str, Call] = {}
    for op_type, window, ceil_mode in itertools.product(["MaxPool", "AveragePool"], WINDOWS[::3], (0, 1)):
        pads = [min(p, 2) for p in window["pads"]]
        attributes = {**window, "kernel_shape": [3, 4], "pads": pads, "ceil_mode": ceil_mode}
        calls[f"{op_type} {attributes}"] = op_type, [normal(2, 3, 11, 12)], attributes
    assert_close(calls, 1e-6)


LAYERS: list[Any] = [
    *itertools.product(("RNN",), (1,), ({}, {"clip": 0.4}, {"layout": 1})),
    *itertools.product(("GRU",), (3,), ({}, {"clip": 0.4}, {"layout": 1}, {"linear_before_reset": 1})),
    *itertools.product(("LSTM",), (4,), ({}, {"clip": 0.4}, {"layout": 1}, {"input_forget": 1})),
]


def layers() -> Iterator[tuple[str, Call]]:
    for (op_type, gates, options), direction, lengths in itertools.product(
        LAYERS, ["forward", "reverse", "bidirectional"], [None, [5, 2, 0]]
    ):
        count, size = 2 if direction == "bidirectional" else 1, 3
        x = normal(3, 5, 4) if "layout" in options else normal(5, 3, 4)
        weights = normal(count, gates * size, 4), normal(count, gates * size, size), normal(count, 2 * gates * size)
        state = normal(3, count, size) if "layout" in options else normal(count, 3, size)
        inputs = [x, *weights, None if lengths is None else np.array(lengths, np.int32), state]
        inputs += [state, normal(count, 3 * size)] if op_type == "LSTM" else []
        attributes = {"hidden_size": size, "direction": direction, **options}
        yield f"{op_type} {attributes} {lengths}", (op_type, inputs, attributes)


# Every fifth has all options, directions and lengths between them; compiling recurrences takes most of the time.
@pytest.mark.parametrize("part", [0, *(extended(n) for n in range(1, 5))])
def test_recurrent_layers(part: int) -> None:
    assert_close(dict(itertools.islice(layers(), part, None, 5)), 1e-5)


def test_erf_of_float32_is_within_a_unit_in_the_last_place() -> None:
    x = np.concatenate([normal(4000) * 3, [0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 3.9, 4.1]]).astype(np.float32)
    ((ours, _),) = both("Erf", [x], {})
    exact = np.array([math.erf(v) for v in x.tolist()], np.float32)
    np.testing.assert_array_max_ulp(ours[~np.isnan(x)], exact[~np.isnan(x)], 1)
    assert np.isnan(ours[np.isnan(x)]).all() and np.signbit(ours[x == 0]).tolist() == np.signbit(x[x == 0]).tolist()
