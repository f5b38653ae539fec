"""com.microsoft: gates, routers, adapters and rotations of a decoder's block, by the words of the schema."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ops.test_microsoft import F32, I32, MICROSOFT, onnxruntime_says
from tests.ops.test_microsoft_ragged import KERNELS
from tests.support.helpers import run_op
from tests.support.joined import check_gradients_of, derived, results_of

RNG = np.random.default_rng(5)
BF16, F16 = ml_dtypes.bfloat16, np.float16
GATE, PROJ, LORA = "SwiGLU", "RouterGateUpProj", "MatMulNBitsQLoRA"
ROUTER, ROTARY, MIX = "MoEGroupRouter", "RMSNormRotary", "HyperConnectionLowRankMix"
MERGE = "PackedSparseAttentionIndexerMerge"


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F32)


def packed(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


SHAPED = {"activation_alpha": 1.5, "activation_beta": 0.5, "limit": 0.7}
X, LOGITS, BIAS = real(3, 40), real(5, 8), real(8)
SCALES = [real(6, 3) / 8, real(5, 3) / 128, real(6, 1) / 128]
WEIGHTS = [packed(6, 3, 8), SCALES[0], packed(5, 3, 16), SCALES[1], packed(6, 1, 16), SCALES[2]]
QLORA = {"K": 40, "N": 6, "block_size": 16, "lora_block_size": 16}
EMPTY = np.zeros((0, 3, 16), np.uint8), np.zeros((6, 0, 16), np.uint8)
HEADS, ANGLES = real(2, 3, 2, 10).astype(F16), real(9, 2)
TABLES = [np.cos(ANGLES), np.sin(ANGLES)]
POSITIONS = np.array([[0, 3, 8], [5, 2, 2]])
TURN = {"rotary_embedding_dim": 4, "output_fp16": 1}
PART = {**TURN, "input_start": 2, "input_width": 6, "flatten_batch": 1}
STREAMS = [real(2, 4, 6), real(6), real(6, 5), real(5, 6), real(6, 2)]
BEHIND = [real(2, 4, 3), real(2, 4, 2)]
BRANCHES = {"num_branches": 2, "silu_alpha": 1.3, "reduction_scale": 0.5, "gate_div": 2.0, "gate_mul": 3.0}
BASE = I32([[4, 2, 4, 9], [7, 1, -1, -1]]), I32([3, 2]), I32([0, 1, 1, 0, 5, 0])
RANGE = I32([3, 0, 7, 1, 0, 2]), I32([6, 2, 7, 6, 0, 1])
MORE = I32([[2, 5, 5], [1, 3, 6], [0, 0, 0], [4, 4, 4], [1, 1, 1], [-1, 0, 0]]), I32([2, 3, 0, 4, 1, 1])

# operator, inputs, outputs, attributes; the first row of an operator is run in every type too
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    (GATE, [real(2, 3), real(2, 3)], 1, SHAPED),
    (GATE, [real(2, 6)], 1, {}),
    (GATE, [real(2, 6).astype(F16), real(2, 6).astype(F16)], 1, {**SHAPED, "round_activation": 1}),
    (PROJ, [real(2, 3, 4), real(4, 7)], 2, {"router_size": 3}),
    (PROJ, [real(3, 4), real(4, 6)], 2, {"router_size": 2, **SHAPED}),
    (LORA, [X, *WEIGHTS], 1, QLORA),
    (LORA, [X, *WEIGHTS[:4], EMPTY[1], WEIGHTS[5]], 1, QLORA),
    (LORA, [X, *WEIGHTS[:2], EMPTY[0], *WEIGHTS[3:]], 1, QLORA),
    (ROUTER, [LOGITS, BIAS], 3, {"top_k": 3}),
    (ROUTER, [LOGITS, BIAS], 1, {"top_k": 3, "n_group": 4, "topk_group": 2, "router_sentinel": -7.0}),
    (ROUTER, [LOGITS, BIAS], 1, {"top_k": 3, "n_group": 2, "topk_group": 1, "group_topk": 9}),
    (ROUTER, [np.zeros((1, 5, 8), F32), BIAS * 0], 1, {"top_k": 2, "n_group": 4, "topk_group": 2, "group_topk": 1}),
    (ROUTER, [X, BIAS, real(8, 40)], 3, {"top_k": 1}),
    (ROTARY, [HEADS, real(10), POSITIONS, *TABLES], 2, TURN),
    (ROTARY, [HEADS, real(6), POSITIONS, *TABLES, I32(1)], 2, PART),
    (ROTARY, [HEADS, real(10), np.array([4]), *TABLES], 1, {**TURN, "epsilon": 0.1}),
    (MIX, STREAMS, 3, BRANCHES),
    (MIX, [*STREAMS, *BEHIND], 3, {"num_branches": 2, "epsilon": 0.1}),
    (MERGE, [*BASE, *RANGE], 3, {"max_output_entries": 5, "policy_mode": "append_range"}),
    (MERGE, [*BASE, None, None, *MORE], 3, {"max_output_entries": 4, "policy_mode": "append_indices"}),
]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def gate(a, b=None, *, activation_alpha=1.0, activation_beta=0.0, limit=0.0, round_activation=0):
    a, b = np.split(a, 2, axis=-1) if b is None else (a, b)
    dtype, a, b = a.dtype, a.astype(float), b.astype(float)
    if limit > 0:
        a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
    y = a * sigmoid(activation_alpha * a)
    y = y.astype(dtype).astype(float) if round_activation else y
    return ((y * (b + activation_beta)).astype(dtype),)


def projected(x, w, *, router_size, **options):
    y = x @ w
    return y[..., :router_size], *gate(y[..., router_size:], **options)


def unpacked(weight, scales, bits, size):
    values = np.stack([weight >> shift & 2**bits - 1 for shift in range(0, 8, bits)], -1).astype(float)
    return ((values.reshape(*scales.shape, -1) - 2 ** (bits - 1)) * scales[..., None]).reshape(len(scales), -1)[
        :, :size
    ]


def adapted(x, w, scales, a, a_scales, b, b_scales, **_):
    y = x @ unpacked(w, scales, 4, 40).T
    if b.size:
        down = x @ unpacked(a, a_scales, 8, 40).T if a.size else np.zeros((3, 5))
        y = y + down @ unpacked(b, b_scales, 8, 5).T
    return (y,)


def routed(logits, bias, weight=None, *, group_topk=2, n_group=1, router_sentinel=-10000.0, top_k, topk_group=1):
    logits = logits.reshape(-1, logits.shape[-1]) if weight is None else logits @ weight.T
    scores = sigmoid(logits)
    y = np.full(scores.shape, router_sentinel)
    for token, (s, plain) in enumerate(zip(scores + bias, scores, strict=True)):
        groups = s.reshape(n_group, -1)
        best = np.argsort(-np.sort(groups, 1)[:, ::-1][:, :group_topk].sum(1), kind="stable")[:topk_group]
        inside = [e for e in range(len(s)) if e // groups.shape[1] in best]
        for e in sorted(inside, key=lambda e: -s[e])[:top_k]:
            y[token, e] = np.log(max(plain[e], 1e-20))
    return y, scores + bias, scores


def rotated(
    x, scale, at, cos, sin, _=None, *, rotary_embedding_dim, epsilon=1e-6, input_start=0, input_width=0,
    flatten_batch=0, **_precision,
):  # fmt: skip
    x = x[..., input_start : input_start + (input_width or 10)].astype(float)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale
    z, half = y.copy(), rotary_embedding_dim // 2
    for b, t, i in np.ndindex(2, 3, half):
        p = at[b, t] if at.size > 1 else at[0] + t
        c, s, low, high = cos[p, i], sin[p, i], y[b, t, :, i], y[b, t, :, i + half]
        z[b, t, :, i], z[b, t, :, i + half] = low * c - high * s, low * s + high * c
    return z.reshape(*((1, 6) if flatten_batch else (2, 3)), -1), y


def mixed(
    x, scale, down, up, inject, block=None, post=None, *, num_branches, epsilon=1e-5, silu_alpha=1.0,
    reduction_scale=1.0, gate_div=1.0, gate_mul=1.0,
):  # fmt: skip
    s = x.reshape(2, 4, num_branches, -1) + (0 if block is None else post[..., None] * block[..., None, :])
    hn = s / np.sqrt((s**2).mean(-1, keepdims=True) + epsilon) * scale.reshape(num_branches, -1)
    flat = hn.reshape(2, 4, -1)
    z = silu_alpha * (flat @ down)
    g = sigmoid((z * sigmoid(z)) @ up).reshape(hn.shape)
    post = sigmoid(flat @ inject / gate_div) * gate_mul
    return reduction_scale * (hn * g).sum(2), post, s.reshape(x.shape)


def merged(base, counts, rows, starts=None, ends=None, more=None, numbers=None, *, max_output_entries, policy_mode):
    y, found, status = np.full((len(rows), max_output_entries), -1), [], []
    for n, row in enumerate(rows):
        fine = 0 <= row < len(base) and 0 <= counts[row] <= base.shape[1]
        if policy_mode == "append_range":
            fine = fine and 0 <= starts[n] <= ends[n]
            behind = list(range(starts[n], ends[n]))
        else:
            fine = fine and 0 <= numbers[n] <= more.shape[1]
            behind = list(more[n, : numbers[n]])
        every = list(dict.fromkeys([*base[row, : counts[row]], *behind])) if fine else []
        fine = fine and min(every, default=0) >= 0
        room = len(every) <= max_output_entries
        status.append(0 if fine and room else 2 if fine else 1)
        found.append(len(every) if fine and room else 0)
        y[n, : found[-1]] = every[: found[-1]]
    return y, np.array(found), np.array(status)


LOOPS: Any = {
    GATE: gate, PROJ: projected, LORA: adapted, ROUTER: routed, ROTARY: rotated, MIX: mixed, MERGE: merged,
}  # fmt: skip


def test_matches_the_definition_in_the_schema(subtests: pytest.Subtests) -> None:
    for case, (name, inputs, count, attributes), results in results_of(ROWS):
        with subtests.test(msg=case):
            judges = [LOOPS[name](*inputs, **attributes)]
            if name in KERNELS and count == 1:  # the scores of all experts are for CUDA
                judges.append(onnxruntime_says(name, inputs, count, attributes))
            tolerance = 2e-3 if inputs[0].dtype == F16 else 2e-5
            for expected in judges:
                for result, want in zip(results, expected[:count], strict=True):
                    assert result.shape == want.shape
                    np.testing.assert_allclose(result.astype(float), want, rtol=tolerance, atol=tolerance)


HALVES = [(name, dtype) for name in (GATE, PROJ, LORA, ROUTER, MIX) for dtype in (F16, BF16)]
HALVES.remove((LORA, BF16))  # which is not in the schema


def test_half_precision(subtests: pytest.Subtests) -> None:
    """Beside the same in float32; an older onnxruntime has no schema of most of these."""
    halves, wholes = [], []
    for name, dtype in HALVES:
        inputs, count, attributes = next((i, n, a) for o, i, n, a in ROWS if o == name)
        half = [x.astype(dtype) if x.dtype == F32 and x is not BIAS else x for x in inputs]
        halves.append((name, half, count, attributes))
        wholes.append((name, [x.astype(F32) if x.dtype == dtype else x for x in half], count, attributes))
    both = zip(HALVES, results_of(halves), results_of(wholes), strict=True)
    for (name, dtype), (_, _, results), (_, _, expected) in both:
        with subtests.test(msg=f"{name}, {np.dtype(dtype)}"):
            for result, want in zip(results, expected, strict=True):
                assert result.dtype in (dtype, F32)
                np.testing.assert_allclose(result.astype(float), want, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(("arithmetic", "prefill", "steps"), [(1, 0, 0), (0, 0, 1), (1, 1, 1)])
def test_rotation_in_bfloat16_rounds_at_each_step(arithmetic: int, prefill: int, steps: int) -> None:
    x, cos, sin = HEADS.astype(BF16), *(t.astype(BF16) for t in TABLES)
    options = {"rotary_embedding_dim": 4, "use_fp32_arithmetic": arithmetic}
    y, normed = run_op(
        ROTARY, x, np.ones(10, F32), POSITIONS, cos, sin, I32(prefill), domain=MICROSOFT, n_outputs=2, **options
    )
    n = np.asarray(normed)
    assert (n == n.astype(BF16).astype(F32)).all() and y.dtype == BF16
    low, high = n[..., :2], n[..., 2:4]
    c, s = (t.astype(F32)[POSITIONS][:, :, None] for t in (cos, sin))
    round_ = (lambda v: v.astype(BF16).astype(F32)) if steps else (lambda v: v)
    want = np.concatenate([round_(low * c) - round_(high * s), round_(low * s) + round_(high * c), n[..., 4:]], -1)
    np.testing.assert_array_equal(np.asarray(y).reshape(want.shape), want.astype(BF16))


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "said"),
    [
        (GATE, [real(2, 3)], {}, "must be even"),
        (GATE, [real(2, 3), real(3)], {}, "does not broadcast"),
        (PROJ, [real(3, 4), real(4, 6)], {"router_size": 3}, "plus an even number"),
        (LORA, [X, *WEIGHTS[:3], real(4), *WEIGHTS[4:]], QLORA, "3 scales per row"),
        (ROUTER, [LOGITS, BIAS], {"top_k": 9}, r"top_k \(9\) from 1 to 8"),
        (ROUTER, [LOGITS, BIAS], {"top_k": 1, "n_group": 3}, "divide 8 experts"),
        (ROUTER, [X, BIAS, real(8, 40)], {"top_k": 1}, "requires the outputs"),
        (ROTARY, [HEADS, real(10), np.array([4]), *TABLES], {**TURN, "flatten_batch": 1}, "use position_ids"),
        (ROTARY, [HEADS, real(10), POSITIONS, *TABLES], {"rotary_embedding_dim": 12}, "must be even"),
        (MIX, STREAMS, {"num_branches": 4}, "must divide"),
        (MIX, [*STREAMS, BEHIND[0]], BRANCHES, "prev_post_gate"),
        (MERGE, [*BASE, *RANGE], {"max_output_entries": 5, "policy_mode": "append_indices"}, "both of its inputs"),
    ],
)
def test_mismatched_operands_are_rejected(name: str, inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(name, *inputs, domain=MICROSOFT, **attributes)


DIFFERENTIABLE = [GATE, PROJ, ROUTER, MIX]


def test_gradients() -> None:
    cases = {}
    for name in DIFFERENTIABLE:
        _, inputs, _, attributes = next(row for row in ROWS if row[0] == name)
        row = name, inputs, 1 if name in (GATE, ROUTER) else 2, attributes
        cases[name] = derived(row, *(i for i, x in enumerate(inputs) if x is BIAS))
    check_gradients_of(cases)
