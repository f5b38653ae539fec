"""The com.microsoft domain: fused parts of a decoder block: experts, gates, routers, adapters, rotary embedding."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shape, check_shapes, widen
from ..attention import check_paired
from ..indexing import BOUNDS, gather
from ..linalg import product
from ..registry import UNSHARDED, taking
from . import microsoft, operands
from .quant import Bits, matmul_nbits, unpack
from .streams import branches, rms_normalized
from .weights import linear

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu, "identity": jnp.asarray}
OPTIONS = {
    "activation_alpha": 1.0, "activation_beta": 0.0, "k": 1, "normalize_routing_weights": 0, "swiglu_limit": None,
    "activation_type": Literal["relu", "gelu", "silu", "swiglu", "identity"], "swiglu_fusion": Literal[0, 1, 2],
    "swiglu_limit_after_activation": Literal[0], "use_sparse_mixer": Literal[0],
}  # fmt: skip
_SPARSE = (
    "use_sparse_mixer, which onnxruntime's CPU provider ignores, and swiglu_limit_after_activation are unsupported"
)


def gated(gate, up, dtype, alpha, beta, limit, rounded=False):
    """``gate * sigmoid(alpha * gate) * (up + beta)`` in ``dtype``; a limit clips gate and up."""
    gate, up = widen(jnp.asarray(gate)), widen(jnp.asarray(up))
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    y = gate * jax.nn.sigmoid(alpha * gate)
    return ((widen(y.astype(dtype)) if rounded else y) * (up + beta)).astype(dtype)


def mixture(
    input, router_probs, router_weights, layers, project, *, activation_alpha, activation_beta, activation_type, k,
    normalize_routing_weights, swiglu_fusion, swiglu_limit, shards=UNSHARDED, **_,
):  # fmt: skip
    """The sum of each token's top k experts, weighted by the router's softmax or by router_weights.

    Few tokens gather their experts' weights; many tokens are computed by all experts in a scan. With ``shards`` each
    device computes its own experts, followed by one sum over devices.
    """
    x, layers = jnp.asarray(input).reshape(-1, input.shape[-1]), jax.tree.map(jnp.asarray, layers)
    probs, weights = (router_probs, "tokens experts"), (router_weights, "tokens experts")
    check_shapes({"tokens": x.shape[0]}, router_probs=probs, router_weights=weights)
    (tokens, experts), joined = router_probs.shape, activation_type == "swiglu" and swiglu_fusion > 0
    lengths = [len(a) for a in jax.tree.leaves(layers)]
    if not 0 < k <= experts or {*lengths} != {experts}:
        raise ValueError(f"router_probs has {experts} experts, weights and biases have {lengths}, and k is {k}")
    if activation_type == "swiglu" and joined == (layers[2][0] is not None):
        raise ValueError("swiglu requires either fc3_experts_weights or swiglu_fusion 1 or 2")

    def expert(x, layers):
        gate, up = widen(project(0, x, layers[0])), None
        if joined:
            gate, up = (gate[..., 0::2], gate[..., 1::2]) if swiglu_fusion == 1 else jnp.split(gate, 2, axis=-1)
        elif layers[2][0] is not None:
            up = widen(project(2, x, layers[2]))
        if activation_type == "swiglu":
            y = gated(gate, up, x.dtype, activation_alpha, activation_beta, swiglu_limit)
        else:
            y = (ACTIVATIONS[activation_type](gate) * (1 if up is None else up)).astype(x.dtype)
        return widen(project(1, y, layers[1]))

    logits = jnp.asarray(widen(router_probs))
    chosen = experts - 1 - lax.top_k(logits[:, ::-1], k)[1]  # ties select the last, as in onnxruntime
    shares = jax.nn.softmax(logits) if router_weights is None else jnp.asarray(widen(router_weights))
    shares = jnp.take_along_axis(shares, chosen, axis=1)
    shares = shares / shares.sum(axis=1, keepdims=True) if normalize_routing_weights else shares
    if isinstance(tokens, int) and tokens * k < experts and shards.parts == 1:
        selected = jax.tree.map(lambda a: a[chosen], layers)
        y = (jax.vmap(jax.vmap(expert, (None, 0)))(x, selected) * shares[..., None]).sum(axis=1)
    else:
        choices = np.arange(experts, dtype=chosen.dtype)[:, None, None] == chosen
        operands = choices.any(axis=2), jnp.where(choices, shares, 0).sum(axis=2), layers

        def step(total, one):  # an expert may overflow for tokens that are not its own
            selected, share, layers = one
            return total + jnp.where(selected[:, None], share[:, None] * expert(x, layers), 0), None

        scan = lambda operands: lax.scan(step, jnp.zeros(x.shape, shares.dtype), operands)[0]  # noqa: E731
        if shards.parts == 1 or experts % shards.parts:
            y = scan(operands)
        else:
            split = jax.tree.map(lambda a: a.reshape(shards.parts, -1, *a.shape[1:]), operands)
            y = jax.vmap(scan)(split).sum(axis=0)
    return y.astype(x.dtype).reshape(input.shape)


_ROWS = "rows width|batch tokens width"
_LAYERS = "input router_probs fc1_experts_weights fc1_experts_bias? fc2_experts_weights fc2_experts_bias?"


@microsoft("MoE", product=True, limits=_SPARSE)
@operands(input=_ROWS)
@taking(*_LAYERS.split(), "fc3_experts_weights?", "fc3_experts_bias?", **OPTIONS)
def moe(*inputs, shards=UNSHARDED, **options):
    """A mixture of experts: per token the sum of its top k experts, networks of two or three layers."""
    x, router, *layers = (*inputs, *[None] * 6)[:8]
    pairs = [(layers[i], layers[i + 1]) for i in (0, 2, 4)]
    return mixture(x, router, None, pairs, lambda _, x, layer: linear(x, *layer), shards=shards, **options)


_PACKED = (
    "input router_probs fc1_experts_weights fc1_scales? fc1_experts_bias? fc2_experts_weights fc2_scales? "
    "fc2_experts_bias? fc3_experts_weights? fc3_scales? fc3_experts_bias? fc1_zero_points? fc2_zero_points? "
    "fc3_zero_points? router_weights? fc1_global_scale? fc2_global_scale? fc1_act_scale? fc2_act_scale? "
    "fc1_act_block_scale? fc2_act_block_scale?"
)
_WEIGHT_BITS = dict.fromkeys((f"fc{i}_expert_weight_bits" for i in (1, 2, 3)), Literal[None, 2, 4, 8])


@microsoft(
    "QMoE", heavy=True,
    limits=f"integer weights of 2, 4 and 8 bits in the schema's layout; {_SPARSE}; routing weights are normalized "
    "only if requested, whereas onnxruntime's CPU provider always does",
)  # fmt: skip
@operands(input=_ROWS)
@taking(*_PACKED.split(), **OPTIONS, **_WEIGHT_BITS)
def qmoe(
    *inputs, accuracy_level=0, block_size=None, expert_weight_bits: Bits = 4, quant_type: Literal["int"] = "int",
    weights_prepacked: Literal[-1, 0] = -1, warn=None, shards=UNSHARDED, **options,
):  # fmt: skip
    """MoE with packed integer weights and one scale per row or per block."""
    del accuracy_level, quant_type, weights_prepacked  # accuracy_level only permits lower precision
    x, router, *rest = (*inputs, *[None] * 20)[:21]
    if any(scale is not None for scale in rest[13:]):
        raise NotImplementedError("global and activation scales are for quant_type fp4 and fp8, which is unsupported")
    if warn and rest[12] is None and not options["normalize_routing_weights"]:
        warn("routing weights are not normalized, as normalize_routing_weights=0 says; onnxruntime's CPU provider does")

    def project(i, x, layer):
        (weight, scale, bias, zero_point), bits = layer, options[f"fc{i + 1}_expert_weight_bits"] or expert_weight_bits
        size, name = weight.shape[1] * 8 // bits, f"fc{i + 1}"
        if x.shape[-1] != size:
            raise ValueError(f"{name}_experts_weights have rows of {size} {bits}-bit values, the input {x.shape[-1]}")
        if scale is None or (block_size and size % block_size):
            raise ValueError(
                f"{name}_scales must be given, one per block_size ({block_size}), which must divide {size}"
            )
        blocks, axes = size // block_size if block_size else len(weight), "rows " if block_size else ""
        shapes = {f"{name}_scales": (scale, f"{axes}blocks"), f"{name}_experts_bias": (bias, "rows")}
        shapes[f"{name}_zero_points"] = zero_point, f"{axes}bytes"  # per expert
        check_shapes({"rows": len(weight), "blocks": blocks, "bytes": -(-blocks * bits // 8)}, **shapes)
        if zero_point is not None and not block_size:  # one per row, packed
            zero_point = unpack(zero_point, bits)[: len(weight)].astype(np.float32)
        sizes = {"K": size, "N": len(weight), "bits": bits, "block_size": block_size or size}
        return matmul_nbits(x, weight, scale, zero_point, None, bias, **sizes)

    layers = [(*rest[3 * i : 3 * i + 3], rest[9 + i]) for i in range(3)]
    return mixture(x, router, rest[12], layers, project, shards=shards, **options)


@microsoft("SwiGLU")
def swi_glu(gate, up=None, *, activation_alpha=1.0, activation_beta=0.0, limit=0.0, round_activation=0):
    """SwiGLU of two tensors, or of the two halves of one along its last axis."""
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"the last extent of gate {gate.shape} must be even, because up is absent")
    a, b = jnp.split(jnp.asarray(gate), 2, axis=-1) if up is None else (gate, up)
    check_shape("up, which does not broadcast,", b, *a.shape)
    return gated(a, b, gate.dtype, activation_alpha, activation_beta, limit if limit > 0 else None, round_activation)


@microsoft("RouterGateUpProj", product=True, limits="activation: swiglu, the only one defined")
def router_gate_up_proj(
    X, W, *, activation: Literal["swiglu"] = "swiglu", activation_alpha=1.0, activation_beta=0.0, limit=0.0, router_size
):
    """(router logits, gated projection) of one product, whose columns are the router, the gate and up projections."""
    del activation
    rest = W.shape[-1] - router_size
    if router_size < 0 or rest < 0 or rest % 2:
        raise ValueError(f"W {W.shape} must have router_size ({router_size}) columns plus an even number")
    router, gate, up = jnp.split(linear(X, W.T, None), [router_size, router_size + rest // 2], axis=-1)
    return router, gated(gate, up, X.dtype, activation_alpha, activation_beta, limit if limit > 0 else None)


@microsoft("MatMulNBitsQLoRA", heavy=True)
def matmul_nbits_qlora(
    X, W, scales, lora_A, lora_A_scales, lora_B, lora_B_scales,
    *, K, N, accuracy_level=0, bits: Bits = 4, block_size=32, lora_bits: Bits = 8, lora_block_size=32,
):  # fmt: skip
    """MatMulNBits plus a quantized LoRA adapter; an empty adapter adds zero."""
    base = matmul_nbits(X, W, scales, K=K, N=N, accuracy_level=accuracy_level, bits=bits, block_size=block_size)
    if lora_B.size == 0:
        return base
    blocks = -(-K // lora_block_size)
    if lora_A_scales.size == 0 or lora_A_scales.size % blocks:
        raise ValueError(f"lora_A_scales {lora_A_scales.shape} must have {blocks} scales per row of lora_A")
    rank, layout = lora_A_scales.size // blocks, {"bits": lora_bits, "block_size": lora_block_size}
    down = jnp.zeros((*X.shape[:-1], rank), X.dtype)
    if lora_A.size:
        down = matmul_nbits(X, lora_A, lora_A_scales, K=K, N=rank, accuracy_level=accuracy_level, **layout)
    return base + matmul_nbits(down, lora_B, lora_B_scales, K=rank, N=N, **layout)


def _top_mask(scores, count):
    """A mask of the ``count`` greatest elements along the last axis; ties are broken by index."""
    return (lax.top_k(scores, count)[1][..., None] == np.arange(scores.shape[-1], dtype=np.int32)).any(-2)


@microsoft("MoEGroupRouter")
def moe_group_router(
    logits, expert_bias, projection_weight=None,
    *, group_topk=2, n_group=1, router_sentinel=-10000.0, top_k, topk_group=1, n_outputs=1,
):  # fmt: skip
    """(log scores of the top experts in the top groups, biased scores of all experts, scores of all experts)."""
    dtype, x = logits.dtype, jnp.asarray(logits).reshape(-1, logits.shape[-1])
    if projection_weight is not None:
        if n_outputs < 2:
            raise ValueError("projection_weight requires the outputs selection_scores and router_weights")
        check_shapes({}, logits=(logits, "tokens width"), projection_weight=(projection_weight, "experts width"))
        x = product(x, projection_weight.T, accumulator(dtype))
    experts, score = x.shape[1], jax.nn.sigmoid(widen(x))
    check_shapes({"experts": experts}, expert_bias=(expert_bias, "experts"))
    counts = {"top_k": (top_k, experts), "topk_group": (topk_group, n_group), "n_group": (n_group, experts)}
    if any(not 0 < n <= most for n, most in counts.values()) or experts % n_group or group_topk < 1:
        bounds = ", ".join(f"{name} ({n}) from 1 to {most}" for name, (n, most) in counts.items())
        raise ValueError(
            f"{bounds}, group_topk ({group_topk}) at least 1 are required, and n_group must divide {experts} experts"
        )
    if n_outputs > 1 and (n_group, topk_group) != (1, 1):
        raise ValueError(f"outputs 2 and 3 require n_group ({n_group}) and topk_group ({topk_group}) to be 1")
    biased = score + expert_bias.astype(score.dtype)
    groups = biased.reshape(-1, n_group, experts // n_group)
    group_scores = lax.top_k(groups, min(group_topk, experts // n_group))[0].sum(-1)
    in_group = jnp.repeat(_top_mask(group_scores, topk_group), experts // n_group, axis=-1)
    selected = in_group & _top_mask(jnp.where(in_group, biased, -np.inf), top_k)
    routed = jnp.where(selected, jnp.log(jnp.maximum(score, 1e-20)), router_sentinel).astype(dtype)
    return (routed, biased.astype(np.float32), score.astype(np.float32))[:n_outputs]


_FLAT = "flatten_batch with one base position for several sequences is unsupported, because the schema is ambiguous"


@microsoft("RMSNormRotary", limits=f"{_FLAT}; {BOUNDS}")
def rms_norm_rotary(
    X, scale, position_ids, cosine, sine, prefill_numerics=None,
    *, epsilon=1e-6, flatten_batch=0, input_start=0, input_width=0, output_fp16=0, rotary_embedding_dim,
    use_fp32_arithmetic=1, n_outputs=1,
):  # fmt: skip
    """RMSNormalization of a slice of the last axis of X [batch, tokens, heads, size], then rotary embedding.

    If everything is bfloat16, the normalized values are rounded, and without fp32 arithmetic each step of the rotation.
    """
    width, rotated = input_width or X.shape[-1] - input_start, rotary_embedding_dim
    if not 0 <= input_start <= X.shape[-1] - width or not 0 < rotated <= width or rotated % 2:
        raise ValueError(
            f"input_start ({input_start}) and input_width ({width}) must select a slice of the last axis of X "
            f"{X.shape}, and rotary_embedding_dim ({rotated}) must be even and not exceed it"
        )
    check_shapes(
        {"width": width, "angles": rotated // 2}, X=(X, "batch tokens heads size"), scale=(scale, "width"),
        cosine=(cosine, "positions angles"), sine=(sine, "positions angles"),
    )  # fmt: skip
    batch, tokens, heads, _ = X.shape
    at = jnp.asarray(position_ids)
    if at.size == 1:
        if flatten_batch and batch > 1:
            raise NotImplementedError(f"{_FLAT}; use position_ids [{batch}, {tokens}]")
        at = jnp.broadcast_to(at.reshape(1, 1) + np.arange(tokens), (batch, tokens))
    check_shape("position_ids", at, batch, tokens)
    dtype = np.dtype(np.float16) if output_fp16 else np.dtype(ml_dtypes.bfloat16)
    exact = X.dtype == np.float16 or output_fp16 or cosine.dtype == np.float32
    step = lambda x: x if exact else widen(x.astype(ml_dtypes.bfloat16))  # noqa: E731
    y = step(rms_normalized(jnp.asarray(X)[..., input_start : input_start + width], scale, epsilon))
    cos, sin = (widen(gather(jnp.asarray(table), at))[:, :, None] for table in (cosine, sine))
    a, b, rest = jnp.split(y, [rotated // 2, rotated], axis=-1)

    def rotation(round_):
        return round_(a * cos) - round_(b * sin), round_(a * sin) + round_(b * cos)

    in_fp32, rounded = jnp.concatenate(rotation(lambda x: x), -1), jnp.concatenate(rotation(step), -1)
    prefill = False if prefill_numerics is None else prefill_numerics.reshape(()) != 0
    pair = jnp.where(prefill | (not use_fp32_arithmetic), rounded, in_fp32)
    lead = (1, batch * tokens) if flatten_batch else (batch, tokens)
    full = jnp.concatenate([pair, rest], axis=-1).astype(dtype).reshape(*lead, heads * width)
    return (full, y.astype(np.float32))[:n_outputs]


@microsoft("HyperConnectionLowRankMix", product=True)
def hyper_connection_low_rank_mix(
    streams, norm_scale, down_weight, up_weight, inject_weight, prev_block_output=None, prev_post_gate=None,
    *, epsilon=1e-5, gate_div=1.0, gate_mul=1.0, num_branches, reduction_scale=1.0, silu_alpha=1.0, n_outputs=2,
):  # fmt: skip
    """(mixed input of the next block, its gate, updated streams): streams [..., C * H] mixed by low-rank gates."""
    check_paired(prev_block_output=prev_block_output, prev_post_gate=prev_post_gate)
    if gate_div == 0 or num_branches < 1 or streams.shape[-1] % num_branches:
        raise ValueError(
            f"num_branches ({num_branches}) must divide the last extent of {streams.shape}, and gate_div must not be 0"
        )
    extents = {"width": streams.shape[-1], "C": num_branches, "H": streams.shape[-1] // num_branches}
    flat = lambda x: None if x is None else x.reshape(-1, x.shape[-1])  # noqa: E731
    check_shapes(
        extents, streams=(flat(streams), "tokens width"), norm_scale=(norm_scale, "width"),
        down_weight=(down_weight, "width R"), up_weight=(up_weight, "R width"),
        inject_weight=(inject_weight, "width C"),
        prev_block_output=(flat(prev_block_output), "tokens H"), prev_post_gate=(flat(prev_post_gate), "tokens C"),
    )  # fmt: skip
    step = lambda x: x.astype(streams.dtype)  # noqa: E731
    sigmoid = lambda x: step(jax.nn.sigmoid(widen(x)))  # noqa: E731
    times = lambda x, w: step(product(x, w, accumulator(x.dtype)))  # noqa: E731
    s = branches(jnp.asarray(streams), num_branches)
    if prev_block_output is not None:
        s = step(widen(s) + widen(prev_post_gate)[..., None] * widen(prev_block_output)[..., None, :])
    normed = step(rms_normalized(s, norm_scale.reshape(s.shape[-2:]), epsilon))
    joined = normed.reshape(streams.shape)
    z = step(silu_alpha * widen(times(joined, down_weight)))
    gate = branches(sigmoid(times(step(widen(z) * widen(sigmoid(z))), up_weight)), num_branches)
    y = step(reduction_scale * (widen(normed) * widen(gate)).sum(-2))
    inject = sigmoid(step(widen(times(joined, inject_weight)) / gate_div))
    return (y, step(widen(inject) * gate_mul), s.reshape(streams.shape))[:n_outputs]


@microsoft("PackedSparseAttentionIndexerMerge")
@operands(
    base_indices="rows columns", base_counts="rows", base_row_indices="queries", range_starts="queries",
    range_ends="queries", additional_indices="queries more", additional_counts="queries",
)  # fmt: skip
def packed_sparse_attention_indexer_merge(
    base_indices, base_counts, base_row_indices, range_starts=None, range_ends=None, additional_indices=None,
    additional_counts=None, *, max_output_entries, policy_mode: Literal["append_range", "append_indices"],
):  # fmt: skip
    """(unique indices [queries, entries] padded with -1, counts, status): a row's indices plus additional ones.

    Indices keep the order of first occurrence. The status is 1 for invalid counts, rows, ranges or indices, and 2 if
    the entries do not suffice.
    """
    pairs = {"append_range": (range_starts, range_ends), "append_indices": (additional_indices, additional_counts)}
    required = pairs.pop(policy_mode)
    if any(x is None for x in required) or any(x is not None for pair in pairs.values() for x in pair):
        raise ValueError(
            f"policy_mode {policy_mode!r} requires both of its inputs, and excludes those of the other mode"
        )

    iota = lambda n: lax.iota(np.int32, n)  # noqa: E731
    row, (rows, columns) = jnp.asarray(base_row_indices), base_indices.shape
    if rows == 0:
        raise ValueError("base_indices has no rows")
    invalid, row = (row < 0) | (row >= rows), jnp.clip(row, 0, rows - 1)
    counts, base = jnp.asarray(base_counts)[row], jnp.asarray(base_indices)[row]
    valid = iota(columns) < counts[:, None]
    invalid |= (counts < 0) | (counts > columns)
    full = jnp.zeros(row.shape, bool)
    if policy_mode == "append_range":
        first, end = (jnp.asarray(x) for x in required)
        added = first[:, None] + iota(max_output_entries)
        added_valid = (added < end[:, None]) & (added >= first[:, None])
        invalid, full = invalid | (first < 0) | (end < first), end - first > max_output_entries
    else:
        added, number = (jnp.asarray(x) for x in required)
        added_valid = iota(added.shape[1]) < number[:, None]
        invalid |= (number < 0) | (number > added.shape[1])
    indices, valid = jnp.concatenate([base, added], axis=1), jnp.concatenate([valid, added_valid], axis=1)
    invalid |= (valid & (indices < 0)).any(1)
    key = jnp.where(valid, indices, -1)
    order = jnp.argsort(key, axis=1, stable=True)
    ranked = jnp.take_along_axis(key, order, axis=1)
    new = jnp.concatenate([ranked[:, :1] >= 0, (ranked[:, 1:] != ranked[:, :-1]) & (ranked[:, 1:] >= 0)], axis=1)
    query = iota(row.shape[0])[:, None]
    new = jnp.zeros(new.shape, bool).at[query, order].set(new)
    count = new.sum(1, dtype=np.int32)
    status = jnp.where(invalid, 1, jnp.where(full | (count > max_output_entries), 2, 0)).astype(np.int32)
    ok = status == 0
    at = jnp.where(new & ok[:, None], jnp.cumsum(new, axis=1, dtype=np.int32) - 1, max_output_entries)
    merged = jnp.full((row.shape[0], max_output_entries), -1, np.int32).at[query, at].set(indices, mode="drop")
    return merged, jnp.where(ok, count, 0), status
