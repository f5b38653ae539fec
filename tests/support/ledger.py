"""What the tests cost: a pytest plugin that writes the file named by LEDGER, and a comparison of two such files.

python -m tests.support.ledger [BEFORE [AFTER]]     # the `make test` before the last, and the last

For each test: wall seconds, processor seconds of the process, its threads and those it waited for, programs that XLA
compiled, the seconds of that, and processes started. A fixture that several tests share is part of the first. What
collecting costs is in the rows named COLLECTING, one for each process of the run.

A run whose tests compile more than COMPILATIONS programs fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from tests.support.helpers import ROOT

KEPT = ROOT / ".venv" / "ledger.json"
PROPERTY = "ledger"
COLLECTING = "collecting"
STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""Audit events of a process that starts."""


class Cost(NamedTuple):
    """What was spent; costs add up."""

    wall: float = 0.0
    processor: float = 0.0
    compilations: int = 0
    compiling: float = 0.0
    processes: int = 0

    def __add__(self, other: Any) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: Any) -> Cost:
        return Cost(*(a - b for a, b in zip(self, other, strict=True)))


ORIGIN = Cost()
_totals: Counter[str] = Counter()


def _event(name: str, seconds: float, **_: Any) -> None:
    if name.endswith("backend_compile_duration"):
        _totals["compilations"] += 1
        _totals["compiling"] += seconds  # type: ignore[assignment]


def _audit(event: str, _: Any) -> None:
    if event in STARTS:
        _totals["processes"] += 1


jax.monitoring.register_event_duration_secs_listener(_event)
sys.addaudithook(_audit)


def before(path: Path) -> Path:
    """Where the ledger of the run before lies."""
    return path.with_stem(f"{path.stem}-before")


def spent() -> Cost:
    """What this process has spent since it began."""
    times = os.times()
    processor = times.user + times.system + times.children_user + times.children_system
    return Cost(time.perf_counter(), processor, _totals["compilations"], _totals["compiling"], _totals["processes"])


def by_file(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The sum for each test file, most expensive by the processor first."""
    sums: defaultdict[str, Cost] = defaultdict(Cost)
    for test, cost in costs.items():
        sums[test.partition("::")[0]] += cost
    return dict(sorted(sums.items(), key=lambda item: -item[1].processor))


def read(path: Path) -> dict[str, Cost]:
    """A ledger from its file."""
    return {test: Cost(*cost) for test, cost in json.loads(path.read_text()).items()}


HEADER = f"{'wall s':>9}{'processor s':>13}{'compilations':>14}{'of it s':>9}{'processes':>11}"


def row(cost: Cost) -> str:
    """One line of a table.

    >>> row(Cost(1.5, 2.25, 10, 0.5, 1))
    '      1.5          2.2            10      0.5          1'
    """
    return f"{cost.wall:9.1f}{cost.processor:13.1f}{cost.compilations:14}{cost.compiling:9.1f}{cost.processes:11}"


def total(costs: Mapping[str, Cost]) -> Cost:
    """The sum of all."""
    return sum(costs.values(), Cost())


class Ledger:
    """The plugin: tests are measured where they run, and reports bring the costs to the process that writes the file.

    The sum over processes of wall seconds is more than the run took.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.worker = getattr(config, "workerinput", {}).get("workerid")
        self.kept = Path(os.environ["LEDGER"]) if os.environ.get("LEDGER") else None
        self.most = float(os.environ.get("COMPILATIONS", "inf"))
        self.costs: dict[str, Cost] = {}
        self.start = ORIGIN

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        start = spent()
        result = yield
        self.collecting = spent() - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.start = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, tuple(spent() - self.start)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "teardown":
                self.costs[report.nodeid] = self.costs.get(report.nodeid, Cost()) + value

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.worker is not None:
            session.config.workeroutput[PROPERTY] = tuple(self.collecting)  # type: ignore[attr-defined]
        elif total(self.costs).compilations > self.most and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if PROPERTY in getattr(node, "workeroutput", {}):
            self.costs[f"{COLLECTING}::{node.gateway.id}"] = Cost(*node.workeroutput[PROPERTY])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.worker is not None or self.kept is None:
            return
        if self.kept.exists():
            self.kept.replace(before(self.kept))
        self.kept.write_text(json.dumps(self.costs, indent=0))
        write = terminalreporter.write_line
        write(f"{HEADER}  the twenty most expensive files; all are in {self.kept}")
        for file, cost in [*by_file(self.costs).items()][:20]:
            write(f"{row(cost)}  {file}")
        write(f"{row(total(self.costs))}  all of {len(self.costs)}")
        if total(self.costs).compilations > self.most:
            write(f"more than {self.most:.0f} compilations: share programs among tests, or mark some as extended")


def compared(old_costs: Mapping[str, Cost], new_costs: Mapping[str, Cost]) -> str:
    """Two ledgers by file, the largest differences of processor seconds first."""
    old, new = by_file(old_costs), by_file(new_costs)
    changes = {f: new.get(f, Cost()) - old.get(f, Cost()) for f in {**old, **new}}
    files = sorted(changes, key=lambda f: -abs(changes[f].processor))
    lines = [f"{HEADER}  before, then after", *(f"{row(total(some))}  all" for some in (old_costs, new_costs))]
    for file in files[:40]:
        lines += [f"{row(old.get(file, Cost()))}  {file}", row(new.get(file, Cost()))]
    return "\n".join(lines)


if __name__ == "__main__":
    given = [Path(p) for p in sys.argv[1:]]
    print(compared(*map(read, [*given, *(before(KEPT), KEPT)[len(given) :]])))
