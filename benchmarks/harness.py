"""Times callables against each other in one process.

Every benchmark of this folder measures by ``compare``. Calls are timed in blocks of at least 0.1 s, the contestants
alternate in a shuffled order, and the first part of a block is discarded: onnxruntime's threads spin for about 40 ms
after its last call and take a core from the next contestant, and XLA's first calls after a pause are slow. Alternating
single calls would disturb each other.

A ratio of two medians compares typical times; the median of the ratios within each round is more stable on a shared
machine, because a disturbance affects both contestants of a round.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np

ROUNDS: Final = 9
BLOCK: Final = 0.1
"""Minimum seconds of counted calls in a block."""
DISCARD: Final = 0.06
"""Seconds of discarded calls before them: onnxruntime's threads spin for 40 ms."""
MOST_CALLS: Final = 1_000_000

Call = Callable[[], Any]
Clock = Callable[[], float]
Settle = Callable[[Any], Any]


class Quartiles(NamedTuple):
    """The quartiles of some durations."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class Timing:
    """One contestant: seconds per call in each round, of wall time and of this process's processor time.

    Processor time includes still spinning threads of another contestant; the discarded part keeps that small.
    """

    wall: tuple[float, ...]
    work: tuple[float, ...]

    @property
    def quartiles(self) -> Quartiles:
        return Quartiles(*map(float, np.quantile(self.wall, (0.25, 0.5, 0.75))))

    @property
    def median(self) -> float:
        return self.quartiles.median


@dataclass(frozen=True)
class Comparison:
    """The timings by name, and the load average of the last minute, before and after."""

    timings: Mapping[str, Timing]
    load: tuple[float, float]

    def ratio(self, one: str, other: str) -> float:
        """The speed of ``one`` relative to ``other``: the ratio of their median times; above 1 it is faster."""
        return self.timings[other].median / self.timings[one].median

    def paired(self, one: str, other: str) -> Quartiles:
        """The quartiles of that ratio within each round."""
        return self._within_rounds("wall", one, other)

    def work(self, one: str, other: str) -> float:
        """The median of the ratios of processor time within each round."""
        return self._within_rounds("work", one, other).median

    def _within_rounds(self, kind: str, one: str, other: str) -> Quartiles:
        ours, theirs = (np.array(getattr(self.timings[name], kind)) for name in (one, other))
        return Quartiles(*map(float, np.quantile(theirs / np.maximum(ours, 1e-12), (0.25, 0.5, 0.75))))

    def to_json(self, one: str) -> dict[str, Any]:
        """The timings of every contestant, and the speed of ``one`` relative to the others."""
        seconds = {
            name: {
                "median": t.median,
                "quartiles": [t.quartiles.lower, t.quartiles.upper],
                "work": float(np.median(t.work)),
            }
            for name, t in self.timings.items()
        }
        others = [name for name in self.timings if name != one]
        ratios = {
            name: {"of_medians": self.ratio(one, name), "paired": list(self.paired(one, name))} for name in others
        }
        return {"seconds": seconds, "ratios": ratios, "rounds": len(self.timings[one].wall), "load": list(self.load)}


def _nothing(_: Any) -> None:
    """For synchronous calls: nothing to wait for."""


def compare(
    calls: Mapping[str, Call],
    *,
    rounds: int = ROUNDS,
    block: float = BLOCK,
    discard: float = DISCARD,
    settle: Settle = _nothing,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    worked: Clock = time.process_time,
) -> Comparison:
    """Time callables against each other.

    Args:
        calls: the callables, by name.
        rounds: number of blocks of each.
        block: minimum seconds of counted calls in a block; one call if that takes longer.
        discard: seconds of discarded calls before them; at least one call.
        settle: waits for the last result of a block; needed only for asynchronous calls, such as steps of
            training.
        seed: seed of the order, which is shuffled in every round.
        clock: returns wall time in seconds.
        worked: returns the processor time of this process in seconds.
    """
    before = _load()
    shuffled = random.Random(seed)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name in shuffled.sample([*calls], len(calls)):
            taken[name].append(one_block(calls[name], block, discard, settle, clock, worked))
    timings = {n: Timing(tuple(w for w, _ in t), tuple(p for _, p in t)) for n, t in taken.items()}
    return Comparison(timings, (before, _load()))


def one_block(
    call: Call,
    block: float = BLOCK,
    discard: float = DISCARD,
    settle: Settle = _nothing,
    clock: Clock = time.perf_counter,
    worked: Clock = time.process_time,
) -> tuple[float, float]:
    """Seconds per call of wall and processor time, over a block of calls without reading the clock between."""
    quick, calls, start = float("inf"), 0, clock()
    now = start
    while calls == 0 or (now - start < discard and calls < MOST_CALLS):
        before = now
        settle(call())
        calls, now = calls + 1, clock()
        quick = min(quick, now - before)  # a slow first call would shorten the block
    count = min(max(1, int(np.ceil(block / max(quick, 1e-9)))), MOST_CALLS)
    start, working = clock(), worked()
    for _ in repeat(None, count):
        result = call()
    settle(result)
    return (clock() - start) / count, (worked() - working) / count


def median(call: Call, times: int = ROUNDS, clock: Clock = time.perf_counter) -> float:
    """The median seconds of single calls, for calls that are too long for blocks, or that are first calls."""
    taken = []
    for _ in range(times):
        start = clock()
        call()
        taken.append(clock() - start)
    return float(np.median(taken))


def cores() -> int:
    """The number of cores that this process may use, and of threads for each contestant."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def pinned(to: Collection[int]) -> Iterator[None]:
    """A scope pinned to some cores; does nothing if the system cannot pin, or ``to`` is empty.

    Thread pools keep the cores that they were created with: enter it before the first call.
    """
    if not to or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, to)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
