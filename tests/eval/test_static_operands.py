"""Operands that operators must know, computed from traced integers: only differences and bounds of these matter."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import KnownValueError
from tests.support.models import text_model

X = np.arange(18, dtype=np.float32).reshape(6, 3)

SLICE = """g (float[6, 3] x, int64 s) => (float[{rows}, 3] y)
    <int64 zero = {{0}}, int64 four = {{4}}, int64 six = {{6}}, int64 unit = {{1}}, int64[1] one = {{1}},
     int64[1] size = {{{size}}}, int64[1] axis = {{0}}, int64[1] step = {{{step}}}> {{
    {start}  first = Reshape (at, one)  last = Add (first, size)  y = Slice (x, first, last, axis, step)
}}"""


def sliced(start: str, *, rows: str = "n", size: int = 2, step: int = 1) -> Any:
    """A slice of ``size`` from a start that is computed from the input s."""
    return onnx2jax.convert(text_model(SLICE.format(start=start, rows=rows, size=size, step=step)))


CLIPPED = "at = Clip (s, zero, four)"


@pytest.mark.parametrize(
    ("start", "reference"),
    [
        (CLIPPED, lambda s: np.clip(s, 0, 4)),
        ("low = Max (s, zero)  at = Min (low, four)", lambda s: np.clip(s, 0, 4)),
        ("c = Clip (s, zero, four)  at = Sub (c, six)", lambda s: np.clip(s, 0, 4)),  # negative, and before the end
        ("c = Clip (s, zero, four)  at = Sub (four, c)", lambda s: 4 - np.clip(s, 0, 4)),
    ],
)
def test_a_slice_of_known_length_from_a_bounded_start(start: str, reference: Any) -> None:
    size = 1 if "six" in start else 2  # -2 + 2 is 0, the start of the axis rather than its end
    m = sliced(start, size=size)
    call = jax.jit(lambda x, s: m.apply({}, x, s))
    for s in (-3, 0, 3, 9):
        np.testing.assert_array_equal(call(X, np.int64(s)), X[reference(s) :][:size])
        np.testing.assert_array_equal(m(X, np.int64(s)), call(X, np.int64(s)))
    assert m.compilations == 1, "one for all starts"


def test_it_is_differentiated_and_mapped() -> None:
    m = sliced("at = Clip (s, zero, unit)", size=5, step=2)
    starts = np.array([0, 1])
    mapped = jax.vmap(lambda x, s: m.apply({}, x, s), (None, 0))(X, starts)
    np.testing.assert_array_equal(mapped, np.stack([X[s : s + 5 : 2] for s in starts]))
    gradient = jax.jit(jax.grad(lambda x, s: m.apply({}, x, s).sum()))(X, np.int64(1))
    np.testing.assert_array_equal(gradient[:, 0], [0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize("start", ["at = Identity (s)", "at = Max (s, zero)", "c = Abs (s)  at = Min (c, six)"])
def test_a_start_without_bounds_is_an_error_only_where_the_caller_traces(start: str) -> None:
    """ONNX shortens a slice at the border."""
    m = sliced(start)
    with pytest.raises(KnownValueError, match=r"node 'y' \(Slice.*axis 0 .* 2 elements only if .* in \[0, 4\].*Clip"):
        jax.jit(lambda x, s: m.apply({}, x, s))(X, np.int64(1))
    np.testing.assert_array_equal(m(X, np.int64(5)), X[5:])


def test_a_declared_length_bounds_the_start() -> None:
    """What is missing to the declared length reads NaN, as an out-of-range gather does; a plain call returns less."""
    m = sliced("at = Identity (s)", rows="2")
    call = jax.jit(lambda x, s: m.apply({}, x, s))
    for s in (0, 4, -3):
        np.testing.assert_array_equal(call(X, np.int64(s)), X[s : s + 2 or None])
    np.testing.assert_array_equal(call(X, np.int64(5)), [*X[5:], [np.nan] * 3])
    np.testing.assert_array_equal(call(X, np.int64(-1)), np.full((2, 3), np.nan))  # [-1:1] is empty
    np.testing.assert_array_equal(call(X, np.int64(-7)), [*X[:1], [np.nan] * 3])  # [0:1]
    np.testing.assert_array_equal(m(X, np.int64(5)), X[5:])
    with pytest.raises(KnownValueError, match="3 elements only if"):
        wrong = sliced("at = Identity (s)", rows="2", size=3)
        jax.jit(lambda x, s: wrong.apply({}, x, s))(X, np.int64(0))


def test_the_ends_of_several_axes() -> None:
    text = """g (float[6, 3] x, int64 s) => (float[n, k] y)
        <int64 zero = {0}, int64 four = {4}, int64[1] one = {1}, int64[1] two = {2}, int64[2] size = {2, -1}> {
        c = Clip (s, zero, four)  first = Reshape (c, one)  starts = Concat <axis = 0> (first, one)
        ends = Add (starts, size)  y = Slice (x, starts, ends)  }"""
    m = onnx2jax.convert(text_model(text))
    assert jax.jit(lambda x, s: m.apply({}, x, s))(X, np.int64(3)).shape == (2, 0)


def test_ranges_and_shapes_of_known_length() -> None:
    text = """g (int32 s, int64 t) => (int32[n] range, float[m] zeros, float[k, 3] rows)
        <int32 six = {6}, int32 two = {2}, int64[1] one = {1}, int64[1] three = {3}, float[1, 3] x = {1, 2, 3}> {
        e = Add (s, six)      range = Range (s, e, two)
        a = Reshape (t, one)  b = Add (a, three)  c = Sub (b, a)  zeros = ConstantOfShape (c)
        shape = Concat <axis = 0> (c, three)  rows = Expand (x, shape)  }"""
    m = onnx2jax.convert(text_model(text))
    found, zeros, rows = jax.jit(lambda s, t: m.apply(m.params, s, t))(np.int32(-3), np.int64(8))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [-3, -1, 1])
    assert (zeros.shape, rows.shape) == ((3,), (3, 3))


def test_a_range_between_unrelated_ends() -> None:
    m = onnx2jax.convert(text_model("g (int64 s, int64 t) => (int64[n] y) <int64 one = {1}> { y = Range (s, t, one) }"))
    with pytest.raises(KnownValueError, match=r"node 'y' \(Range.*its length depends on traced values"):
        jax.jit(lambda s, t: m.apply({}, s, t))(np.int64(1), np.int64(4))
    np.testing.assert_array_equal(m(np.int64(1), np.int64(4)), [1, 2, 3])


def test_a_start_inside_a_loop() -> None:
    """The body's names hide those around it, and what it captures may be traced."""
    text = """g (float[6] x, int64 s, int64 trips) => (float[2] y)
        <int64 zero = {0}, int64 four = {4}, int64[1] one = {1}, int64[1] two = {2}, float[2] start = {0, 0}> {
        at = Clip (s, zero, four)
        y = Loop (trips, "", start) <body = b (int64 i, bool go, float[2] sum) => (bool go, float[2] next) {
            further = Add (at, i)      bounded = Clip (further, zero, four)    first = Reshape (bounded, one)
            last = Add (first, two)    rows = Slice (x, first, last)           next = Add (sum, rows)
        }> }"""
    m = onnx2jax.convert(text_model(text))
    x = X[:, 0]
    found = jax.jit(lambda x, s, n: m.apply(m.params, x, s, n))(x, np.int64(2), np.int64(4))
    np.testing.assert_array_equal(found, x[2:4] + x[3:5] + 2 * x[4:6])


def test_arithmetic_that_differs_for_negative_values_gives_no_bounds() -> None:
    """Symbolic dimensions are positive, and a traced integer need not be: Div truncates."""
    m = sliced("h = Div (s, four)  at = Min (h, four)")
    with pytest.raises(KnownValueError, match="only if"):
        jax.jit(lambda x, s: m.apply({}, x, s))(X, np.int64(-9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(m(X, np.int64(9)), X[2:4])
