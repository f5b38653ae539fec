"""Large batches of images as microbatches, numerically equal; batches whose images are mixed stay whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from onnx2jax.jaxpr.passes.cpu import microbatch
from onnx2jax.ops import conv_cpu
from onnx2jax.ops.window import Window
from tests.support.programs import rewritten

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(6, 8, 9, 3)).astype(np.float32), RNG.normal(size=(3, 3, 3, 4)).astype(np.float32)


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def as_rows(y: Any) -> Any:
    return (y.reshape(-1, 4) @ jnp.ones((4, 5), np.float32)).reshape(*y.shape[:3], 5)


def pooled(y: Any) -> Any:
    y = lax.reduce_window(y, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])
    return lax.pad(y, np.float32(0), [(0, 0, 0), (1, 1, 0), (0, 0, 0), (0, 0, 0)])[:, 1:-1]


APART: dict[str, Callable[[Any], Any]] = {
    "a bias of the whole shape": lambda y: jnp.maximum(y + lax.broadcast_in_dim(W[0, 0, 0], y.shape, (3,)), 0),
    "a bias of one row": lambda y: y - W[:1, :1, :1, :],
    "rows of pixels": as_rows,
    "a pool, padding, a slice": pooled,
    "another order": lambda y: y.transpose(1, 3, 0, 2).transpose(2, 0, 1, 3),
    "means": lambda y: y.mean((1, 2)) @ W[0, 0, :, :3].T[:4].repeat(2, 0)[:4] if y.ndim == 3 else y.mean((1, 2)),
    "flattened": lambda y: y.reshape(y.shape[0], -1),
    "joined": lambda y: jnp.concatenate([y, y * 2], 3),
    "means by products": lambda y: lax.dot_general(jnp.ones((6, 1, 8)), y.mean(2), (((2,), (1,)), ((0,), (0,)))),
    "stacked": lambda y: jnp.stack([y, y + 1]).reshape(2, -1, 4)[0].reshape(y.shape),
    "a product for each row of a stack": lambda y: lax.dot_general(
        jnp.stack([y, -y]).reshape(2, -1, 4), np.ones((2, 4, 5), np.float32), (((2,), (1,)), ((0,), (0,)))
    )[1].reshape(6, -1),
    "behind a barrier": lambda y: lax.optimization_barrier(y) + 1,
    "by Winograd's tiles": lambda y: conv_cpu.tiled(y, np.ones((2, 4, 3, 3), np.float32), WINDOW, 1),
}
WINDOW = Window((3, 3), (1, 1), ((1, 1), (0, 2)), (1, 1))
TOGETHER: dict[str, Callable[[Any], Any]] = {
    "the mean of a batch": lambda y: y - y.mean(0, keepdims=True),
    "the other way round": lambda y: y[::-1],
    "the first four": lambda y: y[:4],
    "every second": lambda y: jnp.concatenate([y[::2], y[1::2]]),
    "a bias of each image": lambda y: y + np.arange(6, dtype=np.float32).reshape(6, 1, 1, 1) * np.ones(y.shape, "f"),
    "a result without them": lambda y: y.sum(),
    "beside other axes": lambda y: y.transpose(1, 0, 2, 3).reshape(-1, 4).reshape(8, 6, 9, 4).transpose(1, 0, 2, 3),
    "along itself": lambda y: jnp.cumsum(y, 0),
    "a product over them": lambda y: lax.dot_general(np.ones((2, 6), np.float32), y, (((1,), (0,)), ((), ()))),
    "behind a barrier, two": lambda y: sum(lax.optimization_barrier((y, y[::-1]))),
    "a product by each other": lambda y: lax.dot_general(y, y, (((3,), (3,)), ((0,), (0,)))),
}


def changed(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], Any]) -> Any:
    monkeypatch.setattr(microbatch, "MICROBATCH", 2)
    closed = jax.make_jaxpr(lambda w, x: [function(convolved(x, w))])(W, X)
    return closed, rewritten(microbatch.split_batch, closed, 1)


@pytest.mark.parametrize("name", APART)
def test_unmixed_images_are_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, parts = changed(monkeypatch, APART[name])
    assert [e.primitive.name for e in parts.jaxpr.eqns].count("scan") == 1
    (ours,), (expected,) = jax.jit(lambda *xs: [jaxpr_as_fun(c)(*xs) for c in (parts, closed)])(W, X)
    assert ours.dtype == expected.dtype
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", TOGETHER)
def test_mixed_images_are_not_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, parts = changed(monkeypatch, TOGETHER[name])
    assert parts is closed


def test_small_images_are_not_split() -> None:
    closed = jax.make_jaxpr(lambda w, x: [convolved(x, w)])(W, X)
    assert rewritten(microbatch.split_batch, closed, 1) is closed


def test_layers_after_the_last_large_value_take_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = RNG.normal(size=(4, 4)).astype(np.float32)

    def network(w: Any, v: Any, x: Any) -> list[Any]:
        y = convolved(x, w)
        halves = y[:, ::2, ::2] * 2
        means = halves.mean((1, 2))
        return [means - means.mean(0), halves.sum((1, 2)) @ v, jnp.full((3,), 2.0)]

    closed = jax.make_jaxpr(network)(W, matrix, X)
    monkeypatch.setattr(microbatch, "MICROBATCH", 5000 // (os.cpu_count() or 1))
    parts = rewritten(microbatch.split_batch, closed, 2)
    (scan,) = (e for e in parts.jaxpr.eqns if e.primitive.name == "scan")
    inside = [e.primitive.name for e in scan.params["jaxpr"].jaxpr.eqns]
    assert "conv_general_dilated" in inside
    assert "dot_general" not in inside
    both = jax.jit(lambda *xs: [jaxpr_as_fun(c)(*xs) for c in (parts, closed)])(W, matrix, X)
    for ours, expected in zip(*both, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_large_weights_prevent_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch, "MICROBATCH_WEIGHTS", 100)
    closed, parts = changed(monkeypatch, lambda y: y + 1)
    assert parts is closed
