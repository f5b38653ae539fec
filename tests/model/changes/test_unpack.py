"""``convert(weights=...)``: packed weights are unpacked to floats, and results do not change."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax.errors import InputTypeError
from onnx2jax.training.lora import linear_maps
from tests.support import decoders

MORE = [("symmetric", "float32", 1e-5), ("asymmetric", "bfloat16", 5e-2), ("symmetric", np.float16, 5e-3)]
CASES = [
    *[("asymmetric", "float32", 1e-5), ("symmetric", "bfloat16", 5e-2), ("asymmetric", np.float16, 5e-3)],
    *(pytest.param(*case, marks=pytest.mark.extended) for case in MORE),
]


@functools.cache
def packed(bits: str) -> tuple[onnx.ModelProto, dict[str, Any], np.ndarray]:
    """A decoder with packed weights, its inputs, and its logits."""
    proto = decoders.group_query(bits=bits).proto
    model = onnx2jax.convert(proto)
    feeds: dict[str, Any] = {"input_ids": np.array([[3, 1, 4]]), "attention_mask": np.ones((1, 3), np.int64)}
    feeds |= {v.name: np.zeros((1, 2, 0, 16), np.float32) for v in model.inputs if v.name not in feeds}
    return proto, feeds, model.run(["logits"], feeds)[0]


@pytest.mark.parametrize(("bits", "dtype", "rtol"), CASES)
def test_results_are_unchanged(bits: str, dtype: Any, rtol: float) -> None:
    proto, feeds, want = packed(bits)
    floating = onnx2jax.convert(proto, weights=dtype)
    (ours,) = floating.run(["logits"], feeds)
    np.testing.assert_allclose(ours, want, atol=rtol * np.abs(want).max())
    assert ours.dtype == want.dtype
    assert {n.op_type for n in floating.graph.nodes}.isdisjoint({"MatMulNBits"})
    weight = floating.params["0.q.packed"]
    assert (weight.dtype, weight.shape) == (np.dtype(dtype), (32, 64))
    assert "0.q.scales" not in floating.params
    assert "0.q.packed" in {m.name for m in linear_maps(floating.graph)}  # adapters match it by name


@pytest.mark.parametrize("dtype", ["int8", "float4711", object])
def test_non_floating_weight_types_are_rejected(dtype: Any) -> None:
    with pytest.raises(InputTypeError, match="'float32', 'bfloat16' or 'float16' to unpack packed weights"):
        onnx2jax.convert(onnx2jax.demo_model(), weights=dtype)
