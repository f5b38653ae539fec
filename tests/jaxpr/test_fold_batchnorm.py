"""Scales behind convolutions go into their weights: as exact as sums are, and only where nothing can be lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from onnx import helper

import onnx2jax
from onnx2jax.jaxpr import pipeline
from onnx2jax.jaxpr.const_eval import Unfoldable
from onnx2jax.jaxpr.passes.any.fold_batchnorm import AFFINE, fold
from onnx2jax.jaxpr.program import Program, as_function
from onnx2jax.ops.conv import conv
from onnx2jax.ops.window import window_of
from onnx2jax.runtime import compile
from tests.support.helpers import as_weights
from tests.support.models import model, value
from tests.support.programs import hoisted, rewritten, traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 5, 7)).astype(np.float32)
W = RNG.normal(size=(4, 3, 3, 2)).astype(np.float32)
M, F, B = (RNG.normal(size=(1, 4, 1, 1)).astype(np.float32) for _ in range(3))


class P(NamedTuple):
    """Weights of a convolution, and numbers for each channel of its result."""

    w: Any
    m: Any
    f: Any
    b: Any


ALL = P(W, M, F, B)
HALF = P(W.astype("bfloat16"), M, F, B)


def convolved(x: Any, w: Any, group: int = 1) -> Any:
    return conv(x, w, window_of(x.shape[2:], w.shape[2:], pads=[1] * 2 * (x.ndim - 2)), group)


def changed(function: Callable[..., Any], *weights: Any, x: Any = X) -> tuple[ClosedJaxpr, int]:
    """The program of a function of weights and x, folded; and how many equations that scale or shift are left in it."""
    closed = traced(function, *weights, x)
    count = len(jax.tree.leaves(weights))
    program = rewritten(fold, closed, count)
    main = hoisted(program, count).main
    return program, sum(e.primitive.name in AFFINE for e in main.jaxpr.eqns)


def results(program: ClosedJaxpr, weights: Sequence[Any], x: Any) -> np.ndarray:
    """What it gives, prepared."""
    parts = hoisted(program, len(weights))
    arguments = parts.hoisted_arguments(*as_weights([*weights, x]))
    return np.asarray(jax.jit(lambda *args: jaxpr_as_fun(parts.main)(*args)[0])(*arguments, x))


def in_another_order(p: P, x: Any) -> Any:
    numbers = ("CNHW", "OIHW", "NHWC")
    y = lax.conv_general_dilated(jnp.swapaxes(x, 0, 1), p.w, (1, 2), [(1, 1)] * 2, (2, 1), dimension_numbers=numbers)
    return y * p.f[0, :, 0, 0] - p.m.reshape(1, 1, 1, 4)


def read_twice(p: P, x: Any) -> Any:
    y = (convolved(x, p.w) - p.m) * p.f
    return jnp.tanh(y) @ jnp.cos(y).mT


FOLDED: dict[str, tuple[Callable[[P, Any], Any], int]] = {
    "BatchNormalization": (lambda p, x: (convolved(x, p.w) - p.m) * (p.f / jnp.sqrt(p.b * p.b + 1)) + p.b, 1),
    "behind a bias": (lambda p, x: (convolved(x, p.w) + p.b - p.m) * p.f, 1),
    "a scale alone": (lambda p, x: convolved(x, p.w) * p.f, 0),
    "one number for all channels": (lambda p, x: p.b + convolved(x, p.w) / p.f[0, 0] * 3.0, 1),
    "two in a row": (lambda p, x: convolved(jnp.tanh(convolved(x, p.w) * p.f + p.b)[:, :3], p.w) / p.f - p.m, 2),
    "each channel a group": (lambda p, x: convolved(x[:, :2], p.w[:, :1], 2) * p.f - p.m, 1),
    "axes in another order": (in_another_order, 1),
    "more than one reader behind it": (read_twice, 1),
}
LEFT: dict[str, Callable[[P, Any], Any]] = {
    "sums alone": lambda p, x: convolved(x, p.w) - p.m + p.b,
    "one more reader between": lambda p, x: (lambda y: y * p.f + jnp.tanh(y))(convolved(x, p.w)),
    "the convolution is a result": lambda p, x: (lambda y: (y, y * p.f))(convolved(x, p.w)),
    "a scale of each pixel": lambda p, x: convolved(x, p.w) * (jnp.zeros((5, 8)) + p.b[0, 0]),
    "a scale of the rows": lambda p, x: convolved(x, p.w)[:, :, :4, :] * p.f.reshape(1, 1, 4, 1),
    "a scale of each of the rows": lambda p, x: convolved(x[:, :, :4], p.w) * p.f.reshape(1, 1, 4, 1),
    "a scale that x decides": lambda p, x: convolved(x, p.w) * x[:1, :1, :1, :1],
    "a scale divided by it": lambda p, x: p.f / convolved(x, p.w),
    "weights that x decides": lambda p, x: convolved(x, p.w * x[0, 0, 0, 0]) * p.f,
    "a mean that stands between": lambda p, x: convolved(x, p.w).mean((2, 3), keepdims=True) * p.f,
    "half types": lambda p, x: convolved(*(v.astype(jnp.bfloat16) for v in (x, p.w))) * p.f.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", FOLDED)
def test_one_sum_is_left(name: str) -> None:
    function, left = FOLDED[name]
    program, found = changed(function, ALL)
    assert found == left
    np.testing.assert_allclose(results(program, ALL, X), jax.jit(function)(ALL, X), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", LEFT)
def test_other_chains_are_not_folded(name: str) -> None:
    assert "scaled" not in str(changed(LEFT[name], ALL)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    ("weights", "group", "name"),
    [(W, 1, "conv_general_dilated"), (W[:, :, :1, :1], 1, "dot_general"), (W[:3, :1], 3, "mul")],
    ids=["convolution", "product", "multiply-adds"],
)
def test_a_gpu_has_its_own_forms_of_what_is_folded(weights: Any, group: int, name: str, dtype: str) -> None:
    """They read and write images channels last, between transpositions of which XLA leaves none."""
    operands, x = [weights.astype(dtype), *(v[:, : len(weights)] for v in (M, F, B))], X.astype(dtype)

    def function(w: Any, m: Any, f: Any, b: Any, x: Any) -> Any:
        y = conv(x, w, window_of(x.shape[2:], w.shape[2:]), group).astype(np.float32)
        return ((y - m) * f + b).astype(dtype)

    split = pipeline.run(traced(function, *operands, x, platform="cuda"), len(operands), pipeline.Passes("cuda"))
    arguments = split.hoisted_arguments(*as_weights([*operands, x]))
    y = jax.jit(as_function(split.main))(*arguments, x)[0]
    names = [e.name for e in Program.of(split.main).equations]
    assert name in names and "sub" not in names and names.count("add") <= 1 + 6 * (name == "mul")
    error = 1e-5 if dtype == "float32" else 0.1  # of sums up to 9 in eight bits
    np.testing.assert_allclose(y.astype(np.float32), jax.jit(function)(*operands, x).astype(np.float32), atol=error)


def test_half_precision_is_left_on_other_platforms() -> None:
    """Where XLA fuses what follows a convolution, nothing is gained for the rounding of the weights."""
    _, count = changed(lambda p, x: convolved(x, p.w).astype(np.float32) * p.f, HALF, x=X.astype("bfloat16"))
    assert count == 1


def test_large_weights_that_are_read_twice_stay() -> None:
    """Else they would lie in memory twice: heads of detectors share weights, each with a BatchNormalization."""
    x, f = np.zeros((1, 128, 4, 4), np.float32), np.ones((1, 128, 1, 1), np.float32)
    large, w = np.zeros((128, 128, 3, 3), np.float32), np.zeros((128, 128, 1, 1), np.float32)
    for weight, is_folded in ((large, False), (w, True)):
        program, _ = changed(lambda w, f, x: convolved(jnp.tanh(convolved(x, w) * f), w), weight, f, x=x)
        assert ("scaled" in str(program)) is is_folded


def terms(x: Any, w: Any, chain: Sequence[tuple[str, Any]], group: int, magnitude: bool = False) -> Any:
    """A convolution and equations behind it; or the sum of the magnitudes of all that is summed there."""
    y = convolved(*map(abs, (x, w)), group) if magnitude else convolved(x, w, group)
    for name, v in chain:
        v, name = (abs(v), name.replace("sub", "add")) if magnitude else (v, name)
        y = getattr(lax, name)(y, jnp.broadcast_to(v, y.shape))
    return y


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    group, rank = draw(st.sampled_from([1, 1, 3])), draw(st.integers(1, 3))
    before, after = draw(st.integers(1, 4)), group * draw(st.integers(1, 3))
    extents = draw(st.lists(st.integers(1, 6), min_size=rank, max_size=rank))
    kernel = [draw(st.integers(1, min(3, n + 2))) for n in extents]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.normal(size=(draw(st.integers(1, 3)), group * before, *extents))
    w = rng.normal(size=(after, before, *kernel))
    names = draw(st.lists(st.sampled_from(AFFINE), max_size=4))
    operands = []
    for name in [*names, draw(st.sampled_from(["mul", "div"]))]:
        v = rng.normal(size=(after if draw(st.booleans()) else 1, *[1] * rank)) + 10.0 ** draw(st.integers(-8, 8))
        operands.append((name, np.float32(np.copysign(np.abs(v) + 1e-8, v))))
    return np.float32(x), np.float32(w), operands, group


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_results_differ_by_roundings_of_the_terms(case: tuple[Any, ...]) -> None:
    x, w, chain, group = case
    names, values = [name for name, _ in chain], [v for _, v in chain]

    def function(w: Any, *args: Any) -> Any:
        return terms(args[-1], w, [*zip(names, args[:-1], strict=True)], group)

    program, _ = changed(function, w, *values, x=x)
    assert "scaled" in str(program)
    both = jax.jit(lambda: (terms(x, w, chain, group), terms(x, w, chain, group, magnitude=True)))
    wanted, magnitudes = map(np.asarray, both())
    assert np.all(np.abs(results(program, [w, *values], x) - wanted) <= 1e-6 * magnitudes)


@pytest.mark.parametrize(
    ("w", "f", "b"),
    [(1, 1e30, 0), (1e-30, 1e-20, 0), (1e20, 1e20, 0), (1, np.inf, 0), (1, np.nan, 0), (np.inf, 0, 0), (1, 1e10, 1e35)],
)
def test_what_would_be_lost_is_found_when_it_is_prepared(w: float, f: float, b: float) -> None:
    program, _ = changed(lambda w, f, b, x: (convolved(x, w) + b) * f, W, F, B)
    with pytest.raises(Unfoldable):
        results(program, [np.full_like(W, w), np.full_like(F, f), np.full_like(B, b)], X)


def test_scales_that_are_lost_between_are_found_too() -> None:
    """Their product is 1e-5, but not that of the first two."""
    program, _ = changed(lambda w, f, x: convolved(x, w) * f * f / (f * 1e5), W, F)
    with pytest.raises(Unfoldable):
        results(program, [W, np.full_like(F, 1e-25)], X)


def test_sums_that_round_are_found() -> None:
    """The first rounds to integers; the second, the same of one sum, is a BatchNormalization."""
    for last, error in ((1.5 * 2.0**23, pytest.raises(Unfoldable)), (1.0, nullcontext())):
        program, _ = changed(lambda w, f, b, c, x: (convolved(x, w) * f + b) - c, W, F, B, B)
        with error:
            results(program, [W, F, np.full_like(B, 1.5 * 2.0**23 if last > 1 else 2), np.full_like(B, last)], X)


def test_channels_of_zeros_are_folded() -> None:
    program, _ = changed(lambda w, f, b, x: convolved(x, w) * f + b, W, F, B)
    f = F * np.float32([0, 1, 1, 0]).reshape(F.shape)
    w = W * np.float32([1, 1, 0, 0]).reshape(4, 1, 1, 1)
    wanted = jax.jit(lambda: convolved(X, w) * f + B)()
    np.testing.assert_allclose(results(program, [w, f, B], X), wanted, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ models


def network() -> onnx.ModelProto:
    """A convolution with BatchNormalization, and Relu."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "variance"], ["n"], epsilon=0.0),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    four = {n: np.linspace(0.5, i, 4, dtype=np.float32) for i, n in enumerate(("mean", "scale", "variance", "bias"), 1)}
    images = [value("x", np.float32, X.shape)], [value("y", np.float32, ["n", 4, "h", "w"])]
    return model(nodes, *images, {"w": W, **four})


@pytest.fixture(scope="module")
def plain() -> onnx2jax.Model:
    return onnx2jax.convert(network(), optimize=False)


NUMBERS = {"scale": 1e20, "variance": 1e-10, "mean": 0, "bias": 0}
EXTREME = {n: np.full(4, v, np.float32) for n, v in NUMBERS.items()}


def test_a_model_holds_its_weights_once_and_fewer_of_them(plain: onnx2jax.Model) -> None:
    model = onnx2jax.convert(network())
    for call in (lambda m: m(X), lambda m: m.run(None, {"x": X})[0]):
        np.testing.assert_allclose(call(model), call(plain), rtol=1e-5, atol=1e-5)
    (arguments,) = model.weights.hoisted.values()
    assert sorted(v.size for v in arguments) == [4, W.size]
    assert not plain.weights.hoisted


@pytest.mark.parametrize("cached", [False, True])
def test_weights_that_cannot_take_the_scale_keep_it_apart(plain: onnx2jax.Model, cached: bool, tmp_path: Path) -> None:
    """Also where a program that was made for others is found in ``cache_dir``."""
    first = onnx2jax.convert(network(), cache_dir=tmp_path if cached else None)
    first(X)
    for x in (X, np.float32(1e-20) * X):
        for other in (first, onnx2jax.convert(network(), cache_dir=tmp_path if cached else None)):
            extreme = other.with_params(EXTREME)
            wanted = np.asarray(plain.with_params(EXTREME)(x))
            for result in (extreme(x), extreme.run(None, {"x": x})[0]):
                np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5 * wanted.max())
            (executable,) = extreme.weights.hoisted
            assert "fold_batchnorm" in executable.options.skip
    assert all("fold_batchnorm" not in executable.options.skip for executable in first.weights.hoisted)


@pytest.mark.usefixtures("one_cpu")
def test_programs_that_keep_the_scale_apart_are_cached_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = onnx2jax.convert(network(), optimize=False).with_params(EXTREME)(X)
    for _ in range(2):
        model = onnx2jax.convert(network(), cache_dir=tmp_path).with_params(EXTREME)
        np.testing.assert_allclose(model.run(None, {"x": X})[0], wanted, rtol=1e-5)
        assert len([*tmp_path.glob("*.program")]) == 1
        monkeypatch.setattr(compile, "evaluate", None)  # from now on nothing can be traced
