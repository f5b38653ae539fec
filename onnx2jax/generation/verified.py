"""Checks, before a decoder generates, that a fixed-length cache leaves its logits unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from ..errors import CacheError
from ..model.model import Model
from .cache import Cache
from .loop import NO_TOKEN, Controls, LoopState, Programs, with_arrays
from .sampling import Choice
from .steps import Steps

SMALLEST_PREFILL: Final = 16
"""The smallest padded prompt length; longer prompts are padded to a power of two, so few programs are compiled."""
TOLERANCE: Final = {1: 0.2, 2: 0.05, 4: 1e-4, 8: 1e-6}
"""Largest accepted difference relative to the largest logit, by item size in bytes."""
EIGHT_BIT_TOLERANCE: Final = 0.05
"""The same for models that quantise activations or caches to 8 bits."""


class VerifiedSteps(Steps):
    """Steps, their compiled programs, and the cache layouts verified so far."""

    def __init__(self, model: Model, first: Model | None = None, embed: Any = None) -> None:
        super().__init__(model, first, embed)
        self._programs = Programs(self)
        self._verified: set[Any] = set()
        self._failed_layouts: set[tuple[int, bool, str]] = set()
        """Cache length, whether prompts differ in length, and a layout that has failed verification."""

    @staticmethod
    def _ragged(cache: Cache) -> bool:
        """Whether sequences differ in length, so that slots are not positions."""
        return len(set(np.asarray(cache.lengths).tolist())) > 1

    def _cache_key(self, cache: Cache) -> tuple[int, bool, bool, bool]:
        """What decides, of a cache of given batch size, how the model is run on it: length and layout."""
        return cache.length, cache.aligned, cache.apart, self._ragged(cache)

    def _prefill(self, rows: list[np.ndarray], room: int, layout: str, choice: Choice, controls: Controls) -> LoopState:
        lengths = np.array([len(r) for r in rows], np.int32)
        if self.supports_padding:
            size = min(max(SMALLEST_PREFILL, 1 << int(lengths.max() - 1).bit_length()), room)
            rows = [np.pad(r, (0, size - len(r))) for r in rows]
        fed = self._embedded(np.stack(rows), controls)
        return self._programs.prefill(fed, lengths, room, layout, choice, controls)

    def _embedded(self, tokens: np.ndarray, controls: Controls) -> Any:
        """Prompts as the programs take them: as embeddings if further inputs such as images are embedded with them."""
        return tokens if self.embedding is None else self.embedding.embed_prompts(tokens, controls["others"])

    def _layout(
        self, rows: list[np.ndarray], room: int, choice: Choice, controls: Controls
    ) -> tuple[str, LoopState | None]:
        """The cache layout with which steps reproduce the logits of prefill: "", "apart" or "aligned".

        With it the state after the prompts, if the verification has computed that.

        Raises:
            CacheError: no layout does.
        """
        uneven = len(set(map(len, rows))) > 1
        appends = {"appended"} <= set(self.kinds.values()) <= {"appended", "cross"}
        suited = {"": self.shares_slots or not uneven, "apart": uneven, "aligned": self.masks_padding and appends}
        *others, last = (n for n, suits in suited.items() if suits and (room, uneven, n) not in self._failed_layouts)
        for layout in others:
            try:
                return layout, self._verify_layout(rows, room, layout, choice, controls)
            except CacheError:
                self._failed_layouts.add((room, uneven, layout))
        return last, self._verify_layout(rows, room, last, choice, controls)

    def _verify_layout(
        self, rows: list[np.ndarray], room: int, layout: str, choice: Choice, controls: Controls
    ) -> LoopState | None:
        """Compares a step with prefill, once per batch size, cache length and layout.

        Prompts of equal and of different lengths are verified separately: for the latter, slots are not positions.

        Returns:
            The state after the prompts, if it was computed.

        Raises:
            CacheError: the logits differ.
        """
        if (key := (len(rows), room, layout, len(set(map(len, rows))) > 1)) in self._verified:
            return None
        unending = _unending(controls)
        short = min(map(len, rows)) == 1
        longer = [np.concatenate([r[:1], r]) for r in rows] if short else rows
        want = self._prefill(longer, room, layout, choice, controls)
        state = self._prefill([r[:-1] for r in longer], room, layout, choice, unending)
        state = with_arrays(state, last=np.array([r[-1] for r in longer], np.int32), done=np.zeros(len(rows), bool))
        stepped = self._programs.loop(state, 2, choice, unending).logits
        check_close(want.logits, stepped, room, self)
        self._verified.add(key)
        return None if short else want

    def _verify_resume(
        self, cache: Cache, more: np.ndarray, state: LoopState, choice: Choice, controls: Controls
    ) -> None:
        """Compares extending by several tokens at once with one step per token, once per shape and cache layout.

        Raises:
            CacheError: the logits differ.
        """
        if more.shape[1] == 1 or (key := ("resume", more.shape, self._cache_key(cache))) in self._verified:
            return
        stepped = jax.tree.map(jax.numpy.copy, replace(state, cache=cache))
        for last in more.T:
            chosen = {"last": last.astype(np.int32), "count": np.array(1, np.int32), "done": np.zeros(len(last), bool)}
            stepped = self._programs.loop(with_arrays(stepped, **chosen), 2, choice, _unending(controls))
        check_close(state.logits, stepped.logits, cache.length, self)
        self._verified.add(key)

    def _verify_extend(
        self, state: LoopState, rows: list[np.ndarray], count: int, choice: Choice, controls: Controls
    ) -> None:
        """Compares extending by ``count`` tokens with single steps, and with extending after a rollback, once.

        Raises:
            CacheError: the logits differ.
        """
        if (key := ("extension", len(rows), count, self._cache_key(state.cache))) in self._verified:
            return
        more = np.stack([np.resize(r, count) for r in rows])
        after = self._programs.resume(state.cache, more, choice, controls)
        self._verify_resume(state.cache, more, after, choice, controls)
        stale = self._programs.resume(state.cache, more[:, ::-1] // 2, choice, controls).cache
        stale = replace(stale, live=state.cache.live, end=state.cache.end)
        again = self._programs.resume(stale, more, choice, controls)
        check_close(after.logits, again.logits, state.cache.length, self)
        self._verified.add(key)


def _unending(controls: Controls) -> Controls:
    """The controls with stop sequences that match no token."""
    return {**controls, "stop": np.full_like(controls["stop"], NO_TOKEN)}


def lost(where: str) -> str:
    """The message that no token follows from the model's logits."""
    return (
        f"{where}: the logits are NaN, or all -inf: the model overflows, or an input or weight is NaN. For a file in "
        "half precision: decoder(..., dtype='float32'); otherwise decoder.model.values(...) shows where it begins"
    )


def check_close(want: Any, ours: Any, room: int, steps: Steps) -> None:
    """Checks the logits of a cache of length ``room`` against the expected ones, in the precision of the model.

    Raises:
        CacheError: they differ by more than the tolerance, or the expected ones are NaN.
    """
    dtype = steps.model.settings.dtype or want.dtype
    tolerance = max(TOLERANCE[dtype.itemsize], EIGHT_BIT_TOLERANCE if steps.quantises_activations else 0)
    want, ours = np.asarray(want, np.float32), np.asarray(ours, np.float32)
    if np.isnan(want).any():
        raise CacheError(lost("after the prompt"))
    scale = np.abs(want[np.isfinite(want)]).max(initial=0)
    difference = np.subtract(ours, want, where=ours != want, out=np.zeros_like(want))  # some logits are -inf
    off = np.abs(difference).max(initial=0)
    if not off <= tolerance * scale + 1e-6:
        raise CacheError(
            f"with a fixed-length cache ({room} slots) the logits differ by {off:.3g}, and the largest is {scale:.3g}: "
            "the model derives positions or its attention mask from the extent of its cache. Export it with "
            "position_ids and attention_mask among its inputs; until then generate from prompts of equal length, "
            "or call model.run with a growing cache"
        )
