"""The com.microsoft domain: paged KV caches; attention by blocks, by windows, over keys selected per query."""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..arrays import check_shapes, dims, is_traced
from ..attention import attend, check_paired, heads_of, merged, window
from ..indexing import BOUNDS
from ..registry import MayBeEmpty, StaticIfKnown
from . import microsoft, operands
from .attention import projected
from .grouped import appended, cache_extents, group_query_attention, normalized, rotated, sink_of, split_heads

_CACHES = "quantized KV caches and those of latent attention are unsupported: use floating-point keys and values"


@microsoft("PagedAttention", product=True, limits=_CACHES)
@operands(cumulative_sequence_length="ends", past_seqlens="batch")
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
    new_shape, cache, batch = "1 kv_heads total size", "blocks block kv_heads size", len(cumulative_sequence_length) - 1
    check_shapes(
        {"batch": batch}, query=(q, "1 heads total size"), key=(k, new_shape), value=(v, new_shape),
        key_cache=(key_cache, cache), value_cache=(value_cache, cache), past_seqlens=(past_seqlens, "batch"),
        block_table=(block_table, "batch blocks_each"), slot_mapping=(slot_mapping, "total"),
        head_sink=(head_sink, "heads"), q_norm_weight=(q_norm_weight, "size"), k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    q, k = normalized(q, k, q_norm_weight, k_norm_weight, qk_norm_epsilon, qk_norm_epsilon)
    tokens, ends = lax.iota(np.int32, q.shape[2]), jnp.asarray(cumulative_sequence_length)[1:]
    sequence = jnp.searchsorted(ends, tokens, side="right")
    shifts = past_seqlens - jnp.asarray(cumulative_sequence_length)[:-1]  # from a token's index to its position
    at = tokens + shifts[sequence]
    if do_rotary:
        q, k = rotated(q, k, cos_cache, sin_cache, at[None], rotary_interleaved, first=rotary_offset)
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


@microsoft("SparseAttention", product=True, limits="a sequence longer than its KV cache yields NaN")
@operands(
    query="batch tokens size", past_key="batch heads room size_each", block_row_indices="layouts max_blocks+1",
    block_col_indices="layouts max_nnz_blocks", total_sequence_length="|1", key_total_sequence_lengths="batch",
)  # fmt: skip
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
    keys = past_key.shape[2] if is_traced(total_sequence_length) else dims(total_sequence_length)[0]

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
    new = query.shape[1]
    at = jnp.maximum(key_total_sequence_lengths[:, None] - new, 0) + np.arange(new, dtype=np.int32)
    mask = mask[np.arange(num_heads) % layouts][:, at // sparse_block_size][..., np.arange(keys) // sparse_block_size]
    bias = jnp.where(jnp.moveaxis(mask, 0, 1), 0, np.finfo(np.float32).min)
    return group_query_attention(
        query, key, value, past_key, past_value, key_total_sequence_lengths - 1, total_sequence_length, cos_cache,
        sin_cache, None, bias, do_rotary=do_rotary, kv_num_heads=kv_num_heads, num_heads=num_heads,
        rotary_interleaved=rotary_interleaved, scale=scale,
    )[:3]  # fmt: skip


@microsoft("LongformerAttention", product=True, limits="a masked token yields zeros")
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
    y = merged(jnp.where(is_global[:, None, :, None], attention(global_weight, global_bias), local))
    return jnp.where(mask[..., None] < 0, 0, y).astype(input.dtype)


_UNSUPPORTED = (
    "KV caches whose dtype is not that of the keys, committed_length and validation_status are unsupported; selected "
    "positions after a query are masked; invalid positions and a sequence longer than its cache yield NaN"
)


def _selected(indices, counts, batch, extent, ends):
    """(mask of the selected keys [batch, 1, queries, extent], whether the selection is valid [batch, queries, 1])."""
    used = lax.iota(np.int32, indices.shape[1]) < jnp.asarray(counts)[:, None]
    ends = jnp.repeat(jnp.broadcast_to(ends, (batch,)), indices.shape[0] // batch)
    in_range = (indices >= 0) & (indices < ends[:, None])
    rows = lax.iota(np.int32, indices.shape[0])[:, None]
    mask = jnp.zeros((indices.shape[0], extent), bool)
    mask = mask.at[rows, jnp.where(used & in_range, indices, extent)].set(True, mode="drop")
    valid = (in_range | ~used).all(1) & (counts >= 0) & (counts <= indices.shape[1])
    return mask.reshape(batch, 1, -1, extent), valid.reshape(batch, -1, 1)


@microsoft("DynamicSparseAttention", product=True, limits=f"{_UNSUPPORTED}; {BOUNDS}")
def dynamic_sparse_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, past_key: MayBeEmpty, past_value: MayBeEmpty, auxiliary_key: MayBeEmpty,
    auxiliary_value: MayBeEmpty, selected_indices, selected_counts, seqlens_k, total_sequence_length: StaticIfKnown,
    cos_cache=None, sin_cache=None, position_ids=None, q_norm_weight=None, k_norm_weight=None, head_sink=None,
    committed_length=None, key_scale=None, value_scale=None,
    *, attention_mode: Literal["selected_only", "local_plus_selected"] = "selected_only", auxiliary_kv_shared=0,
    do_rotary=0, is_causal: Literal[1] = 1, kv_num_heads, local_window_size=-1, num_heads, output_bf16=0,
    qk_norm_epsilon=1e-6, rotary_interleaved=0, rotary_offset=0, scale=None,
    selected_kv_source: Literal["main", "auxiliary"] = "main", smooth_softmax=0, n_outputs=1,
):  # fmt: skip
    """Attention of each sequence's last tokens over selected keys of its KV cache.

    With "local_plus_selected" it attends to a local window of its cache and to selected keys of an auxiliary cache,
    which is not updated.
    """
    del is_causal
    both, other = attention_mode == "local_plus_selected", selected_kv_source == "auxiliary"
    if not both == other == (auxiliary_key is not None) or (both and local_window_size < 1):
        raise ValueError(
            f"attention_mode {attention_mode!r}, selected_kv_source {selected_kv_source!r}, local_window_size "
            f"{local_window_size}: 'selected_only' requires 'main'; 'local_plus_selected' requires 'auxiliary', "
            "auxiliary_key and local_window_size >= 1"
        )
    if both and auxiliary_value is None and not auxiliary_kv_shared:
        raise ValueError("auxiliary_value may only be absent with auxiliary_kv_shared=1")
    query = jnp.asarray(query)
    q, k, v = split_heads(query, key, value, num_heads, kv_num_heads)
    past_type = k.dtype if past_key is None else past_key.dtype
    if past_type != k.dtype or n_outputs > 3 or not (committed_length is key_scale is value_scale is None):
        raise NotImplementedError(f"a cache of {past_type} for keys of {k.dtype}, scales, or checks: {_UNSUPPORTED}")
    check_paired(past_key=past_key, past_value=past_value)
    (batch, _, new, _), new_shape, past_shape = q.shape, "batch heads new size", "batch heads past size"
    auxiliary_shape = "batch heads auxiliary size"
    check_shapes(
        {"heads": kv_num_heads, "tokens": batch * new}, query=(q, "batch q_heads new size"), key=(k, new_shape),
        value=(v, new_shape), past_key=(past_key, past_shape), past_value=(past_value, past_shape),
        auxiliary_key=(auxiliary_key, auxiliary_shape), auxiliary_value=(auxiliary_value, auxiliary_shape),
        selected_indices=(selected_indices, "tokens entries"), selected_counts=(selected_counts, "tokens"),
        seqlens_k=(seqlens_k, "batch"), head_sink=(head_sink, "q_heads"), position_ids=(position_ids, "batch new"),
        q_norm_weight=(q_norm_weight, "size"), k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    total = total_sequence_length.reshape(()) if is_traced(total_sequence_length) else dims(total_sequence_length)[0]
    keys, rows, _ = cache_extents(total, past_key, new)
    ends = jnp.asarray(seqlens_k).astype(np.int32) + 1
    starts = ends - new
    q, k = normalized(q, k, q_norm_weight, k_norm_weight, qk_norm_epsilon, qk_norm_epsilon)
    if do_rotary:
        at = starts[:, None] + np.arange(new, dtype=np.int32) if position_ids is None else position_ids
        q, k = rotated(q, k, cos_cache, sin_cache, at, rotary_interleaved, first=rotary_offset)
    caches = [appended(past, x, jnp.maximum(starts, 0), rows) for past, x in ((past_key, k), (past_value, v))]
    k, v = (cache[:, :, :keys] for cache in caches)
    indices, offset = jnp.asarray(selected_indices), starts.reshape(-1, 1, 1, 1)
    near = window(new, keys, offset, local_window_size - 1 if both else -1, 0)
    attended = functools.reduce(jnp.logical_and, (mask(lambda rows: rows) for mask in near))
    if both:
        auxiliary_value = auxiliary_key if auxiliary_value is None else auxiliary_value
        mask, valid = _selected(indices, selected_counts, batch, auxiliary_key.shape[2], auxiliary_key.shape[2])
        k, v = jnp.concatenate([k, auxiliary_key], axis=2), jnp.concatenate([v, auxiliary_value], axis=2)
        attended = jnp.concatenate([attended, mask], axis=3)
    else:
        mask, valid = _selected(indices, selected_counts, batch, keys, ends)
        attended = attended & mask
    sink = sink_of(head_sink, smooth_softmax)
    y = merged(attend(q, k, v, scale=scale, masks=[attended], read=attended, sink=sink)[0])
    valid &= ((starts >= 0) & (ends <= keys)).reshape(-1, 1, 1)
    dtype = np.dtype(ml_dtypes.bfloat16) if output_bf16 and y.dtype == np.float16 else y.dtype
    return (jnp.where(valid, y, np.nan).astype(dtype), *caches)[:n_outputs]
