"""The official suite inside transformations of a caller's, in JAX's plain 32-bit mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import KnownValueError, OnnxError
from onnx2jax.ir import analysis
from onnx2jax.runtime.values import is_jax, to_host
from tests.support import official

pytestmark = pytest.mark.filterwarnings("ignore::onnx2jax.DeviationWarning")  # of runtimes, from these very cases

Feeds = dict[str, Any]
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def leaves(values: Any) -> list[Any]:
    return jax.tree.leaves(values)


def is_float(value: Any) -> bool:
    return value.dtype in FLOATS


def left_out(inputs: list[Any], expected: list[Any]) -> str | None:
    """Why JAX cannot transform a case at all."""
    if not all(is_jax(v) for v in (*inputs, *expected)):
        return "strings or maps, which no JAX array holds"
    return None if leaves(inputs) else "no inputs"


def as_jit_sees(value: np.ndarray) -> np.ndarray:
    """Outside of 64-bit mode, jit makes 32 bits of 64-bit arguments before the model sees them."""
    with np.errstate(over="ignore"):
        return value.astype(jax.dtypes.canonicalize_dtype(value.dtype)).astype(value.dtype)


def transformed(model: onnx2jax.Model, transform: Callable[..., Any], feeds: Feeds) -> Any:
    """The transformed function of all inputs but those that decide shapes; without the integers if these do so, too."""
    free = {n for n, v in feeds.items() if leaves(v)} - analysis.needed(model.graph)
    floating = {n for n in free if all(map(is_float, leaves(feeds[n])))}

    def moved(names: set[str]) -> Any:
        if not names:
            pytest.skip("its only inputs decide shapes")
        known = {n: v for n, v in feeds.items() if n not in names}
        key = jax.random.key(0)
        return transform(lambda some: model.apply(model.params, **known, **some, rng=key), {n: feeds[n] for n in names})

    try:
        return moved(free)
    except KnownValueError:
        return moved(floating)


def jit(f: Any, feeds: Feeds) -> Any:
    return jax.jit(f)(feeds)


def jit_of_vmap(f: Any, feeds: Feeds) -> Any:
    results = jax.jit(jax.vmap(f))(jax.tree.map(lambda v: jnp.stack([v, v]), feeds))
    return jax.tree.map(lambda v: v[1], results)


def jit_of_grad(f: Any, feeds: Feeds) -> Any:
    moving = {n: v for n, v in feeds.items() if all(map(is_float, leaves(v)))}
    if not moving:
        pytest.skip("no floating input")

    def loss(some: Feeds) -> Any:
        results = [y for y in leaves(f({**feeds, **some})) if is_float(y)]
        if not results:
            pytest.skip("no floating output")
        return sum(y.astype(np.float32).sum() for y in results)

    return jax.jit(jax.grad(loss))(moving)


def message_and_feeds(case: official.Case) -> tuple[Any, Feeds, list[Any]]:
    message, [(inputs, expected), *_] = official.load(case)
    if reason := left_out(inputs, expected):
        pytest.skip(reason)
    return message, dict(zip([v.name for v in official.free_inputs(message)], inputs, strict=True)), expected


CASES = [pytest.param(case, id=name) for name, case in official.cases().items()]


@pytest.mark.long
@pytest.mark.parametrize("transform", [jit, jit_of_vmap])
@pytest.mark.parametrize("case", CASES)
def test_case(case: official.Case, transform: Any) -> None:
    message, feeds, expected = message_and_feeds(case)
    model = onnx2jax.convert(message)
    try:
        with jax.enable_x64(False), np.errstate(over="ignore"):
            results = transformed(model, transform, feeds)
    except KnownValueError:
        model.run(None, feeds)
        assert not model.jitted or "by value" in model.explain()
        pytest.skip("shapes or trips depend on data")
    results = to_host(list(results) if isinstance(results, tuple) else [results])
    seen = jax.tree.map(as_jit_sees, feeds)
    if not jax.tree.all(jax.tree.map(np.array_equal, seen, feeds)):
        expected = model.run(None, seen)
    # What is drawn differs; and with weights all alike the light models' Softmax is of numbers about 1e12.
    drawn = case.name in official.BERNOULLI | official.DROPOUT
    if drawn or (case.kind == "real" and transform is jit_of_vmap):
        assert [(r.dtype, r.shape) for r in results] == [(e.dtype, e.shape) for e in expected]
        return
    for result, value in zip(results, expected, strict=True):
        official.assert_same(result, value, case.rtol, case.atol)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_gradient(case: official.Case) -> None:
    """The same as in 64-bit mode, where JAX changes nothing; refusals are, too."""
    message, feeds, _ = message_and_feeds(case)
    feeds = jax.tree.map(as_jit_sees, feeds)
    model = onnx2jax.convert(message)

    def gradients(wide: bool) -> Any:
        try:
            with jax.enable_x64(wide):
                return transformed(model, jit_of_grad, feeds)
        except OnnxError as e:
            return type(e), str(e)

    expected, found = gradients(True), gradients(False)
    if isinstance(expected, tuple):
        assert expected[0] is found[0]
        pytest.skip(expected[0].__name__)
    for a, b, x in zip(*map(leaves, (found, expected, {n: feeds[n] for n in found})), strict=True):
        assert a.dtype == jax.dtypes.canonicalize_dtype(x.dtype)
        tolerance = 2**-5 if x.dtype.itemsize == 2 else 1e-3  # halves are rounded at other places
        np.testing.assert_allclose(np.float64(a), np.float64(b), tolerance, tolerance)
