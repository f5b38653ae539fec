"""The com.microsoft domain: sequences one behind another, each of its own length, that go on from a state."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import accumulator, check_shapes, is_known, xp
from ..attention import Swish
from ..registry import MayBeEmpty, Static, op
from .fused import MICROSOFT
from .streams import ngram_filler, ngram_hashes

BOUNDS = "boundaries that do not fit are an error where they are known, and else give NaN (hashes: -1)"
_DYNAMIC = "kernel_delta and previous_mask, which only CUDA has, are refused"


class Ragged:
    """``total`` tokens in rows, sequence i being those from ``cumulative[i]`` to ``cumulative[i + 1]``.

    Attributes:
        fits: whether the boundaries are in order and cover all tokens.
        of: the sequence of each token.
        local: the place of each token in its sequence.
    """

    def __init__(self, name, cumulative, total, least=0):
        check_shapes({}, **{name: (cumulative, "batch_and_one")})
        self.total, self.batch, bounds = total, cumulative.shape[0] - 1, cumulative
        lengths = bounds[1:] - bounds[:-1]
        self.fits = (bounds[0] == 0) & (bounds[-1] == total) & (lengths >= least).all() if self.batch > 0 else False
        if self.batch < 1 or (is_known(bounds) and not self.fits):
            order = "rising" if least else "never falling"
            raise ValueError(f"{name} ({np.asarray(bounds)}) must go from 0 to {total}, the tokens there are, {order}")
        self.starts, self.lengths = jnp.asarray(bounds)[:-1], jnp.asarray(lengths)
        tokens = lax.iota(np.int32, total)
        self.of = jnp.minimum(jnp.searchsorted(jnp.asarray(bounds)[1:], tokens, side="right"), self.batch - 1)
        self.local = tokens - self.starts[self.of]

    def before(self, n, rows, past):
        """What stands ``n`` tokens before each one, the past [batch, length, ...] being before the first."""
        if past.shape[1] == 0:
            return rows
        own = rows[jnp.maximum(lax.iota(np.int32, self.total) - n, 0)]
        old = past[self.of, jnp.clip(past.shape[1] + self.local - n, 0, past.shape[1] - 1)]
        return jnp.where((self.local >= n).reshape(-1, *(1,) * (rows.ndim - 1)), own, old)

    def after(self, count, rows, past):
        """The past [batch, length, ...] with the first ``count`` tokens [batch] behind it: its last entries."""
        length = past.shape[1]
        if length == 0 or self.total == 0:
            return past
        places = count[:, None] + lax.iota(np.int32, length)
        own = rows[jnp.clip(self.starts[:, None] + places - length, 0, self.total - 1)]
        old = jnp.take_along_axis(past, _like(jnp.clip(places, 0, length - 1), past), axis=1)
        return jnp.where(_like(places < length, past), old, own)

    def captured(self, rows, capacity, count, active=None):
        """The first ``count`` rows of each sequence, ``capacity`` at most: [batch, capacity, ...], the others 0."""
        if not capacity or not self.total:
            return jnp.zeros((self.batch, capacity, *rows.shape[1:]), rows.dtype)
        first, live = self.captures(capacity, count)
        live = live if active is None else live & (active.reshape(()) != 0)
        picked = rows[jnp.minimum(self.starts[:, None] + first, self.total - 1)]
        return jnp.where(_like(live, picked), picked, 0)

    def captures(self, capacity, count):
        """Places in a sequence [capacity], and whether they are captured [batch, capacity]."""
        first = np.arange(capacity, dtype=np.int32)
        return first, first < jnp.minimum(count, self.lengths)[:, None]

    def or_nan(self, y, mark=np.nan):
        """The result; NaN, or another mark, where the boundaries do not fit."""
        return y if is_known(self.fits) else jnp.where(self.fits, y, mark)


def _like(flags, x):
    """[batch, places] as it broadcasts against [batch, places, ...]."""
    return flags.reshape(*flags.shape, *(1,) * (x.ndim - 2))


def check_capture(capacity, count, batch):
    """Refuse a count without a capacity, the reverse, and a capacity beyond 8."""
    if not 0 <= capacity <= 8 or (count is None) != (capacity == 0):
        given = "is not given" if count is None else "is given"
        raise ValueError(
            f"state_update_capacity ({capacity}) must be from 0 to 8, with capture_count above 0 and without it at 0 "
            f"(it {given})"
        )
    check_shapes({"batch": batch}, capture_count=(count, "batch"))


@op("VarlenCausalConvWithState", domain=MICROSOFT, heavy=True, limits=f"{_DYNAMIC}; {BOUNDS}")
def varlen_causal_conv_with_state(
    input, weight, cumulative_sequence_length, bias: MayBeEmpty, initial_state, capture_count=None, kernel_delta=None,
    previous_mask=None, *, activation: Swish = "none", delta_offset=0, dilation=1, group_size=1,
    state_update_capacity=0, n_outputs=2,
):  # fmt: skip
    """CausalConvWithState of tokens [total, channels]; and what each sequence brought of its first inputs."""
    del delta_offset, group_size  # of kernel_delta
    if kernel_delta is not None or previous_mask is not None:
        raise NotImplementedError(f"{_DYNAMIC}: compute the taps of each token by nodes of their own")
    if dilation < 1:
        raise ValueError(f"dilation ({dilation}) must be 1 or more")
    input, wide = jnp.asarray(input), accumulator(input.dtype)
    check_shapes({"1": 1}, input=(input, "total channels"), weight=(weight, "channels 1 taps"))
    line, taps = Ragged("cumulative_sequence_length", cumulative_sequence_length, input.shape[0]), weight.shape[2]
    extents = {"batch": line.batch, "channels": input.shape[1], "past": (taps - 1) * dilation}
    check_shapes(extents, bias=(bias, "channels"), initial_state=(initial_state, "batch channels past"))
    check_capture(state_update_capacity, capture_count, line.batch)
    past = jnp.swapaxes(jnp.asarray(initial_state), 1, 2)
    y = np.zeros((), wide) if bias is None else bias.astype(wide)
    for i in range(taps):
        y = y + line.before((taps - 1 - i) * dilation, input, past).astype(wide) * weight[:, 0, i].astype(wide)
    if activation != "none":
        y = y.astype(input.dtype).astype(wide)
        y = y / (1 + jnp.exp(-y))
    state = jnp.swapaxes(line.after(line.lengths, input, past), 1, 2)
    outs = [y.astype(input.dtype), state]
    if n_outputs > 2:
        outs.append(line.captured(input, state_update_capacity, capture_count))
    return tuple(map(line.or_nan, outs))


@op("VarlenNGramHashMapping", domain=MICROSOFT, limits=BOUNDS)
def varlen_ngram_hash_mapping(
    input_ids, multipliers, vocab_sizes, cumulative_sequence_length, past_ids=None, head_offsets=None,
    eos_token_id=None, segment_ids=None, past_segment_ids=None, capture_count=None,
    *, max_ngram_size, n_head_per_ngram, pad_id, reset_on_eos=0, state_update_capacity=0, n_outputs=1,
):  # fmt: skip
    """NGramHashMapping of tokens [total]; ids and segments to go on from, after all tokens and after the first ones."""
    check_shapes({}, input_ids=(input_ids, "total"))
    ids, reach, tokens = jnp.asarray(input_ids), max_ngram_size - 1, "total"
    line = Ragged("cumulative_sequence_length", cumulative_sequence_length, ids.shape[0], least=1)
    if segment_ids is None and (past_segment_ids is not None or n_outputs > 2):
        raise ValueError("past_segment_ids and the output present_segment_ids need segment_ids")
    check_capture(state_update_capacity, capture_count, line.batch)
    check_shapes(
        {"total": ids.shape[0], "batch": line.batch, "reach": reach}, past_ids=(past_ids, "batch reach"),
        segment_ids=(segment_ids, tokens), past_segment_ids=(past_segment_ids, "batch reach"),
    )  # fmt: skip
    filler = ngram_filler(ids.dtype, pad_id, eos_token_id)
    past = jnp.full((line.batch, reach), filler) if past_ids is None else jnp.asarray(past_ids)
    shifted, cuts = [line.before(n, ids, past) for n in range(max_ngram_size)], []
    segments = first = None
    if segment_ids is not None:  # those before the first are its own, where nothing says otherwise
        segments = jnp.asarray(segment_ids)
        first = jnp.repeat(segments[jnp.minimum(line.starts, line.total - 1)][:, None], reach, axis=1)
        first = first if past_segment_ids is None else jnp.asarray(past_segment_ids)
    for n in range(1, max_ngram_size):  # whether what stands n before a token is out of reach of its successor
        cut = jnp.zeros(ids.shape, bool)
        if reset_on_eos and eos_token_id is not None:
            cut |= shifted[n] == filler
        if segments is not None:
            cut |= line.before(n, segments, first) != line.before(n - 1, segments, first)
        cuts.append(cut)
    hashes = ngram_hashes(shifted, cuts, filler, multipliers, vocab_sizes, head_offsets, n_head_per_ngram)
    outs = [hashes, line.after(line.lengths, ids, past)]
    if n_outputs > 2:
        outs.append(line.after(line.lengths, segments, first))
    if n_outputs > 3:
        count, live = line.captures(state_update_capacity, 0 if capture_count is None else capture_count)
        states = [line.after(jnp.full(line.batch, i + 1), ids, past) for i in count]
        states = jnp.stack(states, 1) if states else jnp.zeros((line.batch, 0, reach), ids.dtype)
        outs.append(jnp.where(live[..., None], states, jnp.asarray(pad_id, ids.dtype)))
    return tuple(line.or_nan(y, -1) for y in outs)


def check_flat(**backings):
    """Refuse tensors that are not flat, or of several types."""
    given = {name: f"{x.dtype}{x.shape}" for name, x in backings.items()}
    if any(x.ndim != 1 for x in backings.values()) or len({x.dtype for x in backings.values()}) > 1:
        raise ValueError(f"{given} must be flat tensors of one type")


def within(name, backing, start, *shape):
    """A part of a flat tensor in a shape."""
    stop = start + int(np.prod(shape))
    if not 0 <= start <= stop <= backing.shape[0]:
        raise ValueError(f"metadata names the elements {start} to {stop} of {name}, which has {backing.shape[0]}")
    return backing[start:stop].reshape(shape)


def written(destination, start, part):
    """The flat tensor with a part of it replaced."""
    within("destination_backing", destination, start, *part.shape)
    if is_known(part) and is_known(destination):
        return np.concatenate([destination[:start], part.reshape(-1), destination[start + part.size :]])
    return jnp.asarray(destination).at[start : start + part.size].set(part.reshape(-1))


def numbers(metadata, count):
    """What metadata says, as Python has it."""
    check_shapes({"fields": count}, metadata=(metadata, "fields"))
    return [int(n) for n in metadata]


@op("ConvStateReplay", domain=MICROSOFT)
def conv_state_replay(source_backing, capture_backing, destination_backing, metadata: Static):
    """A convolution's state after the first inputs that were captured, computed into its place in flat tensors."""
    check_flat(source_backing=source_backing, capture_backing=capture_backing, destination_backing=destination_backing)
    source, destination, capture, batch, channels, width, capacity, kept = numbers(metadata, 8)
    size = source_backing.dtype.itemsize
    if any(offset % size for offset in (source, destination, capture)):
        raise ValueError(f"offsets ({source}, {destination}, {capture}) are in bytes: multiples of {size} here")
    if min(batch, width) < 0 or channels < 1 or not 0 <= kept <= capacity:
        raise ValueError(f"batch, channels, history, capacity, kept ({metadata[3:]}): channels > 0, kept <= capacity")
    past = within("source_backing", source_backing, source // size, batch, channels, width)
    taken = within("capture_backing", capture_backing, capture // size, batch, capacity, channels)
    line = xp.concatenate([past, xp.swapaxes(taken[:, :kept], 1, 2)], axis=2)
    return written(destination_backing, destination // size, line[:, :, kept:])
