"""The com.microsoft domain: paged KV caches, block-sparse and windowed attention."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import check_shape, check_shapes, dims, is_traced
from ..attention import attend, check_paired, heads_of, merged, rotary_embedding, window
from ..registry import MayBeEmpty, StaticIfKnown, op
from . import MICROSOFT
from .attention import projected
from .grouped import group_query_attention, normalized, sink_of, split_heads

_CACHES = "quantized KV caches and those of latent attention are unsupported: use floating-point keys and values"


@op("PagedAttention", domain=MICROSOFT, product=True, limits=_CACHES)
def paged_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, key_cache, value_cache: MayBeEmpty, cumulative_sequence_length,
    past_seqlens, block_table, cos_cache=None, sin_cache=None, slot_mapping=None, head_sink=None, q_norm_weight=None,
    k_norm_weight=None, k_scale=None, v_scale=None, attention_metadata=None, *, do_rotary=0, is_causal=1,
    k_cache_dtype: Literal[""] = "", k_quant_type: Literal["NONE"] = "NONE",
    kv_cache_layout: Literal["SEPARATE"] = "SEPARATE", kv_num_heads, local_window_size=-1, num_heads,
    qk_norm_epsilon=1e-6, rotary_interleaved=0, rotary_offset=0, scale=None, softcap=0.0,
    v_cache_dtype: Literal[""] = "", v_head_size: Literal[0] = 0, v_quant_type: Literal["NONE"] = "NONE",
):  # fmt: skip
    """(output, key cache, value cache) of attention without padding over caches [blocks, block, heads, size].

    Token i of sequence b has the position ``past_seqlens[b] + i``: offset ``position % block`` in the block
    ``block_table[b, position // block]``, unless slot_mapping determines where it is written.
    """
    del k_cache_dtype, k_quant_type, kv_cache_layout, v_cache_dtype, v_head_size, v_quant_type
    del attention_metadata  # launch bounds of CUDA kernels, which do not affect the result
    if k_scale is not None or v_scale is not None or value_cache is None or key_cache.dtype != query.dtype:
        raise NotImplementedError(f"k_scale, v_scale, a missing value_cache, or a dtype other than query's: {_CACHES}")
    query, key, value = (None if x is None else jnp.asarray(x)[None] for x in (query, key, value))
    q, k, v = split_heads(query, key, value, num_heads, kv_num_heads)
    check_paired(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    new_shape, cache, batch = "1 kv_heads total size", "blocks block kv_heads size", len(cumulative_sequence_length) - 1
    check_shapes(
        {"batch": batch}, query=(q, "1 heads total size"), key=(k, new_shape), value=(v, new_shape),
        key_cache=(key_cache, cache), value_cache=(value_cache, cache), past_seqlens=(past_seqlens, "batch"),
        block_table=(block_table, "batch blocks_each"), slot_mapping=(slot_mapping, "total"),
        head_sink=(head_sink, "heads"), q_norm_weight=(q_norm_weight, "size"), k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    q, k = (normalized(x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    tokens, ends = lax.iota(np.int32, q.shape[2]), jnp.asarray(cumulative_sequence_length)[1:]
    sequence = jnp.searchsorted(ends, tokens, side="right")
    shifts = past_seqlens - jnp.asarray(cumulative_sequence_length)[:-1]  # from a token's index to its position
    at = tokens + shifts[sequence]
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise ValueError("do_rotary=1 needs cos_cache and sin_cache")
        q, k = (rotate_from(rotary_offset, x, cos_cache, sin_cache, at[None], rotary_interleaved) for x in (q, k))
    size = key_cache.shape[1]
    slots = jnp.asarray(block_table)[sequence, at // size] * size + at % size if slot_mapping is None else slot_mapping
    slots = jnp.where((slots >= 0) & (sequence < batch), slots, key_cache.shape[0] * size)  # out of range

    def write(cache, new):
        flat = jnp.asarray(cache).reshape(-1, *cache.shape[2:])
        return flat.at[slots].set(new[0].transpose(1, 0, 2), mode="drop").reshape(cache.shape)

    key_cache, value_cache = write(key_cache, k), write(value_cache, v)

    def attention(sequence):
        blocks, shift, total = sequence
        k, v = (c[blocks].reshape(1, -1, *c.shape[2:]).transpose(0, 2, 1, 3) for c in (key_cache, value_cache))
        used = lax.iota(np.int32, k.shape[2]) < total
        masks = [*window(q.shape[2], k.shape[2], shift, max(local_window_size - 1, -1), 0 if is_causal else -1), used]
        options = {"scale": scale or None, "softcap": softcap, "masks": masks, "sink": sink_of(head_sink)}
        return merged(attend(q, k, v, read=used[None, None, None], **options)[0])[0]

    each = lax.map(attention, (jnp.asarray(block_table), shifts, shifts + ends))
    return each[sequence, tokens], key_cache, value_cache


def rotate_from(first, x, cos_cache, sin_cache, positions, interleaved):
    """Rotary embedding of features ``first`` and later of [batch, heads, tokens, size] at positions [batch, tokens]."""
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": 2 * cos_cache.shape[-1]}
    rotated = rotary_embedding(x[..., first:], cos_cache, sin_cache, positions, **attributes)
    return jnp.concatenate([x[..., :first], rotated], axis=-1)


@op("SparseAttention", domain=MICROSOFT, product=True, limits="a sequence longer than its KV cache yields NaN")
def sparse_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, past_key, past_value, block_row_indices, block_col_indices,
    total_sequence_length: StaticIfKnown, key_total_sequence_lengths, cos_cache=None, sin_cache=None,
    *, do_rotary=0, kv_num_heads, num_heads, rotary_interleaved=0, scale=None,
    sparse_block_size: Literal[16, 32, 64, 128],
):  # fmt: skip
    """GroupQueryAttention restricted to the blocks of a sparse layout; layouts are assigned to heads in turn.

    A layout is in CSR format: the blocks of row r are ``block_col_indices[layout, rows[r]:rows[r + 1]]``.
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
        raise ValueError(
            f"the number of layouts ({layouts}) must divide num_heads ({num_heads}), and {rows - 1} blocks of "
            f"{sparse_block_size} must cover {keys} tokens"
        )
    # Padding of block_col_indices gets a row out of range, which is dropped.
    row = (entries >= jnp.asarray(block_row_indices)[:, 1:, None]).sum(1, dtype=np.int32)
    mask = jnp.zeros((layouts, rows - 1, rows - 1), bool)
    mask = mask.at[np.arange(layouts, dtype=np.int32)[:, None], row, block_col_indices].set(True, mode="drop")
    at = jnp.maximum(key_total_sequence_lengths[:, None] - new, 0) + np.arange(new, dtype=np.int32)
    mask = mask[np.arange(num_heads) % layouts][:, at // sparse_block_size][..., np.arange(keys) // sparse_block_size]
    bias = jnp.where(jnp.moveaxis(mask, 0, 1), 0, np.finfo(np.float32).min)
    return group_query_attention(
        query, key, value, past_key, past_value, key_total_sequence_lengths - 1, total_sequence_length, cos_cache,
        sin_cache, None, bias, do_rotary=do_rotary, kv_num_heads=kv_num_heads, num_heads=num_heads,
        rotary_interleaved=rotary_interleaved, scale=scale,
    )[:3]  # fmt: skip


@op("LongformerAttention", domain=MICROSOFT, product=True, limits="a masked token yields zeros")
def longformer_attention(input, weight, bias, mask, global_weight, global_bias, global_, *, num_heads, window):
    """Attention of each token over a window and the global tokens; global tokens attend to all tokens.

    Queries, keys and values of global attention have projections of their own; the mask is added to the scores.
    """
    shape = "batch tokens"
    check_shapes({}, input=(input, f"{shape} features"), mask=(mask, shape), **{"global": (global_, shape)})
    is_global = global_ > 0
    positions = lax.iota(np.int32, input.shape[1])
    near = abs(positions - positions[:, None]) <= window

    def attention(weight, bias, read=None):
        q, k, v = (heads_of(x, num_heads, "hidden_size") for x in projected(input, weight, bias))
        return attend(q, k, v, biases=[mask[:, None, None]], masks=[read], read=read)[0]

    local = attention(weight, bias, near | is_global[:, None, None])
    unrestricted = attention(global_weight, global_bias)
    y = merged(jnp.where(is_global[:, None, :, None], unrestricted, local))
    return jnp.where(mask[..., None] < 0, 0, y).astype(input.dtype)
