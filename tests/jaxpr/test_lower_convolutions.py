"""Convolutions that a program was traced with take the platform's form, in loops too; other callers' traces do not."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import onnx2jax
from onnx2jax.jaxpr.passes.any.lower_convolutions import lower
from onnx2jax.jaxpr.program import Equation, Program, as_function
from onnx2jax.ops.conv import conv
from onnx2jax.ops.quant import integer_conv
from onnx2jax.ops.window import window_of
from tests.support.models import text_model
from tests.support.programs import rewritten, traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 5, 7)).astype(np.float32)
W = RNG.normal(size=(6, 6, 3, 3)).astype(np.float32)
CHANNELS_FIRST = (0, 1, 2, 3)


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def convolved(w: Any, x: Any) -> Any:
    return conv(x, w, window_of(x.shape[2:], w.shape[2:], pads=[w.shape[2] // 2] * 4))


def convolutions(closed: Any) -> list[Any]:
    """The axis orders of images in a program and in its loops."""
    found = list[Any]()
    Program.of(closed).any(lambda e: found.append(e) if e.name == "conv_general_dilated" else False)  # type: ignore
    return [e.params["dimension_numbers"].lhs_spec for e in found]


def test_in_a_loop_too() -> None:
    """Where layout assignment does not reach, XLA:CPU has no fast kernel for images channels first."""

    def function(w: Any, x: Any) -> Any:
        return lax.scan(lambda y, _: (convolved(w, y) * np.float32(0.1), None), x, length=3)[0]

    closed = traced(function, np.tile(W, (3, 3, 1, 1)), np.tile(X, (1, 3, 1, 1)))
    lowered = rewritten(lower, closed)
    assert convolutions(closed) == [CHANNELS_FIRST]
    assert convolutions(lowered) and CHANNELS_FIRST not in convolutions(lowered)
    operands = np.tile(W, (3, 3, 1, 1)), np.tile(X, (1, 3, 1, 1))
    before, after = jax.jit(lambda *xs: [as_function(p)(*xs)[0] for p in (closed, lowered)])(*operands)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_calls_of_one_function_are_still_of_one() -> None:
    """Else XLA would compile what each call runs."""
    twice = jax.jit(convolved)
    closed = rewritten(lower, traced(lambda w, x: twice(w, twice(w, x)), W, X))
    first, second = (e.params["jaxpr"] for e in closed.jaxpr.eqns)
    assert first is second and CHANNELS_FIRST not in convolutions(closed)


def test_what_is_lowered_stays() -> None:
    """The exact form of Winograd's algorithm is not computed by it again."""
    closed = rewritten(lower, traced(convolved, f32(128, 128, 3, 3), f32(1, 128, 28, 28)))
    assert str(closed).count("= is_finite") == 1
    again = rewritten(lower, closed)
    assert str(again).count("= is_finite") == 1 and convolutions(again) == convolutions(closed)


def test_of_bytes_with_exact_sums() -> None:
    x, w = RNG.integers(-128, 128, (1, 40, 5, 7), np.int8), RNG.integers(-128, 128, (24, 40, 3, 3), np.int8)

    def function(w: Any, x: Any) -> Any:
        return integer_conv(x, w, pads=[1] * 4)

    closed = traced(function, w, x)
    result, exact = jax.jit(
        lambda w, x: (
            *as_function(rewritten(lower, closed))(w, x),
            lax.conv(x.astype(np.int32), w.astype(np.int32), (1, 1), ((1, 1), (1, 1))),
        )
    )(w, x)
    assert "i8[24,40,3,3]" in str(closed) and result.dtype == np.int32
    np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize(
    ("platform", "x", "w", "names"),
    [
        ("cuda", X, W[:, :, :1, :1], ["dot_general"]),
        ("tpu", X, W[:, :, :1, :1], ["conv_general_dilated"]),
        ("tpu", X[:1, :1, :1], np.ones((1, 1, 1, 256), np.float32), ["conv_general_dilated", "dot_general"]),
    ],
)
def test_with_the_precision_that_was_asked_for(platform: str, x: Any, w: Any, names: list[str]) -> None:
    """In branches, too: a long filter is a product where that is finite."""

    def function(w: Any, x: Any) -> Any:
        return lax.conv(x, w, (1, 1), "SAME", precision="highest")

    found, closed = dict[str, Any](), traced(function, w, x, platform=platform)

    def products(equation: Equation) -> bool:
        if "precision" in equation.params:
            found[equation.name] = equation.params["precision"]
        return False

    Program.of(rewritten(lower, closed, platform=platform)).any(products)
    assert sorted(found) == names
    assert {*found.values()} <= {lax.Precision.HIGHEST, (lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize(
    ("dtype", "result", "extent"),
    [("bfloat16", "float32", 5), ("int8", "int8", 5), ("uint8", "uint8", 5), ("float32", "float32", 0)],
)
def test_what_onnx_does_not_have_is_left(dtype: str, result: str, extent: int) -> None:
    """A user's function can round later than ONNX does, wrap sums of integers around, or have larger windows."""

    def function(w: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", preferred_element_type=result)

    closed = traced(function, W.astype(dtype), X[:, :, :extent].astype(dtype))
    assert rewritten(lower, closed).jaxpr.eqns == closed.jaxpr.eqns


def test_callers_get_all_platforms_after_a_call_of_the_models_own() -> None:
    """JAX keeps traces: neither the model's, nor those of a user's function inside, are for one platform alone."""
    conv = "y = Conv<pads = [1, 1, 1, 1]>(x, weight)"
    text = f"main (float[n, 6, h, w] x) => (float[n, 6, h, w] z) {{ {conv} z = Relu(y) }}"
    inner = onnx2jax.convert(text_model(text, weight=W))
    users = jax.jit(inner)
    np.testing.assert_allclose(inner.replace({"z": users})(X), users(users(X)), rtol=1e-4, atol=1e-4)
    with jax.enable_x64(True):  # as the model was traced
        for function in (inner, users):
            assert "platform_index" in str(jax.make_jaxpr(function)(X))
