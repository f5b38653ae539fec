"""com.microsoft: sequences one behind another that go on from a state, and states taken back.

The judge is a loop by the words of the schema, and onnxruntime where its CPU provider has the operator.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

from tests.ops.test_microsoft import F32, I32, MICROSOFT, onnxruntime_says
from tests.support.helpers import run_op
from tests.support.joined import check_gradients_of, derived, results_of

RNG = np.random.default_rng(21)
KERNELS = {
    k.op_name
    for k in onnxruntime_state.get_all_opkernel_def()
    if k.domain == MICROSOFT and k.provider == "CPUExecutionProvider"
}
NET, CONV, HASH = "GatedDeltaNet", "VarlenCausalConvWithState", "VarlenNGramHashMapping"


def real(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.7).astype(F32)


SHARED, HEADS, KEY, VALUE = 2, 4, 3, 2
BOUNDS, SAME = I32([0, 2, 6]), None
Q, K, V = real(6, SHARED, KEY), real(6, SHARED, KEY), real(6, HEADS, VALUE)
PACKED = np.concatenate([x.reshape(6, -1) for x in (Q, K, V)], axis=1)
DECAY, DECAYS, BETA = -abs(real(6, HEADS)), -abs(real(6, HEADS, KEY)), abs(real(6, HEADS))
STATE, A_LOG, BIAS, BIASES = real(2, HEADS, VALUE, KEY), real(HEADS), real(HEADS), real(HEADS * KEY)
COUNT = I32([1, 9])
CAPTURED = {"state_update_capacity": 3}
FOUR = [x.reshape(2, 3, *x.shape[1:]) for x in (Q, K, V)]
LINE, TAPS, PAST = real(6, 3), real(3, 1, 3), real(2, 3, 4)
IDS, PRIMES, SIZES = np.array([1, 7, 3, 7, 5, 2]), np.array([3, 5, 7]), np.array([11, 13, 17, 19])
HASHED = {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 2}
WINDOWS, WINDOW_CUTS = np.array([[4, 5], [6, 7]]), I32([[0, 0], [0, 1]])
SEGMENTS, EOS = I32([0, 0, 1, 1, 2, 2]), np.array(7)
NUMBERS = np.array([2, 3, 0, 8, 26, HEADS, VALUE, KEY, SHARED, 2, 2])
BYTES = np.array([4, 8, 0, 2, 3, 2, 3, 2])

# operator, inputs, outputs, attributes; the first row of an operator is run in every type too
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    (NET, [Q, K, V, BOUNDS, DECAY, BETA, STATE, None, None, COUNT], 3, CAPTURED),
    (NET, [Q, K, V, SAME, DECAYS, BETA, STATE], 2, {"scale": 0.3, "qk_l2_norm": 1}),
    (NET, [PACKED, None, None, BOUNDS, DECAY, None, STATE], 2, {"update_rule": "gated"}),
    (NET, [*FOUR, None, None, BETA.reshape(2, 3, HEADS), STATE], 2, {"update_rule": "delta"}),
    (NET, [Q, K, V, I32([0, 0, 6])], 2, {"update_rule": "linear"}),
    (NET, [Q, K, V, SAME, -DECAY, BETA, STATE, A_LOG, BIAS], 2, {"gate_activation": "softplus"}),
    (
        NET,
        [Q, K, V, SAME, DECAYS, BETA, STATE, A_LOG, BIASES, COUNT],
        3,
        {**CAPTURED, "gate_activation": "kda", "gate_lower_bound": -2.0, "beta_activation": "sigmoid"},
    ),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE, None, None, COUNT, I32([0])], 3, CAPTURED),
    (CONV, [LINE, TAPS, BOUNDS, real(3), PAST[..., :2].copy(), COUNT], 3, {**CAPTURED, "activation": "silu"}),
    (CONV, [LINE, TAPS, I32([0, 0, 6]), None, PAST], 2, {"dilation": 2}),
    (CONV, [LINE, TAPS[..., :1].copy(), BOUNDS, None, PAST[..., :0].copy()], 3, {}),
    (
        HASH,
        [IDS, PRIMES, SIZES, BOUNDS, WINDOWS, None, None, SEGMENTS, None, COUNT],
        4,
        {**HASHED, **CAPTURED},
    ),
    (HASH, [IDS, PRIMES, SIZES, BOUNDS], 2, HASHED),
    (HASH, [IDS, PRIMES, SIZES, BOUNDS, WINDOWS, SIZES, EOS], 2, {**HASHED, "reset_on_eos": 1}),
    (HASH, [IDS, PRIMES, SIZES, BOUNDS, WINDOWS, None, EOS, SEGMENTS, WINDOW_CUTS], 3, HASHED),
    ("GatedDeltaNetStateReplay", [real(30), real(50), real(30), NUMBERS], 1, {}),
    ("ConvStateReplay", [real(20), real(20), real(20), BYTES], 1, {}),
]


def net(
    query, key=None, value=None, bounds=None, decay=None, beta=None, state=None, a_log=None, bias=None, count=None,
    active=None, *, beta_activation="none", gate_activation="none", gate_lower_bound=-5.0, qk_l2_norm=0, scale=None,
    state_update_capacity=0, update_rule="gated_delta",
):  # fmt: skip
    if key is None:
        query, key, value = np.split(query, [SHARED * KEY, 2 * SHARED * KEY], axis=1)
        value = value.reshape(6, HEADS, VALUE)
    q, k, v = query.reshape(6, SHARED, KEY), key.reshape(6, SHARED, KEY), value.reshape(6, HEADS, VALUE)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    g = np.zeros((6, HEADS, 1)) if decay is None else decay.reshape(6, HEADS, -1)
    b = np.ones((6, HEADS)) if beta is None else beta.reshape(6, HEADS)
    b = sigmoid(b) if beta_activation == "sigmoid" else b
    if gate_activation != "none":
        g, rate = g + bias.reshape(HEADS, -1), np.exp(a_log)[:, None]
        g = gate_lower_bound * sigmoid(rate * g) if gate_activation == "kda" else -rate * np.log1p(np.exp(g))
    if qk_l2_norm:
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True)) for x in (q, k))
    state = np.zeros((2, HEADS, VALUE, KEY)) if state is None else state.astype(float)
    bounds, y = np.array([0, 3, 6]) if bounds is None else bounds, np.zeros((6, HEADS, VALUE))
    updates = [np.zeros((2, state_update_capacity, *s)) for s in (g.shape[1:], k.shape[1:], v.shape[1:])]
    for i in range(2):
        for place, t in enumerate(range(bounds[i], bounds[i + 1])):
            keys, delta = np.repeat(k[t], HEADS // SHARED, 0), np.zeros((HEADS, VALUE))
            for h in range(HEADS):
                s = state[i, h] * np.exp(g[t, h])
                delta[h] = b[t, h] * (v[t, h] - (s @ keys[h] if "delta" in update_rule else 0))
                state[i, h] = s + np.outer(delta[h], keys[h])
                y[t, h] = state[i, h] @ q[t, h // (HEADS // SHARED)] * (scale or KEY**-0.5)
            if place < state_update_capacity and place < count[i] and active is None:
                for update, x in zip(updates, (np.exp(g[t]), k[t], delta), strict=True):
                    update[i, place] = x
    return y.reshape(*value.shape[:-2], HEADS, VALUE), state, np.concatenate([u.reshape(2, -1) for u in updates], 1)


def conv(x, weight, bounds, bias, past, count=None, *, activation="none", dilation=1, state_update_capacity=0):
    y, state, update = np.zeros(x.shape), past.copy(), np.zeros((2, state_update_capacity, x.shape[1]))
    taps = weight.shape[2]
    for i in range(2):
        own = x[bounds[i] : bounds[i + 1]]
        line = np.concatenate([past[i].T, own])
        for t in range(len(own)):
            y[bounds[i] + t] = sum(line[t + j * dilation] * weight[:, 0, j] for j in range(taps))
        state[i] = line[len(own) :].T
        kept = 0 if count is None else min(count[i], len(own), state_update_capacity)
        update[i, :kept] = own[:kept]
    y = y if bias is None else y + bias
    return (y / (1 + np.exp(-y)) if activation == "silu" else y), state, update


def hashed(
    ids, primes, sizes, bounds, past=None, offsets=None, eos=None, segments=None, past_segments=None, count=None,
    *, max_ngram_size, n_head_per_ngram, pad_id, reset_on_eos=0, state_update_capacity=0,
):  # fmt: skip
    reach, filler = max_ngram_size - 1, pad_id if eos is None else int(eos)
    y, present, cuts = np.zeros((6, len(sizes)), int), [], []
    update = np.full((2, state_update_capacity, reach), pad_id)
    for i in range(2):
        own = ids[bounds[i] : bounds[i + 1]]
        line = [*([filler] * reach if past is None else past[i]), *own]
        of = [0] * len(line) if segments is None else [*segments[bounds[i] : bounds[i + 1]]]
        if segments is not None:
            of = [*([of[0]] * reach if past_segments is None else past_segments[i]), *of]
        for t in range(reach, len(line)):
            seen, mix = True, line[t] * primes[0]
            for n in range(1, reach + 1):
                seen = seen and not (reset_on_eos and line[t - n] == filler) and of[t - n] == of[t - n + 1]
                mix ^= (line[t - n] if seen else filler) * primes[n]
                for h in range((n - 1) * n_head_per_ngram, n * n_head_per_ngram):
                    y[bounds[i] + t - reach, h] = mix % sizes[h] + (0 if offsets is None else offsets[h])
        for j in range(0 if count is None else min(count[i], len(own), state_update_capacity)):
            update[i, j] = line[j + 1 : j + 1 + reach]
        present.append(line[len(own) :])
        cuts.append(of[len(own) :])
    return y, np.array(present), np.array(cuts), update


def replayed_state(source, capsule, destination, numbers):
    at, into, d, k, x, heads, v_size, size, shared, _, kept = numbers
    y = destination.copy()
    for h in range(heads):
        for v in range(v_size):
            for i in range(size):
                place = (h * v_size + v) * size + i
                s = source[at + place]
                for t in range(kept):
                    key = capsule[k + (t * shared + h * shared // heads) * size + i]
                    s = s * capsule[d + t * heads + h] + key * capsule[x + (t * heads + h) * v_size + v]
                y[into + place] = s
    return (y,)


def replayed_conv(source, capture, destination, numbers):
    at, into, taken, batch, channels, width, capacity, kept = numbers
    y = destination.copy()
    for b in range(batch):
        for c in range(channels):
            for p in range(width):
                row = (b * channels + c) * width
                new = taken // 4 + (b * capacity + p + kept - width) * channels + c
                y[into // 4 + row + p] = source[at // 4 + row + p + kept] if p + kept < width else capture[new]
    return (y,)


LOOPS: Any = {
    NET: net, CONV: conv, HASH: hashed, "GatedDeltaNetStateReplay": replayed_state, "ConvStateReplay": replayed_conv,
}  # fmt: skip


def test_matches_the_definition_in_the_schema(subtests: pytest.Subtests) -> None:
    for case, (name, inputs, count, attributes), results in results_of(ROWS):
        with subtests.test(msg=case):
            judges = [LOOPS[name](*inputs, **attributes)]
            if name in KERNELS:
                judges.append(onnxruntime_says(name, inputs, min(count, 2), attributes))  # the rest is not defined
            for expected in judges:
                for result, want in zip(results[: len(expected)], expected[:count], strict=True):
                    assert result.shape == want.shape
                    np.testing.assert_allclose(result, want, rtol=2e-4, atol=2e-5)


def test_captured_state_can_be_restored() -> None:
    """To where the first tokens had brought it."""
    inputs = [Q, K, V, SAME, DECAY, BETA, STATE]
    *_, update = run_op(NET, *inputs, None, None, I32([3, 3]), domain=MICROSOFT, n_outputs=3, **CAPTURED)
    sizes = (0, 3 * HEADS, 3 * (HEADS + SHARED * KEY))
    for kept in (1, 2, 3):
        short = [x.reshape(2, 3, *x.shape[1:])[:, :kept] for x in (Q, K, V)]
        gates = [x.reshape(2, 3, -1)[:, :kept] for x in (DECAY, BETA)]
        _, state = run_op(NET, *short, None, *gates, STATE, domain=MICROSOFT, n_outputs=2)
        numbers = np.array([0, 0, *sizes, HEADS, VALUE, KEY, SHARED, 3, kept])
        flat = STATE[1].reshape(-1), np.asarray(update)[1], np.zeros(STATE[1].size, F32)
        again = run_op("GatedDeltaNetStateReplay", *flat, numbers, domain=MICROSOFT)
        np.testing.assert_allclose(again, np.reshape(state[1], -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [NET, CONV, HASH])
def test_invalid_boundaries_are_rejected(name: str) -> None:
    """Known ones are refused; the compiled program marks everything that it gives."""
    inputs, count, attributes = next((i, n, a) for o, i, n, a in ROWS if o == name)
    place = next(i for i, x in enumerate(inputs) if x is BOUNDS)
    mark = -1 if name == HASH else np.nan

    def run(bounds: Any) -> Any:
        given = [*inputs[:place], bounds, *inputs[place + 1 :]]
        return run_op(name, *given, domain=MICROSOFT, n_outputs=count, **attributes)

    compiled = jax.jit(run)
    assert not any(np.array_equal(y, mark * np.ones(y.shape), equal_nan=True) for y in compiled(BOUNDS))
    for wrong in ([0, 2, 5], [1, 2, 6], [0, 7, 6]):
        with pytest.raises(ValueError, match="increase from 0 to 6"):
            run(I32(wrong))
        for y in compiled(I32(wrong)):
            np.testing.assert_array_equal(y, mark * np.ones(y.shape))


REFUSED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    (NET, [Q, K, V, None, DECAY, BETA], {}, "give cu_seqlens, or an initial_state"),
    (NET, [Q, K, V, SAME, DECAY, None, STATE], {}, "needs input beta"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE], {"update_rule": "delta"}, "takes no input decay"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE, A_LOG], {"gate_activation": "qwen"}, "needs a_log and dt_bias"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE, A_LOG, BIAS], {}, "takes no a_log and dt_bias"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE, A_LOG, BIASES], {"gate_activation": "kda"}, r"dt_bias \(12,\)"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE.swapaxes(2, 3)], {}, r"initial_state .*V=2, K=3"),
    (NET, [Q, K, V[:, :3], SAME, DECAY, BETA, STATE], {}, "must be a multiple of 2 query"),
    (NET, [PACKED[:, 1:], None, None, SAME, DECAY, BETA, STATE], {}, "19 features"),
    (NET, [PACKED, None, None, BOUNDS, DECAY, BETA], {}, "requires initial_state"),
    (NET, [*FOUR, BOUNDS, DECAY, BETA, STATE], {}, "must have the shape .total, heads, size. .it has"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE], {"state_update_capacity": 2}, "from 1 to 8 with capture_count"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE], {"chunk_size": 0}, "chunk_size"),
    (NET, [Q, K, V, SAME, DECAY, BETA, STATE], {"gate_lower_bound": 1.0}, "negative"),
    (CONV, [LINE, TAPS, BOUNDS, None, PAST[..., :3]], {}, r"initial_state .*past=2"),
    (CONV, [LINE, TAPS, BOUNDS, None, PAST], {"dilation": 0}, "dilation"),
    (CONV, [LINE, TAPS, BOUNDS, None, PAST[..., :2], None, real(6, 2, 3), real(6, 1)], {}, "implemented by CUDA only"),
    (HASH, [IDS, PRIMES[:2], SIZES, BOUNDS], HASHED, "multipliers"),
    (HASH, [IDS, PRIMES, SIZES, BOUNDS, None, None, None, None, WINDOW_CUTS], HASHED, "require segment_ids"),
    (HASH, [IDS, PRIMES, SIZES, I32([0, 0, 6])], HASHED, "strictly increase"),
    ("GatedDeltaNetStateReplay", [real(30), real(37), real(30), NUMBERS], {}, "elements 26 to 42 of capsule_backing"),
    ("ConvStateReplay", [real(20), real(20), real(20), BYTES + 1], {}, "item size 4"),
    ("ConvStateReplay", [real(20), real(20), real(1, 20), BYTES], {}, "rank 1 and one dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inputs", "attributes", "said"), REFUSED)
def test_mismatched_operands_are_rejected(name: str, inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)


DIFFERENTIABLE = [NET, CONV, "GatedDeltaNetStateReplay"]


def test_gradients() -> None:
    check_gradients_of({name: derived(next(row for row in ROWS if row[0] == name)) for name in DIFFERENTIABLE})


def test_half_precision() -> None:
    """Operators that an older onnxruntime has no schema of."""
    *flat, numbers = next(i for o, i, *_ in ROWS if o == "ConvStateReplay")
    half = run_op("ConvStateReplay", *(x.astype(np.float16) for x in flat), numbers // [2, 2, 2, 1, 1, 1, 1, 1],
                  domain=MICROSOFT)  # fmt: skip
    whole = run_op("ConvStateReplay", *flat, numbers, domain=MICROSOFT)
    np.testing.assert_array_equal(half, np.asarray(whole).astype(np.float16))
