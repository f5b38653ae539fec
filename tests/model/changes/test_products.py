"""``model.simplified(merge_products=True)``: products of one input are one product and a Split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputNameError
from tests.support.models import model, text_model, value

RNG = np.random.default_rng(0)
HEADS = """(float[n, s, 8] x) => (float[n, s, 6] y)
    { q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) kt = Transpose<perm = [0, 2, 1]>(k) a = MatMul(q, kt)
      p = Softmax(a) y = MatMul(p, v) }"""


def weights(**widths: int) -> dict[str, np.ndarray]:
    return {n: RNG.normal(size=(8, k)).astype(np.float32) for n, k in widths.items()}


def merged(proto: onnx.ModelProto) -> onnx2jax.Model:
    return onnx2jax.convert(proto).simplified(merge_products=True)


def products(small: onnx2jax.Model) -> dict[str, int]:
    return {n: k for n, k in Counter(node.op_type for node in small.graph.nodes).items() if n in ("MatMul", "Split")}


def test_query_key_and_value_are_one_product_here_and_in_the_file(tmp_path: Path) -> None:
    proto, x = text_model(f"heads {HEADS}", **weights(wq=4, wk=4, wv=6)), RNG.normal(size=(2, 3, 8)).astype(np.float32)
    small = merged(proto)
    assert products(small) == {"MatMul": 3, "Split": 1}
    assert {n: v.shape for n, v in small.params.items()} == {"q.weight": (8, 14)}
    path = onnx2jax.save(small, tmp_path / "small.onnx")
    onnx.checker.check_model(path, full_check=True)
    (want,) = onnx2jax.convert(proto).run(None, {"x": x})
    (theirs,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    for y in (small(x), jax.jit(small.apply)(dict(small.params), x), onnx2jax.convert(path)(x), theirs):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_the_columns_of_the_gradient_are_those_of_the_weights() -> None:
    proto, x = text_model(f"heads {HEADS}", **weights(wq=4, wk=4, wv=6)), RNG.normal(size=(2, 3, 8)).astype(np.float32)
    plain, small = onnx2jax.convert(proto), merged(proto)
    want, got = (jax.grad(lambda p, m=m: (m.apply(p, x) ** 2).sum())(dict(m.params)) for m in (plain, small))
    columns = np.split(np.asarray(got["q.weight"]), [4, 8], axis=1)
    for name, part in zip(("wq", "wk", "wv"), columns, strict=True):
        np.testing.assert_allclose(part, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "{ a = MatMul(x, w) b = MatMul(x, v) s = Add(a, b) z = MatMul(s, w) y = Add(s, z) }",
        "{ a = MatMul(x, w) b = MatMul(x, u) y = Add(a, b) }",
        "{ a = MatMul(x, w) b = MatMul(a, v) y = Add(a, b) }",
        "{ h = Relu(x) a = MatMul(x, w) b = MatMul(h, v) y = Add(a, b) }",
    ],
    ids=["one weight is read twice", "one is an input", "one follows the other", "two inputs"],
)
def test_other_products_stay(body: str) -> None:
    small = merged(text_model(f"p (float[n, 8] x, float[8, 8] u) => (float[n, 8] y) {body}", **weights(w=8, v=8)))
    assert "Split" not in products(small)
    x, u = (RNG.normal(size=s).astype(np.float32) for s in ((2, 8), (8, 8)))
    assert small(x, u).shape == (2, 8)


def test_results_that_are_outputs_keep_their_names_and_weights_inside_of_a_branch_are_merged(tmp_path: Path) -> None:
    made = weights(a=3, b=2)
    nodes = [helper.make_node("MatMul", ["x", n], [f"by {n}"]) for n in made]
    branches = []
    for sign in (1, -1):
        inside = {n: sign * v for n, v in made.items()}
        results = [value(f"by {n}", np.float32, (2, v.shape[1])) for n, v in inside.items()]
        branches.append(model(nodes, [], results, inside).graph)
    chosen = helper.make_node("If", ["c"], ["p", "q"], then_branch=branches[0], else_branch=branches[1])
    outputs = [value("p", np.float32, (2, 3)), value("q", np.float32, (2, 2))]
    proto = model([chosen], [value("c", bool, ()), value("x", np.float32, (2, 8))], outputs, {})
    small = merged(proto)
    path = onnx2jax.save(small, tmp_path / "small.onnx")
    onnx.checker.check_model(path, full_check=True)
    x = RNG.normal(size=(2, 8)).astype(np.float32)
    for c in map(np.array, (True, False)):
        want: Any = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"c": c, "x": x})
        for ours in (small.run(None, {"c": c, "x": x}), onnx2jax.convert(path).run(None, {"c": c, "x": x})):
            for a, b in zip(ours, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    (node,) = small.graph.nodes
    assert all("Split" in {n.op_type for n in g.nodes} for g in node.graphs)


def test_names_of_options_are_checked() -> None:
    message = r"^simplified: unknown keyword merge_product; did you mean 'merge_products'\?"
    with pytest.raises(InputNameError, match=message):
        onnx2jax.convert(onnx2jax.demo_model()).simplified(merge_product=True)  # type: ignore[call-arg]
