"""A network written node by node, with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Dims = Sequence[int | str | None]


class Net:
    """Nodes, weights and channels so far; ``net("Relu", x)`` adds a node and returns its output's name."""

    def __init__(
        self, opset: int, *, ir: int | None = None, ml: int = 0, seed: int = 0, as_inputs: bool = True
    ) -> None:
        """``as_inputs``: weights are listed as inputs too, as every file did before IR version 4."""
        self.opset, self.ml, self.as_inputs = opset, ml, as_inputs
        self.ir = ir or {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7}[opset]
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.channels: dict[str, int] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self._count = 0

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    def input(self, name: str, dims: Dims, dtype: Any = np.float32) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims))
        if len(dims) == 4 and isinstance(dims[1], int):
            self.channels[name] = dims[1]
        return name

    def __call__(self, op: str, *inputs: str, n: int = 1, domain: str = "", **attributes: Any) -> Any:
        """A node: its output's name, or their names where ``n`` is more than one."""
        outputs = [self.fresh(op) for _ in range(n)]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        if inputs and inputs[0] in self.channels:
            self.channels[outputs[0]] = self.channels[inputs[0]]
        return outputs[0] if n == 1 else outputs

    def weight(self, *shape: int, scale: float | None = None, around: float = 0.0) -> str:
        """Normal numbers: by default so small that a product with them keeps the size of its other operand."""
        fan = int(np.prod(shape[1:])) if len(shape) > 1 else 100
        size = (2 / fan) ** 0.5 if scale is None else scale
        return self.array((around + size * self.rng.standard_normal(shape)).astype(np.float32), "W")

    def array(self, value: Any, stem: str = "C", dtype: Any = None) -> str:
        name = self.fresh(stem)
        self.weights[name] = np.asarray(value, dtype)
        return name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A Constant node, as exporters wrote shapes and axes."""
        return self("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int = 3,
        stride: int = 1,
        *,
        group: int = 1,
        bias: bool = True,
        same: bool = False,
        transposed: bool = False,
        **attributes: Any,
    ) -> str:
        """A convolution of a square kernel, padded so that the extent stays (divided by the stride)."""
        before = self.channels[x]
        shape = (before, channels // group) if transposed else (channels, before // group)
        operands = [x, self.weight(*shape, kernel, kernel)] + ([self.weight(channels)] if bias else [])
        where = {"auto_pad": "SAME_UPPER"} if same else {"pads": [kernel // 2] * 4}
        given = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "group": group, **where, **attributes}
        y = str(self("ConvTranspose" if transposed else "Conv", *operands, **given))
        self.channels[y] = channels
        return y

    def norm(self, x: str, **attributes: Any) -> str:
        c = self.channels[x]
        variance = self.array(self.rng.uniform(0.5, 1.5, c).astype(np.float32), "W")
        operands = (self.weight(c, around=1), self.weight(c), self.weight(c), variance)
        return str(self("BatchNormalization", x, *operands, epsilon=1e-5, **attributes))

    def block(self, x: str, channels: int, kernel: int = 3, stride: int = 1, *, act: str = "Relu", **more: Any) -> str:
        """Convolution, normalisation, activation."""
        y = self.norm(self.conv(x, channels, kernel, stride, bias=False, **more))
        slope: dict[str, Any] = {"alpha": 0.1} if act == "LeakyRelu" else {}
        return y if act == "" else str(self(act, y, **slope))

    def concat(self, *xs: str, axis: int = 1) -> str:
        y = str(self("Concat", *xs, axis=axis))
        self.channels[y] = sum(self.channels.get(x, 0) for x in xs)
        return y

    def pool(self, x: str, kernel: int = 2, stride: int = 2, *, kind: str = "MaxPool", **attributes: Any) -> str:
        return str(self(kind, x, kernel_shape=[kernel] * 2, strides=[stride] * 2, **attributes))

    def dense(self, x: str, before: int, after: int) -> str:
        return str(self("Gemm", x, self.weight(after, before), self.weight(after), transB=1))

    def graph(self, outputs: Mapping[str, Any], name: str = "graph") -> onnx.GraphProto:
        """The graph; ``outputs`` are names with their dtypes."""
        results = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(d)), None)
            for n, d in outputs.items()
        ]
        tensors = [numpy_helper.from_array(v, n) for n, v in self.weights.items()]
        inputs = [*self.inputs]
        if self.ir < 4 and self.as_inputs:
            inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
        return helper.make_graph(self.nodes, name, inputs, results, tensors)

    def save(self, folder: Path, *outputs: str, **dtypes: Any) -> Path:
        """Write model.onnx into a folder, and return its path.

        Outputs are float32 unless ``dtypes`` says otherwise; domains outside of ONNX have version 1.
        """
        graph = self.graph({**dict.fromkeys(outputs, np.float32), **dtypes})
        versions = dict.fromkeys(sorted({n.domain for n in self.nodes}), 1) | {"": self.opset, "ai.onnx.ml": self.ml}
        opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items() if version]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=self.ir)
        path = folder / "model.onnx"
        onnx.save(model, path)
        return path

    def image(self, size: int = 64, batch: int | str = 1, channels: int = 3) -> str:
        return self.input("data", [batch, channels, size, size])

    def images(self, *shapes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
        return [{"data": self.rng.standard_normal(s).astype(np.float32)} for s in shapes]
