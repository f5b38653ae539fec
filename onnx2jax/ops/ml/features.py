"""ai.onnx.ml: scaling, encoding, maps and linear models.

What yields or reads text runs on the host; what is numeric runs traced as well.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from ..arrays import argmax, is_string, needs_known, xp
from ..registry import Static, op, taking
from ..text import find
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, only, transform, two_scores


def _arrays(*attributes, dtype):
    return [np.array(values, dtype) for values in attributes]


def _check_per_feature(values, X, what):
    """An attribute has one entry, or one for each feature."""
    if len(values) not in (1, X.shape[-1]):
        raise ValueError(f"{what} must have 1 entry or one for each of {X.shape[-1]} features (it has {len(values)})")


# ------------------------------------------------------------------------------------ features and scaling


@op("ArrayFeatureExtractor", domain=DOMAIN, limits="strings on the host; traced indices out of range read as in Gather")
def array_feature_extractor(X, Y):
    """ArrayFeatureExtractor: columns of the last axis; of a vector they come as one row."""
    if is_string(X):
        Y = needs_known(Y, "the data are strings")
    X = X[None] if X.ndim == 1 else X
    if not isinstance(Y, np.ndarray):
        return xp.take(X, xp.where(Y < 0, X.shape[-1], Y).reshape(-1), axis=-1)
    columns = Y.ravel().tolist()
    if columns and not (min(columns) >= 0 and max(columns) < X.shape[-1]):
        raise ValueError(f"indices {columns} leave the {X.shape[-1]} features")
    return X.take(Y.reshape(-1), axis=-1)


@op("Binarizer", domain=DOMAIN)
def binarizer(X, *, threshold=0.0):
    return (X.dtype.type(threshold if X.dtype.kind == "f" else math.floor(threshold)) < X).astype(X.dtype)


@op("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(*X, inputdimensions=None):
    """FeatureVectorizer: rows side by side; inputdimensions cuts each input, or fills it up with zeros."""
    sizes = (None,) * len(X) if inputdimensions is None else inputdimensions
    if len(sizes) != len(X):
        raise ValueError(f"inputdimensions must have one entry for each of {len(X)} inputs (it has {len(sizes)})")
    for i, x in enumerate(X):
        if x.ndim == 0:
            raise ValueError(f"input {i} is a number without axes: reshape it to [1, 1]")

    def fit(x, size):
        x = (x.reshape(1, -1) if x.ndim == 1 else x.reshape(x.shape[0], -1)).astype(np.float32)
        return x if size is None else xp.pad(x[:, :size], ((0, 0), (0, max(0, size - x.shape[1]))))

    return xp.concatenate([fit(x, size) for x, size in zip(X, sizes, strict=True)], axis=1)


@op("Imputer", domain=DOMAIN)
def imputer(
    X, *, imputed_value_floats=(), imputed_value_int64s=(), once, replaced_value_float=0.0, replaced_value_int64=0
):
    floating = X.dtype.kind == "f"
    values = imputed_value_floats if floating else imputed_value_int64s
    _check_per_feature(values, X, f"imputed_value_{'floats' if floating else 'int64s'}")
    (new,) = once(_arrays, values, dtype=X.dtype)
    old = X.dtype.type(replaced_value_float if floating else replaced_value_int64)
    return xp.where((X != X) if old != old else (old == X), new, X)


@op("Scaler", domain=DOMAIN)
def scaler(X, *, offset=(0.0,), once, scale=(1.0,)):
    """Scaler: (X - offset) * scale."""
    _check_per_feature(offset, X, "offset")
    _check_per_feature(scale, X, "scale")
    dtype = X.dtype if X.dtype == np.float64 else np.dtype(np.float32)
    offset, scale = once(_arrays, offset, scale, dtype=dtype)
    return ((X.astype(dtype) - offset) * scale).astype(np.float32)


@op("Normalizer", domain=DOMAIN)
def normalizer(X, *, norm: Literal["MAX", "L1", "L2"] = "MAX"):
    """Normalizer: rows divided by their norm, unless that is zero."""
    X, shape = batch(X).astype(np.float32), X.shape
    total = X.max(-1) if norm == "MAX" else (abs(X) if norm == "L1" else X * X).sum(-1)
    total = (total + (total == 0).astype(np.float32))[:, None]
    return (X / (xp.sqrt(total) if norm == "L2" else total)).reshape(shape)


# ------------------------------------------------------------------------------------------------ encoding


_CATEGORIES = "strings on the host; with zeros=0 the input must be known, since an unknown category raises"


@op("OneHotEncoder", domain=DOMAIN, limits=_CATEGORIES)
def one_hot_encoder(X, *, cats_int64s=None, cats_strings=None, once, zeros=1):
    """OneHotEncoder: an axis more, one entry for each category."""
    name, cats = only(cats_int64s=cats_int64s, cats_strings=cats_strings)
    if (name == "cats_strings") != is_string(X):
        raise ValueError(f"the categories are {name[5:]}, the input is {X.dtype}")
    if not zeros:
        X = needs_known(X, "zeros=0 asks for an error when a category is unknown")
    places, numbers = once(_in_numbers, cats)
    if places is not None:
        X = np.array([places.get(word, -1) for word in X.ravel().tolist()], np.int64).reshape(X.shape)
    hot = X.astype(np.int64)[..., None] == numbers
    if not zeros and not hot.any(-1).all():
        raise ValueError(f"an input is none of the categories {cats}, and zeros=0")
    return hot.astype(np.float32)


def _in_numbers(categories):
    """Of words where each stands first, as a table and for every one; of integers the integers alone."""
    if not isinstance(categories[0], str):
        return None, np.array(categories, np.int64)
    places = dict(zip(categories[::-1], range(len(categories))[::-1], strict=True))
    return places, np.array([places[word] for word in categories])


class _Table(NamedTuple):
    """What a look-up goes by; of equal keys the last counts, and NaN equals NaN."""

    dtypes: tuple[np.dtype, np.dtype]
    """Of the keys and of the values."""
    default: Any
    words: Mapping[Any, Any] | None
    """Where text is looked up, or for."""
    keys: Any = None
    """Sorted, without NaN."""
    values: Any = None
    nan: Any = None
    """The value of NaN; None where that is the default's."""
    every: Any = None
    """The value of each integer from the least key to the greatest, and the default; None where they are many."""


def _table(keys, values, default):
    if keys.shape != values.shape:
        raise ValueError(f"keys and values must be as many (keys {keys.shape}, values {values.shape})")
    dtypes = keys.dtype, values.dtype
    if object in dtypes:
        pairs = zip(keys.ravel().tolist(), values.ravel().tolist(), strict=True)
        return _Table(dtypes, default, {(k if k == k else None): v for k, v in pairs})
    nan = values[missing][-1] if (missing := keys != keys).any() else None
    # Reversed, so that np.unique keeps the last of equal keys.
    keys, at = np.unique(keys[~missing][::-1], return_index=True)
    values, every = values[~missing][::-1][at], None
    if len(keys) and keys.dtype.kind == "i" and (span := int(keys[-1]) - int(keys[0]) + 1) < 2**16:
        every = np.full(span + 1, default, values.dtype)
        every[keys.astype(np.int64) - keys[0]] = values
    return _Table(dtypes, default, None, keys, values, nan, every)


def _lookup(X, table):
    """Every element's value in a table."""
    dtype, default = table.dtypes[1], table.default
    if table.dtypes[0] != X.dtype:
        raise ValueError(f"keys must be of the input's type (keys {table.dtypes[0]}, input {X.dtype})")
    if table.words is not None:
        X = needs_known(X, "a label encoder with strings")
        found = [table.words.get(x if x == x else None, default) for x in X.ravel().tolist()]
        return np.array(found, dtype).reshape(X.shape)
    if table.nan is not None:
        default = xp.where(X != X, table.nan, default)
    if not len(table.keys):
        return xp(X).broadcast_to(xp(X).asarray(default, dtype), X.shape)
    if table.every is not None:
        # One gather; what lies below the keys lies, without a sign, above them.
        place = (X.astype(np.int64) - table.keys[0].astype(np.int64)).astype(np.uint64)
        return xp.take(table.every, xp.minimum(place, np.uint64(len(table.every) - 1)).astype(np.int64), mode="clip")
    place = find(table.keys, X, "compare_all" if len(table.keys) <= 16 else "scan_unrolled")
    return xp.where(place < 0, default, xp(X).asarray(table.values)[place])


def _of_words(words, numbers, default_int64, default_string, *, dtype):
    """The table from words to numbers, or from numbers to words, by what is looked up."""
    words, numbers = np.array(words, object), np.asarray(numbers, np.int64)
    return _table(words, numbers, default_int64) if dtype == object else _table(numbers, words, default_string)


@op("LabelEncoder", domain=DOMAIN, limits="strings on the host")
def label_encoder_classes(X, *, classes_strings, default_int64=-1, default_string="_Unused", once):
    """LabelEncoder-1: strings become their position in the list, integers the string at that position."""
    # Of equal strings the first counts.
    words, places = classes_strings[::-1], range(len(classes_strings))[::-1]
    return _lookup(X, once(_of_words, words, places, default_int64, default_string, dtype=X.dtype))


_KINDS = ("floats", "int64s", "strings", "tensor")


def _columns(given, default_float, default_int64, default_string, default_tensor):
    """The table of the attributes ``keys_*`` and ``values_*``."""

    def column(side):
        name, values = only(**{f"{side}_{kind}": given[f"{side}_{kind}"] for kind in _KINDS})
        dtypes = {f"{side}_floats": np.float32, f"{side}_int64s": np.int64, f"{side}_strings": object}
        return np.asarray(values, dtypes.get(name))

    keys, values = column("keys"), column("values")
    defaults = {"O": default_string, "i": default_int64, "f": default_float}
    default = defaults[values.dtype.kind] if default_tensor is None else default_tensor.item()
    return _table(keys, values, default if values.dtype == object else values.dtype.type(default))


@op("LabelEncoder", domain=DOMAIN, since=2)
@taking(**{f"{side}_{kind}": None for side in ("keys", "values") for kind in _KINDS})
def label_encoder(
    X, *, default_float=-0.0, default_int64=-1, default_string="_Unused", default_tensor=None, once, **given
):
    """LabelEncoder: a table look-up with parallel lists of keys and values."""
    return _lookup(X, once(_columns, given, default_float, default_int64, default_string, default_tensor))


@op("CategoryMapper", domain=DOMAIN)
def category_mapper(X: Static, *, cats_int64s, cats_strings, default_int64=-1, default_string="_Unused", once):
    return _lookup(X, once(_of_words, cats_strings, cats_int64s, default_int64, default_string, dtype=X.dtype))


# ---------------------------------------------------------------------------------------------------- maps


@op("ZipMap", domain=DOMAIN)
def zip_map(X: Static, *, classlabels_int64s=None, classlabels_strings=None):
    """ZipMap: a dict from label to value for each row."""
    _, labels = only(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    X = batch(X)
    if X.shape[1] != len(labels):
        raise ValueError(f"{X.shape[1]} columns cannot be zipped with {len(labels)} labels")
    return [dict(zip(labels, row)) for row in X.tolist()]  # noqa: B905 - as many; to be asked takes as long again


CastTo = Literal["TO_FLOAT", "TO_STRING", "TO_INT64"]
_CASTS: dict[str, tuple] = {
    "TO_FLOAT": (np.float32, float, 0.0),
    "TO_INT64": (np.int64, int, 0),
    "TO_STRING": (object, lambda v: v if isinstance(v, str) else f"{v:f}", "0.f"),
}


@op("CastMap", domain=DOMAIN)
def cast_map(X: Static, *, cast_to: CastTo = "TO_FLOAT", map_form: Literal["DENSE", "SPARSE"] = "DENSE", max_map=1):
    """CastMap: the values of a map in the order of its keys, or each at its key."""
    dtype, cast, filler = _CASTS[cast_to]
    if map_form == "SPARSE" and not set(X) <= set(range(max_map)):
        raise ValueError(f"the keys {sorted(X)} do not all lie in [0, {max_map - 1}], the range max_map gives")
    keys = sorted(X) if map_form == "DENSE" else range(max_map)
    return np.array([cast(X[k]) if k in X else filler for k in keys], dtype)[None]


@op("DictVectorizer", domain=DOMAIN)
def dict_vectorizer(X: Static, *, int64_vocabulary=None, string_vocabulary=None):
    """DictVectorizer: one row, with the value of each word of the vocabulary, or zero; other keys are left out."""
    _, vocabulary = only(int64_vocabulary=int64_vocabulary, string_vocabulary=string_vocabulary)
    values = list(X.values()) or [0.0]
    # Python's numbers carry no width: a float is taken for ONNX's float.
    dtype = {float: np.float32, str: object}.get(type(values[0]), np.asarray(values).dtype)
    return np.array([[X.get(k, "" if dtype is object else 0) for k in vocabulary]], dtype)


# ------------------------------------------------------------------------------------------- linear models


def _linear(X, n, coefficients, intercepts, once):
    """Scores [N, n] of a linear model; the coefficients of one class or target are contiguous."""
    X = batch(X).astype(np.float32)
    size = n * X.shape[1]
    if len(coefficients) < size:
        raise ValueError(f"{n} rows of {X.shape[1]} coefficients are needed (there are {len(coefficients)} in all)")
    if len(coefficients) > size:
        text = f"of {len(coefficients)} coefficients only {size} are used, for {n} times {X.shape[1]} features"
        warnings.warn(text + "; the input seems to have too few features", stacklevel=2)
    weights, offsets = once(_arrays, coefficients, intercepts or (), dtype=np.dtype(np.float32))
    scores = X @ weights[:size].reshape(n, -1).T
    return scores + offsets if intercepts else scores


@op("LinearClassifier", domain=DOMAIN, limits=LABELS)
def linear_classifier(
    X, *, coefficients, intercepts=None, classlabels_ints=None, classlabels_strings=None,
    multi_class: Literal[0, 1] = 0, once, post_transform: Transform = "NONE",  # noqa: ARG001
):  # fmt: skip
    """LinearClassifier: the best class and the scores. What multi_class tells is in post_transform already."""
    labels = once(class_labels, {"classlabels_ints": classlabels_ints, "classlabels_strings": classlabels_strings})
    n = len(intercepts or coefficients[:: X.shape[-1]])
    if n != len(labels) and (n, len(labels)) != (1, 2):
        raise ValueError(f"{len(labels)} class labels do not match {n} rows of coefficients")
    scores = _linear(X, n, coefficients, intercepts, once)
    if n == len(labels):
        return labels_of(labels, argmax(scores, 1)), transform(scores, post_transform)
    return labels_of(labels, (scores[:, 0] > 0).astype(np.int64)), two_scores(scores, post_transform, mixed=False)


@op("LinearRegressor", domain=DOMAIN)
def linear_regressor(X, *, coefficients, intercepts=None, once, targets=1, post_transform: Transform = "NONE"):
    return transform(_linear(X, targets, coefficients, intercepts, once), post_transform)
