"""The com.microsoft domain: quantized operators."""

from __future__ import annotations

import math
import operator
from functools import partial
from inspect import Parameter
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import quant
from ..activation import leaky_relu, sigmoid
from ..arrays import accumulator, axis_of, xp
from ..elementwise import where
from ..linalg import product
from ..packed import divided_product
from ..pool import POOL, average_pool, global_average_pool
from ..recurrent import LAYER, lstm_layer, reversals
from ..registry import UNSHARDED, MayBeEmpty, resolve, taking
from ..window import WINDOW
from . import microsoft, operands
from .fused import nhwc


@microsoft("QuantizeLinear")
def quantize_linear(x, y_scale, y_zero_point=None, *, axis=1):
    return quant.quantize_linear(x, y_scale, y_zero_point, axis=axis)


@microsoft("DequantizeLinear")
def dequantize_linear(x, x_scale, x_zero_point=None, *, axis=1):
    return quant.dequantize_linear(x, x_scale, x_zero_point, axis=axis)


def qlinear(name, inputs, heavy=False, **attributes):
    """Register a function of floating-point tensors as an operator of quantized ones.

    Inputs are triples (tensor, scale, zero point); the last two are the scale and zero point of the output, which
    without a zero point has the dtype of the first tensor and zero point 0.
    """
    names = inputs.split()
    first = (len(names) - 2) % 3  # leading inputs that are not quantized

    def register(function):
        @microsoft(name, heavy=heavy)
        @taking(*names, **attributes)
        def quantized(*inputs, **attributes):
            inputs = (*inputs, None)[: len(names)]
            triples, (scale, zero_point) = inputs[first:-2], inputs[-2:]
            operands = [quant.dequantize_linear(*triples[i : i + 3]) for i in range(0, len(triples), 3)]
            zero_point = np.zeros((), triples[0].dtype) if zero_point is None else zero_point
            return quant.quantize_linear(function(*inputs[:first], *operands, **attributes), scale, zero_point)

        return function

    return register


REDUCED = "data data_scale data_zero_point? reduced_scale reduced_zero_point?"
UNARY = "X X_scale X_zero_point? Y_scale Y_zero_point?"
BINARY = "A A_scale A_zero_point? B B_scale B_zero_point? C_scale C_zero_point?"

qlinear("QLinearAdd", BINARY)(operator.add)
qlinear("QLinearMul", BINARY)(operator.mul)
qlinear("QLinearLeakyRelu", UNARY, alpha=0.01)(leaky_relu)
qlinear("QLinearSigmoid", UNARY)(sigmoid)
qlinear("QLinearWhere", "condition X x_scale x_zero_point Y y_scale y_zero_point z_scale z_zero_point")(where)
POOLED = "X x_scale x_zero_point{0} y_scale y_zero_point{0}"
qlinear("QLinearGlobalAveragePool", POOLED.format(""), channels_last=0)(partial(nhwc, global_average_pool))
_attributes = {**POOL, "ceil_mode": 0, "channels_last": 0, "count_include_pad": 0}
qlinear("QLinearAveragePool", POOLED.format("?"), heavy=True, **_attributes)(partial(nhwc, average_pool))


@qlinear("QLinearSoftmax", "X X_scale x_zero_point? y_scale y_zero_point", axis=-1, opset=Parameter.empty)
def softmax(x, *, axis, opset):
    """Softmax of the opset given by the node's attribute ``opset``."""
    if (operator := resolve("", "Softmax", opset)) is None:
        raise ValueError(f"opset ({opset}) has no Softmax; it is 1 or more")
    return operator.function(x, axis=axis)


@qlinear("QLinearReduceMean", REDUCED, axes=Parameter.empty, keepdims=Parameter.empty)
def mean(x, *, axes, keepdims):
    return resolve("", "ReduceMean", 18).function(x, axes, keepdims=keepdims)


@microsoft("QLinearConcat")
def qlinear_concat(Y_scale, Y_zero_point, *inputs, axis):
    """Concatenates (tensor, scale, zero point) triples, requantized to one scale and zero point."""
    parts = [inputs[i : i + 3] for i in range(0, len(inputs), 3)]
    parts = [quant.quantize_linear(quant.dequantize_linear(*part), Y_scale, Y_zero_point) for part in parts]
    return xp.concatenate(parts, axis=axis)


@microsoft("MulInteger")
def mul_integer(A, A_zero_point: MayBeEmpty, B, B_zero_point=None):
    pairs = (A, A_zero_point), (B, B_zero_point)
    a, b = (x.astype(np.int32) - (0 if z is None else z.astype(np.int32)) for x, z in pairs)
    return a * b


_CONVOLVED = "x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point B?"


@microsoft("QLinearConv", heavy=True)
@taking(*_CONVOLVED.split(), **WINDOW, group=1, channels_last=0)
def ms_qlinear_conv(*inputs, **attributes):
    """QLinearConv, optionally channels-last."""
    return nhwc(quant.qlinear_conv, *inputs, **attributes)


@microsoft("QGemm", heavy=True)
@operands(A="* *", B="* *")
def qgemm(
    A, a_scale, a_zero_point, B, b_scale, b_zero_point, C=None, y_scale=None, y_zero_point=None,
    *, alpha=1.0, transA=0, transB=0,
):  # fmt: skip
    """Gemm of quantized matrices with an int32 C; floating-point unless an output scale is given."""
    y = quant.integer_product(A.T if transA else A, B.T if transB else B, a_zero_point, b_zero_point)
    y = y if C is None else y + xp.broadcast_to(C, y.shape)
    scale = alpha * a_scale.reshape(()) * quant.row(b_scale)
    if y_scale is None:
        return y.astype(accumulator(scale.dtype)) * scale
    return quant.requantize(y, quant.quotient(scale, y_scale.reshape(())), y_zero_point.reshape(()))


@microsoft("MatMulIntegerToFloat", heavy=True)
def matmul_integer_to_float(A, B, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None):
    """The floating-point product of quantized matrices, plus a bias."""
    wide = accumulator(a_scale.dtype)
    y = quant.integer_product(A, B, a_zero_point, b_zero_point).astype(wide)
    y = y * (quant.row(a_scale) * quant.row(b_scale)).astype(wide)
    return (y if bias is None else y + bias.astype(wide)).astype(a_scale.dtype)


@microsoft("DynamicQuantizeMatMul", heavy=True, wide=True)
def dynamic_quantize_matmul(A, B, b_scale, b_zero_point=None, bias=None):
    """The product of A, dynamically quantized, and a quantized B."""
    a, a_scale, a_zero_point = quant.dynamic_quantize_linear(A)
    return matmul_integer_to_float(a, B, a_scale, b_scale, a_zero_point, b_zero_point, bias)


def unpack(x, bits):
    """Unpacks 2-, 4- or 8-bit values from bytes along the last axis, low bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((x[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*x.shape[:-1], -1)


def unpacked(zero_points, shape, bits):
    """Zero points, packed or not, in this shape; by default the middle of the range."""
    if zero_points is None:
        return np.full(shape, 2 ** (bits - 1), np.uint8)
    if zero_points.dtype != np.uint8:
        return zero_points.reshape(shape)
    width = -(-shape[-1] * bits // 8)
    if zero_points.size != (size := math.prod(shape[:-1]) * width):
        raise ValueError(
            f"zero_points must have the shape {[*shape[:-1], width]}, {size} bytes (it has {zero_points.shape})"
        )
    return unpack(zero_points.reshape(*shape[:-1], -1), bits)[..., : shape[-1]]


def dequantized_nbits(packed, scales, zero_points, groups, bits):
    """The weight [N, K] of packed values [N, blocks, size]; ``groups`` [K] are the block indices of the columns."""
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if zero_points is None else zero_points
    zeros, scales = (xp.take(p, groups, axis=1) for p in (zeros.astype(scales.dtype), scales))
    return (unpack(packed, bits).reshape(len(packed), -1)[:, : len(groups)].astype(scales.dtype) - zeros) * scales


def by_group(g_idx, columns, block_size):
    """A permutation of columns that makes groups contiguous; None if g_idx is traced or groups differ in size."""
    order = np.argsort(g_idx[:columns], kind="stable") if isinstance(g_idx, np.ndarray) else None
    return order if order is not None and np.array_equal(g_idx[order], np.arange(columns) // block_size) else None


def reordered(packed, order, bits):
    """Packed values [N, blocks, size] with their first columns permuted."""
    values = unpack(packed, bits).reshape(len(packed), -1)
    columns = np.concatenate([order, np.arange(len(order), values.shape[1])])
    values = xp.take(values, columns, axis=1).reshape(*packed.shape, -1)
    return sum(values[..., i] << np.uint8(i * bits) for i in range(values.shape[-1]))


Bits = Literal[2, 4, 8]
_LAYOUTS = "bits: 2, 4 and 8; weight_prepacked is unsupported; accuracy_level is ignored"


def matmul_nbits(
    A, B, scales, zero_points=None, g_idx=None, bias=None,
    *, K, N, accuracy_level=0, bits: Bits = 4, block_size, weight_prepacked: Literal[0] = 0, shards=UNSHARDED,
):  # fmt: skip
    """A times the transpose of a weight [N, K] quantized in blocks along K."""
    del accuracy_level, weight_prepacked  # accuracy_level only permits lower precision
    blocks, work = -(-K // block_size), accumulator(A.dtype)
    if B.size != (size := N * blocks * (width := block_size * bits // 8)):
        raise ValueError(f"B must have the shape [N={N}, blocks={blocks}, {width}], {size} bytes (it has {B.shape})")
    x, packed, scales = jnp.asarray(A).reshape(-1, K), B.reshape(N, blocks, -1), scales.reshape(N, blocks)
    zero_points = None if zero_points is None else unpacked(zero_points, (N, blocks), bits)
    order = None if shards.spread else by_group(g_idx, K, block_size)
    if order is not None:
        x, packed, g_idx = jnp.take(x, order, axis=1), reordered(packed, order, bits), None
    if g_idx is None:
        y = divided_product(x, (packed, scales, zero_points), bits, shards)
    else:
        weight = dequantized_nbits(packed, scales.astype(work), zero_points, g_idx[:K], bits)
        y = product(x, weight.astype(A.dtype).T, work)
    y = y if bias is None else y + bias.astype(work)
    return y.reshape(*A.shape[:-1], N).astype(A.dtype)


_BLOCKS = operands(B="N blocks width", scales="N blocks|*", zero_points="N *|*", bias="N")
microsoft("MatMulNBits", product=True, exact=("scales",), limits=_LAYOUTS)(_BLOCKS(matmul_nbits))


@microsoft("GatherBlockQuantized", exact=("scales",), limits="bits: 2, 4 and 8; out-of-range indices yield zeros")
def gather_block_quantized(
    data, indices, scales, zero_points=None, *, bits: Bits = 4, block_size=128, gather_axis=0, quantize_axis=1
):  # fmt: skip
    """Gathers from a block-quantized tensor and dequantizes; out-of-range indices yield zeros."""
    packed = data.dtype == np.uint8
    gather_axis, quantize_axis = axis_of(gather_axis, data.ndim), axis_of(quantize_axis, data.ndim)
    if gather_axis == quantize_axis:
        raise ValueError(f"gather_axis and quantize_axis are both {gather_axis}; they must differ")
    if packed:
        zero_points = unpacked(zero_points, scales.shape, bits)
    extent, indices = data.shape[gather_axis], jnp.asarray(indices)
    valid = (indices >= -extent) & (indices < extent)

    def take(x):
        shape = [extent if i == gather_axis else n for i, n in enumerate(x.shape)]
        return jnp.take(jnp.broadcast_to(x, shape), jnp.where(valid, indices % extent, 0), axis=gather_axis)

    x, scale, zero = jax.tree.map(take, (data, scales, zero_points))
    x = unpack(x, bits) if packed else x
    axis = quantize_axis + (indices.ndim - 1 if gather_axis < quantize_axis else 0)
    y = quant.dequantize_linear(x, scale, zero, axis=axis, block_size=block_size or x.shape[axis])
    return jnp.where(jnp.expand_dims(valid, (*range(gather_axis), *range(gather_axis - data.ndim + 1, 0))), y, 0)


_SCALED = dict.fromkeys(("W_scale", "W_zero_point", "R_scale", "R_zero_point"), "directions|directions gates")


@microsoft("DynamicQuantizeLSTM", heavy=True, wide=True)
@operands(
    X="steps batch size", W="directions size gates", R="directions hidden_size gates", B="directions biases", **_SCALED
)
@taking(**{name: value for name, value in LAYER.items() if name != "layout"}, input_forget=0)
def dynamic_quantize_lstm(
    X, W, R, B: MayBeEmpty, sequence_lens: MayBeEmpty, initial_h: MayBeEmpty, initial_c: MayBeEmpty, P: MayBeEmpty,
    W_scale, W_zero_point, R_scale, R_zero_point, **attributes,
):  # fmt: skip
    """LSTM with quantized weights [directions, input, gates] and dynamically quantized activations."""

    def project(X, W, R, B, direction, _, hidden_size, *__):
        count, size = len(reversals(direction)), R.shape[1]
        if W.shape[0] != count or R.shape != (count, size, 4 * size) or hidden_size not in (None, size):
            raise ValueError(
                f"W {W.shape}, R {R.shape}, hidden_size {hidden_size} and direction {direction!r} do not match"
            )

        def times(weight, scale, zero_point, d):
            scale, zero_point = scale.reshape(count, -1)[d], zero_point.reshape(count, -1)[d]
            product = quant.integer_product_with(weight[d], zero_point)

            def project(x):
                x, x_scale, x_zero_point = quant.dynamic_quantize_linear(x)
                return product(x, x_zero_point).astype(np.float32) * (x_scale * quant.row(scale))

            return project

        if sequence_lens is not None:  # steps after the longest sequence must not affect the range of X
            X = xp.where(np.arange(X.shape[0], dtype=np.int32)[:, None, None] < xp.max(sequence_lens), X, 0)
        gates = xp.stack([times(W, W_scale, W_zero_point, d)(X) for d in range(count)], axis=2)
        gates = gates if B is None else gates + B[:, : 4 * size] + B[:, 4 * size :]
        recur = [lambda _, d=d: partial(times, R, R_scale, R_zero_point, d) for d in range(count)]
        return gates, recur, [None] * count

    return lstm_layer(project, X, W, R, B, sequence_lens, initial_h, initial_c, P, layout=0, **attributes)
