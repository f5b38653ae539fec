"""One row by a matrix of weights: transposed once, where that is faster, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import check_jaxpr, jaxpr_as_fun

from onnx2jax.runtime.optimize.rows import rows_by_rows

W = np.arange(12, dtype=np.float32).reshape(3, 4)
ROW = np.array([[1, -2, 3]], np.float32)


def contracted(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """The axes over which the products of a function of a weight and inputs sum, shown to compute what it computes."""
    closed = jax.make_jaxpr(function)(W, *inputs)
    changed = rows_by_rows(closed, [True] + [False] * len(inputs))
    check_jaxpr(changed.jaxpr)
    np.testing.assert_allclose(*(jaxpr_as_fun(c)(W, *inputs)[0] for c in (changed, closed)), rtol=1e-6)
    products = [e for e in changed.jaxpr.eqns if e.primitive.name == "dot_general"]
    return [tuple(map(tuple, e.params["dimension_numbers"][0])) for e in products]


SERVED: dict[str, tuple[Callable[..., Any], Any]] = {
    "one row": (lambda w, x: x @ w, ROW),
    "a vector": (lambda w, x: x @ w, ROW[0]),
    "one row of one image": (lambda w, x: x @ w, ROW[None]),
    "a weight that lies [out, in]": (lambda w, x: x @ w.reshape(4, 3).T, ROW),
    "what follows from the weight": (lambda w, x: x @ (w * 2).astype(np.float32), ROW),
}
LEFT: dict[str, tuple[Callable[..., Any], Any]] = {
    "several rows": (lambda w, x: x @ w, np.vstack([ROW, ROW])),
    "no weight": (lambda w, x: w[:1, :3] @ x, W),
    "a weight that an input changes": (lambda w, x: x @ (w + x.sum()), ROW),
    "another type": (lambda w, x: x @ w.astype(jnp.bfloat16), ROW.astype(jnp.bfloat16)),
    "stacks of matrices": (lambda w, x: jnp.matmul(x, jnp.stack([w, w])), np.stack([ROW, ROW])),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_weight_is_transposed(name: str) -> None:
    function, x = SERVED[name]
    assert contracted(function, x) == [((np.ndim(x) - 1,), (1,))]


@pytest.mark.parametrize("name", LEFT)
def test_all_else_stays(name: str) -> None:
    function, x = LEFT[name]
    closed = jax.make_jaxpr(function)(W, x)
    assert str(rows_by_rows(closed, [True, False])) == str(closed)
