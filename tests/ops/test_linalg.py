"""Matrix products, Einstein sums, determinants: what the official cases leave open."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from onnx2jax.ops import linalg
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


def by_repeated(q, x, *, transposed=False, scale=None, tile=False, heads=6):
    """q @ x, each of x's three heads repeated twice, as PyTorch's exporters write it."""
    x = run_op("Unsqueeze", x, np.array([2]))
    x = run_op("Tile", x, np.array([1, 1, 2, 1, 1])) if tile else run_op("Expand", x, np.array([1, 1, 2, 1, 1]))
    x = run_op("Reshape", x, np.array([0, heads, -1, x.shape[-1]]))
    x = run_op("Transpose", x, perm=[0, 1, 3, 2]) if transposed else x
    return run_op("MatMul", q, x if scale is None else run_op("Mul", x, scale))


def operands_of_products(function, *args):
    """The shapes of the right operands of products in a function's jaxpr, those in the branches for a CPU left out."""
    return [e.invars[1].aval.shape for e in jax.make_jaxpr(function)(*args).eqns if e.primitive.name == "dot_general"]


REPEATED = {
    "weights": {},
    "keys": {"transposed": True},
    "keys times a scalar": {"transposed": True, "scale": np.float32(0.5)},
    "keys times [0.5]": {"transposed": True, "scale": np.array([0.5], np.float32)},
    "tiled": {"tile": True},
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("case", REPEATED)
def test_matmul_reads_repeated_matrices_once(case, rows):
    options = REPEATED[case]
    q, x = real(2, 6, rows, 5), real(2, 3, *((7, 5) if "keys" in case else (5, 7)))
    ours = partial(by_repeated, **options)
    wanted = ours(q, x)  # by NumPy
    assert operands_of_products(ours, q, x) == [x.shape]
    directions = real(*q.shape), real(*x.shape) / 3

    def plain(q, x):
        x = jnp.repeat(x * options.get("scale", np.float32(1)), 2, axis=1)
        return q @ (x.mT if options.get("transposed") else x)

    @jax.jit
    def results(q, x):
        derivatives = [jax.jvp(jax.jit(f), (q, x), directions) for f in (ours, plain)]
        return ours(q, x), ours(q[:1], x[:1]), jax.vmap(ours)(q[:, None], x[:, None])[:, 0], derivatives

    *products, (of_ours, of_plain) = results(q, x)
    for got in products:
        np.testing.assert_allclose(got, wanted[: len(got)], rtol=1e-5, atol=1e-6)
    for got, want in zip(of_ours, of_plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32, np.float64])
def test_products_with_repeated_matrices_in_other_types(dtype):
    q, x = (3 * real(2, 6, 1, 5)).astype(dtype), (3 * real(2, 3, 5, 7)).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        got = jax.jit(by_repeated)(q, x)
    assert got.dtype == dtype
    got, wanted = (np.asarray(y).astype(np.float64) for y in (got, by_repeated(q, x)))
    np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=0.1)


def test_products_with_repeated_matrices_of_a_symbolic_batch_and_length():
    batch, length = jax.export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((batch, 6, 1, length), np.float32), jax.ShapeDtypeStruct((batch, 3, length, 7), "f4")]
    exported = jax.export.export(jax.jit(partial(by_repeated, heads=6)))(*types)
    q, x = real(2, 6, 1, 5), real(2, 3, 5, 7)
    np.testing.assert_allclose(exported.call(q, x), by_repeated(q, x), rtol=1e-5, atol=1e-6)


def test_what_only_looks_like_repeated_heads_is_multiplied_as_it_is():
    q, x = real(2, 6, 4, 5), real(2, 3, 5, 7)

    def in_turns(q, x):  # heads 0 1 2 0 1 2, not 0 0 1 1 2 2
        return run_op("MatMul", q, run_op("Tile", x, np.array([1, 2, 1, 1])))

    def of_a_mask(q, x):  # scaled by other numbers in each head
        return run_op("MatMul", q, run_op("Mul", jnp.repeat(x, 2, 1), np.arange(6, dtype=np.float32).reshape(6, 1, 1)))

    def one_for_all(q, x):  # the batch is repeated, too
        return run_op("MatMul", q, jnp.broadcast_to(x[:1, :, None], (2, 3, 2, 5, 7)).reshape(2, 6, 5, 7))

    def rows_of_batches(q, x):  # the repeated axis is the first of the batch axes
        return run_op("MatMul", q.reshape(4, 3, 4, 5), jnp.repeat(x, 2, 0))

    for function in (in_turns, of_a_mask, one_for_all, rows_of_batches):
        np.testing.assert_allclose(jax.jit(function)(q, x), function(q, x), rtol=1e-5, atol=1e-6)
        assert operands_of_products(function, q, x)[0][:2] in {(2, 6), (4, 3)}
    none = jax.jit(by_repeated)(real(2, 6, 0, 5), x)
    assert none.shape == (2, 6, 0, 7)
    np.testing.assert_array_equal(jax.jit(by_repeated)(real(2, 6, 4, 0), real(2, 3, 0, 7)), np.zeros((2, 6, 4, 7)))


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


@pytest.mark.parametrize(("a", "rows"), [((1, 1, 64), 8), ((64,), 8), ((2, 1, 64), 2)])
def test_one_row_in_half_precision_is_a_product_of_eight_on_cuda(a, rows):
    """XLA would write a sum of its own for one row. The other rows change nothing."""
    multiply = partial(run_op, "MatMul")
    a, b = (np.random.default_rng(0).standard_normal(s).astype(ml_dtypes.bfloat16) for s in (a, (64, 32)))
    text = jax.jit(multiply).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"tensor<{rows}x" in line.partition("->")[2]
    if rows == linalg.CUDA_ROWS:
        got = linalg._row_by_matrix(a, b)
        wanted = multiply(a, b)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(*(np.float32(v) for v in (got, wanted)), rtol=1e-2, atol=1e-2)


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
    grad = jax.jit(jax.grad(lambda a, b: run_op("MatMul", a, b).sum() + run_op("Det", b), (0, 1)))(a, b)
    np.testing.assert_allclose(grad[0], np.tile(b.sum(1), (2, 1)), rtol=1e-5)
    cofactors = np.linalg.det(b) * np.linalg.inv(b).T
    np.testing.assert_allclose(grad[1], np.tile(a.sum(0)[:, None], 3) + cofactors, rtol=1e-3, atol=1e-4)
