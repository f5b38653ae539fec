"""Normalization and dropout."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..proto.types import to_dtype
from .arrays import accumulator, axes_of, axis_of, widen, xp
from .registry import Static, deprecated, op


def wide_dtype(*values):
    """The dtype to compute in: the widest operand's, at least float32."""
    dtype = np.dtype(np.float32)
    for value in values:
        dtype = np.promote_types(dtype, np.float32 if value.dtype.itemsize < 4 else value.dtype)
    return dtype


def _per_channel(vector, x):
    if x.ndim < 2:
        return vector
    channels = x.shape[1] if isinstance(x.shape[1], int) else -1
    return vector.reshape(1, channels, *(1,) * (x.ndim - 2))


def standardize(x, axes, epsilon, center=True):
    """(normalized, mean, 1 / standard deviation) with reduced axes kept; ``center=False`` keeps the mean in."""
    mean = x.mean(axis=axes, keepdims=True) if center else None
    x = x - mean if center else x
    inverse = 1 / xp.sqrt((x * x).mean(axis=axes, keepdims=True) + epsilon)
    return x * inverse, mean, inverse


def _batch_normalization(X, scale, B, mean, var, epsilon, momentum, training, spatial=True):
    """(Y, running mean, running variance, batch mean, batch variance); the last four only when training."""
    x, dtypes = X.astype(wide_dtype(X, scale, mean)), (mean.dtype, var.dtype)
    scale, B, mean, var = (v.astype(x.dtype) for v in (scale, B, mean, var))
    shape = (lambda v: _per_channel(v, X)) if spatial or mean.ndim == 1 else (lambda v: v[None])
    now, spread = shape(mean), shape(var)
    if training:
        axes = tuple(i for i in range(X.ndim) if i != 1 or X.ndim == 1) if spatial else (0,)
        now = x.mean(axis=axes, keepdims=True)
        spread = ((x - now) ** 2).mean(axis=axes, keepdims=True)
    y = ((x - now) * (shape(scale) / xp.sqrt(spread + epsilon)) + shape(B)).astype(X.dtype)
    if not training:
        return y
    now, spread = now.reshape(mean.shape), spread.reshape(var.shape)
    running = (old * momentum + new * (1 - momentum) for old, new in ((mean, now), (var, spread)))
    return y, *(v.astype(dtype) for v, dtype in zip((*running, now, spread), dtypes * 2, strict=True))


@op("BatchNormalization", since=7, limits="before opset 14, more than one output means training mode")
def batch_normalization_7(X, scale, B, mean, var, *, epsilon=1e-5, momentum=0.9, spatial=1, n_outputs=1):
    """BatchNormalization of opsets 7 to 13: more than one output means training."""
    return _batch_normalization(X, scale, B, mean, var, epsilon, momentum, n_outputs > 1, bool(spatial))


@op("BatchNormalization", since=1)
def batch_normalization_1(X, scale, B, mean, var, *, epsilon=1e-5, is_test=0, momentum=0.9, spatial=1, n_outputs=1):
    """BatchNormalization of opsets 1 to 6: is_test must not contradict the number of outputs."""
    if is_test and n_outputs > 1:
        raise ValueError(
            f"is_test={is_test} has one output, not {n_outputs}: set is_test=0 or remove the other outputs"
        )
    return _batch_normalization(X, scale, B, mean, var, epsilon, momentum, n_outputs > 1, bool(spatial))


@op("BatchNormalization", since=14)
def batch_normalization(
    X, scale, B, input_mean, input_var, *, epsilon=1e-5, momentum=0.9, training_mode=0, n_outputs=1
):
    if n_outputs > 1 and not training_mode:
        raise ValueError(f"training_mode=0 has one output, not {n_outputs}: set training_mode=1 to get the statistics")
    y = _batch_normalization(X, scale, B, input_mean, input_var, epsilon, momentum, bool(training_mode))
    return y[:3] if training_mode else y


@op("InstanceNormalization", unsharded=True, half="float32", wide=True)
def instance_normalization(input, scale, B, *, epsilon=1e-5):
    y, _, _ = standardize(input, tuple(range(2, input.ndim)), epsilon)
    return y * _per_channel(scale, input) + _per_channel(B, input)


def _from_axis(x, axis):
    return tuple(range(axis_of(axis, x.ndim), x.ndim))


def _stash(x, stash_type):
    """``x`` rounded to the stash type; types narrower than float32 are still summed in float32."""
    return widen(x.astype(to_dtype(stash_type, "stash_type")))


@op("LayerNormalization", unsharded=True, wide=True, limits="below opset 17 as in onnxruntime")
def layer_normalization(X, Scale, B=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """LayerNormalization; statistics are computed in ``stash_type``, scale and bias applied in the dtype of X."""
    normalized, mean, inverse = standardize(_stash(X, stash_type), _from_axis(X, axis), epsilon)
    y = normalized.astype(X.dtype) * Scale
    y, stash = y if B is None else y + B, to_dtype(stash_type, "stash_type")
    return y.astype(X.dtype), mean.astype(stash), inverse.astype(stash)


@op("RMSNormalization", since=23, wide=True)
def rms_normalization(X, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    y, _, _ = standardize(_stash(X, stash_type), _from_axis(X, axis), epsilon, center=False)
    return y.astype(scale.dtype) * scale


_PER_CHANNEL = "GroupNormalization of opset 21, whose scale and bias are per channel"
deprecated("GroupNormalization", since=18, instead=_PER_CHANNEL)


@op("GroupNormalization", since=21, wide=True)
def group_normalization(X, scale, bias, *, epsilon=1e-5, num_groups, stash_type=1):
    if X.shape[1] % num_groups:
        raise ValueError(f"num_groups ({num_groups}) does not divide the {X.shape[1]} channels of X {X.shape}")
    size = X.shape[1] // num_groups * math.prod(X.shape[2:])
    x = _stash(X, stash_type).reshape(X.shape[0], num_groups, size)
    y = standardize(x, (2,), epsilon)[0].reshape(X.shape).astype(X.dtype)
    return y * _per_channel(scale, X) + _per_channel(bias, X)


@op("MeanVarianceNormalization", since=9, half="float32", wide=True)
def mean_variance_normalization(X, *, axes=(0, 2, 3)):
    """(X - mean) / (standard deviation + 1e-9); the epsilon is that of ONNX's function body."""
    axes = axes_of(axes, X.ndim)
    centred = X - X.mean(axis=axes, keepdims=True)
    return centred / (root((centred * centred).mean(axis=axes, keepdims=True)) + 1e-9)


@op("MeanVarianceNormalization", half="float32", limits="below opset 9 as in onnxruntime")
def mean_variance_normalization_1(X, *, across_channels=0, normalize_variance=1):
    """MeanVarianceNormalization of onnxruntime: over all axes, or all but the channels."""
    axes = tuple(i for i in range(X.ndim) if across_channels or i != 1)
    return mean_variance_normalization(X, axes=axes) if normalize_variance else X - X.mean(axis=axes, keepdims=True)


def root(x, p=2):
    """The p-th root of ``x``; its gradient at zero is zero."""
    safe = xp.where(x != 0, x, 1)  # NaN stays NaN
    return xp.where(x != 0, xp.sqrt(safe) if p == 2 else safe ** (1 / p), 0)


@op("LpNormalization", unsharded=True, half="float32", wide=True)
def lp_normalization(input, *, axis=-1, p: Literal[1, 2] = 2):
    """x / ||x||, and zero where the norm is zero."""
    axis = axis_of(axis, input.ndim)
    norm = abs(input).sum(axis, keepdims=True) if p == 1 else root((input * input).sum(axis, keepdims=True))
    return input / xp.where(norm == 0, 1, norm)


@op("LRN", half="float32", wide=True)
def lrn(X, *, alpha=1e-4, beta=0.75, bias=1.0, size):
    if size < 1:
        raise ValueError(f"size ({size}) must be positive")
    x, rest = jnp.asarray(X), X.ndim - 2
    most = max(X.shape[1] - 1, 0) if isinstance(X.shape[1], int) else size  # channels on one side
    around = min((size - 1) // 2, most), min(size // 2, most)
    pads, window = [(0, 0), around, *[(0, 0)] * rest], [1, sum(around) + 1, *[1] * rest]
    squares = lax.reduce_window(x * x, np.zeros((), x.dtype), lax.add, window, [1] * x.ndim, pads)
    return x / (bias + alpha / size * squares) ** beta


def _dropout(data, ratio, key, mask_dtype=np.bool_):
    """(output, mask): kept elements are scaled by 1 / (1 - ratio); without a key all elements are kept."""
    if key is None:
        return data, xp.ones_like(data, mask_dtype)
    keep = jax.random.uniform(key, data.shape, jnp.float32) >= jnp.asarray(ratio, jnp.float32)
    work = accumulator(data.dtype)
    scaled = jnp.asarray(data, work) / (1 - jnp.asarray(ratio).astype(work))
    return jnp.where(keep, scaled, 0).astype(data.dtype), keep.astype(mask_dtype)


@op("Dropout", since=1, limits="training draws from the caller's PRNG key, or from the key of `seed`")
def dropout_1(data, *, is_test=0, ratio=0.5, rng):
    return _dropout(data, ratio, None if is_test else rng, data.dtype)


@op("Dropout", since=7)
def dropout_7(data, *, ratio=0.5, opset):
    """Dropout of opsets 7 to 11, inference only: the identity. The mask is boolean since opset 10."""
    return _dropout(data, ratio, None, np.bool_ if opset >= 10 else data.dtype)


@op("Dropout", since=12)
def dropout(data, ratio=None, training_mode: Static = None, *, seed=None, rng):
    """Dropout; ``seed`` fixes the key, otherwise every call draws from the caller's PRNG key."""
    if training_mode is None or not training_mode.item():
        return _dropout(data, 0.0, None)
    # 32 bits of the seed: the caller's configuration may lack int64.
    key = rng if seed is None else jax.random.key(np.uint32(seed % 2**32))
    return _dropout(data, np.float32(0.5) if ratio is None else ratio, key)
