"""Types of values that a file does not declare, with symbolic extents, by two abstract evaluations.

The graph is evaluated with two sets of extents for the dimension variables. An extent that is equal in both is a
constant; others are symbols, equal where both numbers are. A value that cannot be evaluated has no type.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..ir.graph import Graph
from ..proto.types import TensorType
from .abstract import Extents, abstract_values

EXTENTS: Final = 1009
"""Free extents are prime numbers from here on, to recognise them in the shapes of inner values."""
UNNAMED: Final = "?"
"""Begins the symbol of an extent that is no expression of one dimension variable."""


def symbolic_types(graph: Graph, least: int = 11) -> dict[str, TensorType]:
    """The types of a graph's values whose rank is known, by name; each extent is a number or a symbol.

    ``least`` of the primes that stand for extents: values up to some 64 elements are known, larger ones are types.
    """
    first, second = Extents(0, least), Extents(1, least)
    ones = abstract_values(graph, first)
    twos = abstract_values(graph, second) if first else ones
    unnamed: dict[tuple[int, int], str] = {}

    def extent(one: int, two: int) -> int | str:
        if one == two:
            return one
        return _expression(one, two, first, second) or unnamed.setdefault((one, two), f"{UNNAMED}{len(unnamed)}")

    return {
        name: TensorType(np.dtype(one.dtype), tuple(map(extent, one.shape, twos[name].shape)))
        for name, one in ones.items()
        if name in twos and len(one.shape) == len(twos[name].shape)
    }


def inferred_types(graph: Graph) -> dict[str, TensorType]:
    """The types of a graph's values, with dimension variables or expressions of one; None for other extents."""
    return {
        name: TensorType(kind.dtype, tuple(None if str(d).startswith(UNNAMED) else d for d in kind.shape or ()))
        for name, kind in symbolic_types(graph, EXTENTS).items()
    }


def _expression(one: int, two: int, first: Extents, second: Extents) -> str | None:
    """An extent as an expression of one dimension variable, from its values for two extents of it."""
    named = {n: (a, second.get(n, a)) for n, a in first.items() if ", axis " not in n and not n.startswith("trips of ")}
    for name, pair in named.items():
        if (one, two) == pair:
            return name
    for name, (a, b) in named.items():
        if a == b:
            continue
        factor, rest = divmod(one - two, a - b)
        if not rest and factor > 0:
            more = one - factor * a
            text = f"{factor}*{name}" if factor > 1 else name
            return f"{text}{more:+d}" if more else text
        for k in (2, 4, 8, 16, 32, 64):
            if (one, two) == (-(-a // k), -(-b // k)):
                return f"{name}/{k}"
    return None
