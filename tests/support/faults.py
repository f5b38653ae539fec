"""Plants faults in ONNX files: each changes one node in a way that bugs of importers do."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import onnx2jax
from onnx2jax import Model
from onnx2jax.model.reports.comparison import compared

SWAPS: Final = {
    **{"Add": "Sub", "Sub": "Add", "Mul": "Add", "Div": "Mul", "Pow": "Mul", "Max": "Min", "Min": "Max"},
    **{"Sigmoid": "HardSigmoid", "Tanh": "Softsign", "Relu": "Elu", "LeakyRelu": "Relu", "Softplus": "Relu"},
    **{"HardSigmoid": "Sigmoid", "Sqrt": "Abs", "Exp": "Softplus", "Log": "Abs", "Abs": "Neg", "Neg": "Abs"},
    **{"Sin": "Cos", "Cos": "Sin", "Erf": "Tanh", "Reciprocal": "Neg", "Floor": "Ceil", "Ceil": "Floor"},
    **{"Round": "Floor", "Greater": "Less", "Less": "Greater", "And": "Or", "Or": "And", "ArgMax": "ArgMin"},
    **{"ReduceMean": "ReduceSum", "ReduceSum": "ReduceMean", "ReduceMax": "ReduceMin", "ReduceMin": "ReduceMax"},
    **{"Softmax": "LogSoftmax", "LogSoftmax": "Softmax", "GlobalAveragePool": "GlobalMaxPool"},
}
KEPT: Final = {"LeakyRelu", "HardSigmoid"}
"""Of these the attributes go with the operator."""
FACTORS: Final = {"epsilon": 100.0, "alpha": 1.25, "beta": 1.25, "bias": 1.25}
OTHERS: Final = {
    "auto_pad": {"SAME_UPPER": "SAME_LOWER", "SAME_LOWER": "SAME_UPPER"},
    "coordinate_transformation_mode": {"half_pixel": "asymmetric", "asymmetric": "half_pixel"},
    "direction": {"forward": "reverse", "reverse": "forward"},
    "mode": {"nearest": "linear", "linear": "nearest", "constant": "edge", "reflect": "edge"},
    "nearest_mode": {"floor": "ceil", "round_prefer_floor": "ceil"},
}
WEIGHTED: Final = (
    "Conv",
    "MatMul",
    "Gemm",
    "ConvTranspose",
    "LSTM",
    "GRU",
    "Mul",
    "Add",
    "BatchNormalization",
    "Gather",
)
INTEGER: Final = (
    "ConvInteger",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
)
"""Products of integers, among whose operands are matrices and scales."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, at which node, and the values that the node computes."""

    what: str
    values: tuple[str, ...]
    index: int
    change: Callable[[Any, Any], None]

    def planted(self, right: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of the file with the fault."""
        wrong = onnx.ModelProto.FromString(right.SerializeToString())
        self.change(wrong.graph.node[self.index], wrong.graph)
        return wrong


def faults(model: onnx.ModelProto) -> Iterator[Fault]:
    """Faults of the nodes of the main graph in order; some have no effect (see ``effective``)."""
    weights = {t.name: t for t in model.graph.initializer}
    for i, node in enumerate(model.graph.node):
        for what, change in (*_operators(node), *_attributes(node), *_weights(node, weights)):
            yield Fault(f"{node.op_type}: {what}", tuple(filter(None, node.output)), i, change)


Change = tuple[str, Callable[[Any, Any], None]]
"""What is changed, and how: a function of the copies of the node and of its graph."""


def _operators(node: Any) -> Iterator[Change]:
    if node.domain in ("", "ai.onnx") and node.op_type in SWAPS:

        def swap(copy: Any, _graph: Any) -> None:
            copy.op_type = SWAPS[copy.op_type]
            if node.op_type in KEPT:
                copy.ClearField("attribute")

        yield f"computes {SWAPS[node.op_type]}", swap
    if node.op_type in ("Sub", "Div", "Concat", "MatMul", "Greater", "Less", "Pow") and len(node.input) == 2:

        def exchange(copy: Any, _graph: Any) -> None:
            copy.input[:] = reversed(list(copy.input))

        yield "its operands exchanged", exchange


def _attributes(node: Any) -> Iterator[Change]:
    for at, attribute in enumerate(node.attribute):
        name, value = attribute.name, onnx.helper.get_attribute_value(attribute)
        other: Any = None
        if name in FACTORS and isinstance(value, float):
            other = value * FACTORS[name]
        elif name in OTHERS:
            other = OTHERS[name].get(value.decode())
        elif name == "axis" and node.op_type in ("Softmax", "LogSoftmax", "ArgMax", "Concat", "Gather", "CumSum"):
            other = value - 1 if value > 0 else 1 if value == 0 else -2
        elif name == "pads" and any(value or ()):
            half = len(value) // 2
            axis = next(axis for axis in range(half) if value[axis] or value[axis + half])
            other = list(value)
            step = 1 if value[axis] else -1
            other[axis], other[axis + half] = value[axis] - step, value[axis + half] + step
        elif name == "perm" and value:
            other = [*value[:-2], value[-1], value[-2]]
        elif name in ("count_include_pad", "linear_before_reset", "transB", "transA", "exclusive", "keepdims"):
            other = 1 - value
        if other is not None:
            changed = onnx.helper.make_attribute(name, other)

            def assign(copy: Any, _graph: Any, at: int = at, changed: Any = changed) -> None:
                copy.attribute[at].CopyFrom(changed)

            yield f"{name} is {other}", assign


def _weights(node: Any, weights: Mapping[str, Any]) -> Iterator[Change]:
    held = [(i, n) for i, n in enumerate(node.input) if n in weights]
    for i, name in held if node.op_type in INTEGER else held[:2]:
        value = numpy_helper.to_array(weights[name])
        changes: dict[str, Any] = {}
        if value.dtype.kind == "f" and node.op_type in WEIGHTED:
            spoilt = value.copy()
            spoilt.flat[value.size // 2] += 1 + abs(spoilt.flat[value.size // 2])
            changes = {"2 % larger": value * value.dtype.type(1.02), "with one wrong number": spoilt}
            if value.ndim > 1 and value.shape[0] > 1:
                changes["rolled"] = np.roll(value, 1, 0)
        elif node.op_type in INTEGER:
            if value.dtype.kind == "f":
                changes = {"2 % larger": value * value.dtype.type(1.02)}
            elif value.ndim > 1 and value.shape[-1] > 1:
                spoilt = value.copy()
                spoilt.flat[value.size // 2] ^= 64
                changes = {"rolled": np.roll(value, 1, -1), "with one wrong number": spoilt}
        elif "Linear" in node.op_type or node.op_type.startswith("QL"):
            large = value.size == 1 and i in (1, 2)
            if value.dtype.kind == "f":
                changes = {"5 % larger": value * value.dtype.type(1.05)}
            elif large and value.dtype in (np.uint8, np.int8):
                changes = {"one step off": np.where(value < 100, value + 1, value - 1).astype(value.dtype)}
        for what, other in changes.items():

            def replace(copy: Any, graph: Any, i: int = i, name: str = name, other: Any = other) -> None:
                copy.input[i] = f"{name}/wrong"
                graph.initializer.append(numpy_helper.from_array(np.asarray(other), f"{name}/wrong"))

            yield f"input {i} {what}", replace


def node_outputs(model: onnx.ModelProto, values: tuple[str, ...], feeds: Mapping[str, Any]) -> list[Any]:
    """What onnxruntime computes for values of nodes.

    Raises:
        Exception: it does not take the model.
    """
    asked = onnx.ModelProto.FromString(model.SerializeToString())
    del asked.graph.output[:]
    asked.graph.output.extend(onnx.ValueInfoProto(name=n) for n in values)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(asked.SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = {v.name for v in session.get_inputs()}
    return list(session.run(None, {n: v for n, v in feeds.items() if n in known}))


def effective(fault: Fault, right: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Whether the fault changes the node's results, and no shape, in onnxruntime."""
    try:
        model = fault.planted(right)
        wrong = node_outputs(model, fault.values, feeds)
        node_outputs(model, tuple(v.name for v in model.graph.output), feeds)
    except Exception:
        return False
    pairs = zip(fault.values, wrong, node_outputs(right, fault.values, feeds), strict=True)
    found = [compared(n, a, b) for n, a, b in pairs]
    return any(not c.ok and c.relative is not None and c.relative > 2e-3 for c in found)


def wrong_model(fault: Fault, right: onnx.ModelProto) -> Model:
    """The model with the fault, which takes the right file for its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        onnx.save(fault.planted(right), path)
        model = onnx2jax.convert(path)
    return Model(dataclasses.replace(model.spec, origin=onnx2jax.convert(right).origin))
