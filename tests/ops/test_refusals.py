"""Operands whose shapes do not fit each other are refused in a sentence, and empty ones answered, on both branches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from onnx import helper

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import KnownValueError, OperatorError
from onnx2jax.ir.binding import NEWEST
from onnx2jax.ops import linalg, registry
from onnx2jax.ops.registry import resolve
from tests.support.helpers import assert_on_purpose, run_op
from tests.support.models import model, value


def floats(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / 7


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def branches(name: str, operands: Any, opset: int = NEWEST[""], **attributes: Any) -> list[Callable[[], Any]]:
    """The operator on NumPy arrays, and compiled with all operands traced whose values it need not know."""
    operator = resolve("", name, opset)
    assert operator is not None
    names = [operator.parameter(i) for i in range(len(operands))]
    traced = [i for i, x in enumerate(operands) if x is not None and names[i] not in operator.static]

    def known() -> Any:
        return run_op(name, *operands, opset=opset, **attributes)

    @jax.jit
    def program(values: list[Any]) -> Any:
        given = dict(zip(traced, values, strict=True))
        return run_op(name, *(given.get(i, x) for i, x in enumerate(operands)), opset=opset, **attributes)

    def compiled() -> Any:
        with compat.enable_x64():
            return program([operands[i] for i in traced])

    return [known, compiled]


DELTA = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "delta"}
GRAMS = {
    "max_gram_length": 1, "max_skip_count": 0, "min_gram_length": 1, "mode": "TF", "ngram_counts": [0],
    "ngram_indexes": [0, 1], "pool_int64s": [2, 3],
}  # fmt: skip
LSTM = floats(2, 2, 3), floats(1, 16, 3), floats(1, 16, 4)
TOKENS = floats(1, 2, 4)
NOT_LARGER = {"keep_aspect_ratio_policy": "not_larger"}
BOTH = {"direction": "bidirectional"}
TWICE = floats(2, 2, 3), floats(2, 16, 3), floats(2, 16, 4)

SQUARES = floats(2, 2), floats(2, 2)
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("GatherElements", (floats(2, 2), zeros(3, 2)), {"axis": 1}, "must not exceed data"),
    ("GatherElements", (floats(2, 2), zeros(2)), {}, "must not exceed data"),
    ("ScatterElements", (floats(2, 2), zeros(3, 2), floats(3, 2)), {"axis": 1}, "must not exceed data"),
    ("ScatterElements", (floats(2, 2), zeros(2, 2), floats(2, 1)), {}, r"updates must have the shape \[2, 2\]"),
    ("GatherND", (floats(2, 2), zeros(3, 1)), {"batch_dims": 1}, "do not match data"),
    ("GatherND", (floats(4, 2), zeros(3, 1)), {"batch_dims": 1}, "do not match data"),
    ("GatherND", (floats(2, 2), zeros()), {}, "do not match data"),
    ("ScatterND", (floats(2, 2), zeros(), floats(2)), {}, "do not match data"),
    ("ReverseSequence", (floats(4, 3), ints(1, 2)), {}, r"sequence_lens must have the shape \[3\]"),
    ("ReverseSequence", (floats(4, 3), ints(2)), {}, r"sequence_lens must have the shape \[3\]"),
    ("ReverseSequence", (floats(4, 3), zeros(3, 1)), {}, r"sequence_lens must have the shape \[3\]"),
    ("ReverseSequence", (floats(4), ints(2)), {}, "batch_axis"),
    ("OneHot", (ints(0, 1), ints(2), floats(3)), {}, r"values must have the shape \[2\]"),
    ("OneHot", (ints(0, 1), ints(2), floats(1)), {}, r"values must have the shape \[2\]"),
    ("OneHot", (ints(0, 1), zeros(0), floats(2)), {}, "array of size 1"),
    ("TensorScatter", (floats(2, 4, 1), floats(2, 1, 1), ints(1)), {}, r"write_indices must have the shape \[2\]"),
    ("TensorScatter", (floats(2, 4, 1), floats(2, 1), ints(1, 1)), {}, r"update must have the shape \[2, length, 1\]"),
    ("TensorScatter", (floats(2, 4, 3), floats(2, 1, 1), ints(1, 1)), {}, r"update must have the shape"),
    ("TensorScatter", (floats(2, 4, 3), floats(1, 1, 3), ints(1, 1)), {}, r"update must have the shape"),
    ("RotaryEmbedding", (floats(2, 4), floats(4, 2), floats(4, 2), zeros(1, 2)), {"num_heads": 1}, "rank 3"),
    ("RotaryEmbedding", (floats(1, 1, 1, 2, 4), floats(4, 2), floats(4, 2), zeros(1, 2)), {}, "rank 4"),
    ("RotaryEmbedding", (TOKENS, floats(4, 2), floats(4, 2), ints(0, 1)), {"num_heads": 1}, "position_ids must"),
    ("RotaryEmbedding", (TOKENS, floats(), floats()), {"num_heads": 1}, "cos_cache must"),
    ("LinearAttention", (TOKENS, TOKENS, TOKENS, None, None, floats(1, 2)), DELTA, r"beta must have the shape"),
    ("Col2Im", (floats(1, 9), ints(5, 5), ints(3, 3)), {}, r"input must have the shape \[N, C \* block, 9\]"),
    ("Col2Im", (floats(1, 9, 18), ints(5, 5), ints(0, 3)), {}, "must be positive"),
    ("NonMaxSuppression", (floats(1, 4, 4), floats(1, 1, 3), ints(3)), {}, r"scores must have the shape"),
    ("NonMaxSuppression", (floats(1, 3, 4), floats(1, 1, 4), ints(3)), {}, r"scores must have the shape"),
    ("NonMaxSuppression", (floats(1, 4, 4), floats(1, 4), ints(3)), {}, r"scores must have the shape"),
    ("NonMaxSuppression", (floats(1, 4, 3), floats(1, 1, 4), ints(3)), {}, r"boxes must have the shape"),
    ("NegativeLogLikelihoodLoss", (floats(2, 3), ints(0, 2), floats(2)), {}, r"weight must have the shape \[3\]"),
    ("SoftmaxCrossEntropyLoss", (floats(2, 3), ints(0, 1), floats(4)), {}, r"weight must have the shape \[3\]"),
    ("GridSample", (floats(2, 1, 2, 2), floats(1, 3, 3, 2)), {}, "grid must have the shape"),
    ("GridSample", (floats(1, 1, 2, 2), floats(3, 3, 2)), {}, "grid must have the shape"),
    ("RoiAlign", (floats(1, 1, 4), floats(1, 4), ints(0)), {}, "X must have the shape"),
    ("RoiAlign", (floats(1, 1, 4, 4), floats(1, 3), ints(0)), {}, r"rois must have the shape \[regions, 4\]"),
    ("RoiAlign", (floats(1, 1, 4, 4), floats(2, 4), ints(0)), {}, r"batch_indices must have the shape \[2\]"),
    ("MaxRoiPool", (floats(1, 1, 4), floats(1, 5)), {"pooled_shape": [1, 1]}, "X must have the shape"),
    ("MaxRoiPool", (floats(1, 1, 4, 4), floats(1, 4)), {"pooled_shape": [1, 1]}, r"rois must have the shape"),
    ("TopK", (floats(3, 4), zeros(0)), {}, "K must have one element"),
    ("SpaceToDepth", (floats(1, 2, 5, 4),), {"blocksize": 2}, r"height \(5\) and width \(4\) must be multiples"),
    ("SpaceToDepth", (floats(2, 4, 4),), {"blocksize": 2}, r"input must have the shape \[batch, channels"),
    ("DepthToSpace", (floats(1, 6, 2, 2),), {"blocksize": 2}, r"channels \(6\) must be a multiple"),
    ("Einsum", SQUARES, {"equation": "ii,jj->i,j"}, "one after '->'"),
    ("Einsum", SQUARES, {"equation": "ij,jk->iz"}, r"has \['z'\], which no input has"),
    ("Einsum", SQUARES, {"equation": "ij,jkl->i"}, r"'jkl' .* names 3 axes of an input \(2, 2\)"),
    ("Einsum", SQUARES, {"equation": "ij->i"}, "for each of the 2 inputs"),
    ("LayerNormalization", (floats(2, 3), floats(3)), {"stash_type": 0}, r"stash_type \(0\) is not an ONNX element"),
    ("ArgMax", (floats().reshape(()),), {"axis": 1}, "axis 1 is outside a scalar"),
    ("Concat", (floats(2, 2), floats(2)), {"axis": 0}, r"one rank \(they have \[1, 2\]\)"),
    ("MaxRoiPool", (floats(1, 1, 4, 4), floats(1, 5)), {"pooled_shape": [1]}, "a height and a width"),
    ("Add", (floats(2, 3), floats(2)), {}, r"shapes \(2, ?3\) and \(2,\) do not broadcast"),
    ("MatMul", (floats(2, 3), floats(2, 2)), {}, "inner extents"),
    ("GRU", (floats(2, 1, 3), floats(1, 12, 0), floats(1, 12, 4)), {}, r"X must have the shape \[steps, batch, 0\]"),
    ("LSTM", (*LSTM, floats(1, 16)), {}, r"B must have the shape \[1, 32\]"),
    ("LSTM", (*TWICE, floats(1, 32)), BOTH, r"B must have the shape \[2, 32\]"),
    ("LSTM", (*LSTM, None, ints(1)), {}, r"sequence_lens must have the shape \[2\]"),
    ("LSTM", (*LSTM, None, None, floats(2, 2, 4)), {}, r"initial state must have the shape \[1, 2, 4\]"),
    ("LSTM", (*TWICE, None, None, floats(1, 2, 4)), BOTH, r"initial state must have the shape \[2, 2, 4\]"),
    ("LSTM", (*LSTM, None, None, None, None, floats(1, 3)), {}, "reshape"),
    ("LSTM", (*TWICE, None, None, None, None, floats(1, 12)), BOTH, r"P must have the shape \[2, 3 \* hidden_size\]"),
    ("Resize", (floats(1, 1, 0, 4), None, None, ints(1, 1, 2, 2)), {}, "empty"),
    ("Resize", (floats(1, 1, 0, 4), None, None, ints(1, 1, 2, 2)), {"mode": "linear"}, "empty"),
    ("Resize", (floats(1, 1, 0, 4), None, None, ints(1, 1, 2, 2)), NOT_LARGER, "empty"),
    ("Resize", (floats(1, 1, 2, 2), None, np.float32([1, 1, 1e9, 1e9])), {}, "bytes of memory"),
    ("Resize", (floats(1, 1, 2, 2), None, np.float32([1, 1, 1e10, 1])), {"mode": "linear"}, "bytes of memory"),
    ("RoiAlign", (floats(1, 1, 4, 4), floats(1, 4), ints(0)), {"sampling_ratio": 2**62}, "must not exceed 4096"),
    ("RoiAlign", (floats(1, 1, 4, 4), floats(1, 4), ints(0)), {"output_height": 2**62}, "bytes of memory"),
    ("MaxRoiPool", (floats(1, 1, 4, 4), floats(1, 5)), {"pooled_shape": [1, 2**62]}, "bytes of memory"),
    ("LpPool", (floats(1, 1, 4),), {"kernel_shape": [2**40], "auto_pad": "SAME_UPPER"}, "bytes of memory"),
    ("LRN", (floats(1, 3, 2),), {"size": 0}, r"size \(0\) must be positive"),
    ("Split", (floats(4),), {"num_outputs": 0}, r"num_outputs \(0\) is not the number"),
    ("Split", (floats(4),), {"num_outputs": 2**31}, r"num_outputs \(2147483648\) is not the number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operands", "attributes", "match"), REFUSED)
def test_mismatched_operands_are_rejected(
    name: str, operands: tuple[Any, ...], attributes: dict[str, Any], match: str
) -> None:
    for branch in branches(name, operands, **attributes):
        with pytest.raises(OperatorError, match=match) as refusal:
            branch()
        assert_on_purpose(refusal.value)


@pytest.mark.parametrize(
    ("name", "operands", "attributes", "shape"),
    [
        ("ConvTranspose", (floats(0, 2, 3, 3), floats(2, 1, 2, 2)), {}, (0, 1, 4, 4)),
        ("ConvTranspose", (floats(1, 2, 3, 3), floats(2, 0, 2, 2)), {}, (1, 0, 4, 4)),
        ("ConvTranspose", (floats(1, 0, 3, 3), floats(0, 1, 2, 2)), {}, (1, 1, 4, 4)),
        ("Col2Im", (floats(0, 9, 9), ints(5, 5), ints(3, 3)), {}, (0, 1, 5, 5)),
        ("GridSample", (floats(0, 1, 2, 2), floats(0, 3, 3, 2)), {}, (0, 1, 3, 3)),
        ("GridSample", (floats(1, 0, 2, 2), floats(1, 3, 3, 2)), {}, (1, 0, 3, 3)),
        ("Hardmax", (floats(0, 3),), {}, (0, 3)),
        ("Hardmax", (floats(0, 3, 2),), {"opset": 11}, (0, 3, 2)),
        ("TfIdfVectorizer", (zeros(0, 3),), GRAMS, (0, 2)),
        ("Resize", (floats(1, 1, 0, 4), None, None, ints(1, 1, 0, 2)), NOT_LARGER, (1, 1, 0, 2)),
        ("Resize", (floats(1, 1, 2, 4), None, None, ints(1, 1, 0, 2)), {"mode": "linear"}, (1, 1, 0, 2)),
    ],
)
def test_empty_operands(name: str, operands: Any, attributes: dict[str, Any], shape: tuple[int, ...]) -> None:
    for branch in branches(name, operands, **attributes):
        result = branch()
        assert result.size == 0 or not result.any()
        assert result.shape == shape


WORDS, TRUE = np.array(["a", "b"], object), np.ones((1, 3, 4), bool)
STRINGS_BESIDE = "inputs 0 and 1 are int64 and string, and Equal takes one type: put a Cast before one"


@pytest.mark.parametrize(
    ("name", "operands", "cure"),
    [
        ("Cos", [WORDS], "input 0 is string, and Cos takes .*float.* there: put a Cast before it"),
        ("Gather", [floats(2, 3), WORDS], "input 1 is string, and Gather takes int32, int64 there"),
        ("Equal", [ints(1, 2), WORDS], STRINGS_BESIDE),
        ("Xor", [WORDS, np.array([True, False])], "input 0 is string, and Xor takes bool there"),
        ("NonMaxSuppression", [TRUE, floats(1, 1, 3), ints(1)], "input 0 is bool, and NonMaxSuppression takes float"),
        ("SplitToSequence", [floats(5, 2), floats(1)], "input 1 is float, and SplitToSequence takes int32, int64"),
        (
            "GroupNormalization",
            [floats(), floats(4), floats(4)],
            "input 0 of rank 0: GroupNormalization reads more axes",
        ),
        ("Tile", [floats(2), np.float32([2])], "input 1 is float, and Tile takes int64 there"),
    ],
)
def test_invalid_operands_are_rejected(name: str, operands: list[Any], cure: str) -> None:
    """What Python and NumPy raise comes out of the library's own lines: it is the model's fault all the same."""
    attributes = {"num_groups": 2} if name == "GroupNormalization" else {}
    with pytest.raises(OperatorError, match=rf"(?s)node '{name}' .*{cure}"):
        run_op(name, *operands, **attributes)


@pytest.mark.parametrize("jit", [False, True])
def test_feature_operators_reject_numbers(jit: bool) -> None:
    with pytest.raises(OperatorError, match=r"input 1 is a scalar: reshape it to \[1, 1\]"):
        run_op("FeatureVectorizer", floats(2, 3), floats(), domain="ai.onnx.ml", inputdimensions=(3, 1), jit=jit)


@pytest.mark.parametrize(
    ("name", "operands", "place"),
    [
        ("BiasGelu", [WORDS, floats(2)], 0),
        ("BiasGelu", [floats(2), WORDS], 1),
        ("QuickGelu", [WORDS], 0),
        ("GatherND", [floats(2), WORDS.reshape(2, 1)], 1),
    ],
)
def test_strings_into_operators_of_onnxruntime(name: str, operands: list[Any], place: int) -> None:
    """ONNX has no schemas for them, and no types."""
    cure = f"input {place} is string, and com.microsoft.{name} takes no strings there: put a Cast before it"
    with pytest.raises(OperatorError, match=rf"(?s)node '{name}' .*{cure}"):
        run_op(name, *operands, domain="com.microsoft")


def test_jax_errors_name_the_node_and_the_fix() -> None:
    with pytest.raises(OperatorError, match=r"(?s)node 'Add' .*\(2, 3\).*x?in0: .*model.inputs"):
        run_op("Add", floats(2, 3), floats(2), jit=True)


def test_internal_errors_are_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error out of its own lines, for operands that the operator may have."""
    names: dict[str, Any] = {}
    exec(compile("def wrong(*_): return ()[7]", linalg.__file__, "exec"), names)
    monkeypatch.setattr(linalg, "product", names["wrong"])
    with pytest.raises(IndexError, match="tuple") as caught:
        run_op("MatMul", floats(2, 2), floats(2, 2))
    assert not isinstance(caught.value, OperatorError)
    assert "inside node 'MatMul'" in caught.value.__notes__[0]


ONE = np.ones((1, 1, 1, 1), np.float32)
TOO_LARGE = {
    "ConstantOfShape": (ints(10**7, 10**7),),
    "Expand": (ONE, ints(10**7, 10**7)),
    "Tile": (ONE, ints(1, 1, 10**7, 10**7)),
    "Pad": (ONE, ints(0, 0, 0, 0, 0, 0, 10**7, 10**7)),
    "CenterCropPad": (ONE, ints(1, 1, 10**7, 10**7)),
    "Range": (ints(0)[0], ints(10**14)[0], ints(1)[0]),
    "HannWindow": (np.array(10**14),),
    "AffineGrid": (np.ones((1, 2, 3), np.float32), ints(1, 1, 10**7, 10**7)),
    "Resize": (ONE, None, None, ints(1, 1, 10**7, 10**7)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_arrays_larger_than_memory_are_rejected_before_allocation(name: str) -> None:
    inputs = [f"i{k}" if v is not None else "" for k, v in enumerate(TOO_LARGE[name])]
    given = {n: v for n, v in zip(inputs, TOO_LARGE[name], strict=True) if n}
    declared = [value(n, v.dtype, v.shape) for n, v in given.items()]
    proto = model([helper.make_node(name, inputs, ["y"], name="it")], declared, [value("y", np.float32, None)])
    with pytest.raises(OperatorError, match=rf"'it' \({name}(.|\n)*100000(.|\n)*bytes of memory"):
        onnx2jax.convert(proto, static=given)()


def test_errors_of_a_registered_function_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPERATORS", {**registry._OPERATORS})

    @onnx2jax.ops.op("Mine", domain="com.example")
    def mine(x):
        return x["a"] if x.ndim else bool(x)

    node = helper.make_node("Mine", ["x"], ["y"], domain="com.example")
    opsets, outputs = {"com.example": 1}, [value("y", np.float32, None)]
    vector, scalar = (
        jax.jit(onnx2jax.convert(model([node], [value("x", np.float32, shape)], outputs, opsets=opsets)))
        for shape in ([2], [])
    )
    with pytest.raises(OperatorError, match=r"node 'y'(.|\n)*mine \(test_refusals\.py, line \d+\) raised this") as e:
        vector(np.ones(2, np.float32))
    assert "model.inputs" not in str(e.value)
    with pytest.raises(KnownValueError, match=r"mine \(test_refusals\.py, line \d+\) converts .*(.|\n)*jax\.numpy"):
        scalar(np.float32(1))
