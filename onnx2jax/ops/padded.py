"""Traceable variants of operators with data-dependent shapes: outputs padded to a fixed size, plus a count.

They are not ONNX operators: `convert(..., max_size={"node": size})` substitutes them. Padding repeats the first entry
(index 0), so that consumers stay in range, or is 0 where an axis is empty. The first output counts all entries,
including those beyond ``size``, so that too small a size is detected. ``Trips`` runs blocks of a loop whose condition
is on the host.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import argmax, flatten_or_axis
from .control import FORWARD_ONLY, step_of
from .iteration import while_
from .registry import PADDED, Static, op
from .vision import corners, overlap


def _positions(mask, size):
    """(the first ``size`` indices where ``mask`` [n] is true, padded with 0; the number of all)."""
    return jnp.nonzero(mask, size=size, fill_value=0)[0].astype(np.int64), jnp.sum(mask, dtype=np.int64)


def _taken(x, indices, axis):
    """The slices of ``x`` at indices along an axis; zeros where it is empty."""
    if x.shape[axis] == 0:
        return jnp.zeros((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    return jnp.take(x, indices, axis)


@op("NonZero", domain=PADDED)
def non_zero(X, *, size):
    """NonZero: [rank, size]."""
    if 0 in X.shape:  # XLA may compute the division of indices by an extent of 0 at compile time, and end the process
        return jnp.zeros((), np.int64), jnp.zeros((X.ndim, size), np.int64)
    flat, count = _positions(jnp.ravel(X) != 0, size)
    return count, jnp.array(jnp.unravel_index(flat, X.shape), np.int64).reshape(X.ndim, size)


@op("Compress", domain=PADDED)
def compress(input, condition, *, axis=None, size):
    """Compress: `size` slices along the axis."""
    input, axis = flatten_or_axis(input, axis)
    indices, count = _positions(condition[: input.shape[axis]], size)
    return count, _taken(input, indices, axis)


@op("Unique", domain=PADDED)
def unique(X, *, axis=None, sorted=1, size):
    """Unique, sorted only: four outputs of extent `size` (the inverse keeps its own extent)."""
    if not sorted:
        raise ValueError("max_size supports Unique with sorted=1 only; this node has sorted=0")
    X, axis = flatten_or_axis(X, axis)
    # At full size first, because the count includes values beyond ``size``.
    values, first, inverse, counts = jnp.unique(X, True, True, True, axis=axis, size=X.shape[axis])
    indices, count = _positions(counts > 0, size)
    first, counts = (_taken(v, indices, 0).astype(np.int64) for v in (first, counts))
    return count, _taken(values, indices, axis), first, inverse.reshape(-1).astype(np.int64), counts


@op("NonMaxSuppression", domain=PADDED)
def non_max_suppression(
    boxes, scores, max_output_boxes_per_class: Static = None, iou_threshold=None, score_threshold=None, *,
    center_point_box=0, size,
):  # fmt: skip
    """NonMaxSuppression: [size, 3]; one greedy scan, vmapped over images and classes."""
    limit = int(max_output_boxes_per_class.item()) if max_output_boxes_per_class is not None else 0
    steps = min(limit, boxes.shape[1])
    if steps <= 0 or 0 in scores.shape:
        return jnp.zeros((), np.int64), jnp.zeros((size, 3), np.int64)
    threshold = 0 if iou_threshold is None else jnp.maximum(jnp.reshape(iou_threshold, ()), 0).astype(boxes.dtype)

    def greedy(boxes, score):
        alive = jnp.full(score.shape, True) if score_threshold is None else score > jnp.reshape(score_threshold, ())

        def choose(alive, _):
            best = argmax(jnp.where(alive, score, -jnp.inf), 0)
            suppressed = overlap(boxes, boxes[:, best, None], threshold)
            return alive & ~suppressed & (jnp.arange(len(score)) != best), (best, alive[best])

        return lax.scan(choose, alive, length=steps)[1]

    chosen, valid = jax.vmap(jax.vmap(greedy, (None, 0)), (1, 0))(corners(boxes, center_point_box), scores)
    indices, count = _positions(valid.reshape(-1), size)
    image, label, step = jnp.unravel_index(indices, valid.shape)
    return count, jnp.stack([image, label, chosen[image, label, step]], axis=1).astype(np.int64)


@op("Loop", domain=PADDED)
def loop(M=None, cond=None, *v_initial, body, size, forward_only):
    """Loop with a trip count that may be traced; scan outputs are buffers of `size` trips, the count includes all."""
    n, has_cond = len(v_initial), cond is not None
    step, true = step_of(body, n, has_cond=has_cond)
    state = list(v_initial) if has_cond else [true, *v_initial]
    trips, _, state, buffers = while_(step, state, size, M, cond if has_cond else np.True_)
    return trips, *forward_only([*state[len(state) - n :], *buffers], FORWARD_ONLY)


@op("Trips", domain=PADDED)
def trips(first, last, *state, body, states, has_cond):
    """A block of a Loop's trips in [first, last), at most as many as fill the outs: (count, condition, state, outs).

    Of the outs, buffers of a fixed size, the first `count` rows are valid.
    """
    step, _ = step_of(body, states, has_cond=has_cond)
    end, go, state, buffers = while_(step, list(state), None, last, np.True_, first)
    return end - first, go, *state, *buffers
