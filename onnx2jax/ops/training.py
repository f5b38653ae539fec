"""Classification losses, and ai.onnx.preview.training: gradients, and optimizer steps over grouped tensors."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .activation import log_softmax
from .arrays import check_shape, xp
from .norm import root
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


@op("NegativeLogLikelihoodLoss", since=12, half="float32", wide=True)
def negative_log_likelihood_loss(input, target, weight=None, *, ignore_index=None, reduction: Reduction = "mean"):
    """-input[label] * weight[label]; the mean divides by the sum of the weights that are not ignored."""
    return _reduced(input, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss", since=12, half="float32", wide=True)
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index=None, reduction: Reduction = "mean"):
    """The negative log-likelihood of the labels under softmax(scores), and log(softmax(scores))."""
    log_prob = log_softmax(scores, axes=(1,))
    return _reduced(log_prob, labels, weights, ignore_index, reduction), log_prob


_DOMAIN = "ai.onnx.preview.training"


def _each(step, inputs, groups):
    """``step`` on (X_1, G_1, ...), (X_2, G_2, ...) of inputs X_1, X_2, ..., G_1, G_2, ...; outputs grouped likewise."""
    if len(inputs) % groups:
        raise ValueError(f"inputs ({len(inputs)}) must be {groups} groups of equal size")
    count = len(inputs) // groups
    results = [step(*inputs[i::count]) for i in range(count)]
    return tuple(value for group in zip(*results, strict=True) for value in group)


_SUM = "a y of several elements is summed; values not in xs or zs are constants"


@op("Gradient", domain=_DOMAIN, heavy=True, limits=_SUM)
def gradient(*inputs, xs, y, zs=(), derivatives):
    """dy/dx for each x of xs, where xs and zs are the independent values; a y of several elements is summed."""
    return derivatives(y, xs, dict(zip((*xs, *zs), inputs, strict=True)))


@op("Adagrad", domain=_DOMAIN)
def adagrad(R, T, *inputs, decay_factor=0.0, epsilon=1e-6, norm_coefficient=0.0):
    """X, G, H -> X, H: step sizes shrink with the sum of squared gradients."""
    rate = (R / (1 + T.astype(R.dtype) * decay_factor)).reshape(())

    def step(x, g, h):
        g = norm_coefficient * x + g
        h = h + g * g
        return x - rate.astype(x.dtype) * g / (root(h) + epsilon), h

    return _each(step, inputs, 3)


@op("Adam", domain=_DOMAIN)
def adam(R, T, *inputs, alpha=0.9, beta=0.999, epsilon=1e-6, norm_coefficient=0.0, norm_coefficient_post=0.0):
    """X, G, V, H -> X, V, H: averaged gradients over the root of averaged squares."""
    count = xp.maximum(T, 1).astype(R.dtype)  # before the first update the rate is not corrected
    rate = xp.where(T > 0, R * xp.sqrt(1 - beta**count) / (1 - alpha**count), R).reshape(())

    def step(x, g, v, h):
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * (g * g)
        x = x - rate.astype(x.dtype) * v / (root(h) + epsilon)
        return (1 - norm_coefficient_post) * x, v, h

    return _each(step, inputs, 4)


@op("Momentum", domain=_DOMAIN)
def momentum(R, T, *inputs, alpha, beta, mode: Literal["standard", "nesterov"], norm_coefficient):
    """X, G, V -> X, V: gradient descent with standard or Nesterov's momentum."""
    rate = R.reshape(())
    scale = xp.where(T > 0, beta, 1.0).reshape(())

    def step(x, g, v):
        g = norm_coefficient * x + g
        v = alpha * v + scale.astype(x.dtype) * g
        return x - rate.astype(x.dtype) * (g + alpha * v if mode == "nesterov" else v), v

    return _each(step, inputs, 3)
