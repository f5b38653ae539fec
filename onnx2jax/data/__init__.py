"""Bundled models and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

_FOLDER: Final = Path(__file__).parent


def demo_model() -> Path:
    """The path of a small trained classifier of handwritten digits: image [batch, 1, 8, 8] -> logits [batch, 10]."""
    return _FOLDER / "digits.onnx"


def demo_training_model() -> Path:
    """The path of a classifier of handwritten digits with training_info, not yet trained.

    It maps ``image`` [n, 64] in 0..16 to ``logits`` [n, 10]; a step of its Adam optimizer also takes ``label`` [n].
    """
    return _FOLDER / "digits_training.onnx"


def demo_decoder() -> Path:
    """The path of a small trained decoder that counts in English, letter by letter; tokens are ASCII codes.

    It continues from any number below a hundred, up to 256 letters; zero follows ninety-nine. The file has the layout
    of onnxruntime-genai's model builder: ``input_ids``, ``attention_mask`` and KV caches, with a tokenizer beside it.
    """
    return _FOLDER / "counting" / "model.onnx"


def demo_samples() -> dict[str, np.ndarray]:
    """Held-out test images of the classifier (``images``), their ``labels`` and the reference ``logits``."""
    with np.load(_FOLDER / "digits_samples.npz") as samples:
        return dict(samples)
