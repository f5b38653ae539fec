"""The code that README.md and CONTRIBUTING.md show does run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.data import demo_samples
from onnx2jax.ops import registry
from tests.ops import test_branches, test_gradients, test_opset_matrix
from tests.support.helpers import ROOT

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax


def run_examples(name: str) -> dict[str, Any]:
    """Execute the Python blocks of a page in order; what they defined."""
    names: dict[str, Any] = {"__name__": "example"}
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def run_contributing() -> dict[str, Any]:
    registry._OPERATORS.pop(("com.example", "SoftClip"), None)
    return run_examples("CONTRIBUTING.md")


def test_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = run_examples("README.md")
    assert names["logits"].shape == (4, 10)
    np.testing.assert_array_equal(names["logits"], names["same"])
    assert names["by_weight"].keys() == names["model"].params.keys()
    # A call finds what weights alone decide computed before; apply computes it in its program, with other roundings.
    again, applied = names["again"](names["images"]), names["model"].apply(names["trained"], names["images"])
    np.testing.assert_allclose(again, applied, rtol=1e-5)
    assert names["by_pixel"].shape == names["images"].shape
    labels = demo_samples()["labels"][:4]
    np.testing.assert_array_equal(names["model"](demo_samples()["images"][:4]).argmax(-1), labels)


def test_errors_of_the_readme() -> None:
    page = (ROOT / "README.md").read_text()
    with pytest.raises(onnx2jax.errors.InputTypeError) as caught:
        onnx2jax.convert(onnx2jax.demo_model())(np.zeros((4, 1, 8, 8)))
    assert f"\n{caught.value}\n" in page

    nodes = [
        helper.make_node("FancyNorm", ["x"], ["a"], name="norm_1", domain="com.example"),
        helper.make_node("FancyNorm", ["a"], ["y"], name="norm_2", domain="com.example"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy")
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.example", 1)]
    graph = helper.make_graph(nodes, "g", [x], [y])
    with pytest.raises(onnx2jax.errors.UnsupportedOperatorError) as refused:
        onnx2jax.convert(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert f"\n{refused.value}\n" in page


@settings(max_examples=1, database=None, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_the_row_of_contributing(data: st.DataObject) -> None:
    """What CONTRIBUTING promises of one row: the operator of the page goes through the tests that rows are for."""
    row = run_contributing()["soft_clip_row"]
    with pytest.MonkeyPatch.context() as patch:
        test_opset_matrix.test_both_branches_agree_with_onnxruntime(row, patch)
    assert test_branches.folds(row)
    test_branches.check_row(row, data.draw)
    assert test_gradients.check_row(row)


def test_the_operator_of_contributing() -> None:
    run_contributing()
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in ("x", "limit")]
    node = helper.make_node("SoftClip", ["x", "limit"], ["y"], domain="com.example", alpha=0.5)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])])
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.example", 1)]
    model = onnx2jax.convert(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    x, limit = np.array([[-2, 0, 4], [1, 1, 3]], np.float32)
    np.testing.assert_allclose(model(x, limit), np.tanh(x / 2) * limit, rtol=1e-6)
