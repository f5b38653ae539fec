"""All cases of the zoo, and what exporters refuse to write. Modules import the frameworks when a case is made."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from .case import Case

_NAMES: Final = (
    "boosting",
    "brevitas_networks",
    "classic",
    "detection",
    "diffusion",
    "features_arithmetic",
    "features_indexing",
    "features_layers",
    "features_resampling",
    "features_sequences",
    "features_structures",
    "features_types",
    "hummingbird_models",
    "image_libraries",
    "jax2onnx_models",
    "jax2onnx_shipped",
    "ndonnx_functions",
    "old_classifiers",
    "old_detectors",
    "old_language",
    "onnx_ad_models",
    "onnxscript_functions",
    "other_frameworks",
    "paddle_models",
    "quantised",
    "spox_graphs",
    "torch_libraries",
    "transformer_models",
    "vision",
)
_MODULES: Final = tuple(import_module(f".{name}", __package__) for name in _NAMES)
CASES: Final[tuple[Case, ...]] = tuple(case for module in _MODULES for case in module.CASES)
REFUSED: Final[dict[str, str]] = {name: error for m in _MODULES for name, error in getattr(m, "REFUSED", {}).items()}
