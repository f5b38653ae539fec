"""Prompts compute the logits of their last tokens alone, where nothing after the last layer mixes tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx2jax
from onnx2jax.generation.graphs import LAST, with_last_logits
from onnx2jax.model.changes.parts import with_graph
from tests.support import decoders

FILES = {
    "GroupQueryAttention": decoders.group_query(),
    "int4": decoders.group_query(bits="asymmetric"),
    "Concat": decoders.appending(),
    "fixed": decoders.static(16),
}


@pytest.mark.parametrize("style", FILES)
def test_no_logits_of_other_tokens_are_computed(style: str) -> None:
    decoder = onnx2jax.decoder(onnx2jax.convert(FILES[style].proto))
    cache = jax.eval_shape(lambda: decoder.empty_cache(2, 16))
    given = jax.ShapeDtypeStruct((2, 7), np.int32), jax.ShapeDtypeStruct((2,), np.int32)
    text = jax.jit(decoder.prefill).lower(dict(decoder.params), cache, *given).as_text()
    assert f"2x1x{decoders.VOCABULARY}xf32" in text
    assert f"x7x{decoders.VOCABULARY}xf32" not in text and f"14x{decoders.VOCABULARY}xf32" not in text


W, B = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)
NODES = {
    "a bias, a cap": ("y = MatMul(h, w) z = Add(y, b) c = Div(z, b) t = Tanh(c) logits = Mul(b, t)", "h"),
    "a weight that is computed": ("v = Transpose<perm=[1, 0]>(u) logits = MatMul(h, v)", "h"),
    "a norm before": ("n = LayerNormalization(h, s) logits = MatMul(n, w)", "h"),
    "a norm over more": ("n = LayerNormalization<axis=1>(h, s) logits = MatMul(n, w)", "n"),
    "two ways": ("f = Sigmoid(h) g = Mul(f, h) e = Add(g, x) logits = MatMul(e, w)", "h x"),
    "what broadcasts": (
        "c = ReduceMax<keepdims=0>(x) a = ReduceMean<axes=[1]>(x) f = Add(h, c) e = Mul(f, a) logits = MatMul(e, w)",
        "h c a",
    ),
    "read by another node": ("y = MatMul(h, w) logits = Identity(y) m = ReduceMax(y)", None),
    "an output of its own": ("logits = MatMul(h, w) m = Identity(logits)", None),
    "tokens are mixed after it": ("y = MatMul(h, w) z = CumSum(y, one) logits = Identity(z)", None),
    "a number for each token": ("y = MatMul(h, w) logits = Add(y, each)", None),
    "two computed operands": ("y = MatMul(h, w) logits = Mul(y, y)", "h"),
    "a computed matrix": ("v = Transpose<perm=[0, 2, 1]>(h) logits = MatMul(h, v)", None),
    "nothing but a cast": ("logits = Cast<to=1>(h)", None),
}


@pytest.mark.parametrize("case", NODES)
def test_where_tokens_are_selected(case: str) -> None:
    body, place = NODES[case]
    outputs = "float[n, t, k] logits" + (", float[...] m" if "m =" in body else "")
    text = (
        f'<ir_version: 10, opset_import: ["": 17]> g (float[n, t, 3] x) => ({outputs}) {{ h = CumSum(x, one) {body} }}'
    )
    model = parser.parse_model(text.replace("float[...]", "float"))
    values = {"w": W, "u": W.T.copy(), "b": B, "s": np.ones(3, np.float32), "one": np.array(1), "each": np.ones((5, 1))}
    reads = {n for node in model.graph.node for n in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(v.astype(np.float32) if n == "each" else v, n) for n, v in values.items() if n in reads
    )
    whole = onnx2jax.convert(model)
    graph = with_last_logits(whole.graph, "logits")
    if place is None:
        assert graph is None
        return
    assert graph is not None and [v.name for v in graph.inputs] == ["x", LAST]
    selecting = {n.inputs for n in graph.nodes if n.op_type == "SelectLast"}
    assert selecting == {(name, LAST) for name in place.split()}
    x, last = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32), np.array([1, 4], np.int32)
    every: Any = whole(x)
    selected: Any = with_graph(whole, graph)(**{"x": x, LAST: last})
    wanted = np.asarray(every[0] if isinstance(every, tuple) else every)[np.arange(2), last][:, None]
    np.testing.assert_allclose(selected, wanted, rtol=1e-6)
