"""The iteration that Loop, Scan and SequenceMap share.

A loop is tried in this order: plain Python while every value is concrete (the model runs on the host), `lax.scan`,
unrolling in Python, and `lax.while_loop` where the number of trips is only known at run time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import KnownValueError
from .arrays import dims, is_known, is_traced, xp

CURE = "declare the model inputs it is computed from static, or call the model outside jax.jit"
"""How to make a value known."""


_ENDLESS = np.iinfo(np.int64).max
MOST_ROWS, _MOST_BYTES = 256, 2**24
"""What scan outputs may take before a loop of unknown length hands them over."""


class _NotCarried(Exception):
    """Why a loop state cannot be the carry of a lax loop."""


class _Changes(Exception):
    """The positions of the states that were hoped to stay as they are, and do not."""


class _Undecided(Exception):
    """The condition to go on is traced."""


# ------------------------------------------------------------------------------------------------ values


def strong(value):
    """A value in JAX's hands, with a strong type: lax loops compare types to the letter."""
    return jnp.asarray(value, dtype=value.dtype)


def is_text(value):
    return any(isinstance(leaf, np.ndarray) and leaf.dtype.hasobject for leaf in jax.tree.leaves(value))


def described(value):
    if isinstance(value, list):
        return "[" + ", ".join(map(described, value)) + "]"
    return "nothing" if value is None else f"{value.dtype}[{','.join(map(str, value.shape))}]"


def equal(a, b):
    """Whether two values are both known, and the same."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is b or not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return a is b and not is_traced(a)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def results(values):
    """What a body returned, NumPy scalars as arrays."""
    return [np.asarray(v) if isinstance(v, np.generic) else v for v in values]


def truth(cond):
    """The single element of a condition, of which some exporters make a vector."""
    if np.size(cond) != 1:
        raise ValueError(f"the condition must hold a single element (its shape is {cond.shape})")
    return cond.reshape(()).astype(bool) if is_traced(cond) else np.asarray(cond).astype(bool).item()


# ---------------------------------------------------------------------------------------------------- If


# ------------------------------------------------------------------------------------------------- loops


def iterate(step, state, declared, *, trips, go=True, xs=(), most=None, ahead=None, end=None):
    """Run `go, state, outs = step(i, state, x)` at most `trips` times (None: without limit), while `go` holds.

    `declared` are the outs as the body declares them, `xs` arrays whose leading axis is the iteration. Returns the
    final state and the outs, stacked. More than `most` trips are an error; to count them, an open-ended loop must run
    in Python. There, `ahead(i, state, last)` may make many trips at once, up to the `last`: it returns how many were
    made, `go`, the state and the outs, or None. The final state of a `lax.while_loop` goes through `end`.
    """
    if is_traced(trips, go):
        if most is not None:
            raise KnownValueError("the number of trips is traced, so max_trips can only be kept on the host")
        return _while_without_outs(step, state, declared, trips, go, end)
    trips = trips if trips is None else dims(trips)[0]
    if most is not None and (trips is None or (isinstance(trips, int) and trips > most)):
        return _in_python(step, state, declared, trips, truth(go), xs, concrete=False, most=most, ahead=ahead)
    # jax.export knows symbolic numbers of trips: neither known nor traced.
    known = trips is None or isinstance(trips, int)
    if known and not is_traced(state, xs):
        done = _in_python(step, state, declared, trips, truth(go), xs, concrete=True, ahead=ahead)
        if done is not None:
            return done
    if not truth(go) or (isinstance(trips, int) and trips <= 0):
        return state, _no_trips(step, state, declared, xs)
    try:
        return _with_constants(state, lambda fixed: _scan(step, state, fixed, trips, xs))
    except _Undecided:
        if not declared and not xs and not _has_values(state):
            return _while_without_outs(step, state, declared, trips, go, end)
    except _NotCarried:
        pass
    except KnownValueError:
        if not known:
            raise
    if not known:
        raise ValueError(f"a loop of a symbolic number of trips ({trips}) must keep its condition and its types")
    return _in_python(step, state, declared, trips, True, xs, concrete=False)


def _has_values(state):
    """Whether the traced states stand for values at hand, as under jax.vjp outside jit: then comparisons are known."""
    return not is_traced([lax.ne(s, s) for s in jax.tree.leaves(state) if is_traced(s)])


def _in_python(step, state, declared, trips, go, xs, *, concrete, most=None, ahead=None):
    """Plain Python. While all is `concrete`, None as soon as the body proves to depend on traced values."""
    blocks, i = [], 0
    while go and (trips is None or i < trips):
        if i == most:
            raise ValueError(f"the loop goes on after max_trips ({most}) trips; allow more: convert(..., max_trips=n)")
        last = min(_ENDLESS if n is None else n for n in (trips, most))
        if ahead is not None and (done := ahead(i, state, last)) is not None:
            made, keep, state, outs = done
            i, go = i + made, truth(keep)
            blocks.append(outs)
            continue
        keep, new, outs = step(np.array(i, np.int64), state, results(x[i] for x in xs))
        if concrete and is_traced(keep, new, outs):
            return None
        i += 1
        if is_traced(keep):
            raise KnownValueError(f"after {i} trips the condition is traced, and the results' shapes need it; {CURE}")
        go, state = truth(keep), new
        blocks.append([o[None] for o in outs])
    if not i:
        return state, _no_trips(step, state, declared, xs)
    return state, [_join(k, column) for k, column in enumerate(zip(*blocks, strict=True))]


def _join(k, blocks):
    shapes = {v.shape[1:] for v in blocks}
    if len(shapes) > 1:
        raise ValueError(f"scan output {k} changes its shape from trip to trip ({sorted(shapes, key=str)})")
    return xp.concatenate(blocks)


def _no_trips(step, state, declared, xs):
    """Empty scan outputs. Their shape is what one trip would yield, or else what the body declares."""
    if not declared:
        return []
    found = []
    first = tuple(np.zeros(x.shape[1:], x.dtype) for x in xs)
    try:
        jax.eval_shape(lambda: found.extend((o.shape, o.dtype) for o in step(np.array(0, np.int64), state, first)[2]))
    except Exception:
        types = [o.type for o in declared]
        if any(t is None or t.shape is None for t in types):
            raise
        # The body cannot run on this state (say, it reads an empty sequence); nothing in the result has a value.
        found = [(tuple(d if isinstance(d, int) else 0 for d in t.shape), t.dtype) for t in types]
    return [np.zeros((0, *shape), dtype) for shape, dtype in found]


def _with_constants(state, run):
    """Call `run(fixed)`; `fixed` marks the known states that every trip returns as they were: those stay known."""
    fixed = [is_known(s) for s in state]
    while True:
        try:
            return run(fixed)
        except _Changes as changes:
            for k in changes.args[0]:
                fixed[k] = False


def _carry(state, fixed, like=None):
    """The part of the state that changes, as JAX arrays, when it has the types of the part to be like."""
    moving = [s for s, f in zip(state, fixed, strict=True) if not f]
    if any(map(is_text, moving)):
        raise _NotCarried("a state holds text")
    for old, new in zip(like or moving, moving, strict=True):
        if described(old) != described(new):
            raise _NotCarried(f"a state changes from {described(old)} to {described(new)}")
    return jax.tree.map(strong, moving)


def _merge(state, fixed, moving):
    moving = iter(moving)
    return [s if f else next(moving) for s, f in zip(state, fixed, strict=True)]


def _carry_on(state, fixed, carry, new):
    """The part of the new state to carry on, when what was fixed is as it was."""
    if changed := [k for k, (s, f, n) in enumerate(zip(state, fixed, new, strict=True)) if f and not equal(s, n)]:
        raise _Changes(changed)
    return _carry(new, fixed, carry)


def _scan(step, state, fixed, trips, xs):
    def body(carry, x):
        i, moving = carry
        go, new, outs = step(i, _merge(state, fixed, moving), x[1:])
        if is_traced(go):
            raise _Undecided
        if not truth(go):
            raise _NotCarried("the body ends the loop")
        if any(map(is_text, outs)):
            raise _NotCarried("a scan output holds text")
        return (i + 1, _carry_on(state, fixed, moving, new)), [strong(o) for o in outs]

    if trips is None:
        raise _Undecided
    # lax.scan understands a symbolic number of trips only as the length of an array.
    length = trips if isinstance(trips, int) else None
    index = jnp.arange(trips) if length is None and not xs else None
    start = (jnp.zeros((), jnp.int64), _carry(state, fixed))
    (_, moving), outs = lax.scan(body, start, (index, *map(strong, xs)), length=length)
    return _merge(state, fixed, moving), outs


def _while_without_outs(step, state, declared, trips, go, end):
    if declared:
        raise KnownValueError(f"a traced number of trips decides the length of {len(declared)} scan output(s); {CURE}")
    _, _, state, outs = while_(step, state, 0, trips, go)
    return (end(state) if end else state), outs


def while_(step, state, size, trips, go, first=0):
    """`lax.while_loop` from trip `first` on: the next trip, whether to go on, the state, and the outs.

    The outs are buffers of `size` rows; those of later trips are dropped. Without a size the loop stops when they are
    full: a loop of unknown length, continued, needs no more memory than its results.
    """

    def run(fixed):
        def more(carry):
            i, go, *_ = carry
            return go if end is None else go & (i < end)

        def body(carry):
            i, _, moving, buffers = carry
            go, new, outs = step(i, _merge(state, fixed, moving), ())
            buffers = [b.at[i - first].set(o, mode="drop") for b, o in zip(buffers, outs, strict=True)]
            return i + 1, jnp.asarray(truth(go)), _carry_on(state, fixed, moving, new), buffers

        def rows():
            values = step(start, _merge(state, fixed, carry), ())[2]
            if any(map(is_text, values)):
                raise _NotCarried("a scan output holds text")
            return values

        start, carry = jnp.asarray(first, jnp.int64), _carry(state, fixed)
        outs, end = jax.eval_shape(rows), trips
        room = MOST_ROWS if size is None else size
        if size is None and outs:
            room = max(1, min(room, _MOST_BYTES // max(1, sum(o.size * o.dtype.itemsize for o in outs))))
            end = start + room if end is None else jnp.minimum(end, start + room)
        buffers = [jnp.zeros((room, *o.shape), o.dtype) for o in outs]
        i, on, moving, buffers = lax.while_loop(more, body, (start, jnp.asarray(truth(go)), carry, buffers))
        return i, on, _merge(state, fixed, moving), buffers

    trips = trips if trips is None else jnp.reshape(jnp.asarray(trips, jnp.int64), ())
    try:
        return _with_constants(state, run)
    except _NotCarried as why:
        raise KnownValueError(f"{why}, while traced values decide the number of trips; to unroll it, {CURE}") from why
