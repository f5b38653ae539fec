"""What classifiers and regressors of ai.onnx.ml share: batches, class labels, post transforms.

Where the specification leaves the scores of two classes open, they are what onnxruntime gives.
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax

from .arrays import xp
from .control import needs_known

DOMAIN = "ai.onnx.ml"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def one_of(value, choices, what):
    """Checks an attribute that names one of a few choices."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)} (got {value!r})")
    return value


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
    return X.reshape(-1, X.shape[-1]) if X.ndim == 1 else X


def logistic(x):
    """1 / (1 + exp(-x)), without overflow."""
    if not isinstance(x, np.ndarray):
        return lax.logistic(x)
    v = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x < 0, 1 - v, v)


def _softmax(x):
    e = xp(x).exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _softmax_zero(x):
    """Softmax of the scores that are not zero."""
    peak = x.max(-1, keepdims=True)
    zero = xp(x).abs(x) <= 1e-7
    e = xp(x).exp(x - peak)
    return xp(x).where(zero, x * xp(x).exp(-peak), e) / xp(x).where(zero, 0, e).sum(-1, keepdims=True)


def _probit(x):
    """The normal quantile, by the closed approximation that ONNX's reference and onnxruntime share."""
    y = 2 * x - 1
    log = xp(x).log((1 - y) * (1 + y))
    v = 2 / (3.14159 * 0.147) + 0.5 * log
    return math.sqrt(2) * xp(x).sign(y) * xp(x).sqrt(xp(x).sqrt(v * v - log / 0.147) - v)


_TRANSFORM = dict(zip(TRANSFORMS, (lambda x: x, _softmax, logistic, _softmax_zero, _probit), strict=True))


def transform(scores, post_transform):
    """The scores of all classes or targets, transformed row by row."""
    return _TRANSFORM[one_of(post_transform, TRANSFORMS, "post_transform")](scores)


def two_scores(score, post_transform, mixed):
    """The scores of both classes from the single score of the second; `mixed`: it is a margin, no probability."""
    one_of(post_transform, TRANSFORMS, "post_transform")
    if post_transform == "PROBIT":
        raise NotImplementedError("PROBIT of a single score is undefined for a classifier of two classes")
    if post_transform == "LOGISTIC":
        pair = logistic(-score), logistic(score)
    else:
        pair = (-score if mixed else 1 - score), score
    return xp(score).concatenate(pair, axis=-1)


def labels_of(labels, index):
    """The class labels at the indices; text is picked on the host."""
    labels = np.array(labels, object if isinstance(labels[0], str) else np.int64)
    if labels.dtype == object:
        return labels[needs_known(index, "the class labels are strings")]
    return xp(index).asarray(labels)[index]
