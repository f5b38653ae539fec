"""Callables timed side by side, in one process.

Every benchmark of this folder measures with ``compare``. Calls come in blocks of at least 0.1 s, the contestants take
turns in a shuffled order, and the first part of a block is not counted: onnxruntime's threads spin for about 40 ms
after its last call and take a core from whoever is next, and XLA's first calls after a pause are slow. Single calls in
turn would measure each other.

A ratio of two medians says how long things take; the median of the ratios within each round is steadier on a machine
that others use too, because what disturbs a round disturbs both.
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
"""Seconds of calls that are counted, at least."""
DISCARD: Final = 0.06
"""Seconds of calls before them that are not: onnxruntime's threads spin for 40 ms."""
MOST_CALLS: Final = 1_000_000

Call = Callable[[], Any]
Clock = Callable[[], float]
Settle = Callable[[Any], Any]


class Quartiles(NamedTuple):
    """Of some seconds."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class Timing:
    """One contestant: seconds a call in each round, by the clock and of this process's processor time.

    Processor time includes what threads of another contestant still burn; the discarded part keeps that small.
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
    """What was measured, by name, and the load average of the last minute, before and after."""

    timings: Mapping[str, Timing]
    load: tuple[float, float]

    def ratio(self, one: str, other: str) -> float:
        """How many times as fast ``one`` is as ``other``: the ratio of their median times. Above 1 it is faster."""
        return self.timings[other].median / self.timings[one].median

    def paired(self, one: str, other: str) -> Quartiles:
        """The same as quartiles of the ratios within each round."""
        return self._within_rounds("wall", one, other)

    def work(self, one: str, other: str) -> float:
        """The same of processor time: the median of the ratios within each round."""
        return self._within_rounds("work", one, other).median

    def _within_rounds(self, kind: str, one: str, other: str) -> Quartiles:
        ours, theirs = (np.array(getattr(self.timings[name], kind)) for name in (one, other))
        return Quartiles(*map(float, np.quantile(theirs / np.maximum(ours, 1e-12), (0.25, 0.5, 0.75))))

    def to_json(self, one: str) -> dict[str, Any]:
        """Numbers of every contestant, and how much faster ``one`` is than each other."""
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
    """Calls return when their work is done."""


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
    """Time callables beside each other.

    Args:
        calls: what to time, by name.
        rounds: blocks of each.
        block: seconds of calls that a block counts, at least; one call if that takes longer.
        discard: seconds of calls before them that it does not count; one call at least.
        settle: waits for the last result of a block. Nothing to do where calls return when their work is done; steps of
            training may overlap.
        seed: of the order, which is another one in every round.
        clock: seconds that pass.
        worked: seconds of processor time of this process.
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
    """Seconds a call by the clock and of processor time, over a block of calls without a look at the clock between."""
    quick, calls, start = float("inf"), 0, clock()
    now = start
    while calls == 0 or (now - start < discard and calls < MOST_CALLS):
        before = now
        settle(call())
        calls, now = calls + 1, clock()
        quick = min(quick, now - before)  # a slow first call would make the block short
    count = min(max(1, int(np.ceil(block / max(quick, 1e-9)))), MOST_CALLS)
    start, working = clock(), worked()
    for _ in repeat(None, count):
        result = call()
    settle(result)
    return (clock() - start) / count, (worked() - working) / count


def median(call: Call, times: int = ROUNDS, clock: Clock = time.perf_counter) -> float:
    """The median seconds of single calls: for work too long for blocks, or whose every call is a first one."""
    taken = []
    for _ in range(times):
        start = clock()
        call()
        taken.append(clock() - start)
    return float(np.median(taken))


def cores() -> int:
    """Cores that this process may use, which is the number of threads that everyone is given."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def pinned(to: Collection[int]) -> Iterator[None]:
    """A scope on some cores only; nothing where the system cannot do that, or ``to`` is empty.

    Thread pools keep the cores that they had when they were made: enter it before the first call.
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
