"""Opsets 1 to 6, which onnxruntime does not run: what the specification says of them, worked out in NumPy.

Every version of every operator up to opset 6 has a row, or a reason why not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from tests.support.branches import Hands, each_in_both_hands
from tests.support.helpers import run_op
from tests.support.violations import every_case

LAST = 6


class Row(NamedTuple):
    """An operator at the opsets given, its inputs, attributes and expected outputs."""

    name: str
    opsets: tuple[int, ...]
    inputs: tuple[Any, ...]
    attributes: dict[str, Any]
    expected: Any


def f(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.float32)


def i(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int64)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


X = np.linspace(-2, 3, 24, dtype=np.float32).reshape(2, 3, 4)
IMAGE = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
RNG = np.random.default_rng(6)

ELEMENTWISE: dict[str, tuple[np.ndarray, dict[str, Any], Callable[[Any], Any]]] = {
    "Abs": (X, {}, np.abs),
    "Ceil": (X, {}, np.ceil),
    "Elu": (X, {"alpha": 2.0}, lambda x: np.where(x < 0, 2 * (np.exp(x) - 1), x)),
    "Exp": (X, {}, np.exp),
    "Floor": (X, {}, np.floor),
    "HardSigmoid": (X, {}, lambda x: np.maximum(0, np.minimum(1, 0.2 * x + 0.5))),
    "LeakyRelu": (X, {}, lambda x: np.where(x < 0, 0.01 * x, x)),
    "Log": (np.abs(X) + 1, {}, np.log),
    "Neg": (X, {}, np.negative),
    "Reciprocal": (X + 5, {}, lambda x: 1 / x),
    "Relu": (X, {}, lambda x: np.maximum(x, 0)),
    "Sigmoid": (X, {}, sigmoid),
    "Sqrt": (np.abs(X), {}, np.sqrt),
    "Tanh": (X, {}, np.tanh),
}


def elementwise() -> list[Row]:
    rows = []
    for name, (x, attributes, function) in ELEMENTWISE.items():
        rows.append(Row(name, (1, 6), (x,), attributes, function(x)))
    negative = np.exp(np.minimum(X, 0)) - 1
    for opset, alpha, gamma in ((1, 1.6732, 1.0507), (6, 1.67326319217681884765625, 1.05070102214813232421875)):
        rows.append(Row("Selu", (opset,), (X,), {}, gamma * np.where(X > 0, X, alpha * negative)))
    slope = f(0.5, 2, 3)
    rows += [
        Row("Softplus", (1,), (X,), {}, np.log(np.exp(X) + 1)),
        Row("Softsign", (1,), (X,), {}, X / (1 + np.abs(X))),
        Row("Identity", (1,), (X,), {}, X),
        Row("Not", (1,), (X > 0,), {}, X <= 0),
        Row("PRelu", (1,), (X, slope), {}, np.where(X < 0, X * slope[:, None], X)),
        Row("PRelu", (6,), (X, f(0.5)), {}, np.where(X < 0, X * 0.5, X)),
        Row("Clip", (1, 6), (X,), {"min": -1.0, "max": 2.0}, np.clip(X, -1, 2)),
        Row("Clip", (1, 6), (X,), {"max": 2.0}, np.minimum(X, 2)),
        Row("Cast", (1,), (X,), {"to": "INT32"}, np.trunc(X).astype(np.int32)),
        Row("Cast", (1,), (X,), {"to": "bool"}, X != 0),
        Row("Cast", (6,), (X,), {"to": 6}, np.trunc(X).astype(np.int32)),
    ]
    return rows


def broadcasts() -> list[Row]:
    """Equal shapes; with broadcast=1 a scalar, the end of A's shape, or a part of it from ``axis`` on."""
    rows = []
    a, b = np.abs(X) + 1, f(2, 1, 3)
    arithmetic: dict[str, Callable[..., Any]] = {
        "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power,
        "Greater": np.greater, "Less": np.less,
    }  # fmt: skip
    for name, function in arithmetic.items():
        opsets = (1, 6) if name in ("Add", "Sub", "Mul", "Div") else (1,)
        wide = {"broadcast": 1}
        rows += [
            Row(name, opsets, (a, a[::-1].copy()), {}, function(a, a[::-1])),
            Row(name, opsets, (a, f(2)[0].reshape(())), wide, function(a, np.float32(2))),
            Row(name, opsets, (a, a[0, 0]), wide, function(a, a[0, 0])),
            Row(name, opsets, (a, b), {**wide, "axis": 1}, function(a, b[:, None])),
            Row(name, opsets, (a, b[:2]), {**wide, "axis": 0}, function(a, b[:2, None, None])),
            Row(name, opsets, (a, a[:1, :, :1][0]), {**wide, "axis": 1}, function(a, a[:1, :, :1])),
        ]
    rows.append(Row("Div", (1, 6), (i(7, -7, 7), i(2, 2, -2)), {}, i(3, -3, -3)))
    p, q = X > 0, np.array([True, False, True])
    logic: dict[str, Callable[..., Any]] = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}
    for name, function in (logic | {"Equal": np.equal}).items():
        rows.append(Row(name, (1,), (p, ~p), {}, function(p, ~p)))
        rows.append(Row(name, (1,), (p, q), {"broadcast": 1, "axis": 1}, function(p, q[:, None])))
    three = X, X * 2, 1 - X
    variadic: dict[str, Callable[..., Any]] = {
        "Max": lambda v: np.max(v, 0), "Min": lambda v: np.min(v, 0),
        "Mean": lambda v: np.mean(v, 0), "Sum": lambda v: np.sum(v, 0),
    }  # fmt: skip
    for name, function in variadic.items():  # of one shape: these broadcast from opset 8 on
        rows.append(Row(name, (1, 6), three, {}, function(three)))
    return rows


def reductions() -> list[Row]:
    functions: dict[str, Callable[..., Any]] = {
        "Sum": np.sum, "Mean": np.mean, "Max": np.max, "Min": np.min, "Prod": np.prod,
        "L1": lambda x, **k: np.sum(np.abs(x), **k),
        "L2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
        "LogSum": lambda x, **k: np.log(np.sum(x, **k)),
        "LogSumExp": lambda x, **k: np.log(np.sum(np.exp(x), **k)),
        "SumSquare": lambda x, **k: np.sum(x * x, **k),
    }  # fmt: skip
    x = np.abs(X) + 0.5
    rows = []
    for kind, function in functions.items():
        name = f"Reduce{kind}"
        rows.append(Row(name, (1,), (x,), {}, function(x, axis=None, keepdims=True)))
        rows.append(Row(name, (1,), (x,), {"axes": (0, 2), "keepdims": 0}, function(x, axis=(0, 2))))
    for name, pick in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
        rows.append(Row(name, (1,), (X,), {}, pick(X, 0)[None]))
        rows.append(Row(name, (1,), (X,), {"axis": 2, "keepdims": 0}, pick(X, 2)))
    best = np.sort(X, 1)[:, ::-1][:, :2]
    rows.append(
        Row("TopK", (1,), (X,), {"k": 2, "axis": 1, "n_outputs": 2}, (best, np.argsort(-X, 1, kind="stable")[:, :2]))
    )
    return rows


def shapes() -> list[Row]:
    blocks = IMAGE.reshape(1, 2, 2, 2, 2, 2).transpose(0, 3, 5, 1, 2, 4).reshape(1, 8, 2, 2)
    crop = X[1:2, :, 1:3]
    rows = [
        Row("Concat", (1,), (X, X), {}, np.concatenate([X, X], 1)),
        Row("Concat", (1, 4), (X, X), {"axis": 2}, np.concatenate([X, X], 2)),
        Row("Constant", (1,), (), {"value": X}, X),
        Row("DepthToSpace", (1,), (blocks,), {"blocksize": 2}, IMAGE),
        Row("SpaceToDepth", (1,), (IMAGE,), {"blocksize": 2}, blocks),
        Row("Flatten", (1,), (X,), {}, X.reshape(2, 12)),
        Row("Flatten", (1,), (X,), {"axis": 0}, X.reshape(1, 24)),
        Row("Flatten", (1,), (X,), {"axis": 3}, X.reshape(24, 1)),
        Row("Gather", (1,), (X, i([0, 2], [1, 1])), {"axis": 1}, X[:, [[0, 2], [1, 1]]]),
        Row("Reshape", (1,), (X,), {"shape": (0, -1)}, X.reshape(2, 12)),
        Row("Reshape", (5,), (X, i(-1, 0, 2)), {}, X.reshape(4, 3, 2)),
        Row("Shape", (1,), (X,), {}, i(2, 3, 4)),
        Row("Size", (1,), (X,), {}, np.array(24)),
        Row("Slice", (1,), (X,), {"starts": (1, -3), "ends": (9, -1), "axes": (0, 2)}, crop),
        Row("Slice", (1,), (X,), {"starts": (1, 0, 1), "ends": (2, 1000, 3)}, crop),
        Row("Split", (1,), (X, f(1, 3)), {"axis": 2, "n_outputs": 2}, (X[..., :1], X[..., 1:])),
        Row("Split", (1,), (X,), {"axis": 2, "split": (3, 1), "n_outputs": 2}, (X[..., :3], X[..., 3:])),
        Row("Split", (2,), (X,), {"n_outputs": 2}, (X[:1], X[1:])),
        Row("Split", (2,), (X,), {"axis": 1, "split": (2, 1), "n_outputs": 2}, (X[:, :2], X[:, 2:])),
        Row("Squeeze", (1,), (X[None, :, None],), {"axes": (0, 2)}, X),
        Row("Squeeze", (1,), (X[None, :, None],), {}, X),
        Row("Tile", (1,), (X, np.array(2, np.float32), np.array(1, np.float32)), {}, np.tile(X, (1, 2, 1))),
        Row("Tile", (6,), (X, i(1, 2, 3)), {}, np.tile(X, (1, 2, 3))),
        Row("Transpose", (1,), (X,), {}, X.T),
        Row("Transpose", (1,), (X,), {"perm": (1, 0, 2)}, X.transpose(1, 0, 2)),
        Row("Unsqueeze", (1,), (X,), {"axes": (0, 4)}, X[None, ..., None]),
    ]
    widths = ((1, 0), (0, 2), (1, 1))
    for opset, name in ((1, "paddings"), (2, "pads")):
        where = {name: (1, 0, 1, 0, 2, 1)}
        rows.append(Row("Pad", (opset,), (X,), {**where, "value": 7.0}, np.pad(X, widths, constant_values=7)))
        for mode in ("reflect", "edge"):
            rows.append(Row("Pad", (opset,), (X,), {**where, "mode": mode}, np.pad(X, widths, mode=mode)))
    twice = IMAGE.repeat(2, 2).repeat(3, 3)
    rows.append(Row("Upsample", (1,), (IMAGE,), {"height_scale": 2.0, "width_scale": 3.0}, twice))
    return rows


def _window(image: np.ndarray, function: Callable[[Any], Any]) -> np.ndarray:
    """A function of each 2 x 2 window, two apart."""
    n, c, h, w = image.shape
    return function(
        image.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h // 2, w // 2, 4)
    )


def networks() -> list[Row]:
    two = {"kernel_shape": (2, 2), "strides": (2, 2)}
    a, b, c = (RNG.normal(size=s).astype(np.float32) for s in ((2, 3), (3, 4), (4,)))
    weights = RNG.normal(size=(3, 2, 1, 1)).astype(np.float32)
    pointwise = np.einsum("nchw,oc->nohw", IMAGE, weights[..., 0, 0])
    scale, bias, mean, var = f(2, 3), f(1, -1), f(4, 5), f(0.25, 4)
    columns = tuple(v[:, None, None] for v in (scale, bias, mean, var))

    def standard(x: Any, centre: Any, variance: Any) -> Any:
        return columns[0] * (x - centre) / np.sqrt(variance + 1e-5) + columns[1]

    now, spread = IMAGE.mean((0, 2, 3)), IMAGE.var((0, 2, 3))
    running = mean * 0.9 + now * 0.1, var * 0.9 + spread * 0.1
    own = standard(IMAGE, IMAGE.mean((2, 3), keepdims=True), IMAGE.var((2, 3), keepdims=True))
    rows = [
        Row("MatMul", (1,), (a, b), {}, a @ b),
        Row("Gemm", (1, 6), (a, b, c), {"broadcast": 1, "alpha": 0.5, "beta": 2.0}, 0.5 * (a @ b) + 2 * c),
        Row("Gemm", (1, 6), (a, b, a @ b), {}, 2 * (a @ b)),
        Row("Gemm", (1, 6), (a.T.copy(), b.T.copy(), c), {"broadcast": 1, "transA": 1, "transB": 1}, a @ b + c),
        Row("Conv", (1,), (IMAGE, weights, f(1, 2, 3)), {}, pointwise + f(1, 2, 3)[:, None, None]),
        Row("ConvTranspose", (1,), (IMAGE, weights.transpose(1, 0, 2, 3).copy()), {}, pointwise),
        Row("AveragePool", (1,), (IMAGE,), two, _window(IMAGE, lambda w: w.mean(-1))),
        Row("MaxPool", (1,), (IMAGE,), two, _window(IMAGE, lambda w: w.max(-1))),
        Row("LpPool", (1,), (IMAGE,), two, _window(IMAGE, lambda w: np.sqrt((w * w).sum(-1)))),
        Row("LpPool", (1,), (IMAGE,), {**two, "p": 3.0}, _window(IMAGE, lambda w: (w**3).sum(-1) ** (1 / 3))),
        Row("LpPool", (2,), (IMAGE,), {**two, "p": 1}, _window(IMAGE, lambda w: w.sum(-1))),
        Row("GlobalAveragePool", (1,), (IMAGE,), {}, IMAGE.mean((2, 3), keepdims=True)),
        Row("GlobalMaxPool", (1,), (IMAGE,), {}, IMAGE.max((2, 3), keepdims=True)),
        Row("GlobalLpPool", (1, 2), (IMAGE,), {}, np.sqrt((IMAGE**2).sum((2, 3), keepdims=True))),
        Row("GlobalLpPool", (1,), (IMAGE,), {"p": 1.0}, IMAGE.sum((2, 3), keepdims=True)),
        Row("MaxRoiPool", (1,), (IMAGE, f([0, 0, 0, 3, 3])), {"pooled_shape": (1, 1)}, f([[[15]], [[31]]])),
        Row("BatchNormalization", (1,), (IMAGE, scale, bias, mean, var), {"is_test": 1},
            standard(IMAGE, columns[2], columns[3])),
        Row("BatchNormalization", (6,), (IMAGE, scale, bias, mean, var), {"is_test": 1},
            standard(IMAGE, columns[2], columns[3])),
        Row("BatchNormalization", (1, 6), (IMAGE, scale, bias, mean, var), {"n_outputs": 3},
            (standard(IMAGE, now[:, None, None], spread[:, None, None]), *running)),
        Row("InstanceNormalization", (1,), (IMAGE, scale, bias), {}, own),
        Row("InstanceNormalization", (6,), (IMAGE, scale, bias), {}, own),
        Row("LRN", (1,), (IMAGE,), {"size": 1, "alpha": 0.5, "beta": 0.5, "bias": 2.0},
            IMAGE / np.sqrt(2 + 0.5 * IMAGE**2)),
        Row("LpNormalization", (1,), (X,), {"axis": 1, "p": 1}, X / np.abs(X).sum(1, keepdims=True)),
        Row("LpNormalization", (1,), (X,), {}, X / np.sqrt((X * X).sum(-1, keepdims=True))),
        Row("Dropout", (1,), (X,), {"is_test": 1}, X),
        Row("Dropout", (6,), (X,), {"is_test": 1, "ratio": 0.9}, X),
    ]  # fmt: skip
    flat = X.reshape(2, 12)
    hard = np.eye(12, dtype=np.float32)[flat.argmax(1)].reshape(X.shape)
    rows += [  # on a matrix whose rows begin at axis
        Row("Softmax", (1,), (X,), {}, softmax(flat).reshape(X.shape)),
        Row("Softmax", (1,), (X,), {"axis": 2}, softmax(X)),
        Row("LogSoftmax", (1,), (X,), {}, np.log(softmax(flat)).reshape(X.shape)),
        Row("Hardmax", (1,), (X,), {}, hard),
    ]
    return rows


def recurrent() -> list[Row]:
    steps, size, hidden = 3, 2, 2
    x = RNG.normal(size=(steps, 1, size)).astype(np.float32)
    rows = []
    for name, gates, opsets in (("RNN", 1, (1,)), ("GRU", 3, (1, 3)), ("LSTM", 4, (1,))):
        w, r = (RNG.normal(size=(1, gates * hidden, n)).astype(np.float32) for n in (size, hidden))
        bias = RNG.normal(size=(1, 2 * gates * hidden)).astype(np.float32)
        b, rb = np.split(bias[0], 2)
        h = cell = np.zeros((1, hidden), np.float32)
        every = []
        for t in range(steps):
            u, v = np.split(x[t] @ w[0].T + b, gates, -1), np.split(h @ r[0].T + rb, gates, -1)
            if name == "RNN":
                h = np.tanh(u[0] + v[0])
            elif name == "GRU":  # the reset gate before the recurrent product: linear_before_reset is of opset 3
                z, reset = sigmoid(u[0] + v[0]), sigmoid(u[1] + v[1])
                h = (1 - z) * np.tanh(u[2] + (reset * h) @ r[0, -hidden:].T + rb[-hidden:]) + z * h
            else:
                gate, out, forget = (sigmoid(u[k] + v[k]) for k in range(3))
                cell = forget * cell + gate * np.tanh(u[3] + v[3])
                h = out * np.tanh(cell)
            every.append(h[None])
        finals = (h[None], cell[None]) if name == "LSTM" else (h[None],)
        attributes = {"hidden_size": hidden, "n_outputs": 1 + len(finals)}
        rows.append(Row(name, opsets, (x, w, r, bias), attributes, (np.stack(every), *finals)))
    return rows


ROWS = [*elementwise(), *broadcasts(), *reductions(), *shapes(), *networks(), *recurrent()]

ELSEWHERE = {
    "If": "a graph attribute: tests/ops/test_control.py",
    "Loop": "a graph attribute: tests/ops/test_control.py",
    **dict.fromkeys(
        ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), "random: tests/ops/test_random.py"
    ),
}


def test_results_match_the_specification() -> None:
    cases = {(n, opset): row for n, row in enumerate(ROWS) for opset in row.opsets}

    def of(row: Row, opset: int) -> Hands:
        def run(inputs: list[Any]) -> Any:
            return run_op(row.name, *inputs, opset=opset, rng=jax.random.key(0), **row.attributes)

        return run, row.inputs, range(len(row.inputs[:1]))

    with every_case() as case:
        for place, found in each_in_both_hands({place: of(row, place[1]) for place, row in cases.items()}).items():
            row = cases[place]
            expected = row.expected if isinstance(row.expected, tuple) else (row.expected,)
            for branch, results in zip(("known", "traced"), found, strict=True):
                with case(f"opset {place[1]}, {branch}, {row.name} {row.attributes}"):
                    for result, value in zip(
                        results if isinstance(results, tuple) else (results,), expected, strict=True
                    ):
                        assert result.shape == np.shape(value)
                        assert (result.dtype.kind == "f") == (np.asarray(value).dtype.kind == "f")
                        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-5)


def test_every_version_up_to_6_has_a_row() -> None:
    versions = {(s.name, s.since_version) for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    old = {(name, version) for name, version in versions if version <= LAST and name not in ELSEWHERE}
    assert old <= {(row.name, opset) for row in ROWS for opset in row.opsets}


@pytest.mark.parametrize("name", ["Add", "Mul", "Pow", "Greater"])
def test_no_implicit_broadcast(name: str) -> None:
    with pytest.raises(ValueError, match="broadcast=1"):
        run_op(name, X, f(1, 2, 3, 4), opset=LAST)


@pytest.mark.parametrize(
    ("node", "result"),
    [
        (helper.make_node("Relu", ["x"], ["y"], consumed_inputs=[0]), 2.0),
        (helper.make_node("RNN", ["x", "x", "x"], ["y"], hidden_size=1, output_sequence=1), np.tanh(4)),
    ],
)
def test_hints_are_ignored(node: onnx.NodeProto, result: float) -> None:
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = onnx2jax.convert(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 1)], ir_version=3))
    np.testing.assert_allclose(np.ravel(model(np.full((1, 1, 1), 2, np.float32))), result, rtol=1e-6)
