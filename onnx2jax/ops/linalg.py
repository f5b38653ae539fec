"""Matrix products, Einstein sums and determinants."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..limits import CUDA_ROWS
from .arrays import accumulator, is_known, widen, xp
from .registry import op


def product(a, b, dtype):
    """numpy.matmul accumulated and returned in ``dtype``."""
    if is_known((a, b)):
        return np.matmul(a.astype(dtype), b.astype(dtype))
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.ndim and b.ndim in (1, 2):  # the common case: one contraction, without broadcasting the weights
        return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)
    return jnp.matmul(a, b, preferred_element_type=dtype)


def rounded(multiply, a, b):
    """``multiply(a, b, dtype)`` accumulated in float32 and returned in the dtype of a.

    Accelerators round inside the unit: from a cast after it XLA would omit the rounding, and write float32.
    """
    dtype = accumulator(a.dtype)
    if dtype == a.dtype or is_known((a, b)):
        return multiply(a, b, dtype).astype(a.dtype)
    forms = {"cpu": lambda a, b: multiply(a, b, dtype).astype(a.dtype), "default": lambda a, b: multiply(a, b, a.dtype)}
    if multiply is product and b.ndim == 2 and a.size == a.shape[-1]:
        forms["cuda"] = _row_by_matrix
    return compat.platform_dependent(a, b, **forms)


def _row_by_matrix(a, b):
    """One row by a matrix as ``CUDA_ROWS`` of them: 2048 by 5632 in bfloat16 take an H200 17 us, and 31 as one row, for
    which XLA writes a sum of its own in place of a product."""
    rows = jnp.pad(lax.reshape(a, (1, a.shape[-1])), ((0, CUDA_ROWS - 1), (0, 0)))
    return lax.reshape(product(rows, b, a.dtype)[:1], (*a.shape[:-1], b.shape[1]))


@op("MatMul", product=True)
def matmul(A, B, *, wide=False):
    """The product of two (stacks of) matrices, by the rules of numpy.matmul."""
    a, b, multiply = _by_groups(A, B) or (A, B, product)
    y = multiply(a, b, accumulator(A.dtype)) if wide else rounded(multiply, a, b)
    return y if multiply is product else y.reshape(*A.shape[:-1], B.shape[-1])


def _by_groups(a, b):
    """(a, b, function), which multiplies them, if groups of heads in a [..., heads, m, k] share the matrices of b.

    Exporters repeat keys and values for the query heads that share them. Read as they are, a decoder's step moves a
    quarter to a half of the bytes.
    """
    if is_known((a, b)) or a.ndim < 3 or a.shape[:-2] != b.shape[:-2] or not (repeat := compat.before_repeat(b)):
        return None
    source, (*batch, contracted, _), axis, group = repeat
    if axis != a.ndim - 3:
        return None
    a = a.reshape(*(source.shape[i] for i in batch), *rows_of_group(group, a.shape[-2]), a.shape[-1])
    numbers = ((a.ndim - 1,), (contracted,)), (tuple(range(len(batch))), tuple(batch))
    return a, source, lambda a, b, dtype: lax.dot_general(a, b, numbers, preferred_element_type=dtype)


def rows_of_group(group, rows):
    """The extents of the rows in a group of heads that multiply the same matrix.

    A single row has no axis of its own, for which XLA:CPU would transpose all keys, and CUDA move 15 % more bytes. With
    several rows, merged axes would cost 9 % more cycles on a TPU v5e.
    """
    return (group,) if rows == 1 else (group, rows)


def times(x, factor):
    """``factor * x`` for a float attribute; an integer factor keeps integers exact."""
    if factor == 1:
        return x
    if x.dtype.kind in "iu" and float(factor).is_integer():
        return x * np.asarray(int(factor)).astype(x.dtype)
    return (x.astype(np.float64) if x.dtype.kind in "iu" else x) * factor


def gemm_wide(A, B, C, alpha, beta, transA, transB):
    """``alpha * A @ B + beta * C`` in the accumulator's dtype, before rounding to the dtype of A."""
    if A.ndim != 2 or B.ndim != 2:
        raise ValueError(f"Gemm needs rank-2 A and B (they are {A.shape} and {B.shape}); use MatMul for batches")
    y = times(product(A.T if transA else A, B.T if transB else B, accumulator(A.dtype)), alpha)
    if C is None or beta == 0:
        return y
    c = times(xp.broadcast_to(widen(C), y.shape), beta)
    return y + c if y.dtype == c.dtype else y.astype(np.float64) + c.astype(np.float64)


@op("Gemm", since=7, product=True)
def gemm(A, B, C=None, *, alpha=1.0, beta=1.0, transA=0, transB=0, wide=False):
    """``alpha * A @ B + beta * C``, each matrix transposed on request, C broadcast to the product."""
    y = gemm_wide(A, B, C, alpha, beta, transA, transB)
    return y if wide else y.astype(A.dtype)


@op("Gemm")
def gemm_1(A, B, C, *, alpha=1.0, beta=1.0, broadcast=0, transA=0, transB=0):
    shape = (A.shape[1 if transA else 0], B.shape[0 if transB else 1])
    if not broadcast and C.shape != shape:
        raise ValueError(f"C has shape {C.shape}, the product {shape}: before opset 7 set broadcast=1")
    return gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)


def _check_equation(equation, operands):
    """Raise ValueError unless the equation is one, and its terms have the ranks of the operands."""
    terms, arrow, output = equation.partition("->")
    terms = terms.split(",")
    letters = [re.fullmatch(r"([A-Za-z]*)(\.\.\.)?([A-Za-z]*)", term) for term in (*terms, output)]
    if not all(letters) or len(terms) != len(operands):
        raise ValueError(
            f"the equation {equation!r} must have a term of letters, with at most one '...', for each of the "
            f"{len(operands)} inputs, separated by commas, and one after '->'"
        )
    named = [len(term.replace("...", "")) for term in terms]
    for term, n, x in zip(terms, named, operands, strict=True):
        if x.ndim < n or (x.ndim > n and "..." not in term):
            raise ValueError(f"the term {term!r} of the equation {equation!r} names {n} axes of an input {x.shape}")
    if arrow and (unknown := sorted(set(output) - set("".join(terms)) - {"."})):
        raise ValueError(f"the result of the equation {equation!r} has {unknown}, which no input has")


@op("Einsum", since=12, product=True, limits="the result must keep the dimensions of an ellipsis")
def einsum(*Inputs, equation):
    """Einstein summation; without ``->`` the output has the indices that appear once, sorted."""
    equation = equation.replace(" ", "")
    terms, arrow, output = equation.partition("->")
    _check_equation(equation, Inputs)
    if arrow and "..." in terms and "..." not in output:
        raise ValueError(f"the equation {equation!r} drops the dimensions of its ellipsis; write '->...{output}'")
    dtype, indices = Inputs[0].dtype, terms.replace("...", "").split(",")
    if len(indices) == 2 and all(len(set(t)) == len(t) for t in indices) and not is_known(Inputs):
        return jnp.einsum(equation, *Inputs, preferred_element_type=accumulator(dtype)).astype(dtype)
    return xp.einsum(equation, *map(widen, Inputs)).astype(dtype)


@op("Det", since=11, half="float32", wide=True)
def det(X):
    """The determinant of each matrix in a stack."""
    return xp.linalg.det(X)
