"""Matrix products, Einstein sums, determinants: what the official cases leave open."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.helpers import run_op


def real(*shape, dtype=np.float32):
    """Numbers of its own for each shape, whichever test comes first."""
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 3)),
        ((0, 4), (4, 2)), ((3, 0), (0, 2)),
    ],
)  # fmt: skip
def test_matmul_matches_numpy(array, a, b):
    a, b = real(*a), real(*b)
    result = run_op("MatMul", array(a), array(b))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integer_products_are_exact(jit, dtype):
    a, b = np.array([[2**31 - 1, 3]], dtype), np.array([[2], [7]], dtype)
    np.testing.assert_array_equal(run_op("MatMul", a, b, jit=jit), a @ b)  # wraps as the type does


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_sums_in_float32(array, dtype):
    ones = np.ones(8192, dtype)  # adding up in the type itself stops at 2048 or 256
    for name, attributes in (("MatMul", {}), ("Einsum", {"equation": "i,i"})):
        result = run_op(name, array(ones), array(ones), **attributes)
        assert result.dtype == dtype and float(result) == 8192
    assert float(run_op("Gemm", array(ones[None]), array(ones[:, None]), alpha=0.5)[0, 0]) == 4096


def test_gemm_below_opset_7_broadcasts_with_the_attribute_only():
    a, b, c = real(2, 3), real(3, 4), real(4)
    np.testing.assert_allclose(run_op("Gemm", a, b, c, opset=6, broadcast=1), a @ b + c, rtol=1e-5)
    with pytest.raises(ValueError, match="broadcast=1"):
        run_op("Gemm", a, b, c, opset=6)
    np.testing.assert_allclose(run_op("Gemm", a, b, c, opset=7), a @ b + c, rtol=1e-5)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_gemm(array):
    a, b = real(3, 2), real(4, 3)
    expected = 0.5 * a.T @ b.T
    np.testing.assert_allclose(run_op("Gemm", array(a), array(b), alpha=0.5, transA=1, transB=1), expected, rtol=1e-5)
    nan = array(np.full((2, 4), np.nan, np.float32))
    np.testing.assert_allclose(
        run_op("Gemm", array(a), array(b), nan, alpha=0.5, beta=0.0, transA=1, transB=1), expected, rtol=1e-5
    )
    with pytest.raises(ValueError):  # C may be broadcast, the product may not
        run_op("Gemm", array(a.T), array(b.T), array(real(5, 2, 4)))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_gemm_of_integers_truncates_the_scaled_sum(array):
    a, b, c = (array(np.array(v, np.int32)) for v in ([[3]], [[5]], [[1]]))
    assert run_op("Gemm", a, b, c, alpha=2.0, beta=-1.0).tolist() == [[29]]
    assert run_op("Gemm", a, b, c, alpha=0.5, beta=0.75).tolist() == [[8]]  # 7.5 + 0.75


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ii", [(3, 3)]), ("ii -> i", [(3, 3)]), ("bA", [(2, 3)]), ("...ij , ...jk", [(2, 3, 4), (4, 5)]),
        ("...i,...i->...", [(2, 3), (2, 3)]), (",i->i", [(), (3,)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
    ],
)  # fmt: skip
def test_einsum_matches_numpy(array, equation, shapes):
    operands = [np.asarray(real(*s)) if s else np.float32(2).reshape(()) for s in shapes]
    result = run_op("Einsum", *map(array, operands), equation=equation)
    np.testing.assert_allclose(result, np.einsum(equation.replace(" ", ""), *operands), rtol=1e-4)


def test_einsum_requires_the_ellipsis_in_the_output():
    with pytest.raises(ValueError, match=r"drops the dimensions"):
        run_op("Einsum", real(2, 3), equation="...i->i")


def test_gradients():
    a, b = real(2, 3), real(3, 3)
    grad = jax.grad(lambda a, b: run_op("MatMul", a, b).sum() + run_op("Det", b), (0, 1))(a, b)
    np.testing.assert_allclose(grad[0], np.tile(b.sum(1), (2, 1)), rtol=1e-5)
    cofactors = np.linalg.det(b) * np.linalg.inv(b).T
    np.testing.assert_allclose(grad[1], np.tile(a.sum(0)[:, None], 3) + cofactors, rtol=1e-3, atol=1e-4)
