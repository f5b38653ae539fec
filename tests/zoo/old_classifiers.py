"""Classifiers of the ONNX model zoo by structure, at the opsets and with the habits of the exporters of their day."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.net import Net

from .case import Case, Export, export

FAMILY: Final = "ONNX model zoo: classification"


def _finish(net: Net, x: str, folder: Path, *shapes: tuple[int, ...], classes: int = 10) -> Export:
    """Global pooling and a dense layer, with the Reshape by a constant that files of that day have."""
    pooled = net("GlobalAveragePool", x)
    flat = net(
        "Reshape", pooled, net.array([shapes[0][0] if len(shapes) == 1 else -1, net.channels[x]], dtype=np.int64)
    )
    return export(net, folder, net.images(*shapes), net.dense(flat, net.channels[x], classes))


def _resnet(folder: Path, opset: int, preactivated: bool) -> Export:
    net = Net(opset)
    x = net.pool(net.block(net.image(batch="N"), 16, 7, 2), 3, pads=[1] * 4)
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        if preactivated:
            h = net("Relu", net.norm(x))
            across = net.conv(h, channels, 1, stride, bias=False)
            y = net.conv(net.block(h, channels, 3, stride), channels, bias=False)
        else:
            across = net.block(x, channels, 1, stride, act="") if stride > 1 else x
            y = net.block(net.block(x, channels, 3, stride), channels, act="")
        x = net("Add", y, across) if preactivated else net("Relu", net("Add", y, across))
    return _finish(net, x, folder, (1, 3, 64, 64), (3, 3, 64, 64))


def _vgg(folder: Path, opset: int, normed: bool) -> Export:
    net = Net(opset)
    x = net.image()
    for channels in (8, 16, 32, 32, 32):
        x = net.block(x, channels) if normed else net("Relu", net.conv(x, channels))
        x = net.pool(x)
    y = net("Flatten", x)
    for before, after in ((128, 64), (64, 64)):
        y = net("Dropout", net("Relu", net.dense(y, before, after)), ratio=0.5)
    return export(net, folder, net.images((1, 3, 64, 64)), net.dense(y, 64, 10))


def _alexnet(folder: Path, opset: int, swapped: bool) -> Export:
    """AlexNet, CaffeNet (pooling before normalisation) by Caffe2: grouped convolutions, LRN, Softmax of opset 1."""
    net = Net(opset)
    x = net("Relu", net.conv(net.image(67), 24, 11, 4, pads=[0] * 4))

    def lrn(x: str) -> str:
        return str(net("LRN", x, size=5, alpha=1e-4, beta=0.75, bias=1.0))

    x = lrn(net.pool(x, 3)) if swapped else net.pool(lrn(x), 3)
    x = net("Relu", net.conv(x, 32, 5, group=2))
    x = net.pool(x, 3, pads=[0, 0, 1, 1])
    x = net("Relu", net.conv(net("Relu", net.conv(x, 32)), 32, group=2))
    y = net("Reshape", x, net.array([1, 32 * 3 * 3], dtype=np.int64))
    y, _ = net("Dropout", net("Relu", net.dense(y, 288, 32)), n=2, ratio=0.5)
    return export(net, folder, net.images((1, 3, 67, 67)), net("Softmax", net.dense(y, 32, 10), axis=1))


def _inception(folder: Path, opset: int, normed: bool) -> Export:
    """GoogLeNet with LRN, and Inception v2 with normalisation followed by the Mul and Add that Caffe2 wrote."""
    net = Net(opset)

    def unit(x: str, channels: int, kernel: int = 1, stride: int = 1) -> str:
        y = net.conv(x, channels, kernel, stride)
        if normed:
            y = net.norm(y)
            scale, shift = (net("Unsqueeze", net.weight(channels, around=a), axes=[1, 2]) for a in (1.0, 0.0))
            y = net("Add", net("Mul", y, scale), shift)
        return str(net("Relu", y))

    x = net.pool(unit(net.image(), 16, 7, 2), 3, pads=[0, 0, 1, 1])
    if not normed:
        x = net("LRN", x, size=5, alpha=1e-4, beta=0.75)
    for _ in range(2):
        pooled = net.pool(x, 3, 1, pads=[1] * 4)
        double = unit(unit(unit(x, 4), 8, 3), 8, 3) if normed else unit(unit(x, 4), 8, 5)
        x = net.concat(unit(x, 8), unit(unit(x, 8), 16, 3), double, unit(pooled, 8))
    pooled = net("AveragePool", x, kernel_shape=[16, 16], strides=[1, 1])
    y = net("Reshape", pooled, net.array([1, 40], dtype=np.int64))
    return export(net, folder, net.images((1, 3, 64, 64)), net("Softmax", net.dense(y, 40, 10)))


def _densenet(folder: Path) -> Export:
    net = Net(9)
    x = net.pool(net.block(net.image(), 16, 7, 2), 3, pads=[1] * 4)
    for block in range(2):
        for _ in range(3):
            h = net.block(net("Relu", net.norm(x)), 16, 1)
            x = net.concat(x, net.conv(h, 8, bias=False))
        if block == 0:
            x = net.conv(net("Relu", net.norm(x)), 20, 1, bias=False)
            x = net.pool(x, kind="AveragePool")
    return _finish(net, net("Relu", net.norm(x)), folder, (1, 3, 64, 64))


def _mobilenet(folder: Path, opset: int) -> Export:
    net = Net(opset)
    x = _clipped(net, net.block(net.image(batch="batch_size"), 16, 3, 2, act=""))
    for channels, stride, wider in ((16, 1, 1), (24, 2, 6), (24, 1, 6), (32, 2, 6)):
        inner = net.channels[x] * wider
        h = _clipped(net, net.block(x, inner, 1, act="")) if wider > 1 else x
        h = _clipped(net, net.block(h, inner, 3, stride, group=inner, act=""))
        y = net.block(h, channels, 1, act="")
        x = net("Add", x, y) if stride == 1 and channels == net.channels[x] else y
    pooled = net("GlobalAveragePool", x)
    # Flatten as PyTorch traced it: the batch of the input's Shape.
    batch = net("Gather", net("Shape", pooled), net.constant(0), axis=0)
    shape = net("Concat", net("Unsqueeze", batch, axes=[0]), net.constant([-1]), axis=0)
    y = net.dense(net("Reshape", pooled, shape), 32, 10)
    return export(net, folder, net.images((1, 3, 64, 64), (2, 3, 64, 64)), y)


def _clipped(net: Net, x: str) -> str:
    """ReLU6, whose bounds were attributes before opset 11."""
    if net.opset < 11:
        return str(net("Clip", x, min=0.0, max=6.0))
    return str(net("Clip", x, net.constant(0, np.float32), net.constant(6, np.float32)))


def _efficientnet(folder: Path) -> Export:
    """EfficientNet-Lite by tf2onnx: images come as NHWC, padding is SAME, pooling is ReduceMean."""
    net = Net(11)
    net.input("data", ["N", 64, 64, 3])
    x = net("Transpose", "data", perm=[0, 3, 1, 2])
    net.channels[x] = 3
    x = _clipped(net, net.conv(x, 16, 3, 2, same=True))
    for channels, kernel, stride in ((16, 3, 1), (24, 5, 2), (24, 5, 1)):
        inner = net.channels[x] * 4
        h = _clipped(net, net.conv(x, inner, 1, same=True))
        h = _clipped(net, net.conv(h, inner, kernel, stride, group=inner, same=True))
        y = net.conv(h, channels, 1, same=True)
        x = net("Add", y, x) if stride == 1 and channels == net.channels[x] else y
    y = net("Squeeze", net("ReduceMean", x, axes=[2, 3], keepdims=1), axes=[2, 3])
    y = net("Softmax", net("Add", net("MatMul", y, net.weight(24, 10)), net.weight(10)))
    return export(net, folder, net.images((1, 64, 64, 3), (2, 64, 64, 3)), y)


def _shufflenet(folder: Path, opset: int) -> Export:
    """ShuffleNet v1 by Caffe2 (Reshape by constants), v2 by PyTorch (Split in two)."""
    net = Net(opset)
    x = net.pool(net.block(net.image(), 24, 3, 2), 3, pads=[1] * 4)
    side = 16

    def shuffled(x: str, groups: int) -> str:
        c = net.channels[x]
        apart = net("Reshape", x, net.array([1, groups, c // groups, side, side], dtype=np.int64))
        y = net("Reshape", net("Transpose", apart, perm=[0, 2, 1, 3, 4]), net.array([1, c, side, side], dtype=np.int64))
        net.channels[y] = c
        return str(y)

    for _ in range(2):
        if opset < 9:
            h = shuffled(net.block(x, 24, 1, group=3), 3)
            y = net.block(net.block(h, 24, group=24, act=""), 24, 1, group=3, act="")
            x = net("Relu", net("Add", x, y))
        else:
            left, right = net("Split", x, n=2, axis=1, split=[12, 12])
            net.channels[left] = net.channels[right] = 12
            y = net.block(net.block(net.block(right, 12, 1), 12, group=12, act=""), 12, 1)
            x = shuffled(net.concat(left, y), 2)
    return _finish(net, x, folder, (1, 3, 64, 64))


def _squeezenet(folder: Path, opset: int) -> Export:
    net = Net(opset)
    x = net.pool(net("Relu", net.conv(net.image(), 16, 3, 2, pads=[0] * 4)), 3)
    for squeezed in (4, 8):
        s = net("Relu", net.conv(x, squeezed, 1))
        x = net.concat(net("Relu", net.conv(s, 4 * squeezed, 1)), net("Relu", net.conv(s, 4 * squeezed)))
        x = net.pool(x, 3)
    y = net("Relu", net.conv(net("Dropout", x, ratio=0.5), 10, 1))
    y = net("Reshape", net("GlobalAveragePool", y), net.array([0, -1], dtype=np.int64))
    return export(net, folder, net.images((1, 3, 64, 64)), net("Softmax", y))


def _zfnet(folder: Path) -> Export:
    net = Net(8)
    x = net("Relu", net.conv(net.image(), 16, 7, 2, pads=[1] * 4))
    x = net.pool(net("LRN", x, size=3, alpha=5e-5, beta=0.75), 3, pads=[0, 0, 1, 1])
    x = net("Relu", net.conv(net("Relu", net.conv(x, 24, 5, 2)), 24))
    y = net("Flatten", net.pool(x, 3))
    return export(net, folder, net.images((1, 3, 64, 64)), net("Softmax", net.dense(y, 24 * 9, 10)))


def _mnist(folder: Path) -> Export:
    """By CNTK: SAME_UPPER, weights flattened by a Reshape of the weight, biases of rank 3 that broadcast."""
    net = Net(8)
    x = net("Relu", net("Add", net.conv(net.image(28, channels=1), 8, 5, same=True, bias=False), net.weight(8, 1, 1)))
    x = net.pool(x, auto_pad="NOTSET", pads=[0] * 4)
    x = net("Relu", net("Add", net.conv(x, 16, 5, same=True, bias=False), net.weight(16, 1, 1)))
    x = net.pool(x, 3, 3)
    flat = net("Reshape", x, net.array([1, 256], dtype=np.int64))
    matrix = net("Reshape", net.weight(16, 4, 4, 10, scale=0.1), net.array([256, 10], dtype=np.int64))
    y = net("Add", net("MatMul", flat, matrix), net.weight(1, 10))
    return export(net, folder, net.images((1, 1, 28, 28)), y)


def _emotion(folder: Path) -> Export:
    """FER+ by CNTK: the image less a constant, convolutions with biases added, dropout."""
    net = Net(8)
    x = net("Sub", net.image(64, channels=1), net.constant(127.5, np.float32))
    x = net("Mul", x, net.constant(1 / 127.5, np.float32))
    for channels in (16, 16, 32):
        for _ in range(2):
            x = net("Relu", net("Add", net.conv(x, channels, same=True, bias=False), net.weight(channels, 1, 1)))
        x = net("Dropout", net.pool(x, pads=[0] * 4), ratio=0.25)
    y = net("Reshape", x, net.array([1, 2048], dtype=np.int64))
    y = net("Relu", net("Add", net("MatMul", y, net.weight(2048, 32, scale=0.02)), net.weight(32)))
    return export(net, folder, net.images((1, 1, 64, 64)), net("MatMul", y, net.weight(32, 8)))


def _arcface(folder: Path) -> Export:
    """By MXNet: PRelu with a slope for each channel, `spatial`, Flatten."""
    net = Net(8)
    x = net("Mul", net("Sub", net.image(), net.array([127.5], dtype=np.float32)), net.array([0.01], dtype=np.float32))
    x = net.norm(net.conv(x, 16, bias=False), momentum=0.9, spatial=1)
    x = net("PRelu", x, net.weight(16, 1, 1, around=0.25))
    for channels, stride in ((16, 2), (32, 2)):
        h = net.norm(x, momentum=0.9, spatial=1)
        h = net.norm(net.conv(h, channels, bias=False), momentum=0.9, spatial=1)
        h = net("PRelu", h, net.weight(channels, 1, 1, around=0.25))
        h = net.norm(net.conv(h, channels, 3, stride, bias=False), momentum=0.9, spatial=1)
        x = net("Add", h, net.block(x, channels, 1, stride, act=""))
    x = net("Identity", net("Dropout", net.norm(x), ratio=0.4))
    return export(net, folder, net.images((1, 3, 64, 64)), net.dense(net("Flatten", x), 32 * 256, 16))


NETS: Final[dict[str, Callable[[Path], Export]]] = {
    "ResNet v1, opset 7": lambda f: _resnet(f, 7, False),
    "ResNet v2, opset 8": lambda f: _resnet(f, 8, True),
    "VGG, opset 7": lambda f: _vgg(f, 7, False),
    "VGG with normalisation, opset 7": lambda f: _vgg(f, 7, True),
    "AlexNet, opset 9": lambda f: _alexnet(f, 9, False),
    "CaffeNet, opset 9": lambda f: _alexnet(f, 9, True),
    "GoogLeNet, opset 9": lambda f: _inception(f, 9, False),
    "Inception v2, opset 8": lambda f: _inception(f, 8, True),
    "DenseNet, opset 9": _densenet,
    "MobileNet v2, opset 7": lambda f: _mobilenet(f, 7),
    "MobileNet v2, opset 12": lambda f: _mobilenet(f, 12),
    "EfficientNet-Lite, opset 11": _efficientnet,
    "ShuffleNet v1, opset 8": lambda f: _shufflenet(f, 8),
    "ShuffleNet v2, opset 10": lambda f: _shufflenet(f, 10),
    "SqueezeNet, opset 7": lambda f: _squeezenet(f, 7),
    "SqueezeNet, opset 9": lambda f: _squeezenet(f, 9),
    "ZFNet, opset 8": _zfnet,
    "MNIST of CNTK, opset 8": _mnist,
    "FER+ emotion, opset 8": _emotion,
    "ArcFace, opset 8": _arcface,
}
LIGHT: Final = {"MobileNet v2, opset 7", "AlexNet, opset 9", "MNIST of CNTK, opset 8", "SqueezeNet, opset 9"}

CASES: Final = tuple(Case(FAMILY, name, "by structure", make, light=name in LIGHT) for name, make in NETS.items())
