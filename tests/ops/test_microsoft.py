"""The com.microsoft domain: onnxruntime where it has a kernel, arithmetic by hand where it has none."""

from __future__ import annotations

import functools
from itertools import product

import jax
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnx2jax.ops.microsoft.quant import unpack
from onnx2jax.ops.packed import packed_product
from tests.support.helpers import run_op
from tests.support.joined import MICROSOFT, differences, results_of

RNG = np.random.default_rng(0)
F32, I32 = np.float32, functools.partial(np.array, dtype=np.int32)


def real(*shape):
    return (RNG.normal(size=shape) * 0.7).astype(F32)


def scalar(value, dtype=np.float32):
    return np.array(value, dtype)


def bytes_(dtype, *shape):
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def seven_bits(*shape: int) -> np.ndarray:
    """int8 weights of 7 bits: without VNNI, onnxruntime adds two products with uint8 in 16 bits, and saturates."""
    return RNG.integers(-64, 64, shape).astype(np.int8)


def onnxruntime_says(name, inputs, n_outputs, attributes):
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    given = {n: x for n, x in zip(names, inputs, strict=True) if n}
    typed = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in given.items()
    ]
    outputs = [f"y{i}" for i in range(n_outputs)]
    node = helper.make_node(name, names, outputs, domain=MICROSOFT, **attributes)
    graph = helper.make_graph([node], "g", typed, [onnx.ValueInfoProto(name=o) for o in outputs])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    model = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, given)


HEADS, SIZE = 4, 16
HIDDEN = HEADS * SIZE
U8, S8 = scalar(120, np.uint8), scalar(-7, np.int8)
SX, SW, SY = scalar(0.02), scalar(0.015), scalar(0.04)
ANGLES = real(16, SIZE // 2)


def past(length):
    return [real(2, HEADS // 2, length, SIZE) for _ in range(2)]


def grouped(queries):
    return [real(2, queries, HIDDEN), real(2, queries, HIDDEN // 2), real(2, queries, HIDDEN // 2)]


GROUPED = {"num_heads": HEADS, "kv_num_heads": HEADS // 2}
PROJECTION = [real(2, 3, 16), real(16, 3 * HIDDEN), real(3 * HIDDEN)]
QKV = [real(2, 3, HIDDEN) for _ in range(3)]
A5 = bytes_(np.uint8, 5, 12)
KV6 = [real(2, 6, HIDDEN), real(2, 6, 12)]
BIAS3 = [None, None, None, real(1, HEADS, 3, 3), real(HEADS)]
CASES = [
    ("FusedMatMul", [real(2, 4, 3), real(2, 5, 4)], 1, {"transA": 1, "transB": 1, "alpha": 0.5}),
    ("FusedMatMul", [real(3, 2, 4), real(2, 4, 5)], 1, {"transBatchA": 1}),
    ("FusedMatMul", [real(2, 3, 4), real(5, 2, 4)], 1, {"transBatchB": 1, "transB": 1}),
    ("FastGelu", [real(2, 8), real(8)], 1, {}),
    ("QuickGelu", [real(2, 8)], 1, {"alpha": 1.1}),
    ("BiasGelu", [real(2, 8), real(8)], 1, {}),
    ("FusedConv", [real(1, 4, 6, 6), real(8, 4, 3, 3), real(8), real(1, 8, 4, 4)], 1, {"activation": "Relu"}),
    ("FusedConv", [real(1, 4, 6, 6), real(8, 4, 3, 3)], 1, {"activation": "Clip", "activation_params": (-0.2, 0.3)}),
    ("FusedGemm", [real(3, 4), real(4, 5), real(5)], 1, {"activation": "LeakyRelu", "activation_alpha": 0.2}),
    ("SkipLayerNormalization", [real(2, 3, 8), real(3, 8), real(8), real(8), real(8)], 4, {"epsilon": 1e-3}),
    (
        "EmbedLayerNormalization",
        [I32([[1, 5, 9]]), I32([[0, 1, 1]]), real(10, 8), real(4, 8), real(2, 8), real(8), real(8), I32([[1, 1, 0]])],
        3,
        {},
    ),
    ("CDist", [real(3, 4), real(5, 4)], 1, {"metric": "euclidean"}),
    ("Unique", [np.array([2, 1, 1, 3, 4, 3], F32)], 3, {}),
    ("QLinearConcat", [SY, U8, bytes_(np.uint8, 2, 3), SX, U8, bytes_(np.uint8, 2, 4), SW, U8], 1, {"axis": 1}),
    ("QLinearLeakyRelu", [bytes_(np.int8, 50), SX, S8, SY, S8], 1, {"alpha": 0.3}),
    ("QGemm", [A5, SX, U8, seven_bits(12, 6), SW, S8, I32([9] * 6), SY, U8], 1, {"alpha": 0.5}),
    ("QGemm", [A5, SX, U8, seven_bits(6, 12), SW, S8], 1, {"transB": 1}),
    ("MatMulIntegerToFloat", [A5, seven_bits(12, 6), SX, real(6) ** 2, U8, bytes_(np.int8, 6)], 1, {}),
    ("DynamicQuantizeMatMul", [real(5, 12), seven_bits(12, 6), SW, S8, real(6)], 1, {}),
    ("GatherBlockQuantized", [bytes_(np.uint8, 9, 32), np.array([[1, -1]]), real(9, 4)], 1, {"block_size": 16}),
    ("Attention", PROJECTION, 2, {"num_heads": HEADS, "unidirectional": 1}),
    ("Attention", PROJECTION, 2, {"num_heads": HEADS, "rotary_embedding_dim": 32}),
    ("Attention", [*PROJECTION, I32([2, 3])], 1, {"num_heads": HEADS}),
    ("Attention", [*PROJECTION, I32([3, 2, 1, 0])], 1, {"num_heads": HEADS}),
    ("Attention", [*PROJECTION, I32([2, 3, 0, 3, 6, 0, 2, 5])], 1, {"num_heads": HEADS}),
    ("Attention", [*PROJECTION, I32([[0, 0, 0], [1, 0, 1]])], 1, {"num_heads": HEADS, "mask_filter_value": -5.0}),
    ("Attention", [*PROJECTION, None, real(2, 2, HEADS, 5, SIZE)], 2, {"num_heads": HEADS, "unidirectional": 1}),
    ("MultiHeadAttention", [real(2, 3, HIDDEN), *KV6, None, I32([2, 6])], 1, {"num_heads": HEADS}),
    ("MultiHeadAttention", [real(2, 3, HIDDEN), *KV6, *[None] * 5, I32([4])], 1, {"num_heads": HEADS}),
    (
        "MultiHeadAttention",
        [*QKV, real(3 * HIDDEN), None, real(1, HEADS, 3, 8), *(real(2, HEADS, 5, SIZE) for _ in range(2))],
        3,
        {"num_heads": HEADS, "unidirectional": 1},
    ),
    ("RotaryEmbedding", [real(2, 3, HIDDEN), np.array([4]), np.cos(ANGLES), np.sin(ANGLES)], 1, {"interleaved": 1}),
    ("GroupQueryAttention", [*grouped(3), None, None, I32([2, 2]), I32(3)], 3, GROUPED),
    ("GroupQueryAttention", [*grouped(1), *past(5), I32([5, 5]), I32(6)], 3, {**GROUPED, "local_window_size": 2}),
    ("GroupQueryAttention", [*grouped(3), None, None, I32([2, 2]), I32(3), *BIAS3], 3, {**GROUPED, "softcap": 0.5}),
]  # fmt: skip


def test_onnxruntime_agrees(subtests):
    for case, (name, inputs, n_outputs, attributes), results in results_of(CASES):
        with subtests.test(msg=case):
            for result, want in zip(results, onnxruntime_says(name, inputs, n_outputs, attributes), strict=True):
                assert result.dtype == want.dtype and result.shape == want.shape
                np.testing.assert_allclose(result, want, rtol=2e-4, atol=2e-5)


def test_sequences_of_different_lengths():
    """Each takes the position of its own end; the cache behind it is nobody's."""
    cache = past(5)
    inputs = [*grouped(1), *cache, I32([5, 3]), I32(6), np.cos(ANGLES), np.sin(ANGLES)]
    attributes = {**GROUPED, "do_rotary": 1}
    expected = onnxruntime_says("GroupQueryAttention", inputs, 3, attributes)
    y, key, _ = run_op("GroupQueryAttention", *inputs, domain=MICROSOFT, n_outputs=3, **attributes)
    np.testing.assert_allclose(y, expected[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(key[1, :, :4], expected[1][1, :, :4], rtol=2e-4, atol=2e-5)


def test_matmul_nbits_unpacks_low_bits_first():
    K, N, block, rows, expected = 40, 3, 16, [], []
    for bits, zero in product((2, 4, 8), (None, "packed", "real")):
        values = RNG.integers(0, 2**bits, (N, 3, block))
        shifts = bits * np.arange(8 // bits)
        pack = lambda v: (v.reshape(*v.shape[:-1], -1, 8 // bits) << shifts).sum(-1).astype(np.uint8)  # noqa: E731, B023
        zeros = RNG.integers(0, 2**bits, (N, 4 if bits < 8 else 3))
        given = {None: None, "packed": pack(zeros), "real": zeros[:, :3].astype(F32)}[zero]
        offset = np.full((N, 3), 2 ** (bits - 1)) if zero is None else zeros[:, :3]
        A, scales, bias = real(2, K), real(N, 3), real(N)
        weight = ((values - offset[..., None]) * scales[..., None]).reshape(N, -1)[:, :K]
        attributes = {"K": K, "N": N, "bits": bits, "block_size": block}
        rows.append(("MatMulNBits", [A, pack(values), scales, given, None, bias], 1, attributes))
        expected.append(A @ weight.T + bias)
    pairs = {case: (y, want) for (case, _, [y]), want in zip(results_of(rows), expected, strict=True)}
    assert not differences(pairs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", ["blocks", "unequal", "traced"])
def test_matmul_nbits_with_unordered_groups(groups, bits):
    """GPTQ quantizes the columns that matter most first: g_idx says whose scale a column has."""
    K, N, block = 56, 64, 16  # the last block is not full
    of = RNG.permutation(np.arange(K) // block).astype(np.int32)
    of = np.zeros_like(of) if groups == "unequal" else of
    packed, zeros, scales, A = bytes_(np.uint8, N, 4, 2 * bits), bytes_(np.uint8, N, bits // 2), real(N, 4), real(2, K)
    shift = unpack(zeros, bits)[:, :4] if bits < 8 else zeros
    weight = (unpack(packed, bits).reshape(N, -1)[:, :K] - shift[:, of].astype(F32)) * scales[:, of]

    def product(A, g_idx):
        attributes = {"K": K, "N": N, "bits": bits, "block_size": block}
        return run_op("MatMulNBits", A, packed, scales, zeros, g_idx, domain=MICROSOFT, **attributes)

    y = jax.jit(product)(A, of) if groups == "traced" else jax.jit(lambda A: product(A, of))(A)
    np.testing.assert_allclose(y, A @ np.asarray(weight).T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("bits", "rows"), [(2, 1), (4, 4), (4, 5), (8, 5), (4, 65)])
def test_packed_products_for_any_number_of_rows(bits, rows):
    packed, scales, zeros = bytes_(np.uint8, 128, 3, 2 * bits), real(128, 3), RNG.integers(0, 2**bits, (128, 3))
    x = real(rows, 40)  # three blocks of 16 numbers, the last one not full
    y = jax.jit(packed_product, static_argnums=4)(x, packed, scales, zeros.astype(np.uint8), bits)
    weight = (unpack(packed, bits) - zeros[..., None].astype(F32)) * scales[..., None]
    np.testing.assert_allclose(y, x @ np.asarray(weight).reshape(128, -1)[:, :40].T, rtol=1e-4, atol=1e-4 * 2**bits)


def test_dynamic_quantize_lstm_approximates_lstm():
    X, W, R, B = real(5, 1, 4), seven_bits(1, 4, 32), seven_bits(1, 8, 32), real(1, 64)
    scale, zero = np.full((1, 32), 0.004, F32), np.zeros((1, 32), np.int8)
    inputs = [X, W, R, B, I32([3]), None, None, None, scale, zero, scale, zero]
    Y, h, c = run_op("DynamicQuantizeLSTM", *inputs, domain=MICROSOFT, n_outputs=3, hidden_size=8)
    for got, want in zip(
        (Y, h, c), onnxruntime_says("DynamicQuantizeLSTM", inputs, 3, {"hidden_size": 8}), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-4)
    plain = run_op("LSTM", X, *(np.swapaxes(v, 1, 2) * F32(0.004) for v in (W, R)), B, I32([3]), n_outputs=3)
    np.testing.assert_allclose(Y, plain[0], atol=0.02)


def test_operators_without_a_cpu_kernel_in_onnxruntime():
    x, bias = real(2, 3, 8), real(8)
    left, right = np.split(x + bias, 2, -1)
    gelu = np.asarray(jax.nn.gelu(right, approximate=False))
    np.testing.assert_allclose(run_op("BiasSplitGelu", x, bias, domain=MICROSOFT), left * gelu, rtol=1e-4, atol=1e-6)
    image, gamma, beta = real(2, 8, 3, 3), real(8), real(8)
    groups = image.reshape(2, 2, 4, 3, 3)
    mean, var = (f(groups, axis=(2, 3, 4), keepdims=True) for f in (np.mean, np.var))
    y = ((groups - mean) / np.sqrt(var + 1e-5)).reshape(image.shape) * gamma[:, None, None] + beta[:, None, None]
    first = run_op("GroupNorm", image, gamma, beta, domain=MICROSOFT, activation=0, groups=2, channels_last=0)
    np.testing.assert_allclose(first, y, rtol=1e-3, atol=1e-4)
    last = run_op("GroupNorm", np.moveaxis(image, 1, -1), gamma, beta, domain=MICROSOFT, activation=1, groups=2)
    np.testing.assert_allclose(np.moveaxis(np.asarray(last), -1, 1), y / (1 + np.exp(-y)), rtol=1e-3, atol=1e-4)
    none = run_op("GroupNorm", image[:0], gamma, beta, domain=MICROSOFT, activation=0, groups=2, channels_last=0)
    assert none.shape == (0, 8, 3, 3)


def test_gather_block_quantized_out_of_range():
    data, scales = np.arange(32).reshape(2, 16).astype(ml_dtypes.int4), np.array([[1], [2]], F32)
    y = run_op("GatherBlockQuantized", data, np.array([-1, 2, 0]), scales, domain=MICROSOFT, block_size=16)
    np.testing.assert_array_equal(y, [data[1].astype(F32) * 2, np.zeros(16), data[0].astype(F32)])


@pytest.mark.parametrize(
    ("name", "inputs", "attributes"),
    [
        ("Attention", PROJECTION, {"num_heads": HEADS, "do_rotary": 1}),
        ("FusedConv", [real(1, 1, 3, 3), real(1, 1, 3, 3)], {"activation": "Mystery"}),
        ("MatMulNBits", [real(2, 16), A5, real(3, 1)], {"K": 16, "N": 3, "block_size": 16, "weight_prepacked": 1}),
    ],
)  # fmt: skip
def test_unsupported_operators_are_named(name, inputs, attributes):
    with pytest.raises(NotImplementedError):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)


def test_gradients_stay_finite():
    x, (query, key, value) = np.ones((2, 3), F32), (real(1, 2, 8) for _ in range(3))

    def distances(a):
        return run_op("CDist", a, x, domain=MICROSOFT, metric="euclidean").sum()

    def attention(query):
        inputs = query, key, value, None, I32([[0, 0]])
        return run_op("MultiHeadAttention", *inputs, domain=MICROSOFT, num_heads=2).sum()

    by_distance, by_query = jax.jit(lambda a, q: (jax.grad(distances)(a), jax.grad(attention)(q)))(x, query)
    assert not np.asarray(by_distance).any()
    assert np.isfinite(by_query).all()


STEP = [*grouped(1), *past(5), I32([5, 5]), I32(6)]
WINDOW = {**GROUPED, "local_window_size": 3, "sliding_window_cache": 1}
EACH = {**GROUPED, "k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
STEP8 = [*grouped(1), *[bytes_(np.int8, 2, 2, 5, SIZE)] * 2, I32([5, 5]), I32(6), *[None] * 5, *[real(2, SIZE)] * 2]
TURNED = {**GROUPED, "do_rotary": 1}
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
PASTS = [real(2, HEADS, 5, SIZE) for _ in range(2)]
ROTARY = [real(2, 3, HIDDEN), np.array([[0, 1, 2]] * 2), COS, SIN]
WITH_HEADS = {"num_heads": HEADS}


def but(inputs, changes):
    """The inputs with others at some places."""
    changed = dict(enumerate(inputs)) | changes
    return [changed.get(i) for i in range(max(changed) + 1)]


UNFIT = [
    ("GroupQueryAttention", STEP, {3: real(2, 2, 5, 8), 4: real(2, 2, 5, 8)}, GROUPED, r"past_key .*stored=16\] \(it"),
    ("GroupQueryAttention", STEP, {4: real(2, 2, 4, SIZE)}, GROUPED, r"past_value .*past=5, "),
    ("GroupQueryAttention", STEP, {3: real(1, 2, 5, SIZE), 4: real(1, 2, 5, SIZE)}, GROUPED, r"past_key .*\[batch=2"),
    ("GroupQueryAttention", STEP, {3: real(2, 1, 5, SIZE), 4: real(2, 1, 5, SIZE)}, GROUPED, r"past_key .*heads=2"),
    ("GroupQueryAttention", STEP, {4: None}, GROUPED, "past_key and past_value"),
    ("GroupQueryAttention", STEP, {1: real(2, 2, HIDDEN // 2)}, GROUPED, "key must .*new=1, "),
    ("GroupQueryAttention", STEP, {2: real(2, 1, 16)}, GROUPED, "value"),
    ("GroupQueryAttention", STEP, {5: I32([5])}, GROUPED, "seqlens_k"),
    ("GroupQueryAttention", STEP, {7: COS, 8: SIN[:12]}, TURNED, "sin_cache .*positions=16"),
    ("GroupQueryAttention", STEP, {7: COS[:3], 8: SIN[:3]}, TURNED, "at least 6 positions"),
    ("GroupQueryAttention", STEP, {7: COS, 8: SIN, 9: np.array([[5]])}, TURNED, "position_ids"),
    ("GroupQueryAttention", STEP, {}, TURNED, "cos_cache and sin_cache"),
    ("GroupQueryAttention", STEP, {10: real(2, 4, 1, 1)}, GROUPED, "attention_bias .*total=6"),
    ("GroupQueryAttention", STEP, {10: real(1, 4, 6)}, GROUPED, "attention_bias"),
    ("GroupQueryAttention", STEP, {11: real(1)}, GROUPED, "head_sink"),
    ("GroupQueryAttention", STEP, {5: I32([6, 6]), 6: I32(7)}, GROUPED, r"\(7\) must be 6 .*or from 1 to 5"),
    ("GroupQueryAttention", STEP, {5: I32([6, 6]), 6: I32(0)}, GROUPED, r"from 1 to 5"),
    ("GroupQueryAttention", STEP, {}, {**GROUPED, "causal": 0, "local_window_size": 2}, "local_window_size"),
    ("GroupQueryAttention", STEP, {}, {**WINDOW, "local_window_size": 6}, r"extent of past_key \(5\)"),
    ("GroupQueryAttention", STEP, {}, {**WINDOW, "local_window_size": -1}, r"0 < local_window_size \(-1\)"),
    ("GroupQueryAttention", STEP, {3: None, 4: None}, WINDOW, r"past_key \(0\)"),
    ("GroupQueryAttention", STEP, {10: real(1, 1, 1, 5)}, WINDOW, "attention_bias .*total=6"),
    ("GroupQueryAttention", STEP, {}, {**GROUPED, "kv_cache_bit_width": 8}, "must be 0 for .* NONE"),
    ("GroupQueryAttention", STEP8, {}, {**EACH, "kv_cache_bit_width": 0}, "must be 0 for .* otherwise 4 or 8"),
    ("GroupQueryAttention", STEP8, {12: real(16)}, EACH, r"k_scale must have 32 elements .*has 16"),
    ("GroupQueryAttention", STEP8, {13: None}, EACH, "v_scale .*is not given"),
    ("GroupQueryAttention", STEP8, {}, {**EACH, "kv_cache_bit_width": 4}, "past_key .*stored=8"),
    ("MultiHeadAttention", QKV, {7: PASTS[1]}, WITH_HEADS, "past_key and past_value"),
    ("MultiHeadAttention", QKV, {6: PASTS[0][..., :8], 7: PASTS[1][..., :8]}, WITH_HEADS, "past_key"),
    ("MultiHeadAttention", QKV, {3: real(2 * HIDDEN + 1)}, WITH_HEADS, "bias .*192"),
    ("MultiHeadAttention", QKV, {5: real(2, HEADS, 3, 1)}, WITH_HEADS, "attention_bias"),
    ("MultiHeadAttention", QKV, {5: real(3, 3)}, WITH_HEADS, "attention_bias"),
    ("MultiHeadAttention", QKV, {4: I32([[1, 1, 1]])}, WITH_HEADS, "a mask of shape"),
    ("MultiHeadAttention", QKV, {4: I32([[[1, 1, 1]]] * 2)}, WITH_HEADS, "a mask of shape"),
    ("Attention", PROJECTION, {2: real(1)}, WITH_HEADS, "bias .*192"),
    ("Attention", PROJECTION, {}, {**WITH_HEADS, "qkv_hidden_sizes": [64, 64, 32]}, "weights .*160"),
    ("Attention", PROJECTION, {4: real(2, 2, HEADS, 5, 8)}, WITH_HEADS, "past_key"),
    ("Attention", PROJECTION, {4: real(1, 2, HEADS, 5, SIZE)}, WITH_HEADS, "past .*2=2"),
    ("Attention", PROJECTION, {5: real(2, HEADS, 1, 3)}, WITH_HEADS, "attention_bias"),
    ("Attention", PROJECTION, {3: I32([[1, 1, 1]])}, WITH_HEADS, "a mask of shape"),
    ("RotaryEmbedding", ROTARY, {2: COS[:, :4], 3: SIN[:, :4]}, WITH_HEADS, "cos_cache .*angles=8"),
    ("RotaryEmbedding", ROTARY, {3: SIN[:12]}, {}, "sin_cache"),
    ("RotaryEmbedding", ROTARY, {1: np.array([[0, 1, 2]])}, {}, "position_ids"),
    ("RotaryEmbedding", ROTARY, {0: real(2, HEADS, 3, 32)}, {}, "cos_cache .*angles=16"),
    ("RotaryEmbedding", ROTARY, {0: real(2, 3, 60)}, {}, "cos_cache"),
    ("RotaryEmbedding", ROTARY, {0: real(HIDDEN)}, {}, "rank 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inputs", "changes", "attributes", "said"), UNFIT)
def test_mismatched_operands_are_rejected_like_in_onnxruntime(name, inputs, changes, attributes, said):
    operands = but(inputs, changes)
    count = 3 if name == "GroupQueryAttention" else 1
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        onnxruntime_says(name, operands, count, attributes)
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *operands, domain=MICROSOFT, n_outputs=count, **attributes)
