"""Classification losses of scores [batch, classes, ...] and integer labels [batch, ...]."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .activation import log_softmax
from .arrays import check_shape, xp
from .registry import op

Reduction = Literal["none", "sum", "mean"]


def _reduced(log_prob, target, weight, ignore_index, reduction):
    """The weighted negative log-likelihood of each label, reduced, in the dtype of log_prob."""
    if log_prob.ndim < 2 or target.shape != log_prob.shape[:1] + log_prob.shape[2:]:
        raise ValueError(f"scores [batch, classes, ...] {log_prob.shape} need labels [batch, ...] ({target.shape})")
    check_shape("weight", weight, log_prob.shape[1])
    # A label that is out of range and not ignored yields NaN.
    inside = (target >= 0) & (target < log_prob.shape[1])
    label = xp.where(inside, target, 0)
    loss = -xp.take_along_axis(log_prob, xp.expand_dims(label, 1), axis=1).squeeze(1)
    counted = xp.ones_like(loss) if weight is None else xp.take(weight, label)
    if ignore_index is not None:  # before the product, whose derivatives read both
        loss, counted = (xp.where(target != ignore_index, x, 0) for x in (loss, counted))
        inside = inside | (target == ignore_index)
    loss = xp.where(inside, loss * counted, np.nan)
    if reduction == "none":
        return loss
    return xp.sum(loss) / xp.sum(counted) if reduction == "mean" else xp.sum(loss)


@op("NegativeLogLikelihoodLoss", since=12, half="float32")
def negative_log_likelihood_loss(input, target, weight=None, *, ignore_index=None, reduction: Reduction = "mean"):
    """-input[label] * weight[label]; the mean divides by the sum of the weights that are not ignored."""
    return _reduced(input, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss", since=12, half="float32")
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index=None, reduction: Reduction = "mean"):
    """The negative log-likelihood of the labels under softmax(scores), and log(softmax(scores))."""
    log_prob = log_softmax(scores, axes=(1,))
    return _reduced(log_prob, labels, weights, ignore_index, reduction), log_prob
