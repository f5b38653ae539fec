"""Files that ship inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np


def demo_model() -> Path:
    """The path of a small trained classifier of handwritten digits: image [batch, 1, 8, 8] -> logits [batch, 10]."""
    return Path(str(files("onnx2jax") / "data" / "digits.onnx"))


def demo_training_model() -> Path:
    """The path of a classifier of handwritten digits with its own training, not trained yet.

    It takes ``image`` [n, 64] in 0..16 and gives ``logits`` [n, 10]; a step of its Adam takes ``label`` [n] too.
    """
    return Path(str(files("onnx2jax") / "data" / "digits_training.onnx"))


def demo_decoder() -> Path:
    """The path of a small trained decoder that counts in English, letter by letter; a token is an ASCII code.

    It goes on from any number below a hundred, to 256 letters; after ninety-nine comes zero. Its file is laid out as
    onnxruntime-genai's builder lays out large ones: ``input_ids``, ``attention_mask`` and caches.
    """
    return Path(str(files("onnx2jax") / "data" / "counting.onnx"))


def demo_samples() -> dict[str, np.ndarray]:
    """Test images the classifier never saw (``images``), their ``labels`` and the reference ``logits``."""
    with np.load(str(files("onnx2jax") / "data" / "digits_samples.npz")) as samples:
        return dict(samples)
