"""The com.microsoft domain: caches in blocks, and attention that leaves out blocks or what is far."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import check_shape, check_shapes, dims, is_traced, wide
from ..attention import attend, check_paired, heads_of, merged, rotary_embedding, window
from ..registry import MayBeEmpty, StaticIfKnown, op
from .attention import projected
from .fused import MICROSOFT, simplified_layer_normalization
from .grouped import group_query_attention

_PLAIN = "quantized caches, and those of latent attention, are refused: use floating ones, of keys and of values"


@op("PagedAttention", domain=MICROSOFT, product=True, limits=_PLAIN)
def paged_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, key_cache, value_cache: MayBeEmpty, cumulative_sequence_length,
    past_seqlens, block_table, cos_cache=None, sin_cache=None, slot_mapping=None, head_sink=None, q_norm_weight=None,
    k_norm_weight=None, k_scale=None, v_scale=None, attention_metadata=None, *, do_rotary=0, is_causal=1,
    k_cache_dtype: Literal[""] = "", k_quant_type: Literal["NONE"] = "NONE",
    kv_cache_layout: Literal["SEPARATE"] = "SEPARATE", kv_num_heads, local_window_size=-1, num_heads,
    qk_norm_epsilon=1e-6, rotary_interleaved=0, rotary_offset=0, scale=None, softcap=0.0,
    v_cache_dtype: Literal[""] = "", v_head_size: Literal[0] = 0, v_quant_type: Literal["NONE"] = "NONE",
):  # fmt: skip
    """Attention of tokens without padding on caches [blocks, block size, heads, size], which take the new ones up.

    Token i of sequence b has the position ``past_seqlens[b] + i``: the place ``position % block size`` in the block
    ``block_table[b, position // block size]``, unless slot_mapping says where it is written.
    """
    del k_cache_dtype, k_quant_type, kv_cache_layout, v_cache_dtype, v_head_size, v_quant_type
    del attention_metadata  # bounds for launching kernels, which never enter the result
    if k_scale is not None or v_scale is not None or value_cache is None or key_cache.dtype != query.dtype:
        raise NotImplementedError(f"k_scale, v_scale, no value_cache, or another type than query's: {_PLAIN}")
    if key is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        query, key, value = jnp.split(query, [num_heads * size, (num_heads + kv_num_heads) * size], axis=-1)
    q = heads_of(jnp.asarray(query)[None], num_heads, "query")
    k, v = (heads_of(jnp.asarray(x)[None], kv_num_heads, "key, value") for x in (key, value))
    check_paired(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    fresh, cache, batch = "1 kv_heads total size", "blocks block kv_heads size", cumulative_sequence_length.shape[0] - 1
    check_shapes(
        {"batch": batch}, query=(q, "1 heads total size"), key=(k, fresh), value=(v, fresh),
        key_cache=(key_cache, cache), value_cache=(value_cache, cache), past_seqlens=(past_seqlens, "batch"),
        block_table=(block_table, "batch blocks_each"), slot_mapping=(slot_mapping, "total"),
        head_sink=(head_sink, "heads"), q_norm_weight=(q_norm_weight, "size"), k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    if q_norm_weight is not None:
        q = simplified_layer_normalization(q, q_norm_weight, epsilon=qk_norm_epsilon)[0]
        k = simplified_layer_normalization(k, k_norm_weight, epsilon=qk_norm_epsilon)[0]
    tokens, ends = lax.iota(np.int32, q.shape[2]), jnp.asarray(cumulative_sequence_length)[1:]
    sequence = jnp.searchsorted(ends, tokens, side="right")
    shifts = past_seqlens - jnp.asarray(cumulative_sequence_length)[:-1]  # from a token's place to its position
    at = tokens + shifts[sequence]
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise ValueError("do_rotary=1 needs cos_cache and sin_cache")
        q, k = (rotated_from(rotary_offset, x, cos_cache, sin_cache, at[None], rotary_interleaved) for x in (q, k))
    size = key_cache.shape[1]
    slots = jnp.asarray(block_table)[sequence, at // size] * size + at % size if slot_mapping is None else slot_mapping
    slots = jnp.where((slots >= 0) & (sequence < batch), slots, key_cache.shape[0] * size)  # which is none

    def written(cache, new):
        flat = jnp.asarray(cache).reshape(-1, *cache.shape[2:])
        return flat.at[slots].set(new[0].transpose(1, 0, 2), mode="drop").reshape(cache.shape)

    key_cache, value_cache = written(key_cache, k), written(value_cache, v)

    def attention(sequence):
        blocks, shift, total = sequence
        k, v = (c[blocks].reshape(1, -1, *c.shape[2:]).transpose(0, 2, 1, 3) for c in (key_cache, value_cache))
        used = lax.iota(np.int32, k.shape[2]) < total
        masks = [*window(q.shape[2], k.shape[2], shift, max(local_window_size - 1, -1), 0 if is_causal else -1), used]
        v = jnp.where(used[:, None], v, 0)
        sink = None if head_sink is None else wide(head_sink).reshape(1, -1, 1, 1)
        return merged(attend(q, k, v, scale=scale or None, softcap=softcap, masks=masks, sink=sink)[0])[0]

    each = lax.map(attention, (jnp.asarray(block_table), shifts, shifts + ends))
    return each[sequence, tokens], key_cache, value_cache


def rotated_from(first, x, cos_cache, sin_cache, at, interleaved):
    """Features of [batch, heads, tokens, size] from ``first`` on turned by the angles at [batch, tokens]."""
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": 2 * cos_cache.shape[-1]}
    turned = rotary_embedding(x[..., first:], cos_cache, sin_cache, at, **attributes)
    return jnp.concatenate([x[..., :first], turned], axis=-1)


@op("SparseAttention", domain=MICROSOFT, product=True, limits="a sequence longer than its cache gives NaN")
def sparse_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, past_key, past_value, block_row_indices, block_col_indices,
    total_sequence_length: StaticIfKnown, key_total_sequence_lengths, cos_cache=None, sin_cache=None,
    *, do_rotary=0, kv_num_heads, num_heads, rotary_interleaved=0, scale=None,
    sparse_block_size: Literal[16, 32, 64, 128],
):  # fmt: skip
    """GroupQueryAttention that leaves out the blocks of keys whose layout does not have them; heads take turns at it.

    The layouts are lists of blocks: those of row r are ``block_col_indices[l, rows[r]:rows[r + 1]]``.
    """
    check_paired(key=key, value=value)
    check_shapes({}, query=(query, "batch tokens size"), past_key=(past_key, "batch heads room size_each"))
    total, (batch, new, _) = total_sequence_length, query.shape
    keys = past_key.shape[2] if is_traced(total) else dims(total)[0]
    check_shape("key_total_sequence_lengths", key_total_sequence_lengths, batch)
    check_shape("block_row_indices", block_row_indices, "layouts", "max_blocks + 1")
    check_shape("block_col_indices", block_col_indices, block_row_indices.shape[0], "max_nnz_blocks")
    (layouts, rows), entries = block_row_indices.shape, np.arange(block_col_indices.shape[1], dtype=np.int32)
    if num_heads % layouts or (rows - 1) * sparse_block_size < keys:
        blocks = f"{layouts} layouts of {rows - 1} blocks of {sparse_block_size}"
        raise ValueError(f"{blocks} must divide {num_heads} heads and cover {keys} tokens")
    row = (entries >= jnp.asarray(block_row_indices)[:, 1:, None]).sum(
        1, dtype=np.int32
    )  # beyond the last one for what pads
    live = jnp.zeros((layouts, rows - 1, rows - 1), bool)
    live = live.at[np.arange(layouts, dtype=np.int32)[:, None], row, block_col_indices].set(True, mode="drop")
    at = jnp.maximum(key_total_sequence_lengths[:, None] - new, 0) + np.arange(new, dtype=np.int32)
    live = live[np.arange(num_heads) % layouts][:, at // sparse_block_size][..., np.arange(keys) // sparse_block_size]
    bias = jnp.where(jnp.moveaxis(live, 0, 1), 0, np.finfo(np.float32).min)
    return group_query_attention(
        query, key, value, past_key, past_value, key_total_sequence_lengths - 1, total_sequence_length, cos_cache,
        sin_cache, None, bias, do_rotary=do_rotary, kv_num_heads=kv_num_heads, num_heads=num_heads,
        rotary_interleaved=rotary_interleaved, scale=scale,
    )[:3]  # fmt: skip


@op("LongformerAttention", domain=MICROSOFT, product=True, limits="a masked token gives zeros")
def longformer_attention(input, weight, bias, mask, global_weight, global_bias, global_, *, num_heads, window):
    """Attention of each token on its neighbours within a window and on global tokens, and of these on all tokens.

    What global tokens ask, and what they find then, has projections of its own; the mask is added to the scores.
    """
    shape = "batch tokens"
    check_shapes({}, input=(input, f"{shape} features"), mask=(mask, shape), **{"global": (global_, shape)})
    chosen = global_ > 0
    near = lax.iota(np.int32, input.shape[1])
    near = abs(near - near[:, None]) <= window

    def attention(weight, bias, masks):
        q, k, v = (heads_of(x, num_heads, "hidden_size") for x in projected(input, weight, bias))
        return attend(q, k, v, biases=[mask[:, None, None]], masks=masks)[0]

    local = attention(weight, bias, [near | chosen[:, None, None]])
    everywhere = attention(global_weight, global_bias, [])
    y = merged(jnp.where(chosen[:, None, :, None], everywhere, local))
    return jnp.where(mask[..., None] < 0, 0, y).astype(input.dtype)
