"""Random numbers. A `seed` attribute gives a stream of its own; without one the caller's key decides."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..proto.dtypes import to_dtype
from .arrays import accumulator, argmax, check_shape, wide
from .registry import Shaped, op

GENERATOR = "the stream is JAX's: ONNX fixes no generator, not even for a given seed"


def _key(seed, rng):
    """The key of a float seed is its bits, so distinct seeds give distinct streams."""
    return rng if seed is None else jax.random.key(np.float32(seed).view(np.uint32))


# Half precision is drawn in float32: in bfloat16 itself there would be 128 values, their mean below the middle.


def _floating(dtype, like):
    """The element type drawn: what the attribute says, or that of an array."""
    dtype = like.dtype if dtype is None else to_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype ({dtype}) must be a floating type, one of 1, 10, 11, 16: give the attribute dtype")
    return dtype


@op("RandomNormalLike", limits=GENERATOR)
def random_normal_like(input: Shaped, *, dtype=None, mean=0.0, scale=1.0, seed=None, rng):
    """Draws from a normal distribution, in the shape of `input`."""
    dtype = _floating(dtype, input)
    return (jax.random.normal(_key(seed, rng), input.shape, accumulator(dtype)) * scale + mean).astype(dtype)


@op("RandomNormal", limits=GENERATOR)
def random_normal(*, shape, dtype=1, mean=0.0, scale=1.0, seed=None, rng):
    """Draws from a normal distribution."""
    like = jax.ShapeDtypeStruct(shape, np.float32)
    return random_normal_like(like, dtype=dtype, mean=mean, scale=scale, seed=seed, rng=rng)


@op("RandomUniformLike", limits=GENERATOR)
def random_uniform_like(input: Shaped, *, dtype=None, high=1.0, low=0.0, seed=None, rng):
    """Draws evenly from [low, high), in the shape of `input`."""
    dtype = _floating(dtype, input)
    drawn = jax.random.uniform(_key(seed, rng), input.shape, accumulator(dtype), low, high).astype(dtype)
    return jnp.minimum(drawn, np.nextafter(dtype.type(high), dtype.type(low)))  # rounding may have reached high


@op("RandomUniform", limits=GENERATOR)
def random_uniform(*, shape, dtype=1, high=1.0, low=0.0, seed=None, rng):
    """Draws evenly from [low, high)."""
    like = jax.ShapeDtypeStruct(shape, np.float32)
    return random_uniform_like(like, dtype=dtype, high=high, low=low, seed=seed, rng=rng)


@op("Bernoulli", since=15, limits=GENERATOR)
def bernoulli(input, *, dtype=None, seed=None, rng):
    """1 with the probability that `input` gives, else 0."""
    p = wide(input)
    drawn = jax.random.uniform(_key(seed, rng), p.shape, p.dtype) < p
    return drawn.astype(input.dtype if dtype is None else to_dtype(dtype))


@op("Multinomial", since=7, limits=GENERATOR)
def multinomial(input, *, dtype: Literal[6, 7] = 6, sample_size=1, seed=None, rng):
    """Classes drawn by their unnormalised log-probabilities [batch, classes] -> [batch, samples]."""
    check_shape("input", input, "batch", "classes")
    scores = wide(input)[:, None]
    # The greatest of log-probability plus Gumbel noise is a draw from the distribution.
    noise = jax.random.gumbel(_key(seed, rng), (input.shape[0], sample_size, input.shape[1]), scores.dtype)
    return argmax(scores + noise, 2).astype(to_dtype(dtype))
