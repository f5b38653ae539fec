"""Greedy speculative decoding: a draft decoder proposes tokens, a large one verifies all of them in one call.

The result is the large decoder's greedy text, whatever the draft: drafted tokens are accepted up to the first that
differs from the large decoder's choice, which replaces it. The loop is one compiled program on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import UnsupportedError
from .cache import Cache
from .loop import Controls, Hoisted, LoopState, Programs, matches_stop
from .sampling import NO_LOGITS, greedy, undecided
from .steps import Steps


def check_can_roll_back(steps: Steps) -> None:
    """Checks that tokens can be removed from every cache.

    Raises:
        UnsupportedError: a cache is a recurrent state or a sliding window, or the model cannot mask removed tokens.
    """
    for name, buffer in steps.pairs.items():
        if buffer.kind == "state" or buffer.window:
            what = "is a sliding window" if buffer.window else "is a recurrent state"
            raise UnsupportedError(f"the cache {name!r} {what}, which cannot be rolled back: use generate")
    if not (steps.masks_padding or steps.supports_padding):
        raise UnsupportedError("the model has no mask to hide rejected tokens: use generate")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculation:
    """Loop state of speculative decoding; all live rows advance by the same number of tokens.

    Attributes:
        texts: the state of the large decoder; its ``logits`` and ``count`` stay those after prefill.
        draft: KV caches of the draft decoder, of all tokens but the last.
        rounds: int32, the number of calls of the large decoder.
    """

    texts: LoopState
    draft: Cache
    rounds: Any


def speculate(
    programs: Programs, state: LoopState, drafts: Programs, draft: LoopState, count: int, limit: int, controls: Controls
) -> Speculation:
    """Generates greedily up to ``limit`` tokens, drafting ``count`` per round.

    Args:
        programs, state: of the large decoder, after prefill; the state is donated.
        drafts, draft: programs and state of the draft decoder.
        controls: also ``draft``, the ``others`` of the draft decoder.
    """
    room = jnp.zeros((state.last.shape[0], count), np.int32)
    tokens = jnp.concatenate([state.tokens, room], axis=1)  # a round may write beyond ``limit``
    start = Speculation(replace(state, tokens=tokens), draft.cache, jnp.zeros((), np.int32))

    def loop() -> Hoisted:
        fed = jnp.zeros((state.last.shape[0], count + 1), np.int32)
        extend, large = programs.extend(state.cache, fed, controls["others"])
        step, small = drafts.step(draft.cache, draft.last, controls["draft"])

        def run(weights: Any, start: Speculation, limit: Any, controls: Controls) -> Speculation:
            large, small = weights

            def more(now: Speculation) -> Any:
                return jnp.any(~now.texts.done & (now.texts.lengths < limit))

            def body(now: Speculation) -> Speculation:
                def guess(carry: tuple[Any, Cache], _: Any) -> tuple[tuple[Any, Cache], Any]:
                    last, cache = carry
                    logits, cache = step(small, cache, last, controls["draft"])
                    return (greedy(logits), cache), last

                (_, drafted), fed = lax.scan(guess, (now.texts.last, now.draft), length=count + 1)
                logits, cache = extend(large, now.texts.cache, fed.T, controls["others"])
                right = jnp.where(undecided(logits), np.int32(NO_LOGITS), greedy(logits))
                texts, new = _accepted(now.texts, fed.T, right, limit, controls)
                texts = replace(texts, cache=_rolled_back(now.texts.cache, cache, new))
                return Speculation(texts, _rolled_back(now.draft, drafted, new), now.rounds + 1)

            return lax.while_loop(more, body, start)

        return run, (large, small)

    name = ("speculate", count, drafts.folder)
    done: Speculation = programs.run(name, loop, start, np.int32(limit), controls, donate=True)
    return done


def _accepted(state: LoopState, fed: Any, right: Any, limit: Any, controls: Controls) -> tuple[LoopState, Any]:
    """The state after a round, and the number of new tokens of each text, int32[batch].

    New are the accepted draft tokens and the large decoder's next one, up to a stop sequence. ``fed`` int32[batch, n]
    is the last token and the drafted ones, ``right`` the large decoder's choice after each.
    """
    size = fed.shape[1]
    agreed = jnp.cumprod((fed[:, 1:] == right[:, :-1]).astype(np.int32), axis=1)
    new = jnp.sum(agreed, axis=1, dtype=np.int32) + 1
    write = jax.vmap(lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
    tokens = write(state.tokens, right.astype(np.int32), state.lengths, 0)
    ended = jnp.stack([_ends(tokens, state.lengths + i, controls["stop"]) for i in range(size)], axis=1)
    until_end = jnp.where(jnp.any(ended, axis=1), jnp.argmax(ended, axis=1).astype(np.int32) + 1, np.int32(size))
    new = jnp.minimum(jnp.minimum(new, until_end), limit - state.lengths)
    fewest = jnp.min(jnp.where(state.done, size, new))  # rows share the end of a cache: unequal steps exhaust it
    new = jnp.where(state.done, 0, fewest).astype(np.int32)
    lengths = state.lengths + new
    last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    last, tokens = jnp.where(state.done, state.last, last), jnp.where(state.done[:, None], state.tokens, tokens)
    done = state.done | (new == until_end) & jnp.any(ended, axis=1) | (lengths >= limit)
    return replace(state, last=last, tokens=tokens, lengths=lengths, done=done), new


def _rolled_back(before: Cache, after: Cache, new: Any) -> Cache:
    """The cache with only the first ``new`` tokens, int32[batch], of those added since ``before``."""
    added = after.live & ~before.live
    live = before.live | (added & (jnp.cumsum(added, axis=1, dtype=np.int32) <= new[:, None]))
    return replace(after, live=live, end=before.end + jnp.max(new))


def _ends(tokens: Any, indices: Any, stop: Any) -> Any:
    """bool[batch]: whether a stop sequence ends at ``indices`` int32[batch], one for each row of tokens."""
    return jax.vmap(lambda row, index: matches_stop(row[None], index, stop)[0])(tokens, indices)
