"""The optimizer's update, with dynamic loss scaling for models in float16, whose smallest normal number is 6e-5.

The loss is multiplied by a power of two before it is differentiated, so that small gradients do not underflow, and the
gradients are divided by it in float32. Where they are infinite or NaN, the step leaves parameters, statistics and
optimizer as they were and halves the scale; the scale doubles every 2000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import ShardingError
from .state import FineTuningState

FIRST: Final = 2.0**15
LARGEST: Final = 2.0**24
DOUBLES_EVERY: Final = 2000
"""Steps."""


def initial(dtype: Any) -> jax.Array | None:
    """The scale of the first step; None where the model does not compute in float16."""
    return jnp.full((), FIRST, jnp.float32) if dtype == np.float16 else None


def _no_reevaluation(_: Any) -> Any:
    raise ShardingError("optimizers with a line search re-evaluate the loss, which is unsupported with pipeline stages")


def gradient(total: Callable[..., Any], scale: Any) -> Callable[..., Any]:
    """A function that returns what ``total`` does, a loss and more, and the gradients of the loss times the scale."""

    def scaled(*args: Any) -> Any:
        loss, more = total(*args)
        wide = jnp.promote_types(loss.dtype, jnp.float32)
        return loss if scale is None else loss.astype(wide) * scale, (loss, more)

    def differentiated(*args: Any) -> Any:
        (_, results), grads = jax.value_and_grad(scaled, has_aux=True)(*args)
        return results, grads

    return differentiated


def apply_gradients(
    optimizer: Any,
    state: FineTuningState,
    grads: dict[str, Any],
    results: tuple[Any, ...],
    reevaluate: Callable[[dict[str, Any]], Any] = _no_reevaluation,
) -> tuple[FineTuningState, dict[str, Any]]:
    """The next state and the metrics, from the gradients of the scaled loss; the old state where they overflowed.

    Args:
        optimizer: an optax optimizer.
        state: the state before the step.
        grads: the gradients by parameter.
        results: loss, metrics and running statistics.
        reevaluate: returns the loss for other parameters.
    """
    loss, metrics, stats = results
    scale: Any = state.loss_scale
    if scale is not None:
        grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    optax = compat.optional("optax", "train")
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        grads, state.opt_state, state.params, value=loss, grad=grads, value_fn=reevaluate
    )
    # The state keeps its dtypes, so that the step compiles once and its buffers can be donated.
    opt_state = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), opt_state, state.opt_state)
    new = optax.apply_updates(state.params, updates), stats, opt_state
    metrics = {"loss": loss, "grad_norm": norm, **metrics}
    if scale is not None:
        finite, old = jnp.isfinite(norm), (state.params, state.stats, state.opt_state)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        metrics["loss_scale"] = scale
        scale = updated(scale, finite, state.step)
    return FineTuningState(*new, state.step + 1, state.key, scale), metrics


def updated(scale: Any, finite: Any, step: Any) -> Any:
    """The scale of the next step."""
    doubles = finite & ((step + 1) % DOUBLES_EVERY == 0)
    factor = jnp.where(finite, jnp.where(doubles, 2.0, 1.0), 0.5).astype(jnp.float32)
    return jnp.minimum(scale * factor, jnp.float32(LARGEST))
