"""Linear quantization, and products of quantized tensors in exact integers."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..proto.dtypes import to_dtype
from .arrays import axis_of, is_known, needs_known, xp
from .cast import is_integer
from .conv import WINDOW, conv, taps, window_of
from .linalg import product
from .registry import op, taking

_FLOAT6 = "float6 on the host only: XLA has none"

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
FLOAT6 = ("float6_e2m3fn", "float6_e3m2fn")
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def quotient(x, y):
    """``x / y``, correctly rounded: XLA turns division by a broadcast value into a product with its
    reciprocal, which moves ties; it leaves a divisor alone that depends on x."""
    return x / y if is_known((x, y)) else x / jnp.where(x != x, x, y)


def spread(parameter, shape, axis, block_size=0):
    """A scale or zero point laid out against a tensor: one for all, one a slice of the axis, or one a block."""
    blocks = block_size and parameter.ndim == len(shape)
    if not blocks and parameter.ndim <= 1 and parameter.size == 1:
        return parameter.reshape(())
    axis = axis_of(axis, len(shape))
    fitting = tuple(-(-n // block_size) if i == axis else n for i, n in enumerate(shape)) if blocks else (shape[axis],)
    if block_size < 0 or parameter.shape != fitting:
        given = f"a scale or zero point for axis {axis} of {shape}, {block_size=},"
        raise ValueError(f"{given} must be one number or have the shape {fitting}, not {parameter.shape}")
    if blocks:
        return xp.repeat(parameter, block_size, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def saturate_to(x, zero_point, dtype, saturate=1):
    """Round to even, add the zero point, and clip to the range of dtype (a float type rounds by itself)."""
    if dtype.name in FLOAT6:
        x, zero_point = (None if v is None else needs_known(v, f"XLA has no {dtype}") for v in (x, zero_point))
    if not is_integer(dtype):
        x = x if zero_point is None else x + zero_point.astype(x.dtype)
        limit = float(ml_dtypes.finfo(dtype).max)
        return (xp.clip(x, -limit, limit) if saturate and dtype.name in FLOAT8 else x).astype(dtype)
    x = xp.rint(x).astype(np.float64 if x.dtype == np.float64 else np.float32)
    x = x if zero_point is None else x + zero_point.astype(x.dtype)
    low, high = int(ml_dtypes.iinfo(dtype).min), int(ml_dtypes.iinfo(dtype).max)
    x = xp.where(x >= low, xp.minimum(x, x.dtype.type(high)), x.dtype.type(low))  # NaN becomes low
    return x.astype(np.int32).astype(dtype)


@op("QuantizeLinear", since=10, limits=_FLOAT6)
def quantize_linear(x, y_scale, y_zero_point=None, *, axis=1, block_size=0, output_dtype=0, precision=0, saturate=1):
    """``saturate(round(x / y_scale) + y_zero_point)``, per tensor, axis or block."""
    dtype = to_dtype(output_dtype) if output_dtype else None
    if y_zero_point is not None:
        if dtype not in (None, y_zero_point.dtype):
            raise ValueError(f"output_dtype ({dtype}) and the type of y_zero_point ({y_zero_point.dtype}) must agree")
        dtype = np.dtype(y_zero_point.dtype)
    scale = spread(y_scale, x.shape, axis, block_size)
    zero_point = None if y_zero_point is None else spread(y_zero_point, x.shape, axis, block_size)
    work = to_dtype(precision) if precision else np.dtype(x.dtype if y_scale.dtype == E8M0 else y_scale.dtype)
    work = np.dtype(np.float64) if is_integer(work) else work
    ratio = quotient(x.astype(work), scale.astype(work))
    return saturate_to(ratio, zero_point, dtype or np.dtype(np.uint8), saturate)


@op("DequantizeLinear", since=10, limits=f"{_FLOAT6}; a float8e8m0 scale needs output_dtype")
def dequantize_linear(x, x_scale, x_zero_point=None, *, axis=1, block_size=0, output_dtype=0):
    """``(x - x_zero_point) * x_scale``, per tensor, axis or block."""
    dtype = to_dtype(output_dtype) if output_dtype else np.dtype(x_scale.dtype)
    if dtype == E8M0:
        raise ValueError("a float8e8m0 x_scale leaves the type of the result open; give the attribute output_dtype")
    if x.dtype.name in FLOAT6:
        x = needs_known(x, f"XLA has no {x.dtype}")
    work = np.int32 if is_integer(x.dtype) else np.float32
    x = x.astype(work)
    if x_zero_point is not None:
        x = x - spread(x_zero_point, x.shape, axis, block_size).astype(work)
    return (x.astype(np.float32) * spread(x_scale, x.shape, axis, block_size).astype(np.float32)).astype(dtype)


@op("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(x):
    """Quantize to uint8 over the range of the values and zero; an all-zero tensor has scale 1."""
    low, high = xp.min(x, initial=0.0), xp.max(x, initial=0.0)
    scale = xp.where(low == high, x.dtype.type(1), quotient(high - low, xp(x).asarray(255, x.dtype)))
    zero_point = xp.rint(xp.clip(-quotient(low, scale), 0, 255)).astype(np.uint8)
    return saturate_to(quotient(x, scale), zero_point, np.dtype(np.uint8)), scale, zero_point


def signed(x, zero_point):
    """An 8-bit tensor as int8 with its zero point as int32: uint8 is shifted by 128, as is its zero point."""
    zero_point = np.zeros((), np.int32) if zero_point is None else zero_point.astype(np.int32)
    if x.dtype == np.int8:
        return jnp.asarray(x), zero_point
    return lax.bitcast_convert_type(x ^ np.uint8(128), np.int8), zero_point - np.int32(128)


def column(parameter):
    """A scale or zero point of the rows of a matrix product: a vector stands upright."""
    return parameter.reshape(()) if parameter.size == 1 else parameter[:, None] if parameter.ndim == 1 else parameter


def row(parameter):
    """A scale or zero point of the columns of a matrix product."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


def integer_product(a, b, a_zero_point=None, b_zero_point=None):
    """``(a - a_zero_point) @ (b - b_zero_point)`` in int32 from one int8 product: the zero points enter
    through the sums over rows and columns."""
    return product_by(b, b_zero_point)(a, a_zero_point)


def product_by(b, b_zero_point=None):
    """``integer_product`` as a function of a and its zero point: what b alone decides is computed before, which a loop
    over time calls for."""
    stands = b.ndim == 1
    b, zb = signed(b, b_zero_point)
    b, zb = b[:, None] if stands else b, row(zb)
    sums = jnp.sum(b.astype(np.int32) - zb, axis=-2, keepdims=True, dtype=np.int32)

    def times(a, a_zero_point=None):
        vectors = (-2,) * (a.ndim == 1) + (-1,) * stands
        a, za = signed(a, a_zero_point)
        a, za = a[None] if a.ndim == 1 else a, column(za)
        y = product(a, b, np.dtype(np.int32)) - za * sums
        return jnp.squeeze(y - zb * jnp.sum(a, axis=-1, keepdims=True, dtype=np.int32), vectors)

    return times


@op("MatMulInteger", since=10, heavy=True)
def matmul_integer(A, B, a_zero_point=None, b_zero_point=None):
    """The product of two 8-bit tensors less their zero points, in int32."""
    return integer_product(A, B, a_zero_point, b_zero_point)


def requantize(x, scale, zero_point, dtype=None):
    """int32 sums (or float ones) times a scale, as a quantized tensor of the zero point's type."""
    return saturate_to(x.astype(np.float32) * scale, zero_point, np.dtype(dtype or zero_point.dtype))


@op("QLinearMatMul", since=10, heavy=True)
def qlinear_matmul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    """The product of two quantized tensors, quantized again."""
    f32 = np.float32
    scale = quotient(column(a_scale.astype(f32)) * row(b_scale.astype(f32)), row(y_scale.astype(f32)))
    if is_integer(np.dtype(a.dtype)):
        y = integer_product(a, b, a_zero_point, b_zero_point)
    else:
        x, w = a.astype(f32) - column(a_zero_point.astype(f32)), b.astype(f32) - row(b_zero_point.astype(f32))
        y = product(x, w, np.dtype(f32))
    return requantize(y, scale, row(y_zero_point))


def reach(dtype, zero_point):
    """The largest magnitude of an 8-bit value less its zero point."""
    if not is_known(zero_point):
        return 255
    ends, zero_point = np.iinfo(dtype), np.zeros(1, int) if zero_point is None else zero_point.astype(int)
    return int(max(ends.max - zero_point.min(), zero_point.max() - ends.min))


MOST_SUMMANDS = 2**31 // 2**14 - 1
"""As many products of two signed 8-bit numbers stay below 2**31."""
FEW_CHANNELS = 16
"""XLA:CPU has a fast kernel for convolutions, of 8 bits or of floats, that read or make more channels than this."""


def integer_conv(x, w, x_zero_point, w_zero_point, group, **attributes):
    """A convolution of 8-bit tensors less their zero points, in int32."""
    window = window_of(x.shape[2:], w.shape[2:], **attributes)
    x, w = jnp.asarray(x), jnp.asarray(w)
    in_float = partial(_float_conv, zero_points=(x_zero_point, w_zero_point), window=window, group=group)
    if group > 1 or math.prod(w.shape[1:]) > MOST_SUMMANDS or max(w.shape[:2]) <= FEW_CHANNELS:
        return in_float(x, w)
    # That of 8-bit integers serves a CPU too, where the optimiser puts the channels last; XLA:GPU has none.
    in_integers = partial(signed_conv, zero_points=(x_zero_point, w_zero_point), window=window)
    return lax.platform_dependent(x, w, tpu=in_integers, default=in_float)


def signed_conv(x, w, zero_points, window):
    """One convolution of int8; the zero points enter through sums of the weights and of what the window holds."""
    (x, zx), (w, zw) = (signed(*pair) for pair in zip((x, w), zero_points, strict=True))
    zx, upright = zx.reshape(()), (-1,) + (1,) * (w.ndim - 2)
    around = ((0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.pads))
    x, inside = lax.pad(x, zx.astype(np.int8), around), window.unpadded
    y = lax.conv_general_dilated(
        x, w, window.strides, inside.pads, rhs_dilation=window.dilations, preferred_element_type=np.int32
    )
    y = y - zx * jnp.sum(w, tuple(range(1, w.ndim)), np.int32).reshape(upright)
    if is_known(zw) and not zw.any():
        return y
    held = sum(taps(jnp.sum(x, 1, np.int32, keepdims=True), inside))
    return y - zw.reshape(upright) * (held - zx * math.prod(w.shape[1:]))


def _float_conv(x, w, zero_points, window, group):
    """Convolutions of float32, which are exact while every sum stays below 2**24.

    More input channels than that allows are added up in int32, so many at a time.
    """
    (zx, zw), upright = zero_points, (-1,) + (1,) * (w.ndim - 1)
    largest = reach(x.dtype, zx) * reach(w.dtype, zw) * math.prod(w.shape[2:])
    dtype, step = np.dtype(np.float32), (2**24 - 1) // largest if largest else w.shape[1]
    if not step:
        dtype, step = np.dtype(np.float64), w.shape[1]
    x, w = (v.astype(dtype) for v in (x, w))
    x = x if zx is None else x - zx.reshape(()).astype(dtype)
    w = w if zw is None else w - zw.reshape(upright).astype(dtype)
    grouped = x.reshape(x.shape[0], group, -1, *x.shape[2:])
    pieces = (slice(start, start + step) for start in range(0, w.shape[1], step))
    some = ((grouped[:, :, piece].reshape(x.shape[0], -1, *x.shape[2:]), w[:, piece]) for piece in pieces)
    return sum(conv(*operands, window, group).astype(np.int32) for operands in some)


@op("ConvInteger", since=10, heavy=True, unsharded=True)
@taking(**WINDOW)
def conv_integer(x, w, x_zero_point=None, w_zero_point=None, *, group=1, **attributes):
    """The convolution of two 8-bit tensors less their zero points, in int32."""
    return integer_conv(x, w, x_zero_point, w_zero_point, group, **attributes)


@op("QLinearConv", since=10, heavy=True)
@taking(**WINDOW)
def qlinear_conv(
    x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B=None, *, group=1, **attributes
):
    """The convolution of two quantized tensors plus an int32 bias, quantized again."""
    y = integer_conv(x, w, x_zero_point, w_zero_point, group, **attributes)
    upright = (-1,) + (1,) * (x.ndim - 2)
    y = y if B is None else y + B.reshape(upright)
    scale = quotient(x_scale.reshape(()) * w_scale.reshape(upright), y_scale.reshape(()))
    return requantize(y, scale, y_zero_point.reshape(()))
