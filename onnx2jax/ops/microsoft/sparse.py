"""The com.microsoft domain: attention over keys that another operator selects per query."""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..arrays import check_shapes, dims, is_traced
from ..attention import attend, check_paired, merged, window
from ..indexing import BOUNDS
from ..registry import MayBeEmpty, StaticIfKnown, op
from . import MICROSOFT
from .grouped import appended, cache_extents, normalized, sink_of, split_heads
from .paged import rotate_from

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


@op("DynamicSparseAttention", domain=MICROSOFT, product=True, limits=f"{_UNSUPPORTED}; {BOUNDS}")
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
    query, total = jnp.asarray(query), total_sequence_length
    q, k, v = split_heads(query, key, value, num_heads, kv_num_heads)
    past_type = k.dtype if past_key is None else past_key.dtype
    if past_type != k.dtype or n_outputs > 3 or not (committed_length is key_scale is value_scale is None):
        raise NotImplementedError(f"a cache of {past_type} for keys of {k.dtype}, scales, or checks: {_UNSUPPORTED}")
    check_paired(past_key=past_key, past_value=past_value)
    check_paired(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    (batch, _, new, size), new_shape, past_shape = q.shape, "batch heads new size", "batch heads past size"
    auxiliary_shape = "batch heads auxiliary size"
    check_shapes(
        {"heads": kv_num_heads, "tokens": batch * new}, query=(q, "batch q_heads new size"), key=(k, new_shape),
        value=(v, new_shape), past_key=(past_key, past_shape), past_value=(past_value, past_shape),
        auxiliary_key=(auxiliary_key, auxiliary_shape), auxiliary_value=(auxiliary_value, auxiliary_shape),
        selected_indices=(selected_indices, "tokens entries"),
        selected_counts=(selected_counts, "tokens"), seqlens_k=(seqlens_k, "batch"), head_sink=(head_sink, "q_heads"),
        position_ids=(position_ids, "batch new"), q_norm_weight=(q_norm_weight, "size"),
        k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    total = total.reshape(()) if is_traced(total) else dims(total)[0]
    keys, rows, _ = cache_extents(total, past_key, new)
    ends = jnp.asarray(seqlens_k).astype(np.int32) + 1
    starts = ends - new
    q, k = (normalized(x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    if do_rotary:
        if cos_cache is None or sin_cache is None or not 0 <= rotary_offset <= size - 2 * cos_cache.shape[1]:
            raise ValueError(f"do_rotary=1 needs cos_cache and sin_cache that fit the features after {rotary_offset=}")
        at = starts[:, None] + np.arange(new, dtype=np.int32) if position_ids is None else position_ids
        q, k = (rotate_from(rotary_offset, x, cos_cache, sin_cache, at, rotary_interleaved) for x in (q, k))
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
