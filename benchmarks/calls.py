"""The overhead of a call: models with almost nothing to compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

import onnx2jax
from benchmarks.net import Net

from . import networks
from .harness import Call
from .networks.network import OPSET
from .rivals import BY_HAND, ORT, OURS, by_hand, checked, session

CALLED: Final = "onnx2jax, m(x)"
BARE: Final = "jax.jit(a + 1)"
WEIGHTS: Final = (2, 10, 50, 200, 500)


def bare(x: np.ndarray) -> Call:
    """The smallest jitted call: one argument, one addition."""
    plus = jax.jit(lambda a: a + 1)
    return lambda: plus(x).block_until_ready()


def both(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, Call]:
    """``run`` and a call, compared with onnxruntime and the bare jitted call."""
    model = onnx2jax.convert(path)
    (x,) = feeds.values()
    calls: dict[str, Call] = {
        OURS: partial(model.run, None, feeds),
        CALLED: lambda: [model(x).block_until_ready()],
        ORT: partial(session(path).run, None, feeds),
    }
    return {**checked(calls, 1e-4, str(path)), BARE: bare(x)}


def mlp(folder: Path) -> dict[str, Call]:
    """An MLP 784-128-10 at batch 1, compared with the hand-written one."""
    network = networks.NETWORKS["mlp"](folder, 1)
    feeds: dict[str, Any] = dict(network.feeds)
    assert network.by_hand is not None
    return both(network.path, feeds) | {BY_HAND: by_hand(network.by_hand, network.params, [*feeds.values()])}


def sums(folder: Path, weights: int) -> dict[str, Call]:
    """A chain of additions of vectors of 4, which are too large to be folded as constants."""
    net = Net(OPSET, ir=8)
    x = net.input("x", [4])
    for _ in range(weights):
        x = net("Tanh", net("Add", x, net.weight(4, scale=0.1)))
    path = net.save(folder, x)
    return both(path, {"x": np.ones(4, np.float32)})
