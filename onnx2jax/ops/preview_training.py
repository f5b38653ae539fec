"""ai.onnx.preview.training: gradients, and one optimizer step over grouped tensors, gradients and states."""

from __future__ import annotations

from typing import Literal

from .arrays import xp
from .norm import root
from .registry import op

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
