"""The com.microsoft domain: batches without padding, whose tokens are concatenated along one axis."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..arrays import check_shape, check_shapes
from ..indexing import BOUNDS, gather
from ..registry import MayBeEmpty, Static, op, taking
from . import MICROSOFT
from .attention import BIDIRECTIONAL_OPTIONS, projected, split_attention, with_bias


@op("RemovePadding", domain=MICROSOFT, limits="data-dependent output shape: sequence_token_count must be known")
def remove_padding(input, sequence_token_count: Static):
    """(tokens without padding [total, hidden], token positions with padding last, cumulative counts, maximum count)."""
    check_shapes({}, input=(input, "batch tokens hidden"), sequence_token_count=(sequence_token_count, "batch"))
    batch, tokens, hidden = input.shape
    counts = np.asarray(sequence_token_count)
    if ((counts < 0) | (counts > tokens)).any():
        raise ValueError(
            f"sequence_token_count {counts.tolist()} must be between 0 and {tokens}, the extent of the input"
        )
    padding = np.arange(tokens) >= counts[:, None]
    positions = np.argsort(padding.reshape(-1), kind="stable").astype(np.int32)
    ends = np.cumsum([0, *counts], dtype=np.int32)
    unpadded = gather(input.reshape(-1, hidden), positions[: ends[-1]])
    return unpadded, positions.reshape(batch, tokens), ends, np.array([counts.max(initial=0)], np.int32)


@op("RestorePadding", domain=MICROSOFT)
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


@op("PackedAttention", domain=MICROSOFT, product=True, limits=_RIGHT)
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


@op("PackedMultiHeadAttention", domain=MICROSOFT, product=True, limits=_RIGHT)
@taking(**BIDIRECTIONAL_OPTIONS)
def packed_multi_head_attention(
    query, key: MayBeEmpty, value: MayBeEmpty, bias: MayBeEmpty, token_offset, cumulative_sequence_length,
    attention_bias=None, **options,
):  # fmt: skip
    """Attention of projected tokens without padding, from concatenated or separate queries, keys and values."""
    if query.ndim == 4:
        query, key, value = (query[:, :, i].reshape(query.shape[0], -1) for i in range(3))
    q, k, v = with_bias(bias, query, key, value)
    return unpadded_attention(q, k, v, token_offset, cumulative_sequence_length, bias=attention_bias, **options)
