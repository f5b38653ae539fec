"""Transformers in the style of exporters, and by hand with one product for query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.net import Net

from .network import OPSET, Network, Weights, built

Layer = Mapping[str, Any]


class Transformer(Net):
    """A builder of a transformer with a width and a number of heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(OPSET, ir=8)
        self.width, self.heads, self.each = width, heads, width // heads
        self.split = self.array([0, 0, heads, self.each], dtype=np.int64)
        self.join = self.array([0, 0, width], dtype=np.int64)
        self.root = self.array(self.each**0.5, dtype=np.float32)

    def number(self, value: float) -> str:
        return self.array(value, dtype=np.float32)

    def linear(self, x: str, before: int, after: int) -> str:
        product = self("MatMul", x, self.weight(before, after, scale=0.5 * before**-0.5))
        return str(self("Add", product, self.weight(after, scale=0.02)))

    def layer_norm(self, x: str) -> str:
        scale, bias = self.weight(self.width, around=1, scale=0.1), self.weight(self.width, scale=0.1)
        return str(self("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5))

    def by_heads(self, x: str) -> str:
        """[n, heads, length, each]"""
        return str(self("Transpose", self("Reshape", x, self.split), perm=[0, 2, 1, 3]))

    def attended(self, q: str, k: str, v: str, mask: str = "") -> str:
        """Of tensors [n, heads, length, each]; the mask is added."""
        scores = self("Div", self("MatMul", q, self("Transpose", k, perm=[0, 1, 3, 2])), self.root)
        weights = self("Softmax", self("Add", scores, mask) if mask else scores, axis=-1)
        y = self("Reshape", self("Transpose", self("MatMul", weights, v), perm=[0, 2, 1, 3]), self.join)
        return self.linear(y, self.width, self.width)

    def gelu(self, x: str) -> str:
        """By erf, in five nodes."""
        erf = self("Erf", self("Div", x, self.number(2**0.5)))
        return str(self("Mul", self("Mul", x, self("Add", erf, self.number(1))), self.number(0.5)))

    def gelu_tanh(self, x: str) -> str:
        """By tanh, as in GPT-2."""
        cube = self("Mul", self("Pow", x, self.number(3)), self.number(0.044715))
        inner = self("Tanh", self("Mul", self("Add", x, cube), self.number((2 / np.pi) ** 0.5)))
        return str(self("Mul", self("Mul", x, self.number(0.5)), self("Add", inner, self.number(1))))


# --------------------------------------------------------------------------------------------- by hand


def linear_weights(weights: Weights) -> dict[str, np.ndarray]:
    w, b = weights.several(2)
    return {"w": w, "b": b}


def fused_weights(weights: Weights, n: int) -> dict[str, np.ndarray]:
    """Of n products of one operand."""
    pairs = [weights.several(2) for _ in range(n)]
    return {"w": np.concatenate([w for w, _ in pairs], 1), "b": np.concatenate([b for _, b in pairs])}


def norm_weights(weights: Weights) -> dict[str, np.ndarray]:
    scale, bias = weights.several(2)
    return {"scale": scale, "bias": bias}


def prenorm_weights(weights: Weights) -> dict[str, Any]:
    """Of a layer that normalises what it reads."""
    return {
        "norm1": norm_weights(weights),
        "qkv": linear_weights(weights),
        "out": linear_weights(weights),
        "norm2": norm_weights(weights),
        "up": linear_weights(weights),
        "down": linear_weights(weights),
    }


def linear(p: Layer, x: Any) -> Any:
    return (x.reshape(-1, x.shape[-1]) @ p["w"] + p["b"]).reshape(*x.shape[:-1], -1)


def layer_norm(p: Layer, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + lax.erf(x * 2**-0.5))


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def split_heads(x: Any, heads: int) -> list[Any]:
    """[n, length, 3 width] -> three of [n, heads, length, each]"""
    n, length, width = x.shape
    return [*x.reshape(n, length, 3, heads, width // 3 // heads).transpose(2, 0, 3, 1, 4)]


def attended(p: Layer, q: Any, k: Any, v: Any, mask: Any = 0.0) -> Any:
    n, heads, length, each = q.shape
    scores = jax.nn.softmax(jnp.einsum("bhqe,bhke->bhqk", q * each**-0.5, k) + mask, -1)
    return linear(p, jnp.einsum("bhqk,bhke->bqhe", scores, v).reshape(n, length, heads * each))


# --------------------------------------------------------------------------------------------- BERT


def bert(folder: Path, batch: int, length: int = 128, layers: int = 12, vocabulary: int = 30_522) -> Network:
    """BERT-base (Devlin et al., 2018): ids and mask -> the last hidden state."""
    width, inner = 768, 3072
    net = Transformer(width, 12)
    net.input("ids", [batch, length], np.int64)
    net.input("mask", [batch, length], np.int64)
    words = net("Gather", net.weight(vocabulary, width, scale=0.5), "ids")
    x = net.layer_norm(net("Add", words, net.weight(1, length, width, scale=0.5)))
    kept = net("Cast", net("Unsqueeze", "mask", net.array([1, 2], dtype=np.int64)), to=1)
    mask = net("Mul", net("Sub", net.number(1), kept), net.number(-1e4))
    for _ in range(layers):
        q, k, v = (net.by_heads(net.linear(x, width, width)) for _ in range(3))
        x = net.layer_norm(net("Add", x, net.attended(q, k, v, mask)))
        x = net.layer_norm(net("Add", x, net.linear(net.gelu(net.linear(x, width, inner)), inner, width)))
    weights = Weights(net)

    def of_layer() -> dict[str, Any]:
        return {
            "qkv": fused_weights(weights, 3),
            "out": linear_weights(weights),
            "norm1": norm_weights(weights),
            "up": linear_weights(weights),
            "down": linear_weights(weights),
            "norm2": norm_weights(weights),
        }

    params = {
        "words": weights(),
        "places": weights(),
        "norm": norm_weights(weights),
        "layers": [of_layer() for _ in range(layers)],
    }

    def by_hand(p: Any, ids: Any, mask: Any) -> Any:
        x = layer_norm(p["norm"], p["words"][ids] + p["places"])
        bias = (1 - mask[:, None, None].astype(np.float32)) * -1e4
        for t in p["layers"]:
            q, k, v = split_heads(linear(t["qkv"], x), 12)
            x = layer_norm(t["norm1"], x + attended(t["out"], q, k, v, bias))
            x = layer_norm(t["norm2"], x + linear(t["down"], gelu(linear(t["up"], x))))
        return x

    rng = np.random.default_rng(1)
    padded = np.arange(length) < length - 8
    feeds = {"ids": rng.integers(0, vocabulary, (batch, length)), "mask": np.tile(padded.astype(np.int64), (batch, 1))}
    return built(net, folder, "BERT-base", feeds, [x], by_hand, params)


# --------------------------------------------------------------------------------------------- GPT-2


def gpt2(
    folder: Path, batch: int, *, past: int = 0, length: int = 128, layers: int = 12, vocabulary: int = 50_257
) -> Network:
    """GPT-2 of 124M weights (Radford et al., 2019): logits of ``length`` positions after ``past`` others."""
    width, inner, context = 768, 3072, 1024
    net = Transformer(width, 12)
    net.input("ids", [batch, length], np.int64)
    table, every = net.weight(vocabulary, width, scale=0.05), past + length
    positions = net.weight(context, width, scale=0.05)
    x = net("Add", net("Gather", table, "ids"), net("Gather", positions, net.array(np.arange(past, every))))
    future = np.arange(past, every)[:, None] < np.arange(every)
    mask = net.array(np.where(future, -1e4, 0).astype(np.float32)) if length > 1 else ""
    outputs: list[str] = []
    for i in range(layers):
        qkv = net.linear(net.layer_norm(x), width, 3 * width)
        q, k, v = map(net.by_heads, net("Split", qkv, n=3, axis=-1))
        if past:
            shape = [batch, 12, past, net.each]
            k = net("Concat", net.input(f"key_{i}", shape), k, axis=2)
            v = net("Concat", net.input(f"value_{i}", shape), v, axis=2)
            outputs += [k, v]
        x = net("Add", x, net.attended(q, k, v, mask))
        x = net("Add", x, net.linear(net.gelu_tanh(net.linear(net.layer_norm(x), width, inner)), inner, width))
    logits = net("MatMul", net.layer_norm(x), net("Transpose", table, perm=[1, 0]))
    weights = Weights(net)

    params = {
        "words": weights(),
        "places": weights(),
        "layers": [prenorm_weights(weights) for _ in range(layers)],
        "norm": norm_weights(weights),
    }

    def by_hand(p: Any, ids: Any, *held: Any) -> Any:
        x, now = p["words"][ids] + p["places"][past:every], []
        bias = jnp.where(future, np.float32(-1e4), np.float32(0)) if length > 1 else np.float32(0)
        for i, t in enumerate(p["layers"]):
            q, k, v = split_heads(linear(t["qkv"], layer_norm(t["norm1"], x)), 12)
            if past:
                k, v = (jnp.concatenate(pair, 2) for pair in ((held[2 * i], k), (held[2 * i + 1], v)))
                now += [k, v]
            x = x + attended(t["out"], q, k, v, bias)
            x = x + linear(t["down"], gelu_tanh(linear(t["up"], layer_norm(t["norm2"], x))))
        x = layer_norm(p["norm"], x)
        return [jnp.einsum("nlw,vw->nlv", x, p["words"]), *now]

    rng = np.random.default_rng(1)
    feeds: dict[str, np.ndarray] = {"ids": rng.integers(0, vocabulary, (batch, length))}
    for i in range(layers if past else 0):
        for kind in ("key", "value"):
            feeds[f"{kind}_{i}"] = rng.standard_normal((batch, 12, past, net.each)).astype(np.float32)
    name = f"GPT-2, one step after {past}" if past else f"GPT-2, {length} at once"
    return built(net, folder, name, feeds, [logits, *outputs], by_hand, params)


def gpt2_step(folder: Path, batch: int) -> Network:
    """One token, with 128 before it."""
    return gpt2(folder, batch, past=128, length=1)


# --------------------------------------------------------------------------------------------- ViT


def vit(folder: Path, batch: int, size: int = 224, patch: int = 16, layers: int = 12) -> Network:
    """ViT-small with patches of 16 x 16 (Dosovitskiy et al., 2020)."""
    width, inner, heads = 384, 1536, 6
    net, count = Transformer(width, heads), (size // patch) ** 2
    pixels = net.conv(net.image(size, batch), width, patch, patch, pads=[0] * 4)
    x = net("Transpose", net("Reshape", pixels, net.array([0, 0, -1], dtype=np.int64)), perm=[0, 2, 1])
    first = net("Expand", net.weight(1, 1, width, scale=0.5), net.array([batch, 1, width], dtype=np.int64))
    x = net("Add", net("Concat", first, x, axis=1), net.weight(1, count + 1, width, scale=0.5))
    for _ in range(layers):
        q, k, v = map(net.by_heads, net("Split", net.linear(net.layer_norm(x), width, 3 * width), n=3, axis=-1))
        x = net("Add", x, net.attended(q, k, v))
        x = net("Add", x, net.linear(net.gelu(net.linear(net.layer_norm(x), width, inner)), inner, width))
    y = net("Gather", net.layer_norm(x), net.array(0, dtype=np.int64), axis=1)
    y = net.linear(y, width, 1000)
    weights = Weights(net)

    kernel, bias = weights.several(2)
    params = {
        "patches": {"w": kernel.transpose(2, 3, 1, 0).reshape(-1, width), "b": bias},
        "first": weights(),
        "places": weights(),
        "layers": [prenorm_weights(weights) for _ in range(layers)],
        "norm": norm_weights(weights),
        "head": linear_weights(weights),
    }

    def by_hand(p: Any, data: Any) -> Any:
        side = size // patch
        x = data.reshape(batch, 3, side, patch, side, patch).transpose(0, 2, 4, 3, 5, 1).reshape(batch, count, -1)
        x = jnp.concatenate([jnp.broadcast_to(p["first"], (batch, 1, width)), linear(p["patches"], x)], 1) + p["places"]
        for t in p["layers"]:
            x = x + attended(t["out"], *split_heads(linear(t["qkv"], layer_norm(t["norm1"], x)), heads))
            x = x + linear(t["down"], gelu(linear(t["up"], layer_norm(t["norm2"], x))))
        return linear(p["head"], layer_norm(p["norm"], x[:, 0]))

    feeds = {"data": np.random.default_rng(1).standard_normal((batch, 3, size, size)).astype(np.float32)}
    return built(net, folder, "ViT-small", feeds, [y], by_hand, params)
