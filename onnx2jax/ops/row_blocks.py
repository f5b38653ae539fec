"""Attention over blocks of queries, for scores [..., queries, keys] that would be too large to hold at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..limits import ATTENTION_BLOCK, ATTENTION_QUERIES

Rows = Callable[[Any], Any]
"""Of an array that broadcasts to all scores, the part for a block of queries."""


def block_size(scores: Sequence[Any]) -> int | None:
    """The number of queries per block of scores [..., queries, keys]; None if they are computed at once.

    >>> block_size((1, 16, 8192, 8192)), block_size((8, 12, 512, 512))
    (256, None)
    """
    if not all(isinstance(n, int) for n in scores) or math.prod(scores) <= 2 * ATTENTION_BLOCK:
        return None
    queries = scores[-2]
    size = max(ATTENTION_QUERIES, 1 << (max(ATTENTION_BLOCK * queries // math.prod(scores), 1).bit_length() - 1))
    return size if 2 * size <= queries else None


def over_blocks(function: Callable[[Any, Rows], Any], x: Any, size: int) -> Any:
    """``function(x, rows)`` evaluated for ``size`` queries of x [..., queries, features] at a time.

    Gradients recompute each block. The last block starts early enough to be whole.
    """
    queries, count = x.shape[-2], -(-x.shape[-2] // size)
    last = queries - (count - 1) * size

    def block(operands: tuple[Any, Any]) -> Any:
        x, start = operands

        def rows(value: Any) -> Any:
            if np.ndim(value) < 2 or value.shape[-2] == 1:
                return value
            if value.shape[-2] != queries:
                raise ValueError(f"masks must broadcast to [..., {queries} queries, keys], not {value.shape}")
            return lax.dynamic_slice_in_dim(value, start, size, value.ndim - 2)

        return function(x, rows)

    if last < size:
        x = jnp.concatenate([x[..., : (count - 1) * size, :], x[..., queries - size :, :]], axis=-2)
    blocks = jnp.moveaxis(x.reshape(*x.shape[:-2], count, size, x.shape[-1]), -3, 0)
    starts = np.minimum(np.arange(count, dtype=np.int32) * size, queries - size)
    y = jnp.moveaxis(lax.map(jax.checkpoint(block, prevent_cse=False), (blocks, starts)), 0, -3)
    y = y.reshape(*y.shape[:-3], count * size, y.shape[-1])
    return y if last == size else jnp.concatenate([y[..., : (count - 1) * size, :], y[..., -last:, :]], axis=-2)
