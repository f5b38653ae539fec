"""Boosted trees: LightGBM and XGBoost by onnxmltools, CatBoost by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export
from .classic import FIT, _data

ONNXMLTOOLS = "onnxmltools"


def _rows(data: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = _data(data)
    return x.astype(np.float32), y


def _answers(fitted: Any, rows: np.ndarray) -> list[Any]:
    """Labels and probabilities of a classifier, or a column of numbers."""
    if hasattr(fitted, "predict_proba"):
        return [fitted.predict(rows).reshape(-1), fitted.predict_proba(rows)]
    return [np.asarray(fitted.predict(rows)).reshape(len(rows), -1)]


def _converted(library: str, kind: str, data: str, options: Mapping[str, Any], folder: Path) -> Export:
    import importlib

    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, y = _rows(data)
    fitted = getattr(importlib.import_module(library), kind)(**options)
    fitted.fit(x[:FIT], y[:FIT])
    convert = getattr(onnxmltools, f"convert_{library}")
    more = {"zipmap": False} if library == "lightgbm" else {}
    model = convert(fitted, initial_types=[("x", FloatTensorType([None, x.shape[1]]))], target_opset=15, **more)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    sizes = x[FIT : FIT + 13], x[FIT + 13 :]
    return Export(path, [{"x": rows} for rows in sizes], [_answers(fitted, rows) for rows in sizes])


def _catboost(kind: str, data: str, options: Mapping[str, Any], folder: Path) -> Export:
    import catboost

    x, y = _rows(data)
    fitted = getattr(catboost, kind)(iterations=5, depth=3, verbose=False, allow_writing_files=False, **options)
    groups = {"group_id": np.arange(FIT) // 10} if kind == "CatBoostRanker" else {}
    fitted.fit(x[:FIT], y[:FIT], **groups)
    path = folder / "model.onnx"
    fitted.save_model(str(path), format="onnx")
    sizes = x[FIT : FIT + 13], x[FIT + 13 :]
    expected = [_answers(fitted, rows) for rows in sizes]
    if kind == "CatBoostClassifier":  # with a map for each row
        expected = [[label, [dict(enumerate(p)) for p in maps]] for label, maps in expected]
    return Export(path, [{"features": rows} for rows in sizes], expected)


LIGHT_FEW: Final = {"n_estimators": 5, "num_leaves": 6, "min_child_samples": 5, "verbose": -1, "n_jobs": 1}
FEW: Final = {"n_estimators": 5, "max_depth": 3, "n_jobs": 1, "base_score": 0.5}
ROWS: Final = (
    ("lightgbm", "LGBMClassifier", "two", LIGHT_FEW),
    ("lightgbm", "LGBMClassifier", "classes", LIGHT_FEW),
    ("lightgbm", "LGBMClassifier", "holes", LIGHT_FEW),
    ("lightgbm", "LGBMRegressor", "numbers", LIGHT_FEW),
    ("lightgbm", "LGBMRegressor", "positive", LIGHT_FEW | {"objective": "poisson"}),
    ("lightgbm", "LGBMRegressor", "numbers", LIGHT_FEW | {"boosting_type": "dart"}),
    (
        "lightgbm",
        "LGBMRegressor",
        "numbers",
        LIGHT_FEW | {"boosting_type": "rf", "subsample": 0.7, "subsample_freq": 1},
    ),
    ("xgboost", "XGBClassifier", "two", FEW),
    ("xgboost", "XGBClassifier", "classes", FEW),
    ("xgboost", "XGBClassifier", "holes", FEW),
    ("xgboost", "XGBRegressor", "numbers", FEW),
    ("xgboost", "XGBRegressor", "positive", FEW | {"objective": "count:poisson"}),
    ("xgboost", "XGBRFRegressor", "numbers", FEW),
)
CATBOOST: Final = (
    ("CatBoostClassifier", "two", {}),
    ("CatBoostClassifier", "classes", {}),
    ("CatBoostClassifier", "holes", {}),
    ("CatBoostRegressor", "numbers", {}),
    ("CatBoostRanker", "classes", {"loss_function": "YetiRank"}),
)


def _name(kind: str, data: str, options: Mapping[str, Any]) -> str:
    special = [str(options[k]) for k in ("objective", "boosting_type", "booster", "loss_function") if k in options]
    return ", ".join([kind, data, *special])


KNOWN: Final = {
    "LGBMRegressor, numbers, rf": {"outputs": "onnxmltools divides by 100 trees, LightGBM's default, instead of by 5"},
}


def _case(make: Any, exporter: str, row: tuple[Any, ...], *needs: str) -> Case:
    name = _name(*row[-3:])
    return Case("boosted trees", name, exporter, partial(make, *row), needs, known=KNOWN.get(name, {}))


CASES: Final = (
    *(_case(_converted, ONNXMLTOOLS, row, row[0], ONNXMLTOOLS) for row in ROWS),
    *(_case(_catboost, "catboost", row, "catboost") for row in CATBOOST),
)

REFUSED: Final = {
    "CatBoostRegressor, MultiRMSE / catboost": "writes a classifier without classes, which onnxruntime refuses as well",
    "XGBRegressor, dart / onnxmltools": "KeyError: 'gbtree_model_param'",
}
