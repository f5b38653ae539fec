"""Facts about logic, comparisons and bits that the official suite does not hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.ops.test_elementwise import both, f32
from tests.support.helpers import run_op


@pytest.mark.parametrize("name", ["And", "Or", "Xor", "Equal", "Greater", "Less"])
def test_broadcast_before_opset_7_aligns_at_axis(name: Any) -> None:
    a = np.arange(6).reshape(2, 3)
    b = np.array([1, 4])
    if name in ("And", "Or", "Xor"):
        a, b = a % 2 == 0, b == 1
    function = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Equal": np.equal}.get(name)
    function = function or {"Greater": np.greater, "Less": np.less}[name]
    np.testing.assert_array_equal(both(name, a, b, opset=6, broadcast=1, axis=0), function(a, b[:, None]))
    with pytest.raises(ValueError, match="broadcast=1"):
        run_op(name, a, b, opset=1)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int8, np.int64])
def test_shifts_by_the_width_and_beyond(dtype: Any) -> None:
    bits = np.iinfo(dtype).bits
    x = np.array([5, 5, 1], dtype)
    y = np.array([bits, bits + 1, bits - 1], dtype)
    assert both("BitShift", x, y, direction="LEFT").tolist() == [0, 0, int(np.iinfo(dtype).min or 2 ** (bits - 1))]
    assert both("BitShift", x, y, direction="RIGHT").tolist() == [0, 0, 0]


def test_signed_shifts_extend_the_sign() -> None:
    x, y = np.array([-8, -8, -8, 7], np.int16), np.array([1, 99, -1, -1], np.int16)
    assert both("BitShift", x, y, direction="RIGHT").tolist() == [-4, -1, -1, 0]
    assert both("BitShift", x, y, direction="LEFT").tolist() == [-16, 0, 0, 0]
    with pytest.raises(ValueError, match="direction"):
        run_op("BitShift", x, y, direction="left")


def test_comparisons_of_nan_and_strings() -> None:
    x = np.array([np.nan, 1.0])
    for name in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
        assert not both(name, x, x)[0]
    words = np.array([["a", "b"], ["c", "a"]], object)
    assert run_op("Equal", words, np.array("a", object)).tolist() == [[True, False], [False, True]]
    assert run_op("Where", np.array([True, False]), words, np.array("-", object)).tolist() == [["a", "-"], ["c", "-"]]
    with pytest.raises(TypeError, match="strings"):
        jax.jit(lambda c: run_op("Where", c, words, words))(np.array([True, False]))


def test_where_broadcasts_and_masks_gradients() -> None:
    c, x, y = np.array([[True], [False]]), f32([1, 2, 3]), np.float32(0)
    np.testing.assert_array_equal(both("Where", c, x, y), np.where(c, x, y))
    slope = jax.grad(lambda v: run_op("Where", v > 0, v, jnp.zeros_like(v)).sum())(jnp.asarray(f32([-1, 2])))
    assert slope.tolist() == [0, 1]


def test_inconclusive_comparisons_of_symbolic_dimensions() -> None:
    def body(x: Any) -> Any:
        shape = np.array(x.shape, object)
        assert run_op("Equal", shape, np.array([-1, 4])).tolist() == [False, True]
        assert run_op("Greater", shape, np.array(0)).tolist() == [True, True]
        with pytest.raises(Exception, match="inconclusive"):
            run_op("Equal", shape, np.array(1))
        chosen = run_op("Where", np.array([False, True]), np.array([9, 9]), shape)
        picked = run_op("Where", jnp.array([True, False]), shape, np.array([9, 9]))
        return jnp.zeros(tuple(chosen)), picked

    with jax.enable_x64(True):
        exported = export.export(jax.jit(body))(jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), np.float32))
        zeros, picked = exported.call(np.ones((3, 4), np.float32))
    assert zeros.shape == (3, 9) and picked.tolist() == [3, 9]
