"""The cost of changing shapes and of data-dependent shapes: `python -m benchmarks.stages`.

Three tables. The first calls a small transformer with 50 different lengths, as in text: compilations and time per
call, with and without `bucket`, and onnxruntime. The second runs a detector (a convolutional network, boxes selected by
NonMaxSuppression) whole and without its tail: the cost of the partition between device and host. The third runs a
data-dependent loop with a scan output.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import onnx2jax
from benchmarks import harness

RNG = np.random.default_rng(0)
LENGTHS = RNG.permutation(np.arange(10, 60))


def make(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A model of opset 21."""
    tensors = [numpy_helper.from_array(v, k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "benchmark", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def info(name: str, dtype: int, shape: list[Any]) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def encoder(layers: int = 4, width: int = 256) -> onnx.ModelProto:
    """ids and mask [1, seq] -> [1, seq, width]: attention and a feed-forward step a layer, padding masked."""
    constants: dict[str, np.ndarray] = {
        "table": RNG.normal(size=(1000, width)).astype(np.float32),
        "scale": np.array(width**-0.5, np.float32),
        "one": np.array(1, np.float32),
        "big": np.array(-1e9, np.float32),
        "axis1": np.array([1]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["h0"]),
        helper.make_node("Sub", ["one", "mask"], ["absent"]),
        helper.make_node("Mul", ["absent", "big"], ["bias2"]),
        helper.make_node("Unsqueeze", ["bias2", "axis1"], ["bias"]),
    ]
    for i in range(layers):
        for name, shape in (("q", (width, width)), ("k", (width, width)), ("v", (width, width)), ("f", (width, width))):
            constants[f"{name}{i}"] = (RNG.normal(size=shape) * width**-0.5).astype(np.float32)
        nodes += [
            *(helper.make_node("MatMul", [f"h{i}", f"{n}{i}"], [f"{n}p{i}"]) for n in "qkv"),
            helper.make_node("Transpose", [f"kp{i}"], [f"kt{i}"], perm=[0, 2, 1]),
            helper.make_node("MatMul", [f"qp{i}", f"kt{i}"], [f"s{i}"]),
            helper.make_node("Mul", [f"s{i}", "scale"], [f"ss{i}"]),
            helper.make_node("Add", [f"ss{i}", "bias"], [f"sb{i}"]),
            helper.make_node("Softmax", [f"sb{i}"], [f"a{i}"]),
            helper.make_node("MatMul", [f"a{i}", f"vp{i}"], [f"o{i}"]),
            helper.make_node("Add", [f"h{i}", f"o{i}"], [f"r{i}"]),
            helper.make_node("MatMul", [f"r{i}", f"f{i}"], [f"m{i}"]),
            helper.make_node("Tanh", [f"m{i}"], [f"t{i}"]),
            helper.make_node("Add", [f"r{i}", f"t{i}"], [f"h{i + 1}" if i + 1 < layers else "y"]),
        ]
    inputs = [info("ids", onnx.TensorProto.INT64, [1, "seq"]), info("mask", onnx.TensorProto.FLOAT, [1, "seq"])]
    return make(nodes, inputs, [info("y", onnx.TensorProto.FLOAT, [1, "seq", width])], constants)


def detector(*, tail: bool) -> onnx.ModelProto:
    """image [1, 3, 320, 320] -> boxes kept, or without the tail all boxes and scores."""
    constants: dict[str, np.ndarray] = {
        "shape": np.array([1, 5, -1]),
        "split": np.array([4, 1]),
        "most": np.array([50]),
        "iou": np.array([0.5], np.float32),
        "least": np.array([1], np.float32),
        "two": np.array([2]),
        "last": np.array([-1]),
    }
    nodes, current = [], "image"
    for i, (a, b) in enumerate(((3, 16), (16, 32), (32, 64), (64, 64), (64, 5))):
        constants[f"w{i}"] = (RNG.normal(size=(b, a, 3, 3)) * (9 * a) ** -0.5).astype(np.float32)
        stride = [2, 2] if i < 4 else [1, 1]
        nodes.append(helper.make_node("Conv", [current, f"w{i}"], [f"c{i}"], pads=[1] * 4, strides=stride))
        current = f"c{i}"
        if i < 4:
            nodes.append(helper.make_node("Relu", [current], [f"r{i}"]))
            current = f"r{i}"
    nodes += [
        helper.make_node("Reshape", [current, "shape"], ["flat"]),
        helper.make_node("Split", ["flat", "split"], ["b", "scores"], axis=1),
        helper.make_node("Transpose", ["b"], ["boxes"], perm=[0, 2, 1]),
    ]
    outputs = [info(n, onnx.TensorProto.FLOAT, [None, None, None]) for n in ("boxes", "scores")]
    if tail:
        nodes += [
            helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], ["kept"]),
            helper.make_node("Gather", ["kept", "two"], ["index"], axis=1),
            helper.make_node("Reshape", ["index", "last"], ["row"]),
            helper.make_node("Gather", ["boxes", "row"], ["y"], axis=1),
        ]
        outputs = [info("y", onnx.TensorProto.FLOAT, [None, None, None])]
    return make(nodes, [info("image", onnx.TensorProto.FLOAT, [1, 3, 320, 320])], outputs, constants)


def session(proto: onnx.ModelProto) -> Callable[[dict[str, Any]], Any]:
    """onnxruntime's call."""
    runtime = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda feeds: runtime.run(None, feeds)


def lengths() -> None:
    """The first table."""
    proto = encoder()
    plain = onnx2jax.convert(proto, warn_after=100)
    bucketed = onnx2jax.convert(proto, bucket={"seq": [16, 32, 64]})
    calls: dict[str, Callable[[dict[str, Any]], Any]] = {
        "onnxruntime": session(proto),
        "onnx2jax": lambda feeds: plain.run(None, feeds),
        "onnx2jax, bucket=[16, 32, 64]": lambda feeds: bucketed.run(None, feeds),
    }
    feeds = [{"ids": RNG.integers(0, 1000, (1, n)), "mask": np.ones((1, n), np.float32)} for n in map(int, LENGTHS)]
    print(f"{'50 calls, 50 lengths':32} {'compiled':>8} {'all 50, s':>10} {'median ms':>10} {'again, ms':>10}")
    firsts = {name: [harness.median(partial(call, f), 1) for f in feeds] for name, call in calls.items()}
    again = [harness.compare({n: partial(c, f) for n, c in calls.items()}, rounds=1, block=0.02) for f in feeds]
    for name, first in firsts.items():
        later = statistics.median(c.timings[name].median for c in again)
        model = {"onnx2jax": plain}.get(name, bucketed)
        compiled = "" if name == "onnxruntime" else str(model.compilations)
        print(f"{name:32} {compiled:>8} {sum(first):10.2f} {statistics.median(first) * 1e3:10.2f} {later * 1e3:10.2f}")


def detection() -> None:
    """The second table."""
    protos = {"whole detector": detector(tail=True), "tail cut off": detector(tail=False)}
    feeds = {"image": RNG.normal(size=(1, 3, 320, 320)).astype(np.float32)}
    models = {name: onnx2jax.convert(proto) for name, proto in protos.items()}
    sessions = {name: session(proto) for name, proto in protos.items()}
    calls: dict[tuple[str, str], harness.Call] = {
        (name, "ours"): partial(model.run, None, feeds) for name, model in models.items()
    }
    calls |= {(name, "ort"): partial(call, feeds) for name, call in sessions.items()}
    compared = harness.compare({" ".join(key): call for key, call in calls.items()}, rounds=7)
    print(f"\n{'a detector, 320 x 320':32} {'call ms':>9} {'ort ms':>9}")
    for name in models:
        ours, other = (compared.timings[f"{name} {k}"].median * 1e3 for k in ("ours", "ort"))
        print(f"{name:32} {ours:9.2f} {other:9.2f}")
    print(f"whole / cut off: {compared.paired('tail cut off ours', 'whole detector ours').median:.2f}")


def stepping(width: int = 64) -> onnx.ModelProto:
    """x [batch, width] -> tanh(x w), repeated as often as the sum of `limits`; sums are a scan output."""
    nodes = [
        helper.make_node("MatMul", ["s", "w"], ["p"]),
        helper.make_node("Tanh", ["p"], ["t"]),
        helper.make_node("Add", ["n", "one"], ["m"]),
        helper.make_node("Less", ["m", "limit"], ["on"]),
        helper.make_node("ReduceSum", ["t"], ["row"], keepdims=0),
    ]
    kind = onnx.TensorProto
    ins = [info("i", kind.INT64, []), info("go", kind.BOOL, []), info("s", kind.FLOAT, [None, None])]
    outs = [info("on", kind.BOOL, []), info("t", kind.FLOAT, [None, None])]
    scalars = [[info(name, kind.FLOAT, [])] for name in ("n", "m", "row")]
    body = helper.make_graph(nodes, "body", ins + scalars[0], outs + scalars[1] + scalars[2])
    steps = [
        helper.make_node("ReduceSum", ["limits"], ["limit"], keepdims=0),
        helper.make_node("Loop", ["", "true", "x", "zero"], ["last", "count", "rows"], body=body),
    ]
    constants = {"w": (RNG.normal(size=(width, width)) * width**-0.5).astype(np.float32), "true": np.array(True)}
    constants |= {"one": np.array(1, np.float32), "zero": np.array(0, np.float32)}
    inputs = [info("x", kind.FLOAT, ["batch", width]), info("limits", kind.FLOAT, [1, 40])]
    return make(steps, inputs, [info("last", kind.FLOAT, [None, None]), info("rows", kind.FLOAT, [None])], constants)


def trips() -> None:
    """The third table."""
    proto = stepping()
    model, other = onnx2jax.convert(proto), session(proto)
    print(f"\n{'a loop that data ends, trips':32} {'call ms':>9} {'ort ms':>9}")
    for n in (10, 100, 1000, 5000):
        feeds = {"x": np.ones((8, 64), np.float32), "limits": n * np.eye(1, 40, dtype=np.float32)}
        calls = {"ours": partial(model.run, None, feeds), "ort": partial(other, feeds)}
        compared = harness.compare(calls, rounds=5)
        ours, theirs = (compared.timings[name].median * 1e3 for name in calls)
        print(f"{n:<32} {ours:9.2f} {theirs:9.2f}")


if __name__ == "__main__":
    onnxruntime.set_default_logger_severity(3)
    lengths()
    detection()
    trips()
