"""The tests that a change touches, nearest first, for as long as SECONDS lasts.

python -m tests.quick            # against where this branch left main, with what is not committed
python -m tests.quick FILE...    # as if these files had changed

A test file is as near as its imports lead to a changed file; one named after it, test_FILE.py, is beside it. Imports of
the package itself count for nothing: they lead everywhere.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 75
MARKS = "not extended and not long and not zoo"
"""The tests of `make test`."""
FOLDERS = ("onnx2jax", "tests", "docs", "benchmarks")
ALWAYS = ("tests/test_architecture.py", "tests/face/test_public.py", "tests/model/test_model.py")


def sources(folders: Iterable[str] = FOLDERS) -> dict[str, Path]:
    """Python files by the dotted name that imports them."""
    files = (p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return {".".join(p.with_suffix("").parts).removesuffix(".__init__"): p for p in files}


def imports(path: Path) -> Iterator[str]:
    """Absolute names that a file may import: modules, and names in them."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parts[: len(path.parts) - node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@functools.cache
def importers(folders: tuple[str, ...]) -> dict[Path, set[Path]]:
    """The files that import each file of the folders."""
    named = sources(folders)
    found: dict[Path, set[Path]] = {path: set() for path in named.values()}
    for path in named.values():
        for name in imports(path):
            if name in named and name != "onnx2jax":
                found[named[name]].add(path)
    return found


def touched(changed: Iterable[Path], folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    """Test files that lead to one of the changed files, nearest first."""
    those_of = importers(folders)
    steps = dict.fromkeys(changed, 0)
    for path in list(steps):
        steps |= {p: 0 for p in those_of if p.name == f"test_{path.name}"}
    waiting = list(steps)
    for path in waiting:
        for importer in sorted(those_of.get(path, set()) - steps.keys()):
            steps[importer] = steps[path] + 1
            waiting.append(importer)
    tests = [p for p in steps if p.name.startswith("test_") and p.suffix == ".py" and (ROOT / p).exists()]
    return sorted(tests, key=lambda p: (steps[p], p))


def changes() -> list[Path]:
    """Files that differ from where this branch left main, those not committed and not tracked among them."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    bases = git("for-each-ref", "--format=%(refname)", "refs/remotes/origin/main", "refs/heads/main")
    (base,) = git("merge-base", "HEAD", bases[-1]) if bases else ["HEAD"]
    return [Path(p) for p in (*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard"))]


class Budget:
    """A pytest plugin that stops after SECONDS, and says how many tests are left."""

    def __init__(self) -> None:
        self.end, self.left = time.monotonic() + SECONDS, 0
        self.ran: set[str] = set()
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)
        self.failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        if time.monotonic() > self.end:
            self.left = len(self.session.items) - len(self.ran)
            self.session.shouldstop = f"{SECONDS} s are over; {self.left} tests farther away: make test"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session


def main(files: list[str]) -> int:
    """Run them; the exit status is 0 where none of those that ran failed."""
    changed = [Path(f) for f in files] or changes()
    modules = [p for p in changed if p.parts[0] == "onnx2jax" and p.suffix == ".py" and (ROOT / p).exists()]
    tests = dict.fromkeys(map(str, [*modules, *touched(changed), *ALWAYS]))
    budget = Budget()
    status = int(pytest.main(["-q", "--maxfail=5", "-m", MARKS, *tests], plugins=[budget]))
    return status if budget.failed or not budget.left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
