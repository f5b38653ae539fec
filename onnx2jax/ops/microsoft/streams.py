"""The com.microsoft domain: gates, normalization a branch, and streams of hidden states that are mixed."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax

from ..arrays import check_shape, check_shapes, is_known, wide
from ..norm import standardize
from ..registry import op
from .fused import MICROSOFT


def rms_normalized(x, scale, epsilon):
    """x over the root mean square of its last dimension, times a scale if there is one, in float32."""
    y = standardize(wide(x), -1, epsilon, center=False)[0]
    return y if scale is None else y * wide(scale)


@op("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(X, scale=None, *, alpha=1.0):
    """``z * sigmoid(z)`` of ``z = scale * X``, each step rounded to the type of X."""
    z = (wide(X) * (alpha if scale is None else wide(scale).reshape(()))).astype(X.dtype)
    return (wide(z) * wide(lax.logistic(wide(jnp.asarray(z))).astype(X.dtype))).astype(X.dtype)


@op("GatedAdd", domain=MICROSOFT, limits="gate_weight, which only CUDA has, is refused: compute the gate before")
def gated_add(X, Y, gate, gate_weight=None):
    """``X + Y * gate`` with one gate a row, the product rounded to the type of X."""
    if gate_weight is not None:
        raise NotImplementedError("gate_weight is given: compute gate as Sigmoid(MatMul(gate, gate_weight)) before")
    check_shape("Y", Y, *X.shape)
    check_shape("gate", gate, *X.shape[:-1], 1)
    return (wide(X) + wide((wide(Y) * wide(gate)).astype(X.dtype))).astype(X.dtype)


@op("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(X, scale, gate, *, activation: Literal["silu", "swish", "sigmoid"] = "silu", epsilon=1e-5):
    """RMSNormalization of every group of as many elements as the scale has, times an activated gate."""
    check_shape("gate", gate, *X.shape)
    x, z = X.reshape(*X.shape[:-1], -1, scale.size), wide(jnp.asarray(gate))
    y = rms_normalized(x, scale, epsilon).reshape(X.shape)
    return (y * lax.logistic(z) * (1 if activation == "sigmoid" else z)).astype(X.dtype)


def branches(x, count):
    """[..., C * H] as [..., C, H] where it is flat, which is where a count of branches C is given."""
    return x.reshape(*x.shape[:-1], count, -1) if count else x


@op("BranchwiseRMSNorm", domain=MICROSOFT)
def branchwise_rms_norm(X, scale=None, *, epsilon=1e-5, num_branches=0):
    """RMSNormalization of each branch; a scale [C * H], [C, H] or [H]."""
    x = branches(X, num_branches)
    whole = scale is not None and scale.size == x.shape[-2] * x.shape[-1]
    scale = scale.reshape(x.shape[-2:]) if whole else scale
    check_shapes(dict(zip("CH", x.shape[-2:], strict=True)), scale=(scale, "C H" if whole else "H"))
    return rms_normalized(x, scale, epsilon).reshape(X.shape).astype(X.dtype)


def _mix(mix, streams):
    """A gate [..., C], [..., C, 1], [..., C, H] or [..., C * H] against streams [..., C, H]."""
    mix = wide(mix)
    if mix.ndim == streams.ndim - 1:
        mix = mix.reshape(streams.shape) if mix.shape[-1] == streams.shape[-2] * streams.shape[-1] else mix[..., None]
    check_shapes(dict(zip("CH", streams.shape[-2:], strict=True)), mix=(mix.reshape(-1, *mix.shape[-2:]), "rows C H?"))
    return mix


@op("HyperConnectionPreMix", domain=MICROSOFT)
def hyper_connection_pre_mix(streams, pre_mix, *, num_branches=0, reduction_scale=1.0):
    """The sum of streams [..., C, H] by their gates."""
    x = wide(branches(streams, num_branches))
    return (jnp.sum(x * _mix(pre_mix, x), axis=-2) * reduction_scale).astype(streams.dtype)


@op("HyperConnectionPostMix", domain=MICROSOFT)
def hyper_connection_post_mix(streams, block_output, post_mix, stream_mix=None, *, num_branches=0):
    """Streams [..., C, H] mixed by [..., from, to], plus a block's output by the gates of the streams."""
    x = wide(branches(streams, num_branches))
    check_shape("block_output", block_output, *x.shape[:-2], x.shape[-1])
    mixed = x if stream_mix is None else jnp.einsum("...ck,...ch->...kh", wide(stream_mix), x)
    y = mixed + _mix(post_mix, x) * wide(block_output)[..., None, :]
    return y.reshape(streams.shape).astype(streams.dtype)


@op("EngramGate", domain=MICROSOFT)
def engram_gate(
    key, query, value, key_norm_scale, query_norm_scale, conv_norm_scale=None, *, epsilon=1e-5, n_outputs=1
):
    """A value times how well each hyper-connection's key and query agree; and that, normalized."""
    if n_outputs > 1 and conv_norm_scale is None:
        raise ValueError("the output gated_value_normed needs conv_norm_scale")
    scales = {
        "key_norm_scale": key_norm_scale,
        "query_norm_scale": query_norm_scale,
        "conv_norm_scale": conv_norm_scale,
    }
    check_shapes(
        {}, key=(key, "batch length C H"), query=(query, "batch length C H"), value=(value, "batch length H"),
        **{name: (scale, "C H") for name, scale in scales.items()},
    )  # fmt: skip
    pair = (rms_normalized(x, s, epsilon) for x, s in ((key, key_norm_scale), (query, query_norm_scale)))
    dot = jnp.prod(jnp.stack([*pair]), axis=0).sum(-1, keepdims=True) * key.shape[-1] ** -0.5
    gate = lax.logistic(jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)))
    y = gate * wide(value)[:, :, None]
    outs = (y,) if conv_norm_scale is None else (y, rms_normalized(y, conv_norm_scale, epsilon))
    return tuple(v.astype(key.dtype) for v in outs[:n_outputs])


def ngram_filler(dtype, pad_id, eos_token_id):
    """The id that stands where no token is."""
    return jnp.asarray(pad_id if eos_token_id is None else eos_token_id.reshape(())).astype(dtype)


def ngram_hashes(shifted, cuts, filler, multipliers, vocab_sizes, head_offsets, heads_each):
    """Hashes [..., heads] of ids, given as they are and shifted by 1, 2, ...; a cut says that a shift went too far."""
    reach = len(cuts)
    if reach < 1 or (is_known(vocab_sizes) and vocab_sizes.min(initial=1) < 1):
        raise ValueError(f"max_ngram_size ({reach + 1}) must be 2 or more, vocab_sizes ({vocab_sizes}) positive")
    if multipliers.ndim != 1 or multipliers.shape[0] <= reach:
        raise ValueError(f"multipliers {multipliers.shape} must be max_ngram_size ({reach + 1}) numbers, or more")
    heads = {"heads": reach * heads_each}
    check_shapes(heads, vocab_sizes=(vocab_sizes, "heads"), head_offsets=(head_offsets, "heads"))
    mix, lost, outs = shifted[0] * multipliers[0], jnp.zeros(shifted[0].shape, bool), []
    for n in range(1, reach + 1):
        lost = lost | cuts[n - 1]
        mix = mix ^ (jnp.where(lost, filler, shifted[n]) * multipliers[n])
        outs += [mix] * heads_each
    hashes = jnp.where(vocab_sizes > 0, jnp.stack(outs, axis=-1) % jnp.maximum(vocab_sizes, 1), 0)
    return hashes if head_offsets is None else hashes + head_offsets


@op("NGramHashMapping", domain=MICROSOFT)
def ngram_hash_mapping(
    input_ids, multipliers, vocab_sizes, past_ids=None, head_offsets=None, eos_token_id=None, segment_ids=None,
    *, max_ngram_size, n_head_per_ngram, pad_id, reset_on_eos=0,
):  # fmt: skip
    """Hashes of the n-grams that end at each token, modulo the sizes of the heads; the ids to go on from."""
    reach, ids = max_ngram_size - 1, jnp.asarray(input_ids)
    batch, length = ids.shape
    check_shapes(
        {"batch": batch, "reach": reach, "length": length}, past_ids=(past_ids, "batch reach"),
        segment_ids=(segment_ids, "batch length"),
    )  # fmt: skip
    filler = ngram_filler(ids.dtype, pad_id, eos_token_id)
    past = jnp.full((batch, max(reach, 0)), filler) if past_ids is None else past_ids
    every = jnp.concatenate([past, ids], axis=1)
    cut = jnp.zeros((batch, reach + length), bool)  # whether what stands before this place is out of reach
    if reset_on_eos and eos_token_id is not None:
        cut = cut.at[:, 1:].set(every[:, :-1] == filler)
    if segment_ids is not None:
        cut = cut.at[:, reach + 1 :].max(segment_ids[:, 1:] != segment_ids[:, :-1])
    shifted = [every[:, reach - n : reach - n + length] for n in range(max_ngram_size)]
    cuts = [cut[:, reach - n + 1 : reach - n + 1 + length] for n in range(1, max_ngram_size)]
    hashes = ngram_hashes(shifted, cuts, filler, multipliers, vocab_sizes, head_offsets, n_head_per_ngram)
    return hashes, every[:, length:]
