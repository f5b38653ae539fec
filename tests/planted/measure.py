"""Runs the tests of a tree with faults planted in it.

A fault has been found if a test fails with it alone that passes without any. Which test that is takes one run of the
whole suite for many faults at once: whatever fails there is tried with each of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from .faults import Fault, environment


@dataclass
class Suite:
    """The tests of a copy of a tree.

    Attributes:
        copy: the folder, from ``faults.copied``.
        marks: pytest's ``-m``.
        reliable: whether a test passes without a fault, as far as that is known.
    """

    copy: Path
    marks: str
    reliable: dict[str, bool] = field(default_factory=dict)

    def first_failure(self, fault: Fault, tests: Sequence[str]) -> str | None:
        """The first of these tests that fails with the fault and passes without; None if there is none.

        Args:
            fault: what to plant.
            tests: ids, or files.
        """
        while True:
            left_out = [f"--deselect={test}" for test, passes in self.reliable.items() if not passes]
            with fault.applied(self.copy):
                failed = self._failed("-x", "-p", "no:xdist", *left_out, *tests)
            if not failed:
                return None
            if self.reliable.setdefault(failed[0], failed[0] not in self._failed("-p", "no:xdist", failed[0])):
                return failed[0]

    def failures(self, faults: Iterable[Fault]) -> list[str]:
        """All tests that fail with all of these faults at once, by their ids."""
        with ExitStack() as planted:
            for fault in faults:
                planted.enter_context(fault.applied(self.copy))
            return self._failed("-n", "2", "--dist=worksteal", "tests", "onnx2jax")

    def _failed(self, *arguments: str) -> list[str]:
        record = self.copy / ".venv" / ".pytest_cache" / "v" / "cache" / "lastfailed"
        record.unlink(missing_ok=True)
        call = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--timeout=300", "-m", self.marks, *arguments]
        done = subprocess.run(call, cwd=self.copy, env=environment(self.copy), capture_output=True, text=True)
        if done.returncode not in (0, 1, 2, 5):  # 2: stopped by -x, or by an import; 5: no test has these marks
            raise RuntimeError(f"{' '.join(call)} ends with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        return list(json.loads(record.read_text())) if record.exists() else []


def together(faults: Sequence[Fault], copy: Path) -> list[list[Fault]]:
    """The faults in groups that can be planted at once: in one file, one after the other."""
    groups: list[list[Fault]] = []
    for fault in faults:
        group = next((g for g in groups if _applies_after(fault, g, copy)), None)
        if group is None:
            groups.append(group := [])
        group.append(fault)
    return groups


def _applies_after(fault: Fault, others: Sequence[Fault], copy: Path) -> bool:
    with ExitStack() as planted:
        for other in (f for f in others if f.file == fault.file):
            planted.enter_context(other.applied(copy))
        try:
            fault.text(copy)
        except (ValueError, SyntaxError):
            return False
        return True


def nearest(fault: Fault, tests: Iterable[str]) -> list[str]:
    """The tests, first those whose path has words of the fault's file.

    >>> fault = Fault("f", "onnx2jax/ops/conv.py", "wrong axis", "", "", ())
    >>> nearest(fault, ["tests/ir/test_graph.py::test_it", "tests/ops/test_conv.py::test_it"])[0]
    'tests/ops/test_conv.py::test_it'
    """

    def words(file: str) -> set[str]:
        return set(re.findall("[a-z0-9]+", file.partition("::")[0].lower()))

    return sorted(tests, key=lambda test: -len(words(test) & words(fault.file)))
