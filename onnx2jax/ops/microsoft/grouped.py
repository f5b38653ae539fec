"""The com.microsoft domain, attention whose heads share keys and values kept in a cache."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import KnownValueError
from ..arrays import check_shapes, dims, is_traced, wide
from ..attention import attend, check_paired, heads_of, merged, rotary_embedding, window
from ..registry import MayBeEmpty, StaticIfKnown, op
from .fused import MICROSOFT, simplified_layer_normalization


def extents_of(total, past_key):
    """How many keys queries may see, and for how many the cache has room."""
    if not is_traced(total):
        return total, total if past_key is None else max(total, past_key.shape[2])
    if past_key is None:
        raise KnownValueError(
            "total_sequence_length is traced, and without past_key nothing else says how long the cache is: give a "
            "past_key of its full length (zeros at first)"
        )
    return past_key.shape[2], past_key.shape[2]


def appended(past, new, starts, length):
    """The cache [batch, heads, length, size] with each sequence's new entries written at its own start."""
    cache = jnp.zeros((*new.shape[:2], length, new.shape[3]), new.dtype)
    if past is not None:
        cache = lax.dynamic_update_slice(cache, jnp.asarray(past), (0, 0, 0, 0))
    return jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=1))(cache, new, starts)


_CACHE = (
    "a sequence longer than its cache gives NaN; where the caller traces total_sequence_length, past_key is a "
    "buffer of full length; a quantized cache and a sliding one are refused: use a floating one of full length; so is "
    "query_seqlens: give each sequence a call of its own length"
)


@op("GroupQueryAttention", domain=MICROSOFT, product=True, limits=_CACHE)
def group_query_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, past_key: MayBeEmpty, past_value: MayBeEmpty, seqlens_k,
    total_sequence_length: StaticIfKnown, cos_cache=None, sin_cache=None, position_ids=None, attention_bias=None,
    head_sink=None, k_scale=None, v_scale=None, q_norm_weight=None, k_norm_weight=None, query_seqlens=None,
    *, causal=1, do_rotary=0, k_norm_epsilon=None, k_quant_type: Literal["NONE"] = "NONE",
    kv_cache_bit_width: Literal[0] = 0, kv_num_heads, local_window_size=-1, num_heads, q_norm_epsilon=None,
    qk_norm_epsilon=1e-6, qk_output=0, rotary_interleaved=0, scale=None,
    sliding_window_cache: Literal[0] = 0, smooth_softmax=-1, softcap=0.0, v_quant_type: Literal["NONE"] = "NONE",
    n_outputs=1,
):  # fmt: skip
    """Attention with a growing cache in which several query heads share one head of keys and values.

    Sequence b has ``seqlens_k[b] + 1`` tokens, the new ones last (but first in a prompt, which may be padded
    behind); the cache holds ``total_sequence_length`` tokens, or as many as the past brought if those are more. A
    total that is traced says nothing about shapes: then the past is a buffer as long as the cache will ever be.
    """
    del k_quant_type, v_quant_type, kv_cache_bit_width, sliding_window_cache, k_scale, v_scale  # of quantized caches
    if query_seqlens is not None:
        raise NotImplementedError(f"query_seqlens is given: {_CACHE}")
    query = jnp.asarray(query)
    if key is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        query, key, value = jnp.split(query, [num_heads * size, (num_heads + kv_num_heads) * size], axis=-1)
    q, k, v = heads_of(query, num_heads, "query"), *(heads_of(x, kv_num_heads, "key, value") for x in (key, value))
    total = total_sequence_length
    total = total.reshape(()) if is_traced(total) else dims(total)[0]
    keys, length = extents_of(total, past_key)
    check_paired(past_key=past_key, past_value=past_value)
    check_paired(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    fresh, kept = "batch heads new size", "batch heads past size"
    check_shapes(
        {"total": keys}, query=(q, "batch q_heads new size"), key=(k, fresh), value=(v, fresh),
        past_key=(past_key, kept), past_value=(past_value, kept), seqlens_k=(seqlens_k.reshape(-1), "batch"),
        position_ids=(position_ids, "batch new"), head_sink=(head_sink, "q_heads"),
        attention_bias=(attention_bias, "batch? q_heads? new total"),
        q_norm_weight=(q_norm_weight, "size"), k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    if q_norm_weight is not None:
        pairs = ((q, q_norm_weight, q_norm_epsilon), (k, k_norm_weight, k_norm_epsilon))
        q, k = (
            simplified_layer_normalization(x, w, epsilon=qk_norm_epsilon if epsilon is None else epsilon)[0]
            for x, w, epsilon in pairs
        )
    new, ends = q.shape[2], jnp.asarray(seqlens_k).reshape(-1).astype(np.int32) + 1
    starts = jnp.maximum(ends - new, 0)
    if do_rotary:
        positions = 1 if is_traced(total) else total
        if cos_cache is None or sin_cache is None or cos_cache.shape[0] < positions:
            raise ValueError(f"do_rotary=1 needs cos_cache and sin_cache with {positions} positions or more")
        at = starts[:, None] + jnp.arange(new, dtype=np.int32)
        if position_ids is not None:  # a first prompt takes its first position only
            first = position_ids.reshape(-1)[0].astype(np.int32) + at
            at = jnp.where(total == new, first, position_ids.astype(np.int32))
        turn = {"interleaved": rotary_interleaved, "rotary_embedding_dim": 2 * cos_cache.shape[-1]}
        q, k = (rotary_embedding(x, cos_cache, sin_cache, at, **turn) for x in (q, k))
    present_key, present_value = (appended(p, x, starts, length) for p, x in ((past_key, k), (past_value, v)))
    starts, ends = starts.reshape(-1, 1, 1, 1), ends.reshape(-1, 1, 1, 1)
    masks = window(new, keys, starts, max(local_window_size - 1, -1), 0 if causal else -1)
    masks += [] if causal else [lax.iota(np.int32, keys) < ends]
    sink = jnp.zeros((1, 1, 1, 1), np.float32) if smooth_softmax == 1 else None
    sink = sink if head_sink is None else wide(head_sink).reshape(1, -1, 1, 1)
    y, (*_, scores, weights) = attend(
        q, present_key[:, :, :keys], present_value[:, :, :keys], scale=scale or None, softcap=softcap,
        biases=[attention_bias], masks=masks, sink=sink,
    )  # fmt: skip
    if n_outputs > 3 and qk_output not in (1, 2):
        raise ValueError(f"the output output_qk needs qk_output 1 (before softmax) or 2 (after), not {qk_output}")
    scores = weights if qk_output == 2 else jnp.where(jnp.isneginf(scores), 0, scores)
    y = jnp.where((ends <= keys) & (total <= keys), y, np.nan)  # beyond the cache it would be some number
    return merged(y), present_key, present_value, scores.astype(q.dtype)
