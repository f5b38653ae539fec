"""Layered graph layout: assigns blocks to layers by longest path, and orders layers so that few edges cross."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Final

SWEEPS: Final = 6
Edges = Collection[tuple[int, int]]


def layered(count: int, edges: Edges) -> list[list[int]]:
    """Blocks 0 to count - 1 in layers, from left to right.

    Edges point down, except those that close a cycle, which blocks of several nodes can form.

    >>> layered(4, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)])
    [[0], [1, 2], [3]]
    >>> layered(2, [(0, 1), (1, 0)])
    [[0], [1]]
    """
    depth = _depths(count, edges)
    layers: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for block, row in enumerate(depth):
        layers[row].append(block)
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for start, end in edges:
        if depth[start] < depth[end]:
            below[start].append(end)
            above[end].append(start)
    place = [0.0] * count
    for layer in layers:
        _put(layer, place)
    for sweep in range(SWEEPS):
        near = below if sweep % 2 else above
        for layer in reversed(layers) if sweep % 2 else layers:
            weight = {b: sum(place[n] for n in near[b]) / len(near[b]) if near[b] else place[b] for b in layer}
            layer.sort(key=lambda b, weight=weight: weight[b])  # type: ignore[misc]
            _put(layer, place)
    return layers


def _put(layer: Sequence[int], place: list[float]) -> None:
    """Set the blocks' horizontal places, centred at 0."""
    for i, block in enumerate(layer):
        place[block] = i - (len(layer) - 1) / 2


def _depths(count: int, edges: Edges) -> list[int]:
    """The length of the longest path to each block. In a cycle, the block of the lowest number comes first."""
    after: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for start, end in edges:
        if start != end:
            after[start].append(end)
            missing[end] += 1
    depth, done = [0] * count, [False] * count
    ready = [b for b in range(count) if not missing[b]]
    heapq.heapify(ready)
    first = 0
    for _ in range(count):
        while ready and done[ready[0]]:
            heapq.heappop(ready)
        if not ready:
            while done[first]:
                first += 1
        block = heapq.heappop(ready) if ready else first
        done[block] = True
        for other in after[block]:
            if not done[other]:
                depth[other] = max(depth[other], depth[block] + 1)
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, other)
    return depth
