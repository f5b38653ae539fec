"""What classifiers and regressors of ai.onnx.ml share: batches, class labels, post transforms.

Where the specification leaves the scores of two classes open, they are what onnxruntime gives.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..activation import sigmoid, softmax
from ..arrays import is_known, needs_known, xp

_PROBIT = "PROBIT of a single score for two classes is refused: undefined"
LABELS = f"class labels that are strings are looked up on the host; {_PROBIT}"

DOMAIN = "ai.onnx.ml"
Transform = Literal["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]


def only(**choices):
    """The one attribute of several that is given: its name and its value."""
    given = [(k, v) for k, v in choices.items() if v is not None and len(v)]
    if len(given) != 1:
        raise ValueError(f"exactly one of the attributes {', '.join(choices)} must be given (got {len(given)})")
    return given[0]


def batch(X):
    """A batch of feature vectors; a single vector is a batch of one."""
    if X.ndim not in (1, 2):
        raise ValueError(f"the input must have shape [N, F] or [F] (it has {X.shape})")
    return X if X.ndim == 2 else X[None]


def repeat(n, step, state):
    """``state = step(k, state)`` for k below n: in Python on known values, else as one compiled loop."""
    if not is_known(state):
        return lax.fori_loop(0, n, step, state)
    for k in range(n):
        state = step(k, state)
    return state


def _softmax_zero(x):
    """Softmax of the scores that are not zero."""
    peak = x.max(-1, keepdims=True)
    zero, e = abs(x) <= 1e-7, xp.exp(x - peak)
    return xp.where(zero, x * xp.exp(-peak), e) / xp.where(zero, 0, e).sum(-1, keepdims=True)


def _probit(x):
    """The normal quantile, by the closed approximation that ONNX's reference and onnxruntime share."""
    y = 2 * x - 1
    log = xp.log((1 - y) * (1 + y))
    v = 2 / (3.14159 * 0.147) + 0.5 * log
    return math.sqrt(2) * xp.sign(y) * xp.sqrt(xp.sqrt(v * v - log / 0.147) - v)


_TRANSFORM = {
    "NONE": lambda x: x, "SOFTMAX": partial(softmax, axes=(1,)), "LOGISTIC": sigmoid, "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}  # fmt: skip


def transform(scores, post_transform):
    """The scores of all classes or targets, transformed row by row."""
    return _TRANSFORM[post_transform](scores)


def two_scores(score, post_transform, mixed):
    """The scores of both classes from the single score of the second; `mixed`: it is a margin, no probability."""
    if post_transform == "PROBIT":
        raise NotImplementedError("PROBIT of a single score is undefined for a classifier of two classes")
    logistic = post_transform == "LOGISTIC"
    pair = (sigmoid(-score), sigmoid(score)) if logistic else (-score if mixed else 1 - score, score)
    return xp.concatenate(pair, axis=-1)


def class_labels(choices):
    """The class labels, from the attribute that holds them."""
    _, labels = only(**choices)
    return np.array(labels, object if isinstance(labels[0], str) else np.int64)


def labels_of(labels, index):
    """The class labels at the indices; text is picked on the host."""
    index = needs_known(index, "the class labels are strings") if labels.dtype == object else index
    return labels[index] if is_known(index) else jnp.asarray(labels)[index]
