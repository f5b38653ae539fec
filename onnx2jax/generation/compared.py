"""What is proven before a decoder generates: its cache of fixed length changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from ..errors import CacheError
from ..model.model import Model
from .cache import Cache
from .loop import NEVER, Programs, State, endings
from .prompts import choice
from .sampling import Chooser
from .steps import Steps

SMALLEST: Final = 16
"""Prompts are padded to this or a power of two above it, so that few lengths are compiled."""
TOLERANCE: Final = {1: 0.2, 2: 0.05, 4: 1e-4, 8: 1e-6}
"""Of the largest logit, by bytes of a number: how far a cache of fixed length may be off."""
ROUNDED: Final = 0.05
"""The same where the model rounds what it computes with to 8 bits."""


class Compared(Steps):
    """Steps, the programs made of them, and what has shown to be right."""

    def __init__(self, model: Model, first: Model | None = None, embed: Any = None) -> None:
        super().__init__(model, first, embed)
        self._programs = Programs(self)
        self._proved: set[Any] = set()
        self._layouts: dict[tuple[int, bool], list[str]] = {}
        """For caches of a length, of prompts equally long or not: the layouts that may give the right numbers."""

    @staticmethod
    def _ragged(cache: Cache) -> bool:
        """Whether sequences have different numbers of tokens, so that their places are not their positions."""
        return len(set(np.asarray(cache.lengths).tolist())) > 1

    def _first(self, rows: list[np.ndarray], room: int, layout: str, choose: Chooser, how: Any, others: Any) -> State:
        lengths = np.array([len(r) for r in rows], np.int32)
        padded: Any = self._padded(rows, room)
        if self.embedding is not None:
            padded = self.embedding.of_prompts(padded, others)
        return self._programs.first(padded, lengths, room, choose, how, others, layout)

    def _padded(self, rows: list[np.ndarray], room: int) -> np.ndarray:
        if not self.pads:
            return np.stack(rows)
        longest = max(map(len, rows))
        size = min(max(SMALLEST, 1 << (longest - 1).bit_length()), room)
        return np.stack([np.pad(r, (0, size - len(r))) for r in rows])

    def _layout(self, rows: list[np.ndarray], room: int, choose: Chooser, how: Mapping[str, Any], others: Any) -> str:
        """How tokens of such prompts have to lie in a cache so that steps give what the first call gives.

        Raises:
            CacheError: they do not, however they lie.
        """
        uneven = len(set(map(len, rows))) > 1
        if (layouts := self._layouts.get((room, uneven))) is None:
            layouts = [""] if self.shares_places or not uneven else []
            layouts += ["apart"] if uneven else []
            if self.masks and {"appended"} <= set(self.kinds.values()) <= {"appended", "crossed"}:
                layouts.append("aligned")
        for k, layout in enumerate(layouts):
            try:
                self._prove(rows, room, layout, choose, how, others)
            except CacheError:
                if layout == layouts[-1]:
                    raise
            else:
                self._layouts[room, uneven] = layouts[k:]
                return layout
        raise AssertionError("there is a layout")

    def _prove(
        self, rows: list[np.ndarray], room: int, layout: str, choose: Chooser, how: Mapping[str, Any], others: Any
    ) -> None:
        """Compare a step over the cache with the first call, once for each batch, length and layout of the cache.

        Once for prompts of one length, and once for others, whose places in the cache are not their positions.

        Raises:
            CacheError: they differ.
        """
        if (key := (len(rows), room, layout, len(set(map(len, rows))) > 1)) in self._proved:
            return
        how = {**how, "endings": np.full_like(how["endings"], NEVER)}
        if min(map(len, rows)) == 1:
            rows = [np.concatenate([r[:1], r]) for r in rows]
        want = self._first(rows, room, layout, choose, how, others).logits
        state = self._first([r[:-1] for r in rows], room, layout, choose, how, others)
        state = replace(state, last=jax.numpy.asarray([r[-1] for r in rows], np.int32))
        compare(want, self._programs.loop(state, 2, choose, how, others).logits, room, rounds=self.rounds)
        self._proved.add(key)

    def _prove_further(
        self, cache: Cache, more: np.ndarray, state: State, choose: Chooser, how: Mapping[str, Any], others: Any
    ) -> None:
        """Compare several tokens at once with one after another, once for each count of them.

        Raises:
            CacheError: they differ.
        """
        if more.shape[1] == 1 or (key := (more.shape, cache.length, self._ragged(cache))) in self._proved:
            return
        how = {**how, "endings": np.full_like(how["endings"], NEVER)}
        own = jax.tree.map(jax.numpy.copy, replace(state, cache=cache))
        for last in more.T:
            again = replace(own, last=last.astype(np.int32), count=np.int32(1), done=np.zeros(len(last), bool))
            own = self._programs.loop(again, 2, choose, how, others)
        compare(state.logits, own.logits, cache.length, rounds=self.rounds)
        self._proved.add(key)

    def _prove_extension(self, state: State, rows: list[np.ndarray], count: int, others: Any) -> None:
        """Compare so many tokens at once with one after another, and behind others that were taken back, once.

        Raises:
            CacheError: they differ.
        """
        if (key := ("extension", len(rows), count, state.cache.length, state.cache.apart)) in self._proved:
            return
        more = np.stack([np.resize(r, count) for r in rows])
        choose, how = choice("greedy", None)
        how |= {"endings": endings(()), "pad": np.int32(0)}
        after = self._programs.further(state.cache, more, choose, how, others)
        self._prove_further(state.cache, more, after, choose, how, others)
        stale = self._programs.further(state.cache, more[:, ::-1] // 2, choose, how, others).cache
        stale = replace(stale, live=state.cache.live, end=state.cache.end)
        again = self._programs.further(stale, more, choose, how, others)
        compare(after.logits, again.logits, state.cache.length, rounds=self.rounds)
        self._proved.add(key)


def compare(want: Any, ours: Any, room: int, *, rounds: bool) -> None:
    """Refuse logits of a cache with room for so many tokens that are not those wanted.

    Raises:
        CacheError: they differ.
    """
    tolerance = max(TOLERANCE[want.dtype.itemsize], ROUNDED if rounds else 0)
    want, ours = np.asarray(want, np.float32), np.asarray(ours, np.float32)
    if np.isnan(want).any():
        raise CacheError("the logits behind the prompt are NaN: the model overflows, or is given what is no number")
    scale = np.abs(want[np.isfinite(want)]).max(initial=0)
    apart = np.subtract(ours, want, where=ours != want, out=np.zeros_like(want))  # some logits are -inf
    off = np.abs(apart).max(initial=0)
    if not off <= tolerance * scale + 1e-6:
        raise CacheError(
            f"with a cache of fixed length ({room}) the logits differ by {off:.3g}, where the largest is {scale:.3g}: "
            "the model counts positions, or lets tokens see each other, by the extent of its cache. Export it with "
            "position_ids and attention_mask among its inputs; until then generate from prompts that are equally long, "
            "or call model.run with a cache that grows"
        )
