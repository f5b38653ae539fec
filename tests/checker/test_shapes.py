"""Shapes that ``check`` infers: contradicting declarations are warnings, refused operands are errors."""

from __future__ import annotations

from typing import Any

import pytest

import onnx2jax
from onnx2jax.eval import abstract
from tests.support.cases import parse

BRANCHES = """g (bool c, float[2, 3] x) => (float[a, b] y) {
    y = If (c) <then_branch = t () => (float[p, q] e) { axes = Constant <value_ints = [0]> ()  e = Squeeze (x, axes) },
                else_branch = s () => (float[p, q] n) { n = Neg (x) }> }"""
TAKEN = """g (float[2] x) => (float[3] y) { c = Size (x)  two = Constant <value = int64 {2}> ()  same = Equal (c, two)
    y = If (same) <then_branch = t () => (float[k] e) { e = Neg (x) }, else_branch = s () => (float[k] n) {
        n = Concat <axis = 0> (x, x) }> }"""
LOOP = """g (float[2] x, int64 m) => (float[k] y) { y = Loop (m, "", x) <body = b (int64 i, bool go, float[3] s)
    => (bool go, float[3] t) { t = Neg (s) }> }"""
NO_TRIPS = """g (int64 m, float[2, 3] x) => (float[2, 3] y) <int64[2] start = {2, 3}> {
    s = Loop (m, "", start) <body = b (int64 i, bool go, int64[2] s) => (bool go, int64[2] t) {
        t = Constant <value_ints = [3, 2]> () }>  y = Reshape (x, s) }"""
TEXTS = """g (bool c, int64 m, float[3] x) => (string[1] y, string[k, 1] z, string[3, 1] s, string[3] u) {
    y = If (c) <then_branch = a () => (string[1] t) { t = Constant <value_strings = ["a"]> () },
               else_branch = b () => (string[1] t) { t = Constant <value_strings = ["b"]> () }>
    z = Loop (m, "") <body = l (int64 i, bool go) => (bool on, string[1] t) {
        on = Identity (go)  t = Constant <value_strings = ["a"]> () }>
    s = Scan <num_scan_inputs = 1, body = e (float v) => (string[1] t) {
        t = Constant <value_strings = ["a"]> () }> (x)
    w = Constant <value_strings = ["a", "b", "c"]> ()
    u = Scan <num_scan_inputs = 1, body = f (string v) => (string t) { t = Identity (v) }> (w) }"""
POOL = "AveragePool <kernel_shape = [2], strides = [2]>"
HALVED = f"""g (float[1, 1, N] x) => (float[1, 1, M] y) {{
    a = {POOL} (x)  b = {POOL} (a)  c = {POOL} (b)  d = {POOL} (c)  y = {POOL} (d) }}"""
CALL = """g (float[2, 3] x) => (float[6] y) { y = l.f (x) }
    <domain: "l", opset_import: ["" : 21]> f (a, b) => (r) { r = Add (a, b) }"""


def findings(text: str) -> list[tuple[str, str]]:
    return [(f.rule, f.severity) for f in onnx2jax.check(parse(text)).findings]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("g (float[2] x) => (float[3] y) { y = Neg (x) }", ("GR-18", "warning")),
        ("g (float[2] x) => (float[2, 1] y) { y = Neg (x) }", ("GR-18", "warning")),
        ("g (float[N] x) => (float[3] y) { y = Neg (x) }", None),  # N may be 3
        ("g (float[N, 2] x) => (float[N, 3] y) { y = Neg (x) }", ("GR-18", "warning")),
        ("g (float[2] x) => (float[2] y) <float[4] t> { t = Neg (x)  y = Neg (t) }", ("GR-20", "warning")),
        ("g (float[2] x) => (float[2] y) <float[4] x> { y = Neg (x) }", ("GR-20", "warning")),
        ("g (float[2] x) => (float[2] y) <int64[2] x> { y = Neg (x) }", ("GR-20", "warning")),
        ("g (float[2] x, float[3] z) => (float[2] y) { y = Add (x, z) }", ("ND-15", "error")),
        ("g (float[N] x, float[M] z) => (float[K] y) { y = Add (x, z) }", None),  # they may be equal
        (HALVED, None),  # N may be more than 16
        ("g (float[2, 3] x) => (float[a, b] y) { y = Transpose <perm = [0, 2]> (x) }", ("ND-15", "error")),
        (
            "g (float[2, 3] x) => (float[a] y) <int64[1] to = {7}> { y = Reshape (x, to) }",
            ("ND-15", "error"),
        ),
        ("g (float[2] x) => (float[a] y) { y = Cast <to = 77> (x) }", ("ND-15", "error")),
        (BRANCHES, None),  # the branch that refuses its operand may never be taken
        (TAKEN, ("GR-18", "warning")),  # by the shape of x, whatever the other branch gives
        (LOOP, ("GR-20", "warning")),
        (TEXTS, None),
        (NO_TRIPS, None),  # y has the shape of x for m = 0
        (CALL, ("ND-15", "error")),
    ],
)
def test_shapes(text: str, found: Any) -> None:
    given = findings(text)
    assert (found in given and given.count(found) == len(given)) if found else not given, given


def test_the_message_names_node_and_shapes() -> None:
    report = onnx2jax.check(parse("g (float[N, 2] x) => (float[N, 3] y) { y = Neg (x) }"))
    assert "node 'y': 'y' is declared float32[N, 3], but Neg gives float32[?, 2]" in str(report)
    report = onnx2jax.check(parse("g (float[2] x, float[3] z) => (float[2] y) { y = Add (x, z) }"))
    assert "node 'y': Add refuses its operands (float32[2], float32[3])" in str(report)


def test_large_constants_are_types_alone() -> None:
    """8 GB of zeros are not computed."""
    text = """g (float[2] x) => (float[2] y) <int64[2] shape = {40000, 50000}> {
        z = ConstantOfShape (shape)  s = Shape (z)  f = Cast <to = 1> (s)  y = Add (x, f) }"""
    assert not findings(text)


def test_a_limited_number_of_nodes_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """g (float[2] x) => (float[3] y) { y = l.f (x) }
        <domain: "l", opset_import: ["" : 21]> f (x) => (y) { a = Neg (x)  b = Neg (a)  y = Neg (b) }"""
    assert findings(text) == [("GR-18", "warning")]
    monkeypatch.setattr(abstract, "MOST_NODES", 2)
    assert not findings(text)
