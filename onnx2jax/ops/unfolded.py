"""Barriers before what XLA would evaluate while it compiles, element by element: seconds for the pixels of an image.

Gathers, scatters and scans of constants are such, and so are chains of elementwise operations on them. Constants are
indices and coordinates that a file holds, the positions that JAX scatters to find which update of an element is the
last, and the cotangent of a sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..limits import XLA_FOLDED
from .arrays import is_known


def unfolded(x: Any, size: int | None = None) -> Any:
    """A known array behind a barrier, if it, or what is computed from it, has a large number ``size`` of elements."""
    if not is_known(x) or not isinstance(size := x.size if size is None else size, int) or size < XLA_FOLDED:
        return x
    return lax.optimization_barrier(jnp.asarray(x))


@jax.custom_jvp
def with_unfolded_cotangent(y: Any) -> Any:
    """y, whose cotangent is behind a barrier."""
    return y


@with_unfolded_cotangent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return *primals, *map(lax.optimization_barrier, tangents)
