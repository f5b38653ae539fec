"""ai.onnx.ml: scaling, encoding, linear models and support vector machines. Trees have their own file.

What yields or reads text runs on the host; what is numeric runs traced as well. Where the specification leaves
the scores of binary classifiers open, they are what onnxruntime gives.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import is_string, xp
from .control import needs_known
from .registry import Static, op

DOMAIN = "ai.onnx.ml"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def one_of(value, choices, what):
    """Checks an attribute that names one of a few choices."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)} (got {value!r})")
    return value


def only(**choices):
    """The one attribute of several that is given: its name and its value."""
    given = [(k, v) for k, v in choices.items() if v is not None and len(v)]
    if len(given) != 1:
        raise ValueError(f"exactly one of the attributes {', '.join(choices)} must be given (got {len(given)})")
    return given[0]


def batch(X):
    """A batch of feature vectors; a single vector is a batch of one."""
    if X.ndim not in (1, 2):
        raise ValueError(f"the input must have shape [N, F] or [F] (it has {X.shape})")
    return X.reshape(-1, X.shape[-1]) if X.ndim == 1 else X


def _per_feature(values, X, what):
    """An attribute with one entry, or one for each feature."""
    if len(values) not in (1, X.shape[-1]):
        raise ValueError(f"{what} must have 1 entry or one for each of {X.shape[-1]} features (it has {len(values)})")
    return np.array(values)


# ---------------------------------------------------------------------------------------- post transforms


def _logistic(x):
    if not isinstance(x, np.ndarray):
        return lax.logistic(x)
    v = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x < 0, 1 - v, v)


def _softmax(x):
    e = xp(x).exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _softmax_zero(x):
    """Softmax of the scores that are not zero."""
    peak = x.max(-1, keepdims=True)
    zero = xp(x).abs(x) <= 1e-7
    e = xp(x).exp(x - peak)
    return xp(x).where(zero, x * xp(x).exp(-peak), e) / xp(x).where(zero, 0, e).sum(-1, keepdims=True)


def _probit(x):
    """The normal quantile, by the closed approximation that ONNX's reference and onnxruntime share."""
    y = 2 * x - 1
    log = xp(x).log((1 - y) * (1 + y))
    v = 2 / (3.14159 * 0.147) + 0.5 * log
    return math.sqrt(2) * xp(x).sign(y) * xp(x).sqrt(xp(x).sqrt(v * v - log / 0.147) - v)


_TRANSFORM = dict(zip(TRANSFORMS, (lambda x: x, _softmax, _logistic, _softmax_zero, _probit), strict=True))


def transform(scores, post_transform):
    """The scores of all classes or targets, transformed row by row."""
    return _TRANSFORM[one_of(post_transform, TRANSFORMS, "post_transform")](scores)


def two_scores(score, post_transform, mixed):
    """The scores of both classes from the single score of the second; `mixed`: it is a margin, no probability."""
    one_of(post_transform, TRANSFORMS, "post_transform")
    if post_transform == "PROBIT":
        raise NotImplementedError("PROBIT of a single score is undefined for a classifier of two classes")
    if post_transform == "LOGISTIC":
        pair = _logistic(-score), _logistic(score)
    else:
        pair = (-score if mixed else 1 - score), score
    return xp(score).concatenate(pair, axis=-1)


def labels_of(labels, index):
    """The class labels at the indices; text is picked on the host."""
    labels = np.array(labels, object if isinstance(labels[0], str) else np.int64)
    if labels.dtype == object:
        return labels[needs_known(index, "the class labels are strings")]
    return xp(index).asarray(labels)[index]


# ------------------------------------------------------------------------------------ features and scaling


@op("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(X, Y):
    """ArrayFeatureExtractor: columns of the last axis; of a vector they come as one row."""
    if is_string(X):
        Y = needs_known(Y, "the data are strings")
    if isinstance(Y, np.ndarray) and ((Y < 0) | (X.shape[-1] <= Y)).any():
        raise ValueError(f"indices {Y.ravel().tolist()} leave the {X.shape[-1]} features")
    return xp(X, Y).take(X.reshape(-1, X.shape[-1]) if X.ndim == 1 else X, Y.reshape(-1), axis=-1)


@op("Binarizer", domain=DOMAIN)
def binarizer(X, *, threshold=0.0):
    floating = np.issubdtype(X.dtype, np.floating)
    return (X.dtype.type(threshold if floating else math.floor(threshold)) < X).astype(X.dtype)


@op("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(*X, inputdimensions=None):
    """FeatureVectorizer: rows side by side; inputdimensions cuts each input, or fills it up with zeros."""
    sizes = (None,) * len(X) if inputdimensions is None else inputdimensions
    if len(sizes) != len(X):
        raise ValueError(f"inputdimensions must have one entry for each of {len(X)} inputs (it has {len(sizes)})")

    def fit(x, size):
        x = (x.reshape(1, -1) if x.ndim == 1 else x.reshape(x.shape[0], -1)).astype(np.float32)
        return x if size is None else xp(x).pad(x[:, :size], ((0, 0), (0, max(0, size - x.shape[1]))))

    return xp(*X).concatenate([fit(x, size) for x, size in zip(X, sizes, strict=True)], axis=1)


@op("Imputer", domain=DOMAIN)
def imputer(
    X, *, imputed_value_floats=None, imputed_value_int64s=None, replaced_value_float=0.0, replaced_value_int64=0
):
    floating = np.issubdtype(X.dtype, np.floating)
    kind, values = ("floats", imputed_value_floats) if floating else ("int64s", imputed_value_int64s)
    if not values:
        raise ValueError(f"Imputer of {X.dtype} needs the attribute 'imputed_value_{kind}'")
    old = X.dtype.type(replaced_value_float if floating else replaced_value_int64)
    new = _per_feature(values, X, f"imputed_value_{kind}").astype(X.dtype)
    return xp(X).where((X != X) if old != old else (old == X), new, X)


@op("Scaler", domain=DOMAIN)
def scaler(X, *, offset=(0.0,), scale=(1.0,)):
    """Scaler: (X - offset) * scale."""
    dtype = np.float64 if X.dtype == np.float64 else np.float32
    offset, scale = (_per_feature(v, X, k).astype(dtype) for k, v in {"offset": offset, "scale": scale}.items())
    return ((X.astype(dtype) - offset) * scale).astype(np.float32)


@op("Normalizer", domain=DOMAIN)
def normalizer(X, *, norm="MAX"):
    """Normalizer: rows divided by their norm, unless that is zero."""
    one_of(norm, ("MAX", "L1", "L2"), "norm")
    if X.ndim not in (1, 2):
        raise ValueError(f"the input must have shape [N, C] or [C] (it has {X.shape})")
    X = X.astype(np.float32)
    if norm == "MAX":
        total = X.max(-1, keepdims=True)
    else:
        total = (xp(X).abs(X) if norm == "L1" else X * X).sum(-1, keepdims=True)
    total = xp(X).where(total == 0, 1, total).astype(np.float32)
    return X / (xp(X).sqrt(total) if norm == "L2" else total)


# ------------------------------------------------------------------------------------------------ encoding


@op("OneHotEncoder", domain=DOMAIN)
def one_hot_encoder(X, *, cats_int64s=None, cats_strings=None, zeros=1):
    """OneHotEncoder: an axis more, one entry for each category."""
    name, cats = only(cats_int64s=cats_int64s, cats_strings=cats_strings)
    if (name == "cats_strings") != is_string(X):
        raise ValueError(f"the categories are {name[5:]}, the input is {X.dtype}")
    if not zeros:
        X = needs_known(X, "zeros=0 asks for an error when a category is unknown")
    cats = np.array(cats, object if is_string(X) else np.int64)
    hot = (X if is_string(X) else X.astype(np.int64))[..., None] == cats
    if not zeros and not hot.any(-1).all():
        raise ValueError(f"an input is none of the categories {cats.tolist()}, and zeros=0")
    return hot.astype(np.float32)


def _lookup(X, keys, values, default):
    """Every element's value in a table; the last of equal keys counts, and NaN equals NaN."""
    if X.dtype == object or values.dtype == object:
        X = needs_known(X, "a label encoder with strings")

        def key(v):
            return "NaN" if v != v else v

        table = {key(k): v for k, v in zip(keys.tolist(), values.tolist(), strict=True)}
        return np.array([table.get(key(x), default) for x in X.ravel().tolist()], values.dtype).reshape(X.shape)
    np_, nan = xp(X), keys != keys
    default = values[nan][-1] if nan.any() else default
    # Reversed, so that np.unique keeps the last of equal keys.
    table, at = np.unique(keys[~nan][::-1], return_index=True)
    if not len(table):
        return np_.where(X != X, default, default)
    place = np_.minimum(np_.searchsorted(table, X), len(table) - 1)
    result = np_.asarray(values[~nan][::-1][at])[place]
    return np_.where(np_.asarray(table)[place] == X, result, default)


@op("LabelEncoder", domain=DOMAIN)
def label_encoder_classes(X, *, classes_strings, default_int64=-1, default_string="_Unused"):
    """LabelEncoder-1: strings become their position in the list, integers the string at that position."""
    strings, places = np.array(classes_strings, object), np.arange(len(classes_strings))
    if is_string(X):
        return _lookup(X, strings[::-1], places[::-1], default_int64)
    return _lookup(X, places, strings, default_string)


@op("LabelEncoder", domain=DOMAIN, since=2)
def label_encoder(
    X,
    *,
    default_float=-0.0,
    default_int64=-1,
    default_string="_Unused",
    default_tensor=None,
    keys_floats=None,
    keys_int64s=None,
    keys_strings=None,
    keys_tensor=None,
    values_floats=None,
    values_int64s=None,
    values_strings=None,
    values_tensor=None,
):
    """LabelEncoder: a table look-up with parallel lists of keys and values."""
    dtypes = {"floats": np.float32, "int64s": np.int64, "strings": object}
    name, keys = only(
        keys_floats=keys_floats, keys_int64s=keys_int64s, keys_strings=keys_strings, keys_tensor=keys_tensor
    )
    keys = np.asarray(keys, dtypes.get(name[5:]))
    name, values = only(
        values_floats=values_floats,
        values_int64s=values_int64s,
        values_strings=values_strings,
        values_tensor=values_tensor,
    )
    values = np.asarray(values, dtypes.get(name[7:]))
    if keys.shape != values.shape or keys.dtype != X.dtype:
        raise ValueError(
            f"keys and values must be as many, and keys of the input's type (keys {keys.dtype}{keys.shape}, values "
            f"{values.dtype}{values.shape}, input {X.dtype})"
        )
    if default_tensor is not None:
        return _lookup(X, keys, values, default_tensor.reshape(()).astype(values.dtype)[()])
    kinds = {"O": default_string, "i": default_int64, "f": default_float}
    default = kinds[values.dtype.kind]
    return _lookup(X, keys, values, default if values.dtype == object else values.dtype.type(default))


@op("CategoryMapper", domain=DOMAIN)
def category_mapper(X: Static, *, cats_int64s, cats_strings, default_int64=-1, default_string="_Unused"):
    ints, strings = np.array(cats_int64s, np.int64), np.array(cats_strings, object)
    if ints.shape != strings.shape:
        raise ValueError(f"cats_int64s and cats_strings must be as many ({len(ints)} and {len(strings)})")
    return _lookup(X, strings, ints, default_int64) if is_string(X) else _lookup(X, ints, strings, default_string)


# ---------------------------------------------------------------------------------------------------- maps


@op("ZipMap", domain=DOMAIN)
def zip_map(X: Static, *, classlabels_int64s=None, classlabels_strings=None):
    """ZipMap: a dict from label to value for each row."""
    _, labels = only(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    X = batch(X)
    if X.shape[1] != len(labels):
        raise ValueError(f"{X.shape[1]} columns cannot be zipped with {len(labels)} labels")
    return [dict(zip(labels, row, strict=True)) for row in X.tolist()]


@op("CastMap", domain=DOMAIN)
def cast_map(X: Static, *, cast_to="TO_FLOAT", map_form="DENSE", max_map=1):
    """CastMap: the values of a map in the order of its keys, or each at its key."""
    one_of(cast_to, ("TO_FLOAT", "TO_STRING", "TO_INT64"), "cast_to")
    one_of(map_form, ("DENSE", "SPARSE"), "map_form")
    dtype, cast, filler = {
        "TO_FLOAT": (np.float32, float, 0.0),
        "TO_INT64": (np.int64, int, 0),
        "TO_STRING": (object, lambda v: v if isinstance(v, str) else f"{v:f}", "0.f"),
    }[cast_to]
    if map_form == "DENSE":
        return np.array([[cast(X[k]) for k in sorted(X)]], dtype).reshape(1, len(X))
    if any(not 0 <= k < max_map for k in X):
        raise ValueError(f"the keys {sorted(X)} do not all lie in [0, {max_map - 1}], the range max_map gives")
    return np.array([[cast(X[k]) if k in X else filler for k in range(max_map)]], dtype)


@op("DictVectorizer", domain=DOMAIN)
def dict_vectorizer(X: Static, *, int64_vocabulary=None, string_vocabulary=None):
    """DictVectorizer: one row, with the value of each word of the vocabulary, or zero."""
    _, vocabulary = only(int64_vocabulary=int64_vocabulary, string_vocabulary=string_vocabulary)
    if set(X) - set(vocabulary):
        raise ValueError(f"the keys {sorted(set(X) - set(vocabulary))} are not in the vocabulary {vocabulary}")
    values = list(X.values()) or [0.0]
    # Python's numbers carry no width: a float is taken for ONNX's float.
    dtype = {float: np.float32, str: object}.get(type(values[0]), np.asarray(values).dtype)
    return np.array([[X.get(k, "" if dtype is object else 0) for k in vocabulary]], dtype)


# ------------------------------------------------------------------------------------------- linear models


def _linear(X, coefficients, intercepts):
    """Scores of a linear model; the coefficients of one class or target are contiguous."""
    X = batch(X).astype(np.float32)
    weights = np.array(coefficients, np.float32).reshape(-1, X.shape[1])
    scores = X @ weights.T
    return scores if not intercepts else scores + np.array(intercepts, np.float32)


@op("LinearClassifier", domain=DOMAIN)
def linear_classifier(
    X,
    *,
    coefficients,
    intercepts=None,
    classlabels_ints=None,
    classlabels_strings=None,
    multi_class=0,
    post_transform="NONE",
):
    """LinearClassifier: the best class and the scores. What multi_class tells is in post_transform already."""
    if multi_class not in (0, 1):
        raise ValueError(f"multi_class must be 0 or 1 (got {multi_class})")
    _, labels = only(classlabels_ints=classlabels_ints, classlabels_strings=classlabels_strings)
    scores = _linear(X, coefficients, intercepts)
    if scores.shape[1] == len(labels):
        return labels_of(labels, scores.argmax(1)), transform(scores, post_transform)
    if scores.shape[1] != 1 or len(labels) != 2:
        raise ValueError(f"{len(labels)} class labels do not match {scores.shape[1]} rows of coefficients")
    return labels_of(labels, (scores[:, 0] > 0).astype(np.int64)), two_scores(scores, post_transform, mixed=False)


@op("LinearRegressor", domain=DOMAIN)
def linear_regressor(X, *, coefficients, intercepts=None, targets=1, post_transform="NONE"):
    scores = _linear(X, coefficients, intercepts)
    if scores.shape[1] != targets:
        raise ValueError(f"{len(coefficients)} coefficients make {scores.shape[1]} targets, not {targets}")
    return transform(scores, post_transform)


# -------------------------------------------------------------------------------- support vector machines


def _kernel(X, vectors, kernel_type, kernel_params):
    """The kernel of every row with every support vector: [N, S]."""
    gamma, coef0, degree = (float(p) for p in (kernel_params or (0.0, 0.0, 0.0)))
    if one_of(kernel_type, ("LINEAR", "POLY", "RBF", "SIGMOID"), "kernel_type") == "RBF":
        return xp(X).exp(-gamma * ((X[:, None] - vectors) ** 2).sum(-1))
    dot = X @ vectors.T
    if kernel_type == "LINEAR":
        return dot
    dot = gamma * dot + coef0
    if kernel_type == "SIGMOID":
        return xp(X).tanh(dot)
    return dot ** (int(degree) if degree == int(degree) else degree)


@op("SVMRegressor", domain=DOMAIN)
def svm_regressor(
    X,
    *,
    coefficients,
    kernel_params=None,
    kernel_type="LINEAR",
    n_supports=0,
    one_class=0,
    post_transform="NONE",
    rho=(0.0,),
    support_vectors=(),
):
    """SVMRegressor: without support vectors the coefficients are those of a linear model."""
    X = batch(X).astype(np.float32)
    vectors = np.array(support_vectors if n_supports else coefficients, np.float32).reshape(n_supports or 1, -1)
    score = _kernel(X, vectors, kernel_type if n_supports else "LINEAR", kernel_params)
    if n_supports:
        score = score @ np.array(coefficients, np.float32)[:, None]
    score = score + np.float32(rho[0])
    if one_class:
        score = xp(X).where(score > 0, 1, -1).astype(np.float32)
    return transform(score, post_transform)


def _pair_scores(kernel, coefficients, counts, rho):
    """The decision of every pair of classes i < j, from the coefficients of one against the other: [N, pairs]."""
    ends = np.cumsum(counts)
    spans = [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
    weights = np.zeros((kernel.shape[1], len(rho)), np.float32)
    pairs = [(i, j) for i in range(len(counts)) for j in range(i + 1, len(counts))]
    for p, (i, j) in enumerate(pairs):
        weights[spans[i], p] = coefficients[j - 1, spans[i]]
        weights[spans[j], p] = coefficients[i, spans[j]]
    return pairs, kernel @ weights + np.array(rho, np.float32)


def _coupled(pairwise, n):
    """Class probabilities from pairwise ones [N, n, n], by the iteration of Wu, Lin and Weng (second method)."""
    np_ = xp(pairwise)
    r = pairwise
    diagonal = (r * r).sum(1) - np_.einsum("bii->bi", r * r)
    q = np_.where(np.eye(n, dtype=bool), diagonal[:, None, :], -r * np_.swapaxes(r, 1, 2))

    def sweep(_, state):
        p, done = state
        qp = (q * p[:, None, :]).sum(-1)
        pqp = (p * qp).sum(-1)
        done = done | (np_.abs(qp - pqp[:, None]).max(-1) < 0.005 / n)
        new = p
        for t in range(n):
            step = (pqp - qp[:, t]) / q[:, t, t]
            pqp = (pqp + step * (step * q[:, t, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, t]) / (1 + step[:, None])
            new = (new + step[:, None] * np.eye(n, dtype=np.float32)[t]) / (1 + step[:, None])
        return np_.where(done[:, None], p, new), done

    state = np_.full(r.shape[:2], 1 / n, np.float32), np_.zeros(r.shape[0], bool)
    if np_ is jnp:
        return lax.fori_loop(0, 100, sweep, state)[0]
    for _ in range(100):
        state = sweep(_, state)
    return state[0]


@op("SVMClassifier", domain=DOMAIN)
def svm_classifier(
    X,
    *,
    coefficients,
    classlabels_ints=None,
    classlabels_strings=None,
    kernel_params=None,
    kernel_type="LINEAR",
    post_transform="NONE",
    prob_a=(),
    prob_b=(),
    rho=(0.0,),
    support_vectors=(),
    vectors_per_class=(),
):
    """SVMClassifier: one-against-one votes with support vectors, or one linear score for each class without."""
    _, labels = only(classlabels_ints=classlabels_ints, classlabels_strings=classlabels_strings)
    X, n, total = batch(X).astype(np.float32), len(labels), sum(vectors_per_class)
    coefficients = np.array(coefficients, np.float32)
    if not total:
        scores = X @ coefficients.reshape(n, -1).T + np.float32(rho[0])
        index = scores.argmax(1)
        if n == 2 and not prob_a:
            best = scores.max(1)
            positive = best >= 0.5 if (coefficients >= 0).all() else best > 0
            index = xp(X).where(positive, 1, index)
        return labels_of(labels, index), transform(scores, post_transform)
    kernel = _kernel(X, np.array(support_vectors, np.float32).reshape(total, -1), kernel_type, kernel_params)
    pairs, scores = _pair_scores(kernel, coefficients.reshape(n - 1, total), vectors_per_class, rho)
    one_hot = np.eye(n, dtype=np.int64)
    votes = sum(xp(X).where(scores[:, p, None] > 0, one_hot[i], one_hot[j]) for p, (i, j) in enumerate(pairs))
    index = votes.argmax(1)
    if prob_a:
        p = 1 - _logistic(scores * np.array(prob_a, np.float32) + np.array(prob_b, np.float32))
        p = xp(X).clip(p, np.float32(1e-7), np.float32(1 - 1e-7))
        # entry [a, b] of the matrix is the probability that its pair prefers a
        ij = np.zeros((len(pairs), n, n), np.float32)
        for k, pair in enumerate(pairs):
            ij[(k, *pair)] = 1
        pairwise = xp(X).einsum("bk,kij->bij", p, ij) + xp(X).einsum("bk,kij->bji", 1 - p, ij)
        scores = transform(_coupled(xp(X).swapaxes(pairwise, 1, 2), n), post_transform)
    elif n > 2:
        scores = transform(scores, post_transform)
    else:
        scores = two_scores(scores, post_transform, mixed=post_transform == "NONE")
    return labels_of(labels, index), scores
