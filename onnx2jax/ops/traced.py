"""What traced values need: integers that are known in part, and guards against XLA's folding and against NaN.

``unfolded``: while it compiles, XLA evaluates gathers, scatters and scans of constants, and chains of elementwise
operations on them, element by element. Constants are indices and coordinates that a file holds, the positions that JAX
scatters to find which update of an element is the last, and the cotangent of a sum.

``finite_or``: 0 * NaN is NaN, so a form that multiplies by zero what a result does not read spreads it to that result.
The fast form is computed, and where a result is not finite, the exact one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from ..limits import XLA_FOLDED
from .arrays import dims, is_known


@dataclass(frozen=True)
class TracedIntegers:
    """A traced vector or scalar of integers of which something is known.

    Attributes:
        value: the traced array.
        terms: its elements as integers and symbolic dimensions of ``jax.export``, for differences and bounds.
    """

    value: Any
    terms: np.ndarray


def terms(vector: Any) -> tuple[tuple[Any, ...], Any]:
    """The elements of a vector as integers and symbolic terms, and the vector, traced if it is."""
    if isinstance(vector, TracedIntegers):
        return dims(vector.terms), vector.value.reshape(-1)
    return dims(vector), np.ravel(vector)


def difference(a: Any, b: Any) -> Any:
    """``a - b`` of two terms: an integer, a term, or None for symbolic dimensions that have nothing in common."""
    try:
        return a - b
    except ValueError:  # terms of traced values, and dimensions of an export
        return None


def holds(condition: Callable[[], Any]) -> bool:
    """Whether a comparison of symbolic terms is true whatever they stand for."""
    try:
        return bool(condition())
    except Exception:  # jax.export's InconclusiveDimensionOperation, which moves between releases
        return False


def shape_vector(shape: tuple[Any, ...]) -> np.ndarray:
    """A shape as an int64 vector, or as an object vector when a dimension is symbolic."""
    return np.array(shape, np.int64 if all(isinstance(d, int) for d in shape) else object)


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


def finite_or(y: Any, exact: Callable[..., Any], *operands: Any) -> Any:
    """y if all of it is finite, else ``exact(*operands)``."""
    return lax.cond(_is_finite(lax.stop_gradient(y)), lambda y, *_: y, lambda _, *rest: exact(*rest), y, *operands)


@custom_vmap
def _is_finite(y: Any) -> Any:
    """Whether an array is finite: a product with zeros takes a third of the time of ``jnp.isfinite(y).all()``."""
    zeros = lax.optimization_barrier(jnp.zeros(y.shape[-1:], y.dtype))  # XLA would fold the product
    return jnp.isfinite(lax.dot_general(y, zeros, (((y.ndim - 1,), (0,)), ((), ())))).all()


@_is_finite.def_vmap
def _(_size: int, _batched: Any, y: Any) -> tuple[Any, bool]:
    return _is_finite(y), False  # one condition for the batch: vmap would compute both branches
