"""A caller's traces leave a model as it was: values, warnings, compilations, and no tracer that stays alive."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive

import onnx2jax
from onnx2jax.errors import InputTypeError, OnnxError
from tests.support.confusable import CASES, real
from tests.support.foreign_traces import TRACES
from tests.support.helpers import mesh
from tests.support.models import text_model
from tests.support.subjects import as_list, assert_same

F = np.float32
W = np.arange(12, dtype=F).reshape(4, 3) - 5
DENSE: Final = text_model("g (float[n, 4] x) => (float[n, 3] y) { h = MatMul(x, W)  y = Relu(h) }", W=W)
CACHE: Final = text_model(
    """g (float[n, 4] x, float[n, past, 4] past_key) => (float[n, total, 4] present_key, float[n, 4] y)
    { row = Unsqueeze(x, one)  present_key = Concat<axis = 1>(past_key, row)
      m = ReduceMean<keepdims = 0>(present_key, one)  y = Add(m, x) }""",
    one=[1],
)
LOOP: Final = text_model(
    """g (float[n, 4] x, int64 trips) => (float[n, 4] y) { y = Loop(trips, going, x) <body = b
    (int64 i, bool c, float[n, 4] s) => (bool still, float[n, 4] t) { still = Identity(c)  t = Mul(s, half) }> }""",
    going=True,
    half=F(0.5),
)
BUCKETS: Final = {"bucket": {"n": [4, 8]}}
TEXTS: Final = text_model(
    "g (string[n] s, float[n, 4] x) => (string[n] t, float[n, 4] y) { t = StringConcat(s, s)  y = Mul(x, W) }", W=F([3])
)

KINDS: Final[dict[str, tuple[Any, dict[str, Any], Callable[[int], dict[str, Any]]]]] = {
    "one program": (DENSE, {}, lambda _: {}),
    "without optimisation": (DENSE, {"optimize": False}, lambda _: {}),
    "partitioned": (CASES["found"].proto, {}, lambda _: {}),
    "max_size": (CASES["found"].proto, {"max_size": {"where": 64}}, lambda _: {}),
    "cache": (CACHE, {}, lambda n: {"past_key": np.ones((n, 2, 4), F)}),
    "buckets": (DENSE, BUCKETS, lambda _: {}),
    "buckets without optimisation": (DENSE, {**BUCKETS, "optimize": False}, lambda _: {}),
    "strings": (TEXTS, {}, lambda n: {"s": np.array(["a"] * n, object)}),
    "specialised": (CASES["reshaped"].proto, {}, lambda _: {"shape": np.array([-1, 2])}),
    "traced trips": (LOOP, {}, lambda n: {"trips": np.array(n + 1, np.int64)}),
    "microbatches": (DENSE, {"stages": 2, "microbatches": 2}, lambda _: {}),
}
CANARY = ("one program", "partitioned", "buckets", "traced trips")
"""The kinds, and the traces below, of the main tier: the others differ from one of them in little."""
FEW = ("jit", "jit of a constant", "vmap", "grad", "jvp", "export")


@pytest.fixture
def tracers() -> Iterator[Callable[[], list[Any]]]:
    """Finds tracers that were made in a test and are alive; what was there before is not searched, which takes long."""

    def alive() -> list[Any]:
        gc.collect()
        return [o for o in gc.get_objects() if isinstance(o, jax.core.Tracer)]

    gc.collect()
    gc.freeze()
    yield alive
    gc.unfreeze()


def made(kind: str) -> onnx2jax.Model:
    proto, options, _ = KINDS[kind]
    extra = {"mesh": mesh(stage=2)} if "stages" in options else {}
    return onnx2jax.convert(proto, **options, **extra)


def example(kind: str, n: int) -> tuple[np.ndarray, dict[str, Any]]:
    rng = np.random.default_rng(n)
    return real(rng, *((4 * n,) if kind == "specialised" else (n, 4))), KINDS[kind][2](n)


def called(model: onnx2jax.Model, x: np.ndarray, rest: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(v) for v in as_list(model(x=x, **rest))]


@pytest.mark.parametrize(
    "kind", [k if k in CANARY else pytest.param(k, marks=pytest.mark.extended) for k in sorted(KINDS)]
)
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_a_callers_trace_leaves_no_mark(kind: str, few: bool, tracers: Callable[[], list[Any]]) -> None:
    """A trace may be refused by an OnnxError; a plain call of another shape is then as if it had not been."""
    x, rest = example(kind, 2)
    other, others = example(kind, 4)
    fresh = made(kind)
    called(fresh, x, rest)
    wanted = called(fresh, other, others)
    for name, trace in TRACES.items():
        if few and name not in FEW:
            continue
        model, refused = made(kind), False
        called(model, x, rest)
        before = len(tracers())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                trace(lambda x, m=model: m(x=x, **rest), x)  # type: ignore[misc]
            except (OnnxError, TypeError, ValueError) as e:  # no jit returns strings
                assert isinstance(e, OnnxError) or kind == "strings", name
                refused = True
            found = called(model, other, others)
        assert_same(found, wanted)
        assert refused or len(tracers()) <= before, (
            name
        )  # JAX keeps those of a trace that failed, as long as the weights
        assert model.compilations == fresh.compilations, name


@contextmanager
def replaced_relu() -> Iterator[None]:
    """As jax2onnx exports: a function of JAX is another, whose primitive nobody can compile."""
    primitive = Primitive("another_relu")
    primitive.def_abstract_eval(lambda x: x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "relu", primitive.bind)
        patch.setattr(jnp, "tanh", primitive.bind)
        yield


@pytest.mark.parametrize("way", ["call", "apply", "constant"])
def test_functions_that_an_exporter_replaces_are_not_kept(way: str) -> None:
    """JAX caches traces by shapes: the model's own calls, and later traces, do not meet the exporter's."""
    model, x = onnx2jax.convert(DENSE), real(np.random.default_rng(0), 2, 4)
    with replaced_relu(), suppress(NotImplementedError):
        if way == "call":
            assert "another_relu" in str(jax.make_jaxpr(lambda x: model(x))(x))
        elif way == "apply":
            jax.make_jaxpr(onnx2jax.portable(lambda x: model.apply(model.params, x)))(x)
        else:
            jax.make_jaxpr(lambda: model(x))()
    wanted = [np.maximum(x @ W, 0)]
    assert_same(called(model, x, {}), wanted)
    assert_same(model.run(None, {"x": x}), wanted)
    assert_same([jax.jit(model)(x)], wanted)
    assert_same([model.apply(model.params, x)], wanted)


def test_methods_that_run_a_model_on_values_inside_of_a_jit() -> None:
    """With values at hand they do as outside; traced ones are an error that says so."""
    model, x = onnx2jax.convert(DENSE), real(np.random.default_rng(0), 2, 4)
    found: dict[str, Any] = {}

    def inside(y: Any) -> Any:
        found.update(
            run=model.compile(x).run(None, {"x": x}), verified=model.verify(x), profile=model.profile(x, calls=1)
        )
        return y

    jax.jit(inside)(1.0)
    assert_same(found["run"], [np.maximum(x @ W, 0)])
    assert found["verified"].ok and found["profile"].nodes
    for method in (model.verify, model.profile):
        for transform in (jax.jit, jax.vmap):
            with pytest.raises(InputTypeError, match=f"call model.{method.__name__} outside of it, with arrays"):
                transform(lambda x: method(x))(x)  # noqa: B023


def test_a_training_step_does_not_keep_what_an_exporter_replaces() -> None:
    """Nor does a step that a caller traces count as a compilation."""
    x, y = real(np.random.default_rng(0), 2, 4), np.ones((2, 3), F)
    tuned = onnx2jax.finetune(
        onnx2jax.convert(DENSE), lambda out, batch: ((out - batch["y"]) ** 2).mean(), optax.sgd(0.1)
    )
    state, batch = tuned.init(), {"x": x, "y": y}
    with replaced_relu(), suppress(NotImplementedError):
        jax.make_jaxpr(tuned.evaluate)(state, batch)
    assert tuned.compilations == 0
    found = tuned.evaluate(state, batch)
    np.testing.assert_allclose(next(iter(found.values())), ((np.maximum(x @ W, 0) - y) ** 2).mean(), rtol=1e-5)
    jax.make_jaxpr(tuned.evaluate)(state, batch)
    assert tuned.compilations == 1
