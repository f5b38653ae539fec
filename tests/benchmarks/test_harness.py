"""The benchmark harness, with a fake clock advanced by the contestants."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from benchmarks import harness


class Clock:
    """A fake clock, advanced by work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def working(self, name: str, *seconds: float) -> Callable[[], None]:
        """A call that takes these seconds in turn, then always the last."""
        calls = 0

        def work() -> None:
            nonlocal calls
            self.now += seconds[min(calls, len(seconds) - 1)]
            calls += 1
            self.order.append(name)

        return work


def compare(clock: Clock, rounds: int = 5, **calls: Callable[[], None]) -> harness.Comparison:
    return harness.compare(calls, rounds=rounds, clock=clock, worked=clock)


def test_ratio_above_one_is_faster() -> None:
    clock = Clock()
    result = compare(clock, a=clock.working("a", 0.01), b=clock.working("b", 0.03))
    assert result.timings["a"].median == pytest.approx(0.01)
    assert result.ratio("a", "b") == pytest.approx(3)
    assert result.paired("a", "b") == pytest.approx((3, 3, 3))
    assert result.work("b", "a") == pytest.approx(1 / 3)


def test_blocks_of_short_calls_have_a_minimum_duration() -> None:
    clock = Clock()
    harness.one_block(clock.working("a", 1e-4), 0.1, 0.05, clock=clock, worked=clock)
    assert len(clock.order) == pytest.approx(1500, abs=3)


def test_a_call_longer_than_a_block_runs_twice() -> None:
    clock = Clock()
    wall, _ = harness.one_block(clock.working("a", 7.0), clock=clock, worked=clock)
    assert (wall, len(clock.order)) == (7.0, 2)


def test_slow_first_calls_are_discarded() -> None:
    clock = Clock()
    wall, _ = harness.one_block(clock.working("a", 0.04, 0.01), 0.1, 0.05, clock=clock, worked=clock)
    assert wall == pytest.approx(0.01)
    assert clock.order.count("a") == 2 + 10


def test_contestants_are_shuffled_in_each_round() -> None:
    clock = Clock()
    compare(clock, 20, a=clock.working("a", 1.0), b=clock.working("b", 1.0), c=clock.working("c", 1.0))
    blocks = clock.order[3::2]  # after the first calls; a block is one discarded call and one counted
    rounds = {tuple(blocks[i : i + 3]) for i in range(0, len(blocks), 3)}
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(rounds) == 6


def test_paired_ratios_are_robust_to_slow_rounds() -> None:
    """On a machine that slows down in some rounds, paired ratios are stable, but medians may be of different rounds."""
    slow = (1.0, 5.0, 2.0)
    timings = {"a": harness.Timing(slow, slow), "b": harness.Timing(tuple(2 * t for t in slow), slow)}
    result = harness.Comparison(timings, (0.0, 0.0))
    assert result.paired("a", "b") == (2, 2, 2)
    assert result.to_json("a")["ratios"]["b"]["paired"] == [2, 2, 2]


def test_asynchronous_work_is_awaited_at_the_end_of_a_block() -> None:
    """Asynchronous steps take no time until the last result is waited for."""
    clock, waiting = Clock(), []

    def begin() -> None:
        clock.now += 0.01
        waiting.append(0.02)

    def settle(_: None) -> None:
        clock.now += sum(waiting)
        waiting.clear()

    wall, _ = harness.one_block(begin, 0.1, 0.05, settle, clock, clock)
    assert wall == pytest.approx(0.03)
    assert waiting == []


def test_median_of_calls() -> None:
    clock = Clock()
    assert harness.median(clock.working("a", 9.0, 1.0, 2.0), 3, clock) == 2.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not pin processes to cores")
def test_pinned_to_one_core_and_back() -> None:
    before = os.sched_getaffinity(0)
    with harness.pinned({min(before)}):
        assert harness.cores() == 1
    assert os.sched_getaffinity(0) == before
    with harness.pinned(()):
        assert os.sched_getaffinity(0) == before
