"""Random numbers. A `seed` attribute gives a stream of its own; without one the caller's key decides."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..proto.dtypes import to_dtype
from .arrays import argmax
from .registry import Shaped, op

_FLOATS = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


def _key(seed, rng):
    """The key of a float seed is its bits, so distinct seeds give distinct streams."""
    return rng if seed is None else jax.random.key(np.float32(seed).view(np.uint32))


def _wide(x):
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def _floating(dtype):
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype ({dtype}) must be a floating type, one of {_FLOATS}: give the attribute dtype")
    return dtype


def _normal(key, shape, dtype, mean, scale):
    return jax.random.normal(key, shape, _floating(dtype)) * scale + mean


def _uniform(key, shape, dtype, low, high):
    return jax.random.uniform(key, shape, _floating(dtype), low, high)


@op("RandomNormal")
def random_normal(*, shape, dtype=1, mean=0.0, scale=1.0, seed=None, rng):
    """Draws from a normal distribution."""
    return _normal(_key(seed, rng), shape, to_dtype(dtype), mean, scale)


@op("RandomNormalLike")
def random_normal_like(input: Shaped, *, dtype=None, mean=0.0, scale=1.0, seed=None, rng):
    """Draws from a normal distribution, in the shape of `input`."""
    return _normal(_key(seed, rng), input.shape, input.dtype if dtype is None else to_dtype(dtype), mean, scale)


@op("RandomUniform")
def random_uniform(*, shape, dtype=1, high=1.0, low=0.0, seed=None, rng):
    """Draws evenly from [low, high)."""
    return _uniform(_key(seed, rng), shape, to_dtype(dtype), low, high)


@op("RandomUniformLike")
def random_uniform_like(input: Shaped, *, dtype=None, high=1.0, low=0.0, seed=None, rng):
    """Draws evenly from [low, high), in the shape of `input`."""
    return _uniform(_key(seed, rng), input.shape, input.dtype if dtype is None else to_dtype(dtype), low, high)


@op("Bernoulli", since=15)
def bernoulli(input, *, dtype=None, seed=None, rng):
    """1 with the probability that `input` gives, else 0."""
    p = _wide(input)
    drawn = jax.random.uniform(_key(seed, rng), p.shape, p.dtype) < p
    return drawn.astype(input.dtype if dtype is None else to_dtype(dtype))


@op("Multinomial", since=7)
def multinomial(input, *, dtype=6, sample_size=1, seed=None, rng):
    """Classes drawn by their unnormalised log-probabilities [batch, classes] -> [batch, samples]."""
    if dtype not in (6, 7):
        raise ValueError(f"dtype ({dtype}) must be 6 (int32) or 7 (int64)")
    if input.ndim != 2:
        raise ValueError(f"input must be [batch, classes] (rank {input.ndim})")
    scores = _wide(input)[:, None]
    # The greatest of log-probability plus Gumbel noise is a draw from the distribution.
    noise = jax.random.gumbel(_key(seed, rng), (input.shape[0], sample_size, input.shape[1]), scores.dtype)
    drawn = argmax(scores + noise, 2)
    return drawn.astype(to_dtype(dtype))
