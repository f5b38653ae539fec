"""ai.onnx.ml: scaling, encoding, maps and linear models.

Operators with string inputs or outputs run on the host; numeric ones can be traced.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from ..arrays import argmax, is_string, needs_known, xp
from ..indexing import BOUNDS
from ..registry import Static, op, taking
from ..text import find
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, only, result_dtype, transform, two_scores


def _arrays(*attributes, dtype):
    return [np.array(values, dtype) for values in attributes]


def _check_per_feature(values, X, what):
    """Raise ValueError unless an attribute has one entry, or one per feature."""
    if len(values) not in (1, X.shape[-1]):
        raise ValueError(f"{what} must have 1 entry or one per feature ({X.shape[-1]}), not {len(values)}")


# ------------------------------------------------------------------------------------ features and scaling


@op("ArrayFeatureExtractor", domain=DOMAIN, wide=True, limits=f"strings on the host; {BOUNDS}")
def array_feature_extractor(X, Y):
    """ArrayFeatureExtractor: selected columns of the last axis; a vector is treated as one row."""
    if is_string(X):
        Y = needs_known(Y, "X is a tensor of strings")
    X = X[None] if X.ndim == 1 else X
    if not isinstance(Y, np.ndarray):
        return xp.take(X, xp.where(Y < 0, X.shape[-1], Y).reshape(-1), axis=-1)
    columns = Y.ravel().tolist()
    if columns and not (min(columns) >= 0 and max(columns) < X.shape[-1]):
        raise ValueError(f"indices {columns} are outside [0, {X.shape[-1] - 1}], the features of X")
    return X.take(Y.reshape(-1), axis=-1)


@op("Binarizer", domain=DOMAIN, wide=True, exact=("X",))
def binarizer(X, *, threshold=0.0):
    return (X.dtype.type(threshold if X.dtype.kind == "f" else math.floor(threshold)) < X).astype(X.dtype)


@op("FeatureVectorizer", domain=DOMAIN, wide=True)
def feature_vectorizer(*X, inputdimensions=None, double=False):
    """FeatureVectorizer: concatenates rows; inputdimensions truncates each input or pads it with zeros."""
    sizes = (None,) * len(X) if inputdimensions is None else inputdimensions
    if len(sizes) != len(X):
        raise ValueError(f"inputdimensions must have one entry per input ({len(X)}), not {len(sizes)}")
    if any(size is not None and size < 0 for size in sizes):
        raise ValueError(f"inputdimensions {tuple(sizes)} must not be negative")
    for i, x in enumerate(X):
        if x.ndim == 0:
            raise ValueError(f"input {i} is a scalar: reshape it to [1, 1]")

    def fit(x, size):
        x = (x.reshape(1, -1) if x.ndim == 1 else x.reshape(x.shape[0], -1)).astype(result_dtype(double))
        return x if size is None else xp.pad(x[:, :size], ((0, 0), (0, max(0, size - x.shape[1]))))

    return xp.concatenate([fit(x, size) for x, size in zip(X, sizes, strict=True)], axis=1)


@op("Imputer", domain=DOMAIN, wide=True, exact=("X",))
def imputer(
    X, *, imputed_value_floats=(), imputed_value_int64s=(), once, replaced_value_float=0.0, replaced_value_int64=0
):
    floating = X.dtype.kind == "f"
    values = imputed_value_floats if floating else imputed_value_int64s
    _check_per_feature(values, X, f"imputed_value_{'floats' if floating else 'int64s'}")
    (new,) = once(_arrays, values, dtype=X.dtype)
    old = X.dtype.type(replaced_value_float if floating else replaced_value_int64)
    return xp.where((X != X) if old != old else (old == X), new, X)


@op("Scaler", domain=DOMAIN, wide=True)
def scaler(X, *, offset=(0.0,), once, scale=(1.0,), double=False):
    """Scaler: (X - offset) * scale."""
    _check_per_feature(offset, X, "offset")
    _check_per_feature(scale, X, "scale")
    dtype = X.dtype if X.dtype == np.float64 else np.dtype(np.float32)
    offset, scale = once(_arrays, offset, scale, dtype=dtype)
    return ((X.astype(dtype) - offset) * scale).astype(result_dtype(double))


@op("Normalizer", domain=DOMAIN, wide=True)
def normalizer(X, *, norm: Literal["MAX", "L1", "L2"] = "MAX", double=False):
    """Normalizer: rows divided by their norm if it is not zero."""
    X, shape = batch(X).astype(result_dtype(double)), X.shape
    total = X.max(-1) if norm == "MAX" else (abs(X) if norm == "L1" else X * X).sum(-1)
    total = (total + (total == 0).astype(total.dtype))[:, None]
    return (X / (xp.sqrt(total) if norm == "L2" else total)).reshape(shape)


# ------------------------------------------------------------------------------------------------ encoding


_CATEGORIES = "strings on the host; with zeros=0 the input must be known, since an unknown category raises"


@op("OneHotEncoder", domain=DOMAIN, strings="cats_strings", wide=True, exact=("X",), limits=_CATEGORIES)
def one_hot_encoder(X, *, cats_int64s=None, cats_strings=None, once, zeros=1):
    """OneHotEncoder: appends an axis with one entry per category."""
    name, cats = only(cats_int64s=cats_int64s, cats_strings=cats_strings)
    if (name == "cats_strings") != is_string(X):
        raise ValueError(f"the categories are {name[5:]}, but the input is {X.dtype}")
    if not zeros:
        X = needs_known(X, "zeros=0 requires an error for an unknown category")
    index, codes = once(_category_codes, cats)
    if index is not None:
        X = np.array([index.get(word, -1) for word in X.ravel().tolist()], np.int64).reshape(X.shape)
    hot = X.astype(np.int64)[..., None] == codes
    if not zeros and not hot.any(-1).all():
        raise ValueError(f"an input is none of the categories {cats}, and zeros=0")
    return hot.astype(np.float32)


def _category_codes(categories):
    """(string -> its first index, or None for integers; the integer code of each category)."""
    if not isinstance(categories[0], str):
        return None, np.array(categories, np.int64)
    index = dict(zip(categories[::-1], range(len(categories))[::-1], strict=True))
    return index, np.array([index[word] for word in categories])


class _LabelTable(NamedTuple):
    """A look-up table; of duplicate keys the last wins, and NaN equals NaN."""

    dtypes: tuple[np.dtype, np.dtype]
    """The dtypes of keys and values."""
    default: Any
    mapping: Mapping[Any, Any] | None
    """Key -> value if either is a string."""
    keys: Any = None
    """Sorted, without NaN."""
    values: Any = None
    nan: Any = None
    """The value of the key NaN, or None."""
    dense: Any = None
    """The value of each integer from the smallest to the largest key, then the default; None if the range is large."""


def _table(keys, values, default):
    if keys.shape != values.shape:
        raise ValueError(f"keys and values must have the same shape (keys {keys.shape}, values {values.shape})")
    dtypes = keys.dtype, values.dtype
    if object in dtypes:
        pairs = zip(keys.ravel().tolist(), values.ravel().tolist(), strict=True)
        return _LabelTable(dtypes, default, {(k if k == k else None): v for k, v in pairs})
    nan = values[missing][-1] if (missing := keys != keys).any() else None
    # Reversed, so that np.unique keeps the last duplicate.
    keys, order = np.unique(keys[~missing][::-1], return_index=True)
    values, dense = values[~missing][::-1][order], None
    if len(keys) and keys.dtype.kind == "i" and (span := int(keys[-1]) - int(keys[0]) + 1) < 2**16:
        dense = np.full(span + 1, default, values.dtype)
        dense[keys.astype(np.int64) - keys[0]] = values
    return _LabelTable(dtypes, default, None, keys, values, nan, dense)


def _lookup(X, table):
    """The value in the table of each element of X."""
    dtype, default = table.dtypes[1], table.default
    if table.dtypes[0] != X.dtype:
        raise ValueError(f"keys must have the dtype of the input (keys {table.dtypes[0]}, input {X.dtype})")
    if table.mapping is not None:
        X = needs_known(X, "strings are looked up on the host")
        values = [table.mapping.get(x if x == x else None, default) for x in X.ravel().tolist()]
        return np.array(values, dtype).reshape(X.shape)
    if table.nan is not None:
        default = xp.where(X != X, table.nan, default)
    if not len(table.keys):
        return xp(X).broadcast_to(xp(X).asarray(default, dtype), X.shape)
    if table.dense is not None:
        # One gather; as unsigned integers, values below the keys are also above them.
        index = (X.astype(np.int64) - table.keys[0].astype(np.int64)).astype(np.uint64)
        return xp.take(table.dense, xp.minimum(index, np.uint64(len(table.dense) - 1)).astype(np.int64), mode="clip")
    index = find(table.keys, X, "compare_all" if len(table.keys) <= 16 else "scan_unrolled")
    return xp.where(index < 0, default, xp(X).asarray(table.values)[index])


def _string_table(strings, integers, default_int64, default_string, *, dtype):
    """The table from strings to integers if ``dtype`` (that of the input) is object, else from integers to strings."""
    strings, integers = np.array(strings, object), np.asarray(integers, np.int64)
    return _table(strings, integers, default_int64) if dtype == object else _table(integers, strings, default_string)


@op("LabelEncoder", domain=DOMAIN, wide=True, exact=("X",), limits="strings on the host")
def label_encoder_classes(X, *, classes_strings, default_int64=-1, default_string="_Unused", once):
    """LabelEncoder-1: maps strings to their index in the list, and integers to the string at that index."""
    # Reversed, so that the first duplicate wins.
    strings, indices = classes_strings[::-1], range(len(classes_strings))[::-1]
    return _lookup(X, once(_string_table, strings, indices, default_int64, default_string, dtype=X.dtype))


_SUFFIXES = ("floats", "int64s", "strings", "tensor")


def _columns(attributes, default_float, default_int64, default_string, default_tensor):
    """The table given by the attributes ``keys_*`` and ``values_*``."""

    def column(side):
        name, values = only(**{f"{side}_{kind}": attributes[f"{side}_{kind}"] for kind in _SUFFIXES})
        dtypes = {f"{side}_floats": np.float32, f"{side}_int64s": np.int64, f"{side}_strings": object}
        return np.asarray(values, dtypes.get(name))

    keys, values = column("keys"), column("values")
    defaults = {"O": default_string, "i": default_int64, "f": default_float}
    default = defaults[values.dtype.kind] if default_tensor is None else default_tensor.item()
    return _table(keys, values, default if values.dtype == object else values.dtype.type(default))


@op("LabelEncoder", domain=DOMAIN, since=2, strings="keys_strings")
@taking(**{f"{side}_{kind}": None for side in ("keys", "values") for kind in _SUFFIXES})
def label_encoder(
    X, *, default_float=-0.0, default_int64=-1, default_string="_Unused", default_tensor=None, once, **attributes
):
    """LabelEncoder: a look-up in parallel lists of keys and values."""
    return _lookup(X, once(_columns, attributes, default_float, default_int64, default_string, default_tensor))


@op("CategoryMapper", domain=DOMAIN)
def category_mapper(X: Static, *, cats_int64s, cats_strings, default_int64=-1, default_string="_Unused", once):
    return _lookup(X, once(_string_table, cats_strings, cats_int64s, default_int64, default_string, dtype=X.dtype))


# ---------------------------------------------------------------------------------------------------- maps


@op("ZipMap", domain=DOMAIN)
def zip_map(X: Static, *, classlabels_int64s=None, classlabels_strings=None, once):
    """ZipMap: per row a dict from label to value."""
    labels = once(_map_labels, classlabels_int64s, classlabels_strings)
    X = batch(X)
    if X.shape[1] != len(labels):
        raise ValueError(f"the number of columns ({X.shape[1]}) must be that of the labels ({len(labels)})")
    rows = X.tolist()
    match labels:  # dict(zip()) would take three times as long
        case (a, b):
            return [{a: x, b: y} for x, y in rows]
        case (a, b, c):
            return [{a: x, b: y, c: z} for x, y, z in rows]
    return [dict(zip(labels, row)) for row in rows]  # noqa: B905 - checked above; strict= doubles the time


def _map_labels(integers, strings):
    return only(classlabels_int64s=integers, classlabels_strings=strings)[1]


CastTo = Literal["TO_FLOAT", "TO_STRING", "TO_INT64"]
_CASTS: dict[str, tuple] = {
    "TO_FLOAT": (np.float32, float, 0.0),
    "TO_INT64": (np.int64, int, 0),
    "TO_STRING": (object, lambda v: v if isinstance(v, str) else f"{v:f}", "0.f"),
}


@op("CastMap", domain=DOMAIN)
def cast_map(X: Static, *, cast_to: CastTo = "TO_FLOAT", map_form: Literal["DENSE", "SPARSE"] = "DENSE", max_map=1):
    """CastMap: the values of a map as a row, in key order (DENSE) or at the index of their key (SPARSE)."""
    dtype, cast, filler = _CASTS[cast_to]
    if map_form == "SPARSE" and not set(X) <= set(range(max_map)):
        raise ValueError(f"the keys {sorted(X)} must be in [0, {max_map - 1}], as max_map={max_map}")
    keys = sorted(X) if map_form == "DENSE" else range(max_map)
    return np.array([cast(X[k]) if k in X else filler for k in keys], dtype)[None]


@op("DictVectorizer", domain=DOMAIN)
def dict_vectorizer(X: Static, *, int64_vocabulary=None, string_vocabulary=None):
    """DictVectorizer: one row with the value of each vocabulary entry, or zero; other keys are ignored."""
    _, vocabulary = only(int64_vocabulary=int64_vocabulary, string_vocabulary=string_vocabulary)
    values = list(X.values()) or [0.0]
    # A Python float has no width; it is converted to ONNX's float.
    dtype = {float: np.float32, str: object}.get(type(values[0]), np.asarray(values).dtype)
    return np.array([[X.get(k, "" if dtype is object else 0) for k in vocabulary]], dtype)


# ------------------------------------------------------------------------------------------- linear models


def _linear(X, n, coefficients, intercepts, once, double):
    """Scores [N, n] of a linear model; the coefficients of each class or target are contiguous."""
    X = batch(X).astype(result_dtype(double))
    size = n * X.shape[1]
    if len(coefficients) < size:
        raise ValueError(f"coefficients must have {n} * {X.shape[1]} entries (it has {len(coefficients)})")
    if len(coefficients) > size:
        message = f"only {size} of {len(coefficients)} coefficients are used, for {n} * {X.shape[1]} features"
        warnings.warn(message + "; the input seems to have too few features", stacklevel=2)
    if len(intercepts or (0,)) not in (1, n):
        raise ValueError(f"intercepts must have {n} entries (it has {len(intercepts)})")
    weights, offsets = once(_arrays, coefficients, intercepts or (), dtype=X.dtype)
    scores = X @ weights[:size].reshape(n, -1).T
    return scores + offsets if intercepts else scores


@op("LinearClassifier", domain=DOMAIN, labels="classlabels_ints", wide=True, limits=LABELS)
def linear_classifier(
    X, *, coefficients, intercepts=None, classlabels_ints=None, classlabels_strings=None,
    multi_class: Literal[0, 1] = 0, once, post_transform: Transform = "NONE", double=False,  # noqa: ARG001
):  # fmt: skip
    """LinearClassifier: (best class, scores); multi_class is redundant with post_transform."""
    labels = once(class_labels, {"classlabels_ints": classlabels_ints, "classlabels_strings": classlabels_strings})
    n = len(intercepts or coefficients[:: X.shape[-1]])
    if n != len(labels) and (n, len(labels)) != (1, 2):
        raise ValueError(f"the number of class labels ({len(labels)}) must match the rows of coefficients ({n})")
    scores = _linear(X, n, coefficients, intercepts, once, double)
    if n == len(labels):
        return labels_of(labels, argmax(scores, 1)), transform(scores, post_transform)
    return labels_of(labels, (scores[:, 0] > 0).astype(np.int64)), two_scores(scores, post_transform, margin=False)


@op("LinearRegressor", domain=DOMAIN, wide=True)
def linear_regressor(
    X, *, coefficients, intercepts=None, once, targets=1, post_transform: Transform = "NONE", double=False
):
    return transform(_linear(X, targets, coefficients, intercepts, once, double), post_transform)
