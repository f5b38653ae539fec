"""Runs the CPU's passes on a training step, whose parameters change with every call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax

from ...pipeline import Passes, run_training
from ...program import as_function


def with_passes(function: Callable[..., Any], skip: Collection[str] = ()) -> Callable[..., Any]:
    """The function with its jaxpr rewritten by the training passes; its first argument is the state.

    Args:
        function: a training step.
        skip: names of passes that do not run.
    """

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        program = run_training(closed, len(jax.tree.leaves(args[0])), Passes().skipping(*skip))
        return jax.tree.unflatten(jax.tree.structure(results), as_function(program)(*jax.tree.leaves(args)))

    return inside
