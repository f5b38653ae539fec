"""The com.microsoft domain: stateful operators on ragged batches, sequences of any lengths concatenated; replays."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shapes, is_known, xp
from ..attention import Swish, activated, check_paired, check_update
from ..registry import MayBeEmpty, Static
from . import microsoft
from .streams import SIZES, ngram_filler, ngram_hashes

BOUNDS = "invalid boundaries raise if known, and otherwise yield NaN (hashes: -1)"
_DYNAMIC = "kernel_delta and previous_mask, implemented by CUDA only, are unsupported"


class Ragged:
    """``total`` concatenated tokens, where sequence i has those from ``cumulative[i]`` to ``cumulative[i + 1]``.

    Attributes:
        valid: whether the boundaries are ordered and cover all tokens.
        sequence: the index of each token's sequence [total].
        local: the position of each token in its sequence [total].
    """

    def __init__(self, name, cumulative, total, least=0):
        check_shapes({}, **{name: (cumulative, "batch_and_one")})
        self.total, self.batch, bounds = total, cumulative.shape[0] - 1, cumulative
        lengths = bounds[1:] - bounds[:-1]
        self.valid = (bounds[0] == 0) & (bounds[-1] == total) & (lengths >= least).all() if self.batch > 0 else False
        if self.batch < 1 or (is_known(bounds) and not self.valid):
            order = "strictly increase" if least else "increase"
            raise ValueError(f"{name} ({np.asarray(bounds)}) must {order} from 0 to {total}, the number of tokens")
        self.starts, self.lengths = jnp.asarray(bounds)[:-1], jnp.asarray(lengths)
        tokens = lax.iota(np.int32, total)
        self.sequence = jnp.minimum(jnp.searchsorted(jnp.asarray(bounds)[1:], tokens, side="right"), self.batch - 1)
        self.local = tokens - self.starts[self.sequence]

    def before(self, n, rows, past):
        """The row ``n`` tokens before each token; the past [batch, length, ...] precedes the first."""
        if past.shape[1] == 0:
            return rows
        new = rows[jnp.maximum(lax.iota(np.int32, self.total) - n, 0)]
        old = past[self.sequence, jnp.clip(past.shape[1] + self.local - n, 0, past.shape[1] - 1)]
        return jnp.where((self.local >= n).reshape(-1, *(1,) * (rows.ndim - 1)), new, old)

    def after(self, count, rows, past):
        """The past [batch, length, ...] after appending the first ``count`` [batch] tokens of each sequence."""
        length = past.shape[1]
        if length == 0 or self.total == 0:
            return past
        index = count[:, None] + lax.iota(np.int32, length)
        new = rows[jnp.clip(self.starts[:, None] + index - length, 0, self.total - 1)]
        old = jnp.take_along_axis(past, _like(jnp.clip(index, 0, length - 1), past), axis=1)
        return jnp.where(_like(index < length, past), old, new)

    def captured(self, rows, capacity, count, active=None):
        """The first ``count`` rows of each sequence as [batch, capacity, ...], padded with 0."""
        if not capacity or not self.total:
            return jnp.zeros((self.batch, capacity, *rows.shape[1:]), rows.dtype)
        index, mask = self.captures(capacity, count)
        mask = mask if active is None else mask & (active.reshape(()) != 0)
        picked = rows[jnp.minimum(self.starts[:, None] + index, self.total - 1)]
        return jnp.where(_like(mask, picked), picked, 0)

    def captures(self, capacity, count):
        """(positions in a sequence [capacity], whether they are captured [batch, capacity])."""
        index = np.arange(capacity, dtype=np.int32)
        return index, index < jnp.minimum(count, self.lengths)[:, None]

    def or_nan(self, y, mark=np.nan):
        """The result; NaN, or another mark, if the boundaries are invalid."""
        return y if is_known(self.valid) else jnp.where(self.valid, y, mark)


def _like(flags, x):
    """[batch, positions], reshaped to broadcast against x [batch, positions, ...]."""
    return flags.reshape(*flags.shape, *(1,) * (x.ndim - 2))


def check_capture(capacity, count, batch):
    """Raise ValueError for a count without a capacity, a capacity without a count, or a capacity above 8."""
    if not 0 <= capacity <= 8 or (count is None) != (capacity == 0):
        actual = "is absent" if count is None else "is given"
        raise ValueError(
            f"state_update_capacity ({capacity}) must be from 1 to 8 with capture_count, and 0 without (it {actual})"
        )
    check_shapes({"batch": batch}, capture_count=(count, "batch"))


@microsoft("VarlenCausalConvWithState", heavy=True, limits=f"{_DYNAMIC}; {BOUNDS}")
def varlen_causal_conv_with_state(
    input, weight, cumulative_sequence_length, bias: MayBeEmpty, initial_state, capture_count=None, kernel_delta=None,
    previous_mask=None, *, activation: Swish = "none", delta_offset=0, dilation=1, group_size=1,
    state_update_capacity=0, n_outputs=2,
):  # fmt: skip
    """(CausalConvWithState of tokens [total, channels], states, the first inputs of each sequence)."""
    del delta_offset, group_size  # belong to kernel_delta
    if kernel_delta is not None or previous_mask is not None:
        raise NotImplementedError(f"{_DYNAMIC}: compute the taps of each token in separate nodes")
    input, wide = jnp.asarray(input), accumulator(input.dtype)
    check_shapes({"1": 1}, input=(input, "total channels"), weight=(weight, "channels 1 taps"))
    ragged, taps = Ragged("cumulative_sequence_length", cumulative_sequence_length, input.shape[0]), weight.shape[2]
    extents = {"batch": ragged.batch, "channels": input.shape[1], "past": (taps - 1) * dilation}
    check_shapes(extents, bias=(bias, "channels"), initial_state=(initial_state, "batch channels past"))
    check_capture(state_update_capacity, capture_count, ragged.batch)
    past = jnp.swapaxes(jnp.asarray(initial_state), 1, 2)
    y = np.zeros((), wide) if bias is None else bias.astype(wide)
    for i in range(taps):
        y = y + ragged.before((taps - 1 - i) * dilation, input, past).astype(wide) * weight[:, 0, i].astype(wide)
    outs = [activated(y, activation, input.dtype)]
    outs.append(jnp.swapaxes(ragged.after(ragged.lengths, input, past), 1, 2))
    if n_outputs > 2:
        outs.append(ragged.captured(input, state_update_capacity, capture_count))
    return tuple(map(ragged.or_nan, outs))


@microsoft("VarlenNGramHashMapping", limits=f"{BOUNDS}; {SIZES}")
def varlen_ngram_hash_mapping(
    input_ids, multipliers, vocab_sizes, cumulative_sequence_length, past_ids=None, head_offsets=None,
    eos_token_id=None, segment_ids=None, past_segment_ids=None, capture_count=None,
    *, max_ngram_size, n_head_per_ngram, pad_id, reset_on_eos=0, state_update_capacity=0, n_outputs=1,
):  # fmt: skip
    """(NGramHashMapping of tokens [total], present ids, present segments, present ids after each captured token)."""
    check_shapes({}, input_ids=(input_ids, "total"))
    ids, reach, tokens = jnp.asarray(input_ids), max_ngram_size - 1, "total"
    ragged = Ragged("cumulative_sequence_length", cumulative_sequence_length, ids.shape[0], least=1)
    if segment_ids is None and (past_segment_ids is not None or n_outputs > 2):
        raise ValueError("past_segment_ids and the output present_segment_ids require segment_ids")
    check_capture(state_update_capacity, capture_count, ragged.batch)
    check_shapes(
        {"total": ids.shape[0], "batch": ragged.batch, "reach": reach}, past_ids=(past_ids, "batch reach"),
        segment_ids=(segment_ids, tokens), past_segment_ids=(past_segment_ids, "batch reach"),
    )  # fmt: skip
    filler = ngram_filler(ids.dtype, pad_id, eos_token_id)
    past = jnp.full((ragged.batch, reach), filler) if past_ids is None else jnp.asarray(past_ids)
    shifted, cuts = [ragged.before(n, ids, past) for n in range(max_ngram_size)], []
    segments = first = None
    if segment_ids is not None:  # by default the past has the segment of the first token
        segments = jnp.asarray(segment_ids)
        first = jnp.repeat(segments[jnp.minimum(ragged.starts, ragged.total - 1)][:, None], reach, axis=1)
        first = first if past_segment_ids is None else jnp.asarray(past_segment_ids)
    for n in range(1, max_ngram_size):  # whether an n-gram boundary separates the token n before from its successor
        cut = jnp.zeros(ids.shape, bool)
        if reset_on_eos and eos_token_id is not None:
            cut |= shifted[n] == filler
        if segments is not None:
            cut |= ragged.before(n, segments, first) != ragged.before(n - 1, segments, first)
        cuts.append(cut)
    hashes = ngram_hashes(shifted, cuts, filler, multipliers, vocab_sizes, head_offsets, n_head_per_ngram)
    outs = [hashes, ragged.after(ragged.lengths, ids, past)]
    if n_outputs > 2:
        outs.append(ragged.after(ragged.lengths, segments, first))
    if n_outputs > 3:
        index, mask = ragged.captures(state_update_capacity, 0 if capture_count is None else capture_count)
        states = [ragged.after(jnp.full(ragged.batch, i + 1), ids, past) for i in index]
        states = jnp.stack(states, 1) if states else jnp.zeros((ragged.batch, 0, reach), ids.dtype)
        outs.append(jnp.where(mask[..., None], states, jnp.asarray(pad_id, ids.dtype)))
    return tuple(ragged.or_nan(y, -1) for y in outs)


def check_flat(**backings):
    """Raise ValueError unless all tensors have rank 1 and one dtype."""
    types = {name: f"{x.dtype}{x.shape}" for name, x in backings.items()}
    if any(x.ndim != 1 for x in backings.values()) or len({x.dtype for x in backings.values()}) > 1:
        raise ValueError(f"{types} must be tensors of rank 1 and one dtype")


def slice_as(name, backing, start, *shape):
    """The elements of a flat tensor from ``start`` on, in a shape."""
    stop = start + int(np.prod(shape))
    if not 0 <= start <= stop <= backing.shape[0]:
        raise ValueError(f"metadata selects the elements {start} to {stop} of {name}, which has {backing.shape[0]}")
    return backing[start:stop].reshape(shape)


def update_slice(destination, start, value):
    """The flat destination with the elements from ``start`` on replaced by ``value``."""
    slice_as("destination_backing", destination, start, *value.shape)
    if is_known(value) and is_known(destination):
        return np.concatenate([destination[:start], value.reshape(-1), destination[start + value.size :]])
    return jnp.asarray(destination).at[start : start + value.size].set(value.reshape(-1))


def fields_of(metadata, count):
    """The ``count`` fields of metadata as Python ints."""
    check_shapes({"fields": count}, metadata=(metadata, "fields"))
    return [int(n) for n in metadata]


@microsoft("ConvStateReplay")
def conv_state_replay(source_backing, capture_backing, destination_backing, metadata: Static):
    """The destination with a convolution's state after the first captured inputs, all in flat tensors."""
    check_flat(source_backing=source_backing, capture_backing=capture_backing, destination_backing=destination_backing)
    source, destination, capture, batch, channels, width, capacity, kept = fields_of(metadata, 8)
    size = source_backing.dtype.itemsize
    if any(offset % size for offset in (source, destination, capture)):
        raise ValueError(f"byte offsets ({source}, {destination}, {capture}) must be multiples of the item size {size}")
    if min(batch, width) < 0 or channels < 1 or not 0 <= kept <= capacity:
        raise ValueError(
            f"batch, channels, history, capacity, kept ({metadata[3:]}) must have channels > 0 and kept <= capacity"
        )
    past = slice_as("source_backing", source_backing, source // size, batch, channels, width)
    captured = slice_as("capture_backing", capture_backing, capture // size, batch, capacity, channels)
    history = xp.concatenate([past, xp.swapaxes(captured[:, :kept], 1, 2)], axis=2)
    return update_slice(destination_backing, destination // size, history[:, :, kept:])


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


def _check_heads(q, k, v, decay, beta, bounded):
    """The extents of heads; raises ValueError unless operands have one layout, with boundaries the ragged one."""
    lead, layout = v.ndim - 2, {3: "total", 4: "batch length"}.get(v.ndim)
    if layout is None or (bounded and lead == 2):
        required = "[total, heads, size]" + " or [batch, length, heads, size]" * (not bounded)
        raise ValueError(f"value must have the shape {required} (it has {v.shape})")
    heads, (shared, size) = v.shape[-2], k.shape[-2:]
    if shared < 1 or heads % shared:
        raise ValueError(f"the number of value heads ({heads}) must be a multiple of {shared} query and key heads")
    extents = {"value_heads": heads, "K": size, "heads": shared}
    check_shapes(
        extents, value=(v, f"{layout} value_heads V"), query=(q, f"{layout} heads K"), key=(k, f"{layout} heads K"),
        beta=(beta, f"{layout} value_heads"),
        decay=(decay, f"{layout} value_heads" + " K" * (decay is not None and decay.ndim > lead + 1)),
    )  # fmt: skip
    return extents


def _by_group(x, groups):
    """[tokens, heads, ...] -> [tokens, groups, heads per group, ...]."""
    return None if x is None else x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


@microsoft("GatedDeltaNet", heavy=True, limits=f"{BOUNDS}; entries of state_update that are not captured are 0")
def gated_delta_net(
    query, key=None, value=None, cu_seqlens=None, decay=None, beta=None, initial_state=None, a_log=None, dt_bias=None,
    capture_count=None, state_update_active=None, *, beta_activation: Literal["none", "sigmoid"] = "none",
    chunk_size=64, gate_activation: Gate = "none", gate_lower_bound=-5.0, qk_l2_norm=0, scale=0.0,
    state_update_capacity=0, update_rule: Rule = "gated_delta", n_outputs=1,
):  # fmt: skip
    """LinearAttention of tokens [total, heads, size] with a state [batch, heads, V, K], and its captured updates.

    Sequence i has the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``; without cu_seqlens all have equal length.
    """
    check_update(update_rule, decay, beta)
    check_paired(key=key, value=value)
    query = jnp.asarray(query)
    q, k, v = _split_qkv(query, initial_state) if key is None else (query, key, value)
    extents = _check_heads(q, k, v, decay, beta, cu_seqlens is not None)
    lead, work = v.shape[:-2], accumulator(query.dtype)
    flat = lambda x: jnp.asarray(x, work).reshape(-1, *x.shape[len(lead) :])  # noqa: E731
    q, k, v, decay, beta = flat(q), flat(k), flat(v), *(None if x is None else flat(x) for x in (decay, beta))
    (total, heads, v_size), (_, shared, size), equal_lengths = v.shape, k.shape, cu_seqlens is None
    if equal_lengths:
        batch = lead[0] if len(lead) == 2 else None if initial_state is None else initial_state.shape[0]
        if not batch or total % batch:
            raise ValueError(
                f"{total} tokens do not form {batch} sequences of equal length: give cu_seqlens, or an initial_state "
                "that determines the batch size"
            )
        cu_seqlens = np.arange(batch + 1, dtype=np.int32) * (total // batch)
    ragged = Ragged("cu_seqlens", cu_seqlens, total)
    extents |= {"batch": ragged.batch, "V": v_size}
    check_shapes(extents, initial_state=(initial_state, "batch value_heads V K"))
    if initial_state is None:
        initial_state = jnp.zeros((ragged.batch, heads, v_size, size), work)
    check_capture(state_update_capacity, capture_count, ragged.batch)
    g = _log_decay(gate_activation, gate_lower_bound, decay, a_log, dt_bias, heads)
    b = jax.nn.sigmoid(beta) if beta is not None and beta_activation == "sigmoid" else beta
    if qk_l2_norm:
        q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-12) for x in (q, k))
    decays = None if g is None else jnp.exp(g)
    tokens = q, k, *(_by_group(x, shared) for x in (v, decays, b))
    states = _by_group(jnp.asarray(initial_state).astype(work), shared)
    if equal_lengths:
        states, (y, deltas) = _scan_batch(states, tokens, chunk_size)
    else:
        states, (y, deltas) = _scan_ragged(states, tokens, ragged.sequence)
    y = y * (scale or 1 / math.sqrt(size))
    outs = [y.reshape(*lead, heads, v_size).astype(query.dtype)]
    outs.append(states.reshape(initial_state.shape).astype(initial_state.dtype))
    if n_outputs > 2:
        decays = jnp.ones((total, heads, 1), work) if decays is None else decays
        parts = decays, k, deltas
        rows = (ragged.captured(x, state_update_capacity, capture_count, state_update_active) for x in parts)
        outs.append(jnp.concatenate([x.reshape(ragged.batch, -1) for x in rows], axis=1).astype(initial_state.dtype))
    return tuple(map(ragged.or_nan, outs))


@microsoft("GatedDeltaNetStateReplay")
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
    rows = zip(starts, ((heads, each), (shared, size), (heads, v_size)), strict=True)
    decay, key, delta = (slice_as("capsule_backing", capsule_backing, start, capacity, *shape) for start, shape in rows)
    state = slice_as("source_backing", source_backing, source, heads, v_size, size)
    for t in range(kept):
        state = state * decay[t, :, None] + delta[t, :, :, None] * key[t].repeat(heads // shared, axis=0)[:, None]
    return update_slice(destination_backing, destination, state)
