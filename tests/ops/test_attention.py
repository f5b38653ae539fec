"""Attention against its definition, written out plainly in NumPy; and what the official cases leave open."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.helpers import run_op
from tests.support.joined import differences, joined

RNG = np.random.default_rng(0)
B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 3, 5, 6, 7


def normal(*shape):
    return RNG.standard_normal(shape)


Q, K, V = normal(B, HQ, SQ, D), normal(B, HK, SK, D), normal(B, HK, SK, DV)
PAST = normal(B, HK, 2, D), normal(B, HK, 2, DV)


def softmax(x):
    e = np.exp(x - np.max(x, -1, keepdims=True, initial=-1e9))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def reference(q, k, v, bias, scale, softcap=0.0):
    k, v = (np.repeat(x, HQ // HK, 1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    return softmax(scores + bias) @ v


def bias_of(allowed):
    return np.where(allowed, 0, -np.inf)


ROW, COLUMN = np.arange(SQ)[:, None], np.arange(SK)[None]
MASK = RNG.random((B, 1, SQ, SK)) > 0.5
MASK[0, 0, 1] = False  # a query with nothing to attend to
LENGTHS = np.array([2, 5])
OFFSET = LENGTHS.reshape(B, 1, 1, 1) - SQ
FLOAT = normal(HQ, SQ, SK)

CASES = {
    "plain": ({}, {}, 0),
    "causal": ({}, {"is_causal": 1}, bias_of(ROW >= COLUMN)),
    "boolean": ({"attn_mask": MASK}, {}, bias_of(MASK)),
    "boolean and causal": ({"attn_mask": MASK}, {"is_causal": 1}, bias_of(MASK & (ROW >= COLUMN))),
    "three axes are heads": ({"attn_mask": FLOAT}, {"softcap": 1.5}, FLOAT),
    "integers are added": ({"attn_mask": (3 * FLOAT).astype(np.int32)}, {}, (3 * FLOAT).astype(np.int32)),
    "lengths": ({"nonpad_kv_seqlen": LENGTHS}, {"scale": 0.3}, bias_of(LENGTHS.reshape(B, 1, 1, 1) > COLUMN)),
    "lengths, causal": ({"nonpad_kv_seqlen": LENGTHS}, {"is_causal": 1}, bias_of(OFFSET + ROW >= COLUMN)),
    "window": ({}, {"left_window_size": 1, "right_window_size": 0}, bias_of((ROW - COLUMN <= 1) & (ROW >= COLUMN))),
    "left alone": ({}, {"left_window_size": 0}, bias_of(ROW <= COLUMN)),
    "right, causal": ({}, {"right_window_size": 2, "is_causal": 1}, bias_of(ROW >= COLUMN)),
    "short mask": ({"attn_mask": MASK[..., :3]}, {}, bias_of(MASK & (COLUMN < 3))),
    "one column is short too": ({"attn_mask": FLOAT[..., :1]}, {}, FLOAT + bias_of(COLUMN < 1)),
}
OPTIONAL = ("attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def call(q, k, v, inputs=(), **kwargs):
    optional = [dict(inputs).get(name) for name in OPTIONAL]
    return run_op("Attention", q, k, v, *optional, **kwargs)


def all_cases(traced=True):
    """The results of all cases, compiled as one program; with constant operands if they are not traced."""
    operands = {case: (Q, K, V, inputs) for case, (inputs, _, _) in CASES.items()}

    def computing(case):
        if traced:
            return partial(call, **CASES[case][1]), operands[case]
        return lambda: call(*operands[case], **CASES[case][1]), ()

    return joined({case: computing(case) for case in CASES})


@pytest.mark.parametrize("traced", [False, True])
def test_definition(traced):
    pairs = {}
    for case, got in all_cases(traced).items():
        _, attributes, bias = CASES[case]
        softcap, scale = attributes.get("softcap"), attributes.get("scale", D**-0.5)
        pairs[case] = got, reference(Q, K, V, bias, scale, softcap)
    assert not differences(pairs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("causal", "left"), [(0, -1), (0, 1), (1, -1), (1, 1)])
def test_the_past_comes_first_and_shifts_positions(causal, left):
    outputs = call(
        Q, K, V, {"past_key": PAST[0], "past_value": PAST[1]}, is_causal=causal, left_window_size=left, n_outputs=3
    )
    k, v = np.concatenate([PAST[0], K], 2), np.concatenate([PAST[1], V], 2)
    j = np.arange(2 + SK)[None]
    allowed = ((j <= ROW + 2) | (not causal)) & ((ROW + 2 - j <= left) | (left < 0))
    for got, want in zip(outputs, (reference(Q, k, v, bias_of(allowed), D**-0.5), k, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_rank_three_interleaves_heads():
    def packed(x):
        return x.transpose(0, 2, 1, 3).reshape(B, x.shape[2], -1)

    got, key = call(packed(Q), packed(K), packed(V), q_num_heads=HQ, kv_num_heads=HK, n_outputs=2)
    np.testing.assert_allclose(got, packed(reference(Q, K, V, 0, D**-0.5)), rtol=1e-10)
    np.testing.assert_array_equal(key, K)  # the cache is of rank 4 all the same


@pytest.mark.parametrize("mode", range(4))
def test_qk_output_modes(mode):
    attributes = {"qk_matmul_output_mode": mode, "softcap": 2.0, "n_outputs": 4}
    got = call(Q, K, V, {"attn_mask": MASK}, **attributes)[3]
    raw = Q @ np.repeat(K, HQ // HK, 1).swapaxes(2, 3) * D**-0.5
    biased = 2 * np.tanh(raw / 2) + bias_of(MASK)
    want = (raw, 2 * np.tanh(raw / 2), biased, softmax(biased))[mode]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_before_opset_24_one_column_broadcasts():
    mask = FLOAT[..., :1]
    got = call(Q, K, V, {"attn_mask": mask}, opset=23)
    np.testing.assert_allclose(got, reference(Q, K, V, 0, D**-0.5), rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_scores_do_not_overflow(dtype):
    q = np.full((1, 1, 1, 64), 60.0, dtype)
    got = call(q, q, q, n_outputs=4)
    assert [x.dtype for x in got] == [dtype] * 4
    assert float(got[3].squeeze()) == pytest.approx(60 * 60 * 8, rel=2e-3) and (got[0] == q).all()


def test_softmax_precision_applies_to_softmax_only():
    q, k = np.ones((1, 1, 1, 1), np.float32), np.array([0.0, 10.0], np.float32).reshape(1, 1, 2, 1)
    shown = {"scale": 1.0, "qk_matmul_output_mode": 3, "n_outputs": 4}
    exact, coarse = (np.asarray(call(q, k, k, softmax_precision=p, **shown)[3]).ravel() for p in (1, 16))
    assert exact.dtype == coarse.dtype == np.float32
    assert exact[0] == pytest.approx(np.exp(-10.0), rel=1e-3) and coarse[1] == 1


def test_gradients_of_fully_masked_rows_are_finite():
    def loss(q, k, v):
        return jnp.sum(call(q, k, v, {"attn_mask": MASK}) ** 2)

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*(jnp.asarray(x, jnp.float32) for x in (Q, K, V)))
    assert all(np.isfinite(g).all() for g in grads) and not grads[0][0, :, 1].any()


@pytest.mark.parametrize(
    ("args", "inputs", "attributes", "message"),
    [
        ((Q, K, V), {"past_key": PAST[0]}, {}, "together"),
        ((Q, K, V), {"past_key": PAST[0], "past_value": PAST[1], "nonpad_kv_seqlen": LENGTHS}, {}, "outside the node"),
        ((Q, K, V), {}, {"left_window_size": -2}, "-1 or more"),
        ((Q, K, V), {}, {"qk_matmul_output_mode": 4}, r"qk_matmul_output_mode \(4\) must be one of 0, 1, 2, 3"),
        ((Q, K, V), {}, {"softmax_precision": 7}, "softmax_precision"),
        ((Q, K, V), {}, {"q_num_heads": 3}, "4 heads"),
        ((Q, K, V), {}, {"scale": -1.0}, "negative"),
        ((Q[:, :3], K, V), {}, {}, "multiple"),
        ((Q[:1], K, V), {}, {}, r"key must have the shape \[batch=1"),
        ((Q, K, V[:, :1]), {}, {}, "value must have the shape .*heads=2"),
        ((Q, K, V), {"past_key": PAST[0][..., 1:], "past_value": PAST[1]}, {}, "past_key must have .*size="),
        ((Q, K, V), {"past_key": PAST[0], "past_value": PAST[1][:, :, 1:]}, {}, "past_value must have .*past="),
        ((Q, K, V), {"nonpad_kv_seqlen": LENGTHS[:1]}, {}, "nonpad_kv_seqlen must have"),
        ((Q[0], K[0], V[0]), {}, {}, "num_heads"),
        ((Q, K, V), {"attn_mask": np.zeros((3, 1, 1, SQ, SK))}, {}, "masks must broadcast"),
    ],
)
def test_misuse_is_refused(args, inputs, attributes, message):
    with pytest.raises(ValueError, match=message):
        call(*args, inputs, **attributes)


def linear_reference(q, k, v, state, decay, beta):
    group = q.shape[1] // k.shape[1]
    outputs = []
    for t in range(q.shape[2]):
        if decay is not None:
            state = np.exp(decay[:, :, t, :, None]) * state
        write = v[:, :, t]
        if beta is not None:
            write = beta[:, :, t] * (write - np.einsum("bhkv,bhk->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * write[:, :, None]
        outputs.append(np.einsum("bhk,bhkv->bhv", q[:, :, t], np.repeat(state, group, 1)))
    return np.stack(outputs, 2) * q.shape[3] ** -0.5, state


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("per_key", "tokens"), [(False, 6), (True, 1)])
def test_linear_attention(rule, per_key, tokens):
    q, k, v = normal(B, HQ, tokens, D), normal(B, HK, tokens, D) / 4, normal(B, HK, tokens, DV)
    state = normal(B, HK, D, DV)
    decay = -np.abs(normal(B, HK, tokens, D if per_key else 1)) if "gated" in rule else None
    beta = RNG.random((B, 1 if per_key else HK, tokens, 1)) if "delta" in rule else None

    def packed(x):
        return None if x is None else x.transpose(0, 2, 1, 3).reshape(B, tokens, -1)

    inputs = (packed(q), packed(k), packed(v), state, packed(decay), packed(beta))
    got = run_op("LinearAttention", *inputs, q_num_heads=HQ, kv_num_heads=HK, update_rule=rule, n_outputs=2)
    want, final = linear_reference(q, k, v, state, decay, beta)
    np.testing.assert_allclose(got[0], packed(want), rtol=1e-9)
    np.testing.assert_allclose(got[1], final, rtol=1e-9)


def test_linear_attention_needs_the_inputs_of_its_rule():
    x = normal(1, 2, 4)
    for rule, inputs, message in (
        ("gated", (), "needs input decay"),
        ("linear", (None, None, x), "takes no input beta"),
    ):
        with pytest.raises(ValueError, match=message):
            run_op("LinearAttention", x, x, x, *inputs, q_num_heads=2, kv_num_heads=2, update_rule=rule)


def test_linear_attention_state_keeps_its_own_type():
    x = jnp.ones((1, 2, 4), jnp.bfloat16)
    state = jnp.zeros((1, 1, 4, 4), jnp.float32)
    got = run_op("LinearAttention", x, x, x, state, q_num_heads=1, kv_num_heads=1, update_rule="linear", n_outputs=2)
    assert [y.dtype for y in got] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("interleaved", "width"), [(0, 0), (0, 4), (1, 0), (1, 4)])
def test_rotation_turns_pairs(interleaved, width, jit):
    x, ids = normal(B, HQ, SQ, D), RNG.integers(0, 9, (B, SQ))
    half = (width or D) // 2
    angles = normal(9, half)
    got = run_op(
        "RotaryEmbedding", x, np.cos(angles), np.sin(angles), ids,
        interleaved=interleaved, rotary_embedding_dim=width, jit=jit,
    )  # fmt: skip
    turn = np.exp(1j * angles[ids])[:, None]
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    want = x.copy()
    z = (x[..., first] + 1j * x[..., second]) * turn
    want[..., first], want[..., second] = z.real, z.imag
    np.testing.assert_allclose(got, want, rtol=1e-12)
    flat, known = x.transpose(0, 2, 1, 3).reshape(B, SQ, -1), (np.cos(angles)[ids], np.sin(angles)[ids])
    got = run_op("RotaryEmbedding", flat, *known, interleaved=interleaved, rotary_embedding_dim=width, num_heads=HQ)
    np.testing.assert_allclose(got, want.transpose(0, 2, 1, 3).reshape(B, SQ, -1), rtol=1e-12)


def test_positions_outside_the_cache_are_not_clamped():
    x, cache = np.ones((1, 1, 1, 2), np.float32), np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match="are outside"):
        run_op("RotaryEmbedding", x, cache, cache, np.array([[4]]))
    assert np.isnan(run_op("RotaryEmbedding", x, cache, cache, np.array([[4]]), jit=True)).all()


def test_flex_attention_calls_its_graphs():
    half = [x.astype(np.float16) for x in (Q, K, V)]
    seen = []

    def score_mod(scores):
        seen.append(scores.dtype)
        return (jnp.where(ROW >= COLUMN, scores, -jnp.inf),)

    got = run_op("FlexAttention", *half, domain="ai.onnx.preview", score_mod=score_mod, prob_mod=lambda p: (p * 2,))
    assert seen == [np.float32] and got.dtype == np.float16
    np.testing.assert_allclose(got, 2 * reference(Q, K, V, bias_of(ROW >= COLUMN), D**-0.5), atol=2e-2)
    with pytest.raises(ValueError, match="prob_mod must preserve"):
        run_op("FlexAttention", *half, domain="ai.onnx.preview", prob_mod=lambda p: (p[:1],))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(6, 3), (1, 4), (2, 1)])
def test_causal_convolution_continues_from_its_state(length, taps, jit):
    x, w, b = normal(B, 3, 2 * length), normal(3, 1, taps), normal(3)
    padded = np.pad(x, [(0, 0), (0, 0), (taps - 1, 0)])
    want = np.stack([[np.correlate(row, tap[0]) for row, tap in zip(item, w, strict=True)] for item in padded])
    want = want + b[:, None]

    def conv(*inputs, **attributes):
        return run_op("CausalConvWithState", *inputs, n_outputs=2, jit=jit, **attributes)

    first, state = conv(x[..., :length], w, b)
    second, state = conv(x[..., length:], w, b, state)
    np.testing.assert_allclose(np.concatenate([first, second], 2), want, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(state, padded[..., padded.shape[2] - taps + 1 :])
    np.testing.assert_allclose(conv(x, w, b, activation="silu")[0], want / (1 + np.exp(-want)), rtol=1e-9, atol=1e-12)
