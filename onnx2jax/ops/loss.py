"""Losses over class scores, [batch, classes, ...] against integer labels [batch, ...]."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .activation import log_softmax
from .arrays import wide, xp
from .registry import op

Reduction = Literal["none", "sum", "mean"]


def _reduced(log_prob, target, weight, ignore_index, reduction):
    """The weighted negative log-likelihood of each label, reduced; in log_prob's type."""
    if log_prob.ndim < 2 or target.shape != log_prob.shape[:1] + log_prob.shape[2:]:
        raise ValueError(f"scores [batch, classes, ...] {log_prob.shape} need labels [batch, ...] ({target.shape})")
    ns = xp(log_prob, target, weight)
    # A label outside the classes that is not ignored has no loss: NaN says so.
    inside = (target >= 0) & (target < log_prob.shape[1])
    label = ns.where(inside, target, 0)
    loss = -ns.take_along_axis(log_prob, ns.expand_dims(label, 1), axis=1).squeeze(1)
    counted = ns.ones(target.shape, log_prob.dtype) if weight is None else ns.take(weight.astype(log_prob.dtype), label)
    loss = ns.where(inside, loss * counted, log_prob.dtype.type(np.nan))
    if ignore_index is not None:
        kept = target != ignore_index
        loss, counted = (ns.where(kept, x, log_prob.dtype.type(0)) for x in (loss, counted))
    if reduction == "none":
        return loss
    return ns.sum(loss) / ns.sum(counted) if reduction == "mean" else ns.sum(loss)


@op("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood_loss(input, target, weight=None, *, ignore_index=None, reduction: Reduction = "mean"):
    """-input[label] * weight[label]; the mean divides by the sum of the weights that count."""
    return _reduced(wide(input), target, weight, ignore_index, reduction).astype(input.dtype)


@op("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index=None, reduction: Reduction = "mean"):
    """The negative log-likelihood of the labels under softmax(scores), and log(softmax(scores))."""
    log_prob = log_softmax(wide(scores), axes=(1,))
    loss = _reduced(log_prob, labels, weights, ignore_index, reduction)
    return loss.astype(scores.dtype), log_prob.astype(scores.dtype)
