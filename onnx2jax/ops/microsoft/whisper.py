"""The com.microsoft domain: Whisper's beam search, with an audio encoder and rules for timestamps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np

from ..arrays import check_shapes
from ..registry import Static
from . import microsoft
from .generation import ENDING, HOST, LOWEST, Task, beam_counts, check_names, decoder_steps, run_beam_search, scalar

MAX_INITIAL_TIMESTAMP = 50
"""The index of the last timestamp that may come first, in steps of 20 ms."""
_CROSS = (
    "cross_qk and its inputs are unsupported, as is non_speech_probs, which onnxruntime leaves uninitialised on CPUs"
)
_OPTIONAL = Annotated[Any, "static", "may be empty"]


def apply_timestamp_rules(scores, sequences, *, begin, eos, never, tasks):
    """Scores [rows, vocab] in which Whisper's rules forbid tokens; timestamps are the tokens from ``begin`` on.

    Timestamps come in pairs except the first, and do not decrease. If they are jointly more probable than any other
    token, the next token is a timestamp.
    """
    scores = scores.copy()
    for row, sequence in zip(scores, sequences, strict=True):
        times = np.flatnonzero(sequence >= begin)
        prompt = times[0] + 1 if times.size else len(sequence)
        row[never] = LOWEST
        if len(sequence) > prompt:
            row[tasks] = LOWEST
        last = sequence[-1] >= begin
        paired = len(sequence) <= prompt or sequence[-2] >= begin
        if last:
            row[slice(begin, None) if paired else slice(0, eos)] = LOWEST
        if times.size:
            row[begin : sequence[times[-1]] + (not last or paired)] = LOWEST
        if len(sequence) == prompt:
            row[begin + MAX_INITIAL_TIMESTAMP + 1 :] = LOWEST
        likely = row[begin:][row[begin:] > LOWEST]
        if likely.size and likely.max() + np.log(np.exp(likely - likely.max()).sum()) > row[:begin].max():
            row[:begin] = LOWEST
    return scores


@microsoft("WhisperBeamSearch", unsharded=True, limits=f"{HOST}; {_CROSS}; {ENDING}")
def whisper_beam_search(
    input_ids: Static, max_length: Static, min_length: _OPTIONAL, num_beams: Static, num_return_sequences: Static,
    length_penalty: Static = None, repetition_penalty: Static = None, vocab_mask: Static = None,
    prefix_vocab_mask: Static = None, attention_mask: Static = None, decoder_input_ids: Static = None,
    logits_processor: Static = None, cross_qk_layer_head: Static = None, extra_decoding_ids: Static = None,
    temperature: Static = None,
    *, decoder, eos_token_id, pad_token_id, encoder=None, init_decoder=None, vocab_size=-1, early_stopping=0,
    translate_token_id=-1, no_speech_token_id=-1, transcribe_token_id=-1, start_of_lm_token_id=-1,
    no_timestamps_token_id=-1, beginning_timestamp_token_id=-1, no_repeat_ngram_size=0, model_type: Literal[2] = 2,
    decoder_start_token_id=-1, decoder_output_cross_qk: Literal[0] = 0, n_outputs=1,
):  # fmt: skip
    """BeamSearch over transcriptions of the audio features input_ids: sequences [batch, returned, max_length]."""
    del model_type, decoder_output_cross_qk, no_speech_token_id
    unsupported = {
        "attention_mask": attention_mask, "init_decoder": init_decoder, "extra_decoding_ids": extra_decoding_ids,
        "cross_qk_layer_head": cross_qk_layer_head, "an output after the third": True if n_outputs > 3 else None,
    }  # fmt: skip
    if names := [name for name, value in unsupported.items() if value is not None]:
        raise NotImplementedError(f"{names[0]} is unsupported; {_CROSS}")
    if encoder is None:
        raise ValueError("the attribute encoder (a graph of the audio encoder) is required")
    check_names(encoder, "encoder", "encoder_input_ids", "decoder_input_ids")
    check_names(decoder, "decoder", "input_ids")
    if decoder_input_ids is None and decoder_start_token_id < 0:
        raise ValueError("the start of the sequences is missing: give decoder_input_ids or decoder_start_token_id")
    start = np.full((len(input_ids), 1), decoder_start_token_id) if decoder_input_ids is None else decoder_input_ids
    start = np.asarray(start).astype(np.int32)
    check_shapes({"batch": len(input_ids)}, decoder_input_ids=(start, "batch length"))
    count, returned = beam_counts(num_beams, num_return_sequences)
    timestamps, temperature = scalar(logits_processor, 0), scalar(temperature, 1.0)
    if timestamps not in (0, 1) or (timestamps and min(beginning_timestamp_token_id, no_timestamps_token_id) < 0):
        raise ValueError(
            f"logits_processor ({timestamps}) must be 0, or 1 for Whisper's timestamp rules, which need the attributes "
            "beginning_timestamp_token_id and no_timestamps_token_id"
        )
    never = [no_timestamps_token_id, start_of_lm_token_id]
    rules = {"begin": beginning_timestamp_token_id, "eos": eos_token_id, "never": [t for t in never if t >= 0]}
    rules["tasks"] = [t for t in (decoder_start_token_id, translate_token_id, transcribe_token_id) if t >= 0]

    def process(scores, sequences):
        with np.errstate(over="ignore"):  # scores of forbidden tokens
            scores = scores / np.float32(temperature) if temperature > 0 else scores
        return apply_timestamp_rules(scores, sequences, **rules) if timestamps else scores

    logits, *states = encoder(np.asarray(input_ids), start)
    steps = decoder_steps(decoder, logits, states, count)
    limits = max_length, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    task = Task(
        start, steps, limits, count, process, vocab_size=vocab_size, pad_token_id=pad_token_id,
        eos_token_id=eos_token_id, no_repeat_ngram_size=no_repeat_ngram_size,
    )  # fmt: skip
    return run_beam_search(task, count, returned, early_stopping, length_penalty, repetition_penalty)
