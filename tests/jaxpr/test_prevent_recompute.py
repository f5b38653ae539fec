"""Values that several equations read are materialised, bit-equal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from onnx2jax.jaxpr.passes.cpu.prevent_recompute import materialise_shared
from tests.support.programs import rewritten

RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 64)).astype(np.float32)
WEIGHTS = RNG.normal(size=(4, 64, 64)).astype(np.float32) / 8

BOUNDED: dict[str, Callable[[Any], Any]] = {
    "a Relu": lambda s: jnp.maximum(s, 0),
    "a Relu6": lambda s: jnp.minimum(jnp.maximum(s, 0), 6),
    "a clamp": lambda s: jax.lax.clamp(np.float32(-1), s, np.float32(1)),
    "int8": lambda s: jnp.maximum(jnp.minimum(jnp.round(s * 10), 127), -128).astype(np.int8),
    "float16": lambda s: jnp.maximum(s, 0).astype(np.float16),
}


def residuals(bounded: Callable[[Any], Any]) -> Callable[[Any, Any], list[Any]]:
    def network(w: Any, x: Any) -> list[Any]:
        for matrix in w:
            x = bounded(x.astype(np.float32) + x.astype(np.float32) @ matrix)
        return [x]

    return network


def largest_fusion(closed: ClosedJaxpr) -> int:
    """The most arrays of X's size that one fused loop of the compiled program reads."""
    text = jax.jit(jaxpr_as_fun(closed)).lower(WEIGHTS, X).compile().as_text()
    counts = [len(re.findall(r"\w+\[256,64\]", line)) - 1 for line in text.splitlines() if line.startswith("%fused")]
    return max(counts)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bounded_value_that_is_read_twice(name: str) -> None:
    closed = jax.make_jaxpr(residuals(BOUNDED[name]))(WEIGHTS, X)
    kept = rewritten(materialise_shared, closed)
    assert [e.primitive.name for e in kept.jaxpr.eqns].count("eq") == 3, "the last is a result, read by nothing"
    given = X.copy()
    given[0, :6] = np.nan, np.inf, -np.inf, -0.0, 6.0, 1e-40
    for ours, expected in zip(jaxpr_as_fun(kept)(WEIGHTS, given), jaxpr_as_fun(closed)(WEIGHTS, given), strict=True):
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(ours, expected)


def test_xla_does_not_recompute_it() -> None:
    closed = jax.make_jaxpr(residuals(BOUNDED["a Relu"]))(WEIGHTS, X)
    assert largest_fusion(closed) > 3, "XLA keeps it by itself: the pass can go"
    assert largest_fusion(rewritten(materialise_shared, closed)) <= 3


UNTOUCHED: dict[str, Callable[[Any, Any], Any]] = {
    "is read once": lambda w, x: [jnp.maximum(x, 0) @ w[0]],
    "is small": lambda w, x: [(y := jnp.maximum(x[:2], 0)) @ w[0], y + 1],
    "has an array as its bound": lambda w, x: [(y := jnp.maximum(x, x[:1])) @ w[0], y + 1],
    "has a bound beyond the integers it becomes": lambda w, x: [
        (y := jnp.minimum(jnp.round(x * 1000), 300).astype(np.int8)).astype(np.float32) @ w[0],
        y + 1,
    ],
    "has no bound": lambda w, x: [(y := x + 1) @ w[0], y + 1],
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_value_stays_as_it_is_where_it(name: str) -> None:
    closed = jax.make_jaxpr(UNTOUCHED[name])(WEIGHTS, X)
    kept = rewritten(materialise_shared, closed)
    assert [str(e) for e in kept.jaxpr.eqns] == [str(e) for e in closed.jaxpr.eqns]
