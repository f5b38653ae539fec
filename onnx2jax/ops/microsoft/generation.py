"""The com.microsoft domain: whole generations of text, whose steps are graphs inside the node.

The loop is Python's, on the host: the cache of keys and values grows with each token, and each step's graph runs as
graphs inside nodes on the host do. Scores are NumPy's, in float32.
"""

from __future__ import annotations

import itertools
from inspect import Parameter
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np

from ..arrays import check_shapes
from ..registry import Static, op, taking
from .decoder import repeated
from .fused import MICROSOFT

LOWEST = np.finfo(np.float32).min
"""The score of what may not come next."""


def check_names(graph, what, *names):
    """Refuse a graph whose first inputs have other names than these."""
    if [v.name for v in graph.inputs[: len(names)]] != list(names):
        given = [v.name for v in graph.inputs[: len(names)]]
        raise ValueError(f"the inputs of the graph {what} must begin with {', '.join(names)} (it has {given})")


def decoder_only(decoder, first, ids, mask, pad, beams):
    """Steps of a model like GPT-2: yields logits, and takes (the sequences, the rows that they go on from)."""
    for graph, name in ((decoder, "decoder"), (first, "init_decoder")):
        if graph is not None:
            check_names(graph, name, "input_ids", "position_ids", "attention_mask")
    if len(decoder.inputs) != len(decoder.outputs) + 2:
        raise NotImplementedError(f"the graph decoder takes more than its past ({SHARED})")
    real = (ids != pad).astype(np.int32)
    mask = real if mask is None else mask
    ids, mask, real = (np.repeat(x, beams, axis=0) for x in (ids, mask, real))
    positions = np.where(real, np.cumsum(real, axis=1, dtype=np.int32) - 1, 0)  # whatever a mask says
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
    """Steps of a model like T5, whose encoder may also make the first step of the decoder."""
    check_names(encoder, "encoder", "encoder_input_ids", "encoder_attention_mask")
    check_names(decoder, "decoder", "input_ids", "encoder_attention_mask")
    if mask is None:  # padding stands in front; behind, it may be the end of the sequence
        mask = np.logical_or.accumulate(ids != pad, axis=1).astype(np.int32)
    count, hidden, sequences = len(decoder.outputs) - 1, [], np.full((len(ids), 1), start, np.int32)
    if len(encoder.inputs) == 2:
        cross = encoder(ids, mask)
        own = [np.zeros((len(x), x.shape[1], 0, x.shape[3]), x.dtype) for x in cross[:count]]
    else:
        logits, *hidden = encoder(ids, mask, sequences)
        own, cross = hidden[1 : 1 + count], hidden[1 + count :]
        hidden = hidden[:1] if decoder.inputs[2].name == "encoder_hidden_states" else []
    if len(decoder.inputs) != 2 + len(hidden) + 2 * count:
        raise NotImplementedError(f"the graph decoder takes {len(decoder.inputs)} inputs: {SHARED}")
    repeated = [[np.repeat(np.asarray(x), beams, axis=0) for x in v] for v in ((mask, sequences), own, hidden, cross)]
    (mask, sequences), own, hidden, cross = repeated
    if len(encoder.inputs) > 2:
        sequences, _ = yield np.repeat(np.asarray(logits), beams, axis=0)  # the beams of a sequence are alike so far
    whole = decoder.inputs[0].type is None or decoder.inputs[0].type.shape[1:] != (1,)
    while True:
        logits, *own = decoder(sequences if whole else sequences[:, -1:], mask, *hidden, *own, *cross)
        sequences, order = yield logits
        own = [np.asarray(v)[order] for v in own]


SHARED = "a cache buffer shared by past and present is refused; export the decoder with a past that grows"


class Task(NamedTuple):
    """What is generated: sequences to go on from, the steps behind them, and which token may come next."""

    sequences: np.ndarray
    steps: Any
    max_length: int
    vocab_size: int
    pad: int
    eos: int
    ngram: int
    min_length: int
    penalty: float
    vocab_mask: np.ndarray | None
    prefix_vocab_mask: np.ndarray | None
    more: Any = None
    """A further rule: from scores and sequences to scores."""

    def scores(self, logits, sequences, *, logarithmic=False):
        """Scores [rows, vocab] of the tokens behind sequences [rows, length]: the last logits by the rules."""
        scores = np.asarray(logits)[:, -1].astype(np.float32)
        if self.vocab_size > scores.shape[1]:
            raise ValueError(f"vocab_size ({self.vocab_size}) is more than the {scores.shape[1]} logits of the decoder")
        scores = scores[:, : self.vocab_size] if self.vocab_size > 0 else scores
        if logarithmic:
            scores = scores - scores.max(1, keepdims=True)
            scores = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        rows, vocab = scores.shape
        masks = {"vocab_mask": (self.vocab_mask, "vocab"), "prefix_vocab_mask": (self.prefix_vocab_mask, "batch vocab")}
        check_shapes({"vocab": vocab}, **masks)
        seen = np.zeros(scores.shape, bool)
        np.put_along_axis(seen, sequences, True, axis=1)
        worse = np.where(scores < 0, scores * np.float32(self.penalty), scores / np.float32(self.penalty))
        banned = np.zeros(scores.shape, bool)
        if 0 < self.ngram <= sequences.shape[1]:
            again, last = repeated(sequences, self.ngram)
            np.logical_or.at(banned, (np.arange(rows)[:, None], last), again)
        if self.vocab_mask is not None:
            banned |= self.vocab_mask == 0
        if self.prefix_vocab_mask is not None and sequences.shape == self.sequences.shape:
            banned |= np.repeat(self.prefix_vocab_mask == 0, rows // len(self.prefix_vocab_mask), axis=0)
        banned[:, self.eos] |= sequences.shape[1] < self.min_length
        scores = np.where(banned, LOWEST, np.where(seen, worse, scores))
        return scores if self.more is None else self.more(scores, sequences)

    def one_by_one(self, choose):
        """Sequences [batch, max_length], each of which goes on with the token chosen until that is the end."""
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


def number(value, default):
    """What an input of one number says, as Python's."""
    return default if value is None else np.asarray(value).reshape(()).item()


def task(
    input_ids, max_length, mask, min_length, penalty, *masks, beams=1, model_type, decoder, init_decoder, encoder,
    decoder_start_token_id, vocab_size, eos_token_id, pad_token_id, no_repeat_ngram_size,
):  # fmt: skip
    """The Task of a node."""
    ids = np.asarray(input_ids).astype(np.int32)
    mask = None if mask is None else np.asarray(mask).astype(np.int32)
    check_shapes({}, input_ids=(ids, "batch length"), attention_mask=(mask, "batch length"))
    if model_type == 0:
        steps = decoder_only(decoder, init_decoder, ids, mask, pad_token_id, beams)
    elif encoder is None or decoder_start_token_id < 0:
        raise ValueError("model_type=1 needs the attributes encoder and decoder_start_token_id")
    else:
        steps = encoder_decoder(encoder, decoder, ids, mask, decoder_start_token_id, pad_token_id, beams)
        ids = np.full((len(ids), 1), decoder_start_token_id, np.int32)
    rules = max_length, min_length, penalty, *masks
    return governed(ids, steps, *rules, beams, vocab_size, pad_token_id, eos_token_id, no_repeat_ngram_size)


def governed(
    ids, steps, max_length, min_length, penalty, vocab_mask, prefix_vocab_mask, beams, vocab_size, pad, eos, ngram,
    more=None,
):  # fmt: skip
    """The Task of going on from ids [batch, length] by a node's inputs."""
    penalty, length = number(penalty, 1.0), number(max_length, 0)
    masks = [None if m is None else np.asarray(m).astype(np.int32) for m in (vocab_mask, prefix_vocab_mask)]
    check_shapes({"batch": len(ids)}, prefix_vocab_mask=(masks[1], "batch vocab"))
    if penalty <= 0:
        raise ValueError(f"repetition_penalty ({penalty}) must be more than 0")
    if length <= ids.shape[1]:
        raise ValueError(f"max_length ({length}) must be more than the {ids.shape[1]} tokens to begin with")
    rules = ngram, number(min_length, 0), penalty, *masks, more
    return Task(np.repeat(ids, beams, axis=0), steps, length, vocab_size, pad, eos, *rules)


HOST = f"a loop on the host, its steps compiled; {SHARED}"
ATTRIBUTES: dict[str, Any] = dict.fromkeys(("decoder", "eos_token_id", "pad_token_id"), Parameter.empty)
ATTRIBUTES |= {"encoder": None, "init_decoder": None, "decoder_start_token_id": -1, "vocab_size": -1}
ATTRIBUTES |= {"no_repeat_ngram_size": 0}
Model = Literal[0, 1]


@op("GreedySearch", domain=MICROSOFT, unsharded=True, limits=HOST)
@taking(**ATTRIBUTES)
def greedy_search(
    input_ids: Static, max_length: Static, min_length: Static = None, repetition_penalty: Static = None,
    vocab_mask: Static = None, prefix_vocab_mask: Static = None, attention_mask: Static = None,
    *, model_type: Model = 0, **attributes,
):  # fmt: skip
    """Sequences [batch, max_length] that go on with the most probable token."""
    given = attention_mask, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    work = task(input_ids, max_length, *given, model_type=model_type, **attributes)
    return work.one_by_one(lambda scores, _: scores.argmax(1))


def nucleus(scores, top_p, least, filler):
    """Scores with a filler for all but the most probable tokens that together have the probability top_p."""
    order = np.argsort(scores, axis=1, kind="stable")
    below = np.take_along_axis(scores, order, axis=1)
    shares = np.exp(below - below[:, -1:])
    gone = np.cumsum(shares / shares.sum(1, keepdims=True), axis=1, dtype=np.float32) <= np.float32(1 - top_p)
    gone[:, max(scores.shape[1] - max(least, 1), 0) :] = False
    kept = np.zeros_like(gone)
    np.put_along_axis(kept, order, ~gone, axis=1)
    return np.where(kept, scores, np.float32(filler))


_CUSTOM = (
    "custom=1, presence penalties and filtered_logits, of which the schema says too little, are refused; one token is "
    "kept at least; the stream is JAX's"
)


@op("Sampling", domain=MICROSOFT, unsharded=True, limits=f"{HOST}; {_CUSTOM}")
@taking(**ATTRIBUTES)
def sampling(
    input_ids: Static, max_length: Static, min_length: Static = None, repetition_penalty: Static = None,
    vocab_mask: Static = None, prefix_vocab_mask: Static = None, attention_mask: Static = None,
    presence_mask: Static = None, seed: Static = None,
    *, custom: Literal[0] = 0, filter_value=-1e20, min_tokens_to_keep=0, model_type: Model = 0,
    presence_penalty: Literal[0] = 0.0, temperature=1.0, top_p=0.0, rng, n_outputs=1,  # type: ignore[assignment]
    **attributes,
):  # fmt: skip
    """Sequences that go on with a token drawn from the most probable ones."""
    del custom, presence_penalty
    if presence_mask is not None or n_outputs > 1:
        raise NotImplementedError(f"{'presence_mask' if n_outputs == 1 else 'filtered_logits'} is asked for: {_CUSTOM}")
    key = rng if seed is None else jax.random.key(np.uint32(number(seed, 0) % 2**32))

    def choose(scores, length):
        scores = scores / np.float32(temperature) if temperature > 0 else scores
        noise = jax.random.gumbel(jax.random.fold_in(key, length), scores.shape, np.float32)
        return (nucleus(scores, top_p, min_tokens_to_keep, filter_value) + np.asarray(noise)).argmax(1)

    given = attention_mask, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    return task(input_ids, max_length, *given, model_type=model_type, **attributes).one_by_one(choose)


class Beam:
    """The best hypotheses of one sequence of the batch, best first."""

    def __init__(self, count, length_penalty):
        self.count, self.length_penalty, self.found, self.done = count, np.float32(length_penalty), [], False

    def worth(self, total, length):
        return total / np.power(np.float32(length), self.length_penalty)

    def add(self, tokens, total):
        self.found.append((self.worth(total, len(tokens)), tokens))
        self.found = sorted(self.found, key=lambda row: -row[0])[: self.count]

    def advanced(self, scores, sequences, task, early):
        """The next (score, row, token) by scores [beams, vocab]; what ends becomes a hypothesis.

        It is done when nothing better can come from the best score of what goes on.
        """
        flat, rows = scores.reshape(-1), [(np.float32(0), 0, task.pad)] * (self.count if self.done else 0)
        for rank, place in enumerate(np.argsort(-flat, kind="stable")[: 2 * self.count].tolist()):
            if len(rows) == self.count:
                break
            row, token = divmod(place, scores.shape[1])
            if token != task.eos:
                rows.append((flat[place], row, token))
            elif rank < self.count:
                self.add(sequences[row], flat[place])
        if len(rows) < self.count:
            raise ValueError(f"{scores.shape[1]} tokens are too few for {self.count} beams")
        if len(self.found) == self.count:
            self.done |= bool(early or self.found[-1][0] >= self.worth(flat.max(), sequences.shape[1]))
        return rows


def widths(num_beams, num_return_sequences):
    """The sequences that are kept, and those that are returned."""
    count, returned = number(num_beams, 1), number(num_return_sequences, 1)
    if not 1 <= returned <= count:
        raise ValueError(f"num_return_sequences ({returned}) must be from 1 to num_beams ({count})")
    return count, returned


def searched(work, count, returned, early, length_penalty, *others):
    """The outputs of a beam search: sequences, their scores, those of all tokens in each step.

    Scores are of the element type of the first penalty that is given.
    """
    like = next((x.dtype for x in (length_penalty, *others) if x is not None), np.float32)
    length_penalty = number(length_penalty, 1.0)
    sequences, batch = work.sequences, len(work.sequences) // count
    beams = [Beam(count, length_penalty) for _ in range(batch)]
    totals = np.tile(np.where(np.arange(count) > 0, np.float32(-1e9), np.float32(0)), batch)
    logits, steps = next(work.steps), list[Any]()
    while True:
        scores = (work.scores(logits, sequences, logarithmic=True) + totals[:, None]).reshape(batch, count, -1)
        ended, old = np.array([beam.done for beam in beams]), sequences.reshape(batch, count, -1)
        steps.append(np.where(ended[:, None, None], 0, scores))
        found = [beam.advanced(scores[i], old[i], work, early) for i, beam in enumerate(beams)]
        totals, rows, tokens = (np.array(column) for column in zip(*itertools.chain(*found), strict=True))
        rows = rows + np.repeat(np.arange(batch), count) * count
        sequences = np.append(sequences[rows], tokens.astype(np.int32)[:, None], axis=1)
        if all(beam.done for beam in beams) or sequences.shape[1] == work.max_length:
            break
        logits = work.steps.send((sequences, rows))
    out = np.full((batch, returned, work.max_length), work.pad, np.int32)
    final, every = np.zeros((batch, returned), np.float32), work.max_length - work.sequences.shape[1]
    for i, beam in enumerate(beams):
        for j in range(0 if beam.done else count):
            beam.add(sequences[i * count + j], totals[i * count + j])
        for j, (score, kept) in enumerate(beam.found[:returned]):
            out[i, j, : len(kept)], final[i, j] = kept, score
    scores = np.pad(np.stack(steps), ((0, every - len(steps)), *[(0, 0)] * 3))
    return out, final.astype(like), scores.astype(like)


_Optional = Annotated[Any, "static", "may be empty"]
_FORCED = "decoder_input_ids and a logits_processor are refused: they are WhisperBeamSearch's"
OWN = (
    "a sequence ends by its own scores, where onnxruntime's CPU provider takes those of another one of the batch; "
    "behind its end the third output is zero"
)


@op("BeamSearch", domain=MICROSOFT, unsharded=True, limits=f"{HOST}; {_FORCED}; {OWN}")
@taking(**ATTRIBUTES)
def beam_search(
    input_ids: Static, max_length: Static, min_length: _Optional, num_beams: Static,
    num_return_sequences: Static, length_penalty: Static = None, repetition_penalty: Static = None,
    vocab_mask: Static = None, prefix_vocab_mask: Static = None, attention_mask: Static = None,
    decoder_input_ids: Static = None, logits_processor: Static = None,
    *, early_stopping=0, model_type: Model = 0, **attributes,
):  # fmt: skip
    """The most probable sequences [batch, returned, max_length], their scores, and those of all tokens in each step."""
    if decoder_input_ids is not None or number(logits_processor, 0):
        raise NotImplementedError(_FORCED)
    count, returned = widths(num_beams, num_return_sequences)
    given = attention_mask, min_length, repetition_penalty, vocab_mask, prefix_vocab_mask
    work = task(input_ids, max_length, *given, beams=count, model_type=model_type, **attributes)
    return searched(work, count, returned, early_stopping, length_penalty, repetition_penalty)
