"""Linear quantization, and exact integer products of quantized tensors."""

from __future__ import annotations

import math
from functools import cache, partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from .. import compat
from ..proto.types import FLOAT6, HOST_ONLY, to_dtype
from .arrays import axis_of, is_known, needs_known, xp
from .cast import is_integer
from .conv import conv
from .conv_rules import Problem, lowering
from .linalg import product
from .registry import op, taking
from .window import WINDOW, taps, window_of

_FLOAT6 = "float6 on the host only, because XLA lacks it"

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def quotient(x, y):
    """``x / y``, correctly rounded.

    XLA replaces division by a broadcast value with multiplication by its reciprocal, which moves ties. It does not if
    the divisor depends on x. On CUDA it divides float32 to within two units in the last place.
    """
    if is_known((x, y)):
        return x / y

    def divided(x, y):
        return x / jnp.where(x != x, x, y)

    if x.dtype != np.float32:
        return divided(x, y)
    return compat.platform_dependent(x, y, cuda=lambda x, y: rounded_quotient(divided(x, y), x, y), default=divided)


def rounded_quotient(near, x, y):
    """The float32 nearest to ``x / y``, from one that is a few units in the last place apart.

    The remainder ``x - near * y`` is exact, because factors of 12 bits have products of 24.
    """
    (n, n_rest), (d, d_rest) = _halves(near), _halves(y)
    remainder = (((x - n * d) - n * d_rest) - n_rest * d) - n_rest * d_rest
    step = lax.stop_gradient(remainder / y)
    return jnp.where(jnp.isfinite(step) & (step != 0), near + step, near)


def _halves(x):
    """Two numbers of at most 12 significant bits whose sum is x."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.uint32) & np.uint32(0xFFFFF000), np.float32)
    return high, x - high


def broadcast_qparam(parameter, shape, axis, block_size=0):
    """A scale or zero point, per tensor, per axis or per block, shaped to broadcast against a tensor of ``shape``."""
    blocks = block_size and parameter.ndim == len(shape)
    if not blocks and parameter.ndim <= 1 and parameter.size == 1:
        return parameter.reshape(())
    axis = axis_of(axis, len(shape))
    expected = tuple(-(-n // block_size) if i == axis else n for i, n in enumerate(shape)) if blocks else (shape[axis],)
    if block_size < 0 or parameter.shape != expected:
        subject = f"a scale or zero point for axis {axis} of {shape}, {block_size=},"
        raise ValueError(f"{subject} must be a scalar or have the shape {expected}, not {parameter.shape}")
    if blocks:
        return xp.repeat(parameter, block_size, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def saturate_to(x, zero_point, dtype, saturate=1):
    """``x`` rounded half to even, plus the zero point, clipped to the range of ``dtype`` (a float dtype only casts)."""
    if dtype in HOST_ONLY:
        why = f"XLA has no {dtype} ({FLOAT6})"
        x, zero_point = (None if v is None else needs_known(v, why) for v in (x, zero_point))
    if not is_integer(dtype):
        x = x if zero_point is None else x + zero_point.astype(x.dtype)
        limit = float(ml_dtypes.finfo(dtype).max)
        return (xp.clip(x, -limit, limit) if saturate and dtype.name in FLOAT8 else x).astype(dtype)
    x = xp.rint(x).astype(np.float64 if x.dtype == np.float64 else np.float32)
    x = x if zero_point is None else x + zero_point.astype(x.dtype)
    low, high = int(ml_dtypes.iinfo(dtype).min), int(ml_dtypes.iinfo(dtype).max)
    x = xp.where(x >= low, xp.minimum(x, x.dtype.type(high)), x.dtype.type(low))  # NaN becomes low
    return x.astype(np.int32).astype(dtype)


@op("QuantizeLinear", since=10, exact=("y_scale",), limits=_FLOAT6)
def quantize_linear(x, y_scale, y_zero_point=None, *, axis=1, block_size=0, output_dtype=0, precision=0, saturate=1):
    """``saturate(round(x / y_scale) + y_zero_point)``, per tensor, axis or block."""
    dtype = to_dtype(output_dtype, "output_dtype") if output_dtype else None
    if y_zero_point is not None:
        if dtype not in (None, y_zero_point.dtype):
            raise ValueError(f"output_dtype ({dtype}) and the type of y_zero_point ({y_zero_point.dtype}) must agree")
        dtype = np.dtype(y_zero_point.dtype)
    scale = broadcast_qparam(y_scale, x.shape, axis, block_size)
    zero_point = None if y_zero_point is None else broadcast_qparam(y_zero_point, x.shape, axis, block_size)
    work = np.dtype(x.dtype if y_scale.dtype == E8M0 else y_scale.dtype)
    work = to_dtype(precision, "precision") if precision else work
    work = np.dtype(np.float64) if is_integer(work) else work
    ratio = quotient(x.astype(work), scale.astype(work))
    return saturate_to(ratio, zero_point, dtype or np.dtype(np.uint8), saturate)


@op("DequantizeLinear", since=10, exact=("x_scale",), limits=f"{_FLOAT6}; a float8e8m0 scale needs output_dtype")
def dequantize_linear(x, x_scale, x_zero_point=None, *, axis=1, block_size=0, output_dtype=0):
    """``(x - x_zero_point) * x_scale``, per tensor, axis or block."""
    dtype = to_dtype(output_dtype, "output_dtype") if output_dtype else np.dtype(x_scale.dtype)
    if dtype == E8M0:
        raise ValueError("a float8e8m0 x_scale does not define the output dtype; set the attribute output_dtype")
    if x.dtype in HOST_ONLY:
        x = needs_known(x, f"XLA has no {x.dtype} ({FLOAT6})")
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    work = np.dtype(np.int32) if is_integer(x.dtype) else wide
    x = x.astype(work)
    if x_zero_point is not None:
        x = x - broadcast_qparam(x_zero_point, x.shape, axis, block_size).astype(work)
    return (x.astype(wide) * broadcast_qparam(x_scale, x.shape, axis, block_size).astype(wide)).astype(dtype)


@op("DynamicQuantizeLinear", since=11, wide=True)
def dynamic_quantize_linear(x):
    """(uint8 tensor, scale, zero point) over the range of the values and zero; an all-zero tensor has scale 1."""
    low, high = xp.min(x, initial=0.0), xp.max(x, initial=0.0)
    scale = xp.where(low == high, x.dtype.type(1), quotient(high - low, xp(x).asarray(255, x.dtype)))
    zero_point = xp.rint(xp.clip(-quotient(low, scale), 0, 255)).astype(np.uint8)
    return saturate_to(quotient(x, scale), zero_point, np.dtype(np.uint8)), scale, zero_point


def signed(x, zero_point):
    """(int8 tensor, int32 zero point) of an 8-bit tensor; uint8 and its zero point are shifted by 128."""
    zero_point = np.zeros((), np.int32) if zero_point is None else zero_point.astype(np.int32)
    if x.dtype == np.int8:
        return x, zero_point
    return (x ^ np.uint8(128)).view(np.int8), zero_point - np.int32(128)


def column(parameter):
    """A scale or zero point per row of a matrix product, as a column."""
    return parameter.reshape(()) if parameter.size == 1 else parameter[:, None] if parameter.ndim == 1 else parameter


def row(parameter):
    """A scale or zero point per column of a matrix product, as a row."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


@op("MatMulInteger", since=10, heavy=True)
def integer_product(A, B, a_zero_point=None, b_zero_point=None):
    """``(A - a_zero_point) @ (B - b_zero_point)`` in int32: one int8 product, corrected by sums of rows and columns."""
    return integer_product_with(B, b_zero_point)(A, a_zero_point)


def integer_product_with(b, b_zero_point=None):
    """``integer_product`` as a function of a and its zero point, with the sums of b hoisted (out of a loop)."""
    vector = b.ndim == 1
    b, zb = signed(b, b_zero_point)
    b, zb = b[:, None] if vector else b, row(zb)
    sums = xp.sum(b.astype(np.int32) - zb, axis=-2, keepdims=True, dtype=np.int32)
    exact = np.dtype(np.float32 if b.shape[-2] * 2**14 <= 2**24 else np.float64)
    converted = cache(lambda: b.astype(exact))  # once: NumPy has fast products of floats alone

    def times(a, a_zero_point=None):
        vectors = (-2,) * (a.ndim == 1) + (-1,) * vector
        a, za = signed(a, a_zero_point)
        a, za = a[None] if a.ndim == 1 else a, column(za)
        if is_known((a, b)):
            y = np.matmul(a.astype(exact), converted()).astype(np.int64).astype(np.int32)
        else:
            y = int8_product(a, b)
        y = y - za * sums
        return xp.squeeze(y - zb * xp.sum(a, axis=-1, keepdims=True, dtype=np.int32), vectors)

    return times


def int8_product(a, b):
    """The product of two int8 tensors in int32.

    On CUDA in bfloat16: XLA's int8 products are twice the result where Triton takes tiles of 16 along the contracted
    axis (jax 0.11.2 on an H100).
    """
    default = partial(product, dtype=np.dtype(np.int32))
    return compat.platform_dependent(a, b, cuda=int8_product_in_bfloat16, default=default)


def int8_product_in_bfloat16(a, b):
    """int8 products summed in float32 over slices whose sums stay within 2**24, so exact, and these in int32."""
    step = 2**24 // 2**14
    slices = (slice(start, start + step) for start in range(0, max(a.shape[-1], 1), step))
    half = np.dtype(ml_dtypes.bfloat16)
    pairs = ((a[..., s].astype(half), b[..., s, :].astype(half)) for s in slices)
    return sum(product(*pair, np.dtype(np.float32)).astype(np.int32) for pair in pairs)


def requantize(x, scale, zero_point, dtype=None):
    """Integer or float sums times a scale, quantized to the dtype of the zero point."""
    return saturate_to(x.astype(np.float32) * scale, zero_point, np.dtype(dtype or zero_point.dtype))


@op("QLinearMatMul", since=10, heavy=True)
def qlinear_matmul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    """The product of two quantized tensors, requantized."""
    f32 = np.float32
    scale = quotient(column(a_scale.astype(f32)) * row(b_scale.astype(f32)), row(y_scale.astype(f32)))
    if is_integer(np.dtype(a.dtype)) and is_integer(np.dtype(b.dtype)):
        y = integer_product(a, b, a_zero_point, b_zero_point)
    else:
        x, w = a.astype(f32) - column(a_zero_point.astype(f32)), b.astype(f32) - row(b_zero_point.astype(f32))
        y = product(x, w, np.dtype(f32))
    return requantize(y, scale, row(y_zero_point))


def max_magnitude(dtype, zero_point):
    """The largest magnitude of an 8-bit value minus its zero point."""
    if not is_known(zero_point):
        return 255
    ends, zero_point = np.iinfo(dtype), np.zeros(1, int) if zero_point is None else zero_point.astype(int)
    return int(max(ends.max - zero_point.min(), zero_point.max() - ends.min))


@op("ConvInteger", since=10, heavy=True, unsharded=True)
@taking(**WINDOW)
def integer_conv(x, w, x_zero_point=None, w_zero_point=None, *, group=1, **attributes):
    """The int32 convolution of 8-bit tensors minus their zero points."""
    window = window_of(x.shape[2:], w.shape[2:], **attributes)
    in_float = partial(_float_conv, zero_points=(x_zero_point, w_zero_point), window=window, group=group)
    if is_known((x, w)):
        return in_float(x, w)
    x, w = jnp.asarray(x), jnp.asarray(w)
    if lowering(Problem(x.dtype, (x.shape[0], *x.shape[2:]), w.shape, window, group), "int8") != "integers":
        return in_float(x, w)
    # XLA:CPU has a fast int8 convolution for channels last, as passes put them; XLA:GPU has none.
    in_integers = partial(signed_conv, zero_points=(x_zero_point, w_zero_point), window=window)
    on_cpu = in_integers if compat.keeps_convolutions() else in_float
    return compat.platform_dependent(x, w, tpu=in_integers, cpu=on_cpu, default=in_float)


def signed_conv(x, w, zero_points, window):
    """One int8 convolution, corrected for the zero points by sums of the weights and of each window."""
    (x, zx), (w, zw) = (signed(*pair) for pair in zip((x, w), zero_points, strict=True))
    zx, per_channel = zx.reshape(()), (-1,) + (1,) * (w.ndim - 2)
    pads = ((0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.pads))
    x, unpadded = lax.pad(x, zx.astype(np.int8), pads), window.unpadded
    y = lax.conv_general_dilated(
        x, w, window.strides, unpadded.pads, rhs_dilation=window.dilations, preferred_element_type=np.int32
    )
    y = y - zx * jnp.sum(w, tuple(range(1, w.ndim)), np.int32).reshape(per_channel)
    if is_known(zw) and not zw.any():
        return y
    window_sums = sum(taps(jnp.sum(x, 1, np.int32, keepdims=True), unpadded))
    return y - zw.reshape(per_channel) * (window_sums - zx * math.prod(w.shape[1:]))


def _float_conv(x, w, zero_points, window, group):
    """float32 convolutions over slices of input channels whose sums stay below 2**24, so exact, added in int32."""
    (zx, zw), per_filter = zero_points, (-1,) + (1,) * (w.ndim - 1)
    largest = max_magnitude(x.dtype, zx) * max_magnitude(w.dtype, zw) * math.prod(w.shape[2:])
    channels = max(w.shape[1], 1)  # of none, one empty slice
    dtype, step = np.dtype(np.float32), (2**24 - 1) // largest if largest else channels
    if not step:
        dtype, step = np.dtype(np.float64), channels
    x, w = (v.astype(dtype) for v in (x, w))
    x = x if zx is None else x - zx.reshape(()).astype(dtype)
    w = w if zw is None else w - zw.reshape(per_filter).astype(dtype)
    grouped = x.reshape(x.shape[0], group, x.shape[1] // group, *x.shape[2:])
    slices = [(grouped[:, :, i : i + step], w[:, i : i + step]) for i in range(0, channels, step)]
    operands = ((v.reshape(v.shape[0], group * v.shape[2], *v.shape[3:]), filters) for v, filters in slices)
    return sum(conv(*pair, window, group).astype(np.int32) for pair in operands)


@op("QLinearConv", since=10, heavy=True)
@taking(**WINDOW)
def qlinear_conv(
    x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B=None, *, group=1, **attributes
):
    """The convolution of two quantized tensors plus an int32 bias, requantized."""
    y = integer_conv(x, w, x_zero_point, w_zero_point, group=group, **attributes)
    x_scale, w_scale, y_scale = (v.astype(np.float32) for v in (x_scale, w_scale, y_scale))
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    y = y if B is None else y + B.reshape(per_channel)
    scale = quotient(x_scale.reshape(()) * w_scale.reshape(per_channel), y_scale.reshape(()))
    return requantize(y, scale, y_zero_point.reshape(()))
