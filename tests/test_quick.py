"""The tests that `make quick` selects for a change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import quick

FEW = ("onnx2jax/runtime", "tests/conformance", "tests/runtime", "tests/tables")
"""Folders that are read in half a second; reading all takes seconds."""


def touched(*changed: str) -> list[str]:
    return [str(p) for p in quick.touched(map(Path, changed), FEW)]


def test_nearest_tests_come_first() -> None:
    found = touched("onnx2jax/runtime/program_cache.py", "README.md")
    assert found[0] == "tests/runtime/test_program_cache.py"  # by its name
    assert len(found) == len({*found}) > 1  # and by imports
    assert touched("README.md") == []


def test_changed_tests_and_tests_of_changed_helpers_are_selected() -> None:
    assert touched("tests/test_errors.py")[0] == "tests/test_errors.py"
    assert "tests/conformance/test_official.py" in touched("tests/tables/official.py")


def test_folders_are_those_of_the_repository() -> None:
    names = quick.sources().keys()
    assert names >= {"onnx2jax", "onnx2jax.ops.registry", "tests.quick", "docs.make_figures", "benchmarks.bench"}


def test_selection_is_bounded_by_time(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(quick, "SECONDS", -1)
    session = SimpleNamespace(items=[1, 2, 3], shouldstop=False)
    budget = quick.Budget()
    budget.pytest_sessionstart(session)  # type: ignore[arg-type]
    budget.ran.add(request.node.nodeid)
    budget.pytest_runtest_logfinish()
    assert budget.left == 2 and "2 tests farther away" in str(session.shouldstop)
