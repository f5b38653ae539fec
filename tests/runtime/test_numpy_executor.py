"""Tiny programs run in NumPy when the caller wants NumPy arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.limits import NUMPY_PRODUCT
from onnx2jax.runtime.numpy_executor import numpy_program
from tests.support.models import mlp, mlp_reference, model, value

X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
EDGES = np.float32([[0.5, -0.0, np.inf, 2], [np.nan, -3, 1e30, -1], [-np.inf, 1, 1, -200]])


def runs_in_numpy(m: onnx2jax.Model) -> bool:
    return {bound.path for bound in m.weights.bound.values()} == {"numpy"}


def graph(nodes: list[onnx.NodeProto], outputs: dict[str, Any], **weights: np.ndarray) -> onnx2jax.Model:
    ends = [value("x", np.float32, ["rows", 4])], [value(n, t, None) for n, t in outputs.items()]
    return onnx2jax.convert(model(nodes, *ends, weights))


def test_numpy_gives_what_the_program_gives() -> None:
    m = onnx2jax.convert(mlp())
    for _ in range(2):
        (y,) = m.run(None, {"x": X})
        np.testing.assert_allclose(y, mlp_reference(m.params, X), rtol=1e-5)
    assert runs_in_numpy(m) and m.compilations == 1
    other = m.with_params({n: v * 2 for n, v in m.params.items()})
    np.testing.assert_allclose(other.run(None, {"x": X})[0], mlp_reference(other.params, X), rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 4)])
def test_a_row_by_a_transposed_matrix(shape: tuple[int, ...]) -> None:
    """As jaxpr/passes/cpu/dot_layout.py turns it for XLA."""
    w, x = np.arange(12, dtype=np.float32).reshape(4, 3) - 5, X[:1].reshape(shape)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    file = model(nodes, [value("x", np.float32, shape)], [value("y", np.float32, None)], {"w": w})
    m = onnx2jax.convert(file)
    np.testing.assert_allclose(m.run(None, {"x": x})[0], x @ w, rtol=1e-6)
    assert runs_in_numpy(m)


@pytest.mark.parametrize("equation", ["td,dkh->tkh", "td,kdh->tkh", "td,khd->tkh", "td,dk->tk", "td,kd->tk", "td,d->t"])
def test_products_contract_any_axis_of_a_weight(equation: str) -> None:
    """All extents of the weight are equal, so that a wrong axis would give wrong numbers rather than an error."""
    w = np.random.default_rng(2).normal(size=[4] * len(equation.split("->")[0].split(",")[1])).astype(np.float32)
    m = graph([helper.make_node("Einsum", ["x", "w"], ["y"], equation=equation)], {"y": np.float32}, w=w)
    np.testing.assert_allclose(m.run(None, {"x": X})[0], np.einsum(equation, X, w), rtol=1e-5, atol=1e-6)
    assert runs_in_numpy(m)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Softmax", "x", "a"), ("Relu", "x", "b"), ("Tanh", "x", "c"), ("Exp", "x", "d")],
        [("Sigmoid", "x", "a"), ("ArgMax", "x", "b"), ("ArgMin", "x", "c"), ("ReduceMax", "x", "d")],
        [("PRelu", "x row", "a"), ("ReduceSum", "x", "b"), ("Max", "x row", "c"), ("ReduceMin", "x", "d")],
        [("Transpose", "x", "a"), ("Mul", "x a_row", "b"), ("Sub", "x column", "c"), ("Equal", "x row", "d")],
        [("Gather", "x two", "a"), ("Concat", "x x", "b"), ("Squeeze", "column", "c"), ("Div", "x c", "d")],
    ],
)
def test_at_the_edges_of_floats(nodes: list[tuple[str, str, str]]) -> None:
    """NaN, infinities, zero with a sign and what overflows, without a word of NumPy's."""
    made = [
        helper.make_node(kind, names.split(), [y], **({"axis": 1} if kind in {"ArgMax", "ArgMin", "Concat"} else {}))
        for kind, names, y in nodes
    ]
    types = {"ArgMax": np.int64, "ArgMin": np.int64, "Equal": bool}
    row = np.float32([1, -1, 0.5, 2])
    weights = {"row": row, "a_row": row[None], "column": row[:3, None], "two": np.int64([2, -3])}
    read = {n: v for n, v in weights.items() if any(n in names.split() for _, names, _ in nodes)}
    if "column" in read and nodes[3][1] == "x c":
        made[-1] = helper.make_node("Div", ["x", "column"], ["d"])
    m = graph(made, {y: types.get(kind, np.float32) for kind, _, y in nodes}, **read)
    got = m.run(None, {"x": EDGES})
    assert runs_in_numpy(m)
    for g, want in zip(got, m(EDGES), strict=True):
        assert g.dtype == want.dtype
        np.testing.assert_allclose(g, want, rtol=1e-6)


def test_results_are_the_callers_own() -> None:
    """Neither the input, nor a weight, nor another result, nor what the next call gives."""
    nodes = [
        helper.make_node("Identity", ["x"], ["a"]),
        helper.make_node("Reshape", ["x", "shape"], ["b"]),
        helper.make_node("Identity", ["w"], ["c"]),
        helper.make_node("Neg", ["x"], ["d"]),
        helper.make_node("Reshape", ["d", "shape"], ["e"]),
        helper.make_node("Abs", ["w"], ["f"]),
    ]
    w = np.arange(5000, dtype=np.float32)  # too large to be compiled in
    m = graph(nodes, dict.fromkeys("abcdef", np.float32), w=w, shape=np.int64([4, 3]))
    x = X.copy()
    first = [y.copy() for y in m.run(None, {"x": x})]
    assert runs_in_numpy(m)
    for _ in range(2):
        for y, want in zip(m.run(None, {"x": x}), first, strict=True):
            np.testing.assert_array_equal(y, want)
            y[...] = 7
    np.testing.assert_array_equal(x, X)


def test_integers_of_64_bits_stay_whole() -> None:
    big = np.int64([[2**53 + 1, 2**62]])
    ends = [value(n, np.int64, [1, 2]) for n in "xy"]
    m = onnx2jax.convert(model([helper.make_node("Add", ["x", "x"], ["y"])], ends[:1], ends[1:]))
    for _ in range(2):
        assert (m.run(None, {"x": big})[0] == big + big).all()  # 2**63 wraps round
    assert runs_in_numpy(m)


def test_large_and_unknown_programs_are_compiled() -> None:
    """What NumPy has no function for, and what is large."""
    erf = graph([helper.make_node("Erf", ["x"], ["y"])], {"y": np.float32})
    large = onnx2jax.convert(mlp())
    for m, rows in ((erf, 1), (large, 10_000)):
        m.run(None, {"x": np.repeat(X, rows, 0)})
        assert not runs_in_numpy(m)


@pytest.mark.parametrize("columns", [NUMPY_PRODUCT // 4, NUMPY_PRODUCT // 4 + 1])
def test_products_as_long_as_a_dispatch_are_compiled(columns: int) -> None:
    closed = jax.make_jaxpr(lambda w, x: [x @ w])(np.ones((4, columns), np.float32), X[:1])
    assert (numpy_program(closed, 1) is None) is (4 * columns > NUMPY_PRODUCT)


def test_debug_nans_is_honoured() -> None:
    m = onnx2jax.convert(mlp())
    m.run(None, {"x": X})
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        m.run(None, {"x": np.full_like(X, np.nan)})
