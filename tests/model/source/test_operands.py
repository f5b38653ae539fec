"""Sources of operands that are known, absent, unread, or of unknown rank."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.model.source.calls import SEVERAL
from onnx2jax.model.source.values import is_inline
from onnx2jax.ops import registry
from tests.model.source.test_source import Case, imported, normal


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_padding_of_what_is_known_keeps_its_mode(tmp_path: Path, mode: str) -> None:
    """Constants and extents."""
    text = f"""padded (float[n, k, 1] x) => (int64[7] y, int64[5] z) <int64[2] two = {{2, 2}}, int64[2] one = {{1, 1}}>
    {{ y = Pad<mode = "{mode}">(c, two) s = Shape(x) z = Pad<mode = "{mode}">(s, one) }}"""
    model, x = onnx2jax.convert(Case(text, (), weights={"c": np.array([1, 2, 3])}).proto), normal(2, 5, 1)
    module = imported(model.to_source(tmp_path))
    for ours, theirs in zip(module.model(module.load_params(), x), model(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_arguments_that_nothing_reads(tmp_path: Path) -> None:
    """Several of a function, and the element of a Scan without states."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "own": 1]>
        unread (float[2] a, float[2] b, float[2] c, float[3, 2] d) => (float[2] y, float[3, 2] z)
        { y = own.Third (a, b, c) z = Scan <num_scan_inputs = 1,
            body = each (float[2] e) => (float[2] r) { r = Neg (c) }> (d) }
        <domain: "own", opset_import: ["": 21]> Third (a, b, c) => (y) { t = Tanh (c) y = Mul (t, t) }""")
    model, xs = onnx2jax.convert(proto), [normal(2), normal(2), normal(2), normal(3, 2)]
    module = imported(model.to_source(tmp_path))
    for ours, theirs in zip(module.model({}, *xs), model(*xs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_absent_operands_and_known_sequences(tmp_path: Path) -> None:
    """Clip without a lower bound, of an operand of unknown rank and in a loop; a sequence of constants."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        made (float[n] a, float[k] b, float high) => (float[m] y, seq(bool[1]) s) <bool[1] c = {1}>
        { t = Add (a, b) y = Clip (t, , high) s = SequenceConstruct (c, c) }""")
    model, xs = onnx2jax.convert(proto), [normal(3), normal(3), np.float32(0.2)]
    module = imported(model.to_source(tmp_path))
    (y, s), (theirs, sequence) = module.model({}, *xs), model(*xs)
    np.testing.assert_allclose(y, theirs, rtol=1e-6)
    assert isinstance(s, list) and len(s) == len(sequence) == 2 and s[0].shape == (1,)


def test_known_strings_and_a_split_into_one(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        known (float[2, n] x) => (float[2, m] y, bool[2] z) <int64[1] two = {2}>
        { y = Split <axis = 0> (x, two) s = Concat <axis = 0> (a, b) z = Equal (s, c) }""")
    for name, texts in {"a": ["", "a"], "b": [], "c": ["", "b"]}.items():
        proto.graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.STRING, [len(texts)], texts))
    model, x = onnx2jax.convert(proto), normal(2, 3)
    module = imported(model.to_source(tmp_path))
    for ours, theirs in zip(module.model({}, x), model(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert is_inline(np.array(["a"] * 1000, object))  # safetensors has no strings


@pytest.mark.parametrize("declared", ["", "[2, 3]"])
def test_first_of_several_results_of_unknown_rank(tmp_path: Path, declared: str) -> None:
    """Without the rank of x, nothing is evaluated that would tell how many results there are."""
    text = f"bare (float x) => (float{declared} y) {{ y = LayerNormalization(x, s) }}"
    proto = Case(text, (), weights={"s": normal(3)}).proto
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    if not declared:
        proto.graph.output[0].type.tensor_type.ClearField("shape")
    model, x = onnx2jax.convert(proto), normal(2, 3)
    module = imported(model.to_source(tmp_path))
    np.testing.assert_allclose(module.model(module.load_params(), x), model(x), rtol=1e-5)


def returned(function: Any) -> list[ast.expr | None]:
    """What a function returns, without functions inside it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    (outer,) = (n for n in tree.body if isinstance(n, ast.FunctionDef))
    left, found = list(outer.body), list[ast.expr | None]()
    while left:
        node: Any = left.pop()
        if isinstance(node, ast.Return):
            found.append(node.value)
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))
    return found


def test_operators_of_several_results_are_listed() -> None:
    """Those whose functions return a tuple, whatever the number of outputs."""
    assert "com.microsoft" in onnx2jax.supported()  # which imports them all
    found = {
        each.name
        for (domain, _), versions in registry._OPERATORS.items()
        for each in versions
        if domain in ("", "ai.onnx.ml", "com.microsoft") and each.module  # not one of another test
        if inspect.isfunction(function := inspect.unwrap(each.function or len)) and function.__name__ != "<lambda>"
        if any(isinstance(value, ast.Tuple) for value in returned(function))
    }
    assert "TopK" in found
    assert found - {"Loop", "Scan", "StringSplit"} <= SEVERAL
