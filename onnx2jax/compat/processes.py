"""Arrays and texts of several processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from .config import enable_x64


def spread(x: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of several processes with another sharding over the same devices; all of them call this."""
    return jax.jit(_identity, out_shardings=sharding)(x)


def _identity(x: Any) -> Any:
    return x


def gathered(x: jax.Array) -> np.ndarray:
    """The values of an array of several processes, as NumPy in each; all of them call this."""
    from jax.experimental import multihost_utils

    with enable_x64():
        return np.asarray(x) if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)


def gathered_texts(text: str) -> list[str]:
    """The texts of all processes, in their order; all of them call this, and wait for one that does not."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(data.size))
    rows = multihost_utils.process_allgather(np.pad(data, (0, lengths.max() - data.size)))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def noticeboard() -> Any:
    """The key-value store of ``jax.distributed.initialize``; None without it, or where JAX no longer hands it out.

    It has ``key_value_set(key, text)``, ``blocking_key_value_get(key, milliseconds)``, ``key_value_dir_get(folder)``
    and ``key_value_delete(key)``. Without it ``gathered_texts`` exchanges texts.
    """
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError):
        return None
