"""One mesh for many shardings: the device order and axis sizes that express most of them (rule DV-23)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Final

import numpy as np

from ..proto.devices import Pattern, shard_of

_MAX_ORDERS: Final = 8
_MAX_FACTORINGS: Final = 200
"""Limits of the search; only device counts with many distinct prime factors reach them."""

Axes = tuple[tuple[int, ...], ...]
"""For each split, the mesh axes that it is over, outermost first."""


@dataclass(frozen=True)
class MeshLayout:
    """A device order, factored into mesh axes, and the patterns that these axes express."""

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    """Prime factors of the number of devices; ``shape`` merges some of them."""
    uses: Mapping[Pattern, Axes]

    @cached_property
    def groups(self) -> list[list[int]]:
        """Groups of adjacent prime factors that each pattern uses together or not at all; each is one mesh axis."""
        uses = [split for axes in self.uses.values() for split in axes]
        groups = [[0]]
        for pair in pairwise(range(len(self.sizes))):
            if all(pair in pairwise(split) or not set(pair) & set(split) for split in uses):
                groups[-1].append(pair[1])
            else:
                groups.append([pair[1]])
        return groups

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[a] for a in group) for group in self.groups)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(f"d{i}" for i in range(len(self.groups)))

    def named(self, pattern: Pattern) -> tuple[tuple[str, ...], ...]:
        """The names of the mesh axes of each split."""
        names = {group[0]: name for group, name in zip(self.groups, self.axis_names, strict=True)}
        return tuple(tuple(names[a] for a in split if a in names) for split in self.uses[pattern])


def best(patterns: Sequence[Pattern], devices: int) -> MeshLayout:
    """The layout that expresses most of the patterns; the first such one."""
    wanted = Counter(patterns)
    indices = {p: index for p in wanted if (index := _array(p, devices)) is not None}
    plain = tuple(range(devices))
    orders = [plain, *(tuple(chain.from_iterable(holders)) for holders, _ in wanted)]
    result, top = MeshLayout(plain, (devices,), {}), -1
    for order in islice(dict.fromkeys(o for o in orders if sorted(o) == [*plain]), _MAX_ORDERS):
        for sizes in islice(_factorings(devices), _MAX_FACTORINGS):
            digits = np.empty((len(sizes), devices), np.int64)
            digits[:, order] = np.unravel_index(np.arange(devices), sizes)
            expressed = {p: _express(p[1], index, sizes, digits) for p, index in indices.items()}
            uses = {p: axes for p, axes in expressed.items() if axes is not None}
            if (score := sum(wanted[p] for p in uses)) > top:
                result, top = MeshLayout(order, sizes, uses), score
    return result


def _factorings(number: int, prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All orders of the prime factors of a number."""
    if number == 1:
        yield prefix or (1,)
    for p in range(2, number + 1):
        if number % p == 0 and all(p % q for q in range(2, math.isqrt(p) + 1)):
            yield from _factorings(number // p, (*prefix, p))


def _array(pattern: Pattern, devices: int) -> np.ndarray | None:
    """The shard index of each device along each split, [splits, devices]; -1 where it has none."""
    places = shard_of(pattern)
    if places is None:
        return None
    index = np.full((len(pattern[1]), devices), -1)
    for d, place in places.items():
        index[:, d] = place
    return index


def _express(shards: Sequence[int], index: np.ndarray, sizes: Sequence[int], digits: np.ndarray) -> Axes | None:
    """The mesh axes of each split, or None; devices without a shard match anything."""
    used: set[int] = set()
    result = []
    for rest, shard in zip(shards, index, strict=True):
        members, axes = shard >= 0, []
        while rest > 1:
            for a, size in enumerate(sizes):
                if a in used or rest % size or size == 1:
                    continue
                if np.array_equal((shard // (rest // size) % size)[members], digits[a][members]):
                    break
            else:
                return None
            used.add(a)
            axes.append(a)
            rest //= size
        result.append(tuple(axes))
    return tuple(result)
