"""Prefill, step and extend as pure functions under a caller's own jit, vmap and grad."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from onnx2jax.errors import InputShapeError, InputTypeError, InputValueError
from tests.generation import shared
from tests.generation.shared import P, Q, greedy
from tests.generation.shared import logits as expected
from tests.support import decoders

LENGTH = 32
STYLES = ("group query", "Concat", pytest.param("ScatterElements", marks=pytest.mark.extended))


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@dataclass(frozen=True)
class Jitted:
    """A decoder's functions in a caller's jit, compiled once for all tests of a style."""

    decoder: Decoder
    prefill: Any
    step: Any

    def read(self) -> tuple[Any, Any]:
        """The logits after P and Q, and the cache."""
        empty = self.decoder.empty_cache(2, LENGTH)
        results = self.prefill(self.decoder.params, empty, np.array([P, [*Q, 0, 0]]), np.array([5, 3]))
        assert all(v.is_deleted() for v in empty.values.values())
        return results


@pytest.fixture(scope="module")
def jitted(style: str) -> Jitted:
    own = shared.decoder(style)
    return Jitted(own, jax.jit(own.prefill, donate_argnums=1), jax.jit(own.step, donate_argnums=1))


def test_logits_in_a_callers_jit_with_a_donated_cache(jitted: Jitted, style: str) -> None:
    wanted = [(greedy(style, p, 4), expected(style, p, 4)) for p in (P, Q)]
    logits, cache = jitted.read()
    for i in range(4):
        np.testing.assert_allclose(logits, np.stack([w[1][i] for w in wanted]), atol=2e-5)
        tokens = np.array([w[0][i] for w in wanted], np.int32)
        before, (logits, cache) = cache, jitted.step(jitted.decoder.params, cache, tokens)
        assert all(v.is_deleted() for v in before.values.values())
    assert jitted.step._cache_size() == 1
    assert cache.lengths.tolist() == [9, 7]


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "file, length",
    [
        (decoders.group_query(), 128),
        (decoders.appending(), 512),
        (decoders.static(512), 512),
        pytest.param(decoders.static(512, writer="TensorScatter"), 512, marks=pytest.mark.extended),
    ],
    ids=["GroupQueryAttention", "Concat", "ScatterElements", "TensorScatter"],
)
def test_a_step_writes_donated_caches_in_place(file: decoders.File, length: int, batch: int) -> None:
    """Its program returns the buffers that it was given, and copies none of them, in this order of axes or another."""
    decoder = onnx2jax.decoder(file.proto)
    cache = jax.eval_shape(lambda: decoder.empty_cache(batch, length))
    types = {n: jax.ShapeDtypeStruct(np.shape(v), v.dtype) for n, v in decoder.params.items()}
    tokens = jax.ShapeDtypeStruct((batch,), np.int32)
    step = jax.jit(decoder.step, donate_argnums=1).lower(types, cache, tokens).compile()
    memory: Any = step.memory_analysis()
    size = sum(v.size * v.dtype.itemsize for v in cache.values.values())
    assert memory.alias_size_in_bytes >= size
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", step.as_text() or "")
    shapes = [sorted(map(int, text.split(","))) for text in copied]
    assert not any(sorted(v.shape) in shapes for v in cache.values.values()), copied
    assert memory.temp_size_in_bytes < size / 2  # so no keys or values are repeated for the heads of a group either


def test_a_full_cache_gives_nan(jitted: Jitted) -> None:
    logits, cache = jitted.read()
    for _ in range(LENGTH - len(P)):
        logits, cache = jitted.step(jitted.decoder.params, cache, np.array([1, 2], np.int32))
    assert np.isfinite(logits).all()
    logits, cache = jitted.step(jitted.decoder.params, cache, np.array([1, 2], np.int32))
    assert np.isnan(logits).all()


def test_more_tokens_than_the_cache_holds_raise(jitted: Jitted) -> None:
    decoder, many = jitted.decoder, np.ones((2, LENGTH + 1), np.int32)
    for function in (decoder.prefill, decoder.extend):
        with pytest.raises(InputShapeError, match=rf"{LENGTH + 1} tokens, and the cache has room for {LENGTH}"):
            function(decoder.params, decoder.empty_cache(2, LENGTH), many)


def test_invalid_cache_or_tokens_raise(jitted: Jitted) -> None:
    decoder = jitted.decoder
    for batch, length, layout in ((0, 4, {}), (1, 0, {}), (1, 2.5, {}), (1, 4, {"aligned": True, "apart": True})):
        with pytest.raises(InputValueError, match=r"whole number|not both"):
            decoder.empty_cache(batch, length, **layout)  # type: ignore[arg-type]
    for tokens in (np.array(P), np.array([P], np.float32)):
        with pytest.raises(InputTypeError, match=r"integers \(batch, count\)"):
            decoder.prefill(decoder.params, decoder.empty_cache(1, LENGTH), tokens)


def test_errors_of_python_name_the_decoder() -> None:
    with pytest.raises(TypeError, match=r"^Decoder\.empty_cache\(\) missing 2 required"):
        shared.decoder("group query").empty_cache()  # type: ignore[call-arg]
    for method in (onnx2jax.Decoder.step, onnx2jax.Decoder.encode, onnx2jax.Decoder.generate):
        assert pickle.loads(pickle.dumps(method)) is method


def test_extend_matches_single_steps(jitted: Jitted, style: str) -> None:
    _, cache = jitted.read()
    logits, cache = jax.jit(jitted.decoder.extend)(jitted.decoder.params, cache, np.array([Q, Q]))
    wanted = [[expected(style, [*p, *Q[: i + 1]], 1)[0] for i in range(3)] for p in (P, Q)]
    np.testing.assert_allclose(logits, wanted, atol=2e-5)
    assert (cache.lengths.tolist(), int(cache.end)) == ([8, 6], 8)


def test_vmap_over_steps(jitted: Jitted, style: str) -> None:
    """Several candidate tokens after one cache."""
    _, cache = jitted.read()
    logits = jax.jit(jax.vmap(lambda t: jitted.decoder.step(jitted.decoder.params, cache, t)[0]))(
        np.array([[3, 4], [60, 2]])
    )
    wanted = [[expected(style, [*p, t], 1)[0] for p, t in zip((P, Q), ts, strict=True)] for ts in ((3, 4), (60, 2))]
    np.testing.assert_allclose(logits, wanted, atol=2e-5)


def test_unequal_prompts_without_positions_are_nan_unless_apart() -> None:
    """Positions derived from slots would be wrong in the next step."""
    style = "Concat, positions from extents"
    decoder = shared.decoder(style)
    wanted = [(greedy(style, p, 2), expected(style, p, 2)) for p in (P, Q)]
    assert not decoder.shares_slots

    def run(apart: bool) -> Any:
        given = np.array([P, [*Q, 0, 0]]), np.array([5, 3])
        logits, cache = decoder.prefill(decoder.params, decoder.empty_cache(2, LENGTH, apart=apart), *given)
        return logits, decoder.step(decoder.params, cache, np.array([w[0][0] for w in wanted]))[0]

    jitted = jax.jit(run, static_argnums=0)
    assert np.isnan(jitted(False)[0]).all(axis=1).tolist() == [False, True]
    np.testing.assert_allclose(jitted(True), np.stack([w[1] for w in wanted], axis=1), atol=2e-5)


def test_gradients_through_prefill() -> None:
    """They match those through the model itself."""
    decoder, tokens = shared.decoder("group query"), np.array([P])
    caches = shared.file("group query").caches
    empty = {n: np.zeros(shape, dtype) for n, (_, shape, dtype) in caches.items()}

    def ours(params: Any) -> Any:
        return decoder.prefill(params, decoder.empty_cache(1, LENGTH), tokens)[0][0, 7]

    def theirs(params: Any) -> Any:
        mask = np.ones((1, len(P)), np.int64)
        return decoder.model.apply(params, input_ids=tokens, attention_mask=mask, **empty)[0][0, -1, 7]

    params = {"embedding": decoder.params["embedding"]}
    got, want = (g["embedding"] for g in jax.jit(lambda p: (jax.grad(ours)(p), jax.grad(theirs)(p)))(params))
    assert np.abs(want).max() > 0.01
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_int4_weights_stay_packed_and_are_stored_once() -> None:
    decoder = shared.decoder("group query, 4 bits")
    decoder.generate([P, Q], 4, stop=())
    weights = decoder.weights
    held = sum(v.nbytes for v in (*weights._placed.values(), *weights.shared._values.values()))
    assert held <= 1.1 * sum(v.nbytes for v in decoder.model.params.values())


def test_weights_of_two_files_that_differ_in_the_sign_of_zero_are_separate() -> None:
    model = onnx2jax.convert(onnx2jax.demo_decoder())
    zero = np.zeros_like(model.params["norm.weight"])
    two = Decoder(model.with_params({"norm.weight": zero}), model.with_params({"norm.weight": -zero}))
    assert "first/norm.weight" in two.params
