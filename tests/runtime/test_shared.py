"""Sums of images that several equations read: one call each, which XLA keeps, and the same numbers to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, check_jaxpr, jaxpr_as_fun

from onnx2jax.runtime.optimize.shared import computed_once

X = np.random.default_rng(0).normal(size=(1, 16, 16, 64)).astype(np.float32)  # 64 KB, as much as counts
W = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32) / 8
TAPS = ((0, 0), (1, 1))


def block(x: Any) -> Any:
    return jnp.maximum(x @ W + x, 0)


def blocks(x: Any) -> Any:
    return block(block(block(block(x))))


def with_taps(x: Any) -> Any:
    """The second image follows from slices of one that is padded."""
    first = block(x)
    padded = lax.pad(first, np.float32(0), ((0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)))
    second = first + sum(padded[:, i : i + 16, j : j + 16] * (1 + i) for i, j in TAPS)
    return second @ W + second


def calls(closed: ClosedJaxpr) -> list[Any]:
    return [e for e in closed.jaxpr.eqns if e.primitive.name == "jit" and e.ctx.xla_metadata]


def test_a_residual_network_has_a_call_for_each_sum_and_xla_keeps_it() -> None:
    closed = jax.make_jaxpr(blocks)(X)
    changed = computed_once(closed)
    check_jaxpr(changed.jaxpr)
    assert len(calls(changed)) == 3  # nothing reads the last one
    before, after = (jax.jit(jaxpr_as_fun(c)).lower(X).compile() for c in (closed, changed))
    assert (before.as_text().count(" call("), after.as_text().count(" call(")) == (0, 3)
    assert np.asarray(before(X)[0]).tobytes() == np.asarray(after(X)[0]).tobytes()


def test_what_leads_to_an_image_alone_is_in_its_call() -> None:
    changed = computed_once(jax.make_jaxpr(with_taps)(X))
    check_jaxpr(changed.jaxpr)
    np.testing.assert_array_equal(jaxpr_as_fun(changed)(X)[0], with_taps(X))
    *_, last = calls(changed)
    assert [v.aval.shape for v in last.invars] == [X.shape]  # the first image, rather than slices of the padded one
    names = [e.primitive.name for e in changed.jaxpr.eqns]
    assert not {"pad", "slice"} & set(names)


LEFT: dict[str, tuple[Callable[..., Any], Any]] = {
    "an image alone": (lambda x: block(x) @ W + block(x), X),
    "images that are read by element alone": (lambda x: jnp.exp(-jnp.abs(x)) + jnp.abs(x), X),
    "images that products alone read": (lambda x: (jnp.maximum(x, 0) @ W) @ W, X),
    "small ones": (blocks, X[:, :8]),
    "what is no image": (blocks, X[0]),
}


@pytest.mark.parametrize("name", LEFT)
def test_all_else_stays(name: str) -> None:
    function, x = LEFT[name]
    closed = jax.make_jaxpr(function)(x)
    assert computed_once(closed) is closed
