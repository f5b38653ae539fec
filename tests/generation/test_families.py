"""Tokens and logits of decoders of every family and precision match onnxruntime's, with fixed-length caches."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from onnx2jax.errors import InputShapeError
from onnx2jax.model.caches import caches
from tests.generation import encoded
from tests.generation.families import FAMILIES, PRECISIONS, decoder
from tests.support import decoders
from tests.support.decoders import HIDDEN, by_hand, by_onnxruntime

P, Q = [5, 17, 3, 40, 8, 22, 51], [9, 2, 31]
STEPS: Final = 20

CASES: Final = {
    "llama": ("float32", "int8 QDQ", "int4 asymmetric", "int4 QDQ"),
    "mistral": ("int4",),
    "mixtral": ("float32",),
    "qwen2": ("int8",),
    "qwen3": ("float16",),
    "qwen3 with experts": ("int4 asymmetric",),
    "gemma": ("int4",),
    "gemma2": ("float32",),
    "gemma3": ("int4",),
    "phi3": ("float32",),
    "gpt-oss": ("int4",),
    "olmo": ("float16",),
    "granite": ("int8",),
    "nemotron": ("float32",),
    "lfm2": ("float32",),
    "gpt2": ("int4 QDQ",),
    "gpt-neox": ("float32",),
    "chatglm": ("int8 QDQ",),
}
"""Every family once, and every precision: all combinations would take too long."""
TOLERANCE: Final = {"float16": 2e-2}
"""Relative to the largest logit; 1e-4 for other precisions."""
IN_EIGHT_BITS: Final = 5e-3
"""The same for experts with packed weights: onnxruntime rounds their activations to 8 bits."""


def test_all_families_and_precisions_are_among_the_cases() -> None:
    assert CASES.keys() == FAMILIES.keys()
    assert {p for precisions in CASES.values() for p in precisions} == set(PRECISIONS)


def generated(model: Decoder, prompt: list[int], **others: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after a prompt and the logits of each, from the compiled decoding loop."""
    call = model._begin(model.generate, [prompt], STEPS + 1, others, stop=())
    state = call.state
    logits = [np.array(state.logits[0], np.float32)]
    for count in range(2, STEPS + 2):
        state = model._programs.loop(state, count, call.choice, call.controls)
        logits.append(np.array(state.logits[0], np.float32))
    return np.asarray(state.tokens)[0, : STEPS + 1].tolist(), np.stack(logits)


AFTER_AN_ENCODER: Final = (("bart", "int8"), ("whisper", "int4"))
QUICK: Final = {("phi3", "float32")}
"""Not marked long: its rotary tables change with the text length, though the cache length is constant."""


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(f, p, marks=() if (f, p) in QUICK else pytest.mark.long, id=f"{f}, {p}")
        for f, precisions in CASES.items()
        for p in precisions
    ],
)
def test_tokens_and_logits_match_onnxruntime(family: str, precision: str) -> None:
    file = decoder(family, precision)
    tokens, logits = by_hand(file, P, STEPS + 1)
    model = onnx2jax.decoder(onnx2jax.convert(file.proto))
    ours, own = generated(model, P)
    tolerance = TOLERANCE.get(precision, 1e-4)
    if FAMILIES[family].experts and precision.startswith("int"):
        tolerance = IN_EIGHT_BITS
    np.testing.assert_allclose(own, logits, rtol=0, atol=tolerance * np.abs(logits).max())
    assert ours == tokens
    assert model.compilations <= 3


@pytest.mark.parametrize(
    ("family", "precision", "merged"),
    [
        pytest.param("t5", "float32", True, marks=pytest.mark.extended),
        pytest.param("t5", "float32", False, marks=pytest.mark.long),
        *(pytest.param(f, p, m, marks=pytest.mark.long) for f, p in AFTER_AN_ENCODER for m in (False, True)),
    ],
)
def test_encoder_decoders_without_mask_and_positions(family: str, precision: str, merged: bool) -> None:
    """The text length follows from cache extents alone, which are constant here; in two files or one."""
    rng = np.random.default_rng(3)
    others = {"encoder_hidden_states": rng.normal(size=(2, 4, HIDDEN)).astype(np.float32)}
    if family != "whisper":
        others["encoder_attention_mask"] = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    first, later = (encoded.decoder(family, precision, first=f) for f in (True, False))
    if merged:
        first = later = encoded.merged(family, precision)
    runs = {"run": by_onnxruntime(later), "first": first, "first_run": by_onnxruntime(first)}
    alone = [{n: v[i : i + 1] for n, v in others.items()} for i in range(2)]
    tokens, logits = by_hand(later, P, STEPS + 1, **runs, **alone[0])
    converted = onnx2jax.convert(later.proto)
    model = onnx2jax.decoder(converted, prefill=None if merged else onnx2jax.convert(first.proto))
    ours, own = generated(model, P, **alone[0])
    np.testing.assert_allclose(own, logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    assert ours == tokens
    assert model.compilations <= 3
    beginning = model.read(P[:4], 64, **alone[0])
    assert model.generate([P[4:]], 6, after=beginning, stop=(), **alone[0]).texts() == [tokens[:6]]
    wanted = [tokens[:7], by_hand(later, Q, 7, **runs, **alone[1])[0]]
    assert model.generate([P, Q], 7, stop=(), **others).texts() == wanted


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "gpt2"])
def test_batch_of_unequal_prompts_matches_each_alone(family: str) -> None:
    file = decoder(family)
    run = by_onnxruntime(file)
    model = onnx2jax.decoder(onnx2jax.convert(file.proto))
    assert model.generate([P, Q], 12, stop=()).texts() == [by_hand(file, p, 12, run)[0] for p in (P, Q)]


@pytest.mark.long
def test_a_text_shorter_than_the_sliding_window() -> None:
    file = decoder("gemma2")
    model = onnx2jax.decoder(onnx2jax.convert(file.proto))
    texts = model.generate(Q, 3, length=6, stop=())
    assert texts.texts() == [by_hand(file, Q, 3)[0]]
    assert {v.shape[2] for v in texts.cache.values.values()} == {6, 8}


def test_sliding_caches_begin_with_room_for_their_window() -> None:
    empty = caches(onnx2jax.convert(decoder("gemma2").proto)).empty(1)
    assert [v.shape[2] for v in empty.values()] == [8, 8, 0, 0]


def test_shared_caches_of_declared_length() -> None:
    file = decoders.group_query()
    for given in (*file.proto.graph.input, *file.proto.graph.output):
        if given.name.startswith(("past", "present")):
            given.type.tensor_type.shape.dim[2].dim_value = 32
    file.caches = {n: (p, (*shape[:2], 32, shape[3]), t) for n, (p, shape, t) in file.caches.items()}
    model = onnx2jax.decoder(onnx2jax.convert(file.proto))
    assert model.fixed_length == 32
    assert model.generate([P, Q], 5).texts() == [by_hand(file, p, 5)[0] for p in (P, Q)]
    with pytest.raises(InputShapeError, match="room for 32"):
        model.generate(P, 30)
