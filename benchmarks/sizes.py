"""Files of growing size: many nodes, and many bytes of weights. How they are made; ``groups`` measures them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from .net import Net
from .networks.network import OPSET, Network

WIDTH: Final = 4096
"""Of a layer whose weight takes 64 MB."""


def nodes(folder: Path, count: int) -> Network:
    """A chain of products, softmax, reductions and elementwise operators over 16 rows of 32 numbers."""
    net = Net(OPSET, ir=8)
    x = net.input("x", [16, 32])
    while len(net.nodes) < count:
        y = net("Tanh", net("Add", net("MatMul", x, net.weight(32, 32)), net.weight(32)))
        mean = net("ReduceMean", y, axes=[-1], keepdims=1)
        y = net("Mul", net("Softmax", net("Sub", y, mean), axis=-1), y)
        x = net("Div", net("Add", x, y), net("Sqrt", net("Add", net("Mul", y, y), net.weight(1, around=2.0))))
    return Network(f"{count:,} nodes", net.save(folder, x), {"x": np.ones((16, 32), np.float32)})


def weights(folder: Path, layers: int) -> Network:
    """Linear layers of one row, whose weights lie in a file beside the model, written one by one."""
    rng = np.random.default_rng(0)
    block = (rng.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5).tobytes()
    tensors, steps = [], []
    with (folder / "weights").open("wb") as file:
        for i in range(layers):
            tensor = TensorProto(name=f"w{i}", dims=(WIDTH, WIDTH), data_type=TensorProto.FLOAT)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": "weights", "offset": file.tell(), "length": len(block)}.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(block)
            tensors.append(tensor)
            steps.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]))
    x, y = (helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [1, WIDTH]) for i in (0, layers))
    graph = helper.make_graph(steps, "layers", [x], [y], tensors)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return Network(f"{layers * len(block) / 1e9:.1f} GB", path, {"x0": np.ones((1, WIDTH), np.float32)})


SIZES: Final[dict[str, Callable[[Path], Network]]] = {
    **{f"{count:,} nodes": partial(nodes, count=count) for count in (1000, 5000, 20_000, 50_000)},
    **{f"{layers * 4 * WIDTH**2 / 1e9:.1f} GB of weights": partial(weights, layers=layers) for layers in (8, 32, 120)},
}
