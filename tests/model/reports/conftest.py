"""Operators that compute something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onnx2jax.ops import registry
from tests.support.registered import spoil


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Any], Any]], None]:
    """Pass the results of an operator through a function in models converted afterwards."""

    def wrong(name: str, change: Callable[[Any], Any]) -> None:
        operator = registry.resolve("", name, 21)
        assert operator is not None and operator.function is not None
        right = operator.function
        spoil(monkeypatch, "", name, lambda *inputs, **attributes: change(right(*inputs, **attributes)))

    return wrong
