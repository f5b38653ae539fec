"""The com.microsoft domain: gated delta networks on ragged batches, and replay of their states."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shapes
from ..attention import check_paired, check_update
from ..registry import Static, op
from . import MICROSOFT
from .ragged import BOUNDS, Ragged, check_capture, check_flat, fields_of, slice_as, update_slice

Rule = Literal["gated_delta", "linear", "gated", "delta"]
Gate = Literal["none", "softplus", "qwen", "sigmoid", "kda"]


def _split_qkv(qkv, state):
    """Queries, keys [..., heads, K] and values [..., value heads, V] of one tensor; the state determines the sizes."""
    if state is None:
        raise ValueError("query without key and value requires initial_state, which determines the head sizes")
    check_shapes({}, initial_state=(state, "batch value_heads head_size_v head_size_qk"))
    (heads, v_size, size), width = state.shape[1:], qkv.shape[-1]
    rest = width - heads * v_size
    if rest < 1 or rest % (2 * size):
        parts = f"{heads} value heads of size {v_size} and equally many query and key heads of size {size}"
        raise ValueError(f"query has {width} features, which must be {parts} (initial_state {state.shape})")
    q, k, v = jnp.split(qkv, [rest // 2, rest], axis=-1)
    return *(x.reshape(*x.shape[:-1], -1, size) for x in (q, k)), v.reshape(*v.shape[:-1], heads, v_size)


def _log_decay(kind, bound, decay, a_log, dt_bias, heads):
    """The logarithm of the state's decay [tokens, heads, 1 or size]; None without decay."""
    if (a_log is None or dt_bias is None) if kind != "none" else not (a_log is dt_bias is None):
        raise ValueError(f"gate_activation {kind!r} {'takes no' if kind == 'none' else 'needs'} a_log and dt_bias")
    if not (math.isfinite(bound) and bound < 0):
        raise ValueError(f"gate_lower_bound ({bound}) must be a negative number")
    g = None if decay is None else decay if decay.ndim == 3 else decay[..., None]
    if kind == "none":
        return g
    each = 1 if g is None else g.shape[2]
    check_shapes({"heads": heads}, a_log=(a_log, "heads"))
    if dt_bias.shape not in {(heads,), (heads, each), (heads * each,)}:
        raise ValueError(f"dt_bias {dt_bias.shape} must have the shape ({heads},) or ({heads}, {each})")
    if g is None:
        return None
    rate, g = jnp.exp(a_log.astype(g.dtype))[:, None], g + dt_bias.astype(g.dtype).reshape(heads, -1)
    return bound * jax.nn.sigmoid(rate * g) if kind in ("sigmoid", "kda") else -rate * jax.nn.softplus(g)


def _token(state, token):
    """(state [..., heads, group, V, K] after a token, (value read by its query, delta written at its key))."""
    q, k, v, g, b = token
    state = state if g is None else state * g[..., None, :]
    v = v if b is None else b[..., None] * (v - jnp.einsum("...hgvk,...hk->...hgv", state, k))
    state = state + v[..., None] * k[..., None, None, :]
    return state, (jnp.einsum("...hgvk,...hk->...hgv", state, q), v)


def _scan_ragged(states, tokens, sequence):
    """``_token`` scanned over the tokens of a ragged batch; ``sequence`` is the index of each token's sequence."""

    def step(states, token):
        *token, i = token
        state, out = _token(states[i], token)
        return states.at[i].set(state), out

    return lax.scan(step, states, (*tokens, sequence))


def _scan_batch(states, tokens, chunk):
    """``_token`` scanned over sequences of equal length, in parallel."""
    batch = states.shape[0]
    split = [None if x is None else jnp.swapaxes(x.reshape(batch, -1, *x.shape[1:]), 0, 1) for x in tokens]
    states, outs = lax.scan(_token, states, tuple(split), unroll=min(chunk, 4))
    return states, tuple(jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]) for y in outs)


@op(
    "GatedDeltaNet", domain=MICROSOFT, heavy=True,
    limits=f"{BOUNDS}; entries of state_update that are not captured are 0",
)  # fmt: skip
def gated_delta_net(
    query, key=None, value=None, cu_seqlens=None, decay=None, beta=None, initial_state=None, a_log=None, dt_bias=None,
    capture_count=None, state_update_active=None, *, beta_activation: Literal["none", "sigmoid"] = "none",
    chunk_size=64, gate_activation: Gate = "none", gate_lower_bound=-5.0, qk_l2_norm=0, scale=0.0,
    state_update_capacity=0, update_rule: Rule = "gated_delta", n_outputs=1,
):  # fmt: skip
    """LinearAttention of tokens [total, heads, size] with a state [batch, heads, V, K], and its captured updates.

    Sequence i has the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``; without cu_seqlens all have equal length.
    """
    check_update(update_rule, decay, beta, chunk_size)
    check_paired(key=key, value=value)
    query = jnp.asarray(query)
    q, k, v = _split_qkv(query, initial_state) if key is None else (query, key, value)
    lead, work = v.shape[:-2], accumulator(query.dtype)
    names = {1: "total", 2: "batch length"}.get(len(lead))
    if names is None or (cu_seqlens is not None and len(lead) == 2):
        required = "[total, heads, size]" + " or [batch, length, heads, size]" * (cu_seqlens is None)
        raise ValueError(f"value must have the shape {required} (it has {v.shape})")
    heads, size, shared = v.shape[-2], k.shape[-1], k.shape[-2]
    if shared < 1 or heads % shared:
        raise ValueError(f"the number of value heads ({heads}) must be a multiple of {shared} query and key heads")
    per_head = {"value_heads": heads, "K": size, "heads": shared}
    check_shapes(
        per_head, value=(v, f"{names} value_heads V"), query=(q, f"{names} heads K"), key=(k, f"{names} heads K"),
        beta=(beta, f"{names} value_heads"),
        decay=(decay, f"{names} value_heads" + " K" * (decay is not None and decay.ndim > len(lead) + 1)),
    )  # fmt: skip
    flat = lambda x: jnp.asarray(x, work).reshape(-1, *x.shape[len(lead) :])  # noqa: E731
    q, k, v, decay, beta = flat(q), flat(k), flat(v), *(None if x is None else flat(x) for x in (decay, beta))
    total = v.shape[0]
    if cu_seqlens is None:
        batch = lead[0] if len(lead) == 2 else None if initial_state is None else initial_state.shape[0]
        if not batch or total % batch:
            raise ValueError(
                f"{total} tokens do not form {batch} sequences of equal length: give cu_seqlens, or an initial_state "
                "that determines the batch size"
            )
        cu_seqlens, equal_lengths = np.arange(batch + 1, dtype=np.int32) * (total // batch), True
    else:
        equal_lengths = False
    ragged = Ragged("cu_seqlens", cu_seqlens, total)
    per_head |= {"batch": ragged.batch, "V": v.shape[2]}
    check_shapes(per_head, initial_state=(initial_state, "batch value_heads V K"))
    if initial_state is None:
        initial_state = jnp.zeros((ragged.batch, heads, v.shape[2], size), work)
    check_capture(state_update_capacity, capture_count, ragged.batch)
    g = _log_decay(gate_activation, gate_lower_bound, decay, a_log, dt_bias, heads)
    b = jax.nn.sigmoid(beta) if beta is not None and beta_activation == "sigmoid" else beta
    if qk_l2_norm:
        q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-12) for x in (q, k))

    def grouped(x):
        """[tokens, heads, ...] -> [tokens, key heads, heads per key head, ...]."""
        return None if x is None else x.reshape(x.shape[0], shared, heads // shared, *x.shape[2:])

    decays = None if g is None else jnp.exp(g)
    tokens = q, k, grouped(v), grouped(decays), grouped(b)
    states = grouped(jnp.asarray(initial_state).astype(work))
    if equal_lengths:
        states, (y, deltas) = _scan_batch(states, tokens, chunk_size)
    else:
        states, (y, deltas) = _scan_ragged(states, tokens, ragged.sequence)
    y = y * (scale or 1 / math.sqrt(size))
    outs = [
        y.reshape(*lead, heads, v.shape[2]).astype(query.dtype),
        states.reshape(initial_state.shape).astype(initial_state.dtype),
    ]
    if n_outputs > 2:
        decays = jnp.ones((total, heads, 1), work) if decays is None else decays
        parts = decays, k, deltas
        rows = (ragged.captured(x, state_update_capacity, capture_count, state_update_active) for x in parts)
        outs.append(jnp.concatenate([x.reshape(ragged.batch, -1) for x in rows], axis=1).astype(initial_state.dtype))
    return tuple(map(ragged.or_nan, outs))


@op("GatedDeltaNetStateReplay", domain=MICROSOFT)
def gated_delta_net_state_replay(source_backing, capsule_backing, destination_backing, metadata: Static):
    """The destination with the state after the first captured tokens of GatedDeltaNet, all in flat tensors."""
    check_flat(source_backing=source_backing, capsule_backing=capsule_backing, destination_backing=destination_backing)
    source, destination, *starts, heads, v_size, size, shared, capacity, kept = fields_of(metadata, 11)
    if min(heads, v_size, size, shared) < 1 or heads % shared or not 1 <= kept <= capacity:
        raise ValueError(
            f"metadata has Hv={heads}, Dv={v_size}, Dk={size}, Hk={shared}, capacity={capacity}, kept_count={kept}; "
            "all must be positive, Hv a multiple of Hk, and kept_count at most capacity"
        )
    each = size if starts[1] - starts[0] == capacity * heads * size else 1
    shapes = (heads, each), (shared, size), (heads, v_size)
    decay, key, delta = (
        slice_as("capsule_backing", capsule_backing, start, capacity, *shape)
        for start, shape in zip(starts, shapes, strict=True)
    )
    state = slice_as("source_backing", source_backing, source, heads, v_size, size)
    for t in range(kept):
        shared_key = key[t].repeat(heads // shared, axis=0)
        state = state * decay[t, :, None] + delta[t, :, :, None] * shared_key[:, None]
    return update_slice(destination_backing, destination, state)
