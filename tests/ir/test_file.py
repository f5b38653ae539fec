"""``onnx2jax.read``: one file object for several calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import ModelError
from tests.support.models import mlp

X = np.ones((2, 4), np.float32)


def test_one_file_object_works_for_several_calls(tmp_path: Path) -> None:
    path = onnx2jax.save(mlp(), tmp_path / "m.onnx")
    file = onnx2jax.read(path)
    path.unlink()
    assert onnx2jax.check(file).ok
    first, second = onnx2jax.convert(file), onnx2jax.convert(file)
    np.testing.assert_array_equal(first(X), second(X))
    for model in (first, second):
        again = onnx2jax.convert(onnx2jax.save(model, tmp_path / "again.onnx"))
        np.testing.assert_array_equal(again(X), first(X))


def test_one_file_object_works_for_training_and_inference() -> None:
    file = onnx2jax.read(onnx2jax.demo_training_model())
    image = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(onnx2jax.TrainingModel(file).infer(image=image), onnx2jax.convert(file)(image), 1e-6)


def test_keywords_of_read_are_refused_with_a_file_object() -> None:
    file = onnx2jax.read(mlp().SerializeToString(), strict=True)
    for take in (onnx2jax.convert, onnx2jax.TrainingModel, onnx2jax.check):
        with pytest.raises(TypeError, match=r"has been read already; pass strict to onnx2jax\.read"):
            take(file, strict=False)
        with pytest.raises(TypeError, match=r"unknown keyword strickt; did you mean 'strict'\?"):
            take(mlp(), strickt=True)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"algorithm, which is one of TrainingModel\.step and TrainingModel\.train_step$"
    ):
        onnx2jax.TrainingModel(onnx2jax.demo_training_model(), algorithm="adam")  # type: ignore[call-arg]


def test_read_refuses_files_that_are_not_models() -> None:
    with pytest.raises(ModelError, match="the bytes given is not an ONNX model"):
        onnx2jax.read(b"hello")
