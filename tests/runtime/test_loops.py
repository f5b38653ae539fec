"""Loops with data-dependent trip counts: trips run in compiled chunks, with the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import onnx2jax
from tests.runtime.test_partition import reference
from tests.support.models import model, value

RNG = np.random.default_rng(0)
I64, BOOL, F32 = np.int64, bool, np.float32


def assert_same(proto: onnx.ModelProto, m: onnx2jax.Model, feeds: dict[str, Any]) -> None:
    for ours, expected in zip(m.run(None, feeds), reference(proto, feeds), strict=True):
        assert ours.shape == expected.shape and ours.dtype == expected.dtype
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def walk(M: str, cond: str, *, heavy: bool = True, extra: Sequence[onnx.NodeProto] = ()) -> onnx.ModelProto:
    """x -> its columns rotated and incremented while a counter is below `limit`; the sums are scan outputs."""
    nodes = [
        helper.make_node("MatMul", ["s", "w"], ["p"]) if heavy else helper.make_node("Sub", ["s", "tenth"], ["p"]),
        helper.make_node("Add", ["p", "weights"], ["t"]),
        helper.make_node("Add", ["n", "one"], ["m"]),
        helper.make_node("Less", ["m", "limit"], ["on"]),
        helper.make_node("ReduceSum", ["t"], ["row"], keepdims=0),
        helper.make_node("Identity", ["i"], ["trip"]),
        *extra,
    ]
    ins = [value("i", I64, []), value("go", BOOL, []), value("s", F32, [None, None]), value("n", F32, [])]
    outs = [value("on", BOOL, []), value("t", F32, [None, None]), value("m", F32, []), value("row", F32, [])]
    body = helper.make_graph(nodes, "body", ins, [*outs, value("trip", I64, [])])
    loop = helper.make_node("Loop", [M, cond, "x", "zero"], ["last", "count", "rows", "trips"], body=body, name="it")
    # The limit has rank 2, so that calls do not specialise on it.
    nodes = [helper.make_node("ReduceSum", ["limits"], ["limit"], keepdims=0), loop]
    w = np.roll(np.eye(4, dtype=F32), 1, 0)
    constants = {"w": w, "one": F32(1), "zero": F32(0), "tenth": F32(0.1), "true": np.array(True)}
    constants |= {"weights": np.arange(4, dtype=F32), "endless": np.array(2**40), "seven": np.array(7)}
    inputs = [value("x", F32, ["b", 4]), value("limits", F32, [1, 40]), value("c", BOOL, [])]
    names = ("last", "count", "rows", "trips")
    return model(nodes, inputs, [value(n, I64 if n == "trips" else F32, None) for n in names], constants)


def feeds(limit: float, go: bool = True) -> dict[str, Any]:
    x = RNG.integers(0, 5, (3, 4)).astype(F32)
    return {"x": x, "limits": limit * np.eye(1, 40, dtype=F32), "c": np.array(go)}


@pytest.mark.parametrize("heavy", [True, False])
@pytest.mark.parametrize("M, cond", [("endless", "c"), ("seven", "c"), ("", "c"), ("endless", "true")])
def test_data_dependent_trip_counts(M: str, cond: str, heavy: bool) -> None:
    """No trips, a few, and enough to fill the scan output buffers repeatedly."""
    proto = walk(M, cond, heavy=heavy)
    m = onnx2jax.convert(proto)
    for limit in (0, 1, 7, 256, 257, 700):
        assert_same(proto, m, feeds(limit))
    if cond == "c":
        assert_same(proto, m, feeds(5, go=False))
    assert m.compilations <= 3
    assert ("host" in m.explain()) and "compiled" in m.explain()


def test_trips_run_in_compiled_chunks() -> None:
    """The host would need 20 s for these trips."""
    m = onnx2jax.convert(walk("endless", "true"))
    _, count, rows, trips = m.run(None, feeds(100_000))
    assert count == 100_000 and rows.shape == (100_000,) and np.array_equal(trips, np.arange(100_000))


def test_max_trips_applies_to_compiled_loops() -> None:
    m = onnx2jax.convert(walk("endless", "true"), max_trips=300)
    assert m.run(None, feeds(300))[1] == 300
    with pytest.raises(ValueError, match=r"'it'.*max_trips \(300\)"):
        m.run(None, feeds(301))


def test_loops_specialise_on_captured_shapes() -> None:
    nodes = [
        helper.make_node("Reshape", ["s", "shape"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Tanh", ["b"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["row"], keepdims=0),
        helper.make_node("Less", ["row", "limit"], ["on"]),
    ]
    ins = [value("i", I64, []), value("go", BOOL, []), value("s", F32, [None, None])]
    outs = [value("on", BOOL, []), value("t", F32, [None, None]), value("row", F32, [])]
    loop = helper.make_node("Loop", ["ten", "c", "x"], ["y", "rows"], body=helper.make_graph(nodes, "body", ins, outs))
    shape = [helper.make_node("Shape", ["x"], ["shape"]), helper.make_node("ReduceSum", ["z"], ["limit"], keepdims=0)]
    constants = {"w": np.eye(4, dtype=F32) * 2, "ten": np.array(10), "c": np.array(True)}
    inputs = [value("x", F32, ["b", 4]), value("z", F32, [1, 40])]
    proto = model([*shape, loop], inputs, [value("y", F32, None), value("rows", F32, None)], constants)
    m = onnx2jax.convert(proto)
    for n in (2, 3):
        assert_same(proto, m, {"x": np.full((n, 4), 0.01, F32), "z": np.full((1, 40), 0.1, F32)})
    assert m.compilations == 4  # the partition before the loop, and the loop, for each shape


def test_a_loop_with_growing_state_runs_trip_by_trip() -> None:
    nodes = [
        helper.make_node("MatMul", ["s", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("Concat", ["s", "t"], ["long"], axis=0),
        helper.make_node("ReduceSum", ["t"], ["row"], keepdims=0),
        helper.make_node("Less", ["row", "limit"], ["on"]),
    ]
    ins = [value("i", I64, []), value("go", BOOL, []), value("s", F32, [None, None])]
    outs = [value("on", BOOL, []), value("long", F32, [None, None]), value("row", F32, [])]
    loop = helper.make_node("Loop", ["ten", "c", "x"], ["y", "rows"], body=helper.make_graph(nodes, "body", ins, outs))
    constants = {"w": np.eye(4, dtype=F32) * 2, "ten": np.array(6), "c": np.array(True)}
    inputs = [value("x", F32, ["b", 4]), value("z", F32, [1, 40])]
    before = [helper.make_node("ReduceSum", ["z"], ["limit"], keepdims=0)]
    proto = model([*before, loop], inputs, [value("y", F32, None), value("rows", F32, None)], constants)
    m = onnx2jax.convert(proto)
    for limit in (0.1, 0.5, 40):
        assert_same(proto, m, {"x": np.full((2, 4), 0.01, F32), "z": np.full((1, 40), limit / 40, F32)})
    assert m.compilations <= 8


def stepping(cond: str, on: str) -> onnx.ModelProto:
    """x -> tanh(x w), k times at most, while `on` holds."""
    nodes = [
        helper.make_node("MatMul", ["s", "w"], ["p"]),
        helper.make_node("Tanh", ["p"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "limit"], ["on"]),
    ]
    ins = [value("i", I64, []), value("go", BOOL, []), value("s", F32, [None, None])]
    body = helper.make_graph(nodes, "body", ins, [value(on, BOOL, []), value("t", F32, [None, None])])
    loop = helper.make_node("Loop", ["k", cond, "x"], ["y"], body=body, name="it")
    constants = {"w": (np.eye(4) * 0.9).astype(F32), "limit": F32(1e9), "true": np.array(True)}
    inputs = [value("x", F32, ["n", 4]), value("k", I64, [])]
    return model([loop], inputs, [value("y", F32, None)], constants)


def test_a_gradient_through_a_while_loop_raises_with_the_fix() -> None:
    x = RNG.normal(size=(2, 4)).astype(F32)
    for cond, on in (("", "go"), ("true", "on")):
        proto = stepping(cond, on)
        m = onnx2jax.convert(proto)

        def loss(params: Any, k: Any, m: onnx2jax.Model = m) -> Any:
            return m.apply(params, x, k).sum()

        with pytest.raises(onnx2jax.errors.KnownValueError, match=r"(?s)'it' \(Loop.*in reverse.*static=.*jax.jvp"):
            jax.jit(jax.grad(loss))(m.params, np.array(3))
        forwards = jax.jit(jax.vmap(jax.jacfwd(loss), (None, 0)))(m.params, np.array([2, 3]))["w"][1]
        if cond:
            continue  # the condition is not constant either
        fixed = onnx2jax.convert(proto, static={"k": np.array(3)})
        backwards = jax.jit(jax.grad(lambda p, fixed=fixed: fixed.apply(p, x).sum()))(fixed.params)["w"]
        np.testing.assert_allclose(forwards, backwards, rtol=1e-4, atol=1e-6)


def test_five_nested_loops() -> None:
    """Each makes two trips, or fewer if a sum ends it; the innermost multiplies and adds."""
    nodes = [helper.make_node("MatMul", ["s5", "w"], ["p"]), helper.make_node("Add", ["p", "x"], ["t5"])]
    for d in (5, 4, 3, 2, 1):
        nodes += [
            helper.make_node("ReduceSum", [f"t{d}"], [f"total{d}"], keepdims=0),
            helper.make_node("Less", [f"total{d}", "limit"], [f"on{d}"]),
        ]
        ins = [value(f"i{d}", I64, []), value(f"go{d}", BOOL, []), value(f"s{d}", F32, [None, None])]
        outs = [value(f"on{d}", BOOL, []), value(f"t{d}", F32, [None, None]), value(f"total{d}", F32, [])]
        body = helper.make_graph(nodes, f"body{d}", ins, outs)
        start, result = (f"s{d - 1}", f"t{d - 1}") if d > 1 else ("x", "y")
        nodes = [helper.make_node("Loop", ["two", "true", start], [result, f"rows{d}"], body=body)]
    nodes.insert(0, helper.make_node("ReduceSum", ["limits"], ["limit"], keepdims=0))
    inputs = [value("x", F32, ["n", 4]), value("limits", F32, [1, 40])]
    constants = {"w": np.eye(4, dtype=F32), "two": np.array(2), "true": np.array(True)}
    proto = model(nodes, inputs, [value("y", F32, None), value("rows1", F32, None)], constants)
    m = onnx2jax.convert(proto)
    for limit in (1e6, 100, 20):
        assert_same(proto, m, {"x": np.ones((2, 4), F32), "limits": limit * np.eye(1, 40, dtype=F32)})


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
def test_many_trip_counts_do_not_recompile() -> None:
    proto = walk("k", "")
    proto.graph.input.append(value("k", I64, []))
    m = onnx2jax.convert(proto)
    for k in range(16):
        assert_same(proto, m, feeds(1e6) | {"k": np.array(k)})
    assert m.compilations <= 12
    assert "'k', which decides Loop 'it', comes in many values" in m.explain()
    loss = jax.grad(lambda p, k: m.apply(p, k=k, **feeds(1e6))[0].sum())
    assert np.isfinite(loss(m.params, np.array(9))["w"]).all()  # inside a transformation nothing runs on the host
