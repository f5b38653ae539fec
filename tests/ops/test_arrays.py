"""The array namespace that its operands choose, and half precision computed in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

from onnx2jax import compat
from onnx2jax.errors import OperatorError
from onnx2jax.ops import registry
from onnx2jax.ops.arrays import identical, is_known, xp
from tests.support.helpers import run_op

KNOWN = np.arange(3.0, dtype=np.float32)


def is_jax(value: Any) -> bool:
    return isinstance(value, jax.Array)


def test_one_jax_operand_selects_jax_numpy() -> None:
    traced = jnp.asarray(KNOWN)
    assert not is_jax(xp.where(KNOWN > 1, KNOWN, 0))
    assert is_jax(xp.where(KNOWN > 1, KNOWN, traced))
    assert not is_jax(xp.concatenate([KNOWN, KNOWN], axis=0))
    assert is_jax(xp.concatenate([KNOWN, traced], axis=0))
    assert is_jax(xp.clip(KNOWN, max=traced))
    assert not is_jax(xp.linalg.norm(KNOWN))
    assert is_jax(xp.fft.rfft(traced))


def test_dtypes_do_not_select_jax_numpy() -> None:
    assert not is_jax(xp.ones_like(KNOWN, bool))
    assert not is_jax(xp.ones_like(KNOWN, dtype=np.dtype(ml_dtypes.bfloat16)))


def test_broadcast_to_symbolic_extents() -> None:
    (n,) = export.symbolic_shape("n")
    assert not is_known((n, 3))
    shape = jax.eval_shape(lambda x: xp.broadcast_to(KNOWN, (x.shape[0], 3)), jax.ShapeDtypeStruct((n, 1), np.float32))
    assert shape.shape == (n, 3)


@pytest.fixture
def thirds() -> Any:
    """An operator whose roundings show: in float16 itself (1 + x) * 3 - 3 loses the digits of a small x."""

    def thirds_of(x: Any) -> Any:
        return (1 + x) * 3 - 3, (x > 0)

    registry.op("Thirds", domain="test.arrays", half="float32")(thirds_of)
    yield thirds_of
    del registry._OPERATORS["test.arrays", "Thirds"]


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(thirds: Any, half: Any) -> None:
    x = np.array([2.0**-12, 1], half)
    with compat.enable_x64():
        for y, positive in (
            run_op("Thirds", x, domain="test.arrays", n_outputs=2),
            run_op("Thirds", x, domain="test.arrays", n_outputs=2, jit=True),
        ):
            assert (y.dtype, positive.dtype) == (half, bool)
            np.testing.assert_array_equal(np.asarray(y), (3 * x.astype(np.float32)).astype(half))
    as_written, _ = thirds(np.array([2.0**-12, 1], np.float16))  # what who calls the function gets
    assert as_written.dtype == np.float16
    assert as_written[0] == 0


@pytest.mark.parametrize("jit", [False, True])
def test_integers_stay_integers_in_arithmetic(thirds: Any, jit: bool) -> None:
    del thirds
    assert run_op("Thirds", np.array([2]), domain="test.arrays", n_outputs=2, jit=jit)[0].tolist() == [6]
    with pytest.raises(OperatorError, match=r"int64.*must have a floating type; Cast it first"):
        run_op("Softplus", np.array([2]), jit=jit)


NAN = np.float32(np.nan)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (np.float32([0, 1]), np.float32([0, 1]), True),
        (np.float32([0, 1]), np.float32([-0.0, 1]), False),
        (np.array(NAN), np.array(NAN), True),
        (np.float32([1]), np.float64([1]), False),
        (np.zeros((0, 2)), np.zeros((0, 3)), False),
        (np.arange(6).reshape(2, 3).T, np.array([[0, 3], [1, 4], [2, 5]]), True),
        (np.array(["a"], object), np.array(["a"], object), True),
        (np.array(["a"], object), np.array(["b"], object), False),
        (np.ones(2, ml_dtypes.bfloat16), np.ones(2, ml_dtypes.float8_e5m2), False),
    ],
)
def test_identical_compares_bits(a: np.ndarray, b: np.ndarray, same: bool) -> None:
    assert identical(a, b) is same
