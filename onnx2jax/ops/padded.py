"""Operators with data-dependent shapes, padded to a fixed size and with a count of what is real, as JAX can trace them.

Not ONNX's: `convert(..., max_size={"node": size})` puts them in the place of the node's own operator. Padding repeats
the first entry (indices are 0), so that whatever reads it stays in range. The count comes first; it is of all entries,
also of those beyond the size, so that too small a size shows. Trips is for loops on the host alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import argmax, row_or_axis
from .control import IRREVERSIBLE, steps_of
from .iteration import while_
from .registry import PADDED, Static, op
from .vision import corners, overlap


def _positions(mask, size):
    """The first places where a vector is true, padded with 0, and how many there are."""
    return jnp.nonzero(mask, size=size, fill_value=0)[0].astype(np.int64), jnp.sum(mask, dtype=np.int64)


@op("NonZero", domain=PADDED)
def non_zero(X, *, size):
    """NonZero: [rank, size]."""
    flat, found = _positions(jnp.ravel(X) != 0, size)
    places = jnp.unravel_index(flat, X.shape)
    return found, jnp.array(places, np.int64).reshape(X.ndim, size)


@op("Compress", domain=PADDED)
def compress(input, condition, *, axis=None, size):
    """Compress: `size` slices along the axis."""
    input, axis = row_or_axis(input, axis)
    places, found = _positions(condition[: input.shape[axis]], size)
    return found, jnp.take(input, places, axis)


@op("Unique", domain=PADDED)
def unique(X, *, axis=None, sorted=1, size):
    """Unique: sorted only; four outputs of `size` (the inverse keeps its extent)."""
    if not sorted:
        raise ValueError("with max_size the unique values come sorted; the model asks for the order of appearance")
    X, axis = row_or_axis(X, axis)
    # Found at full size first: the count must be of all.
    values, first, inverse, counts = jnp.unique(X, True, True, True, axis=axis, size=X.shape[axis])
    places, found = _positions(counts > 0, size)
    first, counts = (jnp.take(v, places).astype(np.int64) for v in (first, counts))
    return found, jnp.take(values, places, axis), first, inverse.reshape(-1).astype(np.int64), counts


@op("NonMaxSuppression", domain=PADDED)
def non_max_suppression(
    boxes, scores, max_output_boxes_per_class: Static = None, iou_threshold=None, score_threshold=None, *,
    center_point_box=0, size,
):  # fmt: skip
    """NonMaxSuppression: [size, 3]; one greedy scan for every image and class at once."""
    limit = int(max_output_boxes_per_class.item()) if max_output_boxes_per_class is not None else 0
    steps = min(limit, boxes.shape[1])
    if steps <= 0:
        return jnp.zeros((), np.int64), jnp.zeros((size, 3), np.int64)
    threshold = 0 if iou_threshold is None else jnp.maximum(jnp.reshape(iou_threshold, ()), 0).astype(boxes.dtype)

    def greedy(boxes, score):
        alive = jnp.full(score.shape, True) if score_threshold is None else score > jnp.reshape(score_threshold, ())

        def choose(alive, _):
            best = argmax(jnp.where(alive, score, -jnp.inf), 0)
            gone = overlap(boxes, boxes[:, best, None], threshold)
            return alive & ~gone & (jnp.arange(len(score)) != best), (best, alive[best])

        return lax.scan(choose, alive, length=steps)[1]

    by_class = jax.vmap(greedy, (None, 0))
    chosen, valid = jax.vmap(by_class, (1, 0))(corners(boxes, center_point_box), scores)
    places, found = _positions(valid.reshape(-1), size)
    image, label, step = jnp.unravel_index(places, valid.shape)
    rows = jnp.stack([image, label, chosen[image, label, step]], axis=1)
    return found, rows.astype(np.int64)


@op("Loop", domain=PADDED)
def loop(M=None, cond=None, *v_initial, body, size, forward_only):
    """Loop: the number of trips may be traced; scan outputs are buffers of `size` trips, the count is of all."""
    n, ruled = len(v_initial), cond is not None
    step, true = steps_of(body, n, ruled=ruled)
    state = list(v_initial) if ruled else [true, *v_initial]
    trips, _, state, buffers = while_(step, state, size, M, cond if ruled else np.True_)
    return trips, *forward_only([*state[len(state) - n :], *buffers], IRREVERSIBLE)


@op("Trips", domain=PADDED)
def trips(first, last, *state, body, states, ruled):
    """Some trips of a Loop, from `first` on and before `last`: how many, whether to go on, the state, the outs.

    As many trips as fill the buffers of the outs, of which the first rows count.
    """
    step, _ = steps_of(body, states, ruled=ruled)

    end, go, state, buffers = while_(step, list(state), None, last, np.True_, first)
    return end - first, go, *state, *buffers
