"""The com.microsoft domain: gated delta networks on sequences one behind another, and states taken back."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shapes
from ..attention import check_paired
from ..registry import Static, op
from .fused import MICROSOFT
from .ragged import BOUNDS, Ragged, check_capture, check_flat, numbers, within, written

Rule = Literal["gated_delta", "linear", "gated", "delta"]
Gate = Literal["none", "softplus", "qwen", "sigmoid", "kda"]


def _apart(packed, state):
    """Queries, keys [..., heads, K] and values [..., value heads, V] of their rows; the state has their sizes."""
    if state is None:
        raise ValueError("queries, keys and values in one tensor need initial_state, which says how large a head is")
    check_shapes({}, initial_state=(state, "batch value_heads head_size_v head_size_qk"))
    (heads, v_size, size), width = state.shape[1:], packed.shape[-1]
    rest = width - heads * v_size
    if rest < 1 or rest % (2 * size):
        parts = f"{heads} values of {v_size}, and as many queries as keys of {size}"
        raise ValueError(f"query has {width} numbers a token, which are not {parts} (initial_state {state.shape})")
    q, k, v = jnp.split(packed, [rest // 2, rest], axis=-1)
    return *(x.reshape(*x.shape[:-1], -1, size) for x in (q, k)), v.reshape(*v.shape[:-1], heads, v_size)


def _log_decay(kind, bound, decay, a_log, dt_bias, heads):
    """How much of the state stays, as a logarithm [tokens, heads, 1 or size]; None where all of it does."""
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
        raise ValueError(f"dt_bias {dt_bias.shape} must be one for each of {heads} heads, or of their {each} entries")
    if g is None:
        return None
    rate, g = jnp.exp(a_log.astype(g.dtype))[:, None], g + dt_bias.astype(g.dtype).reshape(heads, -1)
    return bound * jax.nn.sigmoid(rate * g) if kind in ("sigmoid", "kda") else -rate * jax.nn.softplus(g)


def _token(state, token):
    """The state [..., heads, group, V, K] after a token; what its query reads, and what went to its key."""
    q, k, v, g, b = token
    state = state if g is None else state * g[..., None, :]
    v = v if b is None else b[..., None] * (v - jnp.einsum("...hgvk,...hk->...hgv", state, k))
    state = state + v[..., None] * k[..., None, None, :]
    return state, (jnp.einsum("...hgvk,...hk->...hgv", state, q), v)


def _ragged(states, tokens, of):
    """``_token`` for tokens of several sequences, one after the other."""

    def step(states, token):
        *token, i = token
        state, out = _token(states[i], token)
        return states.at[i].set(state), out

    return lax.scan(step, states, (*tokens, of))


def _even(states, tokens, chunk):
    """``_token`` for sequences of one length, side by side."""
    batch = states.shape[0]
    split = [None if x is None else jnp.swapaxes(x.reshape(batch, -1, *x.shape[1:]), 0, 1) for x in tokens]
    states, outs = lax.scan(_token, states, tuple(split), unroll=min(chunk, 4))
    return states, tuple(jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]) for y in outs)


@op("GatedDeltaNet", domain=MICROSOFT, heavy=True, limits=f"{BOUNDS}; what is not captured is 0 in state_update")
def gated_delta_net(
    query, key=None, value=None, cu_seqlens=None, decay=None, beta=None, initial_state=None, a_log=None, dt_bias=None,
    capture_count=None, state_update_active=None, *, beta_activation: Literal["none", "sigmoid"] = "none",
    chunk_size=64, gate_activation: Gate = "none", gate_lower_bound=-5.0, qk_l2_norm=0, scale=0.0,
    state_update_capacity=0, update_rule: Rule = "gated_delta", n_outputs=1,
):  # fmt: skip
    """LinearAttention of tokens [total, heads, size] with a state [batch, heads, V, K], and what made it so.

    Sequence i has the tokens from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``; without it all have the same length.
    """
    for name, given, wanted in (("decay", decay, "gated" in update_rule), ("beta", beta, "delta" in update_rule)):
        if (given is not None) != wanted:
            raise ValueError(f"update_rule {update_rule!r} {'needs' if wanted else 'takes no'} input {name}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size ({chunk_size}) must be 1 or more")
    check_paired(key=key, value=value)
    query = jnp.asarray(query)
    q, k, v = _apart(query, initial_state) if key is None else (query, key, value)
    lead, full = v.shape[:-2], accumulator(query.dtype)
    names = {1: "total", 2: "batch length"}.get(len(lead))
    if names is None or (cu_seqlens is not None and len(lead) == 2):
        ragged = "" if cu_seqlens is None else "; with cu_seqlens the former"
        raise ValueError(f"value must be [total, heads, size] or [batch, length, heads, size]{ragged} ({v.shape})")
    heads, size, shared = v.shape[-2], k.shape[-1], k.shape[-2]
    if shared < 1 or heads % shared:
        raise ValueError(f"{shared} heads of queries and keys cannot be shared by {heads} heads of values")
    per_head = {"value_heads": heads, "K": size, "heads": shared}
    check_shapes(
        per_head, value=(v, f"{names} value_heads V"), query=(q, f"{names} heads K"), key=(k, f"{names} heads K"),
        beta=(beta, f"{names} value_heads"),
        decay=(decay, f"{names} value_heads" + " K" * (decay is not None and decay.ndim > len(lead) + 1)),
    )  # fmt: skip
    flat = lambda x: jnp.asarray(x, full).reshape(-1, *x.shape[len(lead) :])  # noqa: E731
    q, k, v, decay, beta = flat(q), flat(k), flat(v), *(None if x is None else flat(x) for x in (decay, beta))
    total = v.shape[0]
    if cu_seqlens is None:
        batch = lead[0] if len(lead) == 2 else None if initial_state is None else initial_state.shape[0]
        if not batch or total % batch:
            raise ValueError(f"{total} tokens of {batch} sequences: give cu_seqlens, or initial_state for as many")
        cu_seqlens, even = np.arange(batch + 1, dtype=np.int32) * (total // batch), True
    else:
        even = False
    line = Ragged("cu_seqlens", cu_seqlens, total)
    per_head |= {"batch": line.batch, "V": v.shape[2]}
    check_shapes(per_head, initial_state=(initial_state, "batch value_heads V K"))
    if initial_state is None:
        initial_state = jnp.zeros((line.batch, heads, v.shape[2], size), full)
    check_capture(state_update_capacity, capture_count, line.batch)
    g = _log_decay(gate_activation, gate_lower_bound, decay, a_log, dt_bias, heads)
    b = jax.nn.sigmoid(beta) if beta is not None and beta_activation == "sigmoid" else beta
    if qk_l2_norm:
        q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-12) for x in (q, k))

    def grouped(x):
        """[tokens, heads, ...] with the heads that share a key side by side."""
        return None if x is None else x.reshape(x.shape[0], shared, heads // shared, *x.shape[2:])

    decays = None if g is None else jnp.exp(g)
    tokens = q, k, grouped(v), grouped(decays), grouped(b)
    states = grouped(jnp.asarray(initial_state).astype(full))
    states, (y, deltas) = _even(states, tokens, chunk_size) if even else _ragged(states, tokens, line.of)
    y = y * (scale or 1 / math.sqrt(size))
    outs = [
        y.reshape(*lead, heads, v.shape[2]).astype(query.dtype),
        states.reshape(initial_state.shape).astype(initial_state.dtype),
    ]
    if n_outputs > 2:
        decays = jnp.ones((total, heads, 1), full) if decays is None else decays
        parts = decays, k, deltas
        rows = (line.captured(x, state_update_capacity, capture_count, state_update_active) for x in parts)
        outs.append(jnp.concatenate([x.reshape(line.batch, -1) for x in rows], axis=1).astype(initial_state.dtype))
    return tuple(map(line.or_nan, outs))


@op("GatedDeltaNetStateReplay", domain=MICROSOFT)
def gated_delta_net_state_replay(source_backing, capsule_backing, destination_backing, metadata: Static):
    """A state after the first tokens that GatedDeltaNet captured, computed into its place in flat tensors."""
    check_flat(source_backing=source_backing, capsule_backing=capsule_backing, destination_backing=destination_backing)
    source, destination, *starts, heads, v_size, size, shared, capacity, kept = numbers(metadata, 11)
    if min(heads, v_size, size, shared) < 1 or heads % shared or not 1 <= kept <= capacity:
        raise ValueError(
            f"metadata says Hv={heads}, Dv={v_size}, Dk={size}, Hk={shared}, capacity={capacity}, kept_count={kept}: "
            "all positive, Hv a multiple of Hk, and no more kept than there are"
        )
    each = size if starts[1] - starts[0] == capacity * heads * size else 1
    shapes = (heads, each), (shared, size), (heads, v_size)
    decay, key, delta = (
        within("capsule_backing", capsule_backing, start, capacity, *shape)
        for start, shape in zip(starts, shapes, strict=True)
    )
    state = within("source_backing", source_backing, source, heads, v_size, size)
    for t in range(kept):
        shared_key = key[t].repeat(heads // shared, axis=0)
        state = state * decay[t, :, None] + delta[t, :, :, None] * shared_key[:, None]
    return written(destination_backing, destination, state)
