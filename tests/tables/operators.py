"""The table of operators: small inputs for each, from which its tests are made.

One row runs at every opset that changes the schema, known and traced, against onnxruntime (test_opset_matrix.py), in
every element type (test_element_types.py), in both branches on operands drawn like the row's (test_branches.py), and
its gradient against differences (test_gradients.py); docs/operators.md reads it. What needs operands of another kind
there has an entry of its own in folding.py, or in the TABLE of test_gradients.py, which then counts instead.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

import onnx2jax

NEWEST = 27
"""The newest opset that onnxruntime knows."""


@dataclass(frozen=True)
class Row:
    """One operator on given inputs, for the opsets from ``since`` to ``until``."""

    name: str
    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    since: int = 7
    until: int = NEWEST
    outputs: int = 1
    domain: str = ""
    tolerance: float = 1e-5
    expected: tuple[Any, ...] = ()
    """What the specification says, where onnxruntime computes something else or nothing."""

    def opsets(self) -> list[int]:
        """Each opset that changes the schema in that range, the first and the last; without a schema, the meaning."""
        versions = {s.since_version for s in onnx.defs.get_all_schemas_with_history() if self._is(s)}
        versions = versions or set(onnx2jax.supported()[self.domain][self.name])
        first = max(self.since, min(versions))
        ends = {first} if self.domain else {first, self.until}
        return sorted({v for v in versions if first <= v <= self.until} | ends)

    @property
    def key(self) -> tuple[str, str]:
        return self.domain, self.name

    def _is(self, schema: onnx.defs.OpSchema) -> bool:
        return (schema.domain, schema.name) == (self.domain, self.name)


def f(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 numbers of both signs, no two alike."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def i(*values: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


def scalar(value: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def row(name: str, *inputs: Any, **options: Any) -> Row:
    """Keywords are fields of Row; all others are attributes of the node."""
    own = ("since", "until", "outputs", "domain", "tolerance", "expected")
    fields = {k: options.pop(k) for k in own if k in options}
    return Row(name, inputs, options, **fields)


def rows() -> Iterator[Row]:
    for table in (
        elementwise,
        softmaxes,
        reductions,
        shapes,
        indexing,
        linear,
        pools,
        resizing,
        recurrent,
        others,
        learning,
        fake_quantisation,
        extensions,
    ):
        yield from table()


SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 0.5, -1.5, 2.5, 3.0], np.float32)


def elementwise() -> Iterator[Row]:
    whole = i(7, -7, 5, -5, 0, 9, dtype=np.int32), i(2, 2, -3, -3, 4, -9, dtype=np.int32)
    for name in ("Add", "Sub", "Mul", "Div"):
        yield row(name, f(2, 3), f(3))
        yield row(name, f(2, 1, 3).astype(np.float64), f(4, 1).astype(np.float64))
        yield row(name, *whole)
        yield row(name, *(w.astype(np.int64) * 2**40 for w in whole))
    yield row("Pow", np.abs(f(2, 3)), f(3))
    yield row("Pow", f(2, 3), i(2, 3, 0), since=12)
    yield row("Pow", i(2, -3, 5), i(3, 3, 0), since=12)
    yield row("Mod", *whole)
    yield row("Mod", *whole, fmod=1)
    yield row("Mod", f(2, 3), f(3), fmod=1)
    for name in ("And", "Or", "Xor"):
        yield row(name, f(2, 3) > 0, f(3) > 0)
    for name in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
        yield row(name, *whole, since=7 if name == "Equal" else 9)
        yield row(name, SPECIAL, SPECIAL[::-1].copy(), since=11 if name == "Equal" else 9)
    yield row("Equal", f(2, 3) > 0, f(3) > 0)
    yield row("Equal", np.array(["a", "b"], object), np.array(["a", "c"], object), since=19)
    yield row("BitShift", i(1, 2, 255, dtype=np.uint8), i(1, 7, 4, dtype=np.uint8), direction="LEFT")
    yield row("BitShift", i(1, 2, 255, dtype=np.uint8), i(1, 7, 4, dtype=np.uint8), direction="RIGHT")
    for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        yield row(name, *whole)
    yield row("BitwiseNot", whole[0])
    yield row("Not", f(5) > 0)
    for name in ("Max", "Min", "Mean", "Sum"):
        yield row(name, f(2, 3), f(3), f(2, 1), since=8)
        yield row(name, f(2, 3))
    yield row("Max", *whole, since=12)
    yield row("Min", SPECIAL, SPECIAL[::-1].copy(), since=8)
    yield row("PRelu", f(2, 3, 4), f(3, 1))
    bounded = np.clip(f(3, 4), -0.9, 0.9)
    for name in ("Acos", "Asin", "Atan", "Atanh"):
        yield row(name, bounded)
    for name in (
        "Abs",
        "Ceil",
        "Floor",
        "Neg",
        "Reciprocal",
        "Sqrt",
        "Exp",
        "Log",
        "Relu",
        "Sigmoid",
        "Tanh",
        "Identity",
    ):
        yield row(name, SPECIAL)
    for name in ("Asinh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Erf", "Sign", "IsNaN", "IsInf", "Round"):
        yield row(name, f(3, 4) if name not in ("IsNaN", "IsInf", "Round", "Sign") else SPECIAL[name == "Sign" :])
    yield row("Acosh", np.abs(f(3)) + 1)
    yield row("Abs", i(-(2**62), 3))
    yield row("Neg", whole[0])
    yield row("Sign", whole[0])
    yield row("Relu", whole[0], since=14)
    yield row("IsInf", SPECIAL, detect_negative=0)
    for name in ("Elu", "HardSigmoid", "LeakyRelu", "Selu", "Softplus", "Softsign", "ThresholdedRelu", "Celu"):
        yield row(name, f(3, 4) * 3)
    for name in ("HardSwish", "Mish", "Gelu", "Shrink"):
        yield row(name, f(3, 4) * 3)
    yield row("Gelu", f(3, 4) * 3, approximate="tanh")
    yield row("Elu", f(3, 4), alpha=0.3)
    yield row("Celu", f(3, 4), alpha=0.3)
    yield row("Selu", f(3, 4), alpha=2.0, gamma=3.0)
    yield row("HardSigmoid", f(3, 4), alpha=0.5, beta=0.6)
    yield row("LeakyRelu", f(3, 4), alpha=0.2)
    yield row("ThresholdedRelu", f(3, 4), alpha=0.2)
    yield row("Clip", SPECIAL, until=10)
    yield row("Clip", f(3, 4), min=-0.5, max=0.5, until=10)
    yield row("Clip", f(3, 4), min=0.25, until=10)
    yield row("Clip", f(3, 4), scalar(-0.5), scalar(0.5), since=11)
    yield row("Clip", f(3, 4), None, scalar(0.5), since=11)
    yield row("Clip", SPECIAL, since=11)
    yield row("Clip", f(3, 4), scalar(1), scalar(-1), since=11)
    yield row("Clip", i(-5, 2, 9), scalar(0, np.int64), scalar(4, np.int64), since=12)
    yield row("Where", f(2, 1) > 0, f(3), f(2, 3))
    yield row("Where", f(2, 1) > 0, i(1, 2), i(3, 4))
    # Out-of-range and NaN conversions are undefined, so the numbers stay inside.
    numbers = np.array([-1.9, 0, 0.5, 2.5, 100], np.float32)
    for to in (np.float64, np.float16, np.int8, np.int32, np.int64, np.bool_, object):
        code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(to))
        yield row("Cast", numbers, to=code, since=9)
        if to is not object:
            yield row("CastLike", numbers, np.zeros(1, to))
    yield row("Cast", i(-3, 0, 300, dtype=np.int32), to=onnx.TensorProto.UINT8)
    yield row("Cast", i(2**53 + 1, -5), to=onnx.TensorProto.DOUBLE)
    yield row("Cast", np.array(["1.5", "-2", "INF", "NaN"], object), to=onnx.TensorProto.FLOAT, since=9)


def softmaxes() -> Iterator[Row]:
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        x = f(2, 3, 4)
        x[0, 1] = x[0, 1, 0]  # ties
        yield row(name, x)
        for axis in (0, 1, 2):
            yield row(name, x, axis=axis)
        yield row(name, x, axis=-1, since=11)
        yield row(name, x, axis=-2, since=11)


REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")


def reductions() -> Iterator[Row]:
    for kind in REDUCTIONS:
        name, x = f"Reduce{kind}", np.abs(f(2, 3, 4)) + 0.1
        last = 12 if kind == "Sum" else 17  # from then on axes are an input
        yield row(name, x)
        yield row(name, x, axes=[1], until=last)
        yield row(name, x, axes=[0, 2], keepdims=0, until=last)
        yield row(name, x, axes=[-1], since=11, until=last)
        yield row(name, x, i(1), since=last + 1)
        yield row(name, x, i(0, -1), since=last + 1, keepdims=0)
        yield row(name, x, i(), since=last + 1)
        yield row(name, x, i(), since=last + 1, noop_with_empty_axes=1)
        if kind not in ("LogSum", "LogSumExp"):
            yield row(name, i(3, -4, 5, dtype=np.int32)[None], keepdims=0)
    yield row("ReduceMax", f(2, 3) > 0, i(1), since=20)
    for name in ("ArgMax", "ArgMin"):
        x = i([1, 3, 3], [2, 0, 0], dtype=np.int32)
        yield row(name, x)
        yield row(name, x, axis=1, keepdims=0)
        yield row(name, x, axis=-1, since=11)
        yield row(name, x, axis=1, select_last_index=1, since=12)
        yield row(name, f(2, 3, 4), axis=1)
    for exclusive, reverse in itertools.product((0, 1), repeat=2):
        yield row("CumSum", f(2, 3), scalar(1, np.int32), exclusive=exclusive, reverse=reverse)
    yield row("CumSum", i([1, 2], [3, 4]), scalar(-2, np.int64))
    yield row("CumProd", f(2, 3), scalar(1, np.int64))


def shapes() -> Iterator[Row]:
    x = f(2, 3, 4)
    yield row("Reshape", x, i(0, -1))
    yield row("Reshape", f(0, 3), i(3, 0), allowzero=1, since=14)
    yield row("Flatten", x)
    yield row("Flatten", x, axis=0)
    yield row("Flatten", x, axis=3)
    yield row("Flatten", x, axis=-1, since=11)
    yield row("Transpose", x)
    yield row("Transpose", x, perm=[2, 0, 1])
    yield row("Concat", x, f(2, 1, 4), axis=1)
    yield row("Concat", x, f(2, 3, 1), axis=-1, since=11)
    yield row("Squeeze", f(1, 3, 1), until=12)
    yield row("Squeeze", f(1, 3, 1), axes=[2], until=12)
    yield row("Squeeze", f(1, 3, 1), axes=[-1], since=11, until=12)
    yield row("Squeeze", f(1, 3, 1), since=13)
    yield row("Squeeze", f(1, 3, 1), i(-1), since=13)
    yield row("Unsqueeze", f(2, 3), axes=[0, 3], until=12)
    yield row("Unsqueeze", f(2, 3), axes=[-1, 0], since=11, until=12)
    yield row("Unsqueeze", f(2, 3), i(0, -1), since=13)
    yield row("Split", f(6, 2), outputs=3, until=12)
    yield row("Split", f(2, 6), outputs=2, axis=1, split=[2, 4], until=12)
    yield row("Split", f(2, 6), outputs=2, axis=-1, split=[1, 5], since=11, until=12)
    yield row("Split", f(2, 6), i(1, 5), outputs=2, axis=1, since=13)
    yield row("Split", f(6, 2), outputs=3, since=13, until=17)
    yield row("Split", f(7, 2), outputs=3, num_outputs=3, since=18)
    yield row("Expand", f(3, 1), i(2, 1, 4))
    yield row("Tile", f(2, 3), i(2, 1))
    yield row("Shape", x)
    yield row("Shape", x, start=-2, since=15)
    yield row("Shape", x, start=0, end=-1, since=15)
    yield row("Size", x)
    yield row("DynamicSlice", f(4, 5), i(1, -4), i(3, 2**31), i(0, 1), until=7)
    yield row("Slice", f(5, 6), starts=[1, -3], ends=[4, 1000], axes=[0, 1], until=9)
    yield row("Slice", f(5, 6), starts=[1], ends=[-1], until=9)
    yield row("Slice", f(5, 6), i(1, -3), i(4, 2**63 - 1), since=10)
    yield row("Slice", f(5, 6), i(-1), i(-(2**63)), i(1), i(-2), since=10)
    yield row("Slice", f(5, 6), i(4), i(0), i(-2), i(-1), since=10)
    yield row("Slice", f(5, 6), i(1, dtype=np.int32), i(100, dtype=np.int32), i(0, dtype=np.int32), since=10)
    for mode in ("constant", "reflect", "edge"):
        yield row("Pad", f(3, 4), pads=[1, 2, 0, 1], mode=mode, until=10)
        yield row("Pad", f(3, 4), i(1, 2, 0, 1), mode=mode, since=11)
    yield row("Pad", f(3, 4), pads=[1, -1, 0, 2], value=1.5, until=10)
    yield row("Pad", f(3, 4), i(1, -1, 0, 2), scalar(1.5), since=11)
    yield row("Pad", i([1, 2], [3, 4]), i(0, 1, 0, 1), scalar(9, np.int64), since=13)
    yield row("Pad", f(3, 4), i(2, 1), None, i(1), since=18)
    yield row("Pad", f(3, 4), i(2, 1), scalar(3), i(-2), since=18)
    yield row("Pad", f(3, 4), i(1, 2, 3, 1), mode="wrap", since=19)
    yield row("DepthToSpace", f(1, 8, 2, 3), blocksize=2)
    yield row("DepthToSpace", f(1, 8, 2, 3), blocksize=2, mode="CRD", since=11)
    yield row("SpaceToDepth", f(1, 2, 4, 6), blocksize=2)
    yield row("EyeLike", f(3, 4), k=1)
    yield row("EyeLike", f(3, 4), k=-1, dtype=onnx.TensorProto.INT64)
    yield row("Range", scalar(1), scalar(5), scalar(1.5))
    yield row("Range", scalar(10, np.int64), scalar(4, np.int64), scalar(-3, np.int64))
    yield row("ConstantOfShape", i(2, 3))
    yield row("ConstantOfShape", i(), value=i(7))
    yield row("Trilu", f(3, 4))
    yield row("Trilu", f(3, 4), scalar(-1, np.int64), upper=0)
    yield row("CenterCropPad", f(5, 4), i(3, 7))
    yield row("CenterCropPad", f(5, 4), i(6), axes=[1])
    yield row("ReverseSequence", f(4, 3), i(1, 4, 2))
    yield row("ReverseSequence", f(3, 4), i(1, 4, 2), batch_axis=0, time_axis=1)


def indexing() -> Iterator[Row]:
    x = f(3, 4)
    yield row("Gather", x, i([0, 2], [1, 1]))
    yield row("Gather", x, i(-1, 0, dtype=np.int32), axis=1, since=11)
    yield row("GatherElements", x, i([0, 2, -1, 1]), axis=0)
    yield row("GatherElements", x, i([0], [-2], [3]), axis=-1)
    yield row("GatherND", x, i([0, 1], [-1, 2]))
    yield row("GatherND", f(2, 3, 4), i([1], [-1]), batch_dims=1, since=12)
    update = f(1, 4, seed=1)
    yield row("Scatter", x, i([0, 2, 1, 0]), update, since=9, until=10)
    yield row("Scatter", x, i([1], [0], [2]), f(3, 1, seed=1), axis=1, since=9, until=10)
    yield row("ScatterElements", x, i([0, -1, 1, 0]), update)
    yield row("ScatterElements", x, i([1], [0], [-2]), f(3, 1, seed=1), axis=1)
    twice = i([0, 0, 1, 0], [0, 2, 1, 0])
    for reduction in ("add", "mul", "max", "min"):
        since = 16 if reduction in ("add", "mul") else 18
        yield row("ScatterElements", x, twice, f(2, 4, seed=1), reduction=reduction, since=since)
        yield row("ScatterND", x, i([0], [0]), f(2, 4, seed=1), reduction=reduction, since=since)
    yield row("ScatterND", x, i([0, 1], [-1, 2]), i(5, 6, dtype=np.float32))
    # Up to opset 10 a negative index is out of range: all off. onnxruntime counts it from the end.
    off = (i([2, 7, 2], [2, 2, 2], [2, 2, 2], dtype=np.float32),)
    yield row("OneHot", i(1, -1, 5), scalar(3, np.int64), i(2, 7, dtype=np.float32), until=10, expected=off)
    yield row("OneHot", i(1, -1, 5), scalar(3, np.int64), i(2, 7, dtype=np.float32), since=11)
    yield row("OneHot", i([0, 2]), scalar(3, np.int64), i(0, 1), axis=0)
    yield row("OneHot", i([0, 2]), scalar(3, np.int64), i(0, 1), axis=-2, since=11)
    yield row("TopK", f(3, 5), k=2, outputs=2, until=9)
    yield row("TopK", f(3, 5), k=1, axis=0, outputs=2, until=9)
    yield row("TopK", f(3, 5), i(2), outputs=2, since=10)
    yield row("TopK", f(3, 5), i(2), axis=0, outputs=2, since=10)
    yield row("TopK", i([1, 3, 3, 2, 3]), i(4), outputs=2, since=11)
    yield row("TopK", i([1, 3, 1, 2, 1]), i(2), largest=0, outputs=2, since=11)
    yield row("NonZero", f(2, 3) > 0)
    yield row("NonZero", i([0, 2], [3, 0]))
    yield row("Compress", x, np.array([True, False, True]), axis=0)
    yield row("Compress", x, np.array([False, True, True, False, True]))
    yield row("Compress", x, np.array([False, True]), axis=-1, since=11)
    yield row("Unique", i(2, 1, 1, 3, 4, 3), outputs=4)
    yield row("Unique", i(2, 1, 1, 3, 4, 3), sorted=0, outputs=4)
    yield row("Unique", i([1, 0, 0], [1, 0, 0], [2, 3, 4], dtype=np.float32), axis=0, outputs=4)
    boxes = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11]]], np.float32)
    scores = np.array([[[0.9, 0.75, 0.6]]], np.float32)
    limits = scalar(2, np.int64), scalar(0.5), scalar(0.0)
    yield row("NonMaxSuppression", boxes, scores, *limits)
    yield row("NonMaxSuppression", boxes, scores, *limits, center_point_box=1)
    yield row("NonMaxSuppression", boxes, scores)
    # Two images, three classes, equal scores, and more boxes than are compared at once.
    spans = np.float32([5, 2]).reshape(2, 1, 1, 1)
    places, sizes = np.random.default_rng(5).random((2, 2, 150, 2), np.float32) * spans
    scores = np.random.default_rng(6).integers(0, 20, (2, 3, 150)).astype(np.float32) / 20
    for most, least in ((7, 0.0), (150, 0.0), (150, 0.8), (150, 1.0)):
        limits = scalar(most, np.int64), scalar(0.3), scalar(least)
        yield row("NonMaxSuppression", np.concatenate([places, places + sizes], 2), scores, *limits)
        yield row("NonMaxSuppression", np.concatenate([places, sizes], 2), scores, *limits, center_point_box=1)


def linear() -> Iterator[Row]:
    for a, b in (((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((5, 1, 2, 3), (2, 3, 4))):
        yield row("MatMul", f(*a), f(*b))
    yield row("MatMul", i([1, 2], dtype=np.int32), i([3], [4], dtype=np.int32), since=9)
    yield row("Gemm", f(2, 3), f(3, 4), f(4))
    yield row("Gemm", f(3, 2), f(4, 3), f(2, 1), transA=1, transB=1, alpha=0.5, beta=2.0)
    yield row("Gemm", f(2, 3), f(3, 4), since=11)
    yield row("Einsum", f(2, 3), f(3, 4), equation="ij,jk->ki")
    yield row("Einsum", f(2, 3, 3), equation="...ii->...i")
    yield row("Det", f(2, 3, 3))
    image = f(1, 4, 5, 6)
    weight = f(6, 4, 3, 2)
    yield row("Conv", image, weight)
    yield row("Conv", image, weight, f(6), strides=[2, 1], pads=[1, 0, 2, 1])
    yield row("Conv", image, weight, dilations=[2, 1])
    yield row("Conv", image, f(6, 2, 3, 3), group=2)
    yield row("Conv", image, f(8, 1, 3, 3), group=4, pads=[1, 1, 1, 1])
    yield row("Conv", image, f(6, 4, 1, 1), f(6))
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield row("Conv", image, weight, auto_pad=auto_pad, strides=[2, 2])
        yield row("ConvTranspose", image, f(4, 2, 3, 2), auto_pad=auto_pad, strides=[2, 2])
    yield row("Conv", f(2, 3, 7), f(4, 3, 3), strides=[2])
    yield row("Conv", f(1, 2, 4, 4, 4), f(3, 2, 2, 2, 2))
    yield row("ConvTranspose", image, f(4, 2, 3, 2))
    yield row("ConvTranspose", image, f(4, 2, 3, 2), f(2), strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2])
    yield row("ConvTranspose", image, f(4, 2, 3, 2), dilations=[2, 2])
    yield row("ConvTranspose", image, f(4, 2, 3, 2), group=2)
    yield row("ConvTranspose", image, f(4, 2, 3, 2), strides=[2, 2], output_shape=[10, 12])
    yield row("ConvTranspose", f(1, 2, 5), f(2, 3, 3), strides=[2])


def pools() -> Iterator[Row]:
    x = f(1, 2, 7, 6)
    forms: list[dict[str, Any]] = [
        {"kernel_shape": [3, 2]},
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]},
        {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"kernel_shape": [2, 3], "auto_pad": "VALID"},
    ]
    # Larger windows than the image, where extents round up: ceil((2 - 3) / 2 + 1) = 1.
    small, past = f(1, 2, 2, 2), {"ceil_mode": 1, "strides": [2, 3]}
    yield row("MaxPool", small, kernel_shape=[3, 4], outputs=2, since=10, **past)
    yield row("MaxPool", small, kernel_shape=[2, 2], dilations=[2, 3], pads=[0, 0, 0, 1], outputs=2, since=10, **past)
    for include in (0, 1):
        yield row(
            "AveragePool", small, kernel_shape=[3, 4], pads=[0, 1, 0, 0], count_include_pad=include, since=19, **past
        )
    yield row("LpPool", small, kernel_shape=[3, 4], since=18, **past)
    ceiling = {"kernel_shape": [2, 2], "strides": [3, 2], "ceil_mode": 1}
    for form in forms:
        yield row("MaxPool", x, **form)
        yield row("AveragePool", x, **form)
        yield row("LpPool", x, **form)
    yield row("AveragePool", x, **forms[1], count_include_pad=1)
    yield row("AveragePool", x, **ceiling, since=10)
    yield row("AveragePool", x, **ceiling, pads=[1, 1, 1, 1], count_include_pad=1, since=19)
    yield row("AveragePool", x, kernel_shape=[2, 2], dilations=[2, 1], since=19)
    yield row("LpPool", x, kernel_shape=[2, 2], p=3)
    yield row("LpPool", x, kernel_shape=[2, 2], dilations=[2, 1], since=18)
    yield row("LpPool", x, **ceiling, since=18)
    yield row("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], outputs=2, since=8)
    yield row("MaxPool", x, kernel_shape=[2, 3], pads=[1, 0, 0, 1], storage_order=1, outputs=2, since=8)
    yield row("MaxPool", x, **ceiling, since=10)
    yield row("MaxPool", x, kernel_shape=[2, 2], dilations=[3, 2], since=10)
    yield row("MaxPool", (x * 40).astype(np.int8), kernel_shape=[2, 2], since=12)
    yield row("MaxPool", f(1, 2, 9), kernel_shape=[3], strides=[2])
    for name in ("GlobalAveragePool", "GlobalMaxPool"):
        yield row(name, x)
    # onnxruntime has no kernel of opset 22 for these three, which only adds element types.
    yield row("GlobalLpPool", x, until=21)
    yield row("GlobalLpPool", x, p=3, until=21)
    yield row(
        "MaxUnpool", f(1, 1, 2, 2), i([[[5, 7], [13, 15]]]).reshape(1, 1, 2, 2), kernel_shape=[2, 2], strides=[2, 2]
    )
    rois = np.array([[0, 0, 0, 4, 4], [0, 1, 1, 5, 6]], np.float32)
    yield row("MaxRoiPool", x, rois, pooled_shape=[2, 2], until=21)
    corners = np.array([[0, 0, 4, 4], [1.3, 1, 5, 5.5]], np.float32)
    extents = {"output_height": 2, "output_width": 3}
    yield row("RoiAlign", x, corners, i(0, 0), sampling_ratio=2, until=15, **extents)
    yield row("RoiAlign", x, corners, i(0, 0), spatial_scale=0.5, until=15, **extents)
    for half in ("half_pixel", "output_half_pixel"):
        options = {"coordinate_transformation_mode": half, "sampling_ratio": 2, **extents}
        yield row("RoiAlign", x, corners, i(0, 0), since=16, until=21, **options)
        yield row("RoiAlign", x, corners, i(0, 0), since=16, until=21, mode="max", **options)
    yield row("Col2Im", f(1, 12, 4), i(3, 3), i(2, 2))


def resizing() -> Iterator[Row]:
    x = f(1, 2, 4, 5)
    up, down = np.array([1, 1, 2, 1.6], np.float32), np.array([1, 1, 0.6, 0.5], np.float32)
    twice = np.array([1, 1, 2, 3], np.float32)
    for mode in ("nearest", "linear"):
        yield row("Upsample", x, mode=mode, scales=twice.tolist(), until=8)
        yield row("Upsample", x, twice, mode=mode, since=9, until=9)
        for scales in (up, down):
            yield row("Resize", x, scales, mode=mode, since=10, until=10)
    none = np.zeros(0, np.float32)
    for mode, scales in itertools.product(("nearest", "linear", "cubic"), (up, down)):
        for transformation in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"):
            modes = {"mode": mode, "coordinate_transformation_mode": transformation}
            # onnxruntime rounds length_resized of align_corners down, the official cases do not (0.6 * 4 = 2.4).
            if transformation != "align_corners" or scales is up:
                yield row("Resize", x, none, scales, since=11, **modes)
    for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        yield row("Resize", x, none, up, nearest_mode=rounding, since=11)
    yield row("Resize", x, none, none, i(1, 2, 7, 3), mode="linear", since=11, until=12)
    yield row("Resize", x, None, None, i(1, 2, 7, 3), mode="linear", since=13)
    for mode in ("nearest", "linear", "cubic"):
        modes = {"mode": mode, "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
        yield row("Resize", x, none, down, since=11, until=12, **modes)
    yield row("Resize", x, none, up, mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1, since=11)
    roi = np.array([0, 0, 0.2, 0.1, 1, 1, 0.9, 1.4], np.float32)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    # With scales, onnxruntime leaves the region out of the output's extents.
    yield row("Resize", x, roi, none, i(1, 2, 7, 3), mode="linear", since=11, until=12, **crop)
    yield row("Resize", x, roi, None, i(1, 2, 7, 3), mode="linear", since=13, **crop)
    yield row("Resize", x, None, up, mode="linear", since=13)
    for mode in ("linear", "cubic"):
        yield row("Resize", x, None, down, mode=mode, antialias=1, since=18)
    yield row("Resize", x, None, down[2:], mode="linear", axes=[2, 3], since=18)
    yield row("Resize", x, None, None, i(6, 9), axes=[3, 2], mode="linear", since=18)
    for policy in ("not_larger", "not_smaller"):
        yield row("Resize", x, None, None, i(7, 7), axes=[2, 3], keep_aspect_ratio_policy=policy, since=18)
    symmetric = {"coordinate_transformation_mode": "half_pixel_symmetric", "mode": "linear"}
    yield row("Resize", x, None, up, since=19, **symmetric)
    grid = np.clip(f(1, 3, 4, 2), -1.2, 1.2)
    for kind, padding, corners in itertools.product((0, 1, 2), ("zeros", "border", "reflection"), (0, 1)):
        sides = {"padding_mode": padding, "align_corners": corners}
        yield row("GridSample", x, grid, mode=("bilinear", "nearest", "bicubic")[kind], since=16, until=19, **sides)
        yield row("GridSample", x, grid, mode=("linear", "nearest", "cubic")[kind], since=20, **sides)
    theta = f(1, 2, 3)
    for corners in (0, 1):
        yield row("AffineGrid", theta, i(1, 2, 3, 4), align_corners=corners)


def recurrent() -> Iterator[Row]:
    steps, batch, size, hidden = 4, 2, 3, 5
    x = f(steps, batch, size)
    for name, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        outputs = 3 if name == "LSTM" else 2

        def weights(directions: int, gates: int = gates) -> tuple[np.ndarray, ...]:
            rows = gates * hidden
            return f(directions, rows, size), f(directions, rows, hidden), f(directions, 2 * rows)

        plain, both = weights(1), weights(2)
        lengths = i(4, 2, dtype=np.int32)
        starts = [f(1, batch, hidden, seed=s) for s in range(outputs - 1)]
        options = {"hidden_size": hidden, "outputs": outputs}
        yield row(name, x, *plain[:2], **options)
        yield row(name, x, *plain, lengths, *starts, **options)
        yield row(name, x, *plain, lengths, direction="reverse", **options)
        yield row(name, x, *both, lengths, direction="bidirectional", **options)
        # The cell state stays below the bound: onnxruntime does not clip it, although it is an activation's input.
        yield row(name, x[:2], *plain, clip=0.6, **options)
    gru = f(1, 15, 3), f(1, 15, 5), f(1, 30)
    yield row("GRU", x, *gru, linear_before_reset=1, hidden_size=hidden, outputs=2)
    yield row("GRU", x, *gru, activations=["HardSigmoid", "Relu"], hidden_size=hidden, outputs=2)
    lstm = f(1, 20, 3), f(1, 20, 5), f(1, 40)
    states = f(1, batch, hidden, seed=1), f(1, batch, hidden, seed=2)
    yield row("LSTM", x, *lstm, None, *states, f(1, 15), hidden_size=hidden, outputs=3)
    yield row("LSTM", x, *lstm, activations=["Sigmoid", "Tanh", "Softsign"], hidden_size=hidden, outputs=3)
    yield row("RNN", x, f(1, 5, 3), f(1, 5, 5), activations=["LeakyRelu"], activation_alpha=[0.2], hidden_size=hidden)


def others() -> Iterator[Row]:
    x = f(2, 3, 4, 5)
    channels = f(3), f(3, seed=1), f(3, seed=2), np.abs(f(3, seed=3)) + 0.5
    yield row("BatchNormalization", x, *channels, epsilon=1e-3)
    yield row("BatchNormalization", f(4, 3), *channels, since=9)
    yield row("BatchNormalization", x, *channels, training_mode=1, momentum=0.8, outputs=3, since=14, tolerance=1e-4)
    yield row("Dropout", x, ratio=0.3, until=11)
    yield row("Dropout", x, scalar(0.3), since=12)
    yield row("Dropout", x, outputs=2, since=12)  # before, nothing said what the mask is at inference
    yield row("InstanceNormalization", x, *channels[:2])
    yield row("LRN", x, size=3)
    yield row("LRN", x, size=5, alpha=0.1, beta=0.5, bias=2.0)
    for p in (1, 2):
        yield row("LpNormalization", x, p=p, axis=1)
    yield row("MeanVarianceNormalization", x, since=9)
    yield row("MeanVarianceNormalization", x, axes=[1, 2], since=9)
    yield row("LayerNormalization", x, f(5), f(5, seed=1), outputs=3)
    yield row("LayerNormalization", x, f(4, 5), axis=-2, epsilon=0.1)
    yield row("GroupNormalization", f(2, 4, 3), f(4), f(4, seed=1), num_groups=2, since=21)
    yield row("RMSNormalization", x, f(5))
    yield row("SimplifiedLayerNormalization", x, f(5), epsilon=0.1)
    yield row("SimplifiedLayerNormalization", x, f(5), outputs=2)
    scale, zero = scalar(0.1), scalar(3, np.uint8)
    yield row("QuantizeLinear", f(3, 4) * 20, scale, zero)
    yield row("QuantizeLinear", np.array([0.05, 0.15, 0.25, -0.05], np.float32), scale, scalar(0, np.int8))
    yield row("QuantizeLinear", f(3, 4), scale)
    yield row("QuantizeLinear", f(3, 4), f(3) ** 2 + 0.01, i(1, 2, 3, dtype=np.int8), axis=0, since=13)
    yield row(
        "QuantizeLinear", f(4, 6) * 5, f(4, 2) ** 2 + 0.1, i(*[[1, 2]] * 4, dtype=np.int8), block_size=3, since=21
    )
    yield row("DequantizeLinear", i(0, 3, 255, dtype=np.uint8), scale, zero)
    yield row("DequantizeLinear", i(-5, 2**30, dtype=np.int32), scale)
    yield row("DequantizeLinear", i([1, 2], [3, 4], dtype=np.int8), f(2), i(1, -1, dtype=np.int8), axis=0, since=13)
    yield row("DequantizeLinear", i(*[[1, 2, 3, 4]] * 2, dtype=np.int8), f(2, 2), axis=1, block_size=2, since=21)
    yield row("DynamicQuantizeLinear", f(3, 4), outputs=3)
    a, b = (f(2, 3) * 40 + 100).astype(np.uint8), (f(3, 4) * 40 + 100).astype(np.uint8)
    yield row("MatMulInteger", a, b)
    yield row("MatMulInteger", a, b, scalar(100, np.uint8), scalar(90, np.uint8))
    yield row("MatMulInteger", a, (f(3, 4) * 40).astype(np.int8), scalar(100, np.uint8), i(1, 2, 3, 4, dtype=np.int8))
    quantised = scale, scalar(100, np.uint8)
    yield row("QLinearMatMul", a, *quantised, b, *quantised, scalar(2.0), scalar(128, np.uint8))
    image, kernel = (f(1, 2, 5, 5) * 40 + 100).astype(np.uint8), (f(4, 2, 3, 3) * 40).astype(np.int8)
    yield row("ConvInteger", image, np.abs(kernel).astype(np.uint8), scalar(100, np.uint8))
    steps = np.abs(f(4)) + 0.1
    weights = kernel, steps, np.zeros(4, np.int8)
    yield row("QLinearConv", image, *quantised, *weights, scalar(20.0), scalar(128, np.uint8), pads=[1, 1, 1, 1])
    bias = i(1000, -1000, 0, 5, dtype=np.int32)
    yield row("QLinearConv", image, *quantised, *weights, scalar(20.0), scalar(128, np.uint8), bias)
    logits, labels = f(3, 4), i(1, 0, 3)
    for reduction in ("mean", "sum", "none"):
        yield row("SoftmaxCrossEntropyLoss", logits, labels, reduction=reduction, outputs=2)
        yield row("NegativeLogLikelihoodLoss", logits, labels, f(4) ** 2, reduction=reduction)
    yield row("SoftmaxCrossEntropyLoss", logits, labels, ignore_index=0)
    for name in ("BlackmanWindow", "HannWindow", "HammingWindow"):
        yield row(name, scalar(6, np.int64))
        yield row(name, scalar(6, np.int64), periodic=0)
    signal = f(1, 8, 1)
    yield row("DFT", signal, axis=1, until=19)
    yield row("DFT", signal, axis=1, onesided=1, until=19)
    yield row("DFT", f(1, 8, 2), inverse=1, axis=1, until=19)
    yield row("DFT", signal, None, scalar(1, np.int64), onesided=1, since=20)
    yield row("DFT", f(1, 8, 2), scalar(6, np.int64), scalar(1, np.int64), inverse=1, since=20)
    yield row("STFT", f(1, 16, 1), scalar(4, np.int64), np.hanning(8).astype(np.float32), scalar(8, np.int64))
    mel = [scalar(v, np.int64) for v in (8, 16, 8192)]
    yield row("MelWeightMatrix", *mel, scalar(0.0), scalar(4096.0))
    words = np.array(["a b", "The", "b,c d"], object)
    yield row("StringConcat", words, words[:1])
    yield row("StringSplit", words, outputs=2)
    yield row("RegexFullMatch", words, pattern="[a-z] .*")
    yield row(
        "StringNormalizer", words, case_change_action="UPPER", locale="C.UTF-8", stopwords=["The"], is_case_sensitive=1
    )
    counts = {"ngram_counts": [0, 2], "ngram_indexes": [0, 1, 2], "pool_int64s": [2, 3, 5, 4]}
    grams = {"max_gram_length": 2, "min_gram_length": 1, "max_skip_count": 0, "mode": "TF", **counts}
    yield row("TfIdfVectorizer", i([2, 5, 4, 3], [3, 3, 5, 4]), **grams)
    yield row("SequenceConstruct", f(2, 3), f(1))
    yield row("SplitToSequence", f(5, 2), scalar(2, np.int64))
    query, key = f(1, 4, 3, 8), f(1, 2, 5, 8)
    yield row("Attention", query, key, key + 1, is_causal=1)
    yield row("RotaryEmbedding", f(1, 2, 3, 4), f(5, 2), f(5, 2, seed=1), i([0, 1, 4]))
    yield row("TensorScatter", f(2, 1, 5, 3), f(2, 1, 2, 3), i(0, 3))
    offset = f(1, 8, 3, 3)
    yield row("DeformConv", f(1, 1, 4, 4), f(1, 1, 2, 2), offset)


def fake_quantisation() -> Iterator[Row]:
    """Domain qonnx.custom_op.general; tests/ops/test_qonnx.py has all rounding modes."""
    qonnx: dict[str, Any] = {"domain": "qonnx.custom_op.general", "since": 1}
    x, half, zero, bits = np.float32([[-2.5, -0.74, 0.8], [1.2, 3.3, 9.1]]), scalar(0.5), scalar(1), scalar(3)
    on_grid = np.float32([[-2.5, -0.5, 1.0], [1.0, 1.0, 1.0]])
    for name in ("Quant", "IntQuant"):
        yield row(name, x, half, zero, bits, expected=(on_grid,), **qonnx)
    yield row("BipolarQuant", x, half, expected=(np.float32([[-0.5, -0.5, 0.5], [0.5, 0.5, 0.5]]),), **qonnx)
    widths = zero, scalar(8), scalar(7)
    yield row("Trunc", x, half, *widths, expected=(np.float32([[-1.5, -0.5, 0], [0, 1.5, 4.0]]),), until=1, **qonnx)
    widths = scalar(0), scalar(8), scalar(1), bits
    qonnx["since"] = 2
    yield row("Trunc", x, half, *widths, expected=(np.float32([[-3, -1, 1], [1, 3, 3]]),), **qonnx)
    qonnx["since"] = 1
    narrow = scalar(1), scalar(2), scalar(1), scalar(1), scalar(5)
    yield row("FloatQuant", x, *narrow, expected=(np.float32([[-2, -0.5, 1], [1, 3, 5]]),), **qonnx)


def extensions() -> Iterator[Row]:
    """Domain ai.onnx.contrib; tests/ops/test_extensions.py has more, and beside the library."""

    def text(*words: Any) -> np.ndarray:
        return np.array(words, object)

    contrib: dict[str, Any] = {"domain": "ai.onnx.contrib", "since": 1}
    words = text(" Ab", "c ")
    yield row("StringUpper", words, expected=(text(" AB", "C "),), **contrib)
    yield row("StringLower", words, expected=(text(" ab", "c "),), **contrib)
    yield row("StringStrip", words, expected=(text("Ab", "c"),), **contrib)
    yield row("StringLength", words, expected=(i(3, 2),), **contrib)
    yield row("StringConcat", words, words, expected=(text(" Ab Ab", "c c "),), **contrib)
    yield row("StringEqual", words, text("c ", "c "), expected=(np.array([False, True]),), **contrib)
    yield row("StringJoin", words, text(";"), i(0), expected=(text(" Ab;c "),), **contrib)
    parts = i([0, 0], [0, 1], [1, 0]), text("a", "b", "c"), i(2, 2)
    yield row("StringSplit", text("a,b", "c"), text(","), np.array([True]), expected=parts, outputs=3, **contrib)
    marks = text("(b)"), text(r"<\1>")
    yield row("StringRegexReplace", words, *marks, expected=(text(" A<b>", "c "),), **contrib)
    spans = text("A", "b", "c"), i(0, 2, 0), i(1, 3, 1), i(0, 2, 3)
    given = text("A b", "c"), text(r"(\s)"), text("")
    yield row("StringRegexSplitWithOffsets", *given, expected=spans, outputs=4, **contrib)
    yield row("StringMapping", words, map="c \tC", expected=(text(" Ab", "C"),), **contrib)
    table = {"map": "c \t1 2\nd\t3 4", **contrib}
    yield row("StringToVector", words, unk="0 9", expected=(i([0, 9], [1, 2]),), **table)
    yield row("VectorToString", i([3, 4], [3, 5]), unk="?", expected=(text("d", "?"),), **table)
    yield row("MaskedFill", words, np.array([False, True]), expected=(text("c "),), **contrib)
    yield row("RaggedTensorToSparse", i(0, 2, 3), expected=(i([0, 0], [0, 1], [1, 0]), i(2, 2)), outputs=2, **contrib)
    yield row("SegmentExtraction", i(0, 4, 4, 0), expected=(i([1, 3]), i(4)), outputs=2, **contrib)
    yield row("SegmentSum", np.float32([[1], [2], [4]]), i(0, 0, 1), expected=(np.float32([[3], [4]]),), **contrib)
    yield row("Inverse", np.float32([[2, 0], [0, 4]]), expected=(np.float32([[0.5, 0], [0, 0.25]]),), **contrib)
    signs = np.float32([-2, 0]), np.float32([0, 3])
    yield row("NegPos", np.float32([-2, 3]), expected=signs, outputs=2, **contrib)
    vocabulary = {"vocab_file": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nc\n##d", **contrib}
    offsets = i([0, 0], [0, 1], [1, 2], [0, 0])
    tokens = i(2, 5, 6, 3), i(0, 0, 0, 0), i(1, 1, 1, 1), offsets
    yield row("BertTokenizer", text("CD"), expected=tokens, outputs=4, **vocabulary)
    pair = i([2, 5, 3, 1, 3]), i([1] * 5), i([0, 0, 0, 1, 1])
    yield row("HfBertTokenizer", text("c", "x"), expected=pair, outputs=3, **vocabulary)
    yield row("BertTokenizerDecoder", i(2, 5, 6), np.zeros(0, np.int64), expected=(text("[CLS] cd"),), **vocabulary)
    pieces = text("un", "##do"), i(0, 2), i(0), i(2)
    options = {"vocab": '{"un": 1, "##do": 2}', "suffix_indicator": "##", "unknown_token": "?", **contrib}
    yield row("WordpieceTokenizer", text("undo"), np.zeros(0, np.int64), expected=pieces, outputs=4, **options)
    pairs = {"vocab": '{"a": 0, "b": 1, "ab": 2}', "merges": "a b", **contrib}
    yield row("GPT2Tokenizer", text("aab", "b"), expected=(i([0, 2], [1, 0]), i([1, 1], [1, 0])), outputs=2, **pairs)
    letters = {"id_vocab": "a\nb\nab", "byte_decoder": "97\t97\n98\t98", **contrib}
    yield row("BpeDecoder", i(2, 0), expected=(text("aba"),), **letters)
    png = np.frombuffer(base64.b64decode(PNG), np.uint8)
    yield row("DecodeImage", png, expected=(np.uint8([[[3, 2, 1], [6, 5, 4]]]),), **contrib)


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVR4nGNkZGJmZmYGAAA8ABHVfkbmAAAAAElFTkSuQmCC"
"""The pixels (1, 2, 3) and (4, 5, 6)."""


def learning() -> Iterator[Row]:
    """Domain ai.onnx.ml; trees and support vectors have tests of their own."""
    x = f(3, 4)
    ml: dict[str, Any] = {"domain": "ai.onnx.ml", "since": 1}
    yield row("ArrayFeatureExtractor", x, i(0, 2), **ml)
    yield row("Binarizer", x, threshold=0.1, **ml)
    yield row("FeatureVectorizer", x, f(3, 2), inputdimensions=[4, 2], **ml)
    yield row("Imputer", np.where(x > 0, x, np.nan), imputed_value_floats=[1.0, 2.0, 3.0, 4.0], **ml)
    yield row("Imputer", i([1, 9], [9, 3]), imputed_value_int64s=[5], replaced_value_int64=9, **ml)
    for norm in ("MAX", "L1", "L2"):
        yield row("Normalizer", x, norm=norm, **ml)
    yield row("Scaler", x, offset=[0.5] * 4, scale=[1.0, 2.0, 3.0, 4.0], **ml)
    yield row("OneHotEncoder", i(1, 3, 7), cats_int64s=[3, 1], **ml)
    words = np.array(["a", "b", "c"], object)
    yield row("OneHotEncoder", words, cats_strings=["b", "a"], **ml)
    table = {"cats_int64s": [4, 7], "cats_strings": ["a", "b"], "default_int64": -5, "default_string": "none"}
    yield row("CategoryMapper", words, **table, **ml)
    yield row("CategoryMapper", i(7, 4, 1), **table, **ml)
    yield row("LabelEncoder", words, classes_strings=["b", "a"], until=1, **ml)
    pairs = {"keys_strings": ["b", "a"], "values_floats": [0.5, 2.0], "default_float": -3.0}
    yield row("LabelEncoder", words, **pairs, domain="ai.onnx.ml", since=2)
    weights = {"coefficients": f(8).tolist(), "intercepts": [0.5, -1.0]}
    for transform in ("NONE", "SOFTMAX", "LOGISTIC"):
        yield row("LinearRegressor", x, targets=2, **weights, **ml)
        options = {"classlabels_ints": [3, 8], "post_transform": transform, "outputs": 2}
        yield row("LinearClassifier", x, **weights, **options, **ml)


UNCOVERED = {
    "take or give sequences, optionals or graphs, which a one-node model of tensors has not": (
        *("ConcatFromSequence", "If", "Loop", "Optional", "OptionalGetElement", "OptionalHasElement", "Scan"),
        *("SequenceAt", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap"),
    ),
    "draw random numbers": (
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    ),
    "onnxruntime has no kernel": (
        "BitCast",
        "CausalConvWithState",
        "ImageDecoder",
        "LinearAttention",
        "SwiGLU",
        "Swish",
    ),
    "an initializer in another spelling": ("Constant",),
}
"""Operators of ONNX's default domain without a row, by reason; the official cases cover them."""

HOST_ONLY = {
    "string": "no JAX array holds text",
    "float6": "XLA compiles nothing with them",
}
"""Element types that no compiled function takes."""

TYPES_LEFT_OUT = {("", "Col2Im"): ("string",), ("", "GridSample"): ("string",)}
"""(domain, operator) -> element types of the schema that it does not take, as its limits say."""
