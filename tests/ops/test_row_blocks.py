"""Attention by blocks of queries equals attention at once, and holds no more than a block of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx2jax.ops import attention
from tests.ops.test_attention import all_cases, call
from tests.support.helpers import run_op
from tests.support.joined import differences

RNG = np.random.default_rng(1)
LONG = RNG.standard_normal((2, 4, 7, 6))


BLOCKS = {"ATTENTION_BLOCK": 0, "ATTENTION_QUERIES": 2, "ATTENTION_PARTS": 1}


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of two queries, of any attention of four or more."""
    for name, value in BLOCKS.items():
        monkeypatch.setattr(attention, name, value)


def at_once_and_by_blocks(monkeypatch, function, *operands):
    at_once = jax.jit(function)(*operands)
    for name, value in BLOCKS.items():
        monkeypatch.setattr(attention, name, value)
    text = str(jax.make_jaxpr(lambda *x: function(*x))(*operands))
    assert "scan[" in text
    return at_once, jax.jit(lambda *x: function(*x))(*operands)


def test_cases_by_blocks_of_one_query(monkeypatch):
    at_once = all_cases()
    for name, value in {"ATTENTION_BLOCK": 0, "ATTENTION_QUERIES": 1}.items():
        monkeypatch.setattr(attention, name, value)
    by_blocks = all_cases()
    assert not differences({case: (by_blocks[case], y) for case, y in at_once.items()}, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.extended)])
def test_gradients_with_a_block_that_overlaps_the_one_before(dtype, monkeypatch):
    q, k, v = (jnp.asarray(x, dtype) for x in (LONG, LONG[:, :2], LONG[:, 2:]))
    bias = jnp.asarray(RNG.standard_normal((4, 7, 7)), dtype)

    def outputs(q, k, v, bias):
        def y(q, k, v, bias):
            return call(q, k, v, {"attn_mask": bias}, is_causal=1, softcap=3.0)

        return y(q, k, v, bias), jax.grad(lambda *x: jnp.sum(y(*x) ** 2), (0, 1, 2, 3))(q, k, v, bias)

    at_once, by_blocks = at_once_and_by_blocks(monkeypatch, outputs, q, k, v, bias)
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(by_blocks), strict=True):
        tolerance = 1e-5 if dtype == np.float32 else 0.1
        np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("past", [3, pytest.param(0, marks=pytest.mark.extended)])
def test_causal_attention_reads_keys_up_to_the_end_of_each_part(past, monkeypatch):
    """With a mask of all queries and one of all keys; gradients too, and no scores of later keys."""
    q, k, v = (jnp.asarray(x, np.float32) for x in (LONG, LONG[:, :2], LONG[:, 2:]))
    given = {n: jnp.asarray(x[:, :2, :past], np.float32) for n, x in (("past_key", LONG), ("past_value", -LONG))}
    bias = jnp.asarray(RNG.standard_normal((7, 7 + past)), np.float32)

    def outputs(q, k, v, bias):
        def y(q, k, v, bias):
            return call(q, k, v, {"attn_mask": bias, **given}, is_causal=1, left_window_size=4)

        return y(q, k, v, bias), jax.grad(lambda *x: jnp.sum(y(*x) ** 2), (0, 1, 2, 3))(q, k, v, bias)

    at_once = jax.jit(outputs)(q, k, v, bias)
    monkeypatch.setattr(attention, "ATTENTION_QUERIES", 2)
    monkeypatch.setattr(attention, "ATTENTION_PARTS", 2)
    lowered = jax.jit(lambda *x: outputs(*x)).lower(q, k, v, bias)
    assert f"2x2x4x{4 + past}xf32" in lowered.as_text() and f"2x2x7x{7 + past}xf32" not in lowered.as_text()
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(lowered.compile()(q, k, v, bias)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_grouped_query_attention_with_a_window_and_a_sink(monkeypatch):
    sink, ends = np.float32([1, 0, -1, 2]), np.int32([6, 4])
    options = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3, "domain": "com.microsoft", "n_outputs": 3}

    def y(q, k, v):
        past = jnp.zeros((2, 2, 0, 6), np.float32)
        inputs = (q, k, v, past, past, ends, np.int32(7), *[None] * 4, sink)
        return run_op("GroupQueryAttention", *inputs, **options)[0]

    x = jnp.asarray(LONG.reshape(2, 7, 24), np.float32)
    at_once, by_blocks = at_once_and_by_blocks(monkeypatch, y, x, x[..., :12], x[..., 12:])
    np.testing.assert_allclose(by_blocks, at_once, rtol=1e-6, atol=1e-6)


def test_multi_head_attention_with_a_padding_mask(monkeypatch):
    mask = np.int32([[1, 1, 1, 0, 1, 1, 0], [1] * 7])

    def y(x):
        options = {"num_heads": 4, "unidirectional": 1, "domain": "com.microsoft"}
        return run_op("MultiHeadAttention", x, 2 * x, x, None, mask, **options)

    at_once, by_blocks = at_once_and_by_blocks(monkeypatch, y, jnp.asarray(LONG.reshape(2, 7, 24), np.float32))
    np.testing.assert_allclose(by_blocks, at_once, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("blocks")
def test_scores_that_are_asked_for_are_held():
    def y(x):
        return call(x, x, x, n_outputs=4)[3]

    assert "scan[" not in str(jax.make_jaxpr(y)(jnp.asarray(LONG, np.float32)))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("rows", [2, 6])
def test_a_mask_of_other_queries_is_refused(rows):
    x = jnp.asarray(LONG, np.float32)
    with pytest.raises(ValueError, match="masks must broadcast"):
        call(x, x, x, {"attn_mask": np.zeros((rows, 7), bool)})


def test_long_sequences_take_a_tenth_of_the_memory():
    """Of the 8.6 GB and 21.5 GB that the scores of 16 heads over 8192 tokens take on a CPU, and their gradients."""
    x = jax.ShapeDtypeStruct((1, 16, 8192, 64), np.float32)

    def y(q, k, v):
        return call(q, k, v, is_causal=1)

    def temporary(function):
        return jax.jit(function).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(y) < 0.86e9
    assert temporary(jax.grad(lambda *x: y(*x).sum(), (0, 1, 2))) < 2.1e9


def test_short_and_symbolic_sequences_are_computed_at_once():
    assert attention.block_size((1, 32, 1, 2**26)) is None  # a step of a decoder
    assert attention.block_size((8, 12, 1024, 512)) is None
    (n,) = jax.export.symbolic_shape("n")
    assert attention.block_size((1, 16, n, n)) is None
