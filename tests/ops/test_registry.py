"""Traits: said at one registration, they hold for every version of the operator."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from onnx import parser

import onnx2jax
from onnx2jax.errors import OperatorError
from onnx2jax.ops import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPERATORS", dict(registry._OPERATORS))


def _register(since: int, **options: Any) -> registry.Operator:
    onnx2jax.ops.op("Thing", domain="com.example", since=since, **options)(lambda x: x)
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


POSITIVE_CASES = {
    "clip": "g (float[2, 1, 3] x, float[1, 8, 3] w, float[1, 8, 2] r) => (float y) { y = LSTM <clip = 0.0> (x, w, r) }",
    "strides": "g (float[1, 1, 4] x) => (float y) { y = MaxPool <kernel_shape = [2], strides = [0]> (x) }",
    "kernel_shape": "g (float[1, 1, 4] x) => (float y) { y = AveragePool <kernel_shape = [-1]> (x) }",
    "group": "g (float[1, 1, 4] x, float[1, 1, 2] w) => (float y) { y = Conv <group = 0> (x, w) }",
    "p": "g (float[1, 1, 4] x) => (float y) { y = GlobalLpPool <p = 0> (x) }",
    "blocksize": "g (float[1, 4, 2, 2] x) => (float y) { y = DepthToSpace <blocksize = 0> (x) }",
}


@pytest.mark.parametrize("name", POSITIVE_CASES)
def test_numbers_that_must_be_positive_are_refused_at_conversion(name: str) -> None:
    """onnxruntime refuses a clip of 0, others take it for none: the message says what leaving it out means."""
    proto = parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> ' + POSITIVE_CASES[name])
    with pytest.raises(OperatorError, match=rf"{name} \(.*\) must be positive"):
        onnx2jax.convert(proto)


def test_defaults_are_positive_where_numbers_must_be() -> None:
    for domain, names in onnx2jax.supported().items():
        for operator in (registry.resolve(domain, name) for name in names):
            assert operator is not None
            for attribute in operator.positive:
                default = inspect.signature(operator.function).parameters[attribute].default
                assert default in (None, inspect.Parameter.empty) or default > 0, (operator.name, attribute)
