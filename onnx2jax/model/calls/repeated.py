"""Calls of a kind that a model has met before: straight to the program that was compiled for it.

The first call of a kind goes the long way: arguments are bound and checked, the graph may be cut, a program is
compiled. It is remembered where that way comes to nothing but a call of the program: every argument was taken as it is,
no random key was drawn, nothing was padded, placed on a mesh or counted, and one program optimised for the CPU computes
all outputs. What holds of the calls remembered:

- The kind says all that the long way decides by: how many arguments there are by position, the names of the others, and
  for each its element type, its shape and whether it is NumPy's or JAX's; and whose the results are to be. Values and
  devices decide nothing there.
- The table is one model's, because the weights are; the programs are shared with the models that ``with_params`` makes.
- What JAX compiles anew for (precision of products, default device, 32 or 64 bits, ``jax.clear_caches``) is left to
  the ``jax.jit`` at the end of either way, and a mesh takes the long one.
- It holds no reference to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import SingleDeviceSharding

from ... import compat
from ...ir.graph import Graph
from ...runtime.compiled import Known
from ...runtime.optimize.executable import Weights
from ...runtime.program import Program

_Known = tuple[Program, Graph, Callable[[list[Any]], list[Any]], list[int] | None]
"""The program, its graph as it was cut, its call, and which arguments that takes; None for all as they come."""


class Calls:
    """The calls of one model, by kind."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def again(self, args: Sequence[Any], named: Mapping[str, Any], on_host: bool = False) -> list[Any] | None:
        """The results of a call of a known kind, as JAX arrays; None where it has to go the long way.

        ``on_host``: NumPy's will do.
        """
        known = self._known.get(_kind(args, named, on_host))
        if known is None or known[0].folded is not known[1] or not compat.context_mesh().empty:
            return None
        *_, call, order = known
        values = [*args, *named.values()] if named else list(args)
        return call(values if order is None else [values[i] for i in order])

    def remember(
        self,
        program: Program,
        args: Sequence[Any],
        named: Mapping[str, Any],
        bound: Mapping[str, Any],
        weights: Weights,
        known: Known,
        on_host: bool,
    ) -> None:
        """Note a call that has been made the long way, if that came to nothing but a call of the program.

        Args:
            program: the model's.
            args, named: the call's arguments as they were given.
            bound: what was made of them, by input name, in the same order.
            weights, known: the model's own.
            on_host: NumPy's arrays are wanted.
        """
        kind, parts = _kind(args, named, on_host), program.folded
        pairs = zip((*args, *named.values()), bound.values(), strict=False)
        if kind is None or len(bound) != len(args) + len(named) or not all(a is b or _is_text(a) for a, b in pairs):
            return
        if (direct := program.direct(bound, weights, known, on_host=on_host)) is not None:
            names = list(bound)
            order = None if names == direct.names else [names.index(n) for n in direct.names]
            call = direct.call
            if any(map(_is_text, (*args, *named.values()))):

                def call(leaves: list[Any]) -> list[Any]:
                    return direct.call([v.astype(object) if _is_text(v) else v for v in leaves])

            self._known[kind] = program, parts, call, order


def _is_text(value: Any) -> bool:
    """Whether it is text in an array of NumPy's, which the model takes as an array of objects."""
    return type(value) is np.ndarray and value.dtype.kind == "U"


def _kind(args: Sequence[Any], named: Mapping[str, Any], on_host: bool) -> Any:
    """What tells calls apart; None where an argument is no array, is traced, or lies on a mesh."""
    kind: tuple[Any, ...] = (on_host, len(args), *named)
    try:
        for value in (*args, *named.values()) if named else args:
            if type(value) is not np.ndarray and (value.weak_type or type(value.sharding) is not SingleDeviceSharding):
                return None
            kind += (type(value), value.dtype, value.shape)
    except AttributeError:  # neither NumPy's nor JAX's own
        return None
    return kind
