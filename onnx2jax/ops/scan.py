"""Scan and SequenceMap: iteration over tensors and over sequences."""

from __future__ import annotations

import numpy as np

from .arrays import axis_of, shape_vector, xp
from .control import iterate, results
from .registry import op


def _flags(values, n, what):
    if values is None:
        return (0,) * n
    if len(values) != n:
        raise ValueError(f"{what} must have one entry for each of {n} (it has {len(values)})")
    return tuple(values)


def _over(body, n, state, xs, directions, *, first=0, length=None):
    """Iterate over arrays that are scanned along their first axis, some of them backwards.

    Random keys are counted from `first`; from trip `length` on the body is without effect.
    """
    extents = [x.shape[0] for x in xs]
    if len(set(extents)) != 1:
        raise ValueError(f"the scan inputs differ in length ({extents})")

    def step(i, state, x):
        values = results(body(*state, *x, step=first + i))
        if length is not None:
            alive = i < length
            before = [*state, *(np.zeros((), v.dtype) for v in values[n:])]
            values = [xp(alive, a, b).where(alive, a, b) for a, b in zip(values, before, strict=True)]
        return np.True_, values[:n], values[n:]

    xs = tuple(xp(x).flip(x, 0) if d else x for x, d in zip(xs, directions, strict=True))
    return iterate(step, state, body.outputs[n:], trips=shape_vector((extents[0],)), xs=xs)


@op("Scan", since=9)
def scan(
    *initial_state_and_scan_inputs, body, num_scan_inputs, scan_input_axes=None, scan_input_directions=None,
    scan_output_axes=None, scan_output_directions=None,
):  # fmt: skip
    """Scan: the states first, then the tensors to scan, each along its axis and in its direction."""
    n, m = len(initial_state_and_scan_inputs) - num_scan_inputs, num_scan_inputs
    state, xs = list(initial_state_and_scan_inputs[:n]), initial_state_and_scan_inputs[n:]
    axes = _flags(scan_input_axes, m, "scan_input_axes")
    directions = _flags(scan_input_directions, m, "scan_input_directions")
    scanned = [xp(x).moveaxis(x, axis_of(a, x.ndim), 0) for x, a in zip(xs, axes, strict=True)]
    state, outs = _over(body, n, state, scanned, directions)
    axes = _flags(scan_output_axes, len(outs), "scan_output_axes")
    directions = _flags(scan_output_directions, len(outs), "scan_output_directions")
    outs = [xp(o).flip(o, 0) if d else o for o, d in zip(outs, directions, strict=True)]
    outs = [xp(o).moveaxis(o, 0, axis_of(a, o.ndim)) for o, a in zip(outs, axes, strict=True)]
    return (*state, *outs)


@op("Scan", since=8)
def scan_batches(sequence_lens=None, *initial_state_and_scan_inputs, body, num_scan_inputs, directions=None):
    """Scan-8: axis 0 is the batch and axis 1 the sequence; beyond a sequence's length the outputs are zero."""
    n = len(initial_state_and_scan_inputs) - num_scan_inputs
    directions = _flags(directions, num_scan_inputs, "directions")
    batch, extent = initial_state_and_scan_inputs[n].shape[:2]
    rows = []
    for b in range(batch):
        values = results(v[b] for v in initial_state_and_scan_inputs)
        length = None if sequence_lens is None else sequence_lens[b]
        state, outs = _over(body, n, values[:n], values[n:], directions, first=b * extent, length=length)
        rows.append((*state, *outs))
    if not rows:
        raise ValueError("Scan-8 over an empty batch has no result to take shapes from")
    return tuple(xp(*column).stack(column) for column in zip(*rows, strict=True))


# ------------------------------------------------------------------------------------------- SequenceMap


@op("SequenceMap", since=17)
def sequence_map(input_sequence, *additional_inputs, body):
    """SequenceMap: the body on each element; sequences among the other inputs go along, tensors are shared."""
    inputs = (input_sequence, *additional_inputs)
    lengths = [len(v) for v in inputs if isinstance(v, list)]
    if len(set(lengths)) != 1:
        raise ValueError(f"the sequences differ in length ({lengths})")
    each = ([v[i] if isinstance(v, list) else v for v in inputs] for i in range(lengths[0]))
    rows = [results(body(*operands, step=i)) for i, operands in enumerate(each)]
    return tuple([row[k] for row in rows] for k in range(len(body.outputs)))
