"""The com.microsoft domain: products with 4- and 8-bit weights, and 16-bit integers."""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...proto.types import to_dtype
from .. import quant
from ..activation import swish
from ..arrays import accumulator, check_shapes, widen, xp
from ..attention import check_paired
from ..cast import cast_to
from ..linalg import gemm_wide, product
from ..packed import dependent, float8, looked_up, packed_product
from ..registry import UNSHARDED, MayBeEmpty, resolve, taking
from . import microsoft, operands
from .fused import EMBEDDED, embed_layer_normalization, simplified_layer_normalization, skip_sum
from .quant import Bits, matmul_nbits, unpack

# The values of bitsandbytes' codes 0 to 15: FP4 with the sign in the upper bit, and the 16 quantiles of NF4.
_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
CODES = np.stack([np.concatenate([_FP4, -_FP4]), np.array(_NF4, np.float32)])
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])


def linear(A, weight, bias):
    """A times the transpose of a weight [out, in], half precision accumulated in float32 and rounded once."""
    check_shapes({}, B=(weight, "N K"), A=(A.reshape(-1, A.shape[-1]), "rows K"), bias=(bias, "N"))
    y = product(A, weight.T, accumulator(A.dtype))
    return (y if bias is None else y + widen(bias)).astype(A.dtype)


def packed_linear(A, packed, scales, bias, *, bits, block_size, value, shards, factor=1):
    """A times the transpose of packed codes [N, bytes], with a scale per ``block_size`` of a row, times ``factor``."""
    check_shapes({}, B=(packed, "N bytes"))
    N, K = len(packed), packed.shape[1] * 8 // bits
    blocks, x = -(-K // block_size), jnp.asarray(A).reshape(math.prod(A.shape[:-1]), A.shape[-1])
    check_shapes({"N": N, "K": K, "blocks": blocks},
        A=(x, "rows K"), scales=(scales, "N blocks"), bias=(bias, "N"))  # fmt: skip
    if block_size * bits % 8:  # a block ends within a byte: use one byte per code
        packed, bits = unpack(packed, bits), 8
    packed = jnp.pad(packed, ((0, 0), (0, blocks * block_size * bits // 8 - packed.shape[1])))
    packed = packed.reshape(N, blocks, block_size * bits // 8)
    y = packed_product(x, packed, scales, None, bits, shards.spread, value) * factor
    y = y if bias is None else y + widen(bias)
    return y.reshape(*A.shape[:-1], N).astype(A.dtype)


def dequantized_bnb4(B, absmax, N, K, block_size, quant_type):
    """A weight [N, K] quantized by bitsandbytes: two codes per byte, upper bits first; blocks span rows."""
    codes = xp.stack([B.reshape(-1) >> 4, B.reshape(-1) & 15], axis=1).reshape(-1)[: N * K]
    scales = xp.repeat(widen(absmax), block_size)[: N * K]
    return (xp.take(CODES[quant_type], codes) * scales).reshape(N, K)


@microsoft("MatMulBnb4", heavy=True)
def matmul_bnb4(
    A, B, absmax, *, K, N, block_size, quant_type: Literal[0, 1], training_mode=0, transB=1, shards=UNSHARDED
):  # fmt: skip
    """A times a weight [N, K] (transposed by transB) quantized by bitsandbytes in blocks of the flattened weight."""
    del training_mode  # selects a kernel, not the result
    blocks = -(-N * K // block_size)
    check_shapes({"bytes": (N * K + 1) // 2, "blocks": blocks}, B=(B.reshape(-1), "bytes"), absmax=(absmax, "blocks"))
    if transB and K % block_size == block_size % 2 == 0:
        packed, scales = (B << 4 | B >> 4).reshape(N, K // 2), absmax.reshape(N, K // block_size)
        value = looked_up(CODES[quant_type])
        return packed_linear(A, packed, scales, None, bits=4, block_size=block_size, value=value, shards=shards)
    B = B if shards.spread else dependent(jnp.asarray(B), jnp.asarray(A))
    weight = dequantized_bnb4(B, absmax, N, K, block_size, quant_type).astype(A.dtype)
    return linear(A, weight if transB else weight.T, None)


@microsoft("MatMulBlockQuantizedFp4Weight", heavy=True)
def matmul_fp4(A, B, weight_scale, weight_scale_2, input_scale=None, bias=None, *, block_size=16, shards=UNSHARDED):
    """A times the transpose of an NVFP4 weight [N, K]: two E2M1 per byte, low nibble first, an E4M3 scale per block."""
    del input_scale  # no effect for floating-point activations, according to the schema
    scales = lax.bitcast_convert_type(jnp.asarray(weight_scale), jnp.float8_e4m3fn)
    options = {"bits": 4, "block_size": block_size, "value": looked_up(E2M1), "shards": shards}
    return packed_linear(A, B, scales, bias, **options, factor=weight_scale_2.reshape(()))


@microsoft("MatMulBlockQuantizedFp8Weight", heavy=True, limits="A saturates to the range of float8")
def matmul_fp8(A, B, b_scale, a_scale=None, bias=None, *, block_size=128, shards=UNSHARDED):
    """A times the transpose of a weight [N, K] in E4M3 with a scale per block; with a_scale A is rounded to E4M3."""
    x = widen(A)
    if a_scale is not None:
        x = cast_to(x / a_scale.reshape(()), B.dtype).astype(np.float32) * a_scale.reshape(())
    packed = lax.bitcast_convert_type(jnp.asarray(B), np.uint8)
    options = {"bits": 8, "block_size": block_size, "value": float8, "shards": shards}
    return packed_linear(x, packed, b_scale, bias, **options).astype(A.dtype)


def _normalized(A, skip, norm_scale, epsilon, sum_output):
    """(RMSNormalization of ``A + skip`` if norm_scale is given, the sum); ``sum_output`` requires skip."""
    if (skip is not None and norm_scale is None) or (sum_output and skip is None):
        raise ValueError("skip requires norm_scale, and the output input_skip_bias_sum requires skip")
    total = A if skip is None else skip_sum(A, skip, None).astype(A.dtype)
    return A if norm_scale is None else simplified_layer_normalization(total, norm_scale, epsilon=epsilon)[0], total


@microsoft("MatMulNBitsMlp", heavy=True, limits="activation: silu")
@operands(norm_scale="K", gate_bias="N", up_bias="N")
def matmul_nbits_mlp(
    A, skip: MayBeEmpty, norm_scale: MayBeEmpty, gate_B, gate_scales, gate_bias: MayBeEmpty, up_B, up_scales,
    up_bias=None, *, K, N, accuracy_level=0, activation: Literal["silu"], bits: Bits = 4, block_size, epsilon=1e-5,
    n_outputs=1,
):  # fmt: skip
    """(``silu(gate) * up`` of two MatMulNBits products, optionally of a normalized input; the sum before that)."""
    del activation
    x, total = _normalized(A, skip, norm_scale, epsilon, n_outputs > 1)
    layout = {"K": K, "N": N, "accuracy_level": accuracy_level, "bits": bits, "block_size": block_size}
    rows = (gate_B, gate_scales, gate_bias), (up_B, up_scales, up_bias)
    gate, up = (matmul_nbits(x, B, scales, bias=bias, **layout) for B, scales, bias in rows)
    return (swish(widen(gate)).astype(A.dtype) * up, total)[:n_outputs]


@microsoft("MatMulNBitsQkv", heavy=True)
@operands(norm_scale="K", q_bias="Nq", k_bias="Nkv", v_bias="Nkv")
def matmul_nbits_qkv(
    A, skip: MayBeEmpty, norm_scale, q_B, q_scales, q_bias: MayBeEmpty, k_B, k_scales, k_bias: MayBeEmpty, v_B,
    v_scales, v_bias=None, *, K, Nkv, Nq, accuracy_level=0, bits: Bits = 4, block_size, epsilon=1e-6, n_outputs=3,
):  # fmt: skip
    """(queries, keys and values by MatMulNBits of a normalized input, the sum before normalization)."""
    x, total = _normalized(A, skip, norm_scale, epsilon, n_outputs > 3)
    layout = {"K": K, "accuracy_level": accuracy_level, "bits": bits, "block_size": block_size}
    rows = (Nq, q_B, q_scales, q_bias), (Nkv, k_B, k_scales, k_bias), (Nkv, v_B, v_scales, v_bias)
    outs = (matmul_nbits(x, B, scales, bias=bias, N=N, **layout) for N, B, scales, bias in rows)
    return (*outs, total)[:n_outputs]


_SCALES = "scales are unsupported (the schema does not say whether they multiply or divide); activation: RELU, NONE"


@microsoft("GemmFloat8", product=True, limits=_SCALES)
def gemm_float8(
    A, B, C=None, scaleA=None, scaleB=None, scaleY=None,
    *, activation: Literal["NONE", "", "RELU"] = "", alpha=1.0, beta=0.0, dtype=1, transA=0, transB=0,
):  # fmt: skip
    """Gemm of matrices in float8 or wider, computed in float32 and cast to ``dtype``."""
    if not (scaleA is scaleB is scaleY is None):
        raise NotImplementedError(f"{_SCALES}; scale A, B or Y in a separate node")
    A, B, C = (None if x is None else x.astype(np.float32) for x in (A, B, C))
    y = gemm_wide(A, B, C, alpha, beta, transA, transB)
    return cast_to(jnp.maximum(y, 0) if activation == "RELU" else y, to_dtype(dtype, "dtype"))


@microsoft("MatMulInteger16", heavy=True, limits="a signed and an unsigned matrix are unsupported")
def matmul_integer16(A, B):
    """The product of 16-bit integer matrices, in 32 bits."""
    if A.dtype != B.dtype:
        raise NotImplementedError(f"A is {A.dtype} and B {B.dtype}, which the schema does not define; Cast one of them")
    return product(A, B, np.dtype(np.int32 if A.dtype == np.int16 else np.uint32))


@microsoft("ReduceSumInteger")
def reduce_sum_integer(data, *, axes, keepdims):
    """The sum of 8-bit integers over axes, in 32 bits."""
    data = data.astype(np.int32 if data.dtype == np.int8 else np.uint32)
    return resolve("", "ReduceSum", 13).function(data, np.array(axes), keepdims=keepdims)


_QUANTIZED = (
    "input_ids segment_ids? word_embedding_quant position_embedding_quant segment_embedding? gamma_quant beta_quant "
    "mask? word_embedding_scale position_embedding_scale segment_embedding_scale? gamma_scale beta_scale "
    "word_embedding_zero_point position_embedding_zero_point segment_embedding_zero_point? gamma_zero_point "
    "beta_zero_point"
)


@microsoft("QEmbedLayerNormalization")
@operands(**EMBEDDED, gamma_quant="width", beta_quant="width")
@taking(*_QUANTIZED.split(), epsilon=1e-12)
def q_embed_layer_normalization(*operands, epsilon):
    """EmbedLayerNormalization with quantized tables and parameters."""
    (ids, segments), tables, mask = operands[:2], operands[2:7], operands[7]
    scales, zeros = operands[8:13], operands[13:]
    check_paired(segment_ids=segments, segment_embedding=tables[2])
    dequantized = [
        x if x is None else quant.dequantize_linear(x, scale.reshape(()), zero.reshape(()))
        for x, scale, zero in zip(tables, scales, zeros, strict=True)
    ]
    return embed_layer_normalization(ids, segments, *dequantized, mask, epsilon=epsilon)[:2]
