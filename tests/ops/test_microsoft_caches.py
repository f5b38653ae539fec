"""GroupQueryAttention's caches: a total length that is traced."""

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
from tests.ops.test_microsoft import ANGLES, GROUPED, HEADS, I32, MICROSOFT, SIZE, grouped, past, real

NAMES = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache"]
NAMES += ["sin_cache", "position_ids", "attention_bias"]
TURNED = {**GROUPED, "do_rotary": 1}
TABLES = [np.cos(ANGLES), np.sin(ANGLES)]
ROOM = 9


def attention_model(operands: list[Any], **attributes: Any) -> Model:
    """One GroupQueryAttention, whose every operand is an input of free shape."""
    names = [n if x is not None else "" for n, x in zip(NAMES, operands, strict=False)]
    outputs = ["y", "present_key", "present_value"]
    node = helper.make_node("GroupQueryAttention", names, outputs, domain=MICROSOFT, **attributes)
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


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_total_gives_the_same_numbers(name: str) -> None:
    operands, attributes = CALLS[name]
    model = attention_model(operands, **attributes)
    for known, traced in zip(model(*given(operands)), jax.jit(model)(*given(operands)), strict=True):
        np.testing.assert_allclose(traced, known, rtol=1e-5, atol=1e-6)


def test_a_caller_that_traces_changes_nothing_for_one_that_does_not() -> None:
    """A plain call knows the total, and its cache grows."""
    operands = [*grouped(1), *past(5), I32([5, 5]), I32(6)]
    model = attention_model(operands, **GROUPED)
    y, key, _ = jax.jit(model)(*operands)
    assert key.shape[2] == 5 and np.isnan(y).all()  # six tokens in a buffer of five
    y, key, _ = model(*operands)
    assert key.shape[2] == 6 and np.isfinite(y).all()
    same = jax.jit(lambda query: model(query, *operands[1:]))(operands[0])
    np.testing.assert_allclose(same[0], y, rtol=1e-5, atol=1e-6)


def test_a_traced_total_needs_a_past() -> None:
    operands = [*grouped(3), None, None, I32([2, 2]), I32(3)]
    model = attention_model(operands, **GROUPED)
    with pytest.raises(KnownValueError, match="give a past_key of its full length"):
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
