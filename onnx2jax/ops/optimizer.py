"""ai.onnx.preview.training: one step of an optimiser over tensors, gradients and states, given in groups."""

from __future__ import annotations

from .arrays import xp
from .registry import op

_DOMAIN = "ai.onnx.preview.training"


def _groups(inputs, kinds):
    """X_1, X_2, G_1, G_2, ... -> (X_1, G_1, ...), (X_2, G_2, ...)."""
    if len(inputs) % kinds:
        raise ValueError(f"inputs ({len(inputs)}) must come in {kinds} groups of equal size")
    count = len(inputs) // kinds
    return list(zip(*(inputs[i : i + count] for i in range(0, len(inputs), count or 1)), strict=True))


def _regrouped(results):
    return tuple(value for kind in zip(*results, strict=True) for value in kind)


def _root(x):
    """The square root, whose gradient at zero is zero and not infinite."""
    ns = xp(x)
    return ns.where(x == 0, x, ns.sqrt(ns.where(x == 0, x.dtype.type(1), x)))


@op("Adagrad", domain=_DOMAIN)
def adagrad(R, T, *inputs, decay_factor=0.0, epsilon=1e-6, norm_coefficient=0.0):
    """X, G, H -> X, H: steps shrink with the sum of squared gradients."""
    rate = (R / (1 + T.astype(R.dtype) * decay_factor)).reshape(())

    def step(x, g, h):
        g = norm_coefficient * x + g
        h = h + g * g
        return x - rate.astype(x.dtype) * g / (_root(h) + epsilon), h

    return _regrouped(step(*group) for group in _groups(inputs, 3))


@op("Adam", domain=_DOMAIN)
def adam(R, T, *inputs, alpha=0.9, beta=0.999, epsilon=1e-6, norm_coefficient=0.0, norm_coefficient_post=0.0):
    """X, G, V, H -> X, V, H: averaged gradients over the root of averaged squares."""
    ns = xp(R, T)
    count = ns.maximum(T, 1).astype(R.dtype)  # before the first update the rate stays as it is
    rate = ns.where(T > 0, R * ns.sqrt(1 - beta**count) / (1 - alpha**count), R).reshape(())

    def step(x, g, v, h):
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * (g * g)
        x = x - rate.astype(x.dtype) * v / (_root(h) + epsilon)
        return (1 - norm_coefficient_post) * x, v, h

    return _regrouped(step(*group) for group in _groups(inputs, 4))


@op("Momentum", domain=_DOMAIN)
def momentum(R, T, *inputs, alpha, beta, mode, norm_coefficient):
    """X, G, V -> X, V: gradient descent with standard or Nesterov's momentum."""
    if mode not in ("standard", "nesterov"):
        raise ValueError(f"mode ({mode!r}) must be 'standard' or 'nesterov'")
    rate = R.reshape(())
    scale = xp(T).where(T > 0, beta, 1.0).reshape(())

    def step(x, g, v):
        g = norm_coefficient * x + g
        v = alpha * v + scale.astype(x.dtype) * g
        return x - rate.astype(x.dtype) * (g + alpha * v if mode == "nesterov" else v), v

    return _regrouped(step(*group) for group in _groups(inputs, 3))
