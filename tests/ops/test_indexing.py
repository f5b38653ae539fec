"""Indexing: negative, extreme and out-of-range positions, duplicates, strings, old forms."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import KnownValueError
from onnx2jax.ops import indexing
from onnx2jax.ops.indexing import _rows
from tests.support.branches import as_jax, assert_each, both, op
from tests.support.helpers import run_op
from tests.support.joined import differences, joined

MAX, MIN = 2**63 - 1, -(2**63)


def ints(*values):
    return np.array(values, np.int64)


SLICES = [
    (0, MAX, 1, [0, 1, 2, 3, 4]),
    (-2, MAX, 1, [3, 4]),
    (MIN, -1, 2, [0, 2]),
    (MAX, MIN, -1, [4, 3, 2, 1, 0]),
    (-1, -6, -2, [4, 2, 0]),
    (3, 0, -2, [3, 1]),
    (MIN, MIN, -1, [0]),  # the start is clamped to 0, where Python would return nothing
    (2, MAX, -1, []),  # backwards, the end is clamped to the last element
    (4, 2, 1, []),
    (7, 9, 1, []),
    (1, 4, 100, [1]),
    (1, 4, MAX, [1]),
    (3, MIN, MIN, [3]),  # the magnitude of the step exceeds int64
]


def test_slice():
    x, cases = np.arange(5, dtype=np.float32), {}
    for start, end, step, expected in SLICES:
        call = op("Slice", x, ints(start), ints(end), ints(0), ints(step))
        cases[f"{start}:{end}:{step}"] = call, np.array(expected, np.float32)
        if step == 1:
            old = op("Slice", x, opset=1, starts=(start,), ends=(end,))
            cases[f"{start}:{end} at opset 1"] = old, np.array(expected, np.float32)
    assert_each(cases, strict=True)


def test_slice_of_negative_axes_strings_and_empty_arrays():
    x = np.arange(12, dtype=np.int8).reshape(3, 4)
    y = both("Slice", x, ints(0, 3), ints(2, 0), ints(-2, -1), ints(1, -2))
    np.testing.assert_array_equal(y, x[0:2, 3:0:-2], strict=True)
    assert both("Slice", np.zeros((0, 2), np.float32), ints(-1), ints(MIN), ints(0), ints(-1)).shape == (0, 2)
    strings = np.array(["a", "b"], object)
    assert run_op("Slice", strings, ints(-1), ints(MIN), ints(0), ints(-1)).tolist() == ["b", "a"]
    for wrong in ((ints(0), ints(1), ints(0), ints(0)), (ints(0), ints(1, 2)), (ints(0, 0), ints(1, 1), ints(1, -1))):
        with pytest.raises(ValueError, match=r"step cannot be zero|one length|duplicates"):
            run_op("Slice", x, *wrong)


def test_gather_wraps_negative_indices():
    cases = {}
    for dtype in (np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, object):
        x = np.array([[1, 0, 1], [0, 0, 1]]).astype(str if dtype is object else dtype).astype(dtype)
        for indices, axis in ((np.array(-1), 1), (np.array([[0, -2]], np.int32), 0), (ints(2, 2, -3), -1), (ints(), 0)):
            for traced in ((0,), (0, 1)) if dtype is not object else ((),):
                call = op("Gather", x, indices, axis=axis, traced=traced)
                cases[f"{x.dtype} at {indices} along {axis}, {traced} traced"] = call, np.take(x, indices, axis)
    assert_each(cases, strict=True)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("Gather", (ints(0, 3),)),
        ("Gather", (np.array(-4),)),
        ("GatherElements", (np.array([[0, 3]]),)),
        ("GatherND", (np.array([[3, 0]]),)),
        ("ScatterElements", (np.array([[0, -4]]), np.float32([[1, 2]]))),
        ("ScatterND", (np.array([[0, 2]]), np.float32([1]))),
        ("TensorScatter", (np.float32([[1, 1], [1, 1], [1, 1]]), ints(0, 1, 0))),
        ("ReverseSequence", (ints(1, 4),)),
    ],
)
def test_constant_indices_out_of_range_raise(name, inputs):
    x = np.zeros((3, 2), np.float32)
    attributes = {"axis": 1} if name == "TensorScatter" else {}
    for data in (x, as_jax(x)):
        with pytest.raises(ValueError, match="are outside"):
            run_op(name, data, *inputs, **attributes)


def test_traced_indices_out_of_range_read_nan_and_drop_writes():
    """Those too whose lower 32 bits are in range."""
    x, new, nan = np.float32([1, 2]), np.float32([9]), np.float32(np.nan)
    indices = [ints(index) for index in (5, -3, 2**32 + 1, -(2**32) + 1)]

    @jax.jit
    def results(x, indices):
        reads = [[run_op(f"Gather{kind}", x, far) for kind in ("", "Elements", "ND")] for far in indices]
        writes = [
            [run_op("ScatterElements", x, far, new), run_op("ScatterND", x, far[:, None], new)] for far in indices
        ]
        return reads, writes

    with compat.enable_x64():
        reads, writes = results(x, indices)
    for far, read, written in zip(indices, reads, writes, strict=True):
        np.testing.assert_array_equal([y.ravel()[0] for y in read], [nan] * 3, err_msg=str(far))
        np.testing.assert_array_equal(written, [x] * 2, err_msg=str(far))


def test_gather_elements_of_smaller_indices_does_not_broadcast():
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    y = both("GatherElements", x, np.array([[1, -1]]), axis=1, traced=(0, 1))
    np.testing.assert_array_equal(y, np.int32([[1, 3]]), strict=True)
    y = both("GatherElements", x, np.array([[1], [-1]]), axis=0, traced=(0, 1))
    np.testing.assert_array_equal(y, np.int32([[4], [8]]), strict=True)


@pytest.mark.parametrize(
    ("indices", "batch_dims", "expected"),
    [
        ([0, 1], 0, [2, 3]),
        ([[1], [0]], 0, [[[4, 5], [6, 7]], [[0, 1], [2, 3]]]),
        ([[1], [-2]], 1, [[2, 3], [4, 5]]),
        ([[[1], [0]], [[0], [-1]]], 2, [[1, 2], [4, 7]]),
        ([[[0, 1], [1, 1]], [[0, 0], [-1, -1]]], 1, [[1, 3], [4, 7]]),
    ],
)
def test_gather_nd(indices, batch_dims, expected):
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    y = both("GatherND", x, np.array(indices), batch_dims=batch_dims, traced=(0, 1))
    np.testing.assert_array_equal(y, np.float32(expected), strict=True)


def test_scatters_with_duplicates():
    sums = {"none": [4, 1, 2], "add": [1 + 3 + 4, 1, 2], "mul": [12, 1, 2], "max": [4, 1, 2], "min": [1, 1, 2]}
    indices, cases = ints(0, -3), {}
    for dtype in (np.float32, np.float16, np.int8, np.uint64, ml_dtypes.bfloat16):
        for reduction, expected in sums.items():
            x, updates = np.array([1, 1, 2], dtype), np.array([3, 4], dtype)
            for traced in ((0, 2), (0, 1, 2), (1,)):
                for name, at in (("ScatterElements", indices), ("ScatterND", indices[:, None])):
                    call = op(name, x, at, updates, reduction=reduction, traced=traced)
                    cases[f"{name} {x.dtype} {reduction}, {traced} traced"] = call, np.array(expected, dtype)
    assert_each(cases, strict=True)
    for (_, (x, *_), _), _ in cases.values():
        np.testing.assert_array_equal(x.astype(np.float64), [1, 1, 2])  # the input is left alone


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("none", [False, True]),
        ("add", [True, True]),
        ("mul", [False, True]),
        ("max", [True, True]),
        ("min", [False, True]),
    ],
)
def test_scatter_of_booleans_reduces_by_or_and_and(reduction, expected):
    x, updates = np.array([True, True]), np.array([False])
    y = both("ScatterElements", x, ints(0), updates, reduction=reduction, traced=(0, 1, 2))
    np.testing.assert_array_equal(y, np.array(expected), strict=True)


def test_scatter_of_strings_and_wrong_shapes():
    x = np.array([["a", "b"], ["c", "d"]], object)
    assert run_op("ScatterND", x, np.array([[1]]), np.array([["x", "y"]], object)).tolist() == [["a", "b"], ["x", "y"]]
    assert run_op("Scatter", x, np.array([[1]]), np.array([["z"]], object), opset=9).tolist() == [
        ["a", "b"],
        ["z", "d"],
    ]
    with pytest.raises(ValueError, match="must have the shape"):
        run_op("ScatterND", x, np.array([[1]]), np.array(["x", "y"], object))
    with pytest.raises(ValueError, match="reduction"):
        run_op("ScatterElements", np.ones(2), ints(0), np.ones(1), reduction="sum")


@pytest.mark.parametrize(
    ("indices", "mode", "expected"),
    [
        (None, "linear", [[8, 9, 0, 0], [8, 9, 0, 0]]),
        (ints(2, 0), "linear", [[0, 0, 8, 9], [8, 9, 0, 0]]),
        (ints(3, 5), "circular", [[9, 0, 0, 8], [0, 8, 9, 0]]),
    ],
)
def test_tensor_scatter(indices, mode, expected):
    cache, update = np.zeros((2, 4, 1), np.float16), np.array([[8, 9]] * 2, np.float16)[..., None]
    for traced in ((0, 1), (0, 1, 2)):
        y = both("TensorScatter", cache, update, indices, mode=mode, traced=traced)
        np.testing.assert_array_equal(y[..., 0], np.array(expected, np.float16), strict=True)


@pytest.mark.parametrize(
    ("opset", "indices", "expected"),
    [
        (11, [2, -1, 3, -4], [[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]]),
        (9, [2, -1, 3, -4], [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]),  # negative indices came with 11
        (11, [1.9, -0.5], [[0, 1, 0], [1, 0, 0]]),  # cast to int64
    ],
)
def test_one_hot(opset, indices, expected):
    for values in (np.int8([0, 1]), np.float32([0, 1]), np.array(["0", "1"], object)):
        for axis in (-1, 0):
            traced = () if values.dtype == object else (0, 2)
            y = both("OneHot", np.array(indices), np.array([3]), values, opset=opset, axis=axis, traced=traced)
            assert y.dtype == values.dtype
            np.testing.assert_array_equal(y.astype(np.int64), np.array(expected).T if axis == 0 else expected)


def test_compress():
    x = np.array([[1, 2], [3, 4]], np.int16)
    np.testing.assert_array_equal(both("Compress", x, np.array([False, True])), np.int16([2]), strict=True)
    np.testing.assert_array_equal(
        both("Compress", x, np.array([False, True]), axis=-1), np.int16([[2], [4]]), strict=True
    )
    with pytest.raises(ValueError, match="are outside"):
        run_op("Compress", x, np.array([False, False, True]), axis=0)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2)])
def test_reverse_sequence(shape):
    x, lens = np.arange(np.prod(shape), dtype=np.float32).reshape(shape), ints(0, 3, 4)
    y = both("ReverseSequence", x, lens, batch_axis=0, time_axis=1, traced=(0, 1))
    np.testing.assert_array_equal(y, [np.concatenate([row[:n][::-1], row[n:]]) for row, n in zip(x, lens, strict=True)])
    swapped = both("ReverseSequence", x.swapaxes(0, 1), lens, traced=(0, 1))
    np.testing.assert_array_equal(swapped.swapaxes(0, 1), y)


def test_trilu():
    cases = {}
    for upper, dtype, k in itertools.product((0, 1), (np.float32, np.bool_, np.int64), (None, 0, 1, -2, 2**62, MIN)):
        x = np.ones((2, 3, 4), dtype)
        expected = (np.triu if upper else np.tril)(x, min(max(k or 0, -9), 9))
        call = op("Trilu", x, None if k is None else np.array(k), upper=upper, traced=(0, 1))
        cases[f"{x.dtype}, {upper=}, {k=}"] = call, expected
    assert_each(cases, strict=True)


ROWS = {
    # the shape of data, that of the indices before Expand and after it, the axis
    "columns": ((5, 3), (4, 1), (4, 3), 0),
    "rows": ((3, 5), (1, 4), (3, 4), 1),
    "batched": ((2, 5, 3), (2, 4, 1), (2, 4, 3), 1),
    "in the middle": ((2, 5, 3), (2, 1, 3), (2, 5, 3), 2),
    "one index": ((5, 3), (1, 1), (4, 3), 0),
    "fewer columns than data": ((5, 3), (4, 1), (4, 2), 0),
}


def test_expanded_indices_select_rows():
    calls, expected = {}, {}
    reductions = (None, "none", "add", "mul", "max", "min")
    for (case, (shape, column, whole, axis)), reduction in itertools.product(ROWS.items(), reductions):
        rng = np.random.default_rng(0)
        data, updates = (rng.standard_normal(s).astype(np.float32) for s in (shape, whole))
        limit = shape[axis] if min(column) > 1 or len(column) < 3 else 3
        indices = rng.integers(-limit, limit, column)

        def call(data, updates, indices, whole=whole, axis=axis, reduction=reduction):
            indices = run_op("Expand", indices, np.array(whole))
            if reduction is None:
                return run_op("GatherElements", data, indices, axis=axis)
            return run_op("ScatterElements", data, indices, updates, axis=axis, reduction=reduction)

        calls[case, reduction, "traced"] = call, (data, updates, indices)
        calls[case, reduction, "known"] = partial(call, indices=indices), (data, updates)
        expected[case, reduction] = call(data, updates, indices)
    pairs = {name: (got, expected[name[:2]]) for name, got in joined(calls).items()}
    assert not differences(pairs, rtol=1e-6)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("case", ROWS)
def test_index_arrays_leave_out_axes_along_which_they_repeat(case, known):
    shape, column, whole, axis = ROWS[case]
    found = []

    def trace(indices):
        expanded = run_op("Expand", indices, np.array(whole))
        found.append(len(_rows(jnp.zeros(shape), expanded, axis)[0]))

    indices = np.arange(np.prod(column), dtype=np.int32).reshape(column) * 2 // 3 % shape[axis]
    jax.eval_shape(lambda: trace(indices)) if known else jax.eval_shape(trace, indices)
    assert found == [len(shape) - (case != "fewer columns than data")]


def test_gradients_through_rows_are_those_through_elements(monkeypatch):
    def loss(data, updates, indices):
        indices = run_op("Expand", indices, np.array((4, 3)))
        y = run_op("ScatterElements", data, indices, updates, axis=0, reduction="mul")
        return (run_op("GatherElements", y, indices, axis=0) ** 2).sum()

    data, updates = np.float32(np.arange(15).reshape(5, 3) / 10), np.float32(np.arange(12).reshape(4, 3) / 10)
    operands = data, updates, np.array([[0], [2], [0], [4]])
    of_rows = jax.jit(jax.grad(loss, (0, 1)))(*operands)
    monkeypatch.setattr(indexing, "_repeated", lambda _: ())
    of_elements = jax.jit(jax.grad(lambda *x: loss(*x), (0, 1)))(*operands)
    for got, want in zip(of_rows, of_elements, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 5, 4), (1, 1, 5, 3), (1, 2, 5, 1), (5, 4), (2, 5)], ids=str)
def test_the_slot_of_a_cache_is_written_as_its_elements_are(shape, monkeypatch):
    """By index from -6 to 5, of which -6 and 5 are out of range; with gradients."""
    axis = shape.index(5)
    rng = np.random.default_rng(0)
    cache, new = rng.normal(size=shape).astype(np.float32), rng.normal(size=(*shape[:axis], 1, *shape[axis + 1 :]))

    def written(cache, new, at):
        indices = jnp.broadcast_to(at, new.shape)
        return indexing.scatter_elements(cache, indices, new.astype(np.float32), axis=axis)

    def results(cache, new, at):
        y, back = jax.vjp(lambda c, x: written(c, x, at), cache, new)
        return y, *back(jnp.sin(jnp.arange(y.size, dtype=np.float32).reshape(y.shape)))

    places, slots = np.arange(-6, 6, dtype=np.int64), []
    monkeypatch.setattr(indexing, "with_slot", lambda *a, f=indexing.with_slot, **o: slots.append(1) or f(*a, **o))
    found = list(map(jax.jit(lambda at: results(cache, new, at)), places))
    assert slots
    monkeypatch.setattr(indexing, "_is_slot", lambda *_: False)
    wanted = list(map(jax.jit(lambda at: results(cache, new, at)), places))
    for at, ours, theirs in zip(places, found, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
        expected = cache.copy()
        if -5 <= at < 5:
            expected[(*[slice(None)] * axis, slice(at % 5, at % 5 + 1))] = new
        np.testing.assert_array_equal(ours[0], expected)


def test_a_slot_of_each_sequence():
    pairs, rng = {}, np.random.default_rng(0)
    for mode, axis in itertools.product(["linear", "circular"], [1, 2, 3]):
        cache = rng.normal(size=(3, 4, 4, 4)).astype(np.float32)
        new = rng.normal(size=[1 if i == axis else n for i, n in enumerate(cache.shape)]).astype(np.float32)
        at = np.array([0, 3, 2 if mode == "linear" else 5])
        expected = np.moveaxis(cache.copy(), axis, 1)
        for i in range(3):
            expected[i, at[i] % 4] = np.moveaxis(new, axis, 1)[i, 0]
        call = partial(indexing.tensor_scatter, axis=axis, mode=mode)
        pairs[mode, axis] = (lambda at, cache=cache, new=new, call=call: call(cache, new, at), (at,)), expected
    for (mode, axis), y in joined({name: call for name, (call, _) in pairs.items()}).items():
        np.testing.assert_array_equal(y, np.moveaxis(pairs[mode, axis][1], 1, axis), err_msg=f"{mode} {axis}")


def test_a_slice_at_a_traced_start_whose_result_is_declared_a_scalar() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[5] x, int64[1] s) => (float y)
      { two = Constant <value_ints = [2]> ()  e = Add (s, two)  y = Slice (x, s, e) }"""
    m = onnx2jax.convert(onnx.parser.parse_model(text))
    with pytest.raises(KnownValueError, match=r"'y' .*axis 0 of the result has 2 elements"):
        jax.eval_shape(m.apply, m.params, {"x": np.ones(5, np.float32), "s": np.array([1])})
