"""Iteration shared by Loop, Scan and SequenceMap.

In order of preference: a Python loop if every value is concrete (the model runs on the host), `lax.scan`, a loop
unrolled in Python, and `lax.while_loop` for a traced trip count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import KnownValueError
from ..proto.types import HOST_ONLY
from .arrays import FIX, dims, identical, is_known, is_traced, xp

_ENDLESS = np.iinfo(np.int64).max
MAX_ROWS, _MAX_BYTES = 256, 2**24
"""The size of the scan-output buffers after which a loop of unknown length returns to the host."""


class _NotCarried(Exception):
    """A loop state cannot be the carry of a lax loop; the message says why."""


class _NotInvariant(Exception):
    """Positions of states assumed loop-invariant that the body changes."""


class _TracedCondition(Exception):
    """The loop condition is traced."""


# ------------------------------------------------------------------------------------------------ values


def strongly_typed(value):
    """The value as a JAX array with a strong type: the carry of a lax loop must not change its weak type."""
    return jnp.asarray(value, dtype=value.dtype)


def is_host_only(value):
    """Whether any array of a value is of a type that JAX lacks: strings, or floats of 6 bits."""
    return any(isinstance(leaf, np.ndarray) and leaf.dtype in HOST_ONLY for leaf in jax.tree.leaves(value))


def type_string(value):
    """The dtype and shape of a value, as in float32[2,3]."""
    if isinstance(value, list):
        return "[" + ", ".join(map(type_string, value)) + "]"
    return "none" if value is None else f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _traceable(values, what):
    """The values; raises _NotCarried if one is of a type that JAX lacks."""
    if any(map(is_host_only, values)):
        raise _NotCarried(f"{what} holds text or floats of 6 bits")
    return values


def equal(a, b):
    """Whether two values are both known and identical."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is b or not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return a is b and not is_traced(a)
    return identical(a, b)


def results(values):
    """The values a body returned, NumPy scalars converted to arrays."""
    return [np.asarray(v) if isinstance(v, np.generic) else v for v in values]


def truth(cond):
    """The single element of a condition, which some exporters write as a vector: a bool, or a traced scalar."""
    if np.size(cond) != 1:
        raise ValueError(f"the condition must have a single element (its shape is {cond.shape})")
    return cond.reshape(()).astype(bool) if is_traced(cond) else np.asarray(cond).astype(bool).item()


# ------------------------------------------------------------------------------------------------- loops


def iterate(step, state, declared, *, trips, go=True, xs=(), max_trips=None, run_block=None, finalize=None):
    """Run `go, state, outs = step(i, state, x)` at most `trips` times (None: without limit), while `go` holds.

    `declared` are the body's declared scan outputs, `xs` arrays whose leading axis is the iteration. Returns the final
    state and the stacked outs. Exceeding `max_trips` raises; to count trips, an open-ended loop must run in Python.
    There, `run_block(i, state, last)` may run several trips, up to `last`: it returns (count, go, state, outs), or
    None. The final state of a `lax.while_loop` passes through `finalize`.
    """
    if is_traced(trips, go):
        if max_trips is not None:
            raise KnownValueError("the trip count is traced, so max_trips can only be enforced on the host")
        return _while_without_outs(step, state, declared, trips, go, finalize)
    trips = trips if trips is None else dims(trips)[0]
    if max_trips is not None and (trips is None or (isinstance(trips, int) and trips > max_trips)):
        limits = {"concrete": False, "max_trips": max_trips, "run_block": run_block}
        return _in_python(step, state, declared, trips, truth(go), xs, **limits)
    # Under jax.export a trip count may be symbolic: neither known nor traced.
    known = trips is None or isinstance(trips, int)
    if known and not is_traced(state, xs):
        results = _in_python(step, state, declared, trips, truth(go), xs, concrete=True, run_block=run_block)
        if results is not None:
            return results
    if not truth(go) or (isinstance(trips, int) and trips <= 0):
        return state, _no_trips(step, state, declared, xs)
    try:
        return scan(step, state, xs, trips)
    except _TracedCondition:
        if not declared and not xs and not _has_values(state):
            return _while_without_outs(step, state, declared, trips, go, finalize)
    except _NotCarried:
        pass
    except KnownValueError:
        if not known:
            raise
    if not known:
        raise ValueError(
            f"a loop with a symbolic trip count ({trips}) must keep its condition and state types constant; export "
            "with a fixed extent instead"
        )
    return _in_python(step, state, declared, trips, True, xs, concrete=False)


def scan(step, state, xs, trips):
    """(final state, stacked outs) of a `step` whose condition is true, as `lax.scan`; states that it keeps stay known.

    Raises if the types of the others change.
    """
    return _with_invariants(state, lambda invariant: _scan(step, state, invariant, trips, xs))


def _has_values(state):
    """Whether traced states have concrete values, as under jax.vjp outside jit: then comparisons are concrete."""
    return not is_traced([lax.ne(s, s) for s in jax.tree.leaves(state) if is_traced(s)])


def _in_python(step, state, declared, trips, go, xs, *, concrete, max_trips=None, run_block=None):
    """(state, outs) of a Python loop; if `concrete`, None as soon as the body returns a traced value."""
    blocks, i = [], 0
    while go and (trips is None or i < trips):
        if i == max_trips:
            raise ValueError(f"the loop exceeds max_trips ({max_trips}); allow more: convert(..., max_trips=n)")
        last = min(_ENDLESS if n is None else n for n in (trips, max_trips))
        if run_block is not None and (block := run_block(i, state, last)) is not None:
            count, cond, state, outs = block
            i, go = i + count, truth(cond)
            blocks.append(outs)
            continue
        cond, new, outs = step(np.array(i, np.int64), state, results(x[i] for x in xs))
        if concrete and is_traced(cond, new, outs):
            return None
        i += 1
        if is_traced(cond):
            raise KnownValueError(f"after {i} trips the condition is traced, and output shapes depend on it; {FIX}")
        go, state = truth(cond), new
        blocks.append([o[None] for o in outs])
    if not i:
        return state, _no_trips(step, state, declared, xs)
    return state, [_join(k, column) for k, column in enumerate(zip(*blocks, strict=True))]


def _join(k, blocks):
    shapes = {v.shape[1:] for v in blocks}
    if len(shapes) > 1:
        raise ValueError(f"scan output {k} has different shapes in different trips ({sorted(shapes, key=str)})")
    return xp.concatenate(blocks)


def _no_trips(step, state, declared, xs):
    """Empty scan outputs, shaped as one trip would return them, or else as the body declares."""
    if not declared:
        return []
    outs = []
    first = tuple(np.zeros(x.shape[1:], x.dtype) for x in xs)
    try:
        jax.eval_shape(lambda: outs.extend((o.shape, o.dtype) for o in step(np.array(0, np.int64), state, first)[2]))
    except Exception:
        types = [o.type for o in declared]
        if any(t is None or t.shape is None for t in types):
            raise
        # The body cannot run on this state (it may read an empty sequence); the outputs are empty anyway.
        outs = [(tuple(d if isinstance(d, int) else 0 for d in t.shape), t.dtype) for t in types]
    return [np.zeros((0, *shape), dtype) for shape, dtype in outs]


def _with_invariants(state, run):
    """`run(invariant)`, where `invariant` marks the known states that no trip changes; these stay known."""
    invariant = [is_known(s) for s in state]
    while True:
        try:
            return run(invariant)
        except _NotInvariant as changed:
            for k in changed.args[0]:
                invariant[k] = False


def _carry(state, invariant, like=None):
    """The variant part of the state as JAX arrays; raises _NotCarried unless its types are those of ``like``."""
    variant = _traceable([s for s, fixed in zip(state, invariant, strict=True) if not fixed], "a state")
    for old, new in zip(like or variant, variant, strict=True):
        if type_string(old) != type_string(new):
            raise _NotCarried(f"a state changes from {type_string(old)} to {type_string(new)}")
    return jax.tree.map(strongly_typed, variant)


def _merge(state, invariant, carry):
    """The full state: invariant entries of ``state``, the others from ``carry``."""
    carry = iter(carry)
    return [s if fixed else next(carry) for s, fixed in zip(state, invariant, strict=True)]


def _next_carry(state, invariant, carry, new):
    """The carry of the next trip; raises _NotInvariant if an invariant state changed."""
    pairs = enumerate(zip(state, invariant, new, strict=True))
    if changed := [k for k, (old, fixed, value) in pairs if fixed and not equal(old, value)]:
        raise _NotInvariant(changed)
    return _carry(new, invariant, carry)


def _scan(step, state, invariant, trips, xs):
    def body(carry, x):
        i, states = carry
        go, new, outs = step(i, _merge(state, invariant, states), x[1:])
        if is_traced(go):
            raise _TracedCondition
        if not truth(go):
            raise _NotCarried("the body ends the loop")
        outs = [strongly_typed(o) for o in _traceable(outs, "a scan output")]
        return (i + 1, _next_carry(state, invariant, states, new)), outs

    if trips is None:
        raise _TracedCondition
    # lax.scan accepts a symbolic trip count only as the extent of an array.
    length = trips if isinstance(trips, int) else None
    index = jnp.arange(trips) if length is None and not xs else None
    start = (jnp.zeros((), jnp.int64), _carry(state, invariant))
    (_, states), outs = lax.scan(body, start, (index, *map(strongly_typed, xs)), length=length)
    return _merge(state, invariant, states), outs


def _while_without_outs(step, state, declared, trips, go, finalize):
    if declared:
        raise KnownValueError(f"the extent of {len(declared)} scan output(s) is a traced trip count; {FIX}")
    _, _, state, outs = while_(step, state, 0, trips, go)
    return (finalize(state) if finalize else state), outs


def while_(step, state, size, trips, go, first=0):
    """`lax.while_loop` from trip `first` on: (next trip, condition, state, outs).

    The outs are buffers of `size` rows; rows beyond are dropped. Without a size the loop stops when the buffers are
    full, and the caller continues it: memory stays proportional to the results.
    """

    def run(invariant):
        def more(carry):
            i, go, *_ = carry
            return go if end is None else go & (i < end)

        def body(carry):
            i, _, states, buffers = carry
            go, new, outs = step(i, _merge(state, invariant, states), ())
            buffers = [b.at[i - first].set(o, mode="drop") for b, o in zip(buffers, outs, strict=True)]
            return i + 1, jnp.asarray(truth(go)), _next_carry(state, invariant, states, new), buffers

        def rows():
            return _traceable(step(start, _merge(state, invariant, carry), ())[2], "a scan output")

        start, carry = jnp.asarray(first, jnp.int64), _carry(state, invariant)
        outs, end = jax.eval_shape(rows), trips
        capacity = MAX_ROWS if size is None else size
        if size is None and outs:
            capacity = max(1, min(capacity, _MAX_BYTES // max(1, sum(o.size * o.dtype.itemsize for o in outs))))
            end = start + capacity if end is None else jnp.minimum(end, start + capacity)
        buffers = [jnp.zeros((capacity, *o.shape), o.dtype) for o in outs]
        i, cond, states, buffers = lax.while_loop(more, body, (start, jnp.asarray(truth(go)), carry, buffers))
        return i, cond, _merge(state, invariant, states), buffers

    trips = trips if trips is None else jnp.reshape(jnp.asarray(trips, jnp.int64), ())
    try:
        return _with_invariants(state, run)
    except _NotCarried as why:
        raise KnownValueError(f"{why}, and the trip count is traced; to unroll the loop, {FIX}") from why
