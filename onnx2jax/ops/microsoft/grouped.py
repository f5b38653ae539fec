"""The com.microsoft domain: grouped-query attention and masked decoding steps, with KV caches."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import KnownValueError
from ..arrays import check_shapes, dims, is_traced, widen
from ..attention import attend, check_paired, heads_of, merged, rotary_embedding, window
from ..indexing import write_slot
from ..registry import MayBeEmpty, Static, StaticIfKnown, taking
from . import microsoft, operands
from .attention import BUFFER, SHARED, check_buffer, multi_head_attention, projected, self_attention, split_attention
from .fused import simplified_layer_normalization
from .quant import unpack


def split_heads(query, key, value, num_heads, kv_num_heads):
    """Queries, keys and values [batch, heads, tokens, size], which ``query`` may hold all of."""
    check_paired(key=key, value=value)
    if key is None:
        size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
        query, key, value = jnp.split(query, [num_heads * size, (num_heads + kv_num_heads) * size], axis=-1)
    return heads_of(query, num_heads, "query"), *(heads_of(x, kv_num_heads, "key, value") for x in (key, value))


def normalized(q, k, q_norm_weight, k_norm_weight, *epsilons):
    """Queries and keys, each head normalised where there are weights."""
    check_paired(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    if q_norm_weight is None:
        return q, k
    rows = zip((q, k), (q_norm_weight, k_norm_weight), epsilons, strict=True)
    return [simplified_layer_normalization(x, weight, epsilon=epsilon)[0] for x, weight, epsilon in rows]


def rotated(q, k, cos_cache, sin_cache, positions, interleaved, *, first=0, least=1):
    """Queries and keys with rotary embedding of features ``first`` and later, at positions [batch, tokens]."""
    size = None if cos_cache is None or sin_cache is None else 2 * cos_cache.shape[-1]
    if size is None or cos_cache.shape[0] < least or not 0 <= first <= q.shape[3] - size:
        raise ValueError(
            f"do_rotary=1 needs cos_cache and sin_cache with at least {least} positions, that fit the features after "
            f"rotary_offset={first}"
        )
    options = {"interleaved": interleaved, "rotary_embedding_dim": size}
    tails = (rotary_embedding(x[..., first:], cos_cache, sin_cache, positions, **options) for x in (q, k))
    return [jnp.concatenate([x[..., :first], y], axis=-1) if first else y for x, y in zip((q, k), tails, strict=True)]


def sink_of(head_sink, smooth_softmax=0):
    """The score of each head [1, heads, 1, 1] that no key has; None for none."""
    if head_sink is None:
        return jnp.zeros((1, 1, 1, 1), np.float32) if smooth_softmax == 1 else None
    return widen(head_sink).reshape(1, -1, 1, 1)


def cache_extents(total, past_key, new, window=None):
    """(number of keys, extent of the KV cache while appending, extent of the present cache).

    ``window``: the last tokens that a sliding cache holds at least; None for a cache that keeps all.
    """
    past = 0 if past_key is None else past_key.shape[2]
    if window is not None and not 0 < window <= past:
        raise ValueError(f"a sliding cache needs 0 < local_window_size ({window}) <= the extent of past_key ({past})")
    if window is not None:
        return past + new, 2 * past + new, past
    if is_traced(total) and past_key is None:
        raise KnownValueError(
            "total_sequence_length is traced, so past_key must be a buffer of the cache's full length"
        )
    total = past if is_traced(total) else total
    if all(isinstance(n, int) for n in (total, past, new)) and (new > total or past < total != past + new):
        expected = f"{past + new} (past and new tokens), or from {new} to {past} if the past is a buffer"
        raise ValueError(f"total_sequence_length ({total}) must be {expected}")
    length = total if past_key is None else max(total, past)
    return total, length, length


def resident_tokens(ends, length, window):
    """The number of a sequence's last tokens in its cache: a sliding one drops ``slack`` tokens at a time."""
    if window is None:
        return ends
    slack = length - window + 1
    return ends + jnp.minimum(length - ends, 0) // slack * slack


def per_sequence(function, *more):
    """``function`` (a dynamic slice along tokens) vmapped over [batch, heads, tokens, size], one start per sequence."""
    return jax.vmap(lambda *operands: function(*operands, *more, axis=1))


def appended(past, new, starts, rows):
    """The KV cache [batch, heads, rows, size] with each sequence's new entries written at its own start; None for 0."""
    cache = jnp.zeros((*new.shape[:2], rows, new.shape[3]), new.dtype)
    if past is not None:
        cache = lax.dynamic_update_slice(cache, jnp.asarray(past), (0, 0, 0, 0))
    if starts is None:
        return lax.dynamic_update_slice(cache, new, (0, 0, 0, 0))
    write = per_sequence(lax.dynamic_update_slice_in_dim)
    if (new.shape[0], new.shape[2]) != (1, 1) or not isinstance(rows, int):
        return write(cache, new, starts)
    at = jnp.clip(starts[0], 0, rows - 1)
    return write_slot(cache, new, at, 2, lambda cache, new: write(cache, new, starts))


def cache_scale(name, scale, kind, bits, heads, size):
    """The scale of a quantized KV cache [batch, heads, tokens, size]; None if it is not quantized."""
    if (kind == "NONE") != (bits == 0):
        raise ValueError(
            f"kv_cache_bit_width ({bits}) must be 0 for k/v_quant_type NONE, otherwise 4 or 8 (it is {kind})"
        )
    if kind == "NONE":
        return None
    shape = (1, heads, 1, size) if kind == "PER_CHANNEL" else (1, 1, 1, 1)
    if scale is None or scale.size != math.prod(shape):
        actual = "is not given" if scale is None else f"has {scale.size}"
        raise ValueError(f"{name} must have {math.prod(shape)} elements for a KV cache quantized {kind} (it {actual})")
    return scale.reshape(shape)


def quantized(x, scale, bits):
    """Entries quantized to int8, or packed as two 4-bit values plus 8 per byte, low nibble first."""
    if scale is None:
        return x
    half = 2 ** (bits - 1)
    q = jnp.clip(jnp.round(x.astype(np.float32) / scale), -half, half - 1)
    if bits == 8:
        return q.astype(np.int8)
    low, high = ((q[..., i::2] + half).astype(np.uint8) for i in range(2))
    return low | high << np.uint8(4)


def dequantized(x, scale, bits, dtype):
    """The inverse of ``quantized``, in ``dtype``."""
    if scale is None:
        return x
    x = x.astype(np.float32) if bits == 8 else unpack(x, bits).astype(np.float32) - 8
    return (x * scale).astype(dtype)


_CACHE = (
    "a sequence longer than its KV cache yields NaN; with a traced total_sequence_length, past_key must be a buffer of "
    "full length; a quantized cache is int8, or uint8 for 4 bits; output_qk of a sliding cache is unsupported"
)
Quantization = Literal["NONE", "PER_TENSOR", "PER_CHANNEL"]


def check_modes(causal, past_key, query_seqlens, local_window_size, sliding_window_cache, qk_output, n_outputs):
    """Raise for attributes of GroupQueryAttention that exclude one another, an operand or an output."""
    if (not causal or past_key is None) and query_seqlens is not None:
        raise ValueError(f"query_seqlens needs causal=1 (it is {causal}), past_key and past_value")
    if not causal and local_window_size != -1:
        raise ValueError(f"causal=0 takes no local_window_size (it is {local_window_size}): it must be -1")
    if sliding_window_cache and n_outputs > 3:
        raise NotImplementedError(f"output_qk: {_CACHE}")
    if n_outputs > 3 and qk_output not in (1, 2):
        raise ValueError(f"the output output_qk requires qk_output 1 (before softmax) or 2 (after), not {qk_output}")


@microsoft("GroupQueryAttention", product=True, limits=_CACHE)
@operands(total_sequence_length="|1")
def group_query_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, past_key: MayBeEmpty, past_value: MayBeEmpty, seqlens_k,
    total_sequence_length: StaticIfKnown, cos_cache=None, sin_cache=None, position_ids=None, attention_bias=None,
    head_sink=None, k_scale=None, v_scale=None, q_norm_weight=None, k_norm_weight=None, query_seqlens=None,
    *, causal=1, do_rotary=0, k_norm_epsilon=None, k_quant_type: Quantization = "NONE",
    kv_cache_bit_width: Literal[0, 4, 8] = 0, kv_num_heads, local_window_size=-1, num_heads, q_norm_epsilon=None,
    qk_norm_epsilon=1e-6, qk_output=0, rotary_interleaved=0, scale=None, sliding_window_cache: Literal[0, 1] = 0,
    smooth_softmax=-1, softcap=0.0, v_quant_type: Quantization = "NONE", n_outputs=1,
):  # fmt: skip
    """Attention with a KV cache whose heads are shared by groups of query heads.

    Sequence b has ``seqlens_k[b] + 1`` tokens, of which the last ``query_seqlens[b]`` are new (by default all given
    ones); further tokens of ``query`` are padding. The present cache has the extent ``total_sequence_length``, or that
    of the past if it is larger; a sliding cache starts with the oldest token it retains.
    """
    q, k, v = split_heads(jnp.asarray(query), key, value, num_heads, kv_num_heads)
    (new, size), new_shape, past_shape = q.shape[2:], "batch heads new size", "batch heads past stored"
    total = total_sequence_length.reshape(()) if is_traced(total_sequence_length) else dims(total_sequence_length)[0]
    check_paired(past_key=past_key, past_value=past_value)
    check_modes(causal, past_key, query_seqlens, local_window_size, sliding_window_cache, qk_output, n_outputs)
    qparams = ("k_scale", k_scale, k_quant_type), ("v_scale", v_scale, v_quant_type)
    scales = [cache_scale(*qparam, kv_cache_bit_width, kv_num_heads, size) for qparam in qparams]
    sliding = local_window_size if sliding_window_cache else None
    keys, rows, length = cache_extents(total, past_key, new, sliding)
    bits, tokens = kv_cache_bit_width, total if sliding_window_cache else keys
    extents = {"stored": size * bits // 8 if bits else size} | ({} if is_traced(tokens) else {"total": tokens})
    check_shapes(
        extents, query=(q, "batch q_heads new size"), key=(k, new_shape), value=(v, new_shape),
        past_key=(past_key, past_shape), past_value=(past_value, past_shape), head_sink=(head_sink, "q_heads"),
        seqlens_k=(seqlens_k.reshape(-1), "batch"), query_seqlens=(query_seqlens, "batch"),
        position_ids=(position_ids, "batch new"), attention_bias=(attention_bias, "batch? q_heads? new total"),
        q_norm_weight=(q_norm_weight, "size"), k_norm_weight=(k_norm_weight, "size"),
    )  # fmt: skip
    epsilons = (qk_norm_epsilon if e is None else e for e in (q_norm_epsilon, k_norm_epsilon))
    q, k = normalized(q, k, q_norm_weight, k_norm_weight, *epsilons)
    ends = jnp.asarray(seqlens_k).reshape(-1).astype(np.int32) + 1
    prompt = query_seqlens is None and not sliding and not is_traced(total) and total == new  # nothing is before it
    starts = jnp.maximum(ends - new, 0) if query_seqlens is None else ends - query_seqlens.astype(np.int32)
    starts = jnp.zeros_like(starts) if prompt else starts
    if do_rotary:
        counted = starts[:, None] + jnp.arange(new, dtype=np.int32)
        at = counted if position_ids is None else position_ids.astype(np.int32)
        if position_ids is not None and query_seqlens is None:  # of a first prompt only the first position is read
            at = jnp.where(total == new, at.reshape(-1)[0] + counted, at)
        q, k = rotated(q, k, cos_cache, sin_cache, at, rotary_interleaved, least=1 if is_traced(total) else total)
    first = resident_tokens(starts, length, sliding)
    last = first + ends - starts
    stored = [quantized(x, scale, bits) for x, scale in zip((k, v), scales, strict=True)]
    at = None if prompt else first
    caches = [appended(past, x, at, rows) for past, x in zip((past_key, past_value), stored, strict=True)]
    whole = stored if prompt else [c[:, :, :keys] for c in caches]
    k, v = (dequantized(x, scale, bits, q.dtype) for x, scale in zip(whole, scales, strict=True))
    if sliding_window_cache:
        if attention_bias is not None:  # whose columns are positions: that of ``starts`` is the row ``first``
            columns = (starts - first)[:, None, None, None] + jnp.arange(keys, dtype=np.int32)
            attention_bias = jnp.take_along_axis(attention_bias, columns, axis=3, mode="clip")
        dropped = last - resident_tokens(ends, length, sliding)
        caches = [per_sequence(lax.dynamic_slice_in_dim, length)(c, dropped) for c in caches]
    fits = (starts >= 0) & (ends - starts <= new) & (last <= keys) & (first + new <= rows)
    first, last, fits = (x.reshape(-1, 1, 1, 1) for x in (first, last, fits))
    masks = window(new, keys, first, max(local_window_size - 1, -1), 0 if causal else -1)
    masks += [] if causal else [lax.iota(np.int32, keys) < last]
    q = jnp.where(fits, q, np.nan)  # so is the result of a sequence longer than its cache
    past = 0 if prompt and causal else None
    own = attention_bias is None and causal and (prompt or local_window_size < 0)  # each query attends to its own key
    y, (*_, scores, weights) = attend(
        q, k, v, ends=last, masks=masks, past=past, keep_scores=n_outputs > 3, biases=[attention_bias],
        scale=scale or None, softcap=softcap, sink=sink_of(head_sink, smooth_softmax), empty=not own,
    )  # fmt: skip
    if n_outputs <= 3:
        return merged(y), *caches
    scores = weights if qk_output == 2 else jnp.where(jnp.isneginf(scores), 0, scores)
    return merged(y), *caches, scores.astype(q.dtype)


_KEY_LAYOUT = (
    "a shared key buffer has the layout [batch, heads, max_sequence_length, size] of onnxruntime's CPU provider; its "
    "CUDA provider reorders the keys"
)


def check_step(query, beam_width, cache_indirection):
    """Raise ValueError unless ``query`` is one token and beam_width agrees with cache_indirection."""
    if query.ndim != 3 or query.shape[1] != 1:
        raise ValueError(f"query must be one token [batch, 1, size] (it has {query.shape})")
    beams = 1 if cache_indirection is None else dict(enumerate(cache_indirection.shape)).get(1)
    width = beams if is_traced(beam_width) else 1 if beam_width is None else int(beam_width.item())
    if width != beams:
        raise ValueError(f"beam_width ({width}) must be the second extent of cache_indirection ({beams})")


@microsoft("DecoderMaskedMultiHeadAttention", product=True, limits=f"{_KEY_LAYOUT}; {BUFFER}")
@taking(**SHARED)
def decoder_masked_multi_head_attention(
    query, key=None, value=None, mask_index=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, beam_width: StaticIfKnown = None, cache_indirection=None, bias=None,
    *, output_qk=0, past_present_share_buffer=0, n_outputs=1, warn=None, **options,
):  # fmt: skip
    """MultiHeadAttention of one token; rank-4 keys and values are cross-attention, without beams."""
    check_step(query, beam_width, cache_indirection)
    if n_outputs > 3 and not output_qk:
        raise ValueError("the output qk needs output_qk=1")
    if key is None:
        query, key, value = jnp.split(query, 3, axis=-1)
    if np.ndim(key) == 4:
        past_sequence_length = cache_indirection = None
    else:
        check_buffer(past_present_share_buffer, past_sequence_length)
        if warn and past_sequence_length is not None:
            warn(_KEY_LAYOUT)
    return multi_head_attention(
        query, key, value, bias, mask_index, attention_bias, past_key, past_value, past_sequence_length,
        cache_indirection, n_outputs=n_outputs, **options,
    )  # fmt: skip


@microsoft(
    "DecoderMaskedSelfAttention", product=True,
    limits="do_rotary is unsupported; a shared key buffer has the documented layout, interleaved in groups of 16 bytes"
    f"; {BUFFER}",
)  # fmt: skip
@operands(mask_index="*|* *|* * *")
@taking(**SHARED)
def decoder_masked_self_attention(
    input, weights, bias, mask_index: MayBeEmpty, past, attention_bias: MayBeEmpty, past_sequence_length,
    beam_width: StaticIfKnown = None, cache_indirection=None, *, do_rotary: Literal[0] = 0,
    past_present_share_buffer=0, **options,
):  # fmt: skip
    """Self-attention of one token with an input projection."""
    del do_rotary
    check_step(input, beam_width, cache_indirection)
    check_buffer(past_present_share_buffer, past_sequence_length)
    check_shapes({"2": 2}, past=(past, "2 batch heads past size"))
    _, batch, heads, tokens, size = past.shape
    group = 16 // past.dtype.itemsize
    if size % group:
        raise ValueError(f"the head size ({size}) must be a multiple of {group}, which is 16 bytes of {past.dtype}")
    keys = past[0].reshape(batch, heads, size // group, tokens, group).transpose(0, 1, 3, 2, 4)
    y, present = self_attention(
        projected(input, weights, bias), jnp.stack([keys.reshape(batch, heads, tokens, size), past[1]]),
        mask=mask_index, bias=attention_bias, length=past_sequence_length, beams=cache_indirection, **options,
    )  # fmt: skip
    keys = present[0].reshape(batch, heads, tokens, size // group, group).transpose(0, 1, 3, 2, 4)
    return y, present.at[0].set(keys.reshape(batch, heads, tokens, size))


_MASK = "key_padding_mask is unsupported, because its meaning is undocumented"


@microsoft("DecoderAttention", product=True, limits=_MASK)
@operands(bias="size")
def decoder_attention(
    query, key, q_weight, kv_weight, bias, key_padding_mask: MayBeEmpty, key_cache: MayBeEmpty, value_cache: MayBeEmpty,
    static_kv: Static, use_past: Static, has_layer_state: Static, has_key_padding_mask: Static,
    *, mask_filter_value=-10000.0, num_heads,
):  # fmt: skip
    """Attention of [tokens, batch, hidden] with its projections: self-attention, or cross-attention if static_kv.

    With use_past and has_layer_state the KV cache is used: the past tokens, or the projected ``key`` if static_kv.
    """
    del key_padding_mask, mask_filter_value
    static, cached = bool(static_kv.item()), bool(use_past.item() and has_layer_state.item())
    if has_key_padding_mask.item():
        raise NotImplementedError(_MASK)
    check_shapes({}, query=(query, "tokens batch hidden"), key=(key, "total batch hidden"))
    hidden = query.shape[2]
    (q,) = projected(query.swapaxes(0, 1), q_weight, bias[:hidden], [hidden])
    past = (key_cache, value_cache) if cached else (None, None)
    if cached and static:
        (k, v), past = past, (None, None)
    else:
        k, v = projected((key if static else query).swapaxes(0, 1), kv_weight, bias[hidden:], [hidden, hidden])
    y, k, v, _ = split_attention(q, k, v, num_heads=num_heads, past=past)
    return y.swapaxes(0, 1), k, v


def repeated_ngrams(ids, size):
    """Per n-gram of ``size`` tokens in each row: (whether its prefix equals the row's last tokens, its last token)."""
    rows = ids[:, np.arange(ids.shape[1] - size + 1)[:, None] + np.arange(size)]
    return (rows[..., :-1] == ids[:, None, ids.shape[1] - size + 1 :]).all(-1), rows[..., -1]


@microsoft("NGramRepeatBlock")
def ngram_repeat_block(input_ids, scores, *, ngram_size):
    """The scores, -inf for each token that would repeat an n-gram of ``ngram_size`` tokens."""
    check_shapes({}, input_ids=(input_ids, "batch tokens"), scores=(scores, "batch vocabulary"))
    batch, tokens = input_ids.shape
    if tokens < ngram_size:
        return scores
    repeats, last = repeated_ngrams(input_ids, ngram_size)
    return jnp.asarray(scores).at[np.arange(batch)[:, None], last].min(jnp.where(repeats, -np.inf, np.inf))
