"""The official suite under a caller's JAX transformations, in 32-bit mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import KnownValueError, OnnxError
from onnx2jax.eval.values import is_jax
from onnx2jax.ir import analysis
from tests.support import emitters, official
from tests.support.official import Case
from tests.tables.official import NOT_IN_JIT

pytestmark = pytest.mark.filterwarnings("ignore::onnx2jax.errors.DeviationWarning")  # from these very cases

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


def message_and_feeds(case: Case) -> tuple[Any, Feeds, list[Any]]:
    message, [(inputs, expected), *_] = official.load(case)
    return message, dict(zip([v.name for v in official.free_inputs(message)], inputs, strict=True)), expected


CANARY = "test_squeezenet"
"""The smallest of the light models."""
CASES = [case for case in official.cases().values() if case.kind != "real"]
LIGHT = [(case,) for case in official.cases().values() if case.kind == "real"]


def in_one_jit(batch: Sequence[Case]) -> dict[str, Any]:
    """For each case what its ``apply`` gives, or its error, or why it cannot be tried; singly if a program fails."""
    results: dict[str, Any] = {}
    models: dict[str, tuple[onnx2jax.Model, Feeds]] = {}
    for case in batch:
        message, feeds, expected = message_and_feeds(case)
        if reason := left_out(list(feeds.values()), expected):
            results[case.name] = reason
        else:
            models[case.name] = onnx2jax.convert(message), feeds

    def joint(given: dict[str, Feeds]) -> dict[str, Any]:
        traced = {}
        for name, (model, feeds) in models.items():
            try:
                traced[name] = applied(model, feeds, given[name])
            except Exception as e:
                results[name] = e
        return traced

    options = emitters.NEWER if official.needs_newer_emitters(batch) else {}
    jitted = jax.jit(joint, compiler_options=options)
    try:
        with jax.enable_x64(False), np.errstate(over="ignore"):
            found = jitted({name: free(*pair) for name, pair in models.items()})
    except Exception as e:
        if len(batch) == 1:
            return {batch[0].name: e}
        return {name: result for case in batch for name, result in in_one_jit([case]).items()}
    return results | {name: official.outputs(result) for name, result in found.items()}


def why_not(result: Any) -> str | None:
    """The reason of NOT_IN_JIT why a case has no results; errors of other kinds are raised."""
    if isinstance(result, KnownValueError):
        nothing = isinstance(result, NothingToTrace)
        return "all of its inputs must be known" if nothing else "shapes or trips depend on data"
    if isinstance(result, Exception):
        raise result
    return result if isinstance(result, str) else None


def is_narrowed(value: Any) -> bool:
    return as_jit_sees(value).tobytes() != value.tobytes()


def judge(case: Case, results: Any, loose: bool = False) -> None:
    """Compare with what the case expects, or, where jit narrows its inputs, with ``run`` of the narrowed ones."""
    message, feeds, expected = message_and_feeds(case)
    if any(map(is_narrowed, leaves(feeds))):
        expected = onnx2jax.convert(message).run(None, jax.tree.map(as_jit_sees, feeds))
    if loose or case.name in official.BERNOULLI | official.DROPOUT:  # what is drawn differs
        assert [(r.dtype, r.shape) for r in results] == [(e.dtype, e.shape) for e in expected]
    else:
        official.compare(case, results, expected)


UNTRACED = {name: reason for reason, names in NOT_IN_JIT.items() for name in names}
MOST = 10
"""Cases of one operator outside of the extended tests."""


def _few() -> set[str]:
    """Those of every operator; a body of others shows nothing in 32 bits that the cases of these do not."""
    by_operator: dict[str, list[str]] = {}
    for case in CASES:
        if "_expanded" not in case.name:
            operator = case.model.graph.node[-1].op_type if case.model and case.model.graph.node else case.kind
            by_operator.setdefault(operator, []).append(case.name)
    return {name for names in by_operator.values() for name in names[:: -(-len(names) // MOST)]}


FEW = _few() | UNTRACED.keys()


def by_first(batches: Iterable[tuple[Case, ...]], *marks: Any) -> list[Any]:
    """Parameters of a test, each named after its first case."""
    return [pytest.param(batch, id=batch[0].name, marks=marks) for batch in batches]


MAIN = by_first([*official.batches(c for c in CASES if c.name in FEW), *(b for b in LIGHT if b[0].name == CANARY)])
EXTENDED = by_first(
    [*official.batches(c for c in CASES if c.name not in FEW), *(b for b in LIGHT if b[0].name != CANARY)],
    pytest.mark.extended,
)


@pytest.mark.parametrize("batch", MAIN + EXTENDED)
def test_jit(batch: tuple[Case, ...], subtests: Any, record_property: Callable[[str, object], None]) -> None:
    found = in_one_jit(batch)
    for case in batch:
        with official.subtest(subtests, case):
            reason = why_not(found[case.name])
            assert reason == UNTRACED.get(case.name)
            if reason is None:
                judge(case, found[case.name])
                record_property("official", "in 32 bits")


def transformable(case: Case) -> tuple[onnx2jax.Model, Feeds]:
    message, feeds, expected = message_and_feeds(case)
    if reason := left_out(list(feeds.values()), expected):
        pytest.skip(reason)
    return onnx2jax.convert(message), feeds


def check_jit_of_vmap(case: Case) -> None:
    model, feeds = transformable(case)
    try:
        with jax.enable_x64(False), np.errstate(over="ignore"):
            results = transformed(model, jit_of_vmap, feeds)
    except KnownValueError:
        model.run(None, feeds)
        assert not model.jitted or "by value" in model.explain()
        pytest.skip("shapes or trips depend on data")
    # With weights all alike the light models' Softmax is of numbers about 1e12.
    judge(case, official.outputs(results), loose=case.kind == "real")


def check_gradient(case: Case) -> None:
    """Gradients and errors equal those in 64-bit mode."""
    model, feeds = transformable(case)
    feeds = jax.tree.map(as_jit_sees, feeds)

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


@pytest.mark.long
@pytest.mark.parametrize("check", [check_jit_of_vmap, check_gradient])
@pytest.mark.parametrize("batch", by_first([*official.batches(CASES), *LIGHT]))
def test_transformations(batch: tuple[Case, ...], check: Callable[[Case], None], subtests: Any) -> None:
    for case in batch:
        with subtests.test(case=case.name):
            check(case)
