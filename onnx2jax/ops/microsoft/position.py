"""The com.microsoft domain: rotary embeddings and position biases of attention."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import check_shape, check_shapes, dims, xp
from ..attention import heads_of, rotary_embedding
from ..indexing import BOUNDS, gather
from ..registry import Static, taking
from . import microsoft
from .attention import restore_padding

_SCALE = "a scale other than 1 is unsupported: onnxruntime documents it but does not implement it"
_ROTARY = {"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0}


@microsoft("RotaryEmbedding", limits=f"{_SCALE}; {BOUNDS}")
@taking(**_ROTARY)
def ms_rotary_embedding(
    input, position_ids, cos_cache, sin_cache, *, is_packed_batching: Literal[0, 1] = 0,
    scale: Literal[1] = 1.0, **rotary,  # type: ignore[assignment]
):  # fmt: skip
    """RotaryEmbedding at given positions, or from one position on; is_packed_batching makes no difference."""
    del is_packed_batching, scale
    if rotary["rotary_embedding_dim"] and not rotary["num_heads"] and input.ndim == 3:
        raise ValueError(f"rotary_embedding_dim ({rotary['rotary_embedding_dim']}) requires the attribute num_heads")
    if position_ids.size == 1 and position_ids.ndim == 1:
        position_ids = position_ids + jnp.zeros((input.shape[0], 1), np.int64) + np.arange(input.shape[-2])
    heads = input.shape[2] // (2 * cos_cache.shape[-1]) if input.ndim == 3 else None
    rotary["num_heads"] = rotary["num_heads"] or heads
    return rotary_embedding(input, cos_cache, sin_cache, position_ids, **rotary)


@microsoft("MRotaryEmbedding", limits=f"{_SCALE}; {BOUNDS}")
@taking(**_ROTARY)
def mrotary_embedding(
    input, position_ids, cos_cache, sin_cache, *, is_packed_batching: Literal[0, 1] = 0,
    mrope_layout: Literal[0, 1] = 0, mrope_section, scale: Literal[1] = 1.0, **rotary,  # type: ignore[assignment]
):  # fmt: skip
    """RotaryEmbedding whose angles use positions of three axes: time, height and width."""
    del is_packed_batching, scale
    if len(mrope_section) != 3 or min(mrope_section) < 0:
        raise ValueError(f"mrope_section {tuple(mrope_section)} must be 3 counts of angles: time, height, width")
    section = np.repeat(np.arange(3), mrope_section)
    if mrope_layout == 1:  # interleaved
        section[:] = 0
        for i in (1, 2):
            section[i : 3 * mrope_section[i] : 3] = i
    tables = {"cos_cache": (cos_cache, "positions angles"), "sin_cache": (sin_cache, "positions angles")}
    check_shapes({"3": 3, "angles": section.size}, position_ids=(position_ids, "3 batch tokens"), **tables)
    index = (section, slice(None), slice(None), np.arange(section.size))
    cos, sin = (xp.moveaxis(gather(cache, position_ids)[index], 0, -1) for cache in (cos_cache, sin_cache))
    return rotary_embedding(input, cos, sin, **rotary)


@microsoft("GemmaRotaryEmbedding", limits="all heads share emb, which has no head axis")
def gemma_rotary_embedding(emb, q, q_rot, k, k_rot):
    """``x * cos(emb) + x_rot * sin(emb)`` for queries and for keys."""
    shape, k_shape = "batch heads tokens size", "batch k_heads tokens size"
    check_shapes({}, q=(q, shape), q_rot=(q_rot, shape), k=(k, k_shape), k_rot=(k_rot, k_shape))
    check_shape("emb", emb, q.shape[0], *q.shape[2:])
    cos, sin = (xp.expand_dims(f(emb).astype(q.dtype), 1) for f in (xp.cos, xp.sin))
    return q * cos + q_rot * sin, k * cos + k_rot * sin


@microsoft("RelativePositionBias")
def relative_position_bias(
    bias_table, query_length: Static, key_length: Static, *, is_bidirectional: Literal[0, 1] = 0, max_distance
):
    """T5's bias [1, heads, queries, keys]: buckets of the query-key distance, exact if near and logarithmic if far.

    The table is declared [buckets, heads] but stored column-major: the biases of one head are contiguous.
    """
    (tokens,), (keys,) = dims(query_length), dims(key_length)
    if tokens != keys:
        raise ValueError(f"query_length ({tokens}) and key_length ({keys}) must be equal (self-attention)")
    buckets, heads = bias_table.shape
    side = buckets // 2 if is_bidirectional else buckets
    exact = side // 2
    if not 0 < exact < max_distance:
        raise ValueError(f"max_distance ({max_distance}) must exceed {exact}, the number of exact buckets")
    distance = np.arange(tokens) - np.arange(tokens)[:, None]
    after = np.where(distance > 0, side, 0) if is_bidirectional else 0
    distance = abs(distance) if is_bidirectional else np.maximum(-distance, 0)
    log = np.log(np.maximum(distance, exact).astype(np.float32) / exact) / np.log(np.float32(max_distance / exact))
    far = np.minimum(exact + (log * (side - exact)).astype(np.int64), side - 1)
    return bias_table.reshape(heads, buckets)[:, after + np.where(distance < exact, distance, far)][None]


@microsoft("GatedRelativePositionBias", half="float32", product=True)
def gated_relative_position_bias(
    query_layer, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads
):
    """WavLM's bias [batch, heads, queries, keys]: ``rel_pos`` times a gate per query. Removed padding is 0."""
    x = query_layer if token_offset is None else restore_padding(query_layer, token_offset)
    check_shapes({}, query_layer=(x, "batch tokens hidden"), query_bias=(query_bias, "hidden"))
    q = heads_of(x + query_bias, num_heads, "query_layer")
    tables = {"rel_pos": (rel_pos, "1 heads tokens tokens"), "eco_a": (eco_a, "1 heads 1 1")}
    extents = {"heads": num_heads, "1": 1, "tokens": x.shape[1], "size": q.shape[3]}
    check_shapes(extents, weight=(weight, "size gates"), bias=(bias, "gates"), **tables)
    gates = (q @ weight + bias).reshape(*q.shape[:3], 2, -1).sum(-1)
    update, reset = jnp.split(lax.logistic(jnp.asarray(gates)), 2, axis=-1)
    return (update * (reset * eco_a - 1) + 2) * rel_pos
