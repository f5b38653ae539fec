"""com.microsoft.WhisperBeamSearch against onnxruntime, with graphs as onnxruntime.transformers writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from tests.ops.test_microsoft import F32, MICROSOFT
from tests.ops.test_microsoft_generation import (
    HEADED,
    JOINED,
    WIDTH,
    Session,
    attended,
    cache,
    heads,
    value,
    weights,
)
from tests.support.helpers import run_op

FEATURES, VOCAB = 3, 90
INT, FLOAT = TensorProto.INT32, TensorProto.FLOAT
NAMES = [
    "input_ids", "max_length", "min_length", "num_beams", "num_return_sequences", "length_penalty",
    "repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask", "decoder_input_ids",
    "logits_processor", "cross_qk_layer_head", "extra_decoding_ids", "temperature",
]  # fmt: skip
FLOATS = {"input_ids", "length_penalty", "repetition_penalty", "temperature"}
OUTPUTS = {"sequences": INT, "sequences_scores": FLOAT, "scores": FLOAT}
TOKENS = {
    "pad_token_id": 19, "eos_token_id": 20, "decoder_start_token_id": 21, "translate_token_id": 22,
    "transcribe_token_id": 23, "start_of_lm_token_id": 24, "no_timestamps_token_id": 26,
    "beginning_timestamp_token_id": 27,
}  # fmt: skip
"""Text comes before them, timestamps behind."""


def step(ids: str, past: bool) -> list[onnx.NodeProto]:
    """Causal attention to itself, attention to the encoder, logits."""
    node = helper.make_node
    nodes = [node("Gather", ["words", ids], ["x"]), *heads("x", "wq", "q")]
    for part in ("key", "value"):
        new = f"new_{part}" if past else f"present_{part}_self_0"
        nodes += heads("x", f"w{part[0]}", new)
        if past:
            nodes.append(node("Concat", [f"past_{part}_self_0", new], [f"present_{part}_self_0"], axis=2))
    if not past:
        nodes += [node("Shape", [ids], ["n"], start=1), node("ConstantOfShape", ["nn"], ["full"], value=LOW)]
        nodes.insert(-1, node("Concat", ["n", "n"], ["nn"], axis=0))
        nodes.append(node("Trilu", ["full", "k"], ["causal"], upper=1))
    nodes += attended("q", "present_key_self_0", "present_value_self_0", "own", None if past else "causal")
    cross = "past_{}_cross_0" if past else "present_{}_cross_0"
    nodes += attended("q", cross.format("key"), cross.format("value"), "read")
    return [*nodes, node("Sum", ["x", "own", "read"], ["y"]), node("MatMul", ["y", "out"], ["logits"])]


LOW = helper.make_tensor("low", FLOAT, [1], [-1e9])


def whisper(hidden: bool = False) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Encoder with the decoder's first call, and its steps; ``hidden`` is an input of a step that it does not read."""
    square = (WIDTH, WIDTH)
    shared = [*weights(1, words=(VOCAB, WIDTH), wq=square, wk=square, wv=square, out=(WIDTH, VOCAB)), HEADED, JOINED]
    shared[4] = numpy_helper.from_array(numpy_helper.to_array(shared[4]) * F32(0.3), "out")
    nodes = [helper.make_node("Transpose", ["encoder_input_ids"], ["frames"], perm=[0, 2, 1])]
    nodes.append(helper.make_node("MatMul", ["frames", "hear"], ["encoder_hidden_states"]))
    nodes += heads("encoder_hidden_states", "ck", "present_key_cross_0")
    nodes += heads("encoder_hidden_states", "cv", "present_value_cross_0")
    heard = value("encoder_hidden_states", FLOAT, "B", "E", WIDTH)
    inputs = [value("encoder_input_ids", FLOAT, "B", FEATURES, "E"), value("decoder_input_ids", INT, "B", "S")]
    outputs = [value("logits", FLOAT, "B", "S", VOCAB), heard, *cache("present", "self"), *cache("present", "cross")]
    own = [*weights(2, hear=(FEATURES, WIDTH), ck=square, cv=square), numpy_helper.from_array(np.array(1), "k")]
    encoder = helper.make_graph(nodes + step("decoder_input_ids", False), "encoder", inputs, outputs, own + shared)
    inputs = [value("input_ids", INT, "B", 1), *[heard] * hidden, *cache("past", "self"), *cache("past", "cross")]
    outputs = [value("logits", FLOAT, "B", 1, VOCAB), *cache("present", "self")]
    return encoder, helper.make_graph(step("input_ids", True), "decoder", inputs, outputs, shared)


def file(operands: dict[str, Any], outputs: int, **attributes: Any) -> tuple[bytes, dict[str, Any]]:
    """A file of one node, and its inputs as arrays."""
    arrays = {n: np.atleast_1d(np.array(v, F32 if n in FLOATS else np.int32)) for n, v in operands.items()}
    names = [n if n in arrays else "" for n in NAMES]
    made = list(OUTPUTS.items())[:outputs]
    node = helper.make_node("WhisperBeamSearch", names, [n for n, _ in made], domain=MICROSOFT, **TOKENS, **attributes)
    inputs = [value(n, FLOAT if n in FLOATS else INT, *v.shape) for n, v in arrays.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info(n, kind, None) for n, kind in made])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString(), arrays


def theirs(model: bytes, arrays: dict[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, arrays)


HEARD = np.random.default_rng(5).normal(size=(4, FEATURES, 4))
WHOLE = {"max_length": 12, "min_length": 1, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.0}
CASES: list[dict[str, Any]] = [
    {},
    {"decoder_input_ids": [[21, 22, 26]], "temperature": 0.5, "repetition_penalty": 1.7},
    {"logits_processor": 1},
    {"logits_processor": 1, "decoder_input_ids": [[21, 22, 23]], "no_repeat_ngram_size": 2, "hidden": True},
    {"logits_processor": 1, "temperature": 0.5, "repetition_penalty": 1.7},
    {"logits_processor": 1, "decoder_input_ids": [[21, 22, 30]], "temperature": 4.0},
    {"logits_processor": 1, "decoder_input_ids": [[21, 30, 31]], "temperature": 3.0, "early_stopping": 1},
    {"logits_processor": 1, "min_length": 8, "prefix_vocab_mask": [[1, 0] * (VOCAB // 2)]},
]


@pytest.mark.parametrize("case", CASES)
def test_sequences_and_scores(case: dict[str, Any]) -> None:
    """Steps by onnxruntime, so that nothing is compiled; one sequence at a time: see the limits of BeamSearch."""
    given = dict(case)
    graphs = dict(zip(("encoder", "decoder"), whisper(given.pop("hidden", False)), strict=True))
    attributes = {n: given.pop(n) for n in list(given) if n not in NAMES}
    for heard in HEARD:
        model, arrays = file({"input_ids": [heard], **WHOLE, **given}, 3, **graphs, **attributes)
        want = theirs(model, arrays)
        steps = {n: Session(g) for n, g in graphs.items()}
        inputs = [arrays.get(n) for n in NAMES]
        options = {"domain": MICROSOFT, "n_outputs": 3, **TOKENS, **attributes}
        ours = run_op("WhisperBeamSearch", *inputs, **steps, **options)
        np.testing.assert_array_equal(ours[0], want[0])
        np.testing.assert_allclose(ours[1], want[1], rtol=1e-4)
        taken = ours[2].any((1, 2, 3))  # all steps, unless it ended before
        np.testing.assert_allclose(ours[2][taken], want[2][taken], rtol=1e-4, atol=1e-4)


def test_timestamp_rules_change_the_result() -> None:
    """All of them are met above: a text without them, pairs, one alone behind a prompt."""
    encoder, decoder = (Session(g) for g in whisper())
    inputs = [HEARD[:1].astype(F32), *(np.array([n]) for n in (12, 1, 3, 1))]
    options: dict[str, Any] = {"domain": MICROSOFT, "encoder": encoder, "decoder": decoder, **TOKENS}
    free, ruled = (run_op("WhisperBeamSearch", *inputs, *[None] * 6, np.array([k]), **options) for k in (0, 1))
    assert (np.asarray(free) != np.asarray(ruled)).any()
    assert (np.asarray(ruled)[..., 1:] >= TOKENS["beginning_timestamp_token_id"]).any()


def test_a_converted_file() -> None:
    encoder, decoder = whisper()
    operands = {"input_ids": HEARD[:1], **WHOLE, "max_length": 5, "num_beams": 2, "logits_processor": 1}
    model, arrays = file(operands, 1, encoder=encoder, decoder=decoder)
    np.testing.assert_array_equal(onnx2jax.convert(model)(**arrays), theirs(model, arrays)[0])


@pytest.mark.parametrize(
    ("changes", "attributes", "said"),
    [
        ({"decoder_input_ids": [[1], [2]]}, {}, "batch=1"),
        ({}, {"decoder_start_token_id": -1}, "decoder_input_ids or decoder_start_token_id"),
        ({"logits_processor": [2]}, {}, "logits_processor"),
        ({"logits_processor": [1]}, {"beginning_timestamp_token_id": -1}, "beginning_timestamp_token_id"),
        ({"extra_decoding_ids": [[1]]}, {}, "extra_decoding_ids"),
        ({"attention_mask": [[1]]}, {}, "attention_mask"),
        ({}, {"n_outputs": 5}, "after the third"),
        ({}, {"encoder": None}, "encoder"),
        ({}, {"decoder_output_cross_qk": 1}, "decoder_output_cross_qk"),
        ({"max_length": [1]}, {}, "exceed the prompt's 1 tokens"),
    ],
)
def test_unsupported_options_are_rejected(changes: dict[str, Any], attributes: dict[str, Any], said: str) -> None:
    given = {"input_ids": HEARD[:1].astype(F32)} | {n: [v] for n, v in WHOLE.items()} | changes
    encoder, decoder = (Session(g) for g in whisper())
    options = {"encoder": encoder, "decoder": decoder, **TOKENS, **attributes}
    inputs = [np.array(given[n]) if n in given else None for n in NAMES]
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op("WhisperBeamSearch", *inputs, domain=MICROSOFT, **options)
