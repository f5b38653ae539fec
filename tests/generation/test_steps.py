"""Prefill, step and extend as pure functions: what is true of them under a caller's own transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from tests.support import decoders
from tests.support.decoders import by_hand

P, Q = [5, 17, 3, 40, 8], [9, 2, 31]
FILES = {"GroupQueryAttention": decoders.group_query(), "Concat": decoders.appending(), "fixed": decoders.static(16)}


@pytest.fixture(scope="module", params=FILES)
def style(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def decoder(style: str) -> Decoder:
    return onnx2jax.decoder(onnx2jax.convert(FILES[style].proto))


def test_logits_in_a_jit_of_the_callers_with_a_donated_cache(decoder: Decoder, style: str) -> None:
    wanted = [by_hand(FILES[style], prompt, 4) for prompt in (P, Q)]
    prefill, step = (jax.jit(f, donate_argnums=1) for f in (decoder.prefill, decoder.step))
    tokens = np.array([P, [*Q, 0, 0]])
    empty = decoder.empty_cache(2, 16)
    logits, cache = prefill(decoder.params, empty, tokens, np.array([5, 3]))
    assert all(v.is_deleted() for v in empty.values.values())
    for i in range(4):
        np.testing.assert_allclose(logits, np.stack([w[1][i] for w in wanted]), atol=2e-5)
        before, (logits, cache) = cache, step(decoder.params, cache, np.array([w[0][i] for w in wanted], np.int32))
        assert all(v.is_deleted() for v in before.values.values())
    assert step._cache_size() == 1
    assert cache.lengths.tolist() == [9, 7]


def test_several_tokens_at_once_are_as_one_after_another(decoder: Decoder, style: str) -> None:
    _, cache = decoder.prefill(decoder.params, decoder.empty_cache(1, 16), np.array([Q]))
    logits, cache = decoder.extend(decoder.params, cache, np.array([P]))
    wanted = [by_hand(FILES[style], [*Q, *P[: i + 1]], 1)[1][0] for i in range(5)]
    np.testing.assert_allclose(logits[0], wanted, atol=2e-5)
    assert (cache.lengths.tolist(), int(cache.end)) == ([8], 8)


def test_a_full_cache_gives_nan(decoder: Decoder) -> None:
    step = jax.jit(decoder.step)
    logits, cache = decoder.prefill(decoder.params, decoder.empty_cache(1, 16), np.array([[*P, *P, *P]]))
    assert np.isfinite(logits).all()
    logits, cache = step(decoder.params, cache, np.array([1]))
    assert np.isfinite(logits).all()
    logits, cache = step(decoder.params, cache, np.array([1]))
    assert np.isnan(logits).all()


def test_gradients_go_through_prefill(decoder: Decoder, style: str) -> None:
    """As through the model itself."""
    model, tokens = decoder.model, np.array([P])
    numbers = {"position_ids": np.arange(5)[None], "attention_mask": np.ones((1, 5), np.int64)}
    if style == "fixed":
        numbers |= {"cache_position": np.arange(5), "attention_mask": (np.arange(16) < 5).astype(np.int64)[None]}
    numbers = {n: v for n, v in numbers.items() if n in FILES[style].inputs}
    empty = {n: np.zeros(shape, dtype) for n, (_, shape, dtype) in FILES[style].caches.items()}

    def ours(params: Any) -> Any:
        return decoder.prefill(params, decoder.empty_cache(1, 16), tokens)[0][0, 7]

    def theirs(params: Any) -> Any:
        return model.apply(params, input_ids=tokens, **numbers, **empty)[0][0, -1, 7]

    got, want = (jax.jit(jax.grad(f))({"embedding": model.params["embedding"]})["embedding"] for f in (ours, theirs))
    assert np.abs(want).max() > 0.01
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_vmap_over_steps(decoder: Decoder) -> None:
    """One cache, several tokens that might be next."""
    _, cache = decoder.prefill(decoder.params, decoder.empty_cache(1, 16), np.array([P]))
    tokens = jnp.array([[3], [60]])
    logits = jax.jit(jax.vmap(lambda t: decoder.step(decoder.params, cache, t)[0]))(tokens)
    for got, token in zip(logits, tokens, strict=True):
        np.testing.assert_allclose(got, decoder.step(decoder.params, cache, token)[0], atol=1e-5)
