"""Which tests `make quick` takes to a change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import quick


def test_the_nearest_come_first() -> None:
    found = [str(p) for p in quick.touched([Path("onnx2jax/runtime/program_cache.py"), Path("README.md")])]
    assert found[0] == "tests/runtime/test_program_cache.py"  # by its name
    assert len(found) == len({*found}) > 1  # and what imports lead to
    assert quick.touched([Path("README.md")]) == []


def test_a_changed_test_is_taken_and_helpers_lead_to_theirs() -> None:
    assert str(quick.touched([Path("tests/test_errors.py")])[0]) == "tests/test_errors.py"
    assert Path("tests/conformance/test_official.py") in quick.touched([Path("tests/tables/official.py")])


def test_it_stops_in_time(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(quick, "SECONDS", -1)
    session = SimpleNamespace(items=[1, 2, 3], shouldstop=False)
    budget = quick.Budget()
    budget.pytest_sessionstart(session)  # type: ignore[arg-type]
    budget.ran.add(request.node.nodeid)
    budget.pytest_runtest_logfinish()
    assert budget.left == 2 and "2 tests farther away" in str(session.shouldstop)
