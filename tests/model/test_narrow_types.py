"""Values of 2, 4 and 6 bits: what moves them does so on every way of calling, whatever they come from.

jaxlib 0.10 has two traps: a compiled program rejects packed arguments, of fewer than 8 bits, and a constant of 6 bits
ends the process.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx2jax
from onnx2jax.errors import KnownValueError
from onnx2jax.proto.messages import TensorProto
from onnx2jax.proto.tensors import from_array
from onnx2jax.proto.types import ELEMENT_TYPES, HOST_ONLY, to_code

NARROW = [row.dtype for row in ELEMENT_TYPES.values() if 0 < row.bits < 8]
X = np.arange(3, dtype=np.float32)
MOVED = {
    "same": lambda w: w,
    "reshaped": lambda w: w.reshape(-1),
    "flattened": lambda w: w.reshape(1, 6),
    "transposed": lambda w: w.T,
    "unsqueezed": lambda w: w[None],
    "squeezed": lambda w: w,
    "padded": lambda w: np.pad(w, ((0, 1), (1, 0))),
    "scattered": lambda w: w[None],
    "chosen": lambda w: w,
    "wide": lambda w: w,
}


def _tensor(array: np.ndarray, name: str = "") -> onnx.TensorProto:
    return onnx.TensorProto.FromString(TensorProto(**from_array(array, name)).SerializeToString())


def _model(w: np.ndarray, how: str) -> onnx.ModelProto:
    """Every operator that moves such values, on one that is an input, an initializer or a Constant."""

    def value(name: str, shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, to_code(w.dtype), shape)

    integers = {"rows": [-1], "pads": [0, 1, 1, 0], "first": [0]}
    held = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in integers.items()]
    branch = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["inside"])], "branch", [], [value("inside", [2, 3])]
    )
    nodes = [
        helper.make_node("Identity", ["w"], ["same"]),
        helper.make_node("Reshape", ["w", "rows"], ["reshaped"]),
        helper.make_node("Flatten", ["w"], ["flattened"], axis=0),
        helper.make_node("Transpose", ["w"], ["transposed"]),
        helper.make_node("Unsqueeze", ["w", "first"], ["unsqueezed"]),
        helper.make_node("Squeeze", ["unsqueezed", "first"], ["squeezed"]),
        helper.make_node("Pad", ["w", "pads"], ["padded"]),
        helper.make_node("TensorScatter", ["unsqueezed", "unsqueezed"], ["scattered"], axis=1),
        helper.make_node("If", ["c"], ["chosen"], then_branch=branch, else_branch=branch),
        helper.make_node("Cast", ["w"], ["wide"], to=1),
    ]
    if w.dtype in HOST_ONLY:  # the schemas let no other operator take them
        nodes = nodes[-1:]
    if w.dtype.name in (
        "int2",
        "uint2",
    ):  # nor these TensorScatter; XLA's older emitters, of conftest.py, abort at Pad
        older = "use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
        nodes = [n for n in nodes if n.op_type not in ("TensorScatter", "Pad" if older else "")]
    outputs = [onnx.ValueInfoProto(name=n.output[0]) for n in nodes] + [value("w", [2, 3])] * (how != "input")
    if how == "Constant":
        nodes = [helper.make_node("Constant", [], ["w"], value=_tensor(w)), *nodes]
    inputs = [helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])] + [value("w", [2, 3])] * (how == "input")
    graph = helper.make_graph(nodes, "moves", inputs, outputs, held + [_tensor(w, "w")] * (how == "initializer"))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=13)


@pytest.mark.parametrize("how", ["input", "initializer", "Constant"])
@pytest.mark.parametrize("dtype", [pytest.param(d, id=str(d)) for d in NARROW])
def test_narrow_types_move_alike_on_every_way_of_calling(dtype: np.dtype, how: str) -> None:
    w = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    proto = _model(w, how)
    feeds = {"c": np.array(True)} | ({"w": w} if how == "input" else {})
    expected = {n: move(w.astype(np.float32)) for n, move in MOVED.items()} | {"w": w.astype(np.float32)}
    model = onnx2jax.convert(proto)
    names = [v.name for v in model.outputs]

    def check(results: Any) -> None:
        for name, result in zip(names, results if len(names) > 1 else [results], strict=True):
            assert result.dtype == (np.float32 if name == "wide" else dtype), name
            np.testing.assert_array_equal(np.asarray(result).astype(np.float32), expected[name], name)

    results = model.run(None, feeds)
    check(results if len(names) > 1 else results[0])
    check(model(feeds))
    check(onnx2jax.convert(proto, background_compile=True)(feeds))
    jitted = jax.jit(lambda feeds: model.apply(model.params, feeds))
    if dtype in HOST_ONLY and (how != "input" or "w" in names):
        with pytest.raises(KnownValueError, match=r"output 'w' is float6_.*call the model outside jit.*float8_e4m3fn"):
            jitted(feeds)
    elif dtype in HOST_ONLY:
        with pytest.raises(KnownValueError, match=r"'w' holds float6_.*static=\{'w': its value\}.*float8_e4m3fn has"):
            jitted(feeds)
    elif dtype not in HOST_ONLY:
        check(jitted(feeds))
