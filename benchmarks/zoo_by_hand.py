"""Hand-written JAX training of the zoo's models, the reference for their loss curves and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Batch = dict[str, np.ndarray]


def single(value: float) -> float:
    """An attribute's value, which ONNX stores in float32, also for double tensors."""
    return float(np.float32(value))


class Plain(NamedTuple):
    """Hand-written training: batches, and a step from (params, optimizer state, batch) to (both, loss)."""

    batches: Callable[[Any], Iterator[Batch]]
    step: Callable[[Any, Any, Batch], tuple[Any, Any, Any]]
    state: Callable[[Any], Any] = lambda _: None


def zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def count(params: Any) -> Any:
    """The number of steps so far, in the parameters' dtype."""
    return jnp.zeros((), jax.tree.leaves(params)[0].dtype)


def repeated(**batch: Any) -> Callable[[Any], Iterator[Batch]]:
    def batches(dtype: Any) -> Iterator[Batch]:
        cast = {n: v.astype(dtype) if v.dtype.kind == "f" else v for n, v in batch.items()}
        while True:
            yield cast

    return batches


@cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images, test images, training labels, test labels; images are [n, 64] in 0..16."""
    data = load_digits()
    return tuple(train_test_split(data.data, data.target, test_size=360, random_state=0, stratify=data.target))


def digit_batches(shape: tuple[int, ...], scale: float, size: int = 128) -> Callable[[Any], Iterator[Batch]]:
    def batches(dtype: Any) -> Iterator[Batch]:
        images, _, labels, _ = digits()
        rng = np.random.default_rng(0)
        while True:
            rows = rng.choice(len(images), size, replace=False)
            yield {"image": (images[rows] * scale).astype(dtype).reshape(-1, *shape), "label": labels[rows]}

    return batches


def descent(loss: Callable[..., Any], rate: float) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Batch) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, **batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), state, value

    return step


def cross_entropy(logits: Any, label: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1).mean()


def plain_regression() -> Plain:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(32, 3))
    target = x @ [1.0, -2.0, 3.0] + 0.5

    def loss(p: Any, x: Any, target: Any) -> Any:
        return jnp.mean((x @ p["w"] + p["b"] - target) ** 2)

    return Plain(repeated(x=x, target=target), descent(loss, 0.1))


def mlp_loss(p: Any, image: Any, label: Any) -> Any:
    hidden = jnp.maximum(image / 16 @ p["w1"] + p["b1"], 0)
    return cross_entropy(hidden @ p["w2"] + p["b2"], label)


def plain_digits_mlp() -> Plain:
    def step(params: Any, state: Any, batch: Batch) -> Any:
        v, h, t = state
        value, gradients = jax.value_and_grad(mlp_loss)(params, **batch)
        alpha, beta, epsilon = single(0.9), single(0.999), single(1e-8)
        v = jax.tree.map(lambda v, g: alpha * v + (1 - alpha) * g, v, gradients)
        h = jax.tree.map(lambda h, g: beta * h + (1 - beta) * g * g, h, gradients)
        # ONNX counts from 0 and corrects the rate from the first update on; epsilon is added to the uncorrected root.
        rate = 0.003 * jnp.where(t > 0, jnp.sqrt(1 - beta**t) / (1 - alpha**t), 1)
        params = jax.tree.map(lambda p, v, h: p - (rate * v / (jnp.sqrt(h) + epsilon)).astype(p.dtype), params, v, h)
        return params, (v, h, t + 1), value

    return Plain(digit_batches((64,), 1), step, lambda p: (zeros(p), zeros(p), count(p)))


def plain_digits_cnn() -> Plain:
    def loss(p: Any, image: Any, label: Any) -> Any:
        hidden = jax.nn.relu(jax.lax.conv(image, p["kernel"], (1, 1), "SAME") + p["bias"][:, None, None])
        pooled = hidden.reshape(-1, 8, 4, 2, 4, 2).max((3, 5))
        return cross_entropy(pooled.reshape(-1, 128) @ p["matrix"], label)

    def step(params: Any, v: Any, batch: Batch) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, **batch)
        alpha, decay = single(0.9), single(0.001)
        gradients = jax.tree.map(lambda g, p: g + decay * p, gradients, params)
        v = jax.tree.map(lambda v, g: alpha * v + g, v, gradients)
        return jax.tree.map(lambda p, g, v: p - 0.02 * (g + alpha * v), params, gradients, v), v, value

    return Plain(digit_batches((1, 8, 8), 1 / 16), step, zeros)


def plain_factorization() -> Plain:
    def loss(p: Any, target: Any) -> Any:
        return jnp.mean((p["left"] @ p["right"] - target) ** 2)

    def step(params: Any, state: Any, batch: Batch) -> Any:
        for name in ("left", "right"):
            value, gradients = jax.value_and_grad(loss)(params, **batch)
            params = {**params, name: params[name] - 2 * gradients[name]}
        return params, state, value

    rng = np.random.default_rng(2)
    return Plain(repeated(target=rng.normal(size=(12, 3)) @ rng.normal(size=(3, 9))), step)


def plain_called() -> Plain:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 4))

    def loss(p: Any, X_1: Any, Z_1: Any) -> Any:
        q = jax.nn.sigmoid(X_1 @ p["W"])
        return -jnp.mean(Z_1 * jnp.log(q) + (1 - Z_1) * jnp.log(1 - q))

    noise = rng.normal(size=64)
    return Plain(repeated(X_1=x, Z_1=(x @ [1, -1, 2, 0] + noise > 0).astype(float)), descent(loss, 0.5))


def plain_smooth() -> Plain:
    def curve(p: Any, x: Any) -> Any:
        return (jnp.tanh(x[:, None] @ p["inner"] + p["shift"]) @ p["outer"])[:, 0]

    def loss(p: Any, x: Any, target: Any) -> Any:
        slope = jax.grad(lambda x: curve(p, x).sum())(x)
        return jnp.mean((curve(p, x) - target) ** 2) + 0.01 * jnp.mean(slope**2)

    def step(params: Any, state: Any, batch: Batch) -> Any:
        h, t = state
        value, gradients = jax.value_and_grad(loss)(params, **batch)
        h = jax.tree.map(lambda h, g: h + g * g, h, gradients)
        rate, epsilon = 0.1 / (1 + single(0.01) * t), single(1e-6)
        updates = jax.tree.map(lambda g, h: (rate * g / (jnp.sqrt(h) + epsilon)).astype(g.dtype), gradients, h)
        return jax.tree.map(jnp.subtract, params, updates), (h, t + 1), value

    x = np.linspace(-2, 2, 40)
    return Plain(repeated(x=x, target=np.sin(2 * x)), step, lambda p: (zeros(p), count(p)))


PLAIN: Final = {
    "regression": plain_regression,
    "digits_mlp": plain_digits_mlp,
    "digits_cnn": plain_digits_cnn,
    "factorization": plain_factorization,
    "called": plain_called,
    "smooth": plain_smooth,
}
