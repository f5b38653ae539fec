"""Nodes of one operator on the same values, evaluated as one: tree ensembles descend in one loop."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnx2jax
from onnx2jax.errors import OnnxError
from tests.ops.test_ml import ensemble, forest

ML = "ai.onnx.ml"
X = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)


def model(nodes, outputs, *, opset=4, **options):
    """A model of ai.onnx.ml nodes on rows of three features, each of which takes its own copy of the columns."""
    order = helper.make_tensor("order", TensorProto.INT64, [3], [2, 0, 1])
    gathers = [
        helper.make_node("Gather", ["x", "order"], [f"x{i}"], name=f"take{i}", axis=1) for i in range(len(nodes))
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3])
    graph = helper.make_graph([*gathers, *nodes], "trees", [x], outputs, [order])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ML, opset)]
    return onnx2jax.convert(helper.make_model(graph, opset_imports=imports, ir_version=10), **options)


def floats(*names):
    return [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]


def loops(model):
    return str(jax.make_jaxpr(lambda x: model.apply(model.params, x=x))(X)).count(" scan[")


def same(nodes, outputs, **options):
    """The model, after a comparison of its outputs with those of nodes that are evaluated one by one."""
    together, alone = (model(nodes, outputs, optimize=o, **options) for o in (True, False))
    found, expected = (jax.jit(partial(m.apply, m.params))(x=X) for m in (together, alone))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert loops(alone) == len(nodes)
    return together


def regressor(i, *, depth=3, trees=2, targets=1, aggregate="SUM"):
    draw, ids = np.random.default_rng(i), itertools.cycle(range(targets))
    grown = forest("target", lambda: [next(ids)], draw.normal, trees, depth)
    return helper.make_node(
        "TreeEnsembleRegressor", [f"x{i}"], [f"y{i}"], name=f"trees{i}", domain=ML, n_targets=targets,
        aggregate_function=aggregate, **grown,
    )  # fmt: skip


def test_regressors_of_other_depths_and_targets_descend_in_one_loop_for_each_width():
    nodes = [regressor(0, depth=2, trees=3), regressor(1, depth=5), regressor(2, aggregate="MAX")]
    nodes += [regressor(i, targets=3, aggregate=a) for i, a in ((3, "AVERAGE"), (4, "MIN"))]
    assert loops(same(nodes, floats(*(f"y{i}" for i in range(5))))) == 2


def test_classifiers_of_three_classes_descend_in_one_loop():
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node(
            "TreeEnsembleClassifier", [f"x{i}"], [f"label{i}", f"y{i}"], name=f"trees{i}", domain=ML,
            classlabels_int64s=[5, 7, 9], post_transform=post, **forest("class", lambda: [0, 1, 2], draw.random, 2),
        )
        for i, post in enumerate(("NONE", "SOFTMAX"))
    ]  # fmt: skip
    labels = [helper.make_tensor_value_info(n, TensorProto.INT64, None) for n in ("label0", "label1")]
    assert loops(same(nodes, [*labels, *floats("y0", "y1")])) == 1


def test_ensembles_with_sets_of_other_sizes_and_with_none_descend_in_one_loop():
    sets = [np.array(v, np.float32) for v in ([1, 3, np.nan], [0.5, -1, 2, 4, np.nan])]
    given = [{"membership_values": v} for v in sets]
    given.append({"membership_values": None, "nodes_modes": np.array([1, 0], np.uint8)})
    nodes = []
    for i, changes in enumerate(given):
        attributes = {k: v for k, v in ensemble(np.float32, **changes).items() if v is not None}
        tensors = {k: numpy_helper.from_array(v, k) if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
        nodes.append(helper.make_node("TreeEnsemble", [f"x{i}"], [f"y{i}"], name=f"trees{i}", domain=ML, **tensors))
    assert loops(same(nodes, floats("y0", "y1", "y2"), opset=5)) == 1


def test_an_error_names_the_node_that_refuses():
    wrong = regressor(1)
    (features,) = (a for a in wrong.attribute if a.name == "nodes_featureids")
    features.ints[:] = [7] * len(features.ints)
    with pytest.raises(OnnxError, match=r"node 'trees1'[\s\S]*feature 7"):
        model([regressor(0), wrong], floats("y0", "y1"))(x=X)


def test_ensembles_on_other_rows_stay_apart():
    nodes = [regressor(0), regressor(1)]
    nodes[1].input[0] = "x"
    assert loops(model(nodes, floats("y0", "y1"))) == 2


def test_rows_of_a_callers_vmap():
    net = model([regressor(0), regressor(1)], floats("y0", "y1"))
    rows = jax.vmap(lambda x: net.apply(net.params, x=x[None]))(X)
    whole = net.apply(net.params, x=X)
    for a, b in zip(rows, whole, strict=True):
        np.testing.assert_array_equal(a[:, 0], b)


def test_a_function_called_with_other_types_has_a_table_for_each():
    """Its node is evaluated in both calls."""
    text = """<ir_version: 10, opset_import: ["": 18, "ai.onnx.ml": 3, "l": 1]>
    g (int64[2] i, float[2] x) => (int64[2] j, float[2] y) { j = l.f (i)  y = l.f (x) }
    <domain: "l", opset_import: ["ai.onnx.ml": 3]> f (a) => (b) { b = ai.onnx.ml.Imputer <replaced_value_int64 = -1,
        replaced_value_float = -1.0, imputed_value_int64s = [7], imputed_value_floats = [1.5]> (a) }"""
    j, y = onnx2jax.convert(parser.parse_model(text))(np.int64([-1, 2]), np.float32([-1, 2]))
    np.testing.assert_array_equal(j, np.int64([7, 2]), strict=True)
    np.testing.assert_array_equal(y, np.float32([1.5, 2]), strict=True)
