"""A file that is read once, for all that take a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import ModelError
from tests.support.models import mlp

X = np.ones((2, 4), np.float32)


def test_one_reading_serves_several(tmp_path: Path) -> None:
    path = onnx2jax.save(mlp(), tmp_path / "m.onnx")
    file = onnx2jax.read(path)
    path.unlink()
    assert onnx2jax.check(file).ok
    first, second = onnx2jax.convert(file), onnx2jax.convert(file)
    np.testing.assert_array_equal(first(X), second(X))
    for model in (first, second):
        again = onnx2jax.convert(onnx2jax.save(model, tmp_path / "again.onnx"))
        np.testing.assert_array_equal(again(X), first(X))


def test_a_file_that_trains_is_read_once_for_both() -> None:
    file = onnx2jax.read(onnx2jax.demo_training_model())
    image = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(onnx2jax.TrainingModel(file).infer(image=image), onnx2jax.convert(file)(image), 1e-6)


def test_keywords_of_reading_are_given_once() -> None:
    file = onnx2jax.read(mlp().SerializeToString(), strict=True)
    for take in (onnx2jax.convert, onnx2jax.TrainingModel, onnx2jax.check):
        with pytest.raises(TypeError, match=r"was read already; give strict to onnx2jax\.read"):
            take(file, strict=False)
        with pytest.raises(TypeError, match=r"no keyword strickt; a file is read with \['strict', "):
            take(mlp(), strickt=True)  # type: ignore[call-arg]


def test_what_is_no_model_is_refused_at_once() -> None:
    with pytest.raises(ModelError, match="the bytes given is not an ONNX model"):
        onnx2jax.read(b"hello")
