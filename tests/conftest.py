"""Fixtures that several test files share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rich were not installed."""
    for name in [m for m in sys.modules if m.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
