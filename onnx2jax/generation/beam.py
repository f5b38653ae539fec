"""Beam search as one compiled program on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..model.calls.cache_pairs import Pair
from .cache import Cache
from .loop import Controls, Hoisted, LoopState, Programs, matches_stop
from .results import lines


@dataclass(frozen=True, repr=False)
class Beams:
    """Texts found by a beam search, best first.

    Attributes:
        tokens: int64[batch, beams, count], without the prompts, padded with ``pad`` after the end of a text.
        lengths: int64[batch, beams], the number of tokens of each text.
        scores: float32[batch, beams], the sum of log-probabilities divided by length ** length_penalty; -inf (with
            length 0) where fewer texts than beams were found.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def texts(self) -> list[list[int]]:
        """The tokens of the best text for each prompt, without padding."""
        return [row[0, : n[0]].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]

    def __repr__(self) -> str:
        batch, beams = self.scores.shape
        best = lines(self.texts(), self.scores[:, 0])
        return "\n".join([f"Beams: {beams} for each of {batch} prompt{'s' * (batch != 1)}; the best:", *best])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Search:
    """Loop state of a beam search: live beams and finished hypotheses.

    Attributes:
        cache: KV caches of batch * beams sequences, without their last tokens.
        tokens: int32[batch, beams, room], the live beams.
        sums: float32[batch, beams], their summed log-probabilities.
        count: int32, their number of tokens.
        finished: int32[batch, beams, room], the best finished hypotheses.
        scores: float32[batch, beams], their scores; -inf where there is none.
        lengths: int32[batch, beams], their numbers of tokens.
        done: bool[batch], prompts whose finished hypotheses can no longer be improved.
    """

    cache: Cache
    tokens: Any
    sums: Any
    count: Any
    finished: Any
    scores: Any
    lengths: Any
    done: Any


def search(programs: Programs, state: LoopState, width: int, limit: int, controls: Controls) -> Search:
    """Searches for the likeliest continuations of at most ``limit`` tokens.

    Args:
        programs: the decoder's compiled programs.
        state: the state after prefill.
        width: the number of beams for each prompt.
        limit: the maximum number of tokens.
        controls: also ``length_penalty`` float32, and ``early`` bool: whether to end as soon as ``width`` hypotheses
            are finished. The ``others`` have one row for each prompt.
    """
    pairs, batch, others = programs.steps.pairs, state.last.shape[0], controls["others"]
    others = {n: jnp.repeat(v, width, 0) if np.ndim(v) and v.shape[0] == batch else v for n, v in others.items()}
    controls = {**controls, "others": others}

    def beams() -> Hoisted:
        return lambda _, cache, logits, controls: _initial(cache, logits, controls, pairs, width), ()

    def loop() -> Hoisted:
        step, weights = programs.step(begun.cache, begun.tokens[:, :, 0].reshape(-1), others)

        def run(weights: Any, search: Search, limit: Any, controls: Controls) -> Search:
            def more(search: Search) -> Any:
                return (search.count < limit) & ~jnp.all(search.done)

            def body(search: Search) -> Search:
                last = lax.dynamic_index_in_dim(search.tokens, search.count - 1, axis=2, keepdims=False)
                logits, cache = step(weights, search.cache, last.reshape(-1), controls["others"])
                return _advance(replace(search, cache=cache), logits, pairs, controls)

            search = lax.while_loop(more, body, search)  # then live beams of prompts that are not done count, too
            scores = jnp.where(search.done[:, None], -np.inf, search.sums / _length_divisor(search.count, controls))
            return _merge_finished(search, search.tokens, scores, search.count)

        return run, weights

    begun: Search = programs.run(("beams", width), beams, state.cache, state.logits, controls)
    done: Search = programs.run(("beam search", width), loop, begun, np.int32(limit), controls, donate=True)
    return done


def _initial(cache: Cache, logits: Any, controls: Controls, pairs: Mapping[str, Pair], width: int) -> Search:
    """The search state after prefill, with the best first tokens."""
    batch, room = cache.live.shape
    values = {n: jnp.repeat(v, width, pairs[n].batch or 0) for n, v in cache.values.items()}
    cache = replace(cache, values=values, live=jnp.repeat(cache.live, width, 0))
    tokens = jnp.zeros((batch, width, room), np.int32)
    sums = jnp.where(jnp.arange(width) == 0, 0.0, jnp.float32(-np.inf)) + jnp.zeros((batch, 1), np.float32)
    scores = jnp.full((batch, width), -np.inf, np.float32)
    lengths = jnp.zeros((batch, width), np.int32)
    search = Search(cache, tokens, sums, jnp.int32(0), tokens, scores, lengths, jnp.zeros(batch, bool))
    return _advance(search, jnp.repeat(logits, width, 0), pairs, controls)


def _advance(search: Search, logits: Any, pairs: Mapping[str, Pair], controls: Controls) -> Search:
    """Extends every beam by one token: of 2 * width candidates, the ended ones are merged into ``finished``."""
    batch, width, room = search.tokens.shape
    likely = jax.nn.log_softmax(logits.astype(np.float32)).reshape(batch, width, -1)
    vocabulary, candidates = likely.shape[-1], min(2 * width, width * likely.shape[-1])
    sums, indices = lax.top_k((search.sums[..., None] + likely).reshape(batch, -1), candidates)
    parents, new = indices // vocabulary, indices % vocabulary
    tokens = jnp.take_along_axis(search.tokens, parents[..., None], axis=1)
    tokens = lax.dynamic_update_slice_in_dim(tokens, new[..., None].astype(np.int32), search.count, axis=2)
    ended = matches_stop(tokens.reshape(-1, room), search.count, controls["stop"]).reshape(batch, candidates)
    count = search.count + 1
    # An ended candidate counts only among the best ``width``; the best of the others stay live.
    scores = jnp.where(ended & (jnp.arange(candidates) < width), sums / _length_divisor(count, controls), -np.inf)
    search = _merge_finished(search, tokens, jnp.where(search.done[:, None], -np.inf, scores), count)
    live = jnp.argsort(ended, axis=1, stable=True)[:, :width]
    sums = jnp.take_along_axis(jnp.where(ended, -np.inf, sums), live, axis=1)
    rows = jnp.arange(batch, dtype=np.int32)[:, None] * width + jnp.take_along_axis(parents, live, axis=1)
    rows = rows.reshape(-1)
    values = {n: jnp.take(v, rows, axis=pairs[n].batch or 0) for n, v in search.cache.values.items()}
    full = jnp.all(search.scores > -np.inf, axis=1)
    beaten = search.scores[:, -1] >= sums[:, 0] / _length_divisor(count, controls)
    return replace(
        search,
        cache=replace(search.cache, values=values, live=search.cache.live[rows]),
        tokens=jnp.take_along_axis(tokens, live[..., None], axis=1),
        sums=sums,
        count=count,
        done=search.done | (full & (controls["early"] | beaten)),
    )


def _merge_finished(search: Search, tokens: Any, scores: Any, count: Any) -> Search:
    """Keeps the best of the finished hypotheses and new ones, all of which have ``count`` tokens."""
    width = search.scores.shape[1]
    best, indices = lax.top_k(jnp.concatenate([search.scores, scores], axis=1), width)
    lengths = jnp.concatenate([search.lengths, jnp.broadcast_to(count, scores.shape).astype(np.int32)], axis=1)
    finished = jnp.concatenate([search.finished, tokens], axis=1)
    finished = jnp.take_along_axis(finished, indices[..., None], axis=1)
    return replace(search, finished=finished, scores=best, lengths=jnp.take_along_axis(lengths, indices, axis=1))


def _length_divisor(count: Any, controls: Controls) -> Any:
    return count.astype(np.float32) ** controls["length_penalty"]
