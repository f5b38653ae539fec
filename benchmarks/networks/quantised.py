"""Networks in int8, as onnxruntime's own tools make them.

There is no hand-written form: choosing the arithmetic of int8 on a CPU (int8 or float32 products) is the task of the
compiler, and onnxruntime is the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.net import Net

from .convolutional import head, images
from .network import OPSET, Network
from .transformers import Transformer

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


def _resnet18(folder: Path, batch: int, size: int) -> Path:
    """ResNet-18 with BatchNormalization folded, as before quantisation."""
    net = Net(OPSET, ir=8)
    x = net.pool(net("Relu", net.conv(net.image(size, batch), 64, 7, 2)), 3, 2, pads=[1] * 4)
    for width, stride in STAGES:
        for s in (stride, 1):
            y = net.conv(net("Relu", net.conv(x, width, 3, s)), width, 3)
            same = s == 1 and net.channels[x] == width
            x = net("Relu", net("Add", y, x if same else net.conv(x, width, 1, s)))
    return net.save(folder, head(net, x))


def _static(folder: Path, batch: int, form: str, name: str, size: int = 224) -> Network:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    (folder / "float").mkdir(exist_ok=True)
    plain, path = _resnet18(folder / "float", batch, size), folder / "model.onnx"

    class Reader(CalibrationDataReader):
        rows = iter([images(batch, size)])

        def get_next(self) -> Any:
            return next(self.rows, None)

    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(plain, path, Reader(), quant_format=QuantFormat[form], per_channel=True, **kinds)
    return Network(name, path, images(batch, size), tolerance=0.05)


def qdq(folder: Path, batch: int) -> Network:
    """ResNet-18 with QuantizeLinear and DequantizeLinear around each operator."""
    return _static(folder, batch, "QDQ", "ResNet-18 in int8, QDQ")


def qlinear(folder: Path, batch: int) -> Network:
    """ResNet-18 of QLinearConv."""
    return _static(folder, batch, "QOperator", "ResNet-18 in int8, QLinearConv")


def dynamic(folder: Path, batch: int, length: int = 128, layers: int = 6) -> Network:
    """Six layers of width 384, with MatMulInteger of DynamicQuantizeLinear's outputs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    width, inner = 384, 1536
    net = Transformer(width, 12)
    x = net.input("x", [batch, length, width])
    for _ in range(layers):
        q, k, v = (net.by_heads(net.linear(x, width, width)) for _ in range(3))
        x = net.layer_norm(net("Add", x, net.attended(q, k, v)))
        x = net.layer_norm(net("Add", x, net.linear(net.gelu(net.linear(x, width, inner)), inner, width)))
    (folder / "float").mkdir(exist_ok=True)
    path = folder / "model.onnx"
    quantize_dynamic(net.save(folder / "float", x), path, weight_type=QuantType.QInt8)
    feeds = {"x": np.random.default_rng(1).standard_normal((batch, length, width)).astype(np.float32)}
    return Network("Transformer in dynamic int8", path, feeds, tolerance=0.05)
