"""LSTM and GRU: by hand one product of the inputs for all steps, and a scan over the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.net import Net

from .network import OPSET, Network, Weights, built

STEPS, WIDTH, LAYERS = 100, 256, 2


def _layers(
    folder: Path, batch: int, kind: str, gates: int, by_hand: Callable[[Any, Any], Any], **more: Any
) -> Network:
    """Two layers over x [100, batch, 256]; ``by_hand`` computes one of them."""
    net = Net(OPSET, ir=8)
    x = net.input("x", [STEPS, batch, WIDTH])
    size, axes = WIDTH**-0.5, net.array([1], dtype=np.int64)
    for _ in range(LAYERS):
        w, r = (net.weight(1, gates * WIDTH, WIDTH, scale=size) for _ in range(2))
        b = net.weight(1, 2 * gates * WIDTH, scale=size)
        outputs = net(kind, x, w, r, b, n=2, hidden_size=WIDTH, **more)
        x = net("Squeeze", outputs[0], axes)
    weights = Weights(net)

    def of_layer() -> dict[str, np.ndarray]:
        w, r, b = weights.several(3)
        input_bias, recurrent_bias = np.split(b[0], 2)
        return {"w": w[0].T.copy(), "r": r[0].T.copy(), "wb": input_bias, "rb": recurrent_bias}

    def both(params: Any, x: Any) -> Any:
        for p in params:
            x = by_hand(p, x)
        return x

    feeds = {"x": np.random.default_rng(1).standard_normal((STEPS, batch, WIDTH)).astype(np.float32)}
    params = [of_layer() for _ in range(LAYERS)]
    return built(net, folder, f"{kind}, {STEPS} steps", feeds, [x], both, params)


def lstm_layer(p: Any, x: Any) -> Any:
    """Gates in ONNX's order: input, output, forget, cell."""
    zeros = jnp.zeros((x.shape[1], WIDTH), x.dtype)

    def step(state: Any, given: Any) -> Any:
        h, c = state
        z = given + h @ p["r"]
        i, o, f = jnp.split(jax.nn.sigmoid(z[:, : 3 * WIDTH]), 3, 1)
        c = f * c + i * jnp.tanh(z[:, 3 * WIDTH :])
        h = o * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (zeros, zeros), x @ p["w"] + (p["wb"] + p["rb"]))[1]


def gru_layer(p: Any, x: Any) -> Any:
    """Gates in ONNX's order: update, reset, hidden; the reset gate after the product, as PyTorch has it."""

    def step(h: Any, given: Any) -> Any:
        a = h @ p["r"] + p["rb"]
        z, r = jnp.split(jax.nn.sigmoid(given[:, : 2 * WIDTH] + a[:, : 2 * WIDTH]), 2, 1)
        new = jnp.tanh(given[:, 2 * WIDTH :] + r * a[:, 2 * WIDTH :])
        h = new + z * (h - new)
        return h, h

    return lax.scan(step, jnp.zeros((x.shape[1], WIDTH), x.dtype), x @ p["w"] + p["wb"])[1]


def lstm(folder: Path, batch: int) -> Network:
    return _layers(folder, batch, "LSTM", 4, lstm_layer)


def gru(folder: Path, batch: int) -> Network:
    return _layers(folder, batch, "GRU", 3, gru_layer, linear_before_reset=1)
