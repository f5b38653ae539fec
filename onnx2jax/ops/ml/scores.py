"""Shared by classifiers and regressors of ai.onnx.ml: batches, class labels, post-transforms.

Scores of two classes that the specification does not define follow onnxruntime.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np

from ..activation import sigmoid, softmax
from ..arrays import is_known, needs_known, xp

_PROBIT = "PROBIT of a single score for two classes is undefined and unsupported"
LABELS = f"string class labels are looked up on the host; {_PROBIT}"

DOMAIN = "ai.onnx.ml"
Transform = Literal["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]


def only(**choices):
    """(name, value) of the one attribute that is given; raises ValueError unless there is exactly one."""
    present = [(k, v) for k, v in choices.items() if v is not None and len(v)]
    if len(present) != 1:
        raise ValueError(f"exactly one of the attributes {', '.join(choices)} must be given (got {len(present)})")
    return present[0]


def result_dtype(double):
    """The dtype of results that ONNX defines as float32 for all inputs: float64 in a model that computes in it."""
    return np.dtype(np.float64 if double else np.float32)


def batch(X):
    """X as a batch of feature vectors [N, F]; a vector [F] is a batch of one."""
    if X.ndim not in (1, 2):
        raise ValueError(f"the input must have shape [N, F] or [F] (it has {X.shape})")
    return X if X.ndim == 2 else X[None]


def _softmax_zero(x):
    """Softmax over the non-zero scores."""
    peak = x.max(-1, keepdims=True)
    zero, e = abs(x) <= 1e-7, xp.exp(x - peak)
    return xp.where(zero, x * xp.exp(-peak), e) / xp.where(zero, 0, e).sum(-1, keepdims=True)


def _probit(x):
    """The normal quantile, by the approximation that ONNX's reference and onnxruntime use."""
    y = 2 * x - 1
    log = xp.log((1 - y) * (1 + y))
    v = 2 / (3.14159 * 0.147) + 0.5 * log
    return math.sqrt(2) * xp.sign(y) * xp.sqrt(xp.sqrt(v * v - log / 0.147) - v)


_TRANSFORM = {
    "NONE": lambda x: x, "SOFTMAX": partial(softmax, axes=(1,)), "LOGISTIC": sigmoid, "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}  # fmt: skip


def transform(scores, post_transform):
    """The scores [N, classes or targets] after a post-transform, row by row."""
    return _TRANSFORM[post_transform](scores)


def two_scores(score, post_transform, margin):
    """The scores of both classes from that of the second, which is a `margin` or else a probability."""
    if post_transform == "PROBIT":
        raise NotImplementedError("PROBIT of a single score is undefined for a classifier of two classes")
    logistic = post_transform == "LOGISTIC"
    pair = (sigmoid(-score), sigmoid(score)) if logistic else (-score if margin else 1 - score, score)
    return xp.concatenate(pair, axis=-1)


def class_labels(choices):
    """The class labels as an array, from whichever attribute is given."""
    _, labels = only(**choices)
    return np.array(labels, object if isinstance(labels[0], str) else np.int64)


def labels_of(labels, index):
    """The class labels at the indices; strings are selected on the host."""
    index = needs_known(index, "the class labels are strings") if labels.dtype == object else index
    if is_known(index):
        return labels[index]
    table = jnp.asarray(labels)
    return index.astype(table.dtype) if (labels == np.arange(len(labels))).all() else table[index]
