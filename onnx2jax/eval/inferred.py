"""Types of values that a file does not declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..ir.graph import Graph
from ..proto.types import TensorType
from .abstract import Extents, abstract_values

EXTENTS: Final = 1009
"""Free extents are prime numbers from here on, in two evaluations, to recognise them in the shapes of inner values."""


def inferred_types(graph: Graph) -> dict[str, TensorType]:
    """The types of a graph's values, with dimension variables or expressions of one, by two abstract evaluations."""
    first, second = Extents(0, EXTENTS), Extents(1, EXTENTS)
    ones = abstract_values(graph, first)
    twos = abstract_values(graph, second) if first else ones
    return {
        name: TensorType(np.dtype(one.dtype), tuple(map(_Extent(first, second), one.shape, twos[name].shape)))
        for name, one in ones.items()
        if name in twos and len(one.shape) == len(twos[name].shape)
    }


@dataclass(frozen=True)
class _Extent:
    """An extent as an expression of one dimension variable, from its values for two extents of it."""

    first: Extents
    second: Extents

    def __call__(self, one: int, two: int) -> int | str | None:
        if one == two:
            return one
        for name, a in self.first.items():
            b = self.second.get(name, a)
            if ", axis " in name or name.startswith("trips of ") or a == b:
                continue
            if (one, two) == (a, b):
                return name
            factor, rest = divmod(one - two, a - b)
            if not rest and factor > 0:
                more = one - factor * a
                text = f"{factor}*{name}" if factor > 1 else name
                return f"{text}{more:+d}" if more else text
            for k in (2, 4, 8, 16, 32, 64):
                if (one, two) == (-(-a // k), -(-b // k)):
                    return f"{name}/{k}"
        return None
