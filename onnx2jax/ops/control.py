"""Control flow: If, Loop, Scan, SequenceMap; sequences and optionals.

A sequence is a Python list and an empty optional None; their tensors may be traced.
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import KnownValueError
from ..limits import COUNTED_TRIPS
from ..proto.types import to_dtype
from .arrays import FIX, axis_of, dims, is_known, is_traced, xp
from .indexing import in_32_bits
from .iteration import equal, is_host_only, iterate, results, strongly_typed, truth, type_string
from .registry import Shaped, Static, op
from .traced import shape_vector

_TRACED_TRIPS = "under jit, a traced trip count rules out scan outputs and states that change type"


def step_of(body, n, *, has_cond):
    """(step, condition of the first trip): a Loop's body with n states as the step function of `iterate`.

    Without `has_cond` the body's condition is carried to the next trip as the first state, and ignored.
    """
    # The ranks of the body's counter and condition: 0 or, from some exporters, 1.
    ranks = [len(v.type.shape) if v.type is not None and v.type.shape is not None else 0 for v in body.inputs[:2]]
    true = np.ones((1,) * ranks[1], bool)

    def step(i, state, _):
        state = [true, *state] if has_cond else state
        go, *values = results(body(i.reshape((1,) * ranks[0]), *state, step=i))
        if has_cond:
            return go, values[:n], values[n:]
        # bodies declare bool[1] and return bool[], or vice versa
        go = go.reshape(true.shape) if np.size(go) == 1 else go
        return np.True_, [go, *values[:n]], values[n:]

    return step, true


def endless(step):
    """The step of a loop whose trips are counted: its condition is true."""

    def counted(i, state, x):
        _, *rest = step(i, state, x)
        return np.True_, *rest

    return counted


def known_trips(body, states, limit, go):
    """The number of trips of a Loop whose condition depends on known values alone, such as counters; None if unknown.

    Evaluates, trip by trip, those nodes of the body that compute the condition and the states that it depends on.
    """
    part, needed = body.condition()
    if part is None or not all(is_known(states[k]) for k in needed) or not isinstance(limit, int | None):
        return None
    states, i = list(states), 0
    while go and (limit is None or i < limit):
        cond, *new = results(part(np.array(i, np.int64), np.True_, *states))
        if i == COUNTED_TRIPS or not is_known((cond, *new)):
            return None
        for k, value in zip(needed, new, strict=True):
            states[k] = value
        go, i = truth(cond), i + 1
    return i


FORWARD_ONLY = (
    "JAX cannot differentiate a loop with a traced trip count in reverse mode. Specialise on the inputs that determine "
    "the trip count and the condition: convert(..., static={'input name': value}); or use forward mode: jax.jvp"
)


@op("Loop", unsharded=True, limits=f"{_TRACED_TRIPS}; strings in its states on the host")
def loop(M=None, cond=None, *v_initial, body, max_trips, loop_cond, compiled, forward_only):
    """Loop: `lax.scan` for a known trip count, otherwise `lax.while_loop`.

    On the host, where shapes or the trip count depend on data, blocks of trips run compiled.
    Without `cond` it is a for-loop: the body's condition is carried to the next trip and ignored (SC-13), unless
    `loop_cond` is onnxruntime's: there it ends the loop.
    """
    if M is None and cond is None and loop_cond == "onnx":
        raise ValueError("a Loop without trip count and without condition never ends; give it M or cond")
    n, has_cond = len(v_initial), cond is not None or loop_cond == "onnxruntime"
    go = True if cond is None else cond
    # The body only runs while the condition holds, so inside it the condition is the constant True.
    step, true = step_of(body, n, has_cond=has_cond)
    state = list(v_initial) if has_cond else [true, *v_initial]
    if has_cond and compiled is None and not is_traced(M, go):
        limit = None if M is None else dims(M)[0]
        if (count := known_trips(body, state, limit, truth(go))) is not None:
            M, go, step = np.array(count, np.int64), True, endless(step)

    def run_block(i, state, last):
        operands = (np.array(i, np.int64), np.array(last, np.int64), *state)
        block = compiled(i, "Trips", operands, len(body.outputs) + 1 + (not has_cond), states=n, has_cond=has_cond)
        if block is None:
            return None
        count, go, *values = block
        return int(count), go, values[: len(state)], [rows[:count] for rows in values[len(state) :]]

    state, outs = iterate(
        step, state, body.outputs[1 + n :], trips=M, go=go, max_trips=max_trips,
        run_block=None if compiled is None else run_block, finalize=partial(forward_only, why=FORWARD_ONLY),
    )  # fmt: skip
    return (*state[len(state) - n :], *outs)


@op("If", unsharded=True, limits="a traced condition needs branches of equal types and shapes; strings on the host")
def if_(cond, *, then_branch, else_branch):
    """If: a known condition selects a branch, a traced one becomes `lax.cond`."""
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
                # The branch not taken may not support these shapes, as with a sampling rate or mode chosen by an input.
                reason = str(error).partition("\n")[0]
                raise KnownValueError(f"{name} cannot run ({reason}) and the condition is traced") from error
            if len(seen) == 2:
                _same_types(**seen)
            return [None if is_host_only(v) else jax.tree.map(strongly_typed, v) for v in values]

        return run

    chosen = lax.cond(cond, traced("then_branch", then_branch), traced("else_branch", else_branch))
    # Known values on which both branches agree, mostly shapes, stay known.
    known = map(equal, seen["then_branch"], seen["else_branch"])
    return tuple(a if k else c for a, k, c in zip(seen["then_branch"], known, chosen, strict=True))


def _same_types(then_branch, else_branch):
    for k, (a, b) in enumerate(zip_longest(then_branch, else_branch)):
        if type_string(a) != type_string(b) or (is_host_only(a) and not equal(a, b)):
            raise KnownValueError(
                f"output {k} of the branches differs (then: {type_string(a)}, else: {type_string(b)}) and the "
                f"condition is traced, so one compiled program cannot return both; make the condition known: {FIX}"
            )


def _flags(values, n, what):
    if values is None:
        return (0,) * n
    if len(values) != n:
        raise ValueError(f"{what} must have {n} entries (it has {len(values)})")
    return tuple(values)


def _scan_over(body, n, state, xs, directions, *, first=0, length=None):
    """(final state, stacked outputs) of a body scanned over the first axis of ``xs``, backwards where flagged.

    PRNG keys count steps from `first`; from step `length` on, the state is unchanged and outputs are zero.
    """
    extents = [x.shape[0] for x in xs]
    if len(set(extents)) != 1:
        raise ValueError(f"the scan inputs differ in length ({extents})")

    def step(i, state, x):
        values = results(body(*state, *x, step=first + i))
        if length is not None:
            active = i < length
            previous = [*state, *(np.zeros((), v.dtype) for v in values[n:])]
            values = [xp.where(active, a, b) for a, b in zip(values, previous, strict=True)]
        return np.True_, values[:n], values[n:]

    xs = tuple(xp.flip(x, 0) if d else x for x, d in zip(xs, directions, strict=True))
    return iterate(step, state, body.outputs[n:], trips=shape_vector((extents[0],)), xs=xs)


@op("Scan", since=9, unsharded=True, limits="Scan-8 over an empty batch raises")
def scan(
    *initial_state_and_scan_inputs, body, num_scan_inputs, scan_input_axes=None, scan_input_directions=None,
    scan_output_axes=None, scan_output_directions=None,
):  # fmt: skip
    """Scan: inputs are the initial states, then the tensors to scan, each along its axis and in its direction."""
    n, m = len(initial_state_and_scan_inputs) - num_scan_inputs, num_scan_inputs
    state, xs = list(initial_state_and_scan_inputs[:n]), initial_state_and_scan_inputs[n:]
    axes = _flags(scan_input_axes, m, "scan_input_axes")
    directions = _flags(scan_input_directions, m, "scan_input_directions")
    scanned = [xp.moveaxis(x, axis_of(a, x.ndim), 0) for x, a in zip(xs, axes, strict=True)]
    state, outs = _scan_over(body, n, state, scanned, directions)
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
        state, outs = _scan_over(body, n, values[:n], values[n:], directions, first=b * extent, length=length)
        rows.append((*state, *outs))
    if not rows:
        raise ValueError("Scan-8 over an empty batch is unsupported: the output shapes are unknown")
    return tuple(xp.stack(column) for column in zip(*rows, strict=True))


@op("SequenceMap", since=17, unsharded=True, limits="unrolled: one copy of the body per element")
def sequence_map(input_sequence, *additional_inputs, body):
    """SequenceMap: applies the body to each element; other sequences are zipped with it, tensors are shared."""
    inputs = (input_sequence, *additional_inputs)
    lengths = [len(v) for v in inputs if isinstance(v, list)]
    if len(set(lengths)) != 1:
        raise ValueError(f"the sequences differ in length ({lengths})")
    each = ([v[i] if isinstance(v, list) else v for v in inputs] for i in range(lengths[0]))
    rows = [results(body(*operands, step=i)) for i, operands in enumerate(each)]
    return tuple([row[k] for row in rows] for k in range(len(body.outputs)))


@op("SequenceEmpty", since=11, unsharded=True)
def sequence_empty(*, dtype=None):
    """SequenceEmpty: an empty list; the attribute dtype is only validated."""
    to_dtype(1 if dtype is None else dtype, "dtype")
    return []


@op("SequenceConstruct", since=11, unsharded=True)
def sequence_construct(*inputs):
    if len({v.dtype for v in inputs}) > 1:
        raise ValueError(f"the tensors of a sequence must have one element type (got {[str(v.dtype) for v in inputs]})")
    return list(inputs)


@op("SequenceLength", since=11, unsharded=True)
def sequence_length(input_sequence: Shaped):
    return np.array(len(input_sequence), np.int64)


def _position(position, default, low, high):
    position = default if position is None else int(position.reshape(()))
    if not low <= position <= high:
        raise ValueError(f"position {position} is outside [{low}, {high}]")
    return position


@op("SequenceAt", since=11, unsharded=True, limits="a traced position requires elements of one shape")
def sequence_at(input_sequence, position):
    """SequenceAt: a traced position requires elements of one shape and dtype, and yields NaN if out of range."""
    n = len(input_sequence)
    if not is_traced(position):
        return input_sequence[_position(np.asarray(position), None, -n, n - 1)]
    shapes = {(v.shape, v.dtype) for v in input_sequence}
    if len(shapes) != 1 or np.dtype(object) in {d for _, d in shapes}:
        raise KnownValueError(f"the position is traced and the elements differ in shape or dtype; make it known: {FIX}")
    return jnp.take(jnp.stack(input_sequence), in_32_bits(position.reshape(()), n), axis=0, mode="fill")


@op("SequenceInsert", since=11, unsharded=True)
def sequence_insert(input_sequence, tensor, position: Static = None):
    if input_sequence and input_sequence[0].dtype != tensor.dtype:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be inserted into a sequence of {input_sequence[0].dtype}")
    n = len(input_sequence)
    at = _position(position, n, -n, n)
    return [*input_sequence[:at], tensor, *input_sequence[at:]]


@op("SequenceErase", since=11, unsharded=True)
def sequence_erase(input_sequence, position: Static = None):
    n = len(input_sequence)
    at = _position(position, n - 1, -n, n - 1) % n
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


@op("ConcatFromSequence", since=11, unsharded=True)
def concat_from_sequence(input_sequence, *, axis, new_axis=0):
    return (xp.stack if new_axis else xp.concatenate)(input_sequence, axis=axis)


@op("SplitToSequence", since=11, unsharded=True)
def split_to_sequence(input, split: Static = None, *, axis=0, keepdims=1):
    """SplitToSequence: ``split`` is the length of each piece (the last may be shorter), a vector of lengths, or 1."""
    axis = axis_of(axis, input.ndim)
    extent, sizes = input.shape[axis], (1,) if split is None else dims(split)
    if split is None or split.ndim == 0:
        if sizes[0] <= 0:
            raise ValueError(f"split must be positive (got {sizes[0]})")
        ends = [*range(sizes[0], extent, sizes[0]), extent] if extent else []
    else:
        if min(sizes, default=0) < 0 or sum(sizes) != extent:
            raise ValueError(f"split {sizes} does not add up to the extent {extent} of axis {axis}")
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
    *pieces, _ = xp.split(input, ends, axis)  # the piece after the last end is empty
    return [p.squeeze(axis) for p in pieces] if split is None and not keepdims else pieces


@op("Optional", since=15, unsharded=True)
def optional(input=None, *, type=None):
    if input is None and type is None:
        raise ValueError("an empty Optional needs the attribute 'type'")
    return input


@op("OptionalHasElement", since=15, unsharded=True)
def optional_has_element(input: Shaped = None):
    return np.array(input is not None)


@op("OptionalGetElement", since=15, unsharded=True)
def optional_get_element(input):
    if input is None:
        raise ValueError("the optional is empty; check OptionalHasElement first")
    return input
