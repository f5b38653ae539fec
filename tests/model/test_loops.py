"""Loops as exporters write them: without condition input, and with counters that decide the trips."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest

import onnx2jax
from onnx2jax.errors import InputNameError, KnownValueError, OperatorError
from tests.support.models import text_model

X = np.float32([1, 2, 3])

BREAK = """g (float[n] x, int64 trips) => (float[n] y) <int64 two = {{2}}> {{
    y = Loop ({trips}, {cond}, x) <body = b (int64 i, bool{declared} go, float[n] s)
        => (bool{returned} more, float[n] t)
    {{ t = Add (s, s)  next = Less (i, two)  {more} }}>
}}"""
"""Three trips by the body's condition."""


def breaking(**parts: str) -> onnx.ModelProto:
    texts = {"trips": "trips", "cond": "", "declared": "", "returned": "", "more": "more = Identity (next)"}
    return text_model(BREAK.format(**texts | parts))


def in_onnxruntime(proto: onnx.ModelProto, **feeds: Any) -> Any:
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0]


def test_a_loop_without_condition_has_two_meanings() -> None:
    """ONNX ignores what the body returns (SC-13); onnxruntime, and what onnxscript means by ``break``, obeys it."""
    proto = breaking()
    with pytest.warns(onnx2jax.errors.DeviationWarning, match=r"'y' \(Loop.*loop_cond='onnxruntime'"):
        ours = onnx2jax.convert(proto)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = onnx2jax.convert(proto, loop_cond="onnxruntime")
    np.testing.assert_array_equal(ours(X, np.array(5)), X * 2**5)
    wanted = in_onnxruntime(proto, x=X, trips=np.array(5))
    np.testing.assert_array_equal(wanted, X * 2**3)
    np.testing.assert_array_equal(theirs(X, np.array(5)), wanted)
    np.testing.assert_array_equal(theirs.run(None, {"x": X, "trips": np.array(5)})[0], wanted)
    np.testing.assert_array_equal(theirs(X, np.array(2)), X * 2**2)
    in_jit = jax.jit(lambda x, trips: theirs.apply({}, x, trips))
    np.testing.assert_array_equal(in_jit(X, np.array(5)), wanted)
    np.testing.assert_array_equal(theirs.with_params({})(X, np.array(5)), wanted)


def test_the_meanings_share_no_program(tmp_path: Any) -> None:
    for _ in range(2):
        for meaning, trips in (("onnx", 5), ("onnxruntime", 3)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                m = onnx2jax.convert(breaking(), cache_dir=tmp_path, loop_cond=meaning)  # type: ignore[arg-type]
            np.testing.assert_array_equal(m(X, np.array(5)), X * 2**trips)


def test_onnxruntime_has_loops_without_any_limit() -> None:
    proto = breaking(trips="")
    m = onnx2jax.convert(proto, loop_cond="onnxruntime")
    np.testing.assert_array_equal(m(X, np.array(0)), X * 2**3)


@pytest.mark.parametrize(
    "more", ["more = Identity (go)", "more = Constant <value = bool {1}> ()", "more = Cast <to = 9> (go)"]
)
def test_a_condition_that_stays_true_is_no_deviation(more: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", onnx2jax.errors.DeviationWarning)
        m = onnx2jax.convert(breaking(more=more))
    assert onnx2jax.check(breaking(more=more)).ok
    np.testing.assert_array_equal(m(X, np.array(4)), X * 2**4)


def test_check_names_the_loop() -> None:
    report = onnx2jax.check(breaking())
    assert [f.rule for f in report.findings] == ["SC-13"]
    assert report.ok
    assert "loop_cond='onnxruntime'" in str(report)


def test_an_unknown_meaning_is_rejected() -> None:
    with pytest.raises(InputNameError, match="loop_cond is 'ort'; it is 'onnx' or 'onnxruntime'"):
        onnx2jax.convert(breaking(), loop_cond="ort")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")
@pytest.mark.parametrize(("declared", "returned"), [("[1]", ""), ("", "[1]"), ("[1]", "[1]")])
def test_the_ranks_of_an_ignored_condition_may_differ(declared: str, returned: str) -> None:
    """Spox declares bool[1] and returns bool[]."""
    one = "shape = Constant <value_ints = [1]> ()  more = Reshape (next, shape)"
    proto = breaking(declared=declared, returned=returned, more=one if returned else "more = Identity (next)")
    m = onnx2jax.convert(proto)
    np.testing.assert_array_equal(m(X, np.array(4)), X * 2**4)
    in_jit = jax.jit(lambda x, trips: m.apply({}, x, trips))
    np.testing.assert_array_equal(in_jit(X, np.array(4)), X * 2**4)


WHILE = """g (float[n, 3] x) => (float[3] y, float[m, 3] rows)
    <int64 zero = {0}, float bound = {100}, float start = {0}> {
    count = Shape <start = 0, end = 1> (x)
    axes = Constant <value_ints = [0]> ()    n = Squeeze (count, axes)
    first = Gather (x, zero)
    limit = Cast <to = 1> (n)                some = Less (start, limit)   few = Less (start, bound)
    go = And (some, few)
    last, y, rows = Loop (n, go, zero, first) <body = b (int64 i, bool c, int64 k, float[3] s)
        => (bool more, int64 next, float[3] t, float[3] row) <int64 one = {1}> {
        at = Gather (x, k)       t = Mul (s, at)      row = Identity (t)
        next = Add (k, one)      f = Cast <to = 1> (next)
        a = Less (f, limit)      b = Less (f, bound)  more = And (a, b)
    }>
}"""
"""A while-loop as tf2onnx writes it: its counter and limit follow from shapes."""


def counted() -> onnx.ModelProto:
    return text_model(WHILE)


def test_counters_decide_the_trips_before_compiling() -> None:
    m = onnx2jax.convert(counted())
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    y, rows = in_onnxruntime_both(counted(), x)
    for results in (m(x), m.run(None, {"x": x}), jax.jit(lambda x: m.apply({}, x))(x)):
        np.testing.assert_allclose(results[0], y, rtol=1e-6)
        np.testing.assert_allclose(results[1], rows, rtol=1e-6)
    assert m.jitted
    text = str(jax.make_jaxpr(lambda x: m.apply(m.params, x))(x))
    assert "scan[" in text
    assert "while[" not in text
    slopes = jax.grad(lambda x: m.apply({}, x)[0].sum())(x)
    step = np.zeros_like(x)
    step[2, 1] = 1e-2
    difference = (np.asarray(m(x + step)[0]).sum() - np.asarray(m(x - step)[0]).sum()) / 2e-2
    np.testing.assert_allclose(slopes[2, 1], difference, rtol=1e-2, atol=1e-3)
    both = jax.vmap(lambda x: m.apply({}, x))(np.stack([x, x]))
    np.testing.assert_allclose(both[1][1], rows, rtol=1e-6)
    assert m(x[:2])[1].shape == (2, 3)


def in_onnxruntime_both(proto: onnx.ModelProto, x: np.ndarray) -> Any:
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})


def test_a_bound_below_the_limit_ends_the_loop() -> None:
    """The scalar bound is compiled in: a trip count cannot be traced where scan outputs have its length."""
    proto = counted()
    (bound,) = (t for t in proto.graph.initializer if t.name == "bound")
    bound.CopyFrom(onnx.numpy_helper.from_array(np.float32(4), "bound"))
    m, x = onnx2jax.convert(proto), np.ones((6, 3), np.float32)
    assert "bound" not in m.params
    assert jax.jit(lambda x: m.apply({}, x))(x)[1].shape == (4, 3)


def test_a_condition_of_traced_values_still_needs_the_host() -> None:
    proto = text_model("""g (float x) => (float y, float[m] rows) <bool yes = {1}, float limit = {50}> {
        y, rows = Loop (, yes, x) <body = b (int64 i, bool c, float s) => (bool more, float t, float row) {
            t = Add (s, s)   row = Identity (t)   more = Less (t, limit)
        }>
    }""")
    m, x = onnx2jax.convert(proto), np.float32(3)
    np.testing.assert_array_equal(m(x)[1], [6, 12, 24, 48, 96])
    with pytest.raises(KnownValueError, match="traced"):
        jax.jit(lambda x: m.apply(m.params, x))(x)


def test_max_trips_limits_counted_loops() -> None:
    m = onnx2jax.convert(counted(), max_trips=4)
    assert m(np.ones((4, 3), np.float32))[1].shape == (4, 3)
    with pytest.raises(OperatorError, match=r"exceeds max_trips \(4\)"):
        jax.jit(lambda x: m.apply({}, x))(np.ones((6, 3), np.float32))
