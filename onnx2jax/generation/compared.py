"""What is proven before a decoder generates: its cache of fixed length changes nothing."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..errors import CacheError

TOLERANCE: Final = {1: 0.2, 2: 0.05, 4: 1e-4, 8: 1e-6}
"""Of the largest logit, by bytes of a number: how far a cache of fixed length may be off."""
ROUNDED: Final = 0.05
"""The same where the model rounds what it computes with to 8 bits."""


def compare(want: Any, ours: Any, room: int, *, rounds: bool) -> None:
    """Refuse logits of a cache with room for so many tokens that are not those wanted.

    Raises:
        CacheError: they differ.
    """
    tolerance = max(TOLERANCE[want.dtype.itemsize], ROUNDED if rounds else 0)
    want, ours = np.asarray(want, np.float32), np.asarray(ours, np.float32)
    scale = np.abs(want[np.isfinite(want)]).max(initial=0)
    off = np.abs(ours - want, where=ours != want, out=np.zeros_like(want)).max(initial=0)  # some logits are -inf
    if not off <= tolerance * scale + 1e-6:
        raise CacheError(
            f"with a cache of fixed length ({room}) the logits differ by {off:.3g}, where the largest is {scale:.3g}: "
            "the model counts positions, or lets tokens see each other, by the extent of its cache. Export it with "
            "position_ids and attention_mask among its inputs; until then generate from prompts that are equally long, "
            "or call model.run with a cache that grows"
        )
