"""Classic machine learning: pipelines of scikit-learn by skl2onnx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export

SKL2ONNX = "skl2onnx"


def _sklearn(make: Callable[[], Any], folder: Path) -> Export:
    from skl2onnx import to_onnx
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    x = x.astype(np.float32)
    fitted = make().fit(x, y)
    path = folder / "model.onnx"
    path.write_bytes(to_onnx(fitted, x[:1], options={"zipmap": False}).SerializeToString())
    inputs = [{"X": x[::5]}, {"X": x[:7]}]
    expected = [[fitted.predict(i["X"]), fitted.predict_proba(i["X"])] for i in inputs]
    return Export(path, inputs, expected)


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=500)


CASES: Final = (
    Case("scikit-learn", "LogisticRegression", SKL2ONNX, lambda f: _sklearn(_logistic, f), needs=("skl2onnx",)),
)
