"""Small networks of two layers with shardable matrix products, as exporters write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from unittest import mock

import jax
import numpy as np
import onnx
from onnx import helper

import onnx2jax
from tests.support.decoders import HIDDEN, MS, Net
from tests.support.models import NP, model, value

LAYERS, HEADS, SIZE, WORDS, BATCH, LENGTH = 2, 4, 8, 64, 8, 8


@dataclass
class Written:
    """A file, its inputs, and patterns of the weights that every tensor plan replicates."""

    proto: onnx.ModelProto
    inputs: NP
    whole: tuple[str, ...] = ("*norm*", "places", "*.o.bias", "*.down.bias", "constant_*")
    sums: int = 2 * LAYERS + 1
    """All-reduces of a tensor plan: two per layer, and one for the embedding."""


def _linear(net: Net, x: str, name: str, rows: int, columns: int) -> str:
    weight = net.constant(net.weight(name, rows, columns), name)
    return net("Add", net("MatMul", x, weight), net.constant(net.weight(f"{name}.bias", columns), f"{name}.bias"))


def _normed(net: Net, x: str, name: str) -> str:
    return net("LayerNormalization", x, net.constant(1 + 0.1 * net.weight(name, HIDDEN), name), axis=-1)


def _words(net: Net) -> str:
    ids = net.give("ids", np.int64, "batch", LENGTH)
    table = net.constant(net.weight("words", WORDS, HIDDEN), "words")
    places = net.constant(net.weight("places", LENGTH, HIDDEN), "places")
    return net("Add", net("Gather", table, ids), net("Gather", places, np.arange(LENGTH)))


def _attended(net: Net, q: str, k: str, v: str, mask: str) -> str:
    """Of [batch, heads, length, size]."""
    scores = net("Mul", net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2])), np.float32(SIZE**-0.5))
    y = net("MatMul", net("Softmax", net("Add", scores, mask), axis=-1), v)
    return net("Reshape", net("Transpose", y, perm=[0, 2, 1, 3]), np.array([0, 0, HIDDEN]))


def _heads(net: Net, x: str) -> str:
    """Reshape into heads by computed extents, as torch exports it."""
    batch, length = (net("Unsqueeze", net("Gather", net("Shape", x), np.array(i)), np.array([0])) for i in (0, 1))
    shape = net("Concat", batch, length, np.array([HEADS]), np.array([SIZE]), axis=0)
    return net("Transpose", net("Reshape", x, shape), perm=[0, 2, 1, 3])


def _gelu(net: Net, x: str) -> str:
    erf = net("Erf", net("Div", x, np.float32(2**0.5)))
    return net("Mul", net("Mul", x, net("Add", erf, np.float32(1))), np.float32(0.5))


def _written(net: Net, outputs: dict[str, list[int | str]]) -> onnx.ModelProto:
    net.outputs[:0] = [value(n, np.float32, shape) for n, shape in outputs.items()]
    return model(net.nodes, net.inputs, net.outputs, net.weights, 21, {MS: 1})


def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH))


def bert() -> Written:
    """Separate queries, keys and values; post-normalization; the mask is an input."""
    net = Net()
    x = _normed(net, _words(net), "norm")
    seen = net("Cast", net("Unsqueeze", net.give("mask", np.int64, "batch", LENGTH), np.array([1, 2])), to=1)
    mask = net("Mul", net("Sub", np.float32(1), seen), np.float32(-1e4))
    for i in range(LAYERS):
        q, k, v = (_heads(net, _linear(net, x, f"{i}.{n}", HIDDEN, HIDDEN)) for n in "qkv")
        y = _linear(net, _attended(net, q, k, v, mask), f"{i}.o", HIDDEN, HIDDEN)
        x = _normed(net, net("Add", x, y), f"{i}.norm1")
        y = _linear(net, _gelu(net, _linear(net, x, f"{i}.up", HIDDEN, 64)), f"{i}.down", 64, HIDDEN)
        x = _normed(net, net("Add", x, y), f"{i}.norm2")
    net("Identity", x, out="hidden")
    mask_values = (np.arange(LENGTH) < np.arange(1, BATCH + 1)[:, None]).astype(np.int64)
    return Written(_written(net, {"hidden": ["batch", LENGTH, HIDDEN]}), {"ids": ids(), "mask": mask_values})


def gpt(packed: str = "behind") -> Written:
    """Queries, keys and values by one Gemm, and a head tied to the embedding.

    Args:
        packed: whether they are concatenated ("behind"), or interleaved by heads ("beside").
    """
    net = Net()
    x = _words(net)
    future = np.where(np.tri(LENGTH), 0, -1e4).astype(np.float32)
    for i in range(LAYERS):
        rows = net("Reshape", _normed(net, x, f"{i}.norm1"), np.array([-1, HIDDEN]))
        weight, bias = (
            net.constant(net.weight(n, *shape), n)
            for n, shape in ((f"{i}.qkv", (HIDDEN, 3 * HIDDEN)), (f"{i}.qkv.bias", (3 * HIDDEN,)))
        )
        qkv = net("Reshape", net("Gemm", rows, weight, bias), np.array([-1, LENGTH, 3 * HIDDEN]))
        if packed == "behind":
            q, k, v = (_heads(net, part) for part in net("Split", qkv, n=3, axis=-1, num_outputs=3))
        else:
            parts = net("Reshape", qkv, np.array([0, 0, HEADS, 3, SIZE]))
            q, k, v = (net("Transpose", net("Gather", parts, np.array(j), axis=3), perm=[0, 2, 1, 3]) for j in range(3))
        x = net("Add", x, _linear(net, _attended(net, q, k, v, net.constant(future)), f"{i}.o", HIDDEN, HIDDEN))
        h = _normed(net, x, f"{i}.norm2")
        x = net("Add", x, _linear(net, net("Tanh", _linear(net, h, f"{i}.up", HIDDEN, 64)), f"{i}.down", 64, HIDDEN))
    net("MatMul", _normed(net, x, "norm"), net("Transpose", "words", perm=[1, 0]), out="logits")
    written = Written(_written(net, {"logits": ["batch", LENGTH, WORDS]}), {"ids": ids()})
    written.whole += ("*.qkv*",) if packed == "behind" else ()
    return written


def mixture() -> Written:
    """A decoder with four gated experts per layer, and com.microsoft's attention."""
    net = Net()
    x = _words(net)
    for i in range(LAYERS):
        h = _normed(net, x, f"{i}.norm1")
        qkv = [_linear(net, h, f"{i}.{n}", HIDDEN, HIDDEN) for n in "qkv"]
        y = net("MultiHeadAttention", *qkv, domain=MS, num_heads=HEADS, unidirectional=1)
        x = net("Add", x, _linear(net, y, f"{i}.o", HIDDEN, HIDDEN))
        rows = net("Reshape", _normed(net, x, f"{i}.norm2"), np.array([-1, HIDDEN]))
        router = net("MatMul", rows, net.constant(net.weight(f"{i}.router", HIDDEN, 4), f"{i}.router"))
        wide, narrow = (4, 16, HIDDEN), (4, HIDDEN, 16)
        shapes = {"fc1": wide, "b1": wide[:2], "fc2": narrow, "b2": narrow[:2], "fc3": wide}
        layers = [net.constant(net.weight(f"{i}.{n}", *s) / 4, f"{i}.{n}") for n, s in shapes.items()]
        net.nodes.append(
            helper.make_node(
                "MoE",
                [rows, router, *layers],
                [f"{i}.mixed"],
                domain=MS,
                k=2,
                activation_type="silu",
                normalize_routing_weights=1,
            )
        )
        x = net("Add", x, net("Reshape", f"{i}.mixed", net("Shape", x)))
    net("Identity", _normed(net, x, "norm"), out="hidden")
    written = Written(_written(net, {"hidden": ["batch", LENGTH, HIDDEN]}), {"ids": ids()})
    written.whole = ("*norm*", "places", "*.o.bias", "*.router")
    return written


def in_four_bits(bits: str) -> Written:
    """Products by MatMulNBits around GroupQueryAttention with caches; the gate of a network that is gated."""
    net = Net(bits=bits)
    x = _words(net)
    lengths = net.constant(np.full(BATCH, LENGTH - 1, np.int32))
    for i in range(LAYERS):
        h = _normed(net, x, f"{i}.norm1")
        q, k, v = (net.linear(h, f"{i}.{n}", HIDDEN, width) for n, width in zip("qkv", (64, 32, 32), strict=True))
        past, present = zip(net.key_value(i, "key"), net.key_value(i, "value"), strict=True)
        outputs = [f"{i}.attention", *present]
        operands = [q, k, v, *past, lengths, net.constant(np.array(LENGTH, np.int32))]
        heads = {"num_heads": 4, "kv_num_heads": 2}
        net.nodes.append(helper.make_node("GroupQueryAttention", operands, outputs, domain=MS, **heads))
        x = net("Add", x, net.linear(f"{i}.attention", f"{i}.o", 64, HIDDEN))
        h = _normed(net, x, f"{i}.norm2")
        gate = net.linear(h, f"{i}.gate", HIDDEN, 64)
        h = net("Mul", net("Mul", gate, net("Sigmoid", gate)), net.linear(h, f"{i}.up", HIDDEN, 64))
        x = net("Add", x, net.linear(h, f"{i}.down", 64, HIDDEN))
    net("Identity", net.linear(_normed(net, x, "norm"), "head", HIDDEN, WORDS), out="logits")
    caches = {n: np.zeros((BATCH, *shape[1:]), t) for n, (_, shape, t) in net.caches.items()}
    written = Written(_written(net, {"logits": ["batch", LENGTH, WORDS]}), {"ids": ids(), **caches})
    written.whole = ("*norm*", "places", "*.zeros")
    return written


NETWORKS: dict[str, Callable[[], Written]] = {
    "bert": bert,
    "gpt, packed": gpt,
    "gpt, packed by heads": lambda: gpt("beside"),
    "mixture of experts": mixture,
    "4 bits": lambda: in_four_bits("symmetric"),
}


def suggested_mesh(error: Exception) -> jax.sharding.Mesh:
    """The mesh of the code in an error's message."""
    code = re.search(r"jax\.make_mesh\(\([\d, ]+\), \([a-z', ]+\)\)", str(error))
    assert code is not None, error
    return eval(code[0])


@cache
def written(name: str, words: int = WORDS, layers: int = LAYERS) -> Written:
    """A network of another vocabulary size and number of layers."""
    with mock.patch.multiple(__name__, WORDS=words, LAYERS=layers):
        return NETWORKS[name]()


@cache
def alone(name: str, *size: int) -> list[np.ndarray]:
    """The results of a network on one device."""
    network = written(name, *size)
    return [np.asarray(v) for v in jax.tree.leaves(onnx2jax.convert(network.proto)(**network.inputs))]
