"""The com.microsoft domain: one decoding step with a KV cache."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np

from ..arrays import check_shapes, is_traced
from ..registry import MayBeEmpty, Static, StaticIfKnown, op, taking
from . import MICROSOFT
from .attention import (
    BIDIRECTIONAL_OPTIONS,
    BUFFER,
    check_buffer,
    multi_head_attention,
    projected,
    self_attention,
    split_attention,
)

_KEY_LAYOUT = (
    "a shared key buffer has the layout [batch, heads, max_sequence_length, size] of onnxruntime's CPU provider; its "
    "CUDA provider reorders the keys"
)


def check_step(query, beam_width, cache_indirection):
    """Raise ValueError unless ``query`` is one token and beam_width agrees with cache_indirection."""
    if query.ndim != 3 or query.shape[1] != 1:
        raise ValueError(f"query must be one token [batch, 1, size] (it has {query.shape})")
    given = 1 if cache_indirection is None else dict(enumerate(cache_indirection.shape)).get(1)
    width = given if is_traced(beam_width) else 1 if beam_width is None else int(beam_width.item())
    if width != given:
        raise ValueError(f"beam_width ({width}) must be the second extent of cache_indirection ({given})")


@op("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, product=True, limits=f"{_KEY_LAYOUT}; {BUFFER}")
@taking(**BIDIRECTIONAL_OPTIONS)
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
        if past_sequence_length is not None:
            warn(_KEY_LAYOUT)
    return multi_head_attention(
        query, key, value, bias, mask_index, attention_bias, past_key, past_value, past_sequence_length,
        cache_indirection, n_outputs=n_outputs, **options,
    )  # fmt: skip


@op(
    "DecoderMaskedSelfAttention", domain=MICROSOFT, product=True,
    limits="do_rotary is unsupported; a shared key buffer has the documented layout, interleaved in groups of 16 bytes"
    f"; {BUFFER}",
)  # fmt: skip
@taking(**BIDIRECTIONAL_OPTIONS)
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


@op("DecoderAttention", domain=MICROSOFT, product=True, limits=_MASK)
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
    y, k, v, _ = split_attention(
        q, k, v, num_heads=num_heads, mask=None, past=past, bias=None, scale=None, mask_filter_value=0
    )
    return y.swapaxes(0, 1), k, v


def repeated_ngrams(ids, size):
    """Per n-gram of ``size`` tokens in each row: (whether its prefix equals the row's last tokens, its last token)."""
    rows = ids[:, np.arange(ids.shape[1] - size + 1)[:, None] + np.arange(size)]
    return (rows[..., :-1] == ids[:, None, ids.shape[1] - size + 1 :]).all(-1), rows[..., -1]


@op("NGramRepeatBlock", domain=MICROSOFT)
def ngram_repeat_block(input_ids, scores, *, ngram_size):
    """The scores, -inf for each token that would repeat an n-gram of ``ngram_size`` tokens."""
    check_shapes({}, input_ids=(input_ids, "batch tokens"), scores=(scores, "batch vocabulary"))
    batch, tokens = input_ids.shape
    if ngram_size < 1:
        raise ValueError(f"ngram_size ({ngram_size}) must be 1 or more")
    if tokens < ngram_size:
        return scores
    repeats, last = repeated_ngrams(input_ids, ngram_size)
    return jnp.asarray(scores).at[np.arange(batch)[:, None], last].min(jnp.where(repeats, -np.inf, np.inf))
