"""Single operators at sizes of real networks, as ONNX files and by hand in JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.net import Net

from .networks.convolutional import conv
from .networks.network import OPSET, Network, Weights
from .networks.recurrent import gru, lstm


class Operator(NamedTuple):
    """A row: shapes of the inputs, the node, and the same in JAX, as a function of weights and inputs.

    ``prepare`` rearranges the weights of the file for that function.
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    node: Callable[[Net, list[str]], str]
    by_hand: Callable[..., Any] | None
    prepare: Callable[[list[np.ndarray]], Any] = list


def network(operator: Operator, folder: Path, _batch: int = 1) -> Network:
    """A network of one operator."""
    net, rng = Net(OPSET, ir=8), np.random.default_rng(1)
    names = [net.input(f"x{i}", shape) for i, shape in enumerate(operator.inputs)]
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in zip(names, operator.inputs, strict=True)}
    output = operator.node(net, names)
    dtype = np.int64 if operator.by_hand is None else np.float32  # NonMaxSuppression alone
    path = net.save(folder, **{output: dtype})
    count = sum(n.startswith("W_") for n in net.weights)
    params = jax.tree.map(jnp.asarray, operator.prepare(Weights(net).several(count)))
    return Network(operator.name, path, feeds, operator.by_hand, params)


def _conv(
    name: str, shape: tuple[int, ...], channels: int, kernel: int = 3, stride: int = 1, group: int = 1
) -> Operator:
    """By hand channels last; one convolution for each group, unless depthwise."""

    def by_hand(p: Any, x: Any) -> Any:
        x = x.transpose(0, 2, 3, 1)
        if 1 < group < channels:
            parts = zip(jnp.split(p["w"], group, 3), jnp.split(p["b"], group), jnp.split(x, group, 3), strict=True)
            y = jnp.concatenate([conv({"w": w, "b": b}, part, stride) for w, b, part in parts], 3)
        else:
            y = conv(p, x, stride)
        return y.transpose(0, 3, 1, 2)

    def node(net: Net, x: list[str]) -> str:
        return net.conv(x[0], channels, kernel, stride, group=group)

    return Operator(name, (shape,), node, by_hand, lambda w: {"w": w[0].transpose(2, 3, 1, 0), "b": w[1]})


def _conv_1d(net: Net, x: list[str]) -> str:
    return str(net("Conv", x[0], net.weight(128, 128, 5), net.weight(128), pads=[2, 2]))


def _by_hand_1d(weights: Any, x: Any) -> Any:
    """As a 2-D convolution, channels last, for which XLA has a fast kernel."""
    w, b = weights
    numbers = ("NHWC", "HWIO", "NHWC")
    last = x.transpose(0, 2, 1)[:, None]
    y = lax.conv_general_dilated(last, w, (1, 1), [(0, 0), (2, 2)], dimension_numbers=numbers)
    return (y[:, 0] + b).transpose(0, 2, 1)


def _conv_transpose(weights: Any, x: Any) -> Any:
    """One product; each pixel becomes four."""
    w, b = weights
    n, c, height, width = x.shape
    y = (x.transpose(0, 2, 3, 1).reshape(-1, c) @ w.reshape(c, -1)).reshape(n, height, width, -1, 2, 2)
    return y.transpose(0, 3, 1, 4, 2, 5).reshape(n, -1, 2 * height, 2 * width) + b[:, None, None]


def _max_pool(_: Any, x: Any) -> Any:
    x = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    rows = jnp.maximum(jnp.maximum(x[:, :, 0:-2:2], x[:, :, 1:-1:2]), x[:, :, 2::2])
    return jnp.maximum(jnp.maximum(rows[..., 0:-2:2], rows[..., 1:-1:2]), rows[..., 2::2])


def _suppression(net: Net, x: list[str]) -> str:
    limits = net.array(100), net.array(0.5, dtype=np.float32), net.array(0.0, dtype=np.float32)
    return str(net("NonMaxSuppression", *x, *limits))


def _layer_norm(weights: Any, x: Any) -> Any:
    scale, bias = weights
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _resize(net: Net, x: list[str]) -> str:
    scales = net.array([1, 1, 2, 2], dtype=np.float32)
    return str(net("Resize", x[0], "", scales, mode="linear", coordinate_transformation_mode="half_pixel"))


IMAGE: Final = (1, 64, 56, 56)
HEADS: Final = (1, 12, 128, 64)
OPERATORS: Final = (
    _conv("Conv 3x3, 64 channels, 56 x 56", IMAGE, 64),
    _conv("Conv 1x1, 64 to 256 channels, 56 x 56", IMAGE, 256, 1),
    _conv("Conv 7x7 with stride 2, 3 to 64 channels, 224 x 224", (1, 3, 224, 224), 64, 7, 2),
    _conv("Conv 3x3, 512 channels, 7 x 7", (1, 512, 7, 7), 512),
    _conv("Conv 3x3 depthwise, 144 channels, 56 x 56", (1, 144, 56, 56), 144, group=144),
    _conv("Conv 3x3 in 32 groups, 256 channels, 28 x 28", (1, 256, 28, 28), 256, group=32),
    Operator(
        "Conv of 5, 128 channels, length 1024",
        ((1, 128, 1024),),
        _conv_1d,
        _by_hand_1d,
        lambda w: [w[0].transpose(2, 1, 0)[None], w[1]],
    ),
    Operator(
        "ConvTranspose 2x2 with stride 2, 128 to 64 channels, 28 x 28",
        ((1, 128, 28, 28),),
        lambda net, x: net.conv(x[0], 64, 2, 2, transposed=True, pads=[0] * 4),
        _conv_transpose,
    ),
    Operator("MatMul 512 x 512", ((512, 512), (512, 512)), lambda net, x: net("MatMul", *x), lambda _, a, b: a @ b),
    Operator(
        "MatMul of 12 heads",
        (HEADS, (1, 12, 64, 128)),
        lambda net, x: net("MatMul", *x),
        lambda _, a, b: a @ b,
    ),
    Operator(
        "Gemm 1 x 1024 to 1000",
        ((1, 1024),),
        lambda net, x: net.dense(x[0], 1024, 1000),
        lambda w, x: (w[0] @ x[0] + w[1])[None],
    ),
    Operator(
        "Softmax of 12 x 128 x 128",
        ((12, 128, 128),),
        lambda net, x: net("Softmax", x[0], axis=-1),
        lambda _, x: jax.nn.softmax(x, -1),
    ),
    Operator(
        "LayerNormalization of 128 x 768",
        ((1, 128, 768),),
        lambda net, x: net("LayerNormalization", x[0], net.weight(768), net.weight(768), epsilon=1e-5),
        _layer_norm,
    ),
    Operator(
        "Resize to twice the size, linear, 64 channels, 56 x 56",
        (IMAGE,),
        _resize,
        lambda _, x: jax.image.resize(x, (1, 64, 112, 112), "bilinear"),
    ),
    Operator(
        "MaxPool 3x3 with stride 2, 64 channels, 112 x 112",
        ((1, 64, 112, 112),),
        lambda net, x: net.pool(x[0], 3, 2, pads=[1] * 4),
        _max_pool,
    ),
    Operator(
        "TopK 10 of 64 x 1000",
        ((64, 1000),),
        lambda net, x: net("TopK", x[0], net.array([10]), n=2)[0],
        lambda _, x: lax.top_k(x, 10)[0],
    ),
    Operator("NonMaxSuppression of 1000 boxes", ((1, 1000, 4), (1, 1, 1000)), _suppression, None),
    Operator(
        "Gather of 128 rows of 30 000 x 256",
        ((128,),),
        lambda net, x: net("Gather", net.weight(30_000, 256), net("Cast", net("Abs", x[0]), to=7)),
        lambda w, x: w[0][abs(x).astype(int)],
    ),
    Operator(
        "Concat of 4 x 64 channels, 56 x 56",
        (IMAGE,) * 4,
        lambda net, x: net.concat(*x),
        lambda _, *x: jnp.concatenate(x, 1),
    ),
    Operator(
        "ReduceMean over 56 x 56, 64 channels",
        (IMAGE,),
        lambda net, x: net("ReduceMean", x[0], axes=[2, 3]),
        lambda _, x: x.mean((2, 3), keepdims=True),
    ),
    Operator(
        "Einsum bhqe,bhke->bhqk of 12 heads",
        (HEADS, HEADS),
        lambda net, x: net("Einsum", *x, equation="bhqe,bhke->bhqk"),
        lambda _, a, b: jnp.einsum("bhqe,bhke->bhqk", a, b),
    ),
    Operator(
        "Transpose 0 2 1 3 of 128 x 12 x 64",
        ((1, 128, 12, 64),),
        lambda net, x: net("Transpose", x[0], perm=[0, 2, 1, 3]),
        lambda _, x: x.transpose(0, 2, 1, 3),
    ),
    Operator(
        "Exp, Add, Tanh, Mul over a million numbers",
        ((1024, 1024),),
        lambda net, x: net("Mul", net("Tanh", net("Add", net("Exp", x[0]), x[0])), x[0]),
        lambda _, x: jnp.tanh(jnp.exp(x) + x) * x,
    ),
)
RECURRENT: Final = {"LSTM, 2 of 256, 100 steps": lstm, "GRU, 2 of 256, 100 steps": gru}
