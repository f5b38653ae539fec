"""Quantization: exact integers, ties, saturation, granularities."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from onnx2jax.ops.quant import int8_product_in_bfloat16, rounded_quotient
from onnx2jax.proto.types import to_code
from tests.support.helpers import run_op
from tests.support.joined import differences, joined

RNG = np.random.default_rng(0)
F32 = np.float32
both = pytest.mark.parametrize("jit", [False, True])


def bytes_(dtype, *shape):
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


@both
@pytest.mark.parametrize("opset", [10, 13, 19, 21, 28])
def test_quantization_rounds_the_quotient_half_to_even(jit, opset):
    """XLA multiplies by the reciprocal of a broadcast divisor, which moves about one tie in ten."""
    x = (np.arange(-600, 600, dtype=F32) * F32(0.5) * F32(0.003)).astype(F32)
    scale, zero = F32(0.003), np.int8(3)
    expected = np.clip(np.rint(x / scale) + 3, -128, 127).astype(np.int8)
    result = run_op("QuantizeLinear", x, np.array(scale), np.array(zero), opset=opset, jit=jit)
    np.testing.assert_array_equal(result, expected)


def test_a_quotient_is_rounded_correctly_from_one_nearby():
    """CUDA divides float32 to within two units in the last place, which moves ties."""
    x, y = (RNG.normal(size=100_000).astype(F32) * F32(10) ** RNG.integers(-6, 7, 100_000).astype(F32) for _ in "xy")
    near = (x / y).view(np.int32) + RNG.integers(-2, 3, x.shape).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(rounded_quotient)(near.view(F32), x, y), x / y)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("x", "y"), [(1, 0), (0, 0), (-0.0, 2), (np.inf, 3), (1, np.inf), (np.nan, 1), (3e38, 1e-3)])
def test_quotients_beyond_numbers_stay(x, y):
    near = np.divide(F32(x), F32(y))
    found = np.asarray(jax.jit(rounded_quotient)(near, F32(x), F32(y)))
    np.testing.assert_array_equal(found, near)
    assert np.signbit(found) == np.signbit(near)


def test_the_correction_of_a_quotient_has_no_gradient():
    derived = jax.grad(lambda x: rounded_quotient(x / F32(3), x, jnp.asarray(F32(3))))(F32(2))
    assert float(derived) == pytest.approx(1 / 3)


@both
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (np.uint8, 0, 255), (np.int8, -128, 127), (np.uint16, 0, 65535), (np.int16, -32768, 32767),
        (ml_dtypes.uint4, 0, 15), (ml_dtypes.int4, -8, 7), (ml_dtypes.uint2, 0, 3), (ml_dtypes.int2, -2, 1),
    ],
)  # fmt: skip
def test_integers_saturate(jit, dtype, low, high):
    x = np.array([-1e30, -np.inf, 0.5, 1.5, -0.5, np.inf, 1e30], F32)
    result = run_op("QuantizeLinear", x, np.array(1, F32), opset=25, output_dtype=to_code(dtype), jit=jit)
    assert result.dtype == dtype
    two = min(2, high)
    assert np.asarray(result).astype(int).tolist() == [low, low, 0, two, 0, high, high]


@both
def test_the_scales_type_sets_the_precision(jit):
    x, scale = np.array([2049.0], F32), np.array(1, np.float16)
    code = to_code(np.uint16)
    assert run_op("QuantizeLinear", x, scale, opset=23, output_dtype=code, jit=jit).tolist() == [2048]
    assert run_op("QuantizeLinear", x, scale, opset=23, output_dtype=code, precision=1, jit=jit).tolist() == [2049]


@both
def test_granularities(jit):
    x = RNG.normal(size=(4, 6)).astype(F32)
    for shape, axis, block in (
        ((6,), -1, 0),
        ((4,), 0, 0),
        ((4, 3), 1, 2),
        ((2, 6), 0, 3),
        ((4, 2), 1, 4),
        ((1,), 1, 0),
    ):
        scale = RNG.uniform(0.01, 0.1, shape).astype(F32)
        zero = RNG.integers(0, 20, shape).astype(np.uint8)
        laid = scale, zero
        if block:
            laid = [np.repeat(p, block, axis)[tuple(map(slice, x.shape))] for p in laid]
        elif axis == 0:
            laid = [p[:, None] for p in laid]
        expected = np.clip(np.rint(x / laid[0]) + laid[1], 0, 255)
        y = run_op("QuantizeLinear", x, scale, zero, opset=21, axis=axis, block_size=block, jit=jit)
        np.testing.assert_array_equal(y, expected)
        back = run_op("DequantizeLinear", y, scale, zero, opset=21, axis=axis, block_size=block, jit=jit)
        np.testing.assert_array_equal(back, (expected.astype(F32) - laid[1]) * laid[0])


@pytest.mark.parametrize(("shape", "block"), [((3,), 0), ((2, 3), 4), ((4, 3), 1), ((4, 6), 0)])
def test_mismatched_scale_shapes_raise(shape, block):
    with pytest.raises(ValueError, match="scale"):
        run_op("QuantizeLinear", np.zeros((4, 6), F32), np.ones(shape, F32), opset=21, block_size=block)


def test_types_must_agree():
    x = np.zeros(3, F32)
    with pytest.raises(ValueError, match="must agree"):
        run_op("QuantizeLinear", x, np.array(1, F32), np.array(0, np.int8), opset=21, output_dtype=2)
    with pytest.raises(ValueError, match="output_dtype"):
        run_op("DequantizeLinear", np.zeros(3, np.int8), np.array(2, ml_dtypes.float8_e8m0fnu), opset=24)


@both
def test_float8_saturates_or_not(jit):
    x, scale = np.array([1e6, -np.inf, np.nan], F32), np.array(1, F32)
    for dtype, overflow in ((ml_dtypes.float8_e4m3fn, np.nan), (ml_dtypes.float8_e5m2, np.inf)):
        zero, top = np.zeros((), dtype), float(ml_dtypes.finfo(dtype).max)
        y = run_op("QuantizeLinear", x, scale, zero, opset=19, jit=jit)
        np.testing.assert_array_equal(np.asarray(y).astype(F32), [top, -top, np.nan])
        y = run_op("QuantizeLinear", x, scale, zero, opset=19, saturate=0, jit=jit)
        np.testing.assert_array_equal(np.asarray(y).astype(F32), [overflow, -overflow, np.nan])


@both
def test_dequantize_int32_beyond_float32(jit):
    x = np.array([2**31 - 1, -(2**31)], np.int32)
    y = run_op("DequantizeLinear", x, np.array(2, F32), opset=10, jit=jit)
    np.testing.assert_array_equal(y, x.astype(F32) * 2)


@both
def test_dynamic_quantization_of_constants(jit):
    for x, scale, zero in ((np.zeros(3), 1.0, 0), (np.full(3, 5.1), 0.02, 0), (np.full(3, -5.1), 0.02, 255)):
        y, s, z = run_op("DynamicQuantizeLinear", x.astype(F32), opset=11, n_outputs=3, jit=jit)
        assert float(s) == pytest.approx(scale) and int(z) == zero and (np.asarray(y) == (255 if x[0] > 0 else 0)).all()


def test_integer_products_are_exact():
    """Folded, and compiled."""
    shapes = ((5, 600), (600, 4)), ((2, 3, 7), (2, 7, 4)), ((2, 3, 7), (7, 4)), ((7,), (7, 3)), ((3, 7), (7,))
    multiply, operands, exact = partial(run_op, "MatMulInteger"), {}, {}
    for a, b, (left, right), shifted in product(*[[np.uint8, np.int8]] * 2, shapes, [False, True]):
        case = f"{a.__name__}{left} by {b.__name__}{right}{', shifted' if shifted else ''}"
        A, B = bytes_(a, *left), bytes_(b, *right)
        operands[case] = (A, B, np.array(101, a), np.array([17], b)) if shifted else (A, B)
        exact[case] = (A.astype(np.int64) - 101 * shifted) @ (B.astype(np.int64) - 17 * shifted)
    compiled = joined({case: (multiply, given) for case, given in operands.items()})
    for results in ({case: multiply(*given) for case, given in operands.items()}, compiled):
        assert not differences({case: (results[case], want) for case, want in exact.items()}, rtol=0)


@pytest.mark.parametrize("k", [0, 1, 3, 1024, 1025, 2500])
def test_int8_products_in_bfloat16_are_exact(k):
    """The form for CUDA, whose sums stay within 2**24 also where all are largest."""
    for a, b in ((bytes_(np.int8, 3, k), bytes_(np.int8, k, 4)), (np.full((1, k), -128, np.int8),) * 2):
        b = b if b.shape[0] == k else b.T
        y = jax.jit(int8_product_in_bfloat16)(a, b)
        assert y.dtype == np.int32
        np.testing.assert_array_equal(y, a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize(("platform", "dtype"), [("cuda", "bf16"), ("tpu", "i8"), ("cpu", "i8")])
def test_integer_products_by_platform(platform, dtype):
    """XLA's int8 products are twice the result on CUDA where Triton takes tiles of 16 along the contracted axis."""
    types = [jax.ShapeDtypeStruct(s, np.int8) for s in ((4, 3), (3, 2))]
    traced = jax.jit(lambda a, b: run_op("MatMulInteger", a, b)).trace(*types)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert re.findall(r"dot_general.*: \(tensor<4x3x(\w+)>", text) == [dtype]


@both
def test_zero_points_per_row_and_column(jit):
    A, B, za, zb = bytes_(np.uint8, 5, 7), bytes_(np.int8, 7, 4), bytes_(np.uint8, 5), bytes_(np.int8, 4)
    A_, B_, za_, zb_ = (v.astype(np.int64) for v in (A, B, za, zb))
    expected = (A_ - za_[:, None]) @ (B_ - zb_)
    np.testing.assert_array_equal(run_op("MatMulInteger", A, B, za, zb, jit=jit), expected)
    stacked = run_op("MatMulInteger", A[None], B[None], za[None, :, None], zb[None, None], jit=jit)
    np.testing.assert_array_equal(stacked[0], expected)


@both
def test_requantization_rounds_before_the_zero_point_is_added(jit):
    one, zero = np.array(1, F32), np.array(0, np.int8)
    a, b = np.array([[1], [3]], np.int8), np.array([[1]], np.int8)  # 0.5 and 1.5 after scaling
    y = run_op("QLinearMatMul", a, one, zero, b, one, zero, np.array(2, F32), np.array(1, np.int8), jit=jit)
    assert y.tolist() == [[1], [3]]


@both
@pytest.mark.parametrize(("group", "channels", "kernel"), [(1, 600, 1), (1, 96, 3), (3, 3, 3), (2, 128, 3)])
def test_integer_convolutions_are_exact(jit, group, channels, kernel):
    """Also where a float32 sum would leave the exact integers: with more than 258 products."""
    x = np.full((1, channels, 5, 5), 255, np.uint8)
    x[..., 0, 0] = 254
    w = bytes_(np.uint8, 2 * group, channels // group, kernel, kernel) | np.uint8(129)
    y = run_op("ConvInteger", x, w, np.array(0, np.uint8), np.array(0, np.uint8), group=group, jit=jit)
    shifted = np.lib.stride_tricks.sliding_window_view(x.astype(np.int64), (kernel, kernel), (2, 3))
    shifted = shifted.reshape(1, group, channels // group, *shifted.shape[2:])
    weights = w.astype(np.int64).reshape(group, 2, *w.shape[1:])
    expected = np.einsum("ngchwij,gocij->ngohw", shifted, weights).reshape(y.shape)
    np.testing.assert_array_equal(y, expected)


def test_padding_has_the_value_of_the_zero_point():
    x, w, zero = np.full((1, 1, 2, 2), 10, np.uint8), np.ones((1, 1, 3, 3), np.uint8), np.array(10, np.uint8)
    assert not np.asarray(run_op("ConvInteger", x, w, zero, pads=(1, 1, 1, 1))).any()


def test_qlinear_conv_bias_counts_in_the_scale_of_the_product():
    x, w = np.array([[[[4]]]], np.uint8), np.array([[[[2]]], [[[3]]]], np.int8)
    y = run_op(
        "QLinearConv", x, np.array(0.5, F32), np.array(2, np.uint8), w, np.array([1, 2], F32), np.zeros(2, np.int8),
        np.array(0.25, F32), np.array(5, np.uint8), np.array([3, -1], np.int32),
    )  # fmt: skip
    # (2*2 + 3) * 0.5 / 0.25 + 5 and (2*3 - 1) * 1 / 0.25 + 5
    assert np.asarray(y).ravel().tolist() == [19, 25]


@pytest.mark.parametrize(("x_shape", "w_shape"), [((1, 0, 5, 5), (2, 0, 3, 3)), ((0, 2, 5, 5), (2, 2, 3, 3))])
def test_convolutions_of_no_channels_and_of_no_images(x_shape, w_shape):
    x, w, one, three = np.ones(x_shape, np.uint8), np.ones(w_shape, np.uint8), np.array(1, F32), np.array(3, np.uint8)
    y = run_op("ConvInteger", x, w, three)
    np.testing.assert_array_equal(y, np.zeros((x_shape[0], 2, 3, 3), np.int32), strict=True)
    y = run_op("QLinearConv", x, one, three, w, one, three, one, three, np.array([5, 6], np.int32))
    right = np.zeros_like(y) + np.array([8, 9], np.uint8)[:, None, None]
    np.testing.assert_array_equal(y, right, strict=True)


def test_float8_product():
    a = jnp.array([[1, 2]], jnp.float8_e4m3fn)
    one, zero = np.array(1, F32), np.zeros((), ml_dtypes.float8_e4m3fn)
    y = run_op("QLinearMatMul", a, one, zero, a.T, one, zero, np.array(0.5, F32), zero, opset=21)
    assert y.dtype == a.dtype and float(y[0, 0]) == 10
    for mixed in (np.array([[1, 2]], np.int8), np.array([[1, 2]], np.uint8)):  # A and B have types of their own
        y = run_op("QLinearMatMul", mixed, one, mixed[0, :1] * 0, a.T, one, zero, np.array(0.5, F32), zero, opset=21)
        assert float(y[0, 0]) == 10
