"""brevitas: networks quantised while they are trained, written as QCDQ and as QONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.saturation import saturates

from .case import Case, Export

QCDQ, QONNX = "brevitas QCDQ", "brevitas QONNX"
ROW, IMAGE = (12,), (3, 8, 8)


def _linear(**options: Any) -> Any:
    """Two layers; weights of 8 bits have 7 where onnxruntime's products of 8 bits saturate."""
    import brevitas.nn as qnn
    from torch import nn

    if options.get("weight_bit_width") == 8 and saturates():
        options["weight_bit_width"] = 7
    return nn.Sequential(
        qnn.QuantIdentity(bit_width=8, return_quant_tensor=True),
        qnn.QuantLinear(12, 10, bias=True, **options),
        qnn.QuantReLU(bit_width=4),
        qnn.QuantLinear(10, 5, bias=False, **options),
    )


def _conv(**options: Any) -> Any:
    import brevitas.nn as qnn
    from torch import nn

    return nn.Sequential(
        qnn.QuantIdentity(bit_width=8),
        qnn.QuantConv2d(3, 8, 3, padding=1, **options),
        nn.BatchNorm2d(8),
        qnn.QuantReLU(bit_width=4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        qnn.QuantLinear(128, 5, bias=True, **options),
    )


def _quantiser(net: Callable[..., Any], name: str, **options: Any) -> Any:
    import brevitas.quant

    return net(weight_quant=getattr(brevitas.quant, name), **options)


def _smooth() -> Any:
    import brevitas.nn as qnn
    from torch import nn

    return nn.Sequential(qnn.QuantLinear(12, 8, bias=True), qnn.QuantSigmoid(bit_width=5), qnn.QuantTanh(bit_width=6))


def _upwards() -> Any:
    import brevitas.nn as qnn
    from torch import nn

    return nn.Sequential(qnn.QuantIdentity(), qnn.QuantConvTranspose2d(3, 4, 3, stride=2, weight_bit_width=5))


def _export(make: Callable[[], Any], shape: tuple[int, ...], exporter: str, folder: Path) -> Export:
    import brevitas.export
    import onnx
    import torch

    torch.manual_seed(0)
    net = make().train()
    for _ in range(10):
        net(torch.randn(4, *shape))
    net.eval()
    x = 1.5 * torch.randn(4, *shape)
    path = folder / "model.onnx"
    write = brevitas.export.export_onnx_qcdq if exporter == QCDQ else brevitas.export.export_qonnx
    write(net, args=x, export_path=str(path), dynamo=False, opset_version=17)
    with torch.no_grad():
        y = net(x)
    value = y.value if hasattr(y, "value") else y
    name = onnx.load(path).graph.input[0].name
    return Export(path, [{name: x.numpy()}], [[np.asarray(value)]])


NETWORKS: Final[Mapping[str, tuple[Callable[[], Any], tuple[int, ...]]]] = {
    **{f"linear, {bits} bits": (partial(_linear, weight_bit_width=bits), ROW) for bits in (2, 3, 4, 8)},
    **{f"convolution, {bits} bits": (partial(_conv, weight_bit_width=bits), IMAGE) for bits in (2, 3, 4, 8)},
    "linear, by channel": (partial(_linear, weight_bit_width=4, weight_scaling_per_output_channel=True), ROW),
    "convolution, by channel": (partial(_conv, weight_bit_width=4, weight_scaling_per_output_channel=True), IMAGE),
    "linear, powers of two": (partial(_quantiser, _linear, "Int8WeightPerTensorFixedPoint"), ROW),
    "linear, asymmetric": (partial(_quantiser, _linear, "ShiftedUint8WeightPerTensorFloat"), ROW),
    "linear, ternary": (partial(_quantiser, _linear, "SignedTernaryWeightPerTensorConst"), ROW),
    "linear, binary": (partial(_quantiser, _linear, "SignedBinaryWeightPerTensorConst"), ROW),
    "sigmoid, tanh": (_smooth, ROW),
    "transposed convolution": (_upwards, IMAGE),
}
REFUSED: Final = {"linear, binary / brevitas QCDQ": "AssertionError: Binary quant not supported"}
BIAS: Final = "onnxruntime (WeightBiasQuantization) rounds Gemm's bias to multiples of the scale of its products"
KNOWN: Final = {f"linear, {name} / {QCDQ}": {"outputs": BIAS} for name in ("2 bits", "ternary")}
CASES: Final = tuple(
    Case("brevitas", name, exporter, partial(_export, *row, exporter), ("brevitas",), known=KNOWN.get(key, {}))
    for name, row in NETWORKS.items()
    for exporter in (QCDQ, QONNX)
    if (key := f"{name} / {exporter}") not in REFUSED
)
