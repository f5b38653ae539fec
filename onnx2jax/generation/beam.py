"""Beam search: the likeliest texts, several kept at a time, in one program on the device."""

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
from .loop import Programs, State, ends


@dataclass(frozen=True)
class Beams:
    """Texts that a beam search has found, the best first.

    Attributes:
        tokens: int64[batch, beams, count], without the prompts; ``pad`` stands behind a text's end.
        lengths: int64[batch, beams], the tokens of each.
        scores: float32[batch, beams], the sum of log-probabilities divided by length ** length_penalty; -inf, of length
            0, where there are fewer texts than beams.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def texts(self) -> list[list[int]]:
        """The tokens of the best text of each prompt, without padding."""
        return [row[0, : n[0]].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Search:
    """A beam search under way: texts that go on, and those that have ended.

    Attributes:
        cache: of batch * beams sequences, without their last tokens.
        tokens: int32[batch, beams, room], texts that go on.
        sums: float32[batch, beams], their log-probabilities.
        count: int32, their tokens.
        ended: int32[batch, beams, room], the best of those that have ended.
        scores: float32[batch, beams]; -inf where there is none.
        lengths: int32[batch, beams].
        done: bool[batch], the prompts for which nothing better can come.
    """

    cache: Cache
    tokens: Any
    sums: Any
    count: Any
    ended: Any
    scores: Any
    lengths: Any
    done: Any


def search(
    programs: Programs, state: State, width: int, limit: int, how: Mapping[str, Any], others: Mapping[str, Any]
) -> Search:
    """The texts of at most ``limit`` tokens that follow a prompt.

    Args:
        programs: of the decoder.
        state: behind the first call; used up.
        width: the texts kept for each prompt.
        limit: the most tokens.
        how: ``endings``, ``length_penalty`` float32, and ``early`` bool: end when ``width`` texts have ended.
        others: further inputs of the model, one row for each prompt.
    """
    pairs, batch = programs.steps.pairs, state.last.shape[0]
    others = {n: _repeated(v, width, 0) if np.ndim(v) and v.shape[0] == batch else v for n, v in others.items()}
    search = programs.run(("beams", width), _begun, (), state.cache, state.logits, how, pairs=pairs, width=width)
    step, handed = programs.step(search.cache, search.tokens[:, :, 0].reshape(-1), others)

    def run(handed: Any, search: Search, limit: Any, how: Any, others: Any) -> Search:
        def more(search: Search) -> Any:
            return (search.count < limit) & ~jnp.all(search.done)

        def body(search: Search) -> Search:
            last = lax.dynamic_index_in_dim(search.tokens, search.count - 1, axis=2, keepdims=False)
            logits, cache = step(handed, search.cache, last.reshape(-1), others)
            return _advanced(replace(search, cache=cache), logits, pairs, how)

        return _closed(lax.while_loop(more, body, search), how)

    return programs.run(("beam search", width), run, (1,), handed, search, np.int32(limit), how, others)


def _begun(cache: Cache, logits: Any, how: Any, *, pairs: Mapping[str, Pair], width: int) -> Search:
    """The search behind the prompt: its best first tokens."""
    batch, room = cache.live.shape
    values = {n: _repeated(v, width, pairs[n].batch or 0) for n, v in cache.values.items()}
    cache = replace(cache, values=values, live=_repeated(cache.live, width, 0))
    tokens = jnp.zeros((batch, width, room), np.int32)
    sums = jnp.where(jnp.arange(width) == 0, 0.0, jnp.float32(-np.inf)) + jnp.zeros((batch, 1), np.float32)
    nothing = jnp.full((batch, width), -np.inf, np.float32)
    lengths = jnp.zeros((batch, width), np.int32)
    search = Search(cache, tokens, sums, jnp.int32(0), tokens, nothing, lengths, jnp.zeros(batch, bool))
    return _advanced(search, _repeated(logits, width, 0), pairs, how)


def _advanced(search: Search, logits: Any, pairs: Mapping[str, Pair], how: Mapping[str, Any]) -> Search:
    """One more token for each text: of twice as many candidates as texts, those that end go to the ended ones."""
    batch, width, room = search.tokens.shape
    likely = jax.nn.log_softmax(logits.astype(np.float32)).reshape(batch, width, -1)
    vocabulary, twice = likely.shape[-1], min(2 * width, width * likely.shape[-1])
    sums, places = lax.top_k((search.sums[..., None] + likely).reshape(batch, -1), twice)
    parents, new = places // vocabulary, places % vocabulary
    tokens = jnp.take_along_axis(search.tokens, parents[..., None], axis=1)
    tokens = lax.dynamic_update_slice_in_dim(tokens, new[..., None].astype(np.int32), search.count, axis=2)
    over = ends(tokens.reshape(-1, room), search.count, how["endings"]).reshape(batch, twice)
    count = search.count + 1
    # A text that ends counts where it is among the best; of those that do not, the best go on.
    scores = jnp.where(over & (jnp.arange(twice) < width), sums / _power(count, how), -np.inf)
    search = _merged(search, tokens, jnp.where(search.done[:, None], -np.inf, scores), count)
    kept = jnp.argsort(over, axis=1, stable=True)[:, :width]
    sums = jnp.take_along_axis(jnp.where(over, -np.inf, sums), kept, axis=1)
    rows = jnp.arange(batch, dtype=np.int32)[:, None] * width + jnp.take_along_axis(parents, kept, axis=1)
    rows = rows.reshape(-1)
    values = {n: jnp.take(v, rows, axis=pairs[n].batch or 0) for n, v in search.cache.values.items()}
    full = jnp.all(search.scores > -np.inf, axis=1)
    beaten = search.scores[:, -1] >= sums[:, 0] / _power(count, how)
    return replace(
        search,
        cache=replace(search.cache, values=values, live=search.cache.live[rows]),
        tokens=jnp.take_along_axis(tokens, kept[..., None], axis=1),
        sums=sums,
        count=count,
        done=search.done | (full & (how["early"] | beaten)),
    )


def _merged(search: Search, tokens: Any, scores: Any, count: Any) -> Search:
    """The best of the texts that have ended and of more of them, all of which have ``count`` tokens."""
    width = search.scores.shape[1]
    best, places = lax.top_k(jnp.concatenate([search.scores, scores], axis=1), width)
    lengths = jnp.concatenate([search.lengths, jnp.broadcast_to(count, scores.shape).astype(np.int32)], axis=1)
    ended = jnp.concatenate([search.ended, tokens], axis=1)
    ended = jnp.take_along_axis(ended, places[..., None], axis=1)
    return replace(search, ended=ended, scores=best, lengths=jnp.take_along_axis(lengths, places, axis=1))


def _closed(search: Search, how: Mapping[str, Any]) -> Search:
    """The search with the texts that still go on among those that have ended, where a prompt is not done."""
    scores = jnp.where(search.done[:, None], -np.inf, search.sums / _power(search.count, how))
    return _merged(search, search.tokens, scores, search.count)


def _power(count: Any, how: Mapping[str, Any]) -> Any:
    return count.astype(np.float32) ** how["length_penalty"]


def _repeated(value: Any, width: int, axis: int) -> Any:
    return jnp.repeat(value, width, axis=axis)
