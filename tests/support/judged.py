"""Where no reference agrees with this library on an edge value, and why that is right: one row for each kind.

A row says of which operators, for which operands, and who is judged by what: the text of the specification, or that it
says nothing and implementations differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tests.support.drawing import is_float
from tests.support.edges import Edge


@dataclass(frozen=True)
class Row:
    """Operators, names separated by spaces, the operands of which it speaks, and the reason."""

    operators: str
    when: Callable[[Edge], bool]
    reason: str

    def covers(self, edge: Edge) -> bool:
        return edge.node.op_type in self.operators.split() and self.when(edge)


def _floats(edge: Edge) -> Iterator[np.ndarray]:
    for x in edge.feeds.values():
        if isinstance(x, np.ndarray) and is_float(x.dtype) and x.size:
            yield x.astype(np.float64)


def special(edge: Edge) -> bool:
    """NaN or an infinity among the operands."""
    return any(not np.isfinite(x).all() for x in _floats(edge))


def large(edge: Edge) -> bool:
    """NaN, an infinity, or a number beyond 10^9."""
    return any(not (np.abs(x) < 1e9).all() for x in _floats(edge))


def has(*dtypes: str) -> Callable[[Edge], bool]:
    """An operand of one of some dtypes, by the beginning of its name."""
    return lambda edge: any(str(getattr(x, "dtype", "")).startswith(dtypes) for x in edge.feeds.values())


def integers(edge: Edge) -> bool:
    """No operand that is not of integers."""
    return not any(True for _ in _floats(edge))


def empty(edge: Edge) -> bool:
    return any(isinstance(x, np.ndarray) and not x.size for x in edge.feeds.values())


def outside(edge: Edge) -> bool:
    """An integer that is negative, or not below the least extent but 1 of the first operand."""
    first, *others = edge.feeds.values()
    return any(((x < 0) | (x >= max(first.shape, default=1))).any() for x in others if x.dtype.kind == "i")


def attribute(*names: str) -> Callable[[Edge], bool]:
    return lambda edge: any(a.name in names for a in edge.node.attribute)


def lengths(edge: Edge) -> bool:
    """A recurrent network with an input sequence_lens."""
    return len(edge.node.input) > 4 and bool(edge.node.input[4])


def either(*conditions: Callable[[Edge], bool]) -> Callable[[Edge], bool]:
    return lambda edge: any(condition(edge) for condition in conditions)


def always(_: Edge) -> bool:
    return True


ROWS: tuple[Row, ...] = (
    Row("MaxPool GlobalMaxPool MaxRoiPool LpPool AveragePool ReduceMax ReduceMin", special,
        "ONNX does not say what the greatest of NaN and a number is. Here and in PyTorch it is NaN; the references "
        "compare, so that the place of the NaN decides. Of averages onnx.reference leaves out NaN"),
    Row("ConvTranspose", special,
        "a weight that is NaN or infinite multiplies the zeros between and around the pixels: docs/limits.md"),
    Row("ConvTranspose", attribute("auto_pad"), "SAME with strides beyond the kernel has a DeviationWarning"),
    Row("Det", large, "infinity minus infinity, or not, by the order of pivots"),
    Row("Softmax LogSoftmax Hardmax", special, "onnxruntime's maximum passes over NaN"),
    Row("Attention FlexAttention MultiHeadAttention GroupQueryAttention QAttention", large,
        "scores beyond 10^9: XLA subtracts their peak by a fused multiply-add, and the weights underflow. A masked key "
        "that is NaN is not read, of which test_attention_4d_causal_boolmask_nan_robustness is the official case; the "
        "references add -inf to NaN"),
    Row("GRU LSTM RNN AttnLSTM DynamicQuantizeLSTM", special,
        "onnxruntime's activations are clamped, by which NaN becomes a number; onnx.reference has no sequence_lens"),
    Row("GRU LSTM RNN", either(lengths, has("bfloat16"), attribute("clip", "activations", "layout", "input_forget")),
        "onnx.reference ignores these, or rounds each step; onnxruntime does not take all dtypes and lengths"),
    Row("GRU LSTM RNN", empty, "of no steps the last state is the first one; onnxruntime's is uninitialised memory"),
    Row("Resize Upsample GridSample CropAndResize RoiAlign", large,
        "a neighbour of weight 0 is not read; the references multiply it, or clip an infinity to the largest float. "
        "A coordinate that is NaN or infinite means nothing: onnx.reference raises, onnxruntime reads some pixel"),
    Row("RoiAlign Gather GatherElements GatherND ReverseSequence", outside,
        "a traced index out of range reads NaN, or the least integer; onnxruntime raises, onnx.reference wraps"),
    Row("QLinearConv", empty, "of no channels onnxruntime's output is uninitialised memory"),
    Row("GridSample", has("float16", "bfloat16"), "onnx.reference rounds coordinates to the type of the grid"),
    Row("DeformConv DFT STFT", special, "a pixel at NaN is outside, so 0; a fast transform multiplies by no zero"),
    Row("Resize GridSample", has("int", "uint"),
        "ONNX does not say how an interpolated integer is rounded; onnx.reference wraps where it overflows"),
    Row("Resize", has("float64", "complex"), "coordinates are float32, as the scales are; onnx.reference has float64"),
    Row("SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss", either(outside, large),
        "a label has to be a class or ignore_index: of others the loss is NaN; the references read another class"),
    Row("LRN", large, "onnx.reference leaves out the last channel; onnxruntime keeps running sums, inf - inf"),
    Row("BlackmanWindow HammingWindow HannWindow", integers,
        "the symmetric window of one sample is 0/0 by the formula: 1, as in SciPy and PyTorch"),
    Row("Cast CastLike", has("float", "bfloat", "int"),
        "to strings `plain floating-point representation` is specified, which both references leave for an exponent; "
        "NaN, negative float8e8m0 and numbers out of range are undefined"),
    Row("ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp ReduceProd ReduceMean ReduceSum", integers,
        "ONNX does not say what overflows: here sums wrap, as in NumPy; onnxruntime saturates, and onnx.reference "
        "returns int64"),
    Row("RMSNormalization", has("float64", "float16", "bfloat16"), "the output has the type of scale by the schema"),
    Row("LayerNormalization", has("float64", "float16", "bfloat16"),
        "stash_type=1 means float32, in which the references do not compute, or whose results they do not return"),
    Row("DynamicQuantizeLinear", special, "the zero point of an infinite range is NaN, as an integer anything"),
    Row("AffineGrid", has("bfloat16", "float16", "float64"), "onnx.reference returns another type than the schema's"),
    Row("Adam Adagrad Momentum", always, "onnx.reference returns float64"),
    Row("Clip", either(special, has("float64", "bfloat16", "float16")),
        "an absent bound is the extreme of the input's type by the text; onnx.reference takes that of float32"),
    Row("DequantizeLinear", has("float4", "float8"), "onnx.reference leaves out the zero point, not the formula"),
    Row("Div Mod Pow", integers, "a quotient by 0 is undefined, as a negative power of 0 is"),
    Row("HardSwish HardSigmoid BatchNormalization LRN", has("float64"),
        "alpha and epsilon are float32 attributes, which onnx.reference takes in float64 or not"),
    Row("InstanceNormalization", lambda edge: any(not x.ndim for x in edge.feeds.values()), "no rank is specified"),
    Row("OneHot", lambda edge: edge.opset < 11, "a negative index is outside; onnx.reference wraps it"),
    Row("OneHot", has("complex"), "onnx.reference computes off + (on - off) * mask, which is NaN beside an infinity"),
    Row("QuantizeLinear", either(large, has("int32", "float16", "bfloat16", "float8")),
        "onnx.reference converts to the integer before it saturates; both leave out a float8 zero point, which the "
        "text has `for consistency`"),
    Row("StringNormalizer", always, "onnx.reference drops empty strings, and accents"),
    Row("CDist", special, "onnxruntime computes x^2 - 2xy + y^2, which is NaN where the distance is infinite"),
    Row("QMoE MoE MoEGroupRouter DynamicTimeWarping Normalizer", large,
        "the order of NaN among scores, and of what rounds to one number, is unspecified: onnxruntime compares"),
    Row("MatMulBnb4 MatMulNBits", special, "a scale that is infinite multiplies sums here, and every weight there"),
    Row("MatMulBnb4", attribute("transB"), "with transB=0 onnxruntime leaves most of the output unwritten"),
    Row("GroupQueryAttention", has("int32"), "queries beyond a sequence's length (seqlens_k) are padding"),
    Row("Attention MultiHeadAttention QAttention", has("float16"), "sums of float16 in another order, which overflow"),
    Row("LinearRegressor", has("float64", "int"), "the output is float32 by the schema, not onnx.reference's float64"),
    Row("QLinearMul QLinearAdd QLinearAveragePool QLinearGlobalAveragePool", always,
        "onnxruntime multiplies scales in another order, so that ties fall elsewhere: one unit"),
)  # fmt: skip


RAISED: tuple[Row, ...] = (
    Row("AveragePool MaxPool LpPool Conv", always, "windows that do not fit: an error, where the references are empty"),
    Row("LinearAttention", empty, "heads of no features have no scale"),
    Row("ReduceMean", empty, "the integer mean of no elements is undefined"),
)
"""Likewise where both references answer what this library refuses."""
