"""Maxima and rearrangements of what follows from bytes are taken of the bytes: the same numbers, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, check_jaxpr, jaxpr_as_fun

from onnx2jax import compat
from onnx2jax.ops.pool import max_pool
from onnx2jax.ops.quant import dequantize_linear, quantize_linear
from onnx2jax.runtime.optimize.integers import in_integers

IMAGE = np.random.default_rng(0).integers(0, 256, (2, 3, 9, 8), np.uint8)
SCALE, OTHER, ZERO = np.float32(0.0274), np.float32(0.031), np.uint8(7)
CHANNELS = np.float32([0.1, 0.2, 0.3])


def pooled(x: Any) -> Any:
    return max_pool(x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])


def real(x: Any, scale: Any = SCALE, zero: Any = ZERO) -> Any:
    return dequantize_linear(x, scale, zero)


def quantised(x: Any, scale: Any = SCALE) -> Any:
    return quantize_linear(x, scale, ZERO)


Case = Callable[[Any], Any]
ALL_BYTES: dict[str, Case] = {
    "maxima": lambda x: quantised(pooled(real(x))),
    "of wide windows, at once": lambda x: quantised(
        lax.reduce_window(real(x), -np.inf, lax.max, (1, 1, 5, 5), (1, 1, 1, 1), [(0, 0)] * 2 + [(2, 2)] * 2)
    ),
    "of an image": lambda x: quantised(jnp.max(real(x), (2, 3))),
    "of parts": lambda x: quantised(jnp.maximum(real(x[:1]), real(x[1:]))),
    "one tensor beside another": lambda x: quantised(jnp.concatenate([real(x)[:, :, :5, :4], pooled(real(x))], 1)),
    "other axes and pixels repeated": lambda x: quantised(jnp.repeat(real(x).mT, 2, 1).reshape(12, -1)),
    "padding that a byte stands for": lambda x: quantised(lax.pad(real(x), np.float32(0), [(1, 2, 0)] * 4)),
}
MAXIMA_OF_BYTES: dict[str, Case] = {
    "to another scale": lambda x: quantised(pooled(real(x)), OTHER),
    "negative numbers cut off": lambda x: quantised(pooled(jax.nn.relu(real(x))), OTHER),
    "int8": lambda x: quantised(pooled(real(lax.bitcast_convert_type(x, np.int8), zero=np.int8(-3))), OTHER),
    "read as floats, too": lambda x: pooled(real(x)) + real(x)[:, :, :5, :4],
}
MAXIMA_OF_FLOATS: dict[str, Case] = {
    "a negative scale": lambda x: quantised(pooled(real(x, -SCALE)), -SCALE),
    "infinity, which makes NaN of zero": lambda x: pooled(real(x, np.float32(np.inf))),
    "a scale that rounds to zeros of two signs": lambda x: pooled(real(x, np.float32(1e-45))),
    "a scale a channel": lambda x: pooled(real(x, CHANNELS, None)),
    "windows of padding alone": lambda x: max_pool(real(x), kernel_shape=[1, 1], pads=[1, 1, 1, 1]),
    "two scales": lambda x: jnp.maximum(real(x), real(x, OTHER)),
    "an order that a table does not keep": lambda x: pooled(abs(real(x))),
}
CASES = ALL_BYTES | MAXIMA_OF_BYTES | MAXIMA_OF_FLOATS


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[Any, Any]]:
    with compat.enable_x64():
        traced = {name: jax.make_jaxpr(lambda x, f=f: [f(x)])(IMAGE) for name, f in CASES.items()}
        return {name: (closed, in_integers(closed)) for name, closed in traced.items()}


@pytest.fixture(scope="module")
def results(programs: dict[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    with compat.enable_x64():
        return jax.jit(lambda x: {n: [jaxpr_as_fun(p)(x)[0] for p in pair] for n, pair in programs.items()})(IMAGE)


def maxima(closed: Any) -> set[str]:
    """The types of arrays that maxima are taken of."""
    names = ("max", "reduce_max", "reduce_window_max")
    equations = (e for e in closed.jaxpr.eqns if not any(isinstance(v, Literal) for v in e.invars))
    return {e.invars[0].aval.dtype.name for e in equations if e.primitive.name in names}


@pytest.mark.parametrize("name", CASES)
def test_no_number_changes(name: str, programs: Any, results: Any) -> None:
    check_jaxpr(programs[name][1].jaxpr)
    before, after = map(np.asarray, results[name])
    assert before.dtype == after.dtype
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("name", ALL_BYTES)
def test_nothing_is_left_but_bytes(name: str, programs: Any) -> None:
    made = [v.aval for e in programs[name][1].jaxpr.eqns for v in e.outvars if v.aval.shape]
    assert {a.dtype.name for a in made if "float" in a.dtype.name} == set()


@pytest.mark.parametrize("name", MAXIMA_OF_BYTES)
def test_maxima_are_those_of_bytes(name: str, programs: Any) -> None:
    assert maxima(programs[name][1]) <= {"uint8", "int8"}


@pytest.mark.parametrize("name", MAXIMA_OF_FLOATS)
def test_maxima_stay_where_the_bytes_have_another_order(name: str, programs: Any) -> None:
    closed, changed = programs[name]
    assert "float32" in maxima(closed) | maxima(changed) or changed is closed
