"""com.microsoft: attention on selected keys, beside a loop by the words of the schema."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.ops.test_microsoft import F32, I32, MICROSOFT
from tests.support.helpers import check_gradients, run_op
from tests.support.joined import results_of

RNG = np.random.default_rng(6)
NAME = "DynamicSparseAttention"
HEADS, SHARED, SIZE, ROOM, NEW = 4, 2, 8, 6, 2


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F32)


QKV = [real(2, NEW, heads * SIZE) for heads in (HEADS, SHARED, SHARED)]
PACKED = [np.concatenate(QKV, axis=2), None, None]
PAST, OTHER = [real(2, SHARED, ROOM, SIZE) for _ in range(2)], [real(2, SHARED, 5, SIZE) for _ in range(2)]
CHOSEN = I32([[0, 2, -1], [3, 1, 0], [2, -1, -1], [-1, -1, -1]])
LENGTHS, TOTAL = [I32([2, 3, 1, 0]), I32([3, 4])], I32([ROOM])
ANGLES = real(9, 2)
TABLES = [np.cos(ANGLES), np.sin(ANGLES)]
WHO = {"num_heads": HEADS, "kv_num_heads": SHARED}
NEAR = {**WHO, "attention_mode": "local_plus_selected", "selected_kv_source": "auxiliary", "local_window_size": 2}
MAIN = [*PAST, None, None, CHOSEN, *LENGTHS, TOTAL]
AUXILIARY = [*PAST, *OTHER, CHOSEN, *LENGTHS, TOTAL]

# operator, inputs, outputs, attributes; the first row of an operator is run in every type too
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    (NAME, [*QKV, *MAIN], 3, WHO),
    (NAME, [*QKV, *MAIN, *TABLES], 3, {**WHO, "do_rotary": 1, "rotary_offset": 3, "smooth_softmax": 1}),
    (NAME, [*PACKED, *AUXILIARY, None, None, None, real(SIZE), real(SIZE)], 3, NEAR),
    (
        NAME,
        [*QKV, *PAST, OTHER[0], None, *AUXILIARY[4:], *TABLES, np.array([[5, 0], [1, 8]]), None, None, real(HEADS)],
        1,
        {**NEAR, "auxiliary_kv_shared": 1, "do_rotary": 1, "rotary_interleaved": 1, "scale": 0.4},
    ),
]


def turned(x: Any, at: Any, tables: Any, first: int, interleaved: int) -> Any:
    y = x.copy()
    for i in range(2):
        c, s = (t[at, i] for t in tables)
        a, b = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + 2 + i)
        y[a], y[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return y


def by_loops(
    query, key, value, past_key, past_value, other_key, other_value, chosen, counts, ends, _, cos=None, sin=None,
    positions=None, q_norm=None, k_norm=None, sink=None, *, num_heads, kv_num_heads, do_rotary=0, rotary_offset=0,
    rotary_interleaved=0, smooth_softmax=0, scale=SIZE**-0.5, local_window_size=0, **_options,
):  # fmt: skip
    if key is None:
        query, key, value = np.split(query, [HEADS * SIZE, (HEADS + SHARED) * SIZE], axis=2)
    q, k, v = (x.reshape(2, NEW, -1, SIZE).copy() for x in (query, key, value))
    keys, values, y = past_key.copy(), past_value.copy(), np.zeros((2, NEW, num_heads, SIZE))
    for b, t in np.ndindex(2, NEW):
        place = ends[b] + 1 - NEW + t
        at = place if positions is None else positions[b, t]
        for x, norm in ((q, q_norm), (k, k_norm)):
            for h in range(x.shape[2]):
                if norm is not None:
                    x[b, t, h] *= norm / np.sqrt((x[b, t, h] ** 2).mean() + 1e-6)
                if do_rotary:
                    x[b, t, h] = turned(x[b, t, h], at, (cos, sin), rotary_offset, rotary_interleaved)
        keys[b, :, place], values[b, :, place] = k[b, t], v[b, t]
    for b, t, h in np.ndindex(2, NEW, num_heads):
        place, g = ends[b] + 1 - NEW + t, h // (num_heads // kv_num_heads)
        selected = chosen[b * NEW + t, : counts[b * NEW + t]]
        if other_key is None:
            pairs = [(keys[b, g, p], values[b, g, p]) for p in selected if p <= place]
        else:
            near = range(max(place - local_window_size + 1, 0), place + 1)
            pairs = [(keys[b, g, p], values[b, g, p]) for p in near]
            others = other_key if other_value is None else other_value
            pairs += [(other_key[b, g, p], others[b, g, p]) for p in selected]
        shares = [np.exp(q[b, t, h] @ k * scale) for k, _ in pairs]
        rest = np.exp(sink[h]) if sink is not None else smooth_softmax
        if pairs:
            y[b, t, h] = sum(s * v for s, (_, v) in zip(shares, pairs, strict=True)) / (sum(shares) + rest)
    return y.reshape(2, NEW, -1), keys, values


def test_matches_the_definition_in_the_schema(subtests: pytest.Subtests) -> None:
    for case, (_, inputs, _, attributes), results in results_of(ROWS):
        with subtests.test(msg=case):
            for result, want in zip(results, by_loops(*inputs, **attributes), strict=False):
                np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bfloat"), [(np.float16, 0), (np.float16, 1), (ml_dtypes.bfloat16, 0)])
def test_half_precision(dtype: Any, bfloat: int) -> None:
    half = [x.astype(dtype) if x is not None and x.dtype == F32 else x for x in ROWS[1][1]]
    whole = [x.astype(F32) if x is not None and x.dtype == dtype else x for x in half]
    options = ROWS[1][3]
    y = run_op(NAME, *half, domain=MICROSOFT, output_bf16=bfloat, **options)
    assert y.dtype == (ml_dtypes.bfloat16 if bfloat else dtype)
    np.testing.assert_allclose(np.asarray(y, float), by_loops(*whole, **options)[0], rtol=0.05, atol=0.05)


def test_selected_blocks_out_of_range_give_nan() -> None:
    """Of that query alone."""
    wrong = CHOSEN.copy()
    wrong[1, 2] = 7
    run = jax.jit(lambda chosen: run_op(NAME, *QKV, *MAIN[:4], chosen, *MAIN[5:], domain=MICROSOFT, **WHO))
    y = np.asarray(run(wrong))
    assert np.isnan(y[0, 1]).all() and not np.isnan(y[0, 0]).any() and not np.isnan(y[1]).any()


@pytest.mark.parametrize(
    ("inputs", "attributes", "said"),
    [
        ([*QKV, *MAIN], {**WHO, "attention_mode": "local_plus_selected"}, "auxiliary_key and local_window_size"),
        ([*QKV, *AUXILIARY], WHO, "requires 'main'"),
        ([*QKV, *AUXILIARY], {**NEAR, "local_window_size": -1}, "local_window_size >= 1"),
        ([*QKV, *PAST, OTHER[0], None, *AUXILIARY[4:]], NEAR, "auxiliary_kv_shared=1"),
        ([*QKV, *MAIN[:4], CHOSEN[:3], *MAIN[5:]], WHO, r"selected_indices .*tokens=4"),
        ([*QKV, *(p.astype(np.int8) for p in PAST), *MAIN[2:]], WHO, "a cache of int8"),
        ([*QKV, *MAIN, *TABLES], {**WHO, "do_rotary": 1, "rotary_offset": 5}, "fit the features after"),
    ],
)
def test_mismatched_operands_are_rejected(inputs: list[Any], attributes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(NAME, *inputs, domain=MICROSOFT, **attributes)


DIFFERENTIABLE = [NAME]


def test_gradients() -> None:
    _, inputs, _, attributes = ROWS[2]
    free = {i: x.astype(np.float64) for i, x in enumerate(inputs) if x is not None and x.dtype == F32}
    check_gradients(NAME, inputs, free, domain=MICROSOFT, n_outputs=3, **attributes)
