"""Weights transposed that one row is multiplied by; operands swapped of products that are read transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from onnx2jax.jaxpr.passes.cpu.dot_layout import swap_transposed, transpose_row_weights
from tests.support.programs import rewritten

W = np.arange(12, dtype=np.float32).reshape(3, 4)
ROW = np.array([[1, -2, 3]], np.float32)


def contracted(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """The axes over which the products of a function of a weight and inputs sum, shown to compute what it computes."""
    closed = jax.make_jaxpr(function)(W, *inputs)
    changed = rewritten(transpose_row_weights, closed, 1)
    both = jax.jit(lambda *xs: [jaxpr_as_fun(c)(*xs)[0] for c in (changed, closed)])(W, *inputs)
    np.testing.assert_allclose(*both, rtol=1e-6)
    products = [e for e in changed.jaxpr.eqns if e.primitive.name == "dot_general"]
    return [tuple(map(tuple, e.params["dimension_numbers"][0])) for e in products]


ROWS: dict[str, tuple[Callable[..., Any], Any]] = {
    "one row": (lambda w, x: x @ w, ROW),
    "a vector": (lambda w, x: x @ w, ROW[0]),
    "one row of one image": (lambda w, x: x @ w, ROW[None]),
    "a weight stored as [out, in]": (lambda w, x: x @ w.reshape(4, 3).T, ROW),
    "what follows from the weight": (lambda w, x: x @ (w * 2).astype(np.float32), ROW),
}
OTHERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "several rows": (lambda w, x: x @ w, np.vstack([ROW, ROW])),
    "no weight": (lambda w, x: w[:1, :3] @ x, W),
    "a weight that an input changes": (lambda w, x: x @ (w + x.sum()), ROW),
    "another type": (lambda w, x: x @ w.astype(jnp.bfloat16), ROW.astype(jnp.bfloat16)),
    "stacks of matrices": (lambda w, x: jnp.matmul(x, jnp.stack([w, w])), np.stack([ROW, ROW])),
}


@pytest.mark.parametrize("name", ROWS)
def test_weight_of_one_row_is_transposed(name: str) -> None:
    function, x = ROWS[name]
    assert contracted(function, x) == [((np.ndim(x) - 1,), (1,))]


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_stay(name: str) -> None:
    function, x = OTHERS[name]
    closed = jax.make_jaxpr(function)(W, x)
    assert str(rewritten(transpose_row_weights, closed, 1)) == str(closed)


# ---------------------------------------------------------------------------------------------- swapped operands

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
G = np.arange(30, dtype=np.float32).reshape(2, 3, 5) % 7


def product(x: Any, g: Any, axes: tuple[int, ...] = (0, 1), **how: Any) -> Any:
    return lax.dot_general(g, x, ((axes, axes), ((), ())), **how)


TRANSPOSED: dict[str, Callable[[Any, Any], Any]] = {
    "the gradient of a matrix": lambda x, g: product(x, g).T,
    "several axes left": lambda x, g: lax.transpose(product(x, g, (0,)), (2, 3, 0, 1)),
    "precision": lambda x, g: product(x, g, precision=("high", "highest")).T,
    "read again behind the transpose": lambda x, g: product(x, g).T + product(x, g).T.sum(),
}
NOT_TRANSPOSED: dict[str, Callable[[Any, Any], Any]] = {
    "read both ways": lambda x, g: (lambda d: d.sum() + d.T)(product(x, g)),
    "an output": lambda x, g: (lambda d: [d, d.T])(product(x, g)),
    "axes in another order": lambda x, g: lax.transpose(product(x, g, (0,)), (3, 2, 0, 1)),
    "batches": lambda x, g: lax.transpose(lax.dot_general(g, x, (((1,), (1,)), ((0,), (0,)))), (0, 2, 1)),
    "no product": lambda x, g: (product(x, g) + 1).T,
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_operands_are_swapped(name: str) -> None:
    closed = jax.make_jaxpr(TRANSPOSED[name])(X, G)
    changed = rewritten(swap_transposed, closed)
    assert "transpose" not in {e.primitive.name for e in changed.jaxpr.eqns}
    ours, theirs = (jnp.asarray(jaxpr_as_fun(c)(X, G)[0]) for c in (changed, closed))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    precisions = {e.params["precision"] for e in changed.jaxpr.eqns if e.primitive.name == "dot_general"}
    assert name != "precision" or precisions == {(lax.Precision.HIGHEST, lax.Precision.HIGH)}


@pytest.mark.parametrize("name", NOT_TRANSPOSED)
def test_products_not_read_transposed_stay(name: str) -> None:
    closed = jax.make_jaxpr(NOT_TRANSPOSED[name])(X, G)
    assert str(rewritten(swap_transposed, closed)) == str(closed)
