"""The numbers of which an image's extents must be multiples, found by abstract evaluation with numbers for extents.

Strides halve an image, and a skip connection adds what is doubled again: an extent of 33 has no such sum. JAX would
find that out with symbolic extents too, but compares the terms of 30 strided layers for most of a minute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...eval.abstract import Abstract, Extents, without_data
from ...ir.graph import Graph, Node
from ...proto.types import ValueInfo
from .constraints import in_symbols
from .extents import evaluated, images, symbolic

STEPS: Final = 64
"""The largest number that export tries of which an extent be a multiple."""
EXTENT: Final = 512
"""Of free dimensions in an evaluation, a multiple of ``STEPS``; of an image's sizes it is the least that is tried."""
BITS: Final = (1, 63, 21, 43)
"""Odd numbers whose halves, rounded down or up, are odd and even in turn: strided layers round either way."""


def needed_multiples(
    graph: Graph, inputs: Sequence[ValueInfo], dims: Mapping[str, int | str], constraints: Sequence[str]
) -> dict[str, int]:
    """Powers of two from 2 to ``STEPS``, by those free dimensions of images whose other extents some node refuses.

    Empty if a node refuses multiples of ``STEPS`` too: it does so for another reason.

    Args:
        graph: the model's, with its fixed inputs as initializers.
        inputs: those that are free, as declared.
        dims, constraints: those of ``export``.
    """
    sizes, shapes = images(inputs, dims), symbolic(inputs, dims, in_symbols(inputs, dims, constraints))

    def accepts(steps: Mapping[str, int]) -> bool:
        """Whether every node takes extents that are multiples of these powers of two, and of no larger ones."""
        tried = dict.fromkeys(tuple((k * odd) % STEPS for k in steps.values()) for odd in BITS)
        return all(fits({sizes[n]: EXTENT + more for n, more in zip(steps, one, strict=True)}) for one in tried)

    def fits(extents: Mapping[str, int]) -> bool:
        """Whether every node takes these extents of symbols."""

        def extent(d: Any) -> int:
            return d if isinstance(d, int) else evaluated(str(d), lambda symbol: extents.get(symbol, EXTENT))

        inputs = tuple(v.reshaped([*map(extent, shapes[v.name])]) if v.name in shapes else v for v in graph.inputs)
        evaluation = _Refusals(Extents(0))

        def run() -> None:
            evaluation.graph(replace(graph, inputs=inputs))

        without_data(run)
        return not evaluation.has_refused

    if not sizes or accepts(dict.fromkeys(sizes, 1)):
        return {}
    coarsest = dict.fromkeys(sizes, STEPS)
    if not accepts(coarsest):
        return {}
    powers = [2**i for i in range(STEPS.bit_length() - 1)]
    for name in sizes:
        first = bisect_left(powers, True, key=lambda k: accepts({**dict.fromkeys(sizes, STEPS), name: k}))
        coarsest[name] = 2**first
    return {n: k for n, k in coarsest.items() if k > 1} if accepts(coarsest) else {}


class _Refusals(Abstract):
    has_refused = False

    def reject(self, path: str, node: Node, values: Sequence[Any], reason: str) -> None:  # noqa: ARG002
        self.has_refused = True
