"""Convolutional networks, with BatchNormalization in the files; by hand it is folded into the convolutions.

By hand images are channels last, convolutions of 1 x 1 are products, depthwise ones are sums of shifted images, because
XLA runs grouped convolutions on a CPU slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.net import Net

from .network import OPSET, Network, Weights, built

Layer = Mapping[str, Any]


def conv_weights(weights: Weights, *, normed: bool = True) -> dict[str, np.ndarray]:
    """The next convolution with its normalisation folded: w [height, width, in, out], b [out]."""
    w = weights()
    if normed:
        variance, scale, bias, mean = weights.several(4)
        factor = scale / np.sqrt(variance + 1e-5)
        w, b = w * factor[:, None, None, None], bias - mean * factor
    else:
        b = weights()
    return {"w": np.ascontiguousarray(w.transpose(2, 3, 1, 0)), "b": b}


def conv(p: Layer, x: Any, stride: int = 1) -> Any:
    """x [n, height, width, in], with padding that preserves the extent (divided by the stride)."""
    w, b = p["w"], p["b"]
    k, before = w.shape[0], w.shape[2]
    if before == 1 and x.shape[-1] == w.shape[3]:
        return depthwise(w[:, :, 0], x, stride) + b
    if k > 1:
        pads = [(k // 2, k // 2)] * 2
        return lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
    x = x[:, ::stride, ::stride]
    return (x.reshape(-1, before) @ w[0, 0]).reshape(*x.shape[:-1], -1) + b


def depthwise(w: Any, x: Any, stride: int) -> Any:
    """w [height, width, channels]: one shifted image for each of its taps."""
    k = w.shape[0]
    _, height, width, _ = x.shape
    x = jnp.pad(x, ((0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)))
    return sum(w[i, j] * x[:, i : i + height : stride, j : j + width : stride] for i in range(k) for j in range(k))


def max_pool(x: Any, kernel: int, stride: int, pad: int = 0) -> Any:
    """The maximum of shifted images, which XLA fuses; it has no fast window on a CPU."""
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-np.inf)
    height, width = ((n - kernel) // stride * stride + 1 for n in x.shape[1:3])
    taps = ((i, j) for i in range(kernel) for j in range(kernel))
    return reduce(jnp.maximum, (x[:, i : i + height : stride, j : j + width : stride] for i, j in taps))


def dense_weights(weights: Weights) -> dict[str, np.ndarray]:
    w, b = weights.several(2)
    return {"w": np.ascontiguousarray(w.T), "b": b}


def dense(p: Layer, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def images(batch: int, size: int) -> dict[str, np.ndarray]:
    return {"data": np.random.default_rng(1).standard_normal((batch, 3, size, size)).astype(np.float32)}


def head(net: Net, x: str, classes: int = 1000) -> str:
    pooled = net("Flatten", net("GlobalAveragePool", x))
    return net.dense(pooled, net.channels[x], classes)


# --------------------------------------------------------------------------------------------- ResNet-50

RESNET = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of each stage."""


def resnet50(folder: Path, batch: int, size: int = 224) -> Network:
    """He, Zhang, Ren, Sun (2015), stride at the convolution of 3 x 3."""
    net = Net(OPSET, ir=8)
    x = net.pool(net.block(net.image(size, batch), 64, 7, 2), 3, 2, pads=[1] * 4)
    for width, blocks, stride in RESNET:
        for i in range(blocks):
            s = stride if i == 0 else 1
            y = net.block(net.block(net.block(x, width, 1), width, 3, s), 4 * width, 1, act="")
            x = net("Relu", net("Add", y, net.block(x, 4 * width, 1, s, act="") if i == 0 else x))
    y = head(net, x)
    weights = Weights(net)
    params = {
        "stem": conv_weights(weights),
        "blocks": [
            {n: conv_weights(weights) for n in ("abc" if i else "abcs")} for _, k, _ in RESNET for i in range(k)
        ],
        "head": dense_weights(weights),
    }

    def by_hand(p: Any, data: Any) -> Any:
        x = max_pool(jax.nn.relu(conv(p["stem"], data.transpose(0, 2, 3, 1), 2)), 3, 2, 1)
        strides = [s if i == 0 else 1 for _, k, s in RESNET for i in range(k)]
        for b, s in zip(p["blocks"], strides, strict=True):
            y = jax.nn.relu(conv(b["b"], jax.nn.relu(conv(b["a"], x)), s))
            x = jax.nn.relu(conv(b["c"], y) + (conv(b["s"], x, s) if "s" in b else x))
        return dense(p["head"], x.mean((1, 2)))

    return built(net, folder, "ResNet-50", images(batch, size), [y], by_hand, params)


# --------------------------------------------------------------------------------------------- MobileNetV2

MOBILENET = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks and stride of each stage."""


def relu6(x: Any) -> Any:
    return jnp.clip(x, 0, 6)


def mobilenet_v2(folder: Path, batch: int, size: int = 224) -> Network:
    """Sandler et al. (2018)."""
    net = Net(OPSET, ir=8)
    bounds = net.array(0, dtype=np.float32), net.array(6, dtype=np.float32)

    def block(x: str, channels: int, kernel: int = 3, stride: int = 1, group: int = 1) -> str:
        return str(net("Clip", net.block(x, channels, kernel, stride, act="", group=group), *bounds))

    x = block(net.image(size, batch), 32, 3, 2)
    plan: list[tuple[bool, int, bool]] = []  # whether it expands, the stride, whether it adds its input
    for expansion, channels, blocks, stride in MOBILENET:
        for i in range(blocks):
            before, s = net.channels[x], stride if i == 0 else 1
            y = block(x, before * expansion, 1) if expansion > 1 else x
            y = net.block(block(y, before * expansion, 3, s, before * expansion), channels, 1, act="")
            plan.append((expansion > 1, s, s == 1 and before == channels))
            x = net("Add", x, y) if plan[-1][2] else y
    y = head(net, block(x, 1280, 1))
    weights = Weights(net)
    params = {
        "stem": conv_weights(weights),
        "blocks": [{n: conv_weights(weights) for n in ("edp" if wide else "dp")} for wide, _, _ in plan],
        "last": conv_weights(weights),
        "head": dense_weights(weights),
    }

    def by_hand(p: Any, data: Any) -> Any:
        x = relu6(conv(p["stem"], data.transpose(0, 2, 3, 1), 2))
        for b, (wide, stride, adds) in zip(p["blocks"], plan, strict=True):
            y = relu6(conv(b["e"], x)) if wide else x
            y = conv(b["p"], relu6(conv(b["d"], y, stride)))
            x = x + y if adds else y
        return dense(p["head"], relu6(conv(p["last"], x)).mean((1, 2)))

    return built(net, folder, "MobileNetV2", images(batch, size), [y], by_hand, params)


# --------------------------------------------------------------------------------------------- EfficientNet-B0

EFFICIENT = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
"""Expansion, channels, blocks, stride and kernel of each stage."""


def efficientnet(folder: Path, batch: int, size: int = 224) -> Network:
    """Like B0 of Tan and Le (2019): squeeze and excitation, x sigmoid(x); symmetric padding."""
    net = Net(OPSET, ir=8)

    def block(x: str, channels: int, kernel: int = 3, stride: int = 1, group: int = 1) -> str:
        y = net.block(x, channels, kernel, stride, act="", group=group)
        return str(net("Mul", y, net("Sigmoid", y)))

    def excited(x: str, squeezed: int) -> str:
        s = net.conv(net("GlobalAveragePool", x), squeezed, 1)
        s = net.conv(net("Mul", s, net("Sigmoid", s)), net.channels[x], 1)
        return str(net("Mul", x, net("Sigmoid", s)))

    x = block(net.image(size, batch), 32, 3, 2)
    plan: list[tuple[bool, int, bool]] = []
    for expansion, channels, blocks, stride, kernel in EFFICIENT:
        for i in range(blocks):
            before, s = net.channels[x], stride if i == 0 else 1
            wide = before * expansion
            y = block(block(x, wide, 1) if expansion > 1 else x, wide, kernel, s, wide)
            y = net.block(excited(y, before // 4), channels, 1, act="")
            plan.append((expansion > 1, s, s == 1 and before == channels))
            x = net("Add", x, y) if plan[-1][2] else y
    y = head(net, block(x, 1280, 1))
    weights = Weights(net)

    def of_block(wide: bool) -> dict[str, Any]:
        return {n: conv_weights(weights, normed=n not in "se") for n in ("wdsep" if wide else "dsep")}

    params = {
        "stem": conv_weights(weights),
        "blocks": [of_block(wide) for wide, _, _ in plan],
        "last": conv_weights(weights),
        "head": dense_weights(weights),
    }

    def by_hand(p: Any, data: Any) -> Any:
        x = jax.nn.silu(conv(p["stem"], data.transpose(0, 2, 3, 1), 2))
        for b, (wide, stride, adds) in zip(p["blocks"], plan, strict=True):
            y = jax.nn.silu(conv(b["w"], x)) if wide else x
            y = jax.nn.silu(conv(b["d"], y, stride))
            s = conv(b["e"], jax.nn.silu(conv(b["s"], y.mean((1, 2), keepdims=True))))
            y = conv(b["p"], y * jax.nn.sigmoid(s))
            x = x + y if adds else y
        return dense(p["head"], jax.nn.silu(conv(p["last"], x)).mean((1, 2)))

    return built(net, folder, "EfficientNet-B0", images(batch, size), [y], by_hand, params, tolerance=1e-3)


# --------------------------------------------------------------------------------------------- UNet


def unet(folder: Path, batch: int, size: int = 128, base: int = 32, depth: int = 4) -> Network:
    """Ronneberger, Fischer, Brox (2015), padded, with half the channels of the paper."""
    net = Net(OPSET, ir=8)

    def double(x: str, channels: int) -> str:
        return net.block(net.block(x, channels), channels)

    x, skips = net.image(size, batch), []
    for i in range(depth):
        skips.append(double(x, base << i))
        x = net.pool(skips[-1])
    x = double(x, base << depth)
    for i in reversed(range(depth)):
        up = net.conv(x, base << i, 2, 2, transposed=True, pads=[0] * 4)
        x = double(net.concat(skips[i], up), base << i)
    y = net.conv(x, 2, 1)
    weights = Weights(net)

    def doubled() -> list[Any]:
        return [conv_weights(weights), conv_weights(weights)]

    def upwards() -> dict[str, np.ndarray]:
        w, b = weights.several(2)  # w [in, out, 2, 2]
        return {"w": w.transpose(0, 2, 3, 1).reshape(w.shape[0], -1), "b": b}

    params = {
        "down": [doubled() for _ in range(depth)],
        "middle": doubled(),
        "up": [{"up": upwards(), "double": doubled()} for _ in range(depth)],
        "last": conv_weights(weights, normed=False),
    }

    def larger(p: Layer, x: Any) -> Any:
        """A transposed convolution of 2 x 2 with stride 2: each pixel becomes four."""
        n, height, width, c = x.shape
        y = (x.reshape(-1, c) @ p["w"]).reshape(n, height, width, 2, 2, -1)
        return y.transpose(0, 1, 3, 2, 4, 5).reshape(n, 2 * height, 2 * width, -1) + p["b"]

    def by_hand(p: Any, data: Any) -> Any:
        def both(pair: Any, x: Any) -> Any:
            return jax.nn.relu(conv(pair[1], jax.nn.relu(conv(pair[0], x))))

        x, skips = data.transpose(0, 2, 3, 1), []
        for pair in p["down"]:
            skips.append(both(pair, x))
            x = max_pool(skips[-1], 2, 2)
        x = both(p["middle"], x)
        for step in p["up"]:
            x = both(step["double"], jnp.concatenate([skips.pop(), larger(step["up"], x)], -1))
        return conv(p["last"], x).transpose(0, 3, 1, 2)

    return built(net, folder, "UNet", images(batch, size), [y], by_hand, params)


# --------------------------------------------------------------------------------------------- MLP


def mlp(folder: Path, batch: int) -> Network:
    """784-128-10: dominated by call overhead."""
    net = Net(OPSET, ir=8)
    x = net.input("data", [batch, 784])
    y = net.dense(net("Relu", net.dense(x, 784, 128)), 128, 10)
    weights = Weights(net)
    params = [dense_weights(weights), dense_weights(weights)]

    def by_hand(p: Any, data: Any) -> Any:
        return dense(p[1], jax.nn.relu(dense(p[0], data)))

    feeds = {"data": np.random.default_rng(1).standard_normal((batch, 784)).astype(np.float32)}
    return built(net, folder, "MLP 784-128-10", feeds, [y], by_hand, params)


def wide_conv(folder: Path, batch: int, size: tuple[int, int] = (172, 264)) -> Network:
    """A convolution of 3 x 39 taps from 8 channels to 8, as in detectors of pitch over spectrograms."""
    net = Net(OPSET, ir=8)
    x = net.input("x", (batch, 8, *size))
    y = net("Conv", x, net.weight(8, 8, 3, 39), net.weight(8), pads=[1, 19, 1, 19])
    feeds = {x: np.random.default_rng(0).standard_normal((batch, 8, *size)).astype(np.float32)}

    def by_hand(p: Any, x: Any) -> Any:
        return lax.conv_general_dilated(x, p["w"], (1, 1), [(1, 1), (19, 19)]) + p["b"][:, None, None]

    w, b = Weights(net).several(2)
    return built(net, folder, "Convolution 3 x 39", feeds, [y], by_hand, {"w": w, "b": b})
