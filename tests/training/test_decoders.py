"""The next-token loss, and decoders with default masks, positions and caches."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import (
    InputNameError,
    InputShapeError,
    InputTypeError,
    InputValueError,
    LossError,
    UnsupportedError,
)
from onnx2jax.training import next_token_loss
from onnx2jax.training.decoders import check_targets
from tests.support.models import mlp, model, value
from tests.support.tiers import extended
from tests.support.training import trained

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RNG = np.random.default_rng(0)
VOCABULARY, WIDTH, HEADS, F = 11, 16, 2, np.float32
IDS = RNG.integers(0, VOCABULARY, (4, 6))


@cache
def decoder(layers: int = 1, bits: int = 0, masks: Any = None) -> onnx.ModelProto:
    """input_ids, attention_mask, position_ids, past_key_values.* -> logits, present.*; layers named by number.

    ``masks``: the dtype of an attention mask [batch, 1, tokens, total]; by default it is int64[batch, total].
    """
    weights: dict[str, np.ndarray] = {
        "embed": RNG.normal(size=(VOCABULARY, WIDTH)).astype(F),
        "places": RNG.normal(size=(16, WIDTH)).astype(F),
        "head": RNG.normal(size=(WIDTH, VOCABULARY)).astype(F) / 4,
        "axes": np.array([1, 2]),
    }
    nodes = [
        helper.make_node("Gather", ["embed", "input_ids"], ["tokens"], name="/embed"),
        helper.make_node("Gather", ["places", "position_ids"], ["placed"], name="/place"),
        helper.make_node("Add", ["tokens", "placed"], ["h0"], name="/add"),
        helper.make_node("Cast", ["attention_mask"], ["real"], to=9, name="/cast"),
        helper.make_node("Unsqueeze", ["real", "axes"], ["mask"], name="/mask"),
    ]
    if masks is not None:
        nodes[3:] = [helper.make_node("Identity", ["attention_mask"], ["mask"], name="/mask")]
    pasts, presents = [], []
    for i in range(layers):
        at = f"/layers.{i}"
        for which in "qkvo":
            x = f"{at}/y" if which == "o" else f"h{i}"
            inputs, name = [x, f"{which}{i}"], f"{at}/{which}_proj"
            if bits:
                weights[f"{which}{i}"] = RNG.integers(0, 256, (WIDTH, 1, WIDTH * bits // 8), np.uint8)
                weights[f"{which}{i}.s"] = np.full((WIDTH, 1), 0.5 / 2**bits, F)
                sizes = {"K": WIDTH, "N": WIDTH, "bits": bits, "block_size": WIDTH, "domain": "com.microsoft"}
                nodes.append(
                    helper.make_node("MatMulNBits", [*inputs, f"{which}{i}.s"], [f"{at}/{which}"], name, **sizes)
                )
            else:
                weights[f"{which}{i}"] = RNG.normal(size=(WIDTH, WIDTH)).astype(F) / 4
                nodes.append(helper.make_node("MatMul", inputs, [f"{at}/{which}"], name))
            if which == "v":
                cache = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
                results = [f"{at}/y", *(f"present.{i}.{kind}" for kind in ("key", "value"))]
                inputs = [*(f"{at}/{c}" for c in "qkv"), "mask", *cache]
                sizes = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "is_causal": 1}
                nodes.append(helper.make_node("Attention", inputs, results, f"{at}/attention", **sizes))
                pasts += cache
                presents += results[1:]
        nodes.append(helper.make_node("Add", [f"{at}/o", f"h{i}"], [f"h{i + 1}"], f"{at}/add"))
    nodes.append(helper.make_node("MatMul", [f"h{layers}", "head"], ["logits"], "/head"))
    kept = ["b", HEADS, "past", WIDTH // HEADS]
    inputs = [
        value(n, np.int64, ["b", s]) for n, s in (("input_ids", "s"), ("attention_mask", "t"), ("position_ids", "s"))
    ]
    if masks is not None:
        inputs[1] = value("attention_mask", masks, ["b", 1, "s", "t"])
    outputs = [value("logits", F, ["b", "s", VOCABULARY]), *(value(n, F, [*kept[:2], "t", kept[3]]) for n in presents)]
    return model(
        nodes, [*inputs, *(value(n, F, kept) for n in pasts)], outputs, weights, opset=23, opsets={"com.microsoft": 1}
    )


def tuning(proto: Any = None, loss: Any = "next_token", **options: Any) -> onnx2jax.training.FineTuning:
    return onnx2jax.finetune(onnx2jax.convert(proto or decoder()), loss, optax.sgd(0.1), **options)


def stepped(tuned: onnx2jax.training.FineTuning, batch: Any, steps: int = 2) -> tuple[Any, list[float]]:
    state, losses = trained(tuned, batch, steps)
    return state.params, losses


def close(a: Any, b: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


def reference(logits: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> float:
    entropies = [
        np.log(np.exp(logits[b, i - 1].astype(np.float64)).sum()) - logits[b, i - 1, labels[b, i]]
        for b, i in np.argwhere(counts)
        if i
    ]
    return float(np.mean(entropies))


LOGITS = RNG.normal(size=(4, 6, VOCABULARY)).astype(F)
MASK = (np.arange(6) < [[6], [4], [2], [5]]).astype(np.int64)


@pytest.mark.parametrize(
    ("batch", "labels", "counts"),
    [
        ({"input_ids": IDS}, IDS, np.ones_like(IDS)),
        ({"input_ids": IDS, "attention_mask": MASK}, IDS, MASK),
        ({"input_ids": IDS, "labels": np.where(IDS % 3, IDS, -100)}, IDS, IDS % 3 != 0),
        ({"labels": IDS.astype(np.int32), "attention_mask": np.pad(MASK, ((0, 0), (2, 0)))}, IDS, MASK),
    ],
    ids=["tokens", "mask", "labels", "mask including a KV cache"],
)
def test_mean_cross_entropy(batch: Any, labels: Any, counts: Any) -> None:
    expected = reference(LOGITS, labels, counts)
    both = jax.jit(lambda *logits: [next_token_loss(x, batch) for x in logits])
    found, half = both(LOGITS, LOGITS.astype(np.float16))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert half.dtype == F
    np.testing.assert_allclose(half, expected, rtol=1e-3)


def test_ignored_positions_have_zero_gradient_even_if_nan() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK}
    logits = np.where(MASK[..., None], LOGITS, np.nan)
    gradient = np.asarray(jax.jit(jax.grad(lambda x: next_token_loss(x, batch)))(logits))
    assert np.isfinite(gradient).all() and gradient[0].any() and not gradient[2, 1:].any()


@pytest.mark.parametrize(("label", "loss"), [(-100, 0), (VOCABULARY, np.nan), (-1, np.nan)])
def test_labels_outside_the_vocabulary(label: int, loss: float) -> None:
    """All labels ignored give zero, and an invalid one NaN."""
    labels = np.where((IDS[0, 1] == IDS) | (label == -100), label, IDS)
    np.testing.assert_equal(float(jax.jit(next_token_loss)(LOGITS, {"labels": labels})), loss)


def test_a_step_rejects_tokens_outside_the_vocabulary() -> None:
    """Before it compiles; a position that is masked or ignored may hold any."""
    tuned = tuning()
    state, outside = tuned.init(), np.where(MASK, IDS, 999)
    for batch in ({"input_ids": outside}, {"input_ids": IDS, "labels": outside, "attention_mask": MASK | 1}):
        with pytest.raises(InputValueError, match=rf"to 999; tokens are 0 to {VOCABULARY - 1}"):
            tuned.step(state, batch)
    for batch in ({"input_ids": outside, "attention_mask": MASK}, {"labels": np.where(MASK, IDS, -100)}):
        check_targets(tuned._form.plain.outputs, batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": IDS}, "neither 'labels' nor 'input_ids', only ['x']"),
        ({"labels": IDS[:, :4]}, "logits [4, 6, 11] and labels [4, 4] do not match"),
        ({"labels": IDS[0]}, "'labels' is int64[6], not integers [batch, tokens]"),
        (
            {"labels": IDS, "attention_mask": MASK[:, :4]},
            "'attention_mask' [4, 4] does not cover the 6 tokens of 'labels'",
        ),
    ],
)
def test_invalid_batches_raise(batch: Any, message: str) -> None:
    with pytest.raises(LossError) as raised:
        next_token_loss(LOGITS, batch)
    assert message in str(raised.value)


def test_default_masks_positions_and_caches() -> None:
    past = {f"past_key_values.0.{k}": np.zeros((4, HEADS, 0, 8), F) for k in ("key", "value")}
    whole = {
        "input_ids": IDS,
        "attention_mask": np.ones_like(IDS),
        "position_ids": np.tile(np.arange(6), (4, 1)),
    } | past
    params, losses = stepped(tuning(), {"input_ids": IDS})
    expected, those = stepped(tuning(loss=lambda outputs, batch: next_token_loss(outputs, batch)), whole)
    assert losses[1] < losses[0]
    close((params, losses), (expected, those))


def test_no_defaults_with_a_given_cache() -> None:
    past = {f"past_key_values.0.{k}": np.zeros((4, HEADS, 3, 8), F) for k in ("key", "value")}
    with pytest.raises(InputNameError, match=r"no entry 'attention_mask', 'position_ids', 'past_key_values.1.key'"):
        stepped(tuning(decoder(2)), {"input_ids": IDS} | past)


def test_ragged_lists_are_padded_and_masked() -> None:
    rows = [row[: sum(kept)].tolist() for row, kept in zip(IDS, MASK, strict=True)]
    tuned = tuning()
    state = tuned.init()
    expected = tuned.evaluate(state, {"input_ids": IDS * MASK, "attention_mask": MASK})
    close(tuned.evaluate(state, {"input_ids": rows}), expected)
    assert tuned.compilations == 1
    close(tuned.evaluate(state, {"input_ids": rows, "labels": [[-100, *row[1:]] for row in rows]}), expected)
    with pytest.raises(InputShapeError, match=r"the lengths of 'input_ids', \[6, 4, 2, 5\], but have .*'labels'"):
        tuned.evaluate(state, {"input_ids": rows, "labels": [[1], [2, 3], [1], [1]]})


def test_positions_of_left_padded_tokens() -> None:
    first = tuning().evaluate(tuning().init(), {"input_ids": IDS[:1, :4]})["loss"]
    left = {"input_ids": np.pad(IDS[:1, :4], ((0, 0), (2, 0))), "attention_mask": np.array([[0, 0, 1, 1, 1, 1]])}
    np.testing.assert_allclose(tuning().evaluate(tuning().init(), left)["loss"], first, rtol=1e-5)


def test_microbatches_are_weighted_by_token_count() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK}
    close(stepped(tuning(accumulate=4), batch), stepped(tuning(), batch))


def test_only_logits_are_computed() -> None:
    assert [v.name for v in tuning()._form.plain.outputs] == ["logits"]
    with pytest.raises(LossError, match=r"none of the outputs \['y', 'twice'\] is named 'logits'"):
        proto = mlp()
        proto.graph.node.append(helper.make_node("Add", ["y", "y"], ["twice"]))
        proto.graph.output.append(value("twice", F, None))
        tuned = tuning(proto)
        tuned.step(tuned.init(), {"x": np.ones((2, 4), F), "labels": np.ones((2, 1), int)})
    with pytest.raises(InputTypeError, match="'entropy'; it is a function of outputs and batch, or 'next_token'"):
        tuning(loss="entropy")


@pytest.mark.parametrize("bits", [4, extended(8)])
def test_adapters_for_packed_decoders(bits: int) -> None:
    tuned = tuning(decoder(1, bits), lora={"*q_proj": 2, "*v_proj": 2})
    assert len(tuned.trainable) == 4
    _, losses = stepped(tuned, {"input_ids": IDS}, 5)
    assert losses[-1] < losses[0]
    _, narrow = stepped(
        tuning(decoder(1, bits), lora={"*q_proj": 2, "*v_proj": 2}, compute_dtype="bfloat16"), {"input_ids": IDS}, 5
    )
    assert narrow != losses
    np.testing.assert_allclose(narrow, losses, rtol=2e-2)


def test_remat_by_layer() -> None:
    plain, saving = tuning(decoder(2), lora=2), tuning(decoder(2), lora=2, remat=True)
    close(stepped(plain, {"input_ids": IDS}), stepped(saving, {"input_ids": IDS}))
    blocks = [n for n in saving._form.training.nodes if n.op_type == "Remat"]
    assert [b.name for b in blocks] == ["remat /layers.0", "remat /layers.1"]
    names = {n.name for n in blocks[1].graphs[0].nodes}
    assert {"/layers.1/attention", "/layers.1/q_proj/lora/down"} <= names and "/head" not in names
    with pytest.raises(InputNameError, match=r"and .'hidden', 'act', 'head', 'bias'. have none; give name patterns"):
        tuning(mlp(), remat=True)


TEXTS = [RNG.integers(0, VOCABULARY, n).tolist() for n in (5, 2, 3, 6, 1)]


@pytest.mark.parametrize("masks", [np.float32, extended(bool)])
def test_packed_texts_match_one_text_per_row(masks: Any) -> None:
    proto = decoder(masks=masks)
    tuned = onnx2jax.finetune(onnx2jax.convert(proto), "next_token", optax.sgd(0.1))
    packed = onnx2jax.training.pack_texts(onnx2jax.convert(proto), TEXTS, 8)
    assert packed["input_ids"].shape == (3, 8) and packed["attention_mask"].shape == (3, 1, 8, 8)
    alone = [onnx2jax.training.pack_texts(onnx2jax.convert(proto), [text], 6) for text in TEXTS]
    apart = {n: np.concatenate([row[n] for row in alone]) for n in packed}
    (params, losses), (other, wanted) = (stepped(tuned, batch) for batch in (packed, apart))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    close(params, other)
    # Also against the file with a mask [batch, total], with rows padded and masked by finetune.
    padded = onnx2jax.convert(decoder())
    params = {n: v for n, v in onnx2jax.convert(proto).params.items() if n in padded.params}
    plain = onnx2jax.finetune(padded.with_params(params), "next_token", optax.sgd(0.1))
    np.testing.assert_allclose(plain.evaluate(plain.init(), {"input_ids": TEXTS})["loss"], wanted[0], rtol=1e-5)


def test_texts_that_cannot_be_packed_raise() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot separate texts in one row.*attention_mask.*each text"):
        onnx2jax.training.pack_texts(onnx2jax.convert(decoder()), TEXTS, 8)
    for texts, message in (
        ([[1], []], "text 1 has 0 tokens"),
        ([[1] * 9], "text 0 has 9 tokens; rows of 8 take 1 to 8"),
    ):
        with pytest.raises(InputShapeError, match=message):
            onnx2jax.training.pack_texts(onnx2jax.convert(decoder(masks=bool)), texts, 8)
