# ruff: noqa: B007, SIM108
"""Functions that onnxscript reads; it needs their source, and imports when it does."""

# mypy: ignore-errors
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op
from onnxscript.onnx_types import INT64
from onnxscript.values import Opset

ours = Opset("zoo", 1)


@script(default_opset=op)
def arithmetic(x: FLOAT, y: FLOAT):
    return op.Exp(-x) + x * y - x / (y * y + 1.0)


@script(default_opset=op)
def comparisons(x: FLOAT, y: FLOAT):
    return x < y, x >= y, op.Where(x > y, x, y)


@script(default_opset=op)
def powers(x: FLOAT):
    return x**2 + op.Abs(x) ** 1.5


@script(default_opset=op)
def slices(x: FLOAT):
    return x[:, 1:3], x[0], x[1, 2], x[:, ::2]


@script(default_opset=op)
def negative_steps(x: FLOAT):
    return x[::-1, ::-2]


@script(default_opset=op)
def branch(x: FLOAT):
    if op.ReduceSum(x, keepdims=0) > 0.0:
        y = op.Sin(x)
    else:
        y = op.Cos(x)
    return y


@script(default_opset=op)
def branches_without_else_value(x: FLOAT):
    y = op.Identity(x)
    if op.ReduceMax(x, keepdims=0) > 1.0:
        y = x * 2.0
        z = y + 1.0
    else:
        z = y - 1.0
    return y, z


@script(default_opset=op)
def for_loop(x: FLOAT):
    y = op.Identity(x)
    for i in range(3):
        y = op.Tanh(y + x) + op.Cast(i, to=1)
    return y


@script(default_opset=op)
def for_loop_of_a_count(x: FLOAT, n: INT64):
    y = op.Identity(x)
    for i in range(n):
        y = y * 0.5 + op.Cast(i, to=1)
    return y


@script(default_opset=op)
def while_loop(x: FLOAT):
    y = op.Identity(x)
    more = op.ReduceMean(y, keepdims=0) < 3.0
    while more:
        y = y + 1.0
        more = op.ReduceMean(y, keepdims=0) < 3.0
    return y


@script(default_opset=op)
def loop_with_break(x: FLOAT, n: INT64):
    y = op.Identity(x)
    for i in range(n):
        y = y + 1.0
        stop = op.ReduceMean(y, keepdims=0) > 99.0
        if stop:
            break
    return y


@script(default_opset=op)
def loop_in_loop(x: FLOAT):
    y = op.Identity(x)
    for i in range(2):
        for j in range(3):
            y = op.Sin(y) + op.Cast(i + j, to=1)
    return y


@script(ours, default_opset=op)
def squared(x):
    return x * x


@script(ours, default_opset=op)
def scaled(x, alpha: float = 2.0):
    return x * alpha


@script(default_opset=op)
def calls(x: FLOAT):
    return squared(squared(x)) + squared(x + 1.0)


@script(default_opset=op)
def attribute_of_a_call(x: FLOAT):
    return scaled(x, alpha=3.0) + scaled(x)


@script(default_opset=op)
def gelu_by_hand(x: FLOAT):
    return 0.5 * x * (1.0 + op.Erf(x * 0.70710678))


@script(default_opset=op)
def layer_norm_by_hand(x: FLOAT):
    mean = op.ReduceMean(x, op.Constant(value_ints=[1]))
    d = x - mean
    return d / op.Sqrt(op.ReduceMean(d * d, op.Constant(value_ints=[1])) + 1e-5)


@script(default_opset=op)
def attention_by_hand(x: FLOAT):
    scores = op.MatMul(x, op.Transpose(x, perm=[1, 0])) * 0.5
    return op.MatMul(op.Softmax(scores, axis=-1), x)


@script(default_opset=op)
def scan_with_a_graph(x: FLOAT):
    @graph()
    def summed(total: FLOAT[4], row: FLOAT[4]):
        new = op.Add(total, row)
        out = op.Identity(new)
        return new, out

    start = op.Constant(value_floats=[0.0, 0.0, 0.0, 0.0])
    last, all_of_them = op.Scan(start, x, body=summed, num_scan_inputs=1)
    return last, all_of_them


@script(default_opset=op)
def casts(x: FLOAT):
    return op.Cast(x * 3.0, to=6), op.Cast(x, to=11), op.CastLike(x > 0.0, x)


@script(default_opset=op)
def two_outputs(x: FLOAT):
    values, places = op.TopK(x, op.Constant(value_ints=[2]))
    return values, places


@script(default_opset=op)
def shape_arithmetic(x: FLOAT):
    n = op.Shape(x)
    return op.Reshape(x, op.Concat(n[1:], n[:1], axis=0)), op.Size(x) * 2


@script(default_opset=op)
def optional_sequence(x: FLOAT):
    parts = op.SequenceConstruct(x, x + 1.0)
    return op.ConcatFromSequence(parts, axis=1), op.SequenceAt(parts, op.Constant(value_int=1))


@script(default_opset=op)
def clipped(x: FLOAT):
    return op.Clip(x, -0.5, 0.5) + op.Clip(x, None, 0.1)


@script(default_opset=op)
def logical(x: FLOAT, y: FLOAT):
    return op.And(x > 0.0, y > 0.0), op.Or(x > 0.0, y > 0.0), op.Not(x == y)


@script(default_opset=op)
def matrices(x: FLOAT):
    return x @ op.Transpose(x), op.Einsum(x, x, equation="ij,kj->ik"), op.Gemm(x, x, transB=1, alpha=0.5)
