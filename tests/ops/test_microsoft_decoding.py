"""com.microsoft: caches in buffers, beams, one step of decoding, sparse blocks.

The judge is onnxruntime where its CPU provider has the operator, and otherwise loops by the words of the schema.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import KnownValueError
from tests.ops.test_microsoft import F32, I32, MICROSOFT, onnxruntime_says, real
from tests.support.helpers import run_op
from tests.support.joined import check_gradients_of, derived, results_of

HEADS, SIZE, ROOM, USED = 2, 8, 6, 3
MHA, STEPWISE, ALONE = "MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention"
WIDTH = HEADS * SIZE
STEP = [real(4, 1, WIDTH) for _ in range(3)]
CHUNK = [real(4, 2, WIDTH) for _ in range(3)]
BUFFERS = [real(4, HEADS, ROOM, SIZE) for _ in range(2)]
MASK = I32([[1, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]])
BIAS, BIASES = real(3 * WIDTH), real(1, HEADS, 1, USED + 1)
BEAMS = I32([[[1, 0, 1, 0, 0, 1], [0, 1, 1, 0, 1, 0]], [[0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1]]])
LENGTH, TWO = I32([USED]), I32([2])
WITH_HEADS: dict[str, Any] = {"num_heads": HEADS}
SHARED = {**WITH_HEADS, "past_present_share_buffer": 1}
CROSS = [STEP[0], *(real(4, HEADS, 5, SIZE) for _ in range(2))]
WIDE = 16
TABLES = [np.cos(real(40, WIDE // 2)), np.sin(real(40, WIDE // 2))]
LAYOUTS = I32([[0, 1, 2, 4], [0, 1, 3, 6]]), I32([[0, 1, 0, 2, -1, -1], [0, 0, 1, 0, 1, 2]])
CACHES = [real(2, 1, 48, WIDE) for _ in range(2)]
SPARSE = {"num_heads": HEADS, "kv_num_heads": 1, "sparse_block_size": 16}
TURNED = {**SPARSE, "do_rotary": 1}


def tokens(count: int) -> list[np.ndarray]:
    return [real(2, count, 2 * WIDE), real(2, count, WIDE), real(2, count, WIDE)]


PROJECTION = [real(4, 1, 5), real(5, 3 * WIDTH), BIAS]
FLAGS = {name: np.array(name) for name in (True, False)}
YES, NO = FLAGS[True], FLAGS[False]
DECODER = [real(3, 2, WIDTH), real(4, 2, WIDTH), real(WIDTH, WIDTH), real(WIDTH, 2 * WIDTH), BIAS, None]
KEPT = [real(2, HEADS, 4, SIZE) for _ in range(2)]
WORDS = np.array([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])

# operator, inputs, outputs, attributes; the first row of an operator is run in every type too
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    (STEPWISE, [*CROSS, MASK[:, [0, 1, 2, 3, 3]]], 1, WITH_HEADS),
    (ALONE, [*PROJECTION, MASK, np.stack(BUFFERS), None, LENGTH], 2, SHARED),
    ("DecoderAttention", [*DECODER, *KEPT, NO, YES, YES, NO], 3, WITH_HEADS),
    ("NGramRepeatBlock", [WORDS, real(2, 6)], 1, {"ngram_size": 3}),
    ("SparseAttention", [*tokens(34), *CACHES, *LAYOUTS, I32(34), I32([34, 20]), *TABLES], 3, TURNED),
]

ON_CPU: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    *(row for row in ROWS if row[0] in (STEPWISE, "NGramRepeatBlock")),
    *(("NGramRepeatBlock", [WORDS, real(2, 6)], 1, {"ngram_size": n}) for n in (1, 2, 5, 6, 7)),
    (MHA, [*STEP, BIAS, MASK, BIASES, *BUFFERS, LENGTH], 3, WITH_HEADS),
    (MHA, [*CHUNK, BIAS, None, None, *BUFFERS, LENGTH], 3, WITH_HEADS),
    (MHA, [*CHUNK, None, None, None, *BUFFERS, LENGTH], 3, {**WITH_HEADS, "unidirectional": 1}),
    (MHA, [*STEP, None, MASK, None, *BUFFERS, LENGTH, BEAMS], 3, WITH_HEADS),
    (MHA, [*STEP, BIAS, None, BIASES[..., :1], *BUFFERS, I32([0]), BEAMS], 3, WITH_HEADS),
    (STEPWISE, [*STEP, MASK, BIASES, *BUFFERS, LENGTH], 3, SHARED),
    (STEPWISE, [*STEP, MASK, None, *BUFFERS, LENGTH, TWO, BEAMS, BIAS], 3, SHARED),
    (STEPWISE, [*CROSS, *[None] * 7, BIAS], 1, {**WITH_HEADS, "scale": 0.3}),
    (STEPWISE, [*CROSS, *[None] * 4, LENGTH, TWO, BEAMS], 1, WITH_HEADS),  # as its tools write cross attention
]


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
def test_onnxruntime_agrees(subtests: pytest.Subtests) -> None:
    for case, (name, inputs, n_outputs, attributes), results in results_of(ON_CPU):
        with subtests.test(msg=case):
            for result, want in zip(results, onnxruntime_says(name, inputs, n_outputs, attributes), strict=True):
                np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-6)


def model_of(name: str, inputs: list[Any], outputs: list[str], **attributes: Any) -> onnx.ModelProto:
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    typed = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for n, x in zip(names, inputs, strict=True)
        if n
    ]
    ends = [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in outputs]
    node = helper.make_node(name, names, outputs, domain=MICROSOFT, **attributes)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", typed, ends), opset_imports=imports, ir_version=8)


def sparse_in_onnxruntime(inputs: list[Any], attributes: dict[str, Any]) -> list[np.ndarray]:
    """SparseAttention, which writes into the very memory of its caches."""
    model = model_of("SparseAttention", inputs, ["y", "key", "value"], **attributes).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {f"x{i}": onnxruntime.OrtValue.ortvalue_from_numpy(x) for i, x in enumerate(inputs) if x is not None}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    binding.bind_ortvalue_output("key", values["x3"])
    binding.bind_ortvalue_output("value", values["x4"])
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]


SPARSE_CALLS = {
    "prompt": ([*tokens(34), *CACHES, *LAYOUTS, I32(34), I32([34, 34]), *TABLES], TURNED),
    "step": ([*tokens(1), *CACHES, *LAYOUTS, I32(40), I32([40, 34])], {**SPARSE, "scale": 0.2}),
    "turned step": (
        [*tokens(1), *CACHES, *LAYOUTS, I32(38), I32([36, 38]), *TABLES],
        {**TURNED, "rotary_interleaved": 1},
    ),
    "one layout": ([*tokens(20), *CACHES, LAYOUTS[0][:1], LAYOUTS[1][:1], I32(20), I32([20, 20])], SPARSE),
    "packed": (
        [np.concatenate(tokens(3), -1), None, None, *CACHES, *LAYOUTS, I32(40), I32([40, 40])],
        SPARSE,
    ),
}


@pytest.mark.parametrize("name", SPARSE_CALLS)
def test_sparse_attention(name: str) -> None:
    """Sequence by sequence: onnxruntime gives other numbers for a short one beside a long one than for it alone."""
    inputs, attributes = SPARSE_CALLS[name]

    @jax.jit
    def call(*operands: Any) -> Any:
        known = [*operands[:7], inputs[7], *operands[8:]]
        return run_op("SparseAttention", *known, domain=MICROSOFT, n_outputs=3, **attributes)

    results = call(*inputs)
    for b, total in enumerate(inputs[8]):
        alone = [None if x is None else x[b : b + 1].copy() for x in inputs[:5]]
        alone += [*inputs[5:7], I32(total), inputs[8][b : b + 1], *inputs[9:]]
        for result, want in zip(results, sparse_in_onnxruntime(alone, attributes), strict=True):
            np.testing.assert_allclose(result[b : b + 1], want, rtol=2e-5, atol=2e-6)


def attended(query: np.ndarray, keys: Any, values: Any, added: np.ndarray | float = 0.0) -> np.ndarray:
    """One query [size] on a list of keys and values."""
    scores = np.array([query @ key for key in keys]) / np.sqrt(len(query)) + added
    weights = np.exp(scores - scores.max())
    return sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True))


def laid_out(keys: np.ndarray, dtype: Any) -> np.ndarray:
    """Keys as DecoderMaskedSelfAttention has them: of each head 16 bytes of all positions, then the next ones."""
    width = 16 // np.dtype(dtype).itemsize
    parts = [keys[..., i : i + width] for i in range(0, SIZE, width)]
    return np.stack(parts, axis=2).reshape(keys.shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_self_attention_step_matches_its_schema(dtype: Any) -> None:
    """The order of the keys follows the type; beams read each other's past."""
    x, weights, bias = PROJECTION
    query, key, value = (part.reshape(4, HEADS, SIZE) for part in np.split(x[:, 0] @ weights + bias, 3, axis=-1))
    keys, values = (buffer.copy() for buffer in BUFFERS)
    past = np.stack([laid_out(keys, dtype), values.astype(dtype)])
    inputs = [*(p.astype(dtype) for p in PROJECTION), MASK, past, None, LENGTH, TWO, BEAMS]
    y, present = run_op(ALONE, *inputs, domain=MICROSOFT, n_outputs=2, **SHARED)
    keys[:, :, USED], values[:, :, USED] = key, value
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == np.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for row in range(4):
        source = [row // 2 * 2 + BEAMS[row // 2, row % 2, t] for t in range(USED)] + [row]
        for head in range(HEADS):
            seen = [(keys[s, head, t], values[s, head, t]) for t, s in enumerate(source)]
            want = attended(query[row, head], *zip(*seen, strict=True), np.where(MASK[row] == 1, 0, -10000))
            np.testing.assert_allclose(y[row, 0, SIZE * head : SIZE * (head + 1)], want, **close)
    np.testing.assert_allclose(present, np.stack([laid_out(keys, dtype), values.astype(dtype)]), **close)


@pytest.mark.parametrize(("static", "cached"), [(NO, NO), (NO, YES), (YES, NO), (YES, YES)])
def test_decoder_attention(static: np.ndarray, cached: np.ndarray) -> None:
    query, key, q_weight, kv_weight, bias, _ = DECODER
    inputs = [*DECODER, *(KEPT if cached else [None, None]), static, cached, YES, NO]
    y, new_key, new_value = run_op("DecoderAttention", *inputs, domain=MICROSOFT, n_outputs=3, **WITH_HEADS)
    source = key if static else query
    q = query @ q_weight + bias[:WIDTH]
    k, v = np.split(source @ kv_weight + bias[WIDTH:], 2, axis=-1)
    for b in range(2):
        for head in range(HEADS):
            own = slice(SIZE * head, SIZE * (head + 1))
            kept = [list(cache[b, head]) if cached else [] for cache in KEPT]
            fresh = [[] if static and cached else list(x[:, b, own]) for x in (k, v)]
            keys, values = (old + new for old, new in zip(kept, fresh, strict=True))
            want = np.array([attended(q[i, b, own], keys, values) for i in range(3)])
            np.testing.assert_allclose(y[:, b, own], want, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(new_key[b, head], keys, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(new_value[b, head], values, rtol=1e-5, atol=1e-6)


def test_past_sequence_length_bounds_the_buffer() -> None:
    """Whatever lies behind."""
    x, weights, bias = real(2, 2, 5), *PROJECTION[1:]
    buffer = real(2, 2, HEADS, ROOM, SIZE)
    buffer[:, :, :, USED:] = np.nan
    rest: list[Any] = [x, weights, bias, I32([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]])]
    attributes = {**WITH_HEADS, "unidirectional": 1}
    y, present = run_op("Attention", *rest, buffer[..., :USED, :], domain=MICROSOFT, n_outputs=2, **attributes)
    inputs, attributes = [*rest, buffer, None, LENGTH], {**attributes, "past_present_share_buffer": 1}
    result, kept = run_op("Attention", *inputs, domain=MICROSOFT, n_outputs=2, **attributes)
    np.testing.assert_allclose(result, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kept[..., : USED + 2, :], present, rtol=1e-5, atol=1e-6)
    assert kept.shape == buffer.shape


def test_traced_past_sequence_length() -> None:
    """One program for all lengths; NaN where a known length is refused: a full buffer, a negative one, a short mask.

    A mask as long as the buffer holds for all lengths.
    """

    def call(length: Any, mask: Any = None) -> Any:
        inputs = [*STEP, BIAS, mask, None, *BUFFERS, length]
        return run_op(MHA, *inputs, domain=MICROSOFT, n_outputs=3, **WITH_HEADS)

    compiled = jax.jit(call)
    for length in (0, USED, ROOM - 1):
        for result, want in zip(compiled(I32([length])), call(I32([length])), strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)
    for outside in (ROOM, -1):
        assert np.isnan(compiled(I32([outside]))[0]).all()
        with pytest.raises(ValueError, match=f"past of {outside} tokens and 1 new ones exceed the buffer of 6"):
            call(I32([outside]))
    assert np.isnan(compiled(LENGTH, MASK[:, :3])[0]).all()
    whole = np.pad(MASK, ((0, 0), (0, ROOM - USED - 1)))
    np.testing.assert_allclose(compiled(LENGTH, whole)[0], call(LENGTH, MASK)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
@pytest.mark.parametrize("name", [MHA, STEPWISE])
def test_qk_outputs(name: str) -> None:
    """With mask and bias, of the keys in use."""
    inputs, attributes = [*STEP, None, MASK, BIASES, *BUFFERS, LENGTH], WITH_HEADS
    if name != MHA:
        inputs, attributes = [*STEP, MASK, BIASES, *BUFFERS, LENGTH], {**SHARED, "output_qk": 1}
    model = model_of(name, inputs, ["y", "key", "value", "qk"], **attributes).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    expected = session.run(None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None})
    results = run_op(name, *inputs, domain=MICROSOFT, n_outputs=4, **attributes)
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-6)


def test_qk_output_of_a_traced_length_raises() -> None:
    rest = [*STEP, None, None, None, *BUFFERS]
    call = jax.jit(lambda n: run_op(MHA, *rest, n, domain=MICROSOFT, n_outputs=4, **WITH_HEADS))
    with pytest.raises(KnownValueError, match="shape of the output qk"):
        call(LENGTH)


def test_packed_query_key_and_value() -> None:
    rest = [None, None, *BUFFERS, LENGTH]
    with pytest.warns(onnx2jax.errors.DeviationWarning, match="CUDA provider reorders the keys"):
        packed = run_op(STEPWISE, np.concatenate(STEP, -1), None, None, *rest, domain=MICROSOFT, **SHARED)
    apart = run_op(MHA, *STEP, None, *rest, domain=MICROSOFT, **WITH_HEADS)
    np.testing.assert_allclose(packed, apart, rtol=1e-6)


def test_a_file_decodes_step_by_step_in_one_program() -> None:
    steps = [[real(1, 1, WIDTH) for _ in range(3)] for _ in range(ROOM)]
    caches = [np.zeros((1, HEADS, ROOM, SIZE), F32)] * 2
    inputs = [*steps[0], None, None, None, *caches, I32([0])]
    model = onnx2jax.convert(model_of(MHA, inputs, ["y", "key", "value"], **WITH_HEADS))
    results = []
    for i, step in enumerate(steps):
        y, *caches = model(*step, *caches, I32([i]))
        results.append(y)
    whole = [np.concatenate(x, 1) for x in zip(*steps, strict=True)]
    want = run_op(MHA, *whole, domain=MICROSOFT, num_heads=HEADS, unidirectional=1)
    np.testing.assert_allclose(np.concatenate(results, 1), want, rtol=1e-4, atol=1e-6)
    assert model.compilations == 1


def test_gradients_flow_through_a_buffer() -> None:
    """As through the past that it holds."""

    def total(past: Any, *length: Any) -> Any:
        inputs = [*STEP, BIAS, MASK, None, *past, *length]
        return (run_op(MHA, *inputs, domain=MICROSOFT, **WITH_HEADS) ** 2).sum()

    short = [buffer[:, :, :USED] for buffer in BUFFERS]
    grad = jax.jit(jax.grad(total))
    for result, want in zip(grad(BUFFERS, LENGTH), grad(short), strict=True):
        np.testing.assert_allclose(result[:, :, :USED], want, rtol=1e-4, atol=1e-6)
        assert not np.asarray(result[:, :, USED:]).any()


DIFFERENTIABLE = [STEPWISE, ALONE, "DecoderAttention", "SparseAttention"]


def test_gradients() -> None:
    rows = {name: next(row for row in ROWS if row[0] == name) for name in DIFFERENTIABLE}
    inputs, attributes = SPARSE_CALLS["step"]
    rows["SparseAttention"] = "SparseAttention", inputs, 3, attributes
    check_gradients_of({name: derived(row) for name, row in rows.items()})


REFUSED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    (MHA, [*STEP, None, None, None, *BUFFERS, I32([1, 2])], WITH_HEADS, "must be a scalar"),
    (MHA, [*STEP, None, None, None, *BUFFERS, I32([-1])], WITH_HEADS, "past of -1 tokens"),
    (
        MHA,
        [*STEP, None, MASK[:, :3], None, *BUFFERS, LENGTH],
        WITH_HEADS,
        "mask .*total=4",
    ),
    (MHA, [*STEP, None, None, BIASES[..., :3], *BUFFERS, LENGTH], WITH_HEADS, "attention_bias .*total=4"),
    (MHA, [*STEP, None, None, None, *BUFFERS, None, BEAMS], WITH_HEADS, "needs past_sequence_length"),
    (MHA, [*STEP, None, None, None, *BUFFERS, LENGTH, BEAMS[..., :4]], WITH_HEADS, "cache_indirection .*tokens=6"),
    (MHA, [STEP[0], STEP[1]], WITH_HEADS, "key and value must be given"),
    (MHA, [STEP[0], None, STEP[2]], WITH_HEADS, "key and value must be given"),
    (MHA, [*STEP, None, None, None, *BUFFERS, LENGTH, BEAMS.reshape(-1)], WITH_HEADS, "cache_indirection"),
    (STEPWISE, [*STEP, None, None, *BUFFERS, LENGTH, TWO, BEAMS.reshape(-1)], SHARED, "beam_width"),
    ("DecoderAttention", [real(6, WIDTH), *DECODER[1:], *KEPT, NO, YES, YES, NO], WITH_HEADS, "query must"),
    ("SparseAttention", [*ROWS[4][1][:2], None, *ROWS[4][1][3:]], TURNED, "key and value"),
    ("Attention", PROJECTION, SHARED, "give both"),
    ("Attention", [*PROJECTION, None, np.stack(BUFFERS), None, LENGTH], WITH_HEADS, "give both"),
    (STEPWISE, [*STEP, None, None, *BUFFERS], SHARED, "give both"),
    (STEPWISE, [*STEP, None, None, *BUFFERS, LENGTH, TWO], SHARED, r"beam_width \(2\).*\(1\)"),
    (STEPWISE, [*STEP, None, None, *BUFFERS, LENGTH, None, BEAMS], SHARED, r"beam_width \(1\).*\(2\)"),
    (STEPWISE, [*CHUNK, None, None, *BUFFERS, LENGTH], SHARED, "must be one token"),
    (ALONE, [PROJECTION[0], *PROJECTION[1:], None, np.stack(BUFFERS), None, LENGTH], WITH_HEADS, "give both"),
    (ALONE, [*PROJECTION, None, real(2, 4, HEADS, ROOM, 6), None, LENGTH], SHARED, "multiple of 4"),
    (ALONE, ROWS[1][1], {**SHARED, "do_rotary": 1}, "do_rotary"),
    ("DecoderAttention", [*DECODER, *KEPT, NO, YES, YES, YES], WITH_HEADS, "key_padding_mask"),
    ("NGramRepeatBlock", [WORDS, real(2, 6)], {"ngram_size": 0}, "ngram_size"),
    ("NGramRepeatBlock", [WORDS, real(1, 6)], {"ngram_size": 2}, "scores"),
    ("SparseAttention", ROWS[4][1], {**TURNED, "sparse_block_size": 8}, "sparse_block_size"),
    (
        "SparseAttention",
        [*tokens(3), *CACHES, *(x[:, :3] for x in LAYOUTS), I32(40), I32([40, 40])],
        SPARSE,
        "cover 40",
    ),
    ("SparseAttention", ROWS[4][1], {**TURNED, "num_heads": 1}, r"layouts \(2\)"),
]


@pytest.mark.parametrize(("name", "inputs", "attributes", "said"), REFUSED)
@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
def test_unsupported_options_are_rejected(name: str, inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with compat.enable_x64(), pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)
