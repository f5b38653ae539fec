"""The official suite under a caller's JAX transformations, in 32-bit mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import KnownValueError, OnnxError
from onnx2jax.ir import analysis
from onnx2jax.runtime.values import is_jax
from tests.support import official
from tests.tables.official import NOT_IN_JIT

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


class NothingToTrace(KnownValueError):
    """No input can be traced."""


def applied(model: onnx2jax.Model, feeds: Feeds, given: Feeds) -> Any:
    """``apply`` to the inputs that are given, the others known; without the given integers where they decide shapes."""
    if not given:
        raise NothingToTrace("all of its inputs must be known")
    try:
        return model.apply(model.params, **{**feeds, **given}, rng=jax.random.key(0))
    except KnownValueError:
        floating = {n: v for n, v in given.items() if all(map(is_float, leaves(v)))}
        if len(floating) == len(given):
            raise
        return applied(model, feeds, floating)


def free(model: onnx2jax.Model, feeds: Feeds) -> Feeds:
    """The inputs whose values need not be known."""
    return {n: v for n, v in feeds.items() if leaves(v) and n not in analysis.static_names(model.graph)}


def transformed(model: onnx2jax.Model, transform: Callable[..., Any], feeds: Feeds) -> Any:
    """The transformed function of the free inputs."""
    try:
        return transform(functools.partial(applied, model, feeds), free(model, feeds))
    except NothingToTrace as e:
        pytest.skip(str(e))


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
        assert case.name in NOT_IN_JIT[reason]
        pytest.skip(reason)
    return message, dict(zip([v.name for v in official.free_inputs(message)], inputs, strict=True)), expected


CASES = [pytest.param(case, id=name) for name, case in official.cases().items()]
BATCH = 40
"""Cases in one jit: a program takes some 20 ms to compile, whatever is in it."""


@functools.cache
def batches() -> dict[str, tuple[str, ...]]:
    """For each case those that share its program; the light models are large enough alone."""
    small = [name for name, case in official.cases().items() if case.kind != "real"]
    groups = [tuple(small[i : i + BATCH]) for i in range(0, len(small), BATCH)]
    return {name: group for group in groups for name in group}


@functools.lru_cache(maxsize=2)
def in_one_jit(names: tuple[str, ...]) -> dict[str, Any]:
    """For each case what its ``apply`` gives, or its error; singly where the joint program fails."""
    models: dict[str, tuple[onnx2jax.Model, Feeds]] = {}
    for name in names:
        with contextlib.suppress(pytest.skip.Exception):
            message, feeds, _ = message_and_feeds(official.cases()[name])
            models[name] = onnx2jax.convert(message), feeds
    errors: dict[str, Exception] = {}

    def joint(given: dict[str, Feeds]) -> dict[str, Any]:
        results = {}
        for name, (model, feeds) in models.items():
            try:
                results[name] = applied(model, feeds, given[name])
            except Exception as e:
                errors[name] = e
        return results

    try:
        with jax.enable_x64(False), np.errstate(over="ignore"):
            results = jax.jit(joint)({name: free(*pair) for name, pair in models.items()})
    except Exception as e:
        if len(names) == 1:
            return {names[0]: e}
        return {name: in_one_jit.__wrapped__((name,))[name] for name in names}
    return errors | {name: official.outputs(result) for name, result in results.items()}


def judge(case: official.Case, model: Callable[[], onnx2jax.Model], results: Any, loose: bool = False) -> None:
    """Compare with what the case expects, or, where jit narrows its inputs, with ``run`` of the narrowed ones."""
    _, feeds, expected = message_and_feeds(case)
    seen = jax.tree.map(as_jit_sees, feeds)
    if not jax.tree.all(jax.tree.map(np.array_equal, seen, feeds)):
        expected = model().run(None, seen)
    if loose or case.name in official.BERNOULLI | official.DROPOUT:  # what is drawn differs
        assert [(r.dtype, r.shape) for r in results] == [(e.dtype, e.shape) for e in expected]
        return
    for result, value in zip(results, expected, strict=True):
        official.assert_same(result, value, case.rtol, official.absolute_tolerance(case))


@pytest.mark.parametrize("case", CASES)
def test_jit(case: official.Case, record_property: Callable[[str, object], None]) -> None:
    message, *_ = message_and_feeds(case)
    found = in_one_jit(batches().get(case.name, (case.name,)))[case.name]
    if isinstance(found, KnownValueError):
        known = (
            "all of its inputs must be known" if isinstance(found, NothingToTrace) else "shapes or trips depend on data"
        )
        assert case.name in NOT_IN_JIT[known], found
        pytest.skip(known)
    if isinstance(found, Exception):
        raise found
    assert not any(case.name in names for names in NOT_IN_JIT.values())
    judge(case, lambda: onnx2jax.convert(message), found)
    record_property("official", "in 32 bits")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_jit_of_vmap(case: official.Case) -> None:
    message, feeds, _ = message_and_feeds(case)
    model = onnx2jax.convert(message)
    try:
        with jax.enable_x64(False), np.errstate(over="ignore"):
            results = transformed(model, jit_of_vmap, feeds)
    except KnownValueError:
        model.run(None, feeds)
        assert not model.jitted or "by value" in model.explain()
        pytest.skip("shapes or trips depend on data")
    # With weights all alike the light models' Softmax is of numbers about 1e12.
    judge(case, lambda: model, official.outputs(results), loose=case.kind == "real")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_gradient(case: official.Case) -> None:
    """Gradients and errors equal those in 64-bit mode."""
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
