"""Loop: a number of trips, a condition to go on, or both."""

from __future__ import annotations

from functools import partial

import numpy as np

from .control import iterate, results
from .registry import op


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


@op("Loop")
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
