"""Traits: said at one registration, they hold for every version of the operator."""

from __future__ import annotations

from typing import Any

import pytest

import onnx2jax
from onnx2jax.ops import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPERATORS", dict(registry._OPERATORS))


def _register(since: int, **options: Any) -> registry.Operator:
    onnx2jax.op("Thing", domain="com.example", since=since, **options)(lambda x: x)
    operator = registry.resolve("com.example", "Thing", since)
    assert operator is not None
    return operator


def test_all_versions_share_traits() -> None:
    assert not _register(7).unsharded
    assert _register(3, unsharded=True, limits="none").unsharded
    newest = registry.resolve("com.example", "Thing")
    assert newest is not None and (newest.since, newest.unsharded, newest.limits) == (7, True, "none")


def test_replacing_a_function_keeps_its_traits() -> None:
    _register(1, product=True)
    kept = _register(1, replace=True)
    assert kept.product and kept.heavy
    assert not _register(1, replace=True, product=False).product


def test_unknown_traits_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"no trait \['heavvy'\]; the traits are \['heavy'"):
        _register(1, heavvy=True)


@pytest.mark.rule("DV-16", "DV-18")
def test_device_traits_of_operators() -> None:
    def count(trait: str) -> int:
        names = {(d, n) for d, operators in onnx2jax.supported().items() for n in operators}
        return sum(getattr(registry.resolve(*key), trait) for key in names)

    assert (count("broadcasts"), count("unsharded"), count("product")) == (24, 40, 37)
