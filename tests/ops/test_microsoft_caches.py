"""GroupQueryAttention's caches: traced lengths, windows, quantized ones, padded chunks of a prompt."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from onnx import ValueInfoProto, helper

import onnx2jax
from onnx2jax import Model
from onnx2jax.errors import KnownValueError
from tests.ops.test_microsoft import (
    ANGLES,
    GROUPED,
    HEADS,
    I32,
    MICROSOFT,
    SIZE,
    grouped,
    onnxruntime_says,
    past,
    real,
)
from tests.support.joined import differences, joined

GROUP = "GroupQueryAttention"

NAMES = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache"]
NAMES += ["sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight"]
NAMES += ["k_norm_weight", "query_seqlens"]
TURNED = {**GROUPED, "do_rotary": 1}
TABLES = [np.cos(ANGLES), np.sin(ANGLES)]
LONG = [x.astype(np.float32) for f in (np.cos, np.sin) for x in [f(real(32, SIZE // 2))]]
ROOM = 9


def attention_model(operands: list[Any], **attributes: Any) -> Model:
    """One GroupQueryAttention, whose every operand is an input of free shape."""
    names = [n if x is not None else "" for n, x in zip(NAMES, operands, strict=False)]
    outputs = ["y", "present_key", "present_value"]
    node = helper.make_node(GROUP, names, outputs, domain=MICROSOFT, **attributes)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for n, x in zip(names, operands, strict=True)
        if n
    ]
    graph = helper.make_graph([node], "g", inputs, [ValueInfoProto(name=n) for n in outputs])
    return onnx2jax.convert(helper.make_model(graph, opset_imports=[helper.make_opsetid(MICROSOFT, 1)]))


def given(operands: list[Any]) -> list[Any]:
    return [x for x in operands if x is not None]


POSITIONS = np.array([[3], [4]])
PLACES = POSITIONS + np.arange(3)
CALLS = {
    "step": ([*grouped(1), *past(ROOM), I32([5, 3]), I32(6), *TABLES], TURNED),
    "prompt": ([*grouped(3), *past(ROOM), I32([2, 1]), I32(3), *TABLES], TURNED),
    "first token of one": ([*grouped(1), *past(ROOM), I32([0, 3]), I32(4), *TABLES, POSITIONS], TURNED),
    "positions of a prompt": ([*grouped(3), *past(ROOM), I32([2, 2]), I32(3), *TABLES, PLACES], TURNED),
    "window": ([*grouped(1), *past(ROOM), I32([5, 3]), I32(6)], {**GROUPED, "local_window_size": 2}),
    "full": ([*grouped(1), *past(ROOM), I32([8, 3]), I32(9)], {**GROUPED, "smooth_softmax": 1, "softcap": 0.5}),
    "chunk": ([x[:1] for x in (*grouped(3), *past(ROOM))] + [I32([5]), I32(6), *TABLES], TURNED),
    "both ways": ([*grouped(3), *past(ROOM), I32([2, 1]), I32(3)], {**GROUPED, "causal": 0}),
}  # fmt: skip


def test_traced_total_length_matches_constant() -> None:
    def both(operands: list[Any], attributes: dict[str, Any]) -> Any:
        model = attention_model(operands, **attributes)
        return lambda *traced: (model(*traced), model(*given(operands)))

    results = joined({name: (both(*case), given(case[0])) for name, case in CALLS.items()})
    for output in range(3):
        pairs = {name: (traced[output], known[output]) for name, (traced, known) in results.items()}
        assert not differences(pairs, rtol=1e-5, atol=1e-6)


def test_what_a_cache_holds_behind_a_sequence_is_not_read() -> None:
    """Neither NaN nor infinities, where the total is known and where it is traced."""
    clean, attributes = CALLS["step"]
    spoilt, lengths = [np.array(x) for x in clean], clean[5]
    for cache, value in ((spoilt[3], np.nan), (spoilt[4], np.inf)):
        for rows, length in zip(cache, lengths, strict=True):
            rows[:, length:] = value
    model = attention_model(clean, **attributes)
    wanted, *_ = model(*clean)
    for y in (model(*spoilt)[0], jax.jit(model)(*spoilt)[0]):
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_traced_and_plain_calls_do_not_interfere() -> None:
    """A plain call knows the total, and its cache grows."""
    operands = [*grouped(1), *past(5), I32([5, 5]), I32(6)]
    model = attention_model(operands, **GROUPED)
    y, key, _ = jax.jit(model)(*operands)
    assert key.shape[2] == 5 and np.isnan(y).all()  # six tokens in a buffer of five
    y, key, _ = model(*operands)
    assert key.shape[2] == 6 and np.isfinite(y).all()
    same = jax.jit(lambda query: model(query, *operands[1:]))(operands[0])
    np.testing.assert_allclose(same[0], y, rtol=1e-5, atol=1e-6)


def test_traced_total_length_requires_a_past() -> None:
    operands = [*grouped(3), None, None, I32([2, 2]), I32(3)]
    model = attention_model(operands, **GROUPED)
    with pytest.raises(KnownValueError, match="past_key must be a buffer"):
        jax.jit(model)(*given(operands))


def test_a_cache_carried_through_a_loop() -> None:
    """A prompt and steps, in one while_loop, as in calls one by one."""
    steps = [real(2, 1, HEADS * SIZE) for _ in range(4)]
    empty = [np.zeros_like(x) for x in past(ROOM)]
    first = [*grouped(3), *empty, I32([2, 2]), I32(3), *TABLES]
    model = attention_model(first, **TURNED)
    y, *cache = model(*first)
    key, value = (real(2, 1, HEADS // 2 * SIZE) for _ in range(2))
    expected, grown = [], cache
    for i, query in enumerate(steps):
        y, *grown = model(query, key, value, *grown, I32([3 + i] * 2), I32(4 + i), *TABLES)
        expected.append(np.asarray(y))

    def step(state: Any) -> Any:
        i, cache, seen = state
        ends = jax.numpy.broadcast_to(i + 3, 2)
        y, *cache = model(jax.numpy.asarray(steps)[i], key, value, *cache, ends, i + 4, *TABLES)
        return i + 1, cache, seen.at[i].set(y)

    begun = (np.int32(0), cache, jax.numpy.zeros((4, *y.shape), np.float32))
    _, cache, seen = jax.jit(lambda s: lax.while_loop(lambda s: s[0] < 4, step, s))(begun)
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cache[0], grown[0], rtol=1e-5, atol=1e-6)


def compiled(operands: list[Any], attributes: dict[str, Any]) -> Any:
    """The operator with every operand traced: steps of a prompt share one program."""
    run = jax.jit(attention_model(operands, **attributes))
    return lambda operands: [np.asarray(y) for y in run(*given(operands))]


@pytest.mark.parametrize(
    ("room", "lengths"), [(4, (10, 1, 1)), (6, (3, 1, 1, 1, 1, 1, 1, 1)), (6, (10, 3, 3, 1)), (9, (2, 12, 2))]
)
def test_sliding_cache_matches_onnxruntime(room: int, lengths: tuple[int, ...]) -> None:
    """Prompts beyond the window and the cache, chunks, steps; rows behind the resident tokens are nobody's."""
    attributes = {**TURNED, "local_window_size": 4, "sliding_window_cache": 1}
    theirs = ours = [np.zeros((1, HEADS // 2, room, SIZE), np.float32)] * 2
    total, run = 0, None
    for new in lengths:
        total += new
        fresh = [real(1, new, n) for n in (HEADS * SIZE, HEADS // 2 * SIZE, HEADS // 2 * SIZE)]
        rest = [I32([total - 1]), I32(total), *LONG]
        run = run or compiled([*fresh, *ours, *rest], attributes)
        expected = onnxruntime_says(GROUP, [*fresh, *theirs, *rest], 3, attributes)
        y, *ours = run([*fresh, *ours, *rest])
        np.testing.assert_allclose(y, expected[0], rtol=2e-4, atol=2e-5)
        slack = room - 3
        held = total if total <= room else total - slack * -((room - total) // slack)
        for cache, want in zip(ours, expected[1:], strict=True):
            assert cache.shape == want.shape
            np.testing.assert_allclose(cache[:, :, :held], want[:, :, :held], rtol=1e-5, atol=1e-6)
        theirs = expected[1:]


def test_a_sliding_cache_of_sequences_of_different_lengths() -> None:
    """And a bias, whose columns are positions."""
    operands = [*grouped(1), *past(6), I32([11, 3]), I32(12), *TABLES, None, real(1, HEADS, 1, 12)]
    attributes = {**TURNED, "local_window_size": 4, "sliding_window_cache": 1}
    expected = onnxruntime_says(GROUP, operands, 3, attributes)
    for run in (
        compiled(operands, attributes),
        lambda operands: attention_model(operands, **attributes)(*given(operands)),
    ):
        results = run(operands)
        np.testing.assert_allclose(results[0], expected[0], rtol=2e-4, atol=2e-5)
        for sequence, held in enumerate((6, 4)):
            np.testing.assert_allclose(*(x[1][sequence, :, :held] for x in (expected, results)), rtol=1e-5, atol=1e-6)


def quantization(bits: int, kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Two scales, in the places behind head_sink, and the attributes for them."""
    scales = [abs(real(1, HEADS // 2, 1, SIZE) if kind == "PER_CHANNEL" else real(1)) / 2**bits for _ in range(2)]
    return scales, {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}


SLIDING = {"local_window_size": 6, "sliding_window_cache": 1}


@pytest.mark.parametrize(
    ("bits", "kind", "more"),
    [(8, "PER_TENSOR", {}), (8, "PER_CHANNEL", SLIDING), (4, "PER_TENSOR", {}), (4, "PER_CHANNEL", {})],
)
def test_quantized_cache_matches_onnxruntime_bitwise(bits: int, kind: str, more: dict[str, int]) -> None:
    scales, quantized = quantization(bits, kind)
    cache = [np.zeros((2, HEADS // 2, 8, SIZE * bits // 8), np.int8 if bits == 8 else np.uint8)] * 2
    run = None
    for new, total in ((5, 5), (1, 6), (1, 7)):
        operands = [*grouped(new), *cache, I32([total - 1] * 2), I32(total), *TABLES, *[None] * 3, *scales]
        run = run or compiled(operands, {**TURNED, **quantized, **more})
        want, *cache = onnxruntime_says(GROUP, operands, 3, {**TURNED, **quantized, **more})
        y, *stored = run(operands)
        np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-5)
        for ours, theirs in zip(stored, cache, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours[:, :, :total], theirs[:, :, :total])


def test_quantized_cache_grows_from_empty() -> None:
    scales, quantized = quantization(8, "PER_TENSOR")
    operands = [*grouped(3), None, None, I32([2, 2]), I32(3), *[None] * 5, *scales]
    empty = [np.zeros((2, HEADS // 2, 0, SIZE), np.int8)] * 2  # which onnxruntime wants
    want = onnxruntime_says(GROUP, [*operands[:3], *empty, *operands[5:]], 3, {**GROUPED, **quantized})
    results = attention_model(operands, **GROUPED, **quantized)(*given(operands))
    for ours, theirs in zip(results, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("window", [{}, {"local_window_size": 4, "sliding_window_cache": 1}])
def test_padding_of_a_prompt_chunk_has_no_effect(window: dict[str, int]) -> None:
    """Each sequence of a batch has tokens of its own number, also none."""
    attributes = {**TURNED, **window}
    valid, ends = [2, 3, 0], [6, 5, 4]
    fresh, cache = ([np.concatenate([x, x[:1]]) for x in xs] for xs in (grouped(3), past(ROOM)))
    chunk = [*fresh, *cache, I32(ends) - 1, I32(ROOM), *TABLES, *[None] * 7, I32(valid)]
    y, *padded = compiled(chunk, attributes)(chunk)
    for b, (count, end) in enumerate(zip(valid, ends, strict=True)):
        if count:
            alone = [*(x[b : b + 1, :count] for x in fresh), *(x[b : b + 1] for x in cache)]
            want, *grown = onnxruntime_says(GROUP, [*alone, I32([end - 1]), I32(end), *TABLES], 3, attributes)
            np.testing.assert_allclose(y[b, :count], want[0], rtol=2e-4, atol=2e-5)
            for ours, theirs in zip(padded, grown, strict=True):
                np.testing.assert_allclose(ours[b, :, :end], theirs[0, :, :end], rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(padded[0][b, :, :end], cache[0][b, :, :end])


def test_a_chunk_beyond_the_cache_gives_nan() -> None:
    chunk = [*grouped(3), *past(7), I32([6, 5]), I32(7), *[None] * 9, I32([2, 2])]  # five held, three rows
    y = attention_model(chunk, **GROUPED)(*given(chunk))[0]
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_a_prompt_is_written_at_the_first_slot() -> None:
    """Where the total is known to be that of new tokens, nothing is before them; more than those yield NaN."""
    operands = [*grouped(3), *past(ROOM), I32([2, 3]), I32(3), *TABLES]
    model = attention_model(operands, **TURNED)
    call = jax.jit(lambda lengths: model(*operands[:5], lengths, *operands[6:]))
    assert "scatter" not in call.lower(operands[5]).as_text()
    y, *_ = call(operands[5])
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
