"""Registrations with another function, for tests that spoil an operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from onnx2jax.ops import registry


def spoil(
    monkeypatch: pytest.MonkeyPatch, domain: str, name: str, function: Callable[..., Any], since: int = 1
) -> None:
    """Register a user's function in place of all versions of an operator, with the signature and traits of the last."""
    operator = registry.resolve(domain, name)
    assert operator is not None and operator.function is not None
    traits: Any = {trait: getattr(operator, trait) for trait in registry.Traits.__annotations__}
    other = functools.wraps(operator.function)(function)
    monkeypatch.setitem(
        registry._OPERATORS, (domain, name), [registry.Registration(domain, name, since, other, traits)]
    )
