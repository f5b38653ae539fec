"""The com.microsoft domain: mixtures of experts, where a router selects a few networks per token."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import check_shapes, widen
from ..registry import UNSHARDED, op, taking
from . import MICROSOFT
from .quant import Bits, matmul_nbits, unpack
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
    limit = np.inf if swiglu_limit is None else swiglu_limit

    def expert(x, layers):
        gate, up = widen(project(0, x, layers[0])), None
        if joined:
            gate, up = (gate[..., 0::2], gate[..., 1::2]) if swiglu_fusion == 1 else jnp.split(gate, 2, axis=-1)
        elif layers[2][0] is not None:
            up = widen(project(2, x, layers[2]))
        if activation_type == "swiglu":
            gate = jnp.minimum(gate, limit)
            y = gate * jax.nn.sigmoid(activation_alpha * gate) * (jnp.clip(up, -limit, limit) + activation_beta)
        else:
            y = ACTIVATIONS[activation_type](gate) * (1 if up is None else up)
        return widen(project(1, y.astype(x.dtype), layers[1]))

    logits = jnp.asarray(widen(router_probs))
    chosen = experts - 1 - lax.top_k(logits[:, ::-1], k)[1]  # ties select the last, as in onnxruntime
    shares = jax.nn.softmax(logits) if router_weights is None else jnp.asarray(widen(router_weights))
    shares = jnp.take_along_axis(shares, chosen, axis=1)
    shares = shares / shares.sum(axis=1, keepdims=True) if normalize_routing_weights else shares
    if isinstance(tokens, int) and tokens * k < experts and shards.parts == 1:
        own = jax.tree.map(lambda a: a[chosen], layers)
        y = (jax.vmap(jax.vmap(expert, (None, 0)))(x, own) * shares[..., None]).sum(axis=1)
    else:
        choices = np.arange(experts, dtype=chosen.dtype)[:, None, None] == chosen
        operands = choices.any(axis=2), jnp.where(choices, shares, 0).sum(axis=2), layers

        def step(total, one):  # an expert may overflow for tokens that are not its own
            own, share, layers = one
            return total + jnp.where(own[:, None], share[:, None] * expert(x, layers), 0), None

        scan = lambda operands: lax.scan(step, jnp.zeros(x.shape, shares.dtype), operands)[0]  # noqa: E731
        if shards.parts == 1 or experts % shards.parts:
            y = scan(operands)
        else:
            split = jax.tree.map(lambda a: a.reshape(shards.parts, -1, *a.shape[1:]), operands)
            y = jax.vmap(scan)(split).sum(axis=0)
    return y.astype(x.dtype).reshape(input.shape)


_LAYERS = "input router_probs fc1_experts_weights fc1_experts_bias? fc2_experts_weights fc2_experts_bias?"


@op("MoE", domain=MICROSOFT, product=True, limits=_SPARSE)
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
_OWN = dict.fromkeys((f"fc{i}_expert_weight_bits" for i in (1, 2, 3)), Literal[None, 2, 4, 8])


@op(
    "QMoE", domain=MICROSOFT, heavy=True,
    limits=f"integer weights of 2, 4 and 8 bits in the schema's layout; {_SPARSE}; routing weights are normalized "
    "only if requested, whereas onnxruntime's CPU provider always does",
)  # fmt: skip
@taking(*_PACKED.split(), **OPTIONS, **_OWN)
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
