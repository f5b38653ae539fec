"""Classic machine learning: scikit-learn by skl2onnx."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import onnx

from .case import Case, Export
from .estimators import LOGISTIC, SCALER, SPECS, Sk, Spec

FIT = 90
"""Rows to fit; the others are inputs: a distance of 0 from a row that was fitted has no derivative."""


def _data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets. The names say what is special about either."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((FIT + 20, 5))
    score = x[:, 0] - x[:, 1] * x[:, 2] + 0.3 * rng.standard_normal(len(x))
    three = np.digitize(score, [-0.7, 0.7])
    words = np.array(["graph", "node", "tensor", "Shape", "opset", "the", "runs", "fast"])
    x = {
        "counts": lambda: rng.poisson(2 + 2 * three[:, None], x.shape).astype(float),
        "holes": lambda: np.where(rng.random(x.shape) < 0.2, np.nan, x),
        "categories": lambda: rng.choice(np.array(["red", "green", "blue"], object), (len(x), 2)),
        "texts": lambda: np.array([[" ".join(rng.choice(words, 6))] for _ in x], object),
    }.get(name, lambda: x)()
    y = {
        "two": score > 0,
        "categories": score > 0,
        "named": np.array(["low", "middle", "high"])[three],
        "flags": np.stack([score > 0, x[:, 3] > 0.2], 1) if name == "flags" else None,
        "numbers": score,
        "pairs": np.stack([score, score**2], 1),
        "positive": np.exp(0.5 * score),
    }.get(name, three)
    return x, y.astype(np.int64) if y.dtype == bool else y


def _export(spec: Spec, folder: Path) -> Export:
    from skl2onnx import to_onnx
    from sklearn.base import is_classifier

    x, y = _data(spec.data)
    x = x if x.dtype == object else x.astype(spec.dtype)
    fitted = spec.estimator.make()
    seen = x[:, 0] if spec.data == "texts" else x
    fitted.fit(seen[:FIT], y[:FIT])
    options = {"zipmap": False} if is_classifier(fitted) and "predict_proba" in spec.methods else {}
    options |= spec.options
    with mock.patch("onnx.helper.make_attribute", _make_attribute):
        model = to_onnx(fitted, x[:1], options=options or None, target_opset={"": 21, "ai.onnx.ml": 3})
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    sizes = slice(FIT, FIT + 13), slice(FIT + 13, None)
    ranks = [len(o.type.tensor_type.shape.dim) for o in model.graph.output]
    expected = [
        [_output(getattr(fitted, m)(seen[rows]), rank) for m, rank in zip(spec.methods, ranks, strict=True)]
        for rows in (sizes if spec.methods else ())
    ]
    return Export(path, [{"X": x[rows]} for rows in sizes], expected or None)


def _output(value: Any, rank: int) -> Any:
    """Dense, and of as many dimensions as in the file, which has columns for scikit-learn's vectors."""
    value = value.toarray() if hasattr(value, "toarray") else np.asarray(value)
    return value[:, None] if value.ndim == 1 and rank == 2 else value


_helper = onnx.helper.make_attribute


def _make_attribute(key: str, value: Any, *args: Any, **kwargs: Any) -> onnx.AttributeProto:
    """Without the booleans that skl2onnx writes among integers, which protobuf 7 refuses."""
    if isinstance(value, list) and any(isinstance(v, bool | np.bool) for v in value):
        value = [int(v) for v in value]
    return _helper(key, value, *args, **kwargs)


def _maps(kind: bool | str, folder: Path) -> Export:
    """Probabilities as a map for each row, or as an output for each class."""
    from skl2onnx import to_onnx

    x, y = _data("named")
    x = x.astype(np.float32)
    fitted = LOGISTIC.make().fit(x, y)
    path = folder / "model.onnx"
    path.write_bytes(to_onnx(fitted, x[:1], options={"zipmap": kind}).SerializeToString())
    sizes = x[:13], x[:7]
    expected = []
    for rows in sizes:
        p = fitted.predict_proba(rows)
        maps = [dict(zip(fitted.classes_, row, strict=True)) for row in p]
        expected.append([fitted.predict(rows), *([maps] if kind is True else p.T)])
    return Export(path, [{"X": rows} for rows in sizes], expected)


def _columns(folder: Path) -> Export:
    """An input for each column of a table, of strings and of numbers."""
    import pandas as pd
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    rng = np.random.default_rng(0)
    size = rng.standard_normal(60).astype(np.float32)
    size[::9] = np.nan
    table = pd.DataFrame(
        {"colour": rng.choice(["red", "green", "blue"], 60), "size": size, "age": rng.integers(1, 9, 60)}
    )
    table = table.astype({"age": np.float32, "colour": object})
    numbers = Sk("pipeline.Pipeline", [("a", Sk("impute.SimpleImputer", strategy="median")), ("b", SCALER)])
    kinds = [
        ("n", numbers, ["size", "age"]),
        ("c", Sk("preprocessing.OneHotEncoder", handle_unknown="ignore"), ["colour"]),
    ]
    whole = Sk("pipeline.Pipeline", [("columns", Sk("compose.ColumnTransformer", kinds)), ("final", LOGISTIC)])
    fitted = whole.make().fit(table, np.nan_to_num(size) > 0)
    types = [(n, (StringTensorType if n == "colour" else FloatTensorType)([None, 1])) for n in table]
    path = folder / "model.onnx"
    path.write_bytes(to_onnx(fitted, initial_types=types, options={"zipmap": False}).SerializeToString())
    sizes = table[:13], table[:7]
    expected = [[fitted.predict(t).astype(np.int64), fitted.predict_proba(t)] for t in sizes]
    return Export(path, [{n: t[n].to_numpy()[:, None] for n in t} for t in sizes], expected)


def _hashes(folder: Path) -> Export:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType

    x = _data("categories")[0][:, :1]
    fitted = Sk("feature_extraction.FeatureHasher", 16, input_type="string").make().fit(x)
    path = folder / "model.onnx"
    path.write_bytes(to_onnx(fitted, initial_types=[("X", StringTensorType([None, 1]))]).SerializeToString())
    sizes = x[:13], x[:7]
    return Export(path, [{"X": rows} for rows in sizes], [[fitted.transform(rows).toarray()] for rows in sizes])


def _dictionaries(folder: Path) -> Export:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import DictionaryType, FloatTensorType, StringTensorType

    rows = [{"a": 1.0, "b": 2.0}, {"c": 3.0}, {"a": -1.0, "d": 4.0}]
    fitted = Sk("feature_extraction.DictVectorizer", sparse=False).make().fit(rows[:2])
    path = folder / "model.onnx"
    kind = DictionaryType(StringTensorType([1]), FloatTensorType([1]))
    path.write_bytes(to_onnx(fitted, initial_types=[("X", kind)]).SerializeToString())
    return Export(path, [{"X": row} for row in rows], [[fitted.transform([row])] for row in rows])


FAMILY, SKL2ONNX = "scikit-learn", "skl2onnx"
LIGHT: Final = (
    *("LogisticRegression", "LogisticRegression, names as labels", "DecisionTreeClassifier", "RandomForestRegressor"),
    *("KNeighborsClassifier", "GaussianNB", "SVR", "LinearSVC", "MLPClassifier", "KMeans", "StandardScaler"),
    *("SimpleImputer", "Normalizer", "OneHotEncoder", "OrdinalEncoder", "TfidfVectorizer, characters"),
)
CASES: Final = (
    *(
        Case(FAMILY, s.title, SKL2ONNX, partial(_export, s), (SKL2ONNX,), known=s.known, light=s.title in LIGHT)
        for s in SPECS
    ),
    Case(FAMILY, "ZipMap", SKL2ONNX, partial(_maps, True), (SKL2ONNX,), light=True),
    Case(FAMILY, "ZipMap, columns", SKL2ONNX, partial(_maps, "columns"), (SKL2ONNX,)),
    Case(FAMILY, "ColumnTransformer", SKL2ONNX, _columns, (SKL2ONNX, "pandas")),
    Case(FAMILY, "FeatureHasher", SKL2ONNX, _hashes, (SKL2ONNX,)),
    Case(FAMILY, "DictVectorizer", SKL2ONNX, _dictionaries, (SKL2ONNX,), light=True),
)

REFUSED: Final = {
    "GaussianProcessClassifier / skl2onnx": "writes com.microsoft Solve, an operator that onnxruntime has not",
    "HashingVectorizer / skl2onnx": "MissingShapeCalculator",
    "RandomTreesEmbedding / skl2onnx": "The converter cannot convert the model with sparse outputs",
    "SelectFromModel, the first feature alone / skl2onnx": "writes ConstantOfShape of the rows",
    "SplineTransformer / skl2onnx": "MissingShapeCalculator",
    "TransformedTargetRegressor / skl2onnx": "MissingShapeCalculator",
}
"""What has no line: what the exporter refuses to write, or writes as no runtime can read it."""
