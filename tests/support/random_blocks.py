"""The blocks of random networks: a few nodes each, as exporters write them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from .random_network import FEWEST, MOST, OPSETS, SHAPES, SPECIAL, TINY, Network, RejectedBlock, block

UNARY = [
    "Relu",
    "Sigmoid",
    "Tanh",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Softplus",
    "Softsign",
    "HardSigmoid",
    "HardSwish",
    "Erf",
    "Abs",
    "Neg",
    "Sin",
    "Identity",
    "Atan",
    "ThresholdedRelu",
    "Celu",
    "Cos",
    "Gelu",
    "Mish",
    "Sign",
    "Floor",
    "Round",
]
SINCE = {"HardSwish": 14, "Gelu": 20, "Mish": 18}
WIDEST = 12
"""Channels of a convolution."""
DISCRETE = ("Sign", "Floor", "Round", "ThresholdedRelu")


def _axes(net: Network, op: str, x: str, axes: list[int], keepdims: int) -> str:
    """A reduction, whose axes are an attribute before opset 18."""
    if net.opset >= 18 or op == "ReduceSum":
        return str(net.add(op, x, net.ints(*axes), keepdims=keepdims))
    return str(net.add(op, x, axes=axes, keepdims=keepdims))


# --- of any rank


@block(2, 3, 4)
def activation(net: Network, x: str) -> str:
    op = net.rng.choice([u for u in UNARY if SINCE.get(u, 0) <= net.opset])
    if op in DISCRETE:
        net.round()
    return str(net.add(op, x))


@block(2, 3, 4)
def gelu_by_erf(net: Network, x: str) -> str:
    erf = net.add("Erf", net.add("Div", x, net.tensor(2**0.5)))
    return str(net.add("Mul", net.add("Mul", x, net.add("Add", erf, net.tensor(1))), net.tensor(0.5)))


@block(2, 3, 4)
def swish(net: Network, x: str) -> str:
    return str(net.add("Mul", x, net.add("Sigmoid", x)))


@block(2, 3, 4)
def clip(net: Network, x: str) -> str:
    low, high = net.rng.choice([("", "six"), ("zero", "six"), ("low", ""), ("low", "six")])
    ends = {"": "", "zero": 0, "six": 0.6, "low": -0.4}
    return str(net.add("Clip", x, *("" if e == "" else net.tensor(ends[e]) for e in (low, high))))


@block(2, 3, 4, often=3)
def residual(net: Network, x: str) -> str:
    return str(net.add(net.rng.choice(["Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean"]), x, net.like(x)))


@block(2, 3, 4)
def with_constant(net: Network, x: str) -> str:
    shape = list(net.shape(x)[1:])
    while shape and net.rng.random() < 0.4:
        shape.pop(0)
    shape = [e if net.rng.random() < 0.7 else 1 for e in shape]
    pair = [x, constant := net.tensor(net.numbers.uniform(0.5, 1.5, shape))]
    net.rng.shuffle(pair)
    op = net.rng.choice(["Add", "Sub", "Mul", "Max", "Div"])
    return str(net.add(op, *([x, constant] if op == "Div" else pair)))


@block(2, 3, 4)
def selection(net: Network, x: str) -> str:
    """Continuous at the border of its condition."""
    zero = net.tensor(0)
    condition = net.add(net.rng.choice(["Greater", "GreaterOrEqual"]), x, zero)
    return str(net.add("Where", condition, x, net.add("Mul", x, net.tensor(0.25))))


@block(2, 3, 4)
def power(net: Network, x: str) -> str:
    exponent = net.rng.choice([2, 3, 1])
    kind = net.rng.choice([np.float32, np.int64])
    return str(net.add("Pow", x, net.tensor(exponent, kind)))


@block(2, 3, 4)
def through_float16(net: Network, x: str) -> str:
    net.round()
    half = net.add("Cast", x, to=TensorProto.FLOAT16)
    return str(net.add("Cast", net.add(net.rng.choice(["Relu", "Sigmoid", "Neg"]), half), to=TensorProto.FLOAT))


@block(2, 3, 4, often=2)
def fake_quantised(net: Network, x: str) -> str:
    """QuantizeLinear and DequantizeLinear, per tensor or per channel."""
    net.round()
    channels = net.shape(x)[1]
    per_channel = net.rng.random() < 0.3
    top = float(np.abs(net.values[x]).max()) or 1.0
    steps = top / 127 * net.numbers.uniform(0.8, 1.2, (channels,) if per_channel else ())
    kind, zero = net.rng.choice([(np.int8, 0), (np.uint8, 128), (np.int8, 5)])
    scale, zeros = net.tensor(steps), net.tensor(np.full(np.shape(steps), zero), kind)
    axis = {"axis": 1} if per_channel else {}
    return _quantised(net, x, scale, zeros, **axis)


@block(2, 3, 4)
def batch_sized_reshape(net: Network, x: str) -> str:
    """The shape arithmetic of PyTorch's exporters: view(x.size(0), ...)."""
    rows = net.add("Gather", net.add("Shape", x), net.tensor(0, np.int64), axis=0)
    rest = net.shape(x)[1:]
    size = int(np.prod(rest))
    factor = net.rng.choice([k for k in range(1, size + 1) if size % k == 0 and k <= 48])
    target = net.rng.choice([[size], [factor, size // factor], [-1, factor]])
    shape = net.add("Concat", net.add("Unsqueeze", rows, net.ints(0)), net.ints(*target), axis=0)
    return str(net.add("Reshape", x, shape))


@block(2, 3, 4)
def softmax(net: Network, x: str) -> str:
    axis = net.rng.choice(range(1, net.values[x].ndim))
    return str(net.add(net.rng.choice(["Softmax", "LogSoftmax", "Softmax"]), x, axis=axis - net.values[x].ndim))


def _quantised(net: Network, x: str, step: str, zero: str, **axis: int) -> str:
    return str(net.add("DequantizeLinear", net.add("QuantizeLinear", x, step, zero, **axis), step, zero, **axis))


def _value(name: str, kind: int = TensorProto.FLOAT, shape: list[int] | None = None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


@block(2, 3, 4)
def conditional(net: Network, x: str) -> str:
    arms: list[GraphProto] = []
    for op in net.rng.sample(["Relu", "Tanh", "Neg", "Sigmoid"], 2):
        name = f"{op.lower()}_{len(net.nodes)}"
        arms.append(helper.make_graph([helper.make_node(op, [x], [name])], name, [], [_value(name)]))
    condition = net.tensor(net.rng.choice([True, False]), np.bool_)
    return str(net.add("If", condition, captured=[x], then_branch=arms[0], else_branch=arms[1]))


@block(2, 3, 4)
def loop(net: Network, x: str) -> str:
    """A few steps of a recurrence that adds an outer value."""
    at = len(net.nodes)
    step, going, still, state = (f"{n}_{at}" for n in ("step", "going", "still", "state"))
    halved, squashed, outer = f"halved_{at}", f"squashed_{at}", net.like(x)
    nodes: list[NodeProto] = [
        helper.make_node("Identity", [going], [still]),
        helper.make_node("Sub", [state, outer], [halved]),
        helper.make_node("Tanh", [halved], [squashed]),
    ]
    ends = [_value(step, TensorProto.INT64, []), _value(going, TensorProto.BOOL, []), _value(state)]
    body = helper.make_graph(nodes, "body", ends, [_value(still, TensorProto.BOOL, []), _value(squashed)])
    trips, condition = net.tensor(net.rng.randint(1, 4), np.int64), net.tensor(True, np.bool_)
    return str(net.add("Loop", trips, condition, x, captured=[outer], body=body))


@block(3, 4)
def slices(net: Network, x: str) -> str:
    axis = net.rng.choice(range(1, net.values[x].ndim))
    extent = net.shape(x)[axis]
    start, end, step = net.rng.choice([(1, extent, 1), (0, -1, 1), (0, extent, 2), (-1, -extent - 1, -1), (1, 99, 2)])
    return str(net.add("Slice", x, net.ints(start), net.ints(end), net.ints(axis), net.ints(step)))


@block(3, 4)
def transposed(net: Network, x: str) -> str:
    rest = list(range(1, net.values[x].ndim))
    net.rng.shuffle(rest)
    return str(net.add("Transpose", x, perm=[0, *rest]))


@block(2, 3, 4)
def split_and_gated(net: Network, x: str) -> str:
    axis = net.rng.choice([a for a in range(1, net.values[x].ndim) if net.shape(x)[a] % 2 == 0] or [0])
    if not axis:
        raise RejectedBlock("odd extents")
    half = net.shape(x)[axis] // 2
    a, b = net.add("Split", x, net.ints(half, half), n=2, axis=axis)
    if net.rng.random() < 0.5:
        return str(net.add("Mul", a, net.add("Sigmoid", b)))
    return str(net.add("Concat", net.add("Tanh", b), a, axis=axis))


@block(2, 3, 4)
def concatenated(net: Network, x: str) -> str:
    return str(net.add("Concat", x, net.like(x), axis=net.rng.choice(range(1, net.values[x].ndim))))


@block(2, 3, 4)
def reduced(net: Network, x: str) -> str:
    op = net.rng.choice(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2", "ReduceLogSumExp"])
    axes = net.rng.sample(range(1, net.values[x].ndim), net.rng.randint(1, net.values[x].ndim - 1))
    most = _axes(net, op, x, sorted(axes), 1)
    return str(net.add(net.rng.choice(["Sub", "Add"]), x, most))


@block(3, 4)
def reduced_away(net: Network, x: str) -> str:
    op = net.rng.choice(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare"])
    ndim = net.values[x].ndim
    return _axes(net, op, x, net.rng.choice([[ndim - 1], [1], list(range(2, ndim))]), 0)


@block(3, 4)
def gathered(net: Network, x: str) -> str:
    axis = net.rng.choice(range(1, net.values[x].ndim))
    extent = net.shape(x)[axis]
    indices = net.numbers.integers(-extent, extent, net.rng.randint(2, 6))
    return str(net.add("Gather", x, net.tensor(indices, np.int64), axis=axis))


@block(2, 3)
def cumulative(net: Network, x: str) -> str:
    axis = net.tensor(net.values[x].ndim - 1, np.int64)
    flags = {"exclusive": net.rng.randrange(2), "reverse": net.rng.randrange(2)}
    return str(net.add("CumSum", net.add("Mul", x, net.tensor(0.2)), axis, **flags))


@block(2, 3, 4)
def largest(net: Network, x: str) -> str:
    extent = net.shape(x)[-1]
    values, _ = net.add("TopK", x, net.ints(max(1, extent // 2)), n=2, axis=-1, largest=net.rng.randrange(2))
    return str(values)


# --- images


def _window(net: Network, x: str, sizes: tuple[int, ...] = (1, 2, 3, 5)) -> dict[str, Any]:
    kernel = [net.rng.choice(sizes) for _ in net.shape(x)[2:]]
    if net.rng.random() < 0.6:
        kernel = [kernel[0]] * len(kernel)
    given: dict[str, Any] = {"kernel_shape": kernel}
    if net.rng.random() < 0.5:
        given["strides"] = [net.rng.choice([1, 1, 2, 3]) for _ in kernel]
    match net.rng.randrange(5):
        case 0 | 1:
            given["pads"] = [(k - 1) // 2 for k in kernel] * 2
        case 2:
            given["pads"] = [net.rng.randrange(k) for k in kernel * 2]
        case 3:
            given["auto_pad"] = net.rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    if net.rng.random() < 0.2:
        given["dilations"] = [net.rng.choice([1, 2]) for _ in kernel]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, given.get("dilations", [1] * len(kernel)), strict=True)]
    if any(r > e for r, e in zip(reach, net.shape(x)[2:], strict=True)):
        # onnxruntime's division rounds towards zero, and it computes an element where the specification has none
        raise RejectedBlock("the window does not fit")
    return given


@block(3, 4, often=6)
def convolution(net: Network, x: str) -> str:
    channels = net.shape(x)[1]
    given = _window(net, x)
    group = net.rng.choice([1, 1, 1, channels, *(g for g in (2, 3) if channels % g == 0)])
    width = group * net.rng.randint(1, max(1, WIDEST // group))
    taps = int(np.prod(given["kernel_shape"])) * channels // group
    weight = net.weight(width, channels // group, *given["kernel_shape"], fan_in=taps)
    bias = [net.weight(width, fan_in=4)] if net.rng.random() < 0.5 else []
    result = net.add("Conv", x, weight, *bias, group=group, **given)
    if net.rng.random() < 0.4:
        result = batch_norm(net, result)
    return str(net.add("Relu", result)) if net.rng.random() < 0.4 else str(result)


@block(3, 4)
def transposed_convolution(net: Network, x: str) -> str:
    channels = net.shape(x)[1]
    kernel = [net.rng.choice([2, 3]) for _ in net.shape(x)[2:]]
    group = net.rng.choice([1, 1, channels])
    width = net.rng.randint(1, 4) if group == 1 else 1
    given: dict[str, Any] = {"strides": [net.rng.choice([1, 2]) for _ in kernel]}
    if net.rng.random() < 0.4:
        given["pads"] = [1] * (2 * len(kernel))
    if net.rng.random() < 0.3 and max(given["strides"]) > 1:
        given["output_padding"] = [s - 1 for s in given["strides"]]
    weight = net.weight(channels, width, *kernel, fan_in=channels // group * 2)
    return str(net.add("ConvTranspose", x, weight, group=group, kernel_shape=kernel, **given))


@block(3, 4, often=2)
def batch_norm(net: Network, x: str) -> str:
    c = net.shape(x)[1]
    scale, bias, mean = (net.weight(c, fan_in=2) for _ in range(3))
    variance = net.tensor(net.numbers.uniform(0.3, 2, c))
    return str(net.add("BatchNormalization", x, scale, bias, mean, variance, epsilon=1e-3))


@block(3, 4)
def instance_norm(net: Network, x: str) -> str:
    c = net.shape(x)[1]
    return str(net.add("InstanceNormalization", x, net.weight(c, fan_in=1), net.weight(c, fan_in=1), epsilon=1e-2))


@block(4)
def local_response(net: Network, x: str) -> str:
    return str(net.add("LRN", x, size=net.rng.choice([3, 5]), alpha=0.1))


@block(3, 4)
def prelu(net: Network, x: str) -> str:
    slope = net.weight(net.shape(x)[1], *[1] * (net.values[x].ndim - 2), fan_in=1)
    return str(net.add("PRelu", x, slope))


@block(3, 4, often=2)
def pool(net: Network, x: str) -> str:
    given = _window(net, x, (2, 3))
    if net.opset < 19 or "auto_pad" in given:
        given.pop(
            "dilations", None
        )  # AveragePool has none before; onnxruntime's padding to the same extent forgets them
    if "auto_pad" not in given:
        given["ceil_mode"] = net.rng.randrange(2)
    op = net.rng.choice(["MaxPool", "AveragePool", "AveragePool"])
    if op == "AveragePool":
        given["count_include_pad"] = net.rng.randrange(2)
    y = str(net.add(op, x, **given))
    if given.get("ceil_mode"):
        pads, kernel = given.get("pads", [0] * 8), given["kernel_shape"]
        for i, (extent, windows) in enumerate(zip(net.shape(x)[2:], net.shape(y)[2:], strict=True)):
            reach = (kernel[i] - 1) * given.get("dilations", [1, 1, 1])[i] + 1
            fit = math.ceil((extent + pads[i] + pads[len(kernel) + i] - reach) / given.get("strides", [1, 1, 1])[i]) + 1
            if fit != windows:
                raise RejectedBlock(
                    "onnx's shape inference counts a window in the padding, which onnxruntime leaves out"
                )
    return y


@block(4)
def squeeze_and_excite(net: Network, x: str) -> str:
    c = net.shape(x)[1]
    pooled = net.add("GlobalAveragePool", x)
    hidden = net.add("Relu", net.add("Conv", pooled, net.weight(4, c, 1, 1, fan_in=c)))
    gate = net.add(
        net.rng.choice(["Sigmoid", "HardSigmoid"]), net.add("Conv", hidden, net.weight(c, 4, 1, 1, fan_in=4))
    )
    return str(net.add("Mul", x, gate))


@block(3, 4)
def padded(net: Network, x: str) -> str:
    mode = net.rng.choice(["constant", "reflect", "edge"])
    ndim = net.values[x].ndim
    pads = [0, 0, *(net.rng.randrange(3) for _ in range(ndim - 2))] * 2
    value = [net.tensor(0.5)] if mode == "constant" and net.rng.random() < 0.5 else []
    return str(net.add("Pad", x, net.ints(*pads), *value, mode=mode))


@block(4)
def resized(net: Network, x: str) -> str:
    mode = net.rng.choice(["nearest", "linear", "cubic"])
    transform = net.rng.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
    scales = [1, 1, net.rng.choice([0.5, 2, 1.5]), net.rng.choice([0.5, 2, 1])]
    if transform == "align_corners" and any(n * s % 1 for n, s in zip(net.shape(x), scales, strict=True)):
        raise RejectedBlock("onnxruntime rounds extents that ONNX's test cases do not")
    given = {"nearest_mode": "floor"} if mode == "nearest" else {}
    return str(
        net.add("Resize", x, "", net.tensor(scales), mode=mode, coordinate_transformation_mode=transform, **given)
    )


@block(4)
def depth_and_space(net: Network, x: str) -> str:
    op = net.rng.choice(["DepthToSpace", "SpaceToDepth"])
    given = {"mode": net.rng.choice(["DCR", "CRD"])} if op == "DepthToSpace" else {}
    return str(net.add(op, x, blocksize=2, **given))


@block(4)
def shuffled_channels(net: Network, x: str) -> str:
    _, c, h, w = net.shape(x)
    groups = 2 if c % 2 == 0 else 3
    apart = net.add("Reshape", x, net.ints(0, groups, c // groups, h, w))
    return str(net.add("Reshape", net.add("Transpose", apart, perm=[0, 2, 1, 3, 4]), net.ints(0, -1, h, w)))


@block(4)
def patches(net: Network, x: str) -> str:
    """A vision transformer's tokens: a convolution as wide as its strides, then [N, T, D]."""
    c = net.shape(x)[1]
    rows = net.add("Conv", x, net.weight(8, c, 2, 2, fan_in=4 * c), strides=[2, 2])
    return str(net.add("Transpose", net.add("Reshape", rows, net.ints(0, 8, -1)), perm=[0, 2, 1]))


@block(3, 4)
def flat(net: Network, x: str) -> str:
    return str(net.add("Flatten", x, axis=1))


@block(4)
def global_pool(net: Network, x: str) -> str:
    pooled = net.add(net.rng.choice(["GlobalAveragePool", "GlobalMaxPool"]), x)
    return str(net.add(*net.rng.choice([("Flatten", pooled), ("Squeeze", pooled, net.ints(2, 3))])))


@block(4, often=3)
def quantised_convolution(net: Network, x: str) -> str:
    """QDQ around a convolution, its weights per channel."""
    net.round()
    c, width = net.shape(x)[1], net.rng.randint(2, 8)
    value = net.numbers.normal(size=(width, c, 3, 3)) / np.sqrt(9 * c)
    steps = np.abs(value).max((1, 2, 3)) / 63
    codes = net.tensor(np.round(value / steps[:, None, None, None]), np.int8)
    weight = net.add("DequantizeLinear", codes, net.tensor(steps), net.tensor(np.zeros(width), np.int8), axis=0)
    step = net.tensor((float(np.abs(net.values[x]).max()) or 1) / 127)
    zero = net.tensor(128, np.uint8)
    return str(net.add("Conv", _quantised(net, x, step, zero), weight, pads=[1, 1, 1, 1]))


# --- sequences and rows


@block(2, 3, often=4)
def dense(net: Network, x: str) -> str:
    d, width = net.shape(x)[-1], net.rng.randint(2, 24)
    result = net.add("MatMul", x, net.weight(d, width, fan_in=d))
    return str(net.add("Add", result, net.weight(width))) if net.rng.random() < 0.6 else str(result)


@block(2, often=4)
def gemm(net: Network, x: str) -> str:
    d, width = net.shape(x)[1], net.rng.randint(2, 24)
    turned = net.rng.randrange(2)
    weight = net.weight(*((width, d) if turned else (d, width)), fan_in=d)
    given = net.rng.choice([{}, {"alpha": 0.5}, {"alpha": 2.0, "beta": 0.5}])
    bias = net.rng.choice([[], [net.weight(width)], [net.weight(1, width)], [net.weight(1)]])
    return str(net.add("Gemm", x, weight, *bias, transB=turned, **given))


@block(2, 3, often=2)
def integer_product(net: Network, x: str) -> str:
    """MatMulInteger, as dynamic quantisation writes it, with a fixed scale: a dynamic one mixes the batch."""
    net.round()
    d, width = net.shape(x)[-1], net.rng.randint(2, 16)
    codes = net.tensor(net.numbers.integers(-63, 64, (d, width)), np.int8)
    step, zero = net.tensor((float(np.abs(net.values[x]).max()) or 1) / 127), net.tensor(128, np.uint8)
    product = net.add("MatMulInteger", net.add("QuantizeLinear", x, step, zero), codes, zero)
    scaled = net.add("Mul", net.add("Cast", product, to=TensorProto.FLOAT), net.tensor(1e-3))
    return str(net.add("Mul", scaled, step))


@block(2, 3, often=2)
def layer_norm(net: Network, x: str) -> str:
    d = net.shape(x)[-1]
    scale, bias = net.weight(d, fan_in=1), net.weight(d, fan_in=1)
    if net.opset >= 17 and net.rng.random() < 0.5:
        return str(net.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-2))
    centred = net.add("Sub", x, _axes(net, "ReduceMean", x, [-1], 1))
    variance = _axes(net, "ReduceMean", net.add("Pow", centred, net.tensor(2)), [-1], 1)
    deviation = net.add("Sqrt", net.add("Add", variance, net.tensor(1e-2)))
    return str(net.add("Add", net.add("Mul", net.add("Div", centred, deviation), scale), bias))


@block(3, often=3)
def attention(net: Network, x: str) -> str:
    """Self-attention of one or two heads, as PyTorch's exporters write it."""
    t, d = net.shape(x)[1:]
    heads, size = net.rng.choice([1, 2]), 4
    parts = []
    for _ in range(3):
        y = net.add("MatMul", x, net.weight(d, heads * size, fan_in=d))
        parts.append(net.add("Reshape", y, net.ints(0, t, heads, size)))
    q, v = (net.add("Transpose", parts[i], perm=[0, 2, 1, 3]) for i in (0, 2))
    k = net.add("Transpose", parts[1], perm=[0, 2, 3, 1])
    scores = net.add("Div", net.add("MatMul", q, k), net.tensor(2))
    if net.rng.random() < 0.4:
        scores = net.add("Add", scores, net.tensor(np.triu(np.full((t, t), -30.0), 1)))
    mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    merged = net.add("Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), net.ints(0, 0, heads * size))
    return str(net.add("MatMul", merged, net.weight(heads * size, d, fan_in=heads * size)))


@block(3, often=3)
def recurrence(net: Network, x: str) -> str:
    """LSTM, GRU or RNN over [T, N, D], and its layout turned back."""
    d, hidden = net.shape(x)[2], net.rng.randint(2, 8)
    op, gates = net.rng.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    direction, ways = net.rng.choice([("forward", 1), ("reverse", 1), ("bidirectional", 2)])
    weights = [net.weight(ways, gates * hidden, e, fan_in=e) for e in (d, hidden)]
    bias = [net.weight(ways, 2 * gates * hidden)] if net.rng.random() < 0.7 else []
    given: dict[str, Any] = {"linear_before_reset": net.rng.randrange(2)} if op == "GRU" else {}
    steps = net.add("Transpose", x, perm=[1, 0, 2])
    y = net.add(op, steps, *weights, *bias, hidden_size=hidden, direction=direction, n=2, **given)[0]
    if ways == 1:
        return str(net.add("Transpose", net.add("Squeeze", y, net.ints(1)), perm=[1, 0, 2]))
    turned = net.add("Transpose", y, perm=[2, 0, 1, 3])
    return str(net.add("Reshape", turned, net.ints(0, 0, -1)))


@block(3)
def contracted(net: Network, x: str) -> str:
    d = net.shape(x)[2]
    equation, shape = net.rng.choice([("ntd,dk->ntk", (d, 6)), ("ntd,kd->nkt", (6, d)), ("ntd,dkh->ntkh", (d, 2, 3))])
    return str(net.add("Einsum", x, net.weight(*shape, fan_in=d), equation=equation))


@block(3)
def self_product(net: Network, x: str) -> str:
    turned = net.add("Transpose", x, perm=[0, 2, 1])
    return str(net.add("Mul", net.add("MatMul", x, turned), net.tensor(0.3)))


@block(2, often=3)
def as_image(net: Network, x: str) -> str:
    size = net.shape(x)[1]
    if size % 4:
        raise RejectedBlock("no image")
    return str(net.add("Reshape", x, net.ints(0, size // 4, 2, 2)))


@block(2, often=3)
def as_sequence(net: Network, x: str) -> str:
    return str(net.add("Unsqueeze", x, net.ints(net.rng.choice([1, 2]))))


# --- with special constants

MAGIC = (1.5 * 2.0**23, -1.5 * 2.0**23, 2.0**23, 3.0e7)
"""Constants that round to integers where they are added and subtracted."""
FAR = (1e25, 1e-25, 1e30, 1e-30)
"""Constants whose products with values above 1e-7 are normal numbers, and those with each other are not."""


def _chain(net: Network, x: str, *steps: tuple[str, float]) -> str:
    """Operations with constants, one after the other, whose values between may be of any size."""
    net.bounded = False
    try:
        for op, constant in steps:
            x = net.add(op, x, net.tensor(constant if net.rng.random() < 0.5 else np.full(1, constant)))
    finally:
        net.bounded = True
    return x


def rounding_by_a_constant(net: Network, x: str) -> str:
    net.round()
    constant = net.rng.choice(MAGIC)
    up, down = net.rng.choice([("Add", "Sub"), ("Sub", "Add")])
    return _chain(net, x, ("Mul", 16.0), (up, constant), (down, constant), ("Div", 16.0))


def far_and_back(net: Network, x: str) -> str:
    """Products and quotients that overflow where constants are folded across them."""
    a, b = net.rng.choice(FAR), net.rng.choice(FAR)
    there, back = net.rng.choice([("Mul", "Div"), ("Div", "Mul")])
    return _chain(net, x, (there, a), (back, a), (back, b), (there, b))


def special_constant(net: Network, x: str) -> str:
    """What infinities and signed zeros leave as it is."""
    op, constant = net.rng.choice([("Min", np.inf), ("Max", -np.inf), ("Add", -0.0), ("Sub", 0.0), ("Add", 0.0)])
    return _chain(net, x, (op, constant))


def reciprocal_of_infinity(net: Network, x: str) -> str:
    """Infinities among the values between: 1 / (1 + exp(-large x))."""
    net.bounded = False
    try:
        e = net.add("Exp", net.add("Mul", x, net.tensor(-200)))
        return str(net.add("Div", net.tensor(1), net.add("Add", e, net.tensor(1))))
    finally:
        net.bounded = True


def masked_softmax(net: Network, x: str) -> str:
    mask = np.where(net.numbers.random(net.shape(x)[1:]) < 0.3, -np.inf, 0)
    mask[..., 0] = 0
    net.bounded = False
    try:
        masked = net.add("Add", x, net.tensor(mask))
    finally:
        net.bounded = True
    return str(net.add("Softmax", masked, axis=-1))


def without_nan(net: Network, x: str) -> str:
    """0 / 0 among the values between, which a condition replaces; continuous at its border."""
    net.bounded = False
    try:
        positive = net.add("Relu", x)
        quotient = net.add("Div", net.add("Mul", positive, positive), positive)
        slope = net.add("Mul", x, net.tensor(0.25))
    finally:
        net.bounded = True
    return str(net.add("Where", net.add("IsNaN", quotient), slope, quotient))


SPECIAL += [
    rounding_by_a_constant,
    far_and_back,
    special_constant,
    reciprocal_of_infinity,
    masked_softmax,
    without_nan,
]


def special_network(seed: int) -> tuple[ModelProto, Network]:
    """The network of a seed with special constants: infinities, signed zeros, and such as round or overflow."""
    return _grown(seed, FEWEST, MOST, SHAPES, special=True)


def random_network(seed: int) -> tuple[ModelProto, Network]:
    """The network of a seed."""
    return _grown(seed, FEWEST, MOST, SHAPES)


def tiny_network(seed: int) -> tuple[ModelProto, Network]:
    """A network of one to four nodes, or a few more, on few numbers: ``run`` computes most of them in NumPy."""
    return _grown(seed, 1, 4, TINY)


def _grown(
    seed: int, fewest: int, most: int, shapes: Sequence[tuple[int, ...]], *, special: bool = False
) -> tuple[ModelProto, Network]:
    rng = random.Random(seed)
    made = Network(rng, rng.choice(OPSETS), may_round=rng.random() < 0.3, special=special)
    made.grow(rng.randint(fewest, most), shapes)
    return made.proto(), made
