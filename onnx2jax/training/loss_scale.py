"""Dynamic loss scaling for models that compute in float16, whose smallest normal number is 6e-5.

The loss is multiplied by a power of two before it is differentiated, so that small gradients do not underflow, and the
gradients are divided by it in float32. Where they are infinite or NaN, the step leaves parameters, statistics and
optimizer as they were and halves the scale; the scale doubles every 2000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")

FIRST: Final = 2.0**15
LARGEST: Final = 2.0**24
DOUBLES_EVERY: Final = 2000
"""Steps."""


def initial(dtype: Any) -> jax.Array | None:
    """The scale of the first step; None where the model does not compute in float16."""
    return jnp.full((), FIRST, jnp.float32) if dtype == np.float16 else None


def gradient(total: Callable[..., Any], scale: Any) -> Callable[..., Any]:
    """A function that returns what ``total`` does, a loss and more, and the gradients of the loss times the scale."""

    def differentiated(params: Any, *rest: Any) -> Any:
        def scaled(params: Any) -> Any:
            loss, more = total(params, *rest)
            wide = jnp.promote_types(loss.dtype, jnp.float32)
            return loss if scale is None else loss.astype(wide) * scale, (loss, more)

        (_, found), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        return found, grads

    return differentiated


def unscaled(grads: T, scale: Any) -> T:
    """The gradients of the loss, from those of the scaled one."""
    return grads if scale is None else jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)


def chosen(scale: Any, finite: Any, new: T, old: T) -> T:
    """The values after a step: the old ones where its gradients overflowed."""
    return new if scale is None else jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def updated(scale: Any, finite: Any, step: Any) -> Any:
    """The scale of the next step."""
    if scale is None:
        return None
    doubles = finite & ((step + 1) % DOUBLES_EVERY == 0)
    factor = jnp.where(finite, jnp.where(doubles, 2.0, 1.0), 0.5).astype(jnp.float32)
    return jnp.minimum(scale * factor, jnp.float32(LARGEST))
