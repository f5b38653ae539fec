"""The com.microsoft domain, quantized."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import axes_of, axis_of, xp
from .linalg import accumulator
from .microsoft import CONV, MICROSOFT, ai, declaring
from .quant import (
    dequantize_linear,
    dynamic_quantize_linear,
    integer_product,
    is_integer,
    qlinear_conv,
    quantize_linear,
    quotient,
    requantize,
    row,
    spread,
)
from .recurrent import layer, lstm_cells, reversals
from .registry import op


@op("QuantizeLinear", domain=MICROSOFT)
def ms_quantize_linear(x, y_scale, y_zero_point=None, *, axis=1):
    return quantize_linear(x, y_scale, y_zero_point, axis=axis)


@op("DequantizeLinear", domain=MICROSOFT)
def ms_dequantize_linear(x, x_scale, x_zero_point=None, *, axis=1):
    return dequantize_linear(x, x_scale, x_zero_point, axis=axis)


def quantized(y, scale, zero_point, dtype):
    """A real tensor quantized; without a zero point to the type given, around zero."""
    return quantize_linear(y, scale, np.zeros((), dtype) if zero_point is None else zero_point)


@op("QLinearAdd", domain=MICROSOFT)
def qlinear_add(A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point=None):
    y = dequantize_linear(A, A_scale, A_zero_point) + dequantize_linear(B, B_scale, B_zero_point)
    return quantized(y, C_scale, C_zero_point, A.dtype)


@op("QLinearMul", domain=MICROSOFT)
def qlinear_mul(A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point=None):
    y = dequantize_linear(A, A_scale, A_zero_point) * dequantize_linear(B, B_scale, B_zero_point)
    return quantized(y, C_scale, C_zero_point, A.dtype)


@op("MulInteger", domain=MICROSOFT)
def mul_integer(A, A_zero_point, B, B_zero_point=None):
    a, b = (
        x.astype(np.int32) - (0 if z is None else z.astype(np.int32)) for x, z in ((A, A_zero_point), (B, B_zero_point))
    )
    return a * b


@op("QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_leaky_relu(X, X_scale, X_zero_point, Y_scale, Y_zero_point=None, *, alpha=0.01):
    x = dequantize_linear(X, X_scale, X_zero_point)
    return quantized(xp(x).where(x >= 0, x, x * alpha), Y_scale, Y_zero_point, X.dtype)


@op("QLinearSigmoid", domain=MICROSOFT)
def qlinear_sigmoid(X, X_scale, X_zero_point, Y_scale, Y_zero_point=None):
    x = jnp.asarray(dequantize_linear(X, X_scale, X_zero_point))
    return quantized(lax.logistic(x), Y_scale, Y_zero_point, X.dtype)


@op("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(X, X_scale, x_zero_point, y_scale, y_zero_point, *, axis=-1, opset):
    """Softmax on quantized values; opset (here an attribute of the node) below 13: over all axes from axis on."""
    x = jnp.asarray(dequantize_linear(X, X_scale, x_zero_point))
    first = axis_of(axis, x.ndim)
    y = jax.nn.softmax(x, axis=first if opset >= 13 else tuple(range(first, x.ndim)))
    return quantize_linear(y, y_scale, y_zero_point)


@op("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(Y_scale, Y_zero_point, *inputs, axis):
    """Concatenate (tensor, scale, zero point) triples, all brought to one quantization."""
    parts = [inputs[i : i + 3] for i in range(0, len(inputs), 3)]
    parts = [quantize_linear(dequantize_linear(*part), Y_scale, Y_zero_point) for part in parts]
    return xp(*parts).concatenate(parts, axis=axis)


@op("QLinearWhere", domain=MICROSOFT)
def qlinear_where(condition, X, x_scale, x_zero_point, Y, y_scale, y_zero_point, z_scale, z_zero_point):
    x, y = dequantize_linear(X, x_scale, x_zero_point), dequantize_linear(Y, y_scale, y_zero_point)
    return quantize_linear(xp(condition, x, y).where(condition, x, y), z_scale, z_zero_point)


@op("QLinearReduceMean", domain=MICROSOFT)
def qlinear_reduce_mean(
    data, data_scale, data_zero_point, reduced_scale, reduced_zero_point=None, *, axes=None, keepdims=1
):
    x = dequantize_linear(data, data_scale, data_zero_point)
    y = xp(x).mean(x, axis=axes_of(axes, x.ndim) if axes else None, keepdims=bool(keepdims))
    return quantized(xp(x).asarray(y), reduced_scale, reduced_zero_point, data.dtype)


def pooled(name, X, x_scale, x_zero_point, y_scale, y_zero_point, channels_last, **attributes):
    x = jnp.asarray(dequantize_linear(X, x_scale, x_zero_point))
    y = ai(name, 22)(jnp.moveaxis(x, -1, 1) if channels_last else x, **attributes)
    return quantized(jnp.moveaxis(y, 1, -1) if channels_last else y, y_scale, y_zero_point, X.dtype)


@op("QLinearAveragePool", domain=MICROSOFT, heavy=True)
def qlinear_average_pool(
    X, x_scale, x_zero_point, y_scale, y_zero_point=None, *, auto_pad="NOTSET", ceil_mode=0, channels_last=0,
    count_include_pad=0, kernel_shape, pads=None, strides=None,
):  # fmt: skip
    """AveragePool between quantized tensors."""
    return pooled(
        "AveragePool", X, x_scale, x_zero_point, y_scale, y_zero_point, channels_last, auto_pad=auto_pad,
        ceil_mode=ceil_mode, count_include_pad=count_include_pad, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip


@op("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(X, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0):
    return pooled("GlobalAveragePool", X, x_scale, x_zero_point, y_scale, y_zero_point, channels_last)


@op("QLinearConv", domain=MICROSOFT, heavy=True)
@declaring(**CONV)
def ms_qlinear_conv(
    x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B=None,
    *, channels_last=0, **attributes,
):  # fmt: skip
    """QLinearConv, the channels last on request."""
    x = jnp.moveaxis(jnp.asarray(x), -1, 1) if channels_last else x
    y = qlinear_conv(x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B, **attributes)
    return jnp.moveaxis(y, 1, -1) if channels_last else y


@op("QGemm", domain=MICROSOFT, heavy=True)
def qgemm(
    A, a_scale, a_zero_point, B, b_scale, b_zero_point, C=None, y_scale=None, y_zero_point=None,
    *, alpha=1.0, transA=0, transB=0,
):  # fmt: skip
    """Gemm of quantized matrices with an int32 C; real numbers unless an output scale is given."""
    y = integer_product(A.T if transA else A, B.T if transB else B, a_zero_point, b_zero_point)
    y = y if C is None else y + jnp.broadcast_to(C, y.shape)
    scale = alpha * a_scale.reshape(()) * row(b_scale)
    if y_scale is None:
        return y.astype(np.float32) * scale
    return requantize(y, quotient(scale, y_scale.reshape(())), y_zero_point.reshape(()))


@op("MatMulIntegerToFloat", domain=MICROSOFT, heavy=True)
def matmul_integer_to_float(A, B, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None):
    """The product of quantized matrices as real numbers, plus a bias."""
    y = integer_product(A, B, a_zero_point, b_zero_point).astype(np.float32)
    y = y * (row(a_scale) * row(b_scale)).astype(np.float32)
    return (y if bias is None else y + bias.astype(np.float32)).astype(a_scale.dtype)


@op("DynamicQuantizeMatMul", domain=MICROSOFT, heavy=True)
def dynamic_quantize_matmul(A, B, b_scale, b_zero_point=None, bias=None):
    """A quantized on the spot, times a quantized B."""
    a, a_scale, a_zero_point = dynamic_quantize_linear(jnp.asarray(A))
    return matmul_integer_to_float(a, B, a_scale, b_scale, a_zero_point, b_zero_point, bias)


def unpack(x, bits):
    """Bytes as the 2-, 4- or 8-bit values packed in them along the last dimension, low bits first."""
    if bits not in (2, 4, 8):
        raise NotImplementedError(f"bits is {bits}; it must be 2, 4 or 8")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((x[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*x.shape[:-1], -1)


@op("MatMulNBits", domain=MICROSOFT, heavy=True)
def matmul_nbits(
    A, B, scales, zero_points=None, g_idx=None, bias=None,
    *, K, N, accuracy_level=0, bits=4, block_size, weight_prepacked=0,
):  # fmt: skip
    """A times the transpose of an [N, K] weight quantized in blocks along K."""
    del accuracy_level  # a leave to compute in less precision, which is not taken
    if weight_prepacked:
        raise NotImplementedError(f"weight_prepacked is {weight_prepacked}: B must be in ONNX's layout (0)")
    blocks, work = -(-K // block_size), accumulator(A.dtype)
    weight = unpack(B.reshape(N, blocks, -1), bits).astype(work)
    scales = scales.reshape(N, blocks).astype(work)
    if zero_points is None:
        zero_points = np.full((N, blocks), 2 ** (bits - 1), work)
    elif zero_points.dtype == np.uint8:
        zero_points = unpack(zero_points.reshape(N, -1), bits)[:, :blocks].astype(work)
    else:
        zero_points = zero_points.reshape(N, blocks).astype(work)
    if g_idx is None:
        weight = ((weight - zero_points[..., None]) * scales[..., None]).reshape(N, -1)[:, :K]
    else:
        zero_points, scales = (jnp.take(jnp.asarray(p), g_idx[:K], axis=1) for p in (zero_points, scales))
        weight = (weight.reshape(N, -1)[:, :K] - zero_points) * scales
    contract = (((A.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(jnp.asarray(A), jnp.asarray(weight.astype(A.dtype)), contract, preferred_element_type=work)
    return (y if bias is None else y + bias.astype(work)).astype(A.dtype)


@op("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    data, indices, scales, zero_points=None, *, bits=4, block_size=128, gather_axis=0, quantize_axis=1
):
    """Gather from a tensor quantized in blocks, as real numbers; an index out of range gives zeros."""
    packed = data.dtype == np.uint8
    gather_axis, quantize_axis = axis_of(gather_axis, data.ndim), axis_of(quantize_axis, data.ndim)
    if gather_axis == quantize_axis:
        raise ValueError(f"gather_axis and quantize_axis are both {gather_axis}; they must differ")
    if zero_points is None and packed:
        zero_points = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    elif zero_points is not None and packed:
        zero_points = unpack(zero_points, bits)[..., : scales.shape[-1]]
    extent = data.shape[gather_axis]
    indices = jnp.asarray(indices)
    live = (indices >= -extent) & (indices < extent)
    at = jnp.where(live, indices % extent, 0)

    def taken(x):
        if x is None:
            return None
        shape = [extent if i == gather_axis else n for i, n in enumerate(x.shape)]
        return jnp.moveaxis(jnp.take(jnp.broadcast_to(x, shape), at.reshape(-1), axis=gather_axis), gather_axis, 0)

    x, scale, zero = taken(data), taken(scales), taken(zero_points)
    x = unpack(x, bits) if packed else x
    axis = quantize_axis + 1 if quantize_axis < gather_axis else quantize_axis  # the gathered axis stands in front
    size = block_size or x.shape[axis]
    work = accumulator(scales.dtype)
    kind = np.int32 if is_integer(x.dtype) else work
    y = x.astype(kind) if zero is None else x.astype(kind) - spread(zero.astype(kind), x.shape, axis, size)
    y = y.astype(work) * spread(scale.astype(work), x.shape, axis, size)
    y = jnp.where(live.reshape(-1, *(1,) * (y.ndim - 1)), y, 0).reshape(*indices.shape, *y.shape[1:])
    source = range(indices.ndim)
    return jnp.moveaxis(y, source, range(gather_axis, gather_axis + indices.ndim)).astype(scales.dtype)


@op("DynamicQuantizeLSTM", domain=MICROSOFT, heavy=True)
def dynamic_quantize_lstm(
    X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, W_scale=None, W_zero_point=None,
    R_scale=None, R_zero_point=None,
    *, activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0,
):  # fmt: skip
    """LSTM with weights quantized as [directions, input, gates], whose other operands are quantized on the spot."""
    count, size = len(reversals(direction)), R.shape[1]
    if W.shape[0] != count or R.shape != (count, size, 4 * size) or hidden_size not in (None, size):
        raise ValueError(f"W {W.shape}, R {R.shape}, hidden_size {hidden_size} and direction {direction!r} disagree")

    def times(weight, scale, zero_point, d):
        scale, zero_point = scale.reshape(count, -1)[d], zero_point.reshape(count, -1)[d]
        return lambda x: dynamic_quantize_matmul(x, weight[d], scale, zero_point)

    if sequence_lens is not None:  # steps behind the longest sequence must not widen the range of X
        steps = jnp.arange(X.shape[0], dtype=np.int32)[:, None, None]
        X = jnp.where(steps < jnp.max(jnp.asarray(sequence_lens)), X, 0)
    gates = jnp.stack([times(W, W_scale, W_zero_point, d)(X) for d in range(count)], axis=2)
    recurs = [times(R, R_scale, R_zero_point, d) for d in range(count)]
    if B is not None:
        gates = gates + B[:, : 4 * size] + B[:, 4 * size :]
    cells = lstm_cells(
        recurs, activations, activation_alpha, activation_beta, clip, direction, P, input_forget, gates.dtype
    )
    return layer(gates, cells, [initial_h, initial_c], sequence_lens, direction, 0, X.dtype, size)
