"""Sequences and optionals: positions, pieces, emptiness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx2jax.errors import KnownValueError
from tests.support.helpers import run_op


def f32(*values):
    return np.array(values, np.float32)


def i64(value):
    return np.array(value, np.int64)


S = [f32(1), f32(2, 3), f32(4)]


def lists(sequence):
    return [np.asarray(v).tolist() for v in sequence]


@pytest.mark.parametrize(
    ("position", "want"),
    [
        (None, [[1], [2, 3], [4], [9]]),
        (i64(3), [[1], [2, 3], [4], [9]]),
        (i64(0), [[9], [1], [2, 3], [4]]),
        (i64(-1), [[1], [2, 3], [9], [4]]),
        (np.array(-3, np.int32), [[9], [1], [2, 3], [4]]),
    ],
)
def test_insert(position, want):
    assert lists(run_op("SequenceInsert", S, f32(9), position)) == want
    assert len(S) == 3


@pytest.mark.parametrize(("position", "want"), [(None, [[1], [2, 3]]), (i64(0), [[2, 3], [4]]), (i64(-2), [[1], [4]])])
def test_erase(position, want):
    assert lists(run_op("SequenceErase", S, position)) == want


@pytest.mark.parametrize("position", [-4, 4])
def test_positions_out_of_range(position):
    for op, *more in (("SequenceAt",), ("SequenceErase",), ("SequenceInsert", f32(9))):
        with pytest.raises(ValueError, match="outside"):
            run_op(op, S, *more, i64(position))
    with pytest.raises(ValueError, match="outside"):
        run_op("SequenceAt", S, i64(3))


def test_at():
    assert run_op("SequenceAt", S, i64(-2)).tolist() == [2, 3]
    assert run_op("SequenceAt", S, jnp.asarray(1), eager=True).tolist() == [2, 3]


def test_at_a_traced_position_of_equal_shapes():
    sequence = [f32(1), f32(2), f32(3)]
    at = jax.jit(lambda p: run_op("SequenceAt", sequence, p))
    assert [at(i64(p)).tolist() for p in (0, 2, -1, -3)] == [[1], [3], [3], [1]]
    assert np.isnan(at(i64(3))).all()


def test_at_a_traced_position_of_different_shapes():
    with pytest.raises(KnownValueError, match="position"):
        jax.jit(lambda p: run_op("SequenceAt", S, p))(i64(0))


def test_element_types_do_not_mix():
    with pytest.raises(ValueError, match="cannot be inserted"):
        run_op("SequenceInsert", S, i64([1]))
    with pytest.raises(ValueError, match="one element type"):
        run_op("SequenceConstruct", f32(1), i64(1))
    with pytest.raises(ValueError, match="element type"):
        run_op("SequenceEmpty", dtype=99)


@pytest.mark.parametrize(
    ("split", "options", "want"),
    [
        (None, {}, [[[0, 1, 2]], [[3, 4, 5]]]),
        (None, {"keepdims": 0}, [[0, 1, 2], [3, 4, 5]]),
        (None, {"keepdims": 0, "axis": -1}, [[0, 3], [1, 4], [2, 5]]),
        (i64(2), {"axis": 1}, [[[0, 1], [3, 4]], [[2], [5]]]),
        (i64(2), {"axis": 1, "keepdims": 0}, [[[0, 1], [3, 4]], [[2], [5]]]),
        (i64(5), {"axis": 1}, [[[0, 1, 2], [3, 4, 5]]]),
        (i64([1, 0, 2]), {"axis": 1}, [[[0], [3]], [[], []], [[1, 2], [4, 5]]]),
    ],
)
def test_split(split, options, want):
    x = np.arange(6).reshape(2, 3)
    assert lists(run_op("SplitToSequence", x, split, **options)) == want
    assert lists(run_op("SplitToSequence", jnp.asarray(x), split, **options)) == want
    assert lists(run_op("SplitToSequence", x, split, opset=11, **options)) == want


def test_split_rejects_invalid_sizes():
    for split, text in ((i64(0), "positive"), (i64([1, 1]), "add up"), (i64([4, -1]), "add up")):
        with pytest.raises(ValueError, match=text):
            run_op("SplitToSequence", f32(1, 2, 3), split)


def test_split_of_an_empty_tensor():
    assert run_op("SplitToSequence", np.zeros((0, 2), np.float32)) == []


def test_concat():
    assert run_op("ConcatFromSequence", S, axis=0).tolist() == [1, 2, 3, 4]
    assert run_op("ConcatFromSequence", S[::2], axis=-1, new_axis=1).tolist() == [[1, 4]]
    assert run_op("ConcatFromSequence", S[::2], axis=-2, new_axis=1).tolist() == [[1], [4]]
    assert run_op("ConcatFromSequence", [np.array(["a"], object)] * 2, axis=0).tolist() == ["a", "a"]
    with pytest.raises(ValueError, match=r"(?s)ConcatFromSequence.*at least one array.*in0: sequence of 0"):
        run_op("ConcatFromSequence", [], axis=0)


def test_lengths_are_known_under_jit():
    def f(x):
        n = run_op("SequenceLength", [x, x])
        assert isinstance(n, np.ndarray) and n.dtype == np.int64
        has = run_op("OptionalHasElement", x)
        assert isinstance(has, np.ndarray) and has
        return x * n.astype(np.float32)

    assert jax.jit(f)(f32(1)) == 2


def test_optionals():
    assert run_op("Optional", f32(1)) == f32(1)
    assert run_op("Optional", None, type="any") is None
    assert not run_op("OptionalHasElement", None)
    assert run_op("OptionalHasElement", [])
    assert run_op("OptionalGetElement", S, opset=15) is S
    with pytest.raises(ValueError, match="type"):
        run_op("Optional", None)
