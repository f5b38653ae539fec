"""A hypothesis state machine over calls of models: after each step the results of all models match NumPy."""

from __future__ import annotations

import copy
import gc
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from onnx2jax.errors import InputError, InputShapeError, OnnxError
from tests.support.confusable import CASES, real
from tests.support.derivations import COUNTS, SETTINGS, Derivations, rule, whole
from tests.support.foreign_traces import TRACES
from tests.support.subjects import (
    FORMS,
    Subject,
    as_list,
    assert_same,
    deleted,
    other_params,
    spoil_all,
)

MINUTES = float(os.environ.get("STATE_MACHINE_MINUTES", "60"))
"""Duration of the long form."""
REJECTED = (OnnxError, FloatingPointError, TypeError, ValueError, NotImplementedError)
"""Traces that a model or JAX may reject: a node without derivative, integers in ``grad``, a NaN in ``debug_nans``."""
COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
settings.register_profile(
    "confusion", settings(stateful_step_count=12, derandomize=True, phases=[Phase.generate], **COMMON)
)
settings.register_profile("long confusion", settings(max_examples=50, stateful_step_count=30, **COMMON))


class Confusion(Derivations):
    """The rules: calls, runs and transformations of models."""

    # ---------------------------------------------------------------------------------------------------- calls

    @rule(k=whole, forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=3), by_name=st.booleans())
    def call(self, k: int, forms: list[str], by_name: bool) -> None:
        subject, rng = self.draw(k)
        feeds, expected, seed = self.feeds(subject, rng, forms)
        required = [v.name for v in subject.model.inputs]
        args = [] if by_name else [feeds[n] for n in required]
        with self.configured():
            named = {n: v for n, v in feeds.items() if by_name or n not in required}
            results = subject.model(*args, **named, rng=seed)
            spoil_all(feeds)
        self.check(as_list(results), expected)

    @rule(k=whole, forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=3), some=st.booleans())
    def run(self, k: int, forms: list[str], some: bool) -> None:
        subject, rng = self.draw(k)
        feeds, expected, seed = self.feeds(subject, rng, forms)
        order = rng.integers(len(expected), size=rng.integers(1, 4)) if some else range(len(expected))
        wanted = [subject.outputs[i] for i in order] if some else None
        with self.configured():
            results = subject.model.run(wanted, feeds, rng=seed)
            spoil_all(feeds)
        assert_same(results, [expected[i] for i in order])
        for array in results:
            with suppress(ValueError):  # read-only
                array[...] = "spoilt" if array.dtype == object else 55

    @rule(k=whole, name_all=st.booleans())
    def values(self, k: int, name_all: bool) -> None:
        subject, rng = self.draw(k)
        if subject.case.draws or subject.options.keys() - {"rebatch"} or subject.joined:
            return
        feeds, _, _ = self.feeds(subject, rng, ["numpy"])
        wanted = subject.inner if name_all else [str(rng.choice(subject.inner))]
        expected = [np.array(v) for v in replace(subject, outputs=wanted).expected(feeds)]
        with self.configured():
            results = subject.model.values(**feeds, names=wanted)
            spoil_all(feeds)
        self.check([results[n] for n in wanted], expected)

    @rule(k=whole, new=st.booleans(), form=st.sampled_from(["numpy", "jax"]), in_jit=st.booleans())
    def apply(self, k: int, new: bool, form: str, in_jit: bool) -> None:
        subject, rng = self.draw(k)
        params = other_params(rng, subject) if new else {}
        other = replace(subject, params=subject.params | params)
        feeds, expected, seed = self.feeds(other, rng, [form])
        narrow = not self.configuration["x64"] and in_jit
        if in_jit and not self.is_transformable(subject, narrow):
            return
        with self.configured():
            given = {n: FORMS[form](v) for n, v in params.items()} if new else subject.model.params
            key = None if seed is None else jax.random.key(seed)
            if in_jit:
                subject.jitted = subject.jitted or jax.jit(lambda p, f, r: subject.model.apply(p, rng=r, **f))
                results = jax.block_until_ready(subject.jitted(given, feeds, key))
            else:
                results = subject.model.apply(given, rng=key, **feeds)
                spoil_all(feeds)
        self.check(as_list(results), expected, **({"exact_types": False} if narrow else {}))

    @rule(k=whole)
    def gradient(self, k: int) -> None:
        """Compares the directional derivative in parameters and x with finite differences in float64."""
        subject, rng = self.draw(k)
        feeds, expected, seed = self.feeds(subject, rng, ["numpy"])
        if not (self.is_transformable(subject, True) and subject.case.differentiable and "x" in feeds):
            return
        if subject.options.keys() & {"rebatch", "bucket", "max_size", "dtype"} or subject.folded or seed is not None:
            return
        floats = [i for i, v in enumerate(expected) if v.dtype == np.float32]
        point = {n: subject.params[n] for n, v in subject.model.params.items() if v.dtype == np.float32}
        rest = {n: v for n, v in feeds.items() if n != "x"}
        point["x"] = feeds["x"]
        if any(v.size > 1000 for v in point.values()) or not floats:
            return
        point = {n: v for n, v in point.items() if n not in rest}
        direction = {n: real(rng, *v.shape) for n, v in point.items()}

        def loss(point: dict[str, Any]) -> Any:
            params = {n: v for n, v in point.items() if n != "x"}
            outputs = as_list(subject.model.apply(params, x=point["x"], **rest))
            return sum(jnp.sum(outputs[i]) for i in floats)

        def shifted(step: float) -> float:
            moved = {n: v.astype(np.float64) + step * direction[n] for n, v in point.items()}
            values = replace(subject, params=subject.params | moved).expected({**rest, "x": moved["x"]})
            return float(sum(values[i].sum(dtype=np.float64) for i in floats))

        with self.configured():
            total, slopes = jax.value_and_grad(loss)(point)
        slope = sum(float((np.asarray(slopes[n], np.float64) * direction[n]).sum()) for n in point)
        wanted = (shifted(1e-4) - shifted(-1e-4)) / 2e-4
        np.testing.assert_allclose([total, slope], [shifted(0), wanted], rtol=1e-3, atol=1e-2)

    @rule(k=whole)
    def batch(self, k: int) -> None:
        subject, rng = self.draw(k)
        if not self.is_transformable(subject, True) or subject.case.draws or subject.options:
            return
        feeds, expected, _ = self.feeds(subject, rng, ["numpy"])
        if "x" not in feeds:
            return
        rest = {n: v for n, v in feeds.items() if n != "x"}
        double = 2 * feeds["x"]  # without zeros, as "signed" divides 0 by 0 to NaN, which debug_nans rejects
        second = subject.expected({**feeds, "x": double})
        both = np.stack([feeds["x"], double])
        with self.configured():
            results = jax.vmap(lambda x: subject.model.apply(subject.model.params, x=x, **rest))(both)
        stacked = [np.stack(pair) for pair in zip(expected, second, strict=True)]
        assert_same(as_list(results), stacked, exact_types=False)

    def is_transformable(self, subject: Subject, narrow: bool) -> bool:
        """Whether the caller's jit supports the model once inputs that determine shapes are fixed."""
        decided = all(n in subject.fixed or n in subject.given for n in subject.case.decides)
        transforms = subject.case.transforms or "max_size" in subject.options
        return transforms and decided and not (narrow and subject.case is CASES["wide"])

    @rule(k=whole)
    def threads(self, k: int) -> None:
        subject, rng = self.draw(k)
        models = [subject.model, copy.copy(subject.model), subject.model]
        calls = [self.feeds(subject, rng, ["numpy"]) for _ in range(3)]

        def work(i: int) -> None:
            with self.configured():
                for feeds, expected, seed in calls[i:] + calls[:i]:
                    assert_same(as_list(models[i](**feeds, rng=seed)), expected)
                    assert_same(models[i].run(None, feeds, rng=seed), expected)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))

    # ---------------------------------------------------------------------------------------------- in between

    @rule(k=whole, how=st.sampled_from(sorted(TRACES)), pure=st.booleans())
    def foreign_trace(self, k: int, how: str, pure: bool) -> None:
        """A caller's trace of the model, whose result nobody reads; some are rejected."""
        subject, rng = self.draw(k)
        feeds, _, seed = self.feeds(subject, rng, ["numpy"])
        if "x" not in feeds or (how == "export" and 0 in feeds["x"].shape):
            return
        rest = {n: v for n, v in feeds.items() if n != "x"}
        m = subject.model

        def traced(x: Any) -> Any:
            key = None if seed is None else jax.random.key(seed)
            return m.apply(m.params, x=x, rng=key, **rest) if pure else m(x=x, rng=key, **rest)

        with self.configured(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(*REJECTED):
                TRACES[how](traced, feeds["x"])

    @rule(
        k=whole,
        how=st.sampled_from(["dtype", "rank", "name", "missing", "none", "masked", "deleted", "parameter", "shape"]),
    )
    def mistake(self, k: int, how: str) -> None:
        """An invalid call is rejected and does not affect later calls."""
        subject, rng = self.draw(k)
        feeds, _, _ = self.feeds(subject, rng, ["numpy"])
        name = next(iter(feeds), None)
        if name is None:
            return
        wrong = dict(feeds)
        array = feeds[name]
        if how == "dtype" and name in subject.typed:
            wrong[name] = array.astype(np.uint16) if array.dtype != object else np.zeros(array.shape, np.uint16)
        elif how == "rank" and subject.given == ():
            wrong[name] = array[None, None, None, None, None]
        elif how == "masked" and array.dtype != object:
            wrong[name] = np.ma.masked_array(array)
        elif how == "deleted" and array.dtype != object:
            wrong[name] = deleted(FORMS["jax"](array))
        elif how == "missing" and name not in subject.model.optional:
            del wrong[name]
        elif how == "none":
            wrong[name] = None
        elif how == "name":
            wrong["no such input"] = array
        elif how == "shape" and subject.model.params:
            first, own = next(iter(subject.model.params.items()))
            with self.configured(), pytest.raises(InputShapeError, match="new_shapes=True"):
                subject.model.with_params({first: np.zeros((7, *own.shape), own.dtype)})
            return
        elif how == "parameter":
            with self.configured(), pytest.raises(InputError):
                subject.model.with_params({"no such parameter": array})
            return
        else:
            return
        for call in (lambda: subject.model(**wrong), lambda: subject.model.run(None, wrong)):
            with self.configured(), pytest.raises(InputError):
                call()

    @rule(name=st.sampled_from(sorted(SETTINGS)), k=whole)
    def configure(self, name: str, k: int) -> None:
        self.configuration[name] = SETTINGS[name][1][k % len(SETTINGS[name][1])]

    @rule()
    def clear_caches(self) -> None:
        jax.clear_caches()


@pytest.fixture
def frozen() -> Iterator[None]:
    """Each machine collects garbage at its end, but not among the objects of other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.RecompilationWarning")
@pytest.mark.usefixtures("standard_promotion", "frozen")
@pytest.mark.parametrize("examples", [8, pytest.param(25, marks=pytest.mark.extended)])
def test_state_machine(examples: int) -> None:
    profile = settings.get_profile("confusion")
    run_state_machine_as_test(Confusion, settings=settings(profile, max_examples=examples))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::onnx2jax.errors.RecompilationWarning")
@pytest.mark.usefixtures("standard_promotion")
def test_state_machine_for_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    """``STATE_MACHINE_MINUTES=10`` makes it shorter."""
    COUNTS.clear()
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        run_state_machine_as_test(Confusion, settings=settings.get_profile("long confusion"))  # of a new seed
    with capsys.disabled():
        print(f"\n{COUNTS.pop('begin')} examples, {COUNTS.total()} steps: {dict(COUNTS.most_common())}")
