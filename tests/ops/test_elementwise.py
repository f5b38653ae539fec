"""Facts about elementwise arithmetic that the official suite does not hold."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from ml_dtypes import bfloat16

from onnx2jax.errors import OperatorError
from tests.support.branches import assert_each, each_by_both, op
from tests.support.helpers import run_op

f32 = partial(np.array, dtype=np.float32)
f64 = partial(np.array, dtype=np.float64)


def both(name: Any, *inputs: Any, **settings: Any) -> Any:
    """The result on known values, after checking that with the first input or all traced it is the same."""
    calls = {count: op(name, *inputs, traced=range(count), **settings) for count in {1, len(inputs)}}
    return np.asarray(each_by_both(calls, rtol=2e-6, atol=1e-30)[1])


def gradient(name: Any, x: Any, *others: Any, **settings: Any) -> Any:
    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.grad(lambda v: run_op(name, v, *others, **settings).sum()))(x))


A = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)

LEGACY = [
    ((), None, (1, 1, 1, 1)),
    ((1, 1), None, (1, 1, 1, 1)),
    ((5,), None, (1, 1, 1, 5)),
    ((4, 5), None, (1, 1, 4, 5)),
    ((3, 4), 1, (1, 3, 4, 1)),
    ((2,), 0, (2, 1, 1, 1)),
    ((3,), -3, (1, 3, 1, 1)),
    ((3, 1, 1), None, (1, 3, 1, 1)),  # CNTK's exporter stretched extents of 1
    ((2, 3, 4, 5), None, (2, 3, 4, 5)),
]


def test_broadcast_before_opset_7_aligns_at_axis() -> None:
    functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    cases = {}
    for (shape, axis, aligned), (name, function) in itertools.product(LEGACY, functions.items()):
        b = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 2
        settings = {"opset": 6, "broadcast": 1} | ({} if axis is None else {"axis": axis})
        for traced in ((0,), (0, 1)):
            call = op(name, A, b, traced=traced, **settings)
            cases[f"{name} of {shape} at {axis}, {traced} traced"] = call, function(A, b.reshape(aligned))
            power = op("Pow", A, np.full_like(b, 2), traced=traced, **settings)
            cases[f"Pow of {shape} at {axis}, {traced} traced"] = power, A**2
    assert_each(cases)


@pytest.mark.parametrize(
    ("shape", "settings"), [((5,), {}), ((4,), {"broadcast": 1}), ((5,), {"broadcast": 1, "axis": 1})]
)
def test_mismatched_shapes_before_opset_7_are_rejected(shape: Any, settings: Any) -> None:
    with pytest.raises(ValueError, match=r"\(5,\)|\(4,\)"):
        run_op("Add", A, np.ones(shape, np.float32), opset=6, **settings)


def test_element_types_are_never_mixed() -> None:
    with pytest.raises(ValueError, match="int32"):
        run_op("Add", np.ones(2, np.int32), np.ones(2, np.int64))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_integer_division_truncates_also_at_extremes(dtype: Any) -> None:
    low = np.iinfo(dtype).min
    a = np.array([7, -7, 7, -7, low, 5, -5], dtype)
    b = np.array([2, 2, -2, -2, -1, 0, 0], dtype)
    assert both("Div", a, b).tolist() == [3, -3, -3, 3, low, -1, -1]
    assert both("Mod", a, b).tolist() == [1, 1, -1, -1, 0, 5, -5]
    assert both("Mod", a, b, fmod=1).tolist() == [1, -1, 1, -1, 0, 5, -5]


@pytest.mark.parametrize("name", ["Div", "Mod"])
def test_integers_by_a_zero_that_xla_knows(name: str) -> None:
    """The zero is a sum of no elements: XLA:CPU would divide by it when it compiles, and end the process."""

    def divided(x: Any) -> Any:
        return run_op(name, np.int32([5]) - x.sum(keepdims=True), x.sum(keepdims=True))

    assert jax.jit(divided)(jnp.zeros(0, jnp.int32)).tolist() == [-1 if name == "Div" else 5]


def test_mod_of_large_int64_is_exact() -> None:
    a = np.array([2**62 + 3], np.int64)
    assert both("Mod", a, np.array([4], np.int64), fmod=1).tolist() == [3]


def test_float_mod_follows_the_sign_tables() -> None:
    inf = np.inf
    a = np.array([7.5, -7.5, 0.0, -0.0, 1.0, -1.0, inf, 1.0], np.float32)
    b = np.array([2.0, 2.0, -3.0, 3.0, inf, inf, 2.0, 0.0], np.float32)
    floor = both("Mod", a, b)
    np.testing.assert_array_equal(floor, np.array([1.5, 0.5, -0.0, 0.0, 1.0, inf, np.nan, np.nan], np.float32))
    assert np.signbit(floor[:4]).tolist() == [False, False, True, False]
    np.testing.assert_array_equal(both("Mod", a, b, fmod=1)[[0, 1, 5, 6, 7]], [1.5, -1.5, -1.0, np.nan, np.nan])


POWERS = [
    ([3, 2, -2, -1, -1, 5, 1, 2], np.int64, [39, 3, 3, 65, 64, -1, -7, 64], np.int64, [3**39, 8, -8, -1, 1, 0, 1, 0]),
    ([3, -1, -1], np.int32, [4, -3, -2], np.int64, [81, -1, 1]),
    ([2, 10], np.int32, [0.5, 3.0], np.float32, [1, 1000]),
    ([-1.0, 2.0, 0.0], np.float32, [2**24 + 1, -1, 0], np.int64, [-1.0, 0.5, 1.0]),
    ([2.0, -2.0], np.float16, [3, 3], np.int8, [8.0, -8.0]),
]


@pytest.mark.parametrize(("x", "x_type", "y", "y_type", "want"), POWERS)
def test_pow_has_the_type_of_its_base(x: Any, x_type: Any, y: Any, y_type: Any, want: Any) -> None:
    got = both("Pow", np.array(x, x_type), np.array(y, y_type))
    assert got.dtype == x_type and got.tolist() == want


def test_negative_powers_are_computed_where_positive_ones_leave_the_range() -> None:
    """By a constant and by a traced exponent: 300**2 is no float16, 1e-38 no normal float32."""
    cases: dict[str, Any] = {}
    for dtype, x, y in (
        (np.float16, 300, -2),
        (np.float16, -50, -3),
        (ml_dtypes.bfloat16, 1e20, -1),
        (np.float32, 1e-19, -2),
    ):
        for traced in ((0,), (0, 1)):
            operands = np.array([x], dtype), np.array(y, np.float32)
            cases[f"{x}**{y} of {np.dtype(dtype)}, {traced}"] = op("Pow", *operands, traced=traced), (operands, dtype)
    for name, found in each_by_both({n: call for n, (call, _) in cases.items()}, rtol=1e-2).items():
        (x, y), dtype = cases[name][1]
        wanted = np.power(x.astype(np.float64), y).astype(dtype)
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=1e-2, err_msg=name)


def test_pow_has_finite_gradients() -> None:
    x = np.array([-2.0, 0.0, 3.0], np.float32)
    for exponent in (np.array(2, np.float32), np.array([2], np.int64), jnp.float32(2)):
        np.testing.assert_allclose(gradient("Pow", x, exponent), 2 * x)
    with jax.enable_x64(True):
        by_exponent = jax.jit(jax.grad(lambda y: run_op("Pow", jnp.asarray(x), y).sum()))(np.float32(2))
    np.testing.assert_allclose(by_exponent, 9 * np.log(3), rtol=1e-6)


def test_max_and_min_propagate_nan_and_split_gradients_at_ties() -> None:
    a, b = np.array([np.nan, 1, 2], np.float32), np.array([1, np.nan, 3], np.float32)
    np.testing.assert_array_equal(both("Max", a, b), [np.nan, np.nan, 3])
    np.testing.assert_array_equal(both("Min", a, b, b), [np.nan, np.nan, 2])
    np.testing.assert_array_equal(gradient("Max", f32([1, 2]), f32([1, 1])), [0.5, 1])


def test_clip_at_every_opset() -> None:
    x = np.array([-np.inf, -3, 0.5, 3, np.inf, np.nan], np.float32)
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(both("Clip", x, opset=6, min=-1.0), [-1, -1, 0.5, 3, largest, np.nan])
    np.testing.assert_array_equal(both("Clip", x, np.float32(-1)), [-1, -1, 0.5, 3, largest, np.nan])
    np.testing.assert_array_equal(run_op("Clip", x, None, np.float32(1))[:4], [-largest, -3, 0.5, 1])
    np.testing.assert_array_equal(both("Clip", x, np.float32(2), np.float32(1)), [1, 1, 1, 1, 1, np.nan])  # min > max
    assert run_op("Clip", x.astype(np.float64), opset=6, max=1.0).dtype == np.float64
    np.testing.assert_array_equal(
        gradient("Clip", f32([-1, 0, 1, 6, 7]), np.float32(0), np.float32(6)), [0, 0, 1, 0, 0]
    )
    with pytest.raises(ValueError, match=r"(?s)'Clip' \(Clip.*reshape.*float32\[6\], in1: float32\[6\]"):
        run_op("Clip", x, x)


def test_round_half_to_even() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -4.5, np.inf], np.float32)
    assert both("Round", x).tolist() == [0, 2, 2, 0, -4, np.inf]


def test_erf_of_integers_truncates() -> None:
    assert both("Erf", np.array([-9, 0, 1, 9], np.int32), opset=9).tolist() == [-1, 0, 0, 1]
    np.testing.assert_allclose(both("Erf", f64([0.3]), opset=9), 0.3286267594591274, rtol=1e-14)


def test_narrow_types_are_preserved() -> None:
    x = np.array([0.25, 4.0], bfloat16)
    for name in ("Sqrt", "Exp", "Abs", "Sign", "Neg", "Floor", "Reciprocal", "Round", "Erf"):
        assert both(name, x).dtype == bfloat16
    assert both("Mean", x, x, x).dtype == bfloat16
    assert both("Abs", np.array([3], np.uint8)).dtype == np.uint8


def test_symbolic_dimensions_propagate_through_arithmetic() -> None:
    def body(x: Any) -> Any:
        shape = np.array(x.shape, object)
        doubled = run_op("Mul", run_op("Add", shape, np.array([1, 0])), np.array(2))
        shape = run_op("Div", run_op("Sub", doubled, np.array([2, 0])), np.array([2, 1]))
        assert run_op("Max", np.array(0), shape[1:]).dtype == np.int64
        mean = x.sum() / run_op("Cast", shape[0:1], to=1)[0]
        return jnp.broadcast_to(mean, tuple(shape)) * run_op("Mul", shape[:1], jnp.arange(2)).astype(jnp.float32).sum()

    with jax.enable_x64(True):
        exported = export.export(jax.jit(body))(jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), np.float32))
        np.testing.assert_array_equal(exported.call(np.ones((3, 4), np.float32)), np.full((3, 8), 12))


def test_experimental_operators_of_old_converters() -> None:
    image = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    bias = f32([1, 2, 3]).reshape(3, 1, 1)
    np.testing.assert_array_equal(
        both("ImageScaler", image, opset=1, scale=2.0, bias=(1.0, 2.0, 3.0)), image * 2 + bias
    )
    np.testing.assert_array_equal(both("Crop", image, opset=1, border=(1, 2, 0, 1)), image[:, :, 2:3, 1:5])
    np.testing.assert_array_equal(
        both("Crop", image, opset=1, border=(1, 1, 0, 0), scale=(2, 3)), image[:, :, 1:3, 1:4]
    )
    np.testing.assert_array_equal(both("Affine", image, opset=1, alpha=2.0, beta=1.0), image * 2 + 1)
    np.testing.assert_array_equal(both("Scale", image, opset=1, scale=3.0), image * 3)
    np.testing.assert_array_equal(run_op("GivenTensorFill", opset=1, values=(1.0, 2.0), shape=(2, 1)), [[1], [2]])
    with pytest.raises(ValueError, match="border"):
        run_op("Crop", image, opset=1, scale=(5, 5))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["Atan", "Exp", "Log", "Sqrt", "Tanh", "Softsign", "Sigmoid", "Elu"])
def test_transcendental_functions_reject_integers(name, jit):
    """NumPy alone would answer in a floating type of its own choice."""
    with pytest.raises(OperatorError, match="float"):
        run_op(name, np.array([1, 2], np.int8), jit=jit)
