"""The com.microsoft domain, attention."""

from __future__ import annotations

from inspect import Parameter
from typing import Literal

import jax.numpy as jnp
import numpy as np

from ..arrays import accumulator, check_shapes, wide
from ..attention import attend, check_past, heads_of, merged, rotary_embedding, window
from ..linalg import product
from ..registry import op, taking
from .fused import MICROSOFT
from .quant import matmul_integer_to_float

_MASKS = "masks: [batch], [2 * batch], [batch, keys], of rank 3 and 4"
_SHARED = "do_rotary and a shared cache buffer are refused: use GroupQueryAttention"

_BUFFER = "a shared cache buffer (past_sequence_length, cache_indirection); leave it off"
OPTIONS = {"mask_filter_value": -10000.0, "num_heads": Parameter.empty, "scale": None, "unidirectional": 0}


def padding_bias(mask, batch, queries, keys, filler):
    """A mask in any of the forms that Attention takes, as a bias [batch, 1, 1 or queries, keys]."""
    if mask is None:
        return None
    places = jnp.arange(keys, dtype=np.int32)
    if mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch):
        ends, starts = mask[:batch, None], mask[batch:, None] if mask.shape[0] > batch else 0
        live = ((places < ends) & (places >= starts))[:, None, None]
    elif mask.shape == (batch, keys):
        live = (mask > 0)[:, None, None]
    elif mask.shape == (batch, queries, keys):
        live = (mask > 0)[:, None]
    elif mask.ndim == 4:
        live = (mask > 0)[:, :, keys - queries : keys, :keys]
    else:
        raise NotImplementedError(
            f"a mask of shape {mask.shape} for batch {batch}, {queries} queries and {keys} keys; use [batch, keys]"
        )
    return jnp.where(live, 0.0, np.float32(filler))


def split_attention(q, k, v, *, num_heads, mask, past, bias, unidirectional, scale, mask_filter_value):
    """What the operators below do behind their projections: the result, keys and values with the past's, the scores."""
    q, k, v = (heads_of(jnp.asarray(x), num_heads, name) for x, name in ((q, "query"), (k, "key"), (v, "value")))
    if unidirectional and k.shape[2] != q.shape[2]:
        raise ValueError(f"unidirectional=1 needs a key for each query: {q.shape[2]} queries, {k.shape[2]} new keys")
    check_past(q, k, v, *past)
    if past[0] is not None:
        k, v = (jnp.concatenate([old, new], axis=2) for old, new in zip(past, (k, v), strict=True))
    (batch, _, queries, _), keys = q.shape, k.shape[2]
    check_shapes(
        {"total": keys}, query=(q, "batch heads queries size"), attention_bias=(bias, "batch? heads? queries total")
    )
    biases = [padding_bias(mask, batch, queries, keys, mask_filter_value), bias]
    masks = window(queries, keys, keys - queries, -1, 0) if unidirectional else ()
    y, (_, _, scores, _, _) = attend(q, k, v, scale=scale or None, biases=biases, masks=masks)
    return merged(y), k, v, scores.astype(q.dtype)


def self_attention(qkv, sizes, past, **options):
    """Attention and QAttention behind their projection; the second result holds keys and values."""
    check_shapes({"2": 2}, past=(past, "2 batch heads past size"))
    past = (None, None) if past is None else past
    y, k, v, _ = split_attention(*jnp.split(qkv, np.cumsum(sizes)[:2].tolist(), axis=-1), past=past, **options)
    return (y, jnp.stack([k, v])) if k.shape == v.shape else (y,)


@op("Attention", domain=MICROSOFT, product=True, limits=f"{_SHARED}; {_MASKS}")
@taking(**OPTIONS)
def attention(
    input, weights, bias=None, mask_index=None, past=None, attention_bias=None, past_sequence_length=None,
    *, do_rotary: Literal[0] = 0, past_present_share_buffer: Literal[0] = 0, qkv_hidden_sizes=None,
    rotary_embedding_dim: Literal[0] = 0, **options,
):  # fmt: skip
    """Self-attention with its input projection; masked keys are lowered by mask_filter_value."""
    del do_rotary, past_present_share_buffer, rotary_embedding_dim
    if past_sequence_length is not None:
        raise NotImplementedError(_BUFFER)
    sizes = qkv_hidden_sizes or (weights.shape[-1] // 3,) * 3
    operands = {"input": (input, "batch tokens features"), "weights": (weights, "features hidden")}
    check_shapes({"hidden": sum(sizes)}, **operands, bias=(bias, "hidden"))
    y = product(input, weights, accumulator(input.dtype))
    y = jnp.asarray(y if bias is None else y + wide(bias), input.dtype)
    return self_attention(y, sizes, past, mask=mask_index, bias=attention_bias, **options)


@op("QAttention", domain=MICROSOFT, heavy=True, limits=f"{_SHARED}; {_MASKS}")
@taking(**OPTIONS)
def qattention(
    input, weight, bias, input_scale, weight_scale, mask_index=None, input_zero_point=None, weight_zero_point=None,
    past=None, *, do_rotary: Literal[0] = 0, past_present_share_buffer: Literal[0] = 0, **options,
):  # fmt: skip
    """Attention whose input projection multiplies quantized tensors."""
    del do_rotary, past_present_share_buffer
    y = matmul_integer_to_float(input, weight, input_scale, weight_scale, input_zero_point, weight_zero_point, bias)
    return self_attention(y, (y.shape[-1] // 3,) * 3, past, mask=mask_index, bias=None, **options)


_CACHES = f"past_sequence_length and cache_indirection are refused; {_MASKS}"


@op("MultiHeadAttention", domain=MICROSOFT, product=True, limits=_CACHES)
@taking(**OPTIONS)
def multi_head_attention(
    query, key=None, value=None, bias=None, key_padding_mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, cache_indirection=None, **options,
):  # fmt: skip
    """Attention of projected queries on keys and values, packed together or apart, grown by those of the past."""
    if past_sequence_length is not None or cache_indirection is not None:
        raise NotImplementedError(_BUFFER)
    query = jnp.asarray(query)
    if query.ndim == 5:
        query, key, value = (query[:, :, :, i].reshape(*query.shape[:2], -1) for i in range(3))
    elif key.ndim == 5:
        key, value = (jnp.asarray(key)[:, :, :, i].reshape(*key.shape[:2], -1) for i in range(2))
    if bias is not None:
        widths = [query.shape[-1], key.shape[-1] if key.ndim == 3 else query.shape[-1]]
        last = value.shape[-1] if value.ndim == 3 else value.shape[1] * value.shape[3]
        check_shapes({"hidden": sum(widths) + last}, bias=(bias, "hidden"))
        q_bias, k_bias, v_bias = jnp.split(jnp.asarray(bias), np.cumsum(widths).tolist())
        query = query + q_bias
        key, value = (key + k_bias, value + v_bias) if key.ndim == 3 else (key, value)
    past, bias = (past_key, past_value), attention_bias
    return split_attention(query, key, value, mask=key_padding_mask, past=past, bias=bias, **options)


@op("RotaryEmbedding", domain=MICROSOFT, limits="is_packed_batching and a scale other than 1 are refused")
def ms_rotary_embedding(
    input, position_ids, cos_cache, sin_cache, *, interleaved=0, is_packed_batching: Literal[0] = 0, num_heads=0,
    rotary_embedding_dim=0, scale: Literal[1] = 1.0,  # type: ignore[assignment]
):  # fmt: skip
    """RotaryEmbedding at given positions, or from one position on."""
    del is_packed_batching, scale
    if rotary_embedding_dim and not num_heads and input.ndim == 3:
        raise ValueError(f"rotary_embedding_dim ({rotary_embedding_dim}) needs the attribute num_heads")
    if position_ids.size == 1 and position_ids.ndim == 1:
        position_ids = position_ids + jnp.zeros((input.shape[0], 1), np.int64) + np.arange(input.shape[-2])
    heads = num_heads or (input.shape[2] // (2 * cos_cache.shape[-1]) if input.ndim == 3 else None)
    attributes = {"interleaved": interleaved, "num_heads": heads, "rotary_embedding_dim": rotary_embedding_dim}
    return rotary_embedding(input, cos_cache, sin_cache, position_ids, **attributes)
