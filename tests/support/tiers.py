"""Parameters of tests in two tiers: the main one, and the extended one of `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def extended(*values: Any, **options: Any) -> Any:
    """A parameter of the extended tier."""
    return pytest.param(*values, marks=pytest.mark.extended, **options)


def canaries(cases: Iterable[Any], main: Collection[Any]) -> list[Any]:
    """The cases of a test, each a value or a tuple of values; only those in ``main`` are in the main tier."""
    rows = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*values) if case in main else extended(*values) for case, values in rows]


def groups(cases: Iterable[Any], size: int) -> list[Any]:
    """Parameters of a test, each a list of cases, for programs that compute several together."""
    every = list(cases)
    return [pytest.param(every[i : i + size], id=f"from {i}") for i in range(0, len(every), size)]
