"""Random numbers, drawn with the key of a `seed` attribute or else with the caller's PRNG key."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..proto.types import to_dtype
from .arrays import accumulator, argmax, check_shape, widen
from .registry import Shaped, op

GENERATOR = "JAX's generator: ONNX specifies none, not even for a given seed"


def _key(seed, rng):
    """The PRNG key of a node: from the bits of its float seed (distinct seeds, distinct keys), or the caller's."""
    return rng if seed is None else jax.random.key(np.float32(seed).view(np.uint32))


# Half precision is drawn in float32: bfloat16 would yield only 128 values, with a mean too low.


def _floating(dtype, like):
    """The dtype to draw: the attribute's, or that of ``like``."""
    dtype = like.dtype if dtype is None else to_dtype(dtype, "dtype")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype ({dtype}) must be floating: set the attribute dtype to 1, 10, 11 or 16")
    return dtype


@op("RandomNormalLike", limits=GENERATOR)
def random_normal_like(input: Shaped, *, dtype=None, mean=0.0, scale=1.0, seed=None, rng):
    """Draws from a normal distribution in the shape of `input`."""
    dtype = _floating(dtype, input)
    return (jax.random.normal(_key(seed, rng), input.shape, accumulator(dtype)) * scale + mean).astype(dtype)


@op("RandomNormal", limits=GENERATOR)
def random_normal(*, shape, dtype=1, mean=0.0, scale=1.0, seed=None, rng):
    """Draws from a normal distribution."""
    like = jax.ShapeDtypeStruct(shape, np.float32)
    return random_normal_like(like, dtype=dtype, mean=mean, scale=scale, seed=seed, rng=rng)


@op("RandomUniformLike", limits=GENERATOR)
def random_uniform_like(input: Shaped, *, dtype=None, high=1.0, low=0.0, seed=None, rng):
    """Draws uniformly from [low, high) in the shape of `input`."""
    dtype = _floating(dtype, input)
    drawn = jax.random.uniform(_key(seed, rng), input.shape, accumulator(dtype), low, high).astype(dtype)
    return jnp.minimum(drawn, np.nextafter(dtype.type(high), dtype.type(low)))  # rounding may reach high


@op("RandomUniform", limits=GENERATOR)
def random_uniform(*, shape, dtype=1, high=1.0, low=0.0, seed=None, rng):
    """Draws uniformly from [low, high)."""
    like = jax.ShapeDtypeStruct(shape, np.float32)
    return random_uniform_like(like, dtype=dtype, high=high, low=low, seed=seed, rng=rng)


@op("Bernoulli", since=15, limits=GENERATOR)
def bernoulli(input, *, dtype=None, seed=None, rng):
    """1 with the probabilities `input`, else 0."""
    p = widen(input)
    drawn = jax.random.uniform(_key(seed, rng), p.shape, p.dtype) < p
    return drawn.astype(input.dtype if dtype is None else to_dtype(dtype, "dtype"))


@op("Multinomial", since=7, limits=GENERATOR)
def multinomial(input, *, dtype: Literal[6, 7] = 6, sample_size=1, seed=None, rng):
    """Samples classes by their unnormalised log-probabilities: [batch, classes] -> [batch, samples]."""
    check_shape("input", input, "batch", "classes")
    scores = widen(input)[:, None]
    # Gumbel-max trick: the argmax of log-probability plus Gumbel noise is a sample.
    noise = jax.random.gumbel(_key(seed, rng), (input.shape[0], sample_size, input.shape[1]), scores.dtype)
    return argmax(scores + noise, 2).astype(to_dtype(dtype, "dtype"))
