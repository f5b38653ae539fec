"""Small models for tests, made with onnx.helper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

NP = dict[str, np.ndarray]


def value(name: str, dtype: Any, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: NP | None = None,
    opset: int = 21,
    opsets: dict[str, int] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    ir_version: int = 10,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(v, k) for k, v in (initializers or {}).items()]
    graph = helper.make_graph(nodes, "main", inputs, outputs, tensors)
    imports = [helper.make_opsetid(d, v) for d, v in ({"": opset} | (opsets or {})).items()]
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=ir_version)


def text_model(text: str, **initializers: Any) -> onnx.ModelProto:
    """A model in ONNX's text form, at opset 21; functions of the domain ``l``. Initializers by name."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "l" : 1]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in initializers.items())
    return proto


def one_node(op_type: str, inputs: dict[str, tuple[Any, Any]], **attributes: Any) -> onnx.ModelProto:
    """A model of one node with output y of unknown rank; inputs are name -> (dtype, shape)."""
    node = helper.make_node(op_type, list(inputs), ["y"], **attributes)
    dtype = next(iter(inputs.values()))[0]
    return model([node], [value(n, *t) for n, t in inputs.items()], [value("y", dtype, None)])


def mlp() -> onnx.ModelProto:
    """x [batch, 4] -> y [batch, 2]: Gemm, Relu, MatMul, Add, with weights as initializers."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(size=(4, 8)).astype(np.float32),
        "b1": rng.normal(size=8).astype(np.float32),
        "w2": rng.normal(size=(8, 2)).astype(np.float32),
        "b2": rng.normal(size=2).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="hidden"),
        helper.make_node("Relu", ["h"], ["r"], name="act"),
        helper.make_node("MatMul", ["r", "w2"], ["m"], name="head"),
        helper.make_node("Add", ["m", "b2"], ["y"], name="bias"),
    ]
    ends = [value("x", np.float32, ["batch", 4])], [value("y", np.float32, ["batch", 2])]
    return model(nodes, *ends, weights)


def cut_in_the_middle() -> onnx.ModelProto:
    """x [n, 4] -> found [k], y [n, 4]: products with w and v, and between them what NonZero finds, on the host."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("NonZero", ["h"], ["places"]),
        helper.make_node("Transpose", ["places"], ["rows"]),
        helper.make_node("GatherND", ["h", "rows"], ["found"]),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]
    v = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    outputs = [value("found", np.float32, ["k"]), value("y", np.float32, ["n", 4])]
    weights = {"w": np.diag([1, 0, 1, 0]).astype(np.float32), "v": v}
    return model(nodes, [value("x", np.float32, ["n", 4])], outputs, weights)


def mlp_reference(params: Any, x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.maximum(x @ params["w1"] + params["b1"], 0) @ params["w2"] + params["b2"]
