"""Random sample inputs."""

from __future__ import annotations

import numpy as np
import pytest

from onnx2jax.errors import InputTypeError
from onnx2jax.model.reports.samples import random_value
from onnx2jax.proto.types import TensorType, ValueInfo


@pytest.mark.parametrize("dtype", [np.float32, np.int64, object])
def test_samples_of_any_declared_extent_are_not_allocated(dtype: type) -> None:
    info = ValueInfo("x", TensorType(np.dtype(dtype), (1, 3, 2**31)))
    with pytest.raises(InputTypeError, match=r"6,442,450,944 elements.*give the inputs, \{'x': array\}"):
        random_value(info, np.random.default_rng(0))
