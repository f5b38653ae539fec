"""Unregisters the operators that a test registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onnx2jax.ops import registry


@pytest.fixture(autouse=True)
def own_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_OPERATORS", {k: list(v) for k, v in registry._OPERATORS.items()})
    yield
