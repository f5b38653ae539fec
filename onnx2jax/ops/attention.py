"""Attention: scaled dot product, flexible, linear; and what goes before it: rotation, causal convolution."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..proto.dtypes import to_dtype
from .activation import softmax
from .arrays import xp
from .registry import op

_PRECISIONS = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE, BFLOAT16


def _wide(dtype):
    """The type to accumulate in: float32 for the half-width types."""
    return np.dtype(dtype) if np.dtype(dtype).itemsize >= 4 else np.dtype(np.float32)


def _precision(code, default):
    if code is not None and code not in _PRECISIONS:
        raise ValueError(f"softmax_precision ({code}) must be one of the floating types {_PRECISIONS}")
    return default if code is None else to_dtype(code)


def _grouped(q_heads, kv_heads):
    """How many query heads share one head of keys and values."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"query heads ({q_heads}) must be a multiple of key/value heads ({kv_heads})")
    return q_heads // kv_heads


def _split_heads(x, heads, name):
    """[batch, sequence, heads * size] -> [batch, heads, sequence, size]; a rank-4 tensor is that already."""
    if x.ndim == 4:
        if heads not in (None, x.shape[1]):
            raise ValueError(f"{name} has {x.shape[1]} heads, the attribute says {heads}: leave it off for rank 4")
        return x
    if x.ndim != 3 or not heads:
        raise ValueError(f"{name} must have rank 4, or rank 3 with q_num_heads and kv_num_heads (rank {x.ndim})")
    if x.shape[2] % heads:
        raise ValueError(f"the last extent of {name} ({x.shape[2]}) must be a multiple of its heads ({heads})")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _check_shapes(query, key, value):
    (batch, _, _, size), (_, heads, length, _) = query.shape, key.shape
    if key.shape != (batch, heads, length, size) or value.shape[:3] != (batch, heads, length):
        raise ValueError(
            f"Q {query.shape}, K {key.shape}, V {value.shape}, as [batch, heads, length, size], must agree in batch, "
            f"Q and K in size, K and V in heads and length"
        )


def _merge_heads(x):
    batch, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


def _scores(query, key, scale):
    """scale * Q K^T as [batch, query heads, queries, keys]; heads of a group share their keys without copies."""
    batch, heads, length, size = query.shape
    group = _grouped(heads, key.shape[1])
    scale = 1 / math.sqrt(size) if scale is None else scale
    if scale < 0:
        raise ValueError(f"scale ({scale}) must not be negative: its square root scales Q and K")
    if query.dtype == np.float16:  # halves overflow early: both sides take the root, as the specification has it
        query, key = (x * np.float16(math.sqrt(scale)) for x in (query, key))
    else:
        query = query * query.dtype.type(scale)
    query = query.reshape(batch, key.shape[1], group, length, size)
    product = jnp.einsum("bhgqd,bhkd->bhgqk", query, key, preferred_element_type=_wide(query.dtype))
    return product.astype(query.dtype).reshape(batch, heads, length, key.shape[2])


def _weigh(weights, value):
    """weights @ V over [batch, query heads, queries, keys]."""
    batch, heads, length, keys = weights.shape
    weights = weights.reshape(batch, value.shape[1], _grouped(heads, value.shape[1]), length, keys)
    return jnp.einsum("bhgqk,bhkd->bhgqd", weights, value).reshape(batch, heads, length, value.shape[3])


def _softmax(scores):
    """Softmax over the last axis in which a row of -inf (nothing to attend to) becomes zeros, not NaN."""
    empty = jnp.isneginf(jnp.max(scores, axis=-1, keepdims=True, initial=-np.inf))
    return jnp.where(empty, 0, softmax(jnp.where(empty, 0, scores), axes=(scores.ndim - 1,)))


def _window(queries, keys, offset, left, right):
    """Masks of the keys within [position - left, position + right] of each query; a negative side is unbounded."""
    position = lax.broadcasted_iota(np.int64, (queries, keys), 0) + offset
    distance = position - lax.broadcasted_iota(np.int64, (queries, keys), 1)
    return ([distance <= left] if left >= 0 else []) + ([distance >= -right] if right >= 0 else [])


@op("Attention", since=23, heavy=True)
def attention(
    Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *,
    is_causal=0, kv_num_heads=None, left_window_size=-1, q_num_heads=None, qk_matmul_output_mode=0,
    right_window_size=-1, scale=None, softcap=0.0, softmax_precision=None, opset,
):  # fmt: skip
    """Scaled dot product attention; a query that may attend to nothing yields zeros."""
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value must be given together")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise ValueError("nonpad_kv_seqlen is for a cache kept outside: leave off past_key and past_value")
    if min(left_window_size, right_window_size) < -1:
        raise ValueError(f"window sizes ({left_window_size}, {right_window_size}) must be -1 or more")
    if qk_matmul_output_mode not in range(4):
        raise ValueError(f"qk_matmul_output_mode ({qk_matmul_output_mode}) must be 0, 1, 2 or 3")

    query = _split_heads(Q, q_num_heads, "Q")
    key, value = _split_heads(K, kv_num_heads, "K"), _split_heads(V, kv_num_heads, "V")
    if past_key is not None:
        key, value = jnp.concatenate([past_key, key], 2), jnp.concatenate([past_value, value], 2)
    _check_shapes(query, key, value)
    keys = key.shape[2]

    allowed = []
    offset = 0 if past_key is None else past_key.shape[2]
    if nonpad_kv_seqlen is not None:
        lengths = nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
        allowed.append(lax.broadcasted_iota(np.int64, (1, 1, 1, keys), 3) < lengths)
        offset = lengths - query.shape[2]
    allowed += _window(query.shape[2], keys, offset, left_window_size, 0 if is_causal else right_window_size)

    if attn_mask is not None:
        # Since opset 24 a mask may end early; before, an extent of 1 broadcasts.
        if opset >= 24 and attn_mask.shape[-1] != keys:
            padding = [(0, 0)] * (attn_mask.ndim - 1) + [(0, keys - attn_mask.shape[-1])]
            attn_mask = jnp.pad(attn_mask, padding, constant_values=False if attn_mask.dtype == bool else -np.inf)
        if attn_mask.dtype == bool:
            allowed.append(attn_mask)
            attn_mask = None
        else:
            attn_mask = jnp.asarray(attn_mask).astype(Q.dtype)
            allowed.append(attn_mask != -np.inf)

    raw = _scores(query, key, scale)
    capped = jnp.tanh(raw / softcap) * softcap if softcap > 0 else raw
    scores = capped if attn_mask is None else capped + attn_mask
    for mask in allowed:
        scores = jnp.where(mask, scores, -np.inf)
    if scores.shape != raw.shape:
        raise ValueError(f"attn_mask must broadcast to [batch, heads, queries, keys] {raw.shape}")
    weights = _softmax(scores.astype(_precision(softmax_precision, scores.dtype))).astype(Q.dtype)
    output = _weigh(weights, value.astype(Q.dtype))
    shown = (raw, capped, scores, weights)[qk_matmul_output_mode]
    return output if Q.ndim == 4 else _merge_heads(output), key, value, shown


@op("FlexAttention", domain="ai.onnx.preview", heavy=True)
def flex_attention(Q, K, V, *, prob_mod=None, scale=None, score_mod=None, softmax_precision=None):
    """Attention whose scores and probabilities pass through the node's own subgraphs."""
    if not Q.ndim == K.ndim == V.ndim == 4:
        raise ValueError(f"Q, K and V must have rank 4 (ranks {Q.ndim}, {K.ndim}, {V.ndim})")
    _check_shapes(Q, K, V)
    precision = _precision(softmax_precision, _wide(Q.dtype))

    def modified(body, x, name):
        if body is None:
            return x
        (result,) = body(x)
        if result.shape != x.shape or result.dtype != x.dtype:
            raise ValueError(
                f"{name} must keep shape and type: {x.dtype}{x.shape} went in, {result.dtype}{result.shape} came out"
            )
        return result

    scores = modified(score_mod, _scores(Q, K, scale).astype(precision), "score_mod")
    weights = jax.nn.softmax(jnp.asarray(scores, _wide(precision)), axis=-1).astype(precision)
    weights = modified(prob_mod, weights, "prob_mod")
    return _weigh(weights, V.astype(precision)).astype(V.dtype)


_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


@op("LinearAttention", since=27, heavy=True)
def linear_attention(
    query, key, value, past_state=None, decay=None, beta=None, *,
    chunk_size=64, kv_num_heads, q_num_heads, scale=0.0, update_rule="gated_delta",
):  # fmt: skip
    """A state of outer products k v^T that decays, is corrected and is read once a token."""
    if update_rule not in _RULES:
        raise ValueError(f"update_rule ({update_rule!r}) must be one of {sorted(_RULES)}")
    for name, given, wanted in zip(("decay", "beta"), (decay, beta), _RULES[update_rule], strict=True):
        if (given is not None) != wanted:
            raise ValueError(f"update_rule {update_rule!r} {'needs' if wanted else 'takes no'} input {name}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be 1 or more")
    if not query.ndim == key.ndim == value.ndim == 3:
        raise ValueError(f"query, key and value must have rank 3 ({query.ndim}, {key.ndim}, {value.ndim})")
    group = _grouped(q_num_heads, kv_num_heads)
    wide = _wide(query.dtype)

    def per_token(x, name, heads=kv_num_heads):
        """[batch, tokens, heads * size] -> [tokens, batch, heads, size] for the scan."""
        return jnp.moveaxis(_split_heads(x, heads, name), 2, 0).astype(wide)

    q, k, v = per_token(query, "query", q_num_heads), per_token(key, "key"), per_token(value, "value")
    batch, _, d_k = q.shape[1:]
    if k.shape[3] != d_k:
        raise ValueError(f"query heads have size {d_k}, key heads {k.shape[3]}: they must agree")
    g = None if decay is None else jnp.exp(per_token(decay, "decay"))
    b = None if beta is None else per_token(beta, "beta", beta.shape[2])
    scale = 1 / math.sqrt(d_k) if scale == 0 else scale

    def step(state, token):
        q, k, v, g, b = token
        if g is not None:
            state = state * g[..., None]
        if b is not None:
            v = b * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * v[..., None, :]
        q = q.reshape(batch, kv_num_heads, group, d_k)
        return state, jnp.einsum("bhgk,bhkv->bhgv", q, state)

    kind = query.dtype if past_state is None else past_state.dtype
    start = (batch, kv_num_heads, d_k, v.shape[3])
    if past_state is not None and past_state.shape != start:
        raise ValueError(f"past_state must have shape {start} ({past_state.shape})")
    state = jnp.zeros(start, wide) if past_state is None else past_state.astype(wide)
    # Tokens are taken one by one; a few of a chunk share a trip of the loop, unless their number is symbolic.
    unroll = min(chunk_size, 4) if isinstance(q.shape[0], int) else 1
    state, read = lax.scan(step, state, (q, k, v, g, b), unroll=unroll)
    read = jnp.moveaxis(read, 0, 1).reshape(*query.shape[:2], q_num_heads * v.shape[3])
    return (read * scale).astype(query.dtype), state.astype(kind)


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    X, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=None, rotary_embedding_dim=0
):
    """Each pair of a head's features turns by an angle of its position."""
    ns = xp(X, cos_cache, sin_cache, position_ids)
    if X.ndim == 3 and not num_heads:
        raise ValueError("a rank-3 X needs the attribute num_heads")
    # heads in the last but one place: [batch, sequence, heads, size]
    x = ns.swapaxes(X, 1, 2) if X.ndim == 4 else X.reshape(*X.shape[:2], num_heads, X.shape[2] // num_heads)
    if position_ids is not None:
        cos_cache, sin_cache = (_rows(ns, cache, position_ids) for cache in (cos_cache, sin_cache))
    width = rotary_embedding_dim or x.shape[3]
    if width % 2 or not 2 * cos_cache.shape[-1] == 2 * sin_cache.shape[-1] == width:
        raise ValueError(
            f"caches of {cos_cache.shape[-1]} and {sin_cache.shape[-1]} angles cannot turn {width} features: "
            f"each must hold half as many"
        )
    cos, sin = cos_cache[:, :, None], sin_cache[:, :, None]
    turned, rest = x[..., :width], x[..., width:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else ns.split(turned, 2, axis=-1)
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        turned = ns.stack([real, imaginary], axis=-1).reshape(turned.shape)
    else:
        turned = ns.concatenate([real, imaginary], axis=-1)
    y = ns.concatenate([turned, rest], axis=-1)
    return ns.swapaxes(y, 1, 2) if X.ndim == 4 else y.reshape(X.shape)


def _rows(ns, cache, ids):
    """cache[ids]; a position outside the cache is an error when known and NaN when traced."""
    return cache[ids] if ns is np else jnp.asarray(cache).at[ids].get(mode="fill", fill_value=np.nan)


@op("CausalConvWithState", since=27, heavy=True)
def causal_conv_with_state(input, weight, bias=None, past_state=None, *, activation="none"):
    """A depthwise convolution over the past only, as shifted multiply-adds; the state is the last k - 1 inputs."""
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"activation ({activation!r}) must be 'none', 'silu' or 'swish'")
    if input.ndim != 3 or weight.ndim != 3 or weight.shape[:2] != (input.shape[1], 1):
        raise ValueError(f"input [batch, channels, length] {input.shape} needs weight [channels, 1, k] {weight.shape}")
    ns, wide = xp(input, weight, bias, past_state), _wide(input.dtype)
    batch, channels, length = input.shape
    taps = weight.shape[2]
    if past_state is None:
        past_state = ns.zeros((batch, channels, taps - 1), input.dtype)
    if past_state.shape != (batch, channels, taps - 1):
        raise ValueError(f"past_state must have shape {(batch, channels, taps - 1)} ({past_state.shape})")
    line = ns.concatenate([past_state, input], axis=2)
    y = ns.zeros((), wide) if bias is None else bias[:, None].astype(wide)
    for i in range(taps):
        y = y + line[:, :, i : i + length].astype(wide) * weight[:, :, i].astype(wide)
    y = y.astype(input.dtype)
    if activation != "none":
        z = y.astype(wide)
        y = (z / (1 + ns.exp(-z))).astype(input.dtype)
    return y, line[:, :, length:]
