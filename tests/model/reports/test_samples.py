"""Random inputs and reports of models whose files declare large extents."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import InputTypeError, OperatorError
from onnx2jax.eval import node_errors
from onnx2jax.model.reports.sample_inputs import sample_extents, sample_inputs
from onnx2jax.model.reports.samples import MOST, MOST_STRINGS, random_values
from onnx2jax.ops import arrays
from onnx2jax.proto.types import TensorType, ValueInfo
from tests.support.models import text_model


def wanted(**shapes: tuple[Any, ...]) -> list[ValueInfo]:
    return [ValueInfo(n, TensorType(np.dtype(dtype), shape)) for n, (dtype, *shape) in shapes.items()]


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ({"x": ("f4", 1 << 31)}, "x: float32.* has 2,147,483,648 elements.*at most 134,217,728.*--dim name=size"),
        ({"x": ("f4", MOST, "n"), "z": ("i1", 1)}, "z: int8.* has 1 elements, 134,217,729 with those before it"),
        ({"x": ("O", MOST_STRINGS + 1)}, "x: string.* at most 1,048,576"),
    ],
)
def test_random_inputs_are_bounded_in_all(shapes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputTypeError, match=match):
        random_values(wanted(**shapes), np.random.default_rng(0))


def test_samples_for_a_decoder_are_a_step_after_a_full_past() -> None:
    model = onnx2jax.convert(onnx2jax.demo_decoder(), dims={"batch_size": 2, "sequence_length": 3})
    assert sample_extents(model, {}) == {"total_sequence_length": 4}
    tokens = np.zeros((2, 5), np.int64)
    for convert, given, total in (({}, {}, 4), ({"past_sequence_length": 7}, {}, 10), ({}, {"attention_mask": 9}, 9)):
        shaped = onnx2jax.convert(onnx2jax.demo_decoder(), dims={"batch_size": 2, "sequence_length": 3, **convert})
        feeds: dict[str, Any] = {n: np.ones((2, size), np.int64) for n, size in given.items()}
        values = sample_inputs(shaped, feeds, 0, sample_extents(shaped, feeds))
        assert values["attention_mask"].shape == (2, total) and values["attention_mask"].all()
        assert values["past_key_values.0.key"].shape[2] == total - 3
    free = onnx2jax.convert(onnx2jax.demo_decoder())
    assert sample_extents(free, {"input_ids": tokens})["total_sequence_length"] == 6


def test_samples_by_role() -> None:
    """A mask that is added, an encoder's mask, positions of a fixed mask, and counts; not of a model without caches."""
    text = """g (int64[2, 3] input_ids, float[2, 5] attention_mask, bool[2, 4] encoder_attention_mask, int64[2, 3]
        position_ids, int64[3] cache_position, int32[2] seqlens_k, int32 total_sequence_length, bool[1]
        use_cache_branch, float[2, p, 4] past, float[2, 3, 4] new) => (float[2, t, 4] present) {
        present = Concat<axis = 1>(past, new) }"""
    model = onnx2jax.convert(text_model(text))
    values = sample_inputs(model, {}, 0, sample_extents(model, {}))
    assert values["past"].shape == (2, 2, 4)
    assert not values["attention_mask"].any() and values["encoder_attention_mask"].all()
    assert values["position_ids"].tolist() == [[2, 3, 4]] * 2 and values["cache_position"].tolist() == [2, 3, 4]
    assert (values["seqlens_k"].tolist(), values["total_sequence_length"], values["use_cache_branch"]) == ([4, 4], 5, 1)
    encoder = onnx2jax.convert(text_model("g (int64[2, 3] position_ids) => (int64[2, 3] y) { y = Neg(position_ids) }"))
    assert sample_inputs(encoder, {}, 0, {})["position_ids"].tolist() == [[0, 1, 2]] * 2


def test_summary_computes_shapes_without_data() -> None:
    """Of inputs, ranges and windows of 8 GiB and more; in NumPy, each of these would be filled."""
    large = onnx2jax.convert(text_model(f"g (float[{1 << 31}] x, float[n] z) => (float[m] y) {{ y = Mul(x, z) }}"))
    assert large.summary(dims={"n": 1 << 31}).flops == 1 << 31
    with jax.enable_x64(True):
        aval = jax.make_jaxpr(lambda: arrays.counting(arrays.MOST_KNOWN + 1))().out_avals[0]
    assert (aval.shape, aval.dtype) == ((arrays.MOST_KNOWN + 1,), np.int64)
    assert isinstance(arrays.counting(3), np.ndarray)


@pytest.mark.parametrize("node, dtype", [("Range(zero, n, one)", "int64"), ("HannWindow(n)", "float")])
def test_long_ranges_and_windows_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch, node: str, dtype: str) -> None:
    constants = {"zero": np.int64(0), "n": np.int64(9), "one": np.int64(2)}
    text = f"g ({dtype}[9] x) => ({dtype}[n] y) {{ c = {node} y = Add(x, c) }}".replace("[9]", "[k]")
    proto = text_model(text, **{n: v for n, v in constants.items() if n in node})
    x = np.zeros(1, np.int64 if dtype == "int64" else np.float32)
    want = onnx2jax.convert(proto)(x)
    monkeypatch.setattr(arrays, "MOST_KNOWN", 2)
    np.testing.assert_allclose(onnx2jax.convert(proto)(x), want, rtol=1e-6)


def test_outputs_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fits; together they would end the process. Your own jit may reduce them, so it is not asked."""
    model = onnx2jax.convert(text_model("g (float[n] x) => (float[n] a, float[n] b) { a = Exp(x) b = Sin(x) }"))
    monkeypatch.setattr(node_errors, "LARGEST_ARRAY", 7000)
    x = np.ones(1000, np.float32)
    for call in (lambda: model(x), lambda: model.run(None, {"x": x}), lambda: model.compile(dims={"n": 1000})):
        with pytest.raises(OperatorError, match=r"the 2 outputs of 'g' take 8.0e\+03 bytes together.*--dim"):
            call()
    jax.jit(lambda x: sum(v.sum() for v in model(x)))(x)
    model(x[:500])
