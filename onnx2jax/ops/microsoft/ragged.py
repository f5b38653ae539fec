"""The com.microsoft domain: stateful operators on ragged batches, sequences of any lengths concatenated."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shapes, is_known, xp
from ..attention import Swish
from ..registry import MayBeEmpty, Static, op
from . import MICROSOFT
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
        own = rows[jnp.maximum(lax.iota(np.int32, self.total) - n, 0)]
        old = past[self.sequence, jnp.clip(past.shape[1] + self.local - n, 0, past.shape[1] - 1)]
        return jnp.where((self.local >= n).reshape(-1, *(1,) * (rows.ndim - 1)), own, old)

    def after(self, count, rows, past):
        """The past [batch, length, ...] after appending the first ``count`` [batch] tokens of each sequence."""
        length = past.shape[1]
        if length == 0 or self.total == 0:
            return past
        index = count[:, None] + lax.iota(np.int32, length)
        own = rows[jnp.clip(self.starts[:, None] + index - length, 0, self.total - 1)]
        old = jnp.take_along_axis(past, _like(jnp.clip(index, 0, length - 1), past), axis=1)
        return jnp.where(_like(index < length, past), old, own)

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
        given = "is absent" if count is None else "is given"
        raise ValueError(
            f"state_update_capacity ({capacity}) must be from 1 to 8 with capture_count, and 0 without (it {given})"
        )
    check_shapes({"batch": batch}, capture_count=(count, "batch"))


@op("VarlenCausalConvWithState", domain=MICROSOFT, heavy=True, limits=f"{_DYNAMIC}; {BOUNDS}")
def varlen_causal_conv_with_state(
    input, weight, cumulative_sequence_length, bias: MayBeEmpty, initial_state, capture_count=None, kernel_delta=None,
    previous_mask=None, *, activation: Swish = "none", delta_offset=0, dilation=1, group_size=1,
    state_update_capacity=0, n_outputs=2,
):  # fmt: skip
    """(CausalConvWithState of tokens [total, channels], states, the first inputs of each sequence)."""
    del delta_offset, group_size  # belong to kernel_delta
    if kernel_delta is not None or previous_mask is not None:
        raise NotImplementedError(f"{_DYNAMIC}: compute the taps of each token in separate nodes")
    if dilation < 1:
        raise ValueError(f"dilation ({dilation}) must be 1 or more")
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
    if activation != "none":
        y = y.astype(input.dtype).astype(wide)
        y = y / (1 + jnp.exp(-y))
    state = jnp.swapaxes(ragged.after(ragged.lengths, input, past), 1, 2)
    outs = [y.astype(input.dtype), state]
    if n_outputs > 2:
        outs.append(ragged.captured(input, state_update_capacity, capture_count))
    return tuple(map(ragged.or_nan, outs))


@op("VarlenNGramHashMapping", domain=MICROSOFT, limits=f"{BOUNDS}; {SIZES}")
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


@op("ConvStateReplay", domain=MICROSOFT)
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
