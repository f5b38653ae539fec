"""hummingbird: estimators of scikit-learn, LightGBM and XGBoost as tensor programs, written by its ONNX backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from .case import Case, Export

HUMMINGBIRD: Final = "hummingbird"


def _sk(path: str, **options: Any) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)(**options)


def _pipeline(*paths: str) -> Any:
    from sklearn.pipeline import make_pipeline

    return make_pipeline(*map(_sk, paths))


def _export(make: Callable[[], Any], target: str, outputs: Sequence[str], folder: Path, *, batch: int = 0) -> Export:
    """An estimator fitted to a kind of target; ``outputs``: its methods that compute those of the file."""
    import hummingbird.ml
    import onnx
    import torch

    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 5)).astype(np.float32)
    total = x @ np.array([1, -2, 0.5, 0, 1], np.float32)
    y = {"classes": np.digitize(total, [-1, 1]), "two": (total > 0).astype(int), "numbers": total}[target]
    fitted = make().fit(x, y)
    config = {"onnx_target_opset": 17} | ({"batch_size": batch} if batch else {})
    with mock.patch("torch.onnx.export", partial(torch.onnx.export, dynamo=False)):  # its axes are those of scripts
        converted = hummingbird.ml.convert(fitted, "onnx", x[:4], extra_config=config)
    path = folder / "model.onnx"
    onnx.save(converted.model, path)
    (name,) = (v.name for v in converted.model.graph.input)
    sizes = [rng.standard_normal((rows, 5)).astype(np.float32) for rows in ((batch,) if batch else (4, 7))]
    ranks = [len(v.type.tensor_type.shape.dim) for v in converted.model.graph.output]
    expected = [
        [
            np.asarray(getattr(fitted, output)(rows)).reshape((len(rows), -1)[:rank])
            for output, rank in zip(outputs, ranks, strict=True)
        ]
        for rows in sizes
    ]
    return Export(path, [{name: rows} for rows in sizes], expected)


_TREE: Final = {"max_depth": 3, "random_state": 0}
_FEW: Final = {"n_estimators": 4, **_TREE}
CLASSES: Final = ("predict", "predict_proba")
SCORES: Final = ("predict", "decision_function")
LABELS: Final = ("predict", "predict")
NUMBERS: Final = ("predict",)
COLUMNS: Final = ("transform",)
ESTIMATORS: Final[Mapping[str, tuple[Callable[[], Any], str, Sequence[str]]]] = {
    "LogisticRegression": (partial(_sk, "sklearn.linear_model.LogisticRegression"), "classes", CLASSES),
    "LogisticRegression, two classes": (partial(_sk, "sklearn.linear_model.LogisticRegression"), "two", CLASSES),
    "SGDClassifier": (
        partial(_sk, "sklearn.linear_model.SGDClassifier", loss="log_loss", random_state=1),
        "classes",
        CLASSES,
    ),
    "LinearSVC": (partial(_sk, "sklearn.svm.LinearSVC"), "classes", SCORES),
    "SVC": (partial(_sk, "sklearn.svm.SVC"), "two", LABELS),
    "LinearRegression": (partial(_sk, "sklearn.linear_model.LinearRegression"), "numbers", NUMBERS),
    "Ridge": (partial(_sk, "sklearn.linear_model.Ridge"), "numbers", NUMBERS),
    "GaussianNB": (partial(_sk, "sklearn.naive_bayes.GaussianNB"), "classes", CLASSES),
    "KNeighborsClassifier": (partial(_sk, "sklearn.neighbors.KNeighborsClassifier"), "classes", CLASSES),
    "KNeighborsRegressor": (partial(_sk, "sklearn.neighbors.KNeighborsRegressor"), "numbers", NUMBERS),
    "KMeans": (partial(_sk, "sklearn.cluster.KMeans", n_clusters=3, random_state=0), "classes", NUMBERS),
    "MLPClassifier": (
        partial(_sk, "sklearn.neural_network.MLPClassifier", max_iter=20, random_state=0),
        "classes",
        CLASSES,
    ),
    "MLPRegressor": (
        partial(_sk, "sklearn.neural_network.MLPRegressor", max_iter=20, random_state=0),
        "numbers",
        NUMBERS,
    ),
    "DecisionTreeClassifier": (partial(_sk, "sklearn.tree.DecisionTreeClassifier", **_TREE), "classes", CLASSES),
    "DecisionTreeRegressor": (partial(_sk, "sklearn.tree.DecisionTreeRegressor", **_TREE), "numbers", NUMBERS),
    "RandomForestClassifier": (partial(_sk, "sklearn.ensemble.RandomForestClassifier", **_FEW), "classes", CLASSES),
    "RandomForestRegressor": (partial(_sk, "sklearn.ensemble.RandomForestRegressor", **_FEW), "numbers", NUMBERS),
    "ExtraTreesClassifier": (partial(_sk, "sklearn.ensemble.ExtraTreesClassifier", **_FEW), "classes", CLASSES),
    "GradientBoostingClassifier": (
        partial(_sk, "sklearn.ensemble.GradientBoostingClassifier", **_FEW),
        "classes",
        CLASSES,
    ),
    "GradientBoostingRegressor": (
        partial(_sk, "sklearn.ensemble.GradientBoostingRegressor", **_FEW),
        "numbers",
        NUMBERS,
    ),
    "IsolationForest": (
        partial(_sk, "sklearn.ensemble.IsolationForest", n_estimators=4, random_state=0),
        "classes",
        SCORES,
    ),
    "StandardScaler": (partial(_sk, "sklearn.preprocessing.StandardScaler"), "classes", COLUMNS),
    "PCA": (partial(_sk, "sklearn.decomposition.PCA", n_components=3), "classes", COLUMNS),
    "PolynomialFeatures": (partial(_sk, "sklearn.preprocessing.PolynomialFeatures"), "classes", COLUMNS),
    "pipeline": (
        partial(_pipeline, "sklearn.preprocessing.MinMaxScaler", "sklearn.linear_model.LogisticRegression"),
        "classes",
        CLASSES,
    ),
    "LGBMClassifier": (partial(_sk, "lightgbm.LGBMClassifier", n_estimators=4, verbose=-1), "classes", CLASSES),
    "LGBMRegressor": (partial(_sk, "lightgbm.LGBMRegressor", n_estimators=4, verbose=-1), "numbers", NUMBERS),
    "XGBClassifier": (
        partial(_sk, "xgboost.XGBClassifier", n_estimators=4, max_depth=3, base_score=0.5),
        "classes",
        CLASSES,
    ),
    "XGBRegressor": (
        partial(_sk, "xgboost.XGBRegressor", n_estimators=4, max_depth=3, base_score=0.5),
        "numbers",
        NUMBERS,
    ),
}
REFUSED: Final = {"XGBRegressor / hummingbird": "ValueError: could not convert string to float: '[5E-1]'"}
ONE_BY_ONE: Final = "hummingbird reads multi_class, which scikit-learn no longer has, and takes its absence for 'ovr'"
KNOWN: Final = {
    "LogisticRegression": {"outputs": ONE_BY_ONE},
    "pipeline": {"outputs": ONE_BY_ONE},
    "LinearSVC": {"outputs": "hummingbird writes probabilities, where scikit-learn has scores alone"},
}
BOOSTED: Final = {"LGBM": "lightgbm", "XGB": "xgboost"}
FIXED: Final = ("KNeighborsClassifier", "KNeighborsRegressor")
"""Of one size: hummingbird asks for it."""

CASES: Final = tuple(
    Case(
        "hummingbird",
        name,
        HUMMINGBIRD,
        partial(_export, *row, batch=4 if name in FIXED else 0),
        ("hummingbird", *(package for prefix, package in BOOSTED.items() if name.startswith(prefix))),
        known=KNOWN.get(name, {}),
    )
    for name, row in ESTIMATORS.items()
    if f"{name} / {HUMMINGBIRD}" not in REFUSED
)
