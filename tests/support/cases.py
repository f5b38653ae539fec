"""Support of the conformance tests: models from text, marks, and the three outcomes for an invalid file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import onnx2jax
from onnx2jax.errors import ModelError, OnnxError

X = np.float32([-1, 2])
F = np.float32
rule = pytest.mark.rule

HEAD = '<ir_version: 10, opset_import: ["" : 21, "l" : 1, "ai.onnx.ml" : 5]>'
MAIN = "g (float[2] x) => (float[2] y)"
RELU = MAIN + " { y = Relu(x) }"
"""The graph that most cases edit."""

Edit = Callable[[Any], Any]


def parse(text: str = RELU, edit: Edit | None = None, head: str = HEAD, **fields: Any) -> onnx.ModelProto:
    """A model from onnx's text form, then edited; keywords set fields of the model."""
    proto = parser.parse_model(head + text)
    for name, value in fields.items():
        setattr(proto, name, value)
    if edit is not None:
        edit(proto)
    return proto


def run(proto: Any, *args: Any, **named: Any) -> Any:
    """Outputs of a call as NumPy: a single output directly, several as a list."""
    results = onnx2jax.convert(proto)(*args, **named)
    return [np.asarray(r) for r in results] if isinstance(results, tuple) else np.asarray(results)


def rules_of(proto: Any, severity: str = "error", **kwargs: Any) -> set[str]:
    """The ids of the rules that ``check`` reports as violated."""
    return {f.rule for f in onnx2jax.check(proto, **kwargs).findings if f.severity == severity}


def refused(proto: Any, rule_id: str, *, match: str | None = None, error: type[Exception] = OnnxError) -> None:
    """``convert`` raises, and ``check`` names the rule."""
    with pytest.raises(error, match=match):
        onnx2jax.convert(proto)
    assert rule_id in rules_of(proto), onnx2jax.check(proto)


def refused_when_strict(proto: Any, rule_id: str) -> onnx2jax.Model:
    """An error of ``check`` and of strict mode; lenient mode loads it."""
    assert rule_id in rules_of(proto), onnx2jax.check(proto)
    with pytest.raises(ModelError, match=rule_id):
        onnx2jax.convert(proto, strict=True)
    return onnx2jax.convert(proto)


def warned(proto: Any, rule_id: str) -> onnx2jax.Model:
    """A warning of ``check``; it loads in both modes."""
    assert rule_id in rules_of(proto, "warning"), onnx2jax.check(proto)
    onnx2jax.convert(proto, strict=True)
    return onnx2jax.convert(proto)


def clean(proto: Any, *args: Any) -> Any:
    """``check`` has no findings; returns the outputs of a call."""
    assert onnx2jax.check(proto).findings == ()
    onnx2jax.convert(proto, strict=True)
    return run(proto, *args)


def same(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(result, np.asarray(expected))
