"""Products that are read transposed: computed the other way round, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

from onnx2jax.runtime.optimize.products import turned

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
G = np.arange(30, dtype=np.float32).reshape(2, 3, 5) % 7


def product(x: Any, g: Any, axes: tuple[int, ...] = (0, 1), **how: Any) -> Any:
    return lax.dot_general(g, x, ((axes, axes), ((), ())), **how)


SERVED: dict[str, Callable[[Any, Any], Any]] = {
    "the gradient of a matrix": lambda x, g: product(x, g).T,
    "several axes left": lambda x, g: lax.transpose(product(x, g, (0,)), (2, 3, 0, 1)),
    "precision": lambda x, g: product(x, g, precision=("high", "highest")).T,
    "read again behind the transpose": lambda x, g: product(x, g).T + product(x, g).T.sum(),
}
LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "read both ways": lambda x, g: (lambda d: d.sum() + d.T)(product(x, g)),
    "an output": lambda x, g: (lambda d: [d, d.T])(product(x, g)),
    "axes in another order": lambda x, g: lax.transpose(product(x, g, (0,)), (3, 2, 0, 1)),
    "batches": lambda x, g: lax.transpose(lax.dot_general(g, x, (((1,), (1,)), ((0,), (0,)))), (0, 2, 1)),
    "no product": lambda x, g: (product(x, g) + 1).T,
}


@pytest.mark.parametrize("name", SERVED)
def test_the_product_is_turned(name: str) -> None:
    closed = jax.make_jaxpr(SERVED[name])(X, G)
    changed = turned(closed)
    check_jaxpr(changed.jaxpr)
    assert "transpose" not in {e.primitive.name for e in changed.jaxpr.eqns}
    ours, theirs = (jnp.asarray(jaxpr_as_fun(c)(X, G)[0]) for c in (changed, closed))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    precisions = {e.params["precision"] for e in changed.jaxpr.eqns if e.primitive.name == "dot_general"}
    assert name != "precision" or precisions == {(lax.Precision.HIGHEST, lax.Precision.HIGH)}


@pytest.mark.parametrize("name", LEFT)
def test_all_else_stays(name: str) -> None:
    closed = jax.make_jaxpr(LEFT[name])(X, G)
    assert str(turned(closed)) == str(closed)
