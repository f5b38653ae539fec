"""The com.microsoft domain: text generation loops whose steps are subgraphs of the node.

The loop runs in Python on the host, because the KV cache grows with each token; the subgraphs run compiled as other
subgraphs of host nodes. Scores are computed in NumPy, in float32.
"""

from __future__ import annotations

import itertools
from inspect import Parameter
from typing import Annotated, Any, Literal

import jax
import numpy as np

from ..arrays import check_shapes
from ..registry import Static, taking
from . import microsoft
from .grouped import repeated_ngrams

LOWEST = np.finfo(np.float32).min
"""The score of a forbidden token."""


def check_names(graph, what, *names):
    """Raise ValueError unless the first inputs of a graph have these names."""
    if (actual := [v.name for v in graph.inputs[: len(names)]]) != list(names):
        raise ValueError(f"the inputs of the graph {what} must begin with {', '.join(names)} (it has {actual})")


def decoder_only(decoder, first, ids, mask, pad, beams):
    """A generator of decoding steps of a decoder-only model: yields logits, receives (sequences, beam origins)."""
    for graph, name in ((decoder, "decoder"), (first, "init_decoder")):
        if graph is not None:
            check_names(graph, name, "input_ids", "position_ids", "attention_mask")
    if len(decoder.inputs) != len(decoder.outputs) + 2:
        raise NotImplementedError(f"the graph decoder has inputs other than its past ({SHARED})")
    real = (ids != pad).astype(np.int32)
    mask = real if mask is None else mask
    ids, mask, real = (np.repeat(x, beams, axis=0) for x in (ids, mask, real))
    positions = np.where(real, np.cumsum(real, axis=1, dtype=np.int32) - 1, 0)  # independent of the mask
    length = real.sum(1, keepdims=True, dtype=np.int32)
    kinds = [v.type for v in decoder.inputs[3:]]
    past = [np.zeros((2, len(ids), kind.shape[2], 0, kind.shape[4]), kind.dtype) for kind in kinds]
    run = decoder if first is None else first
    while True:
        logits, *past = run(ids, positions, mask, *past)
        sequences, order = yield logits
        run, ids, past = decoder, sequences[:, -1:], [np.asarray(v)[:, order] for v in past]
        mask = np.append(mask[order], np.ones_like(ids), axis=1)
        positions, length = length, length + 1


def encoder_decoder(encoder, decoder, ids, mask, start, pad, beams):
    """The decoding steps of an encoder-decoder model, whose encoder may include the first decoder step."""
    check_names(encoder, "encoder", "encoder_input_ids", "encoder_attention_mask")
    check_names(decoder, "decoder", "input_ids", "encoder_attention_mask")
    if mask is None:  # left padding only: a trailing pad token may be the end of the sequence
        mask = np.logical_or.accumulate(ids != pad, axis=1).astype(np.int32)
    whole = decoder.inputs[0].type is None or decoder.inputs[0].type.shape[1:] != (1,)
    sequences = np.full((len(ids), 1), start, np.int32)
    if len(encoder.inputs) > 2:
        logits, *states = encoder(ids, mask, sequences)
        return decoder_steps(decoder, logits, states, beams, mask=mask, whole=whole)
    cross = encoder(ids, mask)
    past = [np.zeros((len(x), x.shape[1], 0, x.shape[3]), x.dtype) for x in cross[: len(decoder.outputs) - 1]]
    states = [None, *past, *cross]
    return decoder_steps(decoder, None, states, beams, mask=mask, whole=whole, sequences=sequences)


def decoder_steps(decoder, logits, states, beams, *, mask=None, whole=False, sequences=None):
    """A generator of decoding steps from an encoder's logits and states: hidden ones, the past, the cross caches.

    Each step reads the last token, or the ``whole`` sequences; without logits the first step starts from ``sequences``.
    """
    count, fixed = len(decoder.outputs) - 1, [] if mask is None else [mask]
    if [v.name for v in decoder.inputs[1 + len(fixed) :][:1]] == ["encoder_hidden_states"]:
        fixed += states[:1]
    past, cross = states[1 : 1 + count], states[1 + count :]
    if len(decoder.inputs) != 1 + len(fixed) + 2 * count or len(cross) != count:
        raise NotImplementedError(f"the graph decoder has {len(decoder.inputs)} inputs: {SHARED}")
    (logits, sequences, *fixed), past, cross = (
        [None if x is None else np.repeat(np.asarray(x), beams, axis=0) for x in v]
        for v in ((logits, sequences, *fixed), past, cross)
    )
    order = slice(None)
    if logits is not None:
        sequences, order = yield logits
    while True:
        past = [np.asarray(v)[order] for v in past]
        logits, *past = decoder(sequences if whole else sequences[:, -1:], *fixed, *past, *cross)
        sequences, order = yield logits


SHARED = "a KV cache buffer shared by past and present is unsupported; export the decoder with a growing past"


class Task:
    """A generation: the initial sequences, the decoding steps and the constraints on the next token."""

    def __init__(
        self, ids, steps, limits, beams, process=None, *, vocab_size, pad_token_id, eos_token_id, no_repeat_ngram_size
    ):
        """Continues ids [batch, length], with the constraints that are a node's inputs and attributes.

        ``limits`` are max_length, min_length, repetition_penalty, vocab_mask and prefix_vocab_mask; ``process`` is an
        additional logits processor (scores, sequences) -> scores, or None.
        """
        max_length, min_length, penalty, *masks = limits
        masks = [None if m is None else np.asarray(m).astype(np.int32) for m in masks]
        self.vocab_mask, self.prefix_vocab_mask = masks
        check_shapes({"batch": len(ids)}, prefix_vocab_mask=(self.prefix_vocab_mask, "batch vocab"))
        self.penalty = scalar(penalty, 1.0)
        self.min_length, self.max_length = scalar(min_length, 0), scalar(max_length, 0)
        if self.penalty <= 0:
            raise ValueError(f"repetition_penalty ({self.penalty}) must be positive")
        if self.max_length <= ids.shape[1]:
            raise ValueError(f"max_length ({self.max_length}) must exceed the prompt's {ids.shape[1]} tokens")
        self.sequences, self.steps, self.vocab_size = np.repeat(ids, beams, axis=0), steps, vocab_size
        self.pad, self.eos, self.ngram, self.process = pad_token_id, eos_token_id, no_repeat_ngram_size, process

    def scores(self, logits, sequences, *, logarithmic=False):
        """Scores [rows, vocab] of the token after sequences [rows, length]: the last logits, constrained."""
        scores = np.asarray(logits)[:, -1].astype(np.float32)
        if self.vocab_size > scores.shape[1]:
            raise ValueError(f"vocab_size ({self.vocab_size}) exceeds the decoder's {scores.shape[1]} logits")
        scores = scores[:, : self.vocab_size] if self.vocab_size > 0 else scores
        if logarithmic:
            scores = scores - scores.max(1, keepdims=True)
            scores = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        rows, vocab = scores.shape
        masks = {"vocab_mask": (self.vocab_mask, "vocab"), "prefix_vocab_mask": (self.prefix_vocab_mask, "batch vocab")}
        check_shapes({"vocab": vocab}, **masks)
        seen = np.zeros(scores.shape, bool)
        np.put_along_axis(seen, sequences, True, axis=1)
        penalized = np.where(scores < 0, scores * np.float32(self.penalty), scores / np.float32(self.penalty))
        banned = np.zeros(scores.shape, bool)
        if 0 < self.ngram <= sequences.shape[1]:
            repeats, last = repeated_ngrams(sequences, self.ngram)
            np.logical_or.at(banned, (np.arange(rows)[:, None], last), repeats)
        if self.vocab_mask is not None:
            banned |= self.vocab_mask == 0
        if self.prefix_vocab_mask is not None and sequences.shape == self.sequences.shape:
            banned |= np.repeat(self.prefix_vocab_mask == 0, rows // len(self.prefix_vocab_mask), axis=0)
        banned[:, self.eos] |= sequences.shape[1] < self.min_length
        scores = np.where(banned, LOWEST, np.where(seen, penalized, scores))
        return scores if self.process is None else self.process(scores, sequences)

    def run(self, choose):
        """Sequences [batch, max_length], extended by the token that ``choose`` returns until eos."""
        sequences, done = self.sequences, np.zeros(len(self.sequences), bool)
        logits = next(self.steps)
        while True:
            tokens = choose(self.scores(logits, sequences), sequences.shape[1])
            done |= tokens == self.eos
            sequences = np.append(sequences, np.where(done, self.pad, tokens).astype(np.int32)[:, None], axis=1)
            if done.all() or sequences.shape[1] == self.max_length:
                rest = self.max_length - sequences.shape[1]
                return np.pad(sequences, ((0, 0), (0, rest)), constant_values=self.pad)
            logits = self.steps.send((sequences, slice(None)))


def scalar(value, default):
    """A one-element input as a Python scalar, or the default if it is absent."""
    return default if value is None else np.asarray(value).reshape(()).item()


def task(
    input_ids, mask, *limits, beams=1, model_type, decoder, init_decoder, encoder, decoder_start_token_id, **sizes
):
    """The Task of a node, from its inputs and attributes."""
    ids = np.asarray(input_ids).astype(np.int32)
    mask = None if mask is None else np.asarray(mask).astype(np.int32)
    check_shapes({}, input_ids=(ids, "batch length"), attention_mask=(mask, "batch length"))
    if model_type == 0:
        steps = decoder_only(decoder, init_decoder, ids, mask, sizes["pad_token_id"], beams)
    elif encoder is None or decoder_start_token_id < 0:
        raise ValueError("model_type=1 requires the attributes encoder and decoder_start_token_id")
    else:
        steps = encoder_decoder(encoder, decoder, ids, mask, decoder_start_token_id, sizes["pad_token_id"], beams)
        ids = np.full((len(ids), 1), decoder_start_token_id, np.int32)
    return Task(ids, steps, limits, beams, **sizes)


HOST = f"a host loop with compiled steps; {SHARED}"
ATTRIBUTES: dict[str, Any] = dict.fromkeys(("decoder", "eos_token_id", "pad_token_id"), Parameter.empty)
ATTRIBUTES |= {"encoder": None, "init_decoder": None, "decoder_start_token_id": -1, "vocab_size": -1}
ATTRIBUTES |= {"no_repeat_ngram_size": 0}
Model = Literal[0, 1]


@microsoft("GreedySearch", unsharded=True, limits=HOST)
@taking(**ATTRIBUTES)
def greedy_search(
    input_ids: Static, max_length: Static, min_length: Static = None, repetition_penalty: Static = None,
    vocab_mask: Static = None, prefix_vocab_mask: Static = None, attention_mask: Static = None,
    *, model_type: Model = 0, **attributes,
):  # fmt: skip
    """Sequences [batch, max_length] extended by the most probable token."""
    limits = max_length, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    generation = task(input_ids, attention_mask, *limits, model_type=model_type, **attributes)
    return generation.run(lambda scores, _: scores.argmax(1))


def nucleus(scores, top_p, least, filler):
    """Scores with a filler for all but the top-p tokens, of which at least ``least`` are kept."""
    order = np.argsort(scores, axis=1, kind="stable")
    ascending = np.take_along_axis(scores, order, axis=1)
    weights = np.exp(ascending - ascending[:, -1:])
    dropped = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1, dtype=np.float32) <= np.float32(1 - top_p)
    dropped[:, max(scores.shape[1] - max(least, 1), 0) :] = False
    kept = np.zeros_like(dropped)
    np.put_along_axis(kept, order, ~dropped, axis=1)
    return np.where(kept, scores, np.float32(filler))


_CUSTOM = (
    "custom=1, presence penalties and filtered_logits, which the schema underspecifies, are unsupported; at least one "
    "token is kept; JAX's generator"
)


@microsoft("Sampling", unsharded=True, wide=True, limits=f"{HOST}; {_CUSTOM}")
@taking(**ATTRIBUTES)
def sampling(
    input_ids: Static, max_length: Static, min_length: Static = None, repetition_penalty: Static = None,
    vocab_mask: Static = None, prefix_vocab_mask: Static = None, attention_mask: Static = None,
    presence_mask: Static = None, seed: Static = None,
    *, custom: Literal[0] = 0, filter_value=-1e20, min_tokens_to_keep=0, model_type: Model = 0,
    presence_penalty: Literal[0] = 0.0, temperature=1.0, top_p=0.0, rng, n_outputs=1,  # type: ignore[assignment]
    **attributes,
):  # fmt: skip
    """Sequences [batch, max_length] extended by a token sampled from the most probable ones (top-p)."""
    del custom, presence_penalty
    if presence_mask is not None or n_outputs > 1:
        raise NotImplementedError(
            f"{'presence_mask' if n_outputs == 1 else 'filtered_logits'} is unsupported: {_CUSTOM}"
        )
    key = rng if seed is None else jax.random.key(np.uint32(scalar(seed, 0) % 2**32))

    def choose(scores, length):
        scores = scores / np.float32(temperature) if temperature > 0 else scores
        noise = jax.random.gumbel(jax.random.fold_in(key, length), scores.shape, np.float32)
        return (nucleus(scores, top_p, min_tokens_to_keep, filter_value) + np.asarray(noise)).argmax(1)

    limits = max_length, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    return task(input_ids, attention_mask, *limits, model_type=model_type, **attributes).run(choose)


class Beam:
    """The best finished hypotheses of one sequence of the batch, best first."""

    def __init__(self, count, length_penalty):
        self.count, self.length_penalty, self.done = count, np.float32(length_penalty), False
        self.hypotheses = []

    def normalized(self, total, length):
        return total / np.power(np.float32(length), self.length_penalty)

    def add(self, tokens, total):
        self.hypotheses.append((self.normalized(total, len(tokens)), tokens))
        self.hypotheses = sorted(self.hypotheses, key=lambda row: -row[0])[: self.count]

    def advance(self, scores, sequences, task, early):
        """The next [(score, row, token)] from scores [beams, vocab]; sequences that end become hypotheses.

        Sets ``done`` when no unfinished sequence can improve on the hypotheses.
        """
        flat, rows = scores.reshape(-1), [(np.float32(0), 0, task.pad)] * (self.count if self.done else 0)
        for rank, index in enumerate(np.argsort(-flat, kind="stable")[: 2 * self.count].tolist()):
            if len(rows) == self.count:
                break
            row, token = divmod(index, scores.shape[1])
            if token != task.eos:
                rows.append((flat[index], row, token))
            elif rank < self.count:
                self.add(sequences[row], flat[index])
        if len(rows) < self.count:
            raise ValueError(f"a vocabulary of {scores.shape[1]} tokens is too small for {self.count} beams")
        if len(self.hypotheses) == self.count:
            self.done |= bool(early or self.hypotheses[-1][0] >= self.normalized(flat.max(), sequences.shape[1]))
        return rows


def beam_counts(num_beams, num_return_sequences):
    """(number of beams, number of returned sequences); raises ValueError unless 1 <= returned <= beams."""
    count, returned = scalar(num_beams, 1), scalar(num_return_sequences, 1)
    if not 1 <= returned <= count:
        raise ValueError(f"num_return_sequences ({returned}) must be from 1 to num_beams ({count})")
    return count, returned


def run_beam_search(task, count, returned, early, length_penalty, *others):
    """(sequences, their scores, scores of all tokens in each step) of a beam search.

    Scores have the dtype of the first penalty that is given.
    """
    like = next((x.dtype for x in (length_penalty, *others) if x is not None), np.float32)
    length_penalty = scalar(length_penalty, 1.0)
    sequences, batch = task.sequences, len(task.sequences) // count
    beams = [Beam(count, length_penalty) for _ in range(batch)]
    totals = np.tile(np.where(np.arange(count) > 0, np.float32(-1e9), np.float32(0)), batch)
    logits, steps = next(task.steps), list[Any]()
    while True:
        scores = (task.scores(logits, sequences, logarithmic=True) + totals[:, None]).reshape(batch, count, -1)
        done, old = np.array([beam.done for beam in beams]), sequences.reshape(batch, count, -1)
        steps.append(np.where(done[:, None, None], 0, scores))
        candidates = [beam.advance(scores[i], old[i], task, early) for i, beam in enumerate(beams)]
        totals, rows, tokens = (np.array(column) for column in zip(*itertools.chain(*candidates), strict=True))
        rows = rows + np.repeat(np.arange(batch), count) * count
        sequences = np.append(sequences[rows], tokens.astype(np.int32)[:, None], axis=1)
        if all(beam.done for beam in beams) or sequences.shape[1] == task.max_length:
            break
        logits = task.steps.send((sequences, rows))
    out = np.full((batch, returned, task.max_length), task.pad, np.int32)
    final, max_steps = np.zeros((batch, returned), np.float32), task.max_length - task.sequences.shape[1]
    for i, beam in enumerate(beams):
        for j in range(0 if beam.done else count):
            beam.add(sequences[i * count + j], totals[i * count + j])
        for j, (score, best) in enumerate(beam.hypotheses[:returned]):
            out[i, j, : len(best)], final[i, j] = best, score
    scores = np.pad(np.stack(steps), ((0, max_steps - len(steps)), *[(0, 0)] * 3))
    return out, final.astype(like), scores.astype(like)


_FORCED = "decoder_input_ids and logits_processor are unsupported: use WhisperBeamSearch"
ENDING = (
    "a sequence ends by its own scores, whereas onnxruntime's CPU provider uses those of another batch entry; after "
    "its end the third output is zero"
)


@microsoft("BeamSearch", unsharded=True, limits=f"{HOST}; {_FORCED}; {ENDING}")
@taking(**ATTRIBUTES)
def beam_search(
    input_ids: Static, max_length: Static, min_length: Annotated[Any, "static", "may be empty"], num_beams: Static,
    num_return_sequences: Static, length_penalty: Static = None, repetition_penalty: Static = None,
    vocab_mask: Static = None, prefix_vocab_mask: Static = None, attention_mask: Static = None,
    decoder_input_ids: Static = None, logits_processor: Static = None,
    *, early_stopping=0, model_type: Model = 0, **attributes,
):  # fmt: skip
    """(most probable sequences [batch, returned, max_length], their scores, scores of all tokens in each step)."""
    if decoder_input_ids is not None or scalar(logits_processor, 0):
        raise NotImplementedError(_FORCED)
    count, returned = beam_counts(num_beams, num_return_sequences)
    limits = max_length, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    generation = task(input_ids, attention_mask, *limits, beams=count, model_type=model_type, **attributes)
    return run_beam_search(generation, count, returned, early_stopping, length_penalty, repetition_penalty)
