"""String labels of classifiers are looked up apart, so that the classifier itself can be compiled and traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputTypeError, KnownValueError
from tests.support.models import model, value

ML = "ai.onnx.ml"
X = np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)
SVM = {
    "coefficients": [1.0, -1.0, 0.5, -0.5, 1.0, -1.0], "support_vectors": [0.1, 0.2, 0.5, -0.4, -1.0, 0.3],
    "vectors_per_class": [1, 1, 1], "rho": [0.1, -0.1, 0.2], "kernel_type": "RBF", "kernel_params": [0.5, 0.0, 3.0],
}  # fmt: skip
TREE = {
    "nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [1, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.1, 0.0, 0.0], "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0], "class_treeids": [0] * 4, "class_nodeids": [1, 1, 2, 2], "class_ids": [0, 1, 1, 2],
    "class_weights": [0.7, 0.3, 0.2, 0.8],
}  # fmt: skip
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "LinearClassifier": {"coefficients": [1.0, -1, 0.5, 2, -1, 0.3], "intercepts": [0.1, 0.2, 0.3]},
    "SVMClassifier": SVM,
    "TreeEnsembleClassifier": TREE,
}


def classifier(kind: str, *, behind: bool = False) -> onnx.ModelProto:
    """A classifier of three classes "a", "b", "c"; ``behind``: its labels go through a LabelEncoder to numbers."""
    nodes = [
        helper.make_node(
            kind, ["x"], ["label", "scores"], domain=ML, classlabels_strings=["a", "b", "c"], **CLASSIFIERS[kind]
        )
    ]
    outputs = [value("label", object, ["n"]), value("scores", np.float32, ["n", 3])]
    if behind:
        keys = {"keys_strings": ["a", "b", "c"], "values_int64s": [7, 8, 9]}
        nodes.append(helper.make_node("LabelEncoder", ["label"], ["code"], domain=ML, **keys))
        outputs = [value("code", np.int64, ["n"]), *outputs]
    proto = model(nodes, [value("x", np.float32, ["n", 2])], outputs)
    proto.opset_import.append(helper.make_opsetid(ML, 3))
    return proto


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_results_are_those_of_onnxruntime(kind: str, behind: bool, tmp_path: Path) -> None:
    proto = classifier(kind, behind=behind)
    m = onnx2jax.convert(proto)
    theirs = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
    for _ in range(2):
        for ours in (m.run(None, {"x": X}), m(X)):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b) if b.dtype.kind != "f" else np.testing.assert_allclose(a, b, 1e-5)
    onnx2jax.save(m, tmp_path / "saved.onnx")
    assert onnx.load(tmp_path / "saved.onnx").graph.node[0].attribute == proto.graph.node[0].attribute


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_scores_are_one_program_and_have_gradients(kind: str) -> None:
    m = onnx2jax.convert(classifier(kind))
    scores = m.cut(outputs="scores")
    expected = m.run(["scores"], {"x": X})[0]
    assert scores.jitted

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        rows = jax.vmap(lambda row: scores.apply(params, row[None])[0])(x)
        return scores.apply(params, x), rows, jax.grad(lambda x: scores.apply(params, x)[:, 0].sum())(x)

    ours, rows, slope = run(scores.params, X)
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    assert np.isfinite(slope).all() and (kind == "TreeEnsembleClassifier") == (not slope.any())


def test_a_tree_ensemble_is_compiled_beside_its_labels() -> None:
    m = onnx2jax.convert(classifier("TreeEnsembleClassifier"))
    m(X)
    (compiled, *_), (host, _, why, *_) = m._runtime.program.rows()
    assert (compiled, host) == ("jit", "host") and "needs the value of 'label (class number)'" in why


def test_labels_inside_jit_are_refused_by_the_nodes_name() -> None:
    m = onnx2jax.convert(classifier("LinearClassifier"))
    with pytest.raises(KnownValueError, match=r"ai\.onnx\.ml\.LinearClassifier.*the class labels are strings") as e:
        jax.jit(m.apply)(m.params, X)
    advice = "\nleave out what depends on it: model.cut(outputs=['scores'])"
    assert str(e.value).endswith(advice), "not 'label (class number)', which the file lacks; x is no input to fix"
    jax.jit(m.cut(outputs=["scores"]))(X)


def test_a_pipeline_of_strings_is_cut_as_errors_advise() -> None:
    """scikit-learn's: a column of strings, labels that are strings, and probabilities as maps."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 22, "ai.onnx.ml" : 3]>
        g (string[n, 1] city, float[n, 1] age) => (string[n] label, seq(map(string, float)) maps) {
            hot = ai.onnx.ml.OneHotEncoder <cats_strings = ["a", "b"]> (city)
            flat = Flatten(hot)
            x = Concat <axis = 1> (flat, age)
            label, scores = ai.onnx.ml.LinearClassifier <classlabels_strings = ["no", "yes"],
                coefficients = [1., 0., -0.1, -1., 0., 0.1], post_transform = "SOFTMAX"> (x)
            maps = ai.onnx.ml.ZipMap <classlabels_strings = ["no", "yes"]> (scores)
        }""")
    m, age = onnx2jax.convert(proto, static={"city": np.array([["b"]], object)}), np.float32([[3]])
    with pytest.raises(KnownValueError) as e:
        jax.jit(m)(age)
    assert str(e.value).endswith("computed from: 'age'\nleave out what depends on it: model.cut(outputs=['scores'])")
    scores = jax.jit(m.cut(outputs=["scores"]))(age)
    np.testing.assert_allclose([list(row.values()) for row in m(age).maps], scores, rtol=1e-6)
    with pytest.raises(InputTypeError, match=r"convert\(\.\.\.\)\.cut\(outputs=\['scores'\]\)"):
        onnx2jax.convert(proto, outputs=["scores"])  # type: ignore[arg-type]
