"""ai.onnx.ml: against onnxruntime, and what the specification decides where that does something else."""

from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnx2jax.errors import KnownValueError
from onnx2jax.ops.ml import svm
from onnx2jax.ops.ml.forests import LEAF, Forest, _layout
from onnx2jax.ops.ml.forests import _leaves as leaves
from tests.support.helpers import run_op

ml = partial(run_op, domain="ai.onnx.ml")
FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
POST = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
rng = np.random.default_rng(0)


def f32(*shape):
    return rng.normal(size=shape).astype(np.float32)


def flat(array):
    return tuple(np.asarray(array).ravel().tolist())


def text(*values):
    return np.array(values, object)


def onnxruntime_says(name, x, outputs, opset, attributes):
    node = helper.make_node(name, ["x"], list("yz")[: len(outputs)], domain="ai.onnx.ml", **attributes)
    kind = STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info(n, t, None) for n, t in zip("yz", outputs, strict=False)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def agree(name, x, outputs, opset=1, tolerance=2e-5, traced=False, **attributes):
    """The operator with a known input, or also with a traced one, gives what onnxruntime gives."""
    want = onnxruntime_says(name, x, outputs, opset, attributes)
    for jit in (False, True) if traced else (False,):
        got = ml(name, x, opset=opset, n_outputs=len(outputs), jit=jit, **attributes)
        for g, w in zip(got if len(outputs) > 1 else (got,), want, strict=True):
            assert jit or isinstance(g, np.ndarray)
            assert g.shape == w.shape
            if w.dtype.kind == "O":
                assert g.tolist() == w.tolist()
            else:
                assert g.dtype == w.dtype
                np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------- features and encoding


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_features(dtype):
    x = (f32(4, 3) * 3).astype(dtype)
    x[1] = 0
    for row in (x, x[0]):
        agree("Scaler", row, [FLOAT], offset=(0.1, 0.2, 0.3), scale=(1.0, 2.0, 3.0))
        agree("Scaler", row, [FLOAT], offset=(0.1,), scale=(2.0,), traced=True)
        agree("FeatureVectorizer", row, [FLOAT], inputdimensions=(3,))
        for norm in ("MAX", "L1", "L2"):
            agree("Normalizer", row, [FLOAT], norm=norm, traced=norm == "L2")
    agree("FeatureVectorizer", x, [FLOAT], inputdimensions=(2,))
    agree("FeatureVectorizer", x, [FLOAT], inputdimensions=(5,), traced=True)
    if dtype != np.int32:
        agree("OneHotEncoder", x, [FLOAT], cats_int64s=(-1, 0, 1, 2), traced=dtype == np.float64)


def test_binarizer_compares_integers_with_a_fraction():
    x = np.array([-2, -1, 0, 1])
    for jit in (False, True):
        assert ml("Binarizer", x, threshold=-1.5, jit=jit).tolist() == [0, 1, 1, 1]
        assert ml("Binarizer", x, threshold=0.0, jit=jit).tolist() == [0, 0, 0, 1]


def test_normalizer_has_a_gradient_at_zero():
    def total(x):
        return sum(ml("Normalizer", x, norm=norm).sum() for norm in ("MAX", "L1", "L2"))

    assert np.isfinite(jax.jit(jax.grad(total))(np.zeros((1, 2), np.float32))).all()


def test_imputer():
    x = np.array([[1, np.nan], [np.nan, 0]], np.float32)
    agree("Imputer", x, [FLOAT], imputed_value_floats=(7.0, 8.0), replaced_value_float=float("nan"), traced=True)
    agree("Imputer", x, [FLOAT], imputed_value_floats=(7.0,), replaced_value_float=0.0)
    agree("Imputer", np.array([[0, 1]]), [INT64], imputed_value_int64s=(5, 6), replaced_value_int64=0)
    with pytest.raises(ValueError, match="imputed_value_floats"):
        ml("Imputer", x, imputed_value_int64s=(1,))
    with pytest.raises(ValueError, match="3"):
        ml("Imputer", x, imputed_value_floats=(1.0, 2.0, 3.0))


def test_feature_extractor():
    x = f32(3, 4)
    for jit in (False, True):
        assert ml("ArrayFeatureExtractor", x, np.array([[2, 0]]), jit=jit).tolist() == x[:, [2, 0]].tolist()
        assert ml("ArrayFeatureExtractor", x[0], np.array([1]), jit=jit).shape == (1, 1)
    for index in np.array([[-1], [4]]):  # "based on 0": none counts from the end
        with pytest.raises(ValueError, match=r"are outside \[0, 3\]"):
            ml("ArrayFeatureExtractor", x, index)
        assert np.isnan(ml("ArrayFeatureExtractor", x, index, jit=True)).all()
    with pytest.raises(KnownValueError, match="strings"):
        jax.jit(lambda y: ml("ArrayFeatureExtractor", text("a", "b"), y))(np.array([1]))


def test_one_hot_encoder_of_an_unknown_category():
    x = np.array([1, 9])
    assert ml("OneHotEncoder", x, cats_int64s=(1, 2)).tolist() == [[1, 0], [0, 0]]
    for given, cats in ((x, {"cats_int64s": (1, 2)}), (text("a", "q"), {"cats_strings": ("a", "b")})):
        with pytest.raises(ValueError, match="none of the categories"):
            ml("OneHotEncoder", given, **cats, zeros=0)
    with pytest.raises(KnownValueError, match="zeros=0"):
        ml("OneHotEncoder", x, cats_int64s=(1, 2), zeros=0, jit=True)
    agree("OneHotEncoder", text("a", "q"), [FLOAT], cats_strings=("a", "b"))
    assert ml("OneHotEncoder", text(), cats_strings=("a", "b")).shape == (0, 2)
    assert ml("OneHotEncoder", text("a", "b"), cats_strings=("a", "b", "a")).tolist() == [[1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    ("opset", "x", "output", "attributes"),
    [
        (1, text("a", "q"), INT64, {"classes_strings": ("a", "b")}),
        (1, np.array([[0, 7]]), STRING, {"classes_strings": ("a", "b"), "default_string": "-"}),
        (2, text("a", "q"), INT64, {"keys_strings": ("a", "b"), "values_int64s": (4, 5)}),
        (2, np.array([1, 3]), STRING, {"keys_int64s": (1, 2), "values_strings": ("a", "b")}),
        (2, np.array([1, 3]), FLOAT, {"keys_int64s": (2, 1), "values_floats": (0.5, 1.5), "default_float": 9.0}),
        (4, np.array([1.5, 3, np.nan], np.float32), INT64, {"keys_floats": (np.nan, 3.0), "values_int64s": (1, 2)}),
        (4, np.array([1.5, 3, np.nan], np.float32), FLOAT, {"keys_floats": (1.5, np.nan), "values_floats": (1.0, 2.0)}),
        (4, text("b"), STRING, {"keys_strings": ("a", "b"), "values_strings": ("A", "B")}),
    ],
)
def test_label_encoder(opset, x, output, attributes):
    agree("LabelEncoder", x, [output], opset=opset, traced=output != STRING and x.dtype != object, **attributes)


def test_label_encoder_with_tensors():
    keys, values = np.array([3, 1, 3], np.int16), np.array([0.5, 1.5, 2.5])
    encode = partial(ml, "LabelEncoder", keys_tensor=keys, values_tensor=values, default_tensor=np.array([-7.0]))
    for jit in (False, True):
        got = encode(np.array([[1, 2, 3]], np.int16), jit=jit)
        assert got.tolist() == [[1.5, -7, 2.5]]  # the last of equal keys
        assert got.dtype == np.float64
    with pytest.raises(ValueError, match="dtype of the input"):
        encode(np.array([1]))
    with pytest.raises(KnownValueError, match="strings"):
        ml("LabelEncoder", np.array([1]), keys_int64s=(1,), values_strings=("a",), jit=True)


@pytest.mark.parametrize("keys", [(1, 3), (-30000, 30000), (-32768, 0), (5, 32767)])
def test_label_encoder_of_integers_at_the_ends_of_their_type(keys):
    for dtype in (np.int16, np.int64):
        ends = np.iinfo(dtype)
        x = np.array([ends.min, ends.min + 1, *keys, keys[0] + 1, keys[1] - 1, ends.max - 1, ends.max], dtype)
        table = dict(zip(keys, (0.5, 1.5), strict=True))
        given = {"keys_tensor": np.array(keys, dtype), "values_tensor": np.array([0.5, 1.5], np.float32)}
        got = ml("LabelEncoder", x, **given, default_tensor=np.array([-7], np.float32), jit=True)
        assert got.tolist() == [table.get(v, -7) for v in x.tolist()]


def test_category_mapper():
    names = {"cats_int64s": (10, 20), "cats_strings": ("a", "b")}
    agree("CategoryMapper", text("b", "c"), [INT64], **names)
    agree("CategoryMapper", np.array([[20, 5]]), [STRING], **names)


# ---------------------------------------------------------------------------------------------------- maps


def test_zip_map():
    x = np.array([[0.25, 0.75]], np.float32)
    assert ml("ZipMap", x, classlabels_strings=("a", "b")) == [{"a": 0.25, "b": 0.75}]
    assert ml("ZipMap", x[0], classlabels_int64s=(3, 4)) == [{3: 0.25, 4: 0.75}]
    with pytest.raises(ValueError, match=r"number of columns \(2\)"):
        ml("ZipMap", x, classlabels_int64s=(3, 4, 5))


def test_cast_map():
    x = {2: 1.5, 0: 2.0}
    assert ml("CastMap", x).tolist() == [[2, 1.5]]
    assert ml("CastMap", x, map_form="SPARSE", max_map=4).tolist() == [[2, 0, 1.5, 0]]
    assert ml("CastMap", x, cast_to="TO_INT64").tolist() == [[2, 1]]
    assert ml("CastMap", {1: "7"}, cast_to="TO_FLOAT").dtype == np.float32
    assert ml("CastMap", x, cast_to="TO_STRING").tolist() == [["2.000000", "1.500000"]]
    with pytest.raises(ValueError, match="max_map"):
        ml("CastMap", x, map_form="SPARSE", max_map=2)


def test_dict_vectorizer():
    got = ml("DictVectorizer", {"a": 4.0, "c": 8.0}, string_vocabulary=("a", "c", "b", "z"))
    assert got.tolist() == [[4, 8, 0, 0]] and got.dtype == np.float32
    assert ml("DictVectorizer", {5: np.float64(1)}, int64_vocabulary=(4, 5)).dtype == np.float64
    unknown = ml("DictVectorizer", {"q": 1.0, "a": 2.0}, string_vocabulary=("a", "b"))
    assert unknown.tolist() == [[2, 0]], "as onnxruntime and scikit-learn leave out what they have not seen"


# ------------------------------------------------------------------------------------------- linear models


@pytest.mark.parametrize("post", POST)
def test_linear(post):
    x, c = f32(4, 3), flat(f32(3, 3))
    agree(
        "LinearRegressor",
        x,
        [FLOAT],
        coefficients=c,
        intercepts=(0.1, 0.2, 0.3),
        targets=3,
        post_transform=post,
        traced=True,
    )
    classify = partial(agree, "LinearClassifier", post_transform=post)
    classify(x, [INT64, FLOAT], coefficients=c, intercepts=(0.1, 0.2, 0.3), classlabels_ints=(5, 6, 9), multi_class=1)
    classify(x[0], [STRING, FLOAT], coefficients=c, intercepts=(0.1, 0.2, 0.3), classlabels_strings=("a", "b", "c"))
    classify(x.astype(np.float64), [INT64, FLOAT], coefficients=c[:6], intercepts=(0.1, 0.2), classlabels_ints=(5, 6))
    if post != "PROBIT":
        classify(x, [INT64, FLOAT], coefficients=c[:3], intercepts=(0.1,), classlabels_ints=(5, 6), traced=True)


def test_a_single_target_is_transformed_too():
    """onnxruntime leaves a single target as it is, the specification does not."""
    got = ml("LinearRegressor", np.zeros((1, 1), np.float32), coefficients=(1.0,), post_transform="LOGISTIC")
    assert got.tolist() == [[0.5]]


def test_linear_rejects_invalid_operands():
    x = f32(2, 3)
    with pytest.raises(ValueError, match="class labels"):
        ml("LinearClassifier", x, coefficients=(1.0,) * 6, classlabels_ints=(1, 2, 3), n_outputs=2)
    with pytest.raises(ValueError, match="coefficients"):
        ml("LinearRegressor", x, coefficients=(1.0, 2.0))
    with pytest.raises(ValueError, match="post_transform"):
        ml("LinearRegressor", x, coefficients=(1.0,) * 3, post_transform="RELU")
    with pytest.raises(ValueError, match="intercepts must have 1 entries"):
        ml("LinearRegressor", x, coefficients=(1.0,) * 3, intercepts=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"inputdimensions \(-1,\) must not be negative"):
        ml("FeatureVectorizer", x, inputdimensions=(-1,))
    with pytest.raises(KnownValueError, match="labels are strings"):
        labels = ("a", "b", "c")
        ml("LinearClassifier", x, coefficients=(1.0,) * 9, classlabels_strings=labels, n_outputs=2, jit=True)
    with pytest.warns(UserWarning, match="too few features"):
        ml("LinearRegressor", x, coefficients=(1.0,) * 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rho": (1.0, 2.0)}, "rho"), ({"prob_a": (1.0,)}, "prob_b"), ({"prob_a": (1.0,) * 2}, "prob_a must have 1")],
)
def test_svm_of_other_counts(change, message):
    common = {"coefficients": (1.0, 2.0), "support_vectors": (1.0,) * 6, "vectors_per_class": (1, 1)}
    with pytest.raises(ValueError, match=message):
        ml("SVMClassifier", f32(2, 3), classlabels_ints=(1, 2), n_outputs=2, **common, **change)


# -------------------------------------------------------------------------------- support vector machines

KERNELS = {
    "LINEAR": (0.0, 0.0, 0.0),
    "POLY": (0.5, 0.3, 3.0),
    "RBF": (0.7, 0.0, 0.0),
    "SIGMOID": (0.2, 0.1, 0.0),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_svm(kernel):
    x, common = f32(5, 3), {"kernel_type": kernel, "kernel_params": KERNELS[kernel], "support_vectors": flat(f32(5, 3))}
    for one_class in (0, 1):
        agree(
            "SVMRegressor",
            x,
            [FLOAT],
            coefficients=flat(f32(5)),
            rho=(0.3,),
            n_supports=5,
            one_class=one_class,
            **common,
        )
    for n, per_class in ((2, (2, 3)), (4, (1, 2, 1, 1))):
        pairs = n * (n - 1) // 2
        common |= {"coefficients": flat(f32(n - 1, 5)), "rho": flat(f32(pairs)), "vectors_per_class": per_class}
        probabilities = {"prob_a": flat(f32(pairs)), "prob_b": flat(f32(pairs))}
        for more in ({}, probabilities):
            post = "LOGISTIC" if kernel == "RBF" else "NONE"
            labels = (3, 5, 7, 8)[:n]
            more = more | {"classlabels_ints": labels, "post_transform": post}
            agree("SVMClassifier", x, [INT64, FLOAT], tolerance=1e-4, traced=kernel == "RBF", **common, **more)


def test_svm_of_many_rows_far_from_the_origin():
    """Squared distances by a product lose nothing where features are large and close to each other."""
    x, vectors = 300 + f32(100, 20), 300 + f32(80, 20)
    assert len(x) * vectors.size > svm.SVM_DIFFERENCES
    common = {"kernel_type": "RBF", "kernel_params": (0.05, 0.0, 0.0), "support_vectors": flat(vectors)}
    agree("SVMRegressor", x, [FLOAT], coefficients=flat(f32(80)), rho=(0.3,), n_supports=80, traced=True, **common)


def test_svm_of_a_kernel_narrow_for_its_vectors():
    """Two clusters a thousand widths of the kernel apart: a product of rows cancels all that their distances are."""
    clusters = np.repeat(np.float32([[-500], [500]]), 40, 0)
    x, vectors = clusters[np.arange(100) % 80] + 0.3 * f32(100, 20), clusters + 0.3 * f32(80, 20)
    common = {"kernel_type": "RBF", "kernel_params": (0.3, 0.0, 0.0), "support_vectors": flat(vectors)}
    agree("SVMRegressor", x, [FLOAT], coefficients=flat(f32(80)), rho=(0.3,), n_supports=80, traced=True, **common)


def test_svm_distances_of_many_rows_are_one_product():
    """No array of rows x vectors x features, whose reduction an accelerator computes outside its matrix units."""
    common = {"kernel_type": "RBF", "kernel_params": KERNELS["RBF"], "support_vectors": flat(f32(50, 30))}
    jaxpr = jax.make_jaxpr(lambda x: ml("SVMRegressor", x, coefficients=flat(f32(50)), n_supports=50, **common))
    equations = jaxpr(f32(100, 30)).eqns
    assert max(v.aval.size for e in equations for v in e.outvars) == 100 * 50
    assert [e.primitive.name for e in equations].count("dot_general") == 2


def test_svm_scores_by_gaussian_kernels_are_one_product():
    """Nothing infinite has to be kept from the pairs of other classes, for which a TPU takes five times as long."""
    common = {"kernel_type": "RBF", "kernel_params": KERNELS["RBF"], "support_vectors": flat(f32(50, 30))}
    common |= {"vectors_per_class": (10,) * 5, "classlabels_ints": tuple(range(5)), "coefficients": flat(f32(4, 50))}
    jaxpr = jax.make_jaxpr(lambda x: ml("SVMClassifier", x, n_outputs=2, **common))(f32(100, 30))
    assert [e.primitive.name for e in jaxpr.eqns].count("dot_general") == 3  # distances, scores, votes


def test_svm_probabilities_stop_when_all_rows_have_converged():
    r = np.triu(rng.uniform(0.1, 0.9, (6, 4, 4)), 1).astype(np.float32)
    pairwise = np.moveaxis(r + np.tril(1 - r.swapaxes(1, 2), -1), 0, -1)
    known, traced = svm._coupled(pairwise), jax.jit(svm._coupled)(pairwise)
    np.testing.assert_allclose(traced, known, rtol=1e-5)
    with mock.patch.object(svm, "SWEEPS", 10):
        np.testing.assert_array_equal(svm._coupled(pairwise), known)


def test_svm_without_support_vectors():
    x = f32(6, 3)
    common = {"rho": (0.2,), "kernel_params": (0.0, 0.0, 0.0)}
    agree("SVMRegressor", x, [FLOAT], coefficients=flat(f32(3)), **common)
    for coefficients in (f32(2, 3), abs(f32(2, 3))):
        agree("SVMClassifier", x, [INT64, FLOAT], coefficients=flat(coefficients), classlabels_ints=(3, 5), **common)
    agree(
        "SVMClassifier", x, [STRING, FLOAT], coefficients=flat(f32(3, 3)), classlabels_strings=("a", "b", "c"), **common
    )


def test_svm_probabilities_are_differentiable():
    x = jnp.asarray(f32(2, 3))
    common = {"rho": flat(f32(3)), "vectors_per_class": (1, 2, 2), "support_vectors": flat(f32(5, 3))}
    common |= {"coefficients": flat(f32(2, 5)), "prob_a": flat(f32(3)), "prob_b": flat(f32(3))}

    def first(x):
        return ml("SVMClassifier", x, classlabels_ints=(0, 1, 2), n_outputs=2, **common)[1][:, 0].sum()

    assert np.isfinite(jax.jit(jax.grad(first))(x)).all()


# --------------------------------------------------------------------------------------------------- trees

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ")
SPLITS = (-1.0, -0.5, 0.0, 0.5, 1.0)


def forest(kind, targets, weight, trees=4, depth=4):
    """Random trees; `targets()` are the classes or targets a leaf votes for."""
    nodes = {k: [] for k in ["treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids"]}
    nodes["missing_value_tracks_true"] = []
    votes = {k: [] for k in ["ids", "nodeids", "treeids", "weights"]}

    def grow(tree, level):
        at = len(nodes["modes"])
        me = nodes["treeids"].count(tree)
        leaf = level == 0 or (level < depth and rng.random() < 0.2)
        mode = "LEAF" if leaf else str(rng.choice(MODES))
        row = (tree, me, int(rng.integers(3)), mode, float(rng.choice(SPLITS)), 0, 0, int(rng.integers(2)))
        for column, value in zip(nodes.values(), row, strict=True):
            column.append(value)
        if not leaf:
            nodes["truenodeids"][at], nodes["falsenodeids"][at] = grow(tree, level - 1), grow(tree, level - 1)
        for t in targets() if leaf else ():
            for column, value in zip(votes.values(), (t, me, tree, float(np.float32(weight()))), strict=True):
                column.append(value)
        return me

    for tree in range(trees):
        grow(tree, depth)
    return {f"nodes_{k}": tuple(v) for k, v in nodes.items()} | {f"{kind}_{k}": tuple(v) for k, v in votes.items()}


def features(dtype):
    values = [*SPLITS, np.nan] if np.issubdtype(dtype, np.floating) else SPLITS
    return rng.choice(values, size=(30, 3)).astype(dtype)


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize(("dtype", "post"), [(np.float32, "SOFTMAX"), (np.float64, "NONE")])
def test_tree_regressor(aggregate, dtype, post):
    some = partial(rng.choice, 3, size=2, replace=False)
    regress = partial(agree, "TreeEnsembleRegressor", features(dtype), [FLOAT], aggregate_function=aggregate)
    regress(n_targets=3, post_transform=post, traced=True, **forest("target", some, rng.random))
    regress(opset=3, n_targets=1, base_values=(0.3,), **forest("target", lambda: [0], rng.random))
    everyone = forest("target", lambda: range(3), rng.normal)
    regress(opset=3, n_targets=3, base_values=(0.1, 0.2, 0.3), post_transform=post, **everyone)


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("voted", [0, 1])
@pytest.mark.parametrize("weight", [lambda: rng.random() / 2, rng.normal])
def test_tree_classifier_of_two_classes(post, voted, weight):
    """Votes for class 0 alone are the probability or the margin of class 1."""
    trees = forest("class", lambda: [voted], weight)
    classify = partial(agree, "TreeEnsembleClassifier", features(np.float32), post_transform=post)
    classify([INT64, FLOAT], classlabels_int64s=(3, 7), traced=post == "LOGISTIC", **trees)
    if voted == 0:
        classify([STRING, FLOAT], classlabels_strings=("no", "yes"), base_values=(0.2,), **trees)


@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_tree_classifier_of_three_classes(post):
    classify = partial(agree, "TreeEnsembleClassifier", features(np.float32), classlabels_int64s=(3, 5, 7))
    classify([INT64, FLOAT], post_transform=post, traced=True, **forest("class", lambda: range(3), rng.normal))
    classify(
        [INT64, FLOAT], post_transform=post, base_values=(0.1, -0.2, 0.3), **forest("class", lambda: [0, 2], rng.normal)
    )
    if post == "NONE":
        integers = features(np.int64)
        agree(
            "TreeEnsembleClassifier",
            integers,
            [INT64, FLOAT],
            classlabels_int64s=(3, 5, 7),
            **forest("class", lambda: range(3), rng.normal),
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("targets", [3, 2])
def test_trees_that_vote_for_one_target_each(mode, targets):
    """In turns: of four trees as many for each of two targets, not of three. Infinity stays in its leaf."""
    trees = forest("target", lambda: [0], rng.normal)
    trees |= {"target_ids": tuple(t % targets for t in trees["target_treeids"])}
    trees |= {"nodes_modes": tuple(m if m == "LEAF" else mode for m in trees["nodes_modes"])}
    x = np.concatenate([features(np.float32), np.full((1, 3), np.inf, np.float32), np.full((1, 3), -np.inf, "f4")])
    agree("TreeEnsembleRegressor", x, [FLOAT], n_targets=3, traced=targets == 2, **trees)


def test_trees_over_many_features():
    """More than a word of 32 bits has room for: the splits lie beside the words."""
    wide, n = 2**28, np.arange(3)
    links = {"modes": np.array([0, LEAF, LEAF]), "true": np.array([1, 1, 2]), "false": np.array([2, 1, 2])}
    stump = Forest(features=np.array([0, wide, 0]), splits=np.float32([0.5, 0, 0]), missing=n * 0, roots=n[:1], **links)
    layout, at, _ = _layout(stump)
    assert not layout.splits_in_words and layout.n_features == wide + 1
    for x, leaf in ((0, 1), (1, 2)):
        with jax.enable_x64(True):
            for given in (np.float32([[x]]), jnp.float32([[x]])):  # no branch asks for the last feature
                assert at[leaves(given, layout._replace(n_features=1))] == leaf


STUMP = {
    "nodes_treeids": (0, 0, 0),
    "nodes_nodeids": (0, 1, 2),
    "nodes_featureids": (0, 0, 0),
    "nodes_modes": ("BRANCH_NEQ", "LEAF", "LEAF"),
    "nodes_values": (0.0, 0.0, 0.0),
    "nodes_truenodeids": (1, 0, 0),
    "nodes_falsenodeids": (2, 0, 0),
}
ONE = np.ones((1, 1), np.float32)


def test_trees_match_the_specification():
    """Where onnxruntime gives labels that are none, loses the base value, or takes NaN for unequal."""
    votes = {"class_treeids": (0, 0), "class_nodeids": (1, 1), "class_ids": (0, 1), "class_weights": (0.6, 0.4)}
    classify = partial(ml, "TreeEnsembleClassifier", opset=3, n_outputs=2, classlabels_int64s=(3, 7), **STUMP)
    assert classify(ONE, **votes)[0].tolist() == [3]
    scores = classify(ONE, base_values=(0.0, 0.5), **votes)[1]
    np.testing.assert_allclose(scores, [[0.6, 0.9]], rtol=1e-6)
    regress = partial(ml, "TreeEnsembleRegressor", opset=3, n_targets=2, **STUMP)
    votes = {"target_treeids": (0, 0), "target_nodeids": (1, 2), "target_ids": (0, 0), "target_weights": (1.0, 2.0)}
    assert regress(ONE, base_values=(5.0, 7.0), aggregate_function="MIN", **votes).tolist() == [[6, 7]]
    assert regress(ONE * np.nan, **votes).tolist() == [[2, 0]]
    assert regress(ONE * np.nan, nodes_missing_value_tracks_true=(1, 0, 0), **votes).tolist() == [[1, 0]]


def test_trees_of_doubles():
    """A split that single precision would round."""
    votes = {"target_treeids": (0, 0), "target_nodeids": (1, 2), "target_ids": (0, 0)}
    doubles = {
        "nodes_values_as_tensor": np.array([1 + 1e-12, 0, 0]),
        "target_weights_as_tensor": np.array([1.0, 2.0]),
    }
    stump = {k: v for k, v in STUMP.items() if k != "nodes_values"} | {"nodes_modes": ("BRANCH_LT", "LEAF", "LEAF")}
    regress = partial(ml, "TreeEnsembleRegressor", opset=3, n_targets=1, **stump, **votes, **doubles)
    for jit in (False, True):
        assert regress(np.array([[1.0], [1 + 2e-12]]), jit=jit).tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes_truenodeids": (0, 0, 0), "nodes_falsenodeids": (0, 0, 0)}, "roots"),
        ({"nodes_falsenodeids": (9, 0, 0)}, "node id 9"),
        ({"target_treeids": (1,), "target_nodeids": (-1,)}, "no node has tree id 1 and node id -1"),
        ({"target_treeids": (-1,), "target_nodeids": (4,)}, "no node has tree id -1 and node id 4"),
        ({"nodes_featureids": (4, 0, 0)}, "feature 4"),
        ({"nodes_featureids": (-1, 0, 0)}, "feature -1"),
        ({"nodes_modes": ("BRANCH", "LEAF", "LEAF")}, "nodes_modes"),
        ({"nodes_values": (0.0,)}, "same length"),
        ({"target_ids": (5,)}, "target ids"),
        ({"base_values": (1.0, 2.0)}, "base_values"),
    ],
)
def test_malformed_trees(change, message):
    votes = {"target_treeids": (0,), "target_nodeids": (1,), "target_ids": (0,), "target_weights": (1.0,)}
    with pytest.raises(ValueError, match=message):
        ml("TreeEnsembleRegressor", ONE, opset=3, n_targets=1, **(STUMP | votes | change))


def test_ambiguous_base_values():
    votes = {"class_treeids": (0,), "class_nodeids": (1,), "class_ids": (0,), "class_weights": (0.6,)}
    with pytest.raises(ValueError, match="ambiguous"):
        ml("TreeEnsembleClassifier", ONE, opset=3, n_outputs=2, classlabels_int64s=(0, 1), base_values=(1.0, 2.0),
           **STUMP, **votes)  # fmt: skip


def ensemble(dtype, **changes):
    """x0 in {1, 3}: leaf 0 (target 1); else x1 <= 0.5: leaf 1 (target 0), else leaf 2 (target 0)."""
    return {
        "tree_roots": (0, 1),
        "n_targets": 2,
        "nodes_featureids": (0, 1),
        "nodes_splits": np.array([0, 0.5], dtype),
        "nodes_modes": np.array([6, 0], np.uint8),
        "membership_values": np.array([1, 3, np.nan], dtype),
        "nodes_truenodeids": (0, 1),
        "nodes_trueleafs": (1, 1),
        "nodes_falsenodeids": (1, 2),
        "nodes_falseleafs": (0, 1),
        "leaf_targetids": (1, 0, 0),
        "leaf_weights": np.array([10, 20, 30], dtype),
    } | changes


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    ("aggregate", "want"),
    [(1, [[20, 10], [20, 10], [60, 0]]), (0, [[10, 5], [10, 5], [30, 0]]), (2, [[20, 10], [20, 10], [30, 0]])],
)
def test_tree_ensemble(dtype, aggregate, want):
    x = np.array([[1, 0], [3, 0.5], [2, 0.75]], dtype)
    for jit in (False, True):
        got = ml("TreeEnsemble", x, aggregate_function=aggregate, jit=jit, **ensemble(dtype))
        assert got.tolist() == want and got.dtype == dtype


def test_tree_ensemble_agrees():
    x = np.array([[1, 0], [3, 0.5], [2, 0.75], [np.nan, 0.1]], np.float32)
    tensors = {
        k: onnx.numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in ensemble(np.float32).items()
    }
    for tracks in ((0, 0), (1, 1)):
        more = {"nodes_missing_value_tracks_true": tracks}
        (want,) = onnxruntime_says("TreeEnsemble", x, [FLOAT], 5, tensors | more)
        assert ml("TreeEnsemble", x, **ensemble(np.float32), **more).tolist() == want.tolist()


def test_tree_ensemble_rejects_invalid_operands():
    for change, message in (
        ({"membership_values": None}, "membership_values"),
        ({"nodes_modes": np.array([6, 6], np.uint8)}, "1 sets for 2"),
        ({"post_transform": 9}, "post_transform"),
        ({"aggregate_function": -1}, "aggregate_function"),
        ({"n_targets": None}, "n_targets"),
        ({"nodes_falsenodeids": (0, 2)}, "do not form trees"),
        ({"nodes_falsenodeids": (-1, 2)}, "nodes_falsenodeids has -1, of 2 nodes and 3 leaves"),
        ({"nodes_truenodeids": (0, 3)}, "nodes_truenodeids has 3"),
        ({"nodes_falsenodeids": (2, 2)}, "nodes_falsenodeids has 2"),
        ({"nodes_trueleafs": (-1, 1)}, r"nodes_trueleafs \[-1, 1\] must be 0 or 1"),
        ({"nodes_modes": np.array([6, 7], np.uint8)}, "nodes_modes has 7"),
        ({"tree_roots": (0, -1)}, "tree_roots"),
        ({"tree_roots": (0, 2)}, "tree_roots"),
        ({"nodes_featureids": (0,)}, "nodes_featureids must have 2 entries"),
        ({"leaf_targetids": (1, 0)}, "leaf_targetids must have 3 entries"),
    ):
        attributes = {k: v for k, v in ensemble(np.float32, **change).items() if v is not None}
        with pytest.raises(ValueError, match=message):
            ml("TreeEnsemble", np.zeros((1, 2), np.float32), **attributes)
    with pytest.raises(ValueError, match="deprecated"):
        ml("TreeEnsembleRegressor", ONE, n_targets=1)
