"""Control flow: If, Loop, Scan, SequenceMap."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

import jax
import numpy as np
from jax import lax

from ..errors import KnownValueError
from .arrays import axis_of, is_traced, shape_vector, xp
from .iteration import CURE, described, equal, is_text, iterate, results, strong, truth
from .registry import op

_NO_BOX = "a loop whose number of trips is traced has neither scan outputs nor states that change type under jit"


def steps_of(body, n, *, ruled):
    """A Loop's body with n states as `iterate` wants it, and the condition that its first trip sees.

    Not `ruled` by its condition, it hands the condition on to the next trip, as the first state, and ignores it.
    """
    # The shapes in which the body wants its counter and condition: [] or, from some exporters, [1].
    ranks = [len(v.type.shape) if v.type is not None and v.type.shape is not None else 0 for v in body.inputs[:2]]
    true = np.ones((1,) * ranks[1], bool)

    def step(i, state, _):
        state = [true, *state] if ruled else state
        go, *values = results(body(i.reshape((1,) * ranks[0]), *state, step=i))
        return (go, values[:n], values[n:]) if ruled else (np.True_, [go, *values[:n]], values[n:])

    return step, true


IRREVERSIBLE = (
    "JAX cannot differentiate a loop in reverse whose number of trips is traced. Make the inputs that the trip count "
    "and the condition come from known: convert(..., static={'input name': value}); or differentiate forwards: jax.jvp"
)


@op("Loop", unsharded=True, limits=f"{_NO_BOX}; strings in its states on the host")
def loop(M=None, cond=None, *v_initial, body, max_trips, compiled, forward_only):
    """Loop: `lax.scan` where the number of trips is known, `lax.while_loop` where it is not.

    On the host, where shapes or the number of trips depend on data, many trips at a time run compiled.
    An absent `cond` makes a plain for-loop: the body's condition is handed on to the next trip, and ignored.
    """
    if M is None and cond is None:
        raise ValueError("a Loop without trip count and without condition never ends; give it M or cond")
    n, ruled = len(v_initial), cond is not None
    # Whenever the body runs, the condition holds: the body may know that.
    step, true = steps_of(body, n, ruled=ruled)
    state = list(v_initial) if ruled else [true, *v_initial]

    def ahead(i, state, last):
        operands = (np.array(i, np.int64), np.array(last, np.int64), *state)
        done = compiled(i, "Trips", operands, len(body.outputs) + 1 + (not ruled), states=n, ruled=ruled)
        if done is None:
            return None
        made, go, *values = done
        return int(made), go, values[: len(state)], [rows[:made] for rows in values[len(state) :]]

    declared = body.outputs[1 + n :]
    limits = {"trips": M, "go": cond if ruled else True, "most": max_trips}
    special = {"ahead": ahead if compiled is not None else None, "end": partial(forward_only, why=IRREVERSIBLE)}
    state, outs = iterate(step, state, declared, **limits, **special)
    return (*state[len(state) - n :], *outs)


@op("If", unsharded=True, limits="a traced condition needs branches of equal types and shapes; strings on the host")
def if_(cond, *, then_branch, else_branch):
    """If: a known condition takes one branch, a traced one becomes `lax.cond`."""
    if not is_traced(cond := truth(cond)):
        return tuple((then_branch if cond else else_branch)())
    seen = {}

    def traced(name, branch):
        def run():
            try:
                values = seen[name] = results(branch())
            except KnownValueError:
                raise
            except Exception as error:
                # A branch not taken may not fit the shapes at hand: a sampling rate, a mode, chosen by an input.
                reason = str(error).partition("\n")[0]
                raise KnownValueError(f"{name} cannot run ({reason}) and the condition is traced") from error
            if len(seen) == 2:
                _same_types(**seen)
            return [None if is_text(v) else jax.tree.map(strong, v) for v in values]

        return run

    chosen = lax.cond(cond, traced("then_branch", then_branch), traced("else_branch", else_branch))
    # What both branches know, and agree on, stays known: shapes, mostly.
    known = map(equal, seen["then_branch"], seen["else_branch"])
    return tuple(a if k else c for a, k, c in zip(seen["then_branch"], known, chosen, strict=True))


def _same_types(then_branch, else_branch):
    for k, (a, b) in enumerate(zip_longest(then_branch, else_branch)):
        if described(a) != described(b) or (is_text(a) and not equal(a, b)):
            raise KnownValueError(
                f"output {k} of the branches differs (then: {described(a)}, else: {described(b)}) and the condition is "
                f"traced, so one compiled program cannot return both; make it a known value: {CURE}"
            )


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
            values = [xp.where(alive, a, b) for a, b in zip(values, before, strict=True)]
        return np.True_, values[:n], values[n:]

    xs = tuple(xp.flip(x, 0) if d else x for x, d in zip(xs, directions, strict=True))
    return iterate(step, state, body.outputs[n:], trips=shape_vector((extents[0],)), xs=xs)


@op("Scan", since=9, unsharded=True, limits="Scan-8 over an empty batch raises")
def scan(
    *initial_state_and_scan_inputs, body, num_scan_inputs, scan_input_axes=None, scan_input_directions=None,
    scan_output_axes=None, scan_output_directions=None,
):  # fmt: skip
    """Scan: the states first, then the tensors to scan, each along its axis and in its direction."""
    n, m = len(initial_state_and_scan_inputs) - num_scan_inputs, num_scan_inputs
    state, xs = list(initial_state_and_scan_inputs[:n]), initial_state_and_scan_inputs[n:]
    axes = _flags(scan_input_axes, m, "scan_input_axes")
    directions = _flags(scan_input_directions, m, "scan_input_directions")
    scanned = [xp.moveaxis(x, axis_of(a, x.ndim), 0) for x, a in zip(xs, axes, strict=True)]
    state, outs = _over(body, n, state, scanned, directions)
    axes = _flags(scan_output_axes, len(outs), "scan_output_axes")
    directions = _flags(scan_output_directions, len(outs), "scan_output_directions")
    outs = [xp.flip(o, 0) if d else o for o, d in zip(outs, directions, strict=True)]
    outs = [xp.moveaxis(o, 0, axis_of(a, o.ndim)) for o, a in zip(outs, axes, strict=True)]
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
    return tuple(xp.stack(column) for column in zip(*rows, strict=True))


@op("SequenceMap", since=17, unsharded=True, limits="unrolled: one copy of the body for each element")
def sequence_map(input_sequence, *additional_inputs, body):
    """SequenceMap: the body on each element; sequences among the other inputs go along, tensors are shared."""
    inputs = (input_sequence, *additional_inputs)
    lengths = [len(v) for v in inputs if isinstance(v, list)]
    if len(set(lengths)) != 1:
        raise ValueError(f"the sequences differ in length ({lengths})")
    each = ([v[i] if isinstance(v, list) else v for v in inputs] for i in range(lengths[0]))
    rows = [results(body(*operands, step=i)) for i, operands in enumerate(each)]
    return tuple([row[k] for row in rows] for k in range(len(body.outputs)))
