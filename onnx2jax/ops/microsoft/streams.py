"""The com.microsoft domain: gates, branchwise normalization, hyper-connections and n-gram hashes."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax

from ..arrays import check_shape, check_shapes, is_known, widen
from ..norm import standardize
from . import microsoft, operands

SIZES = "vocab_sizes below 1 raise if known, and otherwise hash to 0"


def rms_normalized(x, scale, epsilon):
    """x divided by the root mean square of its last axis, times an optional scale, in float32."""
    y = standardize(widen(x), -1, epsilon, center=False)[0]
    return y if scale is None else y * widen(scale)


@microsoft("ScaledSiLU")
def scaled_silu(X, scale=None, *, alpha=1.0):
    """``z * sigmoid(z)`` with ``z = scale * X``, each step rounded to the dtype of X."""
    z = (widen(X) * (alpha if scale is None else widen(scale).reshape(()))).astype(X.dtype)
    return (widen(z) * widen(lax.logistic(widen(jnp.asarray(z))).astype(X.dtype))).astype(X.dtype)


@microsoft("GatedAdd", limits="gate_weight, implemented by CUDA only, is unsupported: compute the gate separately")
def gated_add(X, Y, gate, gate_weight=None):
    """``X + Y * gate`` with one gate per row, the product rounded to the dtype of X."""
    if gate_weight is not None:
        raise NotImplementedError("gate_weight is unsupported: compute the gate as Sigmoid(MatMul(gate, gate_weight))")
    check_shape("Y", Y, *X.shape)
    check_shape("gate", gate, *X.shape[:-1], 1)
    return (widen(X) + widen((widen(Y) * widen(gate)).astype(X.dtype))).astype(X.dtype)


@microsoft("GatedRMSNorm", wide=True)
def gated_rms_norm(X, scale, gate, *, activation: Literal["silu", "swish", "sigmoid"] = "silu", epsilon=1e-5):
    """RMSNormalization of groups of ``scale.size`` elements, times an activated gate."""
    check_shape("gate", gate, *X.shape)
    x, z = X.reshape(*X.shape[:-1], -1, scale.size), widen(jnp.asarray(gate))
    y = rms_normalized(x, scale, epsilon).reshape(X.shape)
    return (y * lax.logistic(z) * (1 if activation == "sigmoid" else z)).astype(X.dtype)


def branches(x, count):
    """[..., C * H] reshaped to [..., C, H] for C branches; unchanged if ``count`` is 0."""
    return x.reshape(*x.shape[:-1], count, -1) if count else x


@microsoft("BranchwiseRMSNorm", wide=True)
def branchwise_rms_norm(X, scale=None, *, epsilon=1e-5, num_branches=0):
    """RMSNormalization of each branch, with a scale [C * H], [C, H] or [H]."""
    x = branches(X, num_branches)
    per_branch = scale is not None and scale.size == x.shape[-2] * x.shape[-1]
    scale = scale.reshape(x.shape[-2:]) if per_branch else scale
    check_shapes(dict(zip("CH", x.shape[-2:], strict=True)), scale=(scale, "C H" if per_branch else "H"))
    return rms_normalized(x, scale, epsilon).reshape(X.shape).astype(X.dtype)


def _mix(mix, streams):
    """A gate [..., C], [..., C, 1], [..., C, H] or [..., C * H], shaped to broadcast against streams [..., C, H]."""
    mix = widen(mix)
    if mix.ndim == streams.ndim - 1:
        mix = mix.reshape(streams.shape) if mix.shape[-1] == streams.shape[-2] * streams.shape[-1] else mix[..., None]
    check_shapes(dict(zip("CH", streams.shape[-2:], strict=True)), mix=(mix.reshape(-1, *mix.shape[-2:]), "rows C H?"))
    return mix


@microsoft("HyperConnectionPreMix")
def hyper_connection_pre_mix(streams, pre_mix, *, num_branches=0, reduction_scale=1.0):
    """The gated sum [..., H] of streams [..., C, H]."""
    x = widen(branches(streams, num_branches))
    return (jnp.sum(x * _mix(pre_mix, x), axis=-2) * reduction_scale).astype(streams.dtype)


@microsoft("HyperConnectionPostMix")
def hyper_connection_post_mix(streams, block_output, post_mix, stream_mix=None, *, num_branches=0):
    """Streams [..., C, H] mixed by stream_mix [..., from, to], plus a block's output times the gates of the streams."""
    x = widen(branches(streams, num_branches))
    check_shape("block_output", block_output, *x.shape[:-2], x.shape[-1])
    mixed = x if stream_mix is None else jnp.einsum("...ck,...ch->...kh", widen(stream_mix), x)
    return (mixed + _mix(post_mix, x) * widen(block_output)[..., None, :]).reshape(streams.shape).astype(streams.dtype)


@microsoft("EngramGate")
@operands(
    key="batch length C H", query="batch length C H", value="batch length H", key_norm_scale="C H",
    query_norm_scale="C H", conv_norm_scale="C H",
)  # fmt: skip
def engram_gate(
    key, query, value, key_norm_scale, query_norm_scale, conv_norm_scale=None, *, epsilon=1e-5, n_outputs=1
):
    """(value gated by the similarity of key and query per hyper-connection, the same normalized)."""
    if n_outputs > 1 and conv_norm_scale is None:
        raise ValueError("the output gated_value_normed requires conv_norm_scale")

    pair = (rms_normalized(x, s, epsilon) for x, s in ((key, key_norm_scale), (query, query_norm_scale)))
    dot = jnp.prod(jnp.stack([*pair]), axis=0).sum(-1, keepdims=True) * key.shape[-1] ** -0.5
    gate = lax.logistic(jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)))
    y = gate * widen(value)[:, :, None]
    outs = (y,) if conv_norm_scale is None else (y, rms_normalized(y, conv_norm_scale, epsilon))
    return tuple(v.astype(key.dtype) for v in outs[:n_outputs])


def ngram_filler(dtype, pad_id, eos_token_id):
    """The id that represents a missing token."""
    return jnp.asarray(pad_id if eos_token_id is None else eos_token_id.reshape(())).astype(dtype)


def ngram_hashes(shifted, cuts, filler, multipliers, vocab_sizes, head_offsets, heads_each):
    """Hashes [..., heads] of ids shifted by 0, 1, 2, ...; ``cuts`` are true where a shift crosses a boundary."""
    reach = len(cuts)
    if reach < 1 or (is_known(vocab_sizes) and vocab_sizes.min(initial=1) < 1):
        raise ValueError(f"max_ngram_size ({reach + 1}) must be at least 2, and vocab_sizes ({vocab_sizes}) positive")
    if multipliers.ndim != 1 or multipliers.shape[0] <= reach:
        raise ValueError(f"multipliers {multipliers.shape} must have at least max_ngram_size ({reach + 1}) elements")
    heads = {"heads": reach * heads_each}
    check_shapes(heads, vocab_sizes=(vocab_sizes, "heads"), head_offsets=(head_offsets, "heads"))
    mix, lost, outs = shifted[0] * multipliers[0], jnp.zeros(shifted[0].shape, bool), []
    for n in range(1, reach + 1):
        lost = lost | cuts[n - 1]
        mix = mix ^ (jnp.where(lost, filler, shifted[n]) * multipliers[n])
        outs += [mix] * heads_each
    hashes = jnp.where(vocab_sizes > 0, jnp.stack(outs, axis=-1) % jnp.maximum(vocab_sizes, 1), 0)
    return hashes if head_offsets is None else hashes + head_offsets


@microsoft("NGramHashMapping", limits=SIZES)
def ngram_hash_mapping(
    input_ids, multipliers, vocab_sizes, past_ids=None, head_offsets=None, eos_token_id=None, segment_ids=None,
    *, max_ngram_size, n_head_per_ngram, pad_id, reset_on_eos=0,
):  # fmt: skip
    """(hashes of the n-grams that end at each token, modulo vocab_sizes [batch, length, heads]; present ids)."""
    reach, ids = max_ngram_size - 1, jnp.asarray(input_ids)
    batch, length = ids.shape
    extents = {"batch": batch, "reach": reach, "length": length}
    check_shapes(extents, past_ids=(past_ids, "batch reach"), segment_ids=(segment_ids, "batch length"))
    filler = ngram_filler(ids.dtype, pad_id, eos_token_id)
    past = jnp.full((batch, max(reach, 0)), filler) if past_ids is None else past_ids
    all_ids = jnp.concatenate([past, ids], axis=1)
    cut = jnp.zeros((batch, reach + length), bool)  # whether a boundary precedes this position
    if reset_on_eos and eos_token_id is not None:
        cut = cut.at[:, 1:].set(all_ids[:, :-1] == filler)
    if segment_ids is not None:
        cut = cut.at[:, reach + 1 :].max(segment_ids[:, 1:] != segment_ids[:, :-1])
    shifted = [all_ids[:, reach - n : reach - n + length] for n in range(max_ngram_size)]
    cuts = [cut[:, reach - n + 1 : reach - n + 1 + length] for n in range(1, max_ngram_size)]
    hashes = ngram_hashes(shifted, cuts, filler, multipliers, vocab_sizes, head_offsets, n_head_per_ngram)
    return hashes, all_ids[:, length:]
