"""The com.microsoft domain: attention, of batches without padding too, linear attention, causal convolution."""

from __future__ import annotations

import math
from inspect import Parameter
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shape, check_shapes, is_traced, needs_known, widen, xp
from ..attention import Swish, attend, causal_conv, check_past, heads_of, linear_attention, merged, window
from ..indexing import BOUNDS, gather
from ..linalg import product
from ..registry import MayBeEmpty, Static, taking
from . import microsoft, operands
from .quant import matmul_integer_to_float

_MASKS = "masks: [batch], [2 * batch], [3 * batch + 2], [batch, keys], rank 3 and rank 4"
BUFFER = "a past_sequence_length outside of the buffer raises if known, and otherwise yields NaN"
_ANGLES = "do_rotary is unsupported, because its angles are undocumented: use GroupQueryAttention"

SHARED = {"mask_filter_value": -10000.0, "num_heads": Parameter.empty, "scale": None}
OPTIONS = {**SHARED, "unidirectional": 0}


def padding_bias(mask, batch, queries, keys, filler):
    """A mask in any form that Attention accepts, as an additive bias [batch, 1, 1 or queries, keys]."""
    if mask is None:
        return None
    positions = jnp.arange(keys, dtype=np.int32)
    if mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch, 3 * batch + 2):  # 3 * batch + 2: the rest is redundant
        ends, starts = mask[:batch, None], mask[batch:, None] if mask.shape[0] == 2 * batch else 0
        attended = ((positions < ends) & (positions >= starts))[:, None, None]
    elif mask.shape in ((batch, keys), (batch, queries, keys)):
        attended = xp.expand_dims(mask > 0, (1, 2)[: 4 - mask.ndim])
    elif mask.ndim == 4:
        attended = (mask > 0)[:, :, keys - queries : keys, :keys]
    else:
        raise NotImplementedError(
            f"a mask of shape {mask.shape} is unsupported for batch {batch}, {queries} queries and {keys} keys; use "
            "[batch, keys]"
        )
    return jnp.where(attended, 0.0, np.float32(filler))


def projected(input, weights, bias, sizes=None):
    """Queries, keys and values [batch, tokens, size], projected by weights concatenated along the last axis."""
    sizes = sizes or (weights.shape[-1] // 3,) * 3
    operands = {"input": (input, "batch tokens features"), "weights": (weights, "features hidden")}
    check_shapes({"hidden": sum(sizes)}, **operands, bias=(bias, "hidden"))
    y = product(input, weights, accumulator(input.dtype))
    y = jnp.asarray(y if bias is None else y + widen(bias), input.dtype)
    return jnp.split(y, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def with_bias(bias, *operands):
    """Queries, keys and values plus their slices of a bias; rank-4 operands already include theirs."""
    if any(x is None for x in operands):
        raise ValueError("key and value must be given, unless query contains all three (rank 5)")
    if bias is None:
        return operands
    widths = [x.shape[-1] if x.ndim < 4 else x.shape[1] * x.shape[3] for x in operands]
    check_shapes({"hidden": sum(widths)}, bias=(bias, "hidden"))
    parts = jnp.split(jnp.asarray(bias), np.cumsum(widths)[:-1].tolist())
    return [x if x.ndim == 4 else x + part for x, part in zip(operands, parts, strict=True)]


def pad_last_axis(x, extent):
    """A mask or bias padded with 0 to ``extent`` along its last axis; a vector is returned unchanged."""
    return x if np.ndim(x) < 2 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extent - x.shape[-1])])


def gather_beams(cache, beams, length):
    """A KV cache [batch, heads, tokens, size] in which ``beams`` select each token's beam, up to ``length``."""
    (batch, heads, tokens, _), (groups, width) = cache.shape, (*beams.shape, 0, 0)[:2]
    check_shapes({"tokens": tokens, "beams": batch / max(groups, 1)}, cache_indirection=(beams, "groups beams tokens"))
    rows, positions = np.arange(batch, dtype=np.int32)[:, None], np.arange(tokens, dtype=np.int32)
    source = jnp.where(positions < length, rows // width * width + beams.reshape(batch, tokens), rows)
    return cache[source[:, None], np.arange(heads, dtype=np.int32)[:, None], positions]


def append_to_buffers(past, new, length, mask):
    """(KV buffers with the new tokens written at ``length``, length as a scalar, total length or None if traced)."""
    if past[0] is None or np.size(length) != 1 or np.ndim(mask) == 4:
        raise ValueError("past_sequence_length must be a scalar and requires a past, and a mask of rank 1 to 3")
    count, capacity, total = new[0].shape[2], past[0].shape[2], None
    if not is_traced(length):
        total = int(np.asarray(length).item()) + count
        if not count <= total <= capacity:
            raise ValueError(f"a past of {total - count} tokens and {count} new ones exceed the buffer of {capacity}")
    start = xp.reshape(length, ())
    return [lax.dynamic_update_slice_in_dim(*pair, start, 2) for pair in zip(past, new, strict=True)], start, total


def split_attention(
    q, k, v, *, num_heads, past, mask=None, bias=None, scale=None, mask_filter_value=0, unidirectional=0, length=None,
    beams=None, n_outputs=1,
):  # fmt: skip
    """(output, present keys, present values, scores) of attention over projected operands and the past.

    With ``length`` the past is a pair of buffers whose first ``length`` tokens are valid; ``beams`` select the beam of
    each of these. If ``length`` is traced, the output is NaN where it is negative or the tokens exceed the buffer, or
    where mask and bias match neither the buffer nor the tokens.
    """
    q, k, v = (heads_of(jnp.asarray(x), num_heads, name) for x, name in ((q, "query"), (k, "key"), (v, "value")))
    (batch, _, queries, _), new, total = q.shape, k.shape[2], None
    if unidirectional and new != queries:
        raise ValueError(f"unidirectional=1 needs one new key per query ({queries} queries, {new} new keys)")
    check_past(q, k, v, *past)
    offset, present = 0 if past[0] is None else past[0].shape[2], (k, v)
    if length is not None:
        present, offset, total = append_to_buffers(past, present, length, mask)
    elif past[0] is not None:
        present = [jnp.concatenate(pair, axis=2) for pair in zip(past, present, strict=True)]
    k, v = present if beams is None else (gather_beams(x, beams, offset) for x in present)
    keys = k.shape[2]
    extents = {} if total is None and length is not None else {"total": keys if total is None else total}
    check_shapes(extents, query=(q, "batch heads queries size"), attention_bias=(bias, "batch? heads? queries total"))
    masks, read = window(queries, keys, offset, -1, 0) if unidirectional else [], None
    if length is not None:
        rows = np.ndim(mask) > 1 and {2: "batch total", 3: "batch queries total"}[mask.ndim]
        check_shapes(extents, mask=(mask if rows else None, rows or ""))
        used, declared = offset + new, extents.get("total", keys)
        read = (lax.iota(np.int32, keys) < used).reshape(1, 1, 1, keys)
        masks.append(read)
        mask, bias = pad_last_axis(mask, keys), pad_last_axis(bias, keys)
    biases = [padding_bias(mask, batch, queries, keys, mask_filter_value), bias]
    keep, options = n_outputs > 3, {"scale": scale or None, "biases": biases, "masks": masks, "read": read}
    options |= {"past": offset if unidirectional and length is None else None}
    options |= {"empty": not unidirectional or mask is not None or bias is not None}
    y, (_, _, scores, _, _) = attend(q, k, v, keep_scores=keep, **options)
    if length is not None and total is None:
        fits = (offset >= 0) & (used <= keys)
        y = jnp.where(fits & ((declared == keys) | (declared == used)), y, np.nan)
    return merged(y), *present, scores[..., :total].astype(q.dtype) if keep else None


def self_attention(qkv, past, **options):
    """(output, present [2, batch, heads, tokens, size]) of Attention and its variants, after the input projection."""
    check_shapes({"2": 2}, past=(past, "2 batch heads past size"))
    past = (None, None) if past is None else past
    y, k, v, _ = split_attention(*qkv, past=past, **options)
    return (y, jnp.stack([k, v])) if k.shape == v.shape else (y,)


def check_buffer(past_present_share_buffer, past_sequence_length):
    """Raise ValueError for a shared buffer without its length, or a length without it."""
    if bool(past_present_share_buffer) != (past_sequence_length is not None):
        raise ValueError("past_present_share_buffer=1 and past_sequence_length require each other: give both or none")


@microsoft("Attention", product=True, limits=f"{_ANGLES}; {_MASKS}; {BUFFER}")
@taking(**OPTIONS)
def attention(
    input, weights, bias=None, mask_index=None, past=None, attention_bias=None, past_sequence_length=None,
    *, do_rotary: Literal[0] = 0, past_present_share_buffer=0, qkv_hidden_sizes=None, rotary_embedding_dim=0,
    **options,
):  # fmt: skip
    """Self-attention with an input projection; masked scores are offset by mask_filter_value."""
    del do_rotary, rotary_embedding_dim  # the second is only read beside the first
    check_buffer(past_present_share_buffer, past_sequence_length)
    options |= {"mask": mask_index, "bias": attention_bias, "length": past_sequence_length}
    return self_attention(projected(input, weights, bias, qkv_hidden_sizes), past, **options)


@microsoft("QAttention", heavy=True, limits=f"{_ANGLES}; past_present_share_buffer is unsupported; {_MASKS}")
@operands(input="batch tokens features", weight="features hidden", bias="hidden")
@taking(**OPTIONS)
def qattention(
    input, weight, bias, input_scale, weight_scale, mask_index=None, input_zero_point=None, weight_zero_point=None,
    past=None, *, do_rotary: Literal[0] = 0, past_present_share_buffer: Literal[0] = 0, **options,
):  # fmt: skip
    """Attention with a quantized input projection."""
    del do_rotary, past_present_share_buffer
    y = matmul_integer_to_float(input, weight, input_scale, weight_scale, input_zero_point, weight_zero_point, bias)
    return self_attention(jnp.split(y, 3, axis=-1), past, mask=mask_index, **options)


@microsoft("MultiHeadAttention", product=True, limits=f"{_MASKS}; {BUFFER}")
@taking(**OPTIONS)
def multi_head_attention(
    query, key=None, value=None, bias=None, key_padding_mask=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, cache_indirection=None, *, n_outputs=1, **options,
):  # fmt: skip
    """Attention over projected operands, concatenated or separate, appended to the past."""
    if past_key is None and past_value is None and cache_indirection is None:
        past_sequence_length = None  # exporters set it on cross attention too, where no past has a length
    if cache_indirection is not None and past_sequence_length is None:
        raise ValueError("cache_indirection needs past_sequence_length")
    if past_sequence_length is not None and n_outputs > 3:
        past_sequence_length = needs_known(past_sequence_length, "it determines the shape of the output qk")
    if np.ndim(key_padding_mask) > 3:
        raise ValueError(f"key_padding_mask {key_padding_mask.shape} must have rank 1 to 3; add it to attention_bias")
    query = jnp.asarray(query)
    if query.ndim == 5:
        query, key, value = (query[:, :, :, i].reshape(*query.shape[:2], -1) for i in range(3))
    elif key is not None and key.ndim == 5:
        key, value = (jnp.asarray(key)[:, :, :, i].reshape(*key.shape[:2], -1) for i in range(2))
    options |= {"past": (past_key, past_value), "length": past_sequence_length, "beams": cache_indirection}
    options["n_outputs"] = n_outputs
    return split_attention(*with_bias(bias, query, key, value), mask=key_padding_mask, bias=attention_bias, **options)


_WINDOW = "state_window (rollback of states) is unsupported"


def repeat_heads(x, heads, value_heads):
    """[batch, tokens, heads * size] with heads repeated to the number of value heads, if that is larger."""
    if heads >= value_heads:
        return x
    if heads < 1 or value_heads % heads:
        raise ValueError(f"the number of value heads ({value_heads}) must be a multiple of {heads} query or key heads")
    split = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    return jnp.repeat(split, value_heads // heads, axis=2).reshape(*x.shape[:2], value_heads * split.shape[3])


@microsoft("LinearAttention", heavy=True, limits=_WINDOW)
@operands(**dict.fromkeys(("query", "key", "value", "decay", "beta"), "batch tokens *"))
@taking(
    chunk_size=64, scale=0.0, state_window=Literal[0], update_rule=Literal["gated_delta", "linear", "gated", "delta"]
)
def ms_linear_attention(
    query, key, value, past_state=None, decay=None, beta=None, *, kv_num_heads, q_num_heads, state_window=0, **options
):
    """LinearAttention in which several value heads may share a query and key head."""
    del state_window
    check_shapes({}, query=(query, "batch tokens features"), key=(key, "batch tokens key_features"))
    key = repeat_heads(key, key.shape[2] * q_num_heads // max(query.shape[2], 1), kv_num_heads)
    query, heads = repeat_heads(query, q_num_heads, kv_num_heads), max(q_num_heads, kv_num_heads)
    options |= {"kv_num_heads": kv_num_heads, "q_num_heads": heads}
    return linear_attention(query, key, value, past_state, decay, beta, **options)


@microsoft("LinearAttentionGate", half="float32")
@operands(a="batch tokens heads", b="batch tokens heads", dt_bias="heads", decay_scale="heads")
def linear_attention_gate(a, dt_bias, decay_scale, b=None):
    """The inputs decay and beta of LinearAttention, from their projections."""
    decay = decay_scale * jax.nn.softplus(a + dt_bias)
    return decay if b is None else (decay, jax.nn.sigmoid(b))


_PLAIN = dict.fromkeys(("input_channel_offset", "input_channels", "state_length", "state_window"), Literal[0])
_PLAIN |= {"ndim": Literal[1], "state_channels_last": Literal[-1], "state_update_capacity": Literal[0]}
_LIMITS = f"ndim 1; {_WINDOW}, as are channel subsets and other state layouts"


@microsoft("CausalConvWithState", heavy=True, limits=_LIMITS)
@operands(bias="channels")
@taking(activation=Swish, channels_last=Literal[0, 1], dilation=1, **_PLAIN)
def ms_causal_conv_with_state(input, weight, bias=None, past_state=None, *, activation, channels_last, dilation, **_):
    """CausalConvWithState with dilation; channels may be last, and on several axes."""
    if not channels_last:
        return causal_conv(input, weight, bias, past_state, activation, dilation)

    def channels_first(x):
        return None if x is None else xp.moveaxis(x.reshape(*x.shape[:2], math.prod(x.shape[2:])), 2, 1)

    results = causal_conv(channels_first(input), weight, bias, channels_first(past_state), activation, dilation)
    return tuple(xp.moveaxis(y, 1, 2).reshape(y.shape[0], y.shape[2], *input.shape[2:]) for y in results)


@microsoft("RemovePadding", limits="data-dependent output shape: sequence_token_count must be known")
def remove_padding(input, sequence_token_count: Static):
    """(tokens without padding [total, hidden], token positions with padding last, cumulative counts, maximum count)."""
    check_shapes({}, input=(input, "batch tokens hidden"), sequence_token_count=(sequence_token_count, "batch"))
    batch, tokens, hidden = input.shape
    counts = np.asarray(sequence_token_count)
    if ((counts < 0) | (counts > tokens)).any():
        raise ValueError(
            f"sequence_token_count {counts.tolist()} must be between 0 and {tokens}, the extent of the input"
        )
    positions = np.argsort((np.arange(tokens) >= counts[:, None]).reshape(-1), kind="stable").astype(np.int32)
    ends = np.cumsum([0, *counts], dtype=np.int32)
    unpadded = gather(input.reshape(-1, hidden), positions[: ends[-1]])
    return unpadded, positions.reshape(batch, tokens), ends, np.array([counts.max(initial=0)], np.int32)


@microsoft("RestorePadding")
def restore_padding(input, token_offset):
    """[total, hidden] -> [batch, tokens, hidden], with zeros as padding."""
    check_shapes({}, input=(input, "total hidden"), token_offset=(token_offset, "batch tokens"))
    (total, hidden), (batch, tokens) = input.shape, token_offset.shape
    if total > batch * tokens:
        raise ValueError(f"{total} tokens exceed [{batch}, {tokens}], the shape of token_offset")
    positions = token_offset.reshape(-1)[:total]
    return jnp.zeros((batch * tokens, hidden), input.dtype).at[positions].set(input).reshape(batch, tokens, hidden)


def unpadded_attention(q, k, v, token_offset, cumulative_sequence_length, **options):
    """Self-attention per sequence of queries, keys and values [total, hidden]: [total, hidden]."""
    check_shapes({}, query=(q, "total hidden"), key=(k, "total hidden"), value=(v, "total value_hidden"))
    check_shape("cumulative_sequence_length", cumulative_sequence_length, token_offset.shape[0] + 1)
    positions, lengths = token_offset.reshape(-1)[: q.shape[0]], jnp.diff(cumulative_sequence_length)
    q, k, v = (restore_padding(x, token_offset) for x in (q, k, v))
    y, *_ = split_attention(q, k, v, mask=lengths, past=(None, None), **options)
    return gather(y.reshape(-1, y.shape[-1]), positions)


_RIGHT = f"right padding only; {BOUNDS}"


@microsoft("PackedAttention", product=True, limits=_RIGHT)
def packed_attention(
    input, weights, bias, token_offset, cumulative_sequence_length, attention_bias=None,
    *, num_heads, qkv_hidden_sizes=None, scale=None,
):  # fmt: skip
    """Self-attention with an input projection, of tokens without padding."""
    qkv = projected(input[None], weights, bias, qkv_hidden_sizes)
    return unpadded_attention(
        *(x[0] for x in qkv), token_offset, cumulative_sequence_length, bias=attention_bias, num_heads=num_heads,
        scale=scale, mask_filter_value=-np.inf,
    )  # fmt: skip


@microsoft("PackedMultiHeadAttention", product=True, limits=_RIGHT)
@taking(**SHARED)
def packed_multi_head_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, bias: MayBeEmpty, token_offset, cumulative_sequence_length,
    attention_bias=None, **options,
):  # fmt: skip
    """Attention of projected tokens without padding, from concatenated or separate queries, keys and values."""
    if query.ndim == 4:
        query, key, value = (query[:, :, i].reshape(query.shape[0], -1) for i in range(3))
    q, k, v = with_bias(bias, query, key, value)
    return unpadded_attention(q, k, v, token_offset, cumulative_sequence_length, bias=attention_bias, **options)
