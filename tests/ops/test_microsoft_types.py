"""Every com.microsoft operator in every element type that onnxruntime's schema documents, compiled.

The judge is onnxruntime where its CPU provider runs the type, and otherwise the same call in the types of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

import onnx2jax
from onnx2jax import compat
from onnx2jax.proto.types import ELEMENT_TYPES
from tests.ops import (
    test_microsoft_blocks,
    test_microsoft_decoding,
    test_microsoft_packed,
    test_microsoft_ragged,
    test_microsoft_recurrent,
    test_microsoft_sparse,
    test_microsoft_streams,
    test_microsoft_tensors,
)
from tests.ops.test_microsoft import CASES, HEADS, HIDDEN, I32, MICROSOFT, bytes_, onnxruntime_says, real, scalar
from tests.support.drawing import is_float, limits
from tests.support.joined import joined, traced_call

DTYPES = {row.name.lower(): row.dtype for row in ELEMENT_TYPES.values()}
SCALE, ZERO = scalar(0.02), scalar(3, np.uint8)
IMAGE, PIXELS = real(1, 8, 5, 5), np.abs(bytes_(np.int8, 1, 4, 5, 5)).astype(np.uint8) // 2
BYTES = np.abs(bytes_(np.int8, 3, 8)).astype(np.uint8) // 2
LAST = np.moveaxis(IMAGE, 1, -1).copy()
Q, Q1 = (BYTES, SCALE, ZERO), (SCALE, ZERO)
LSTM = {"hidden_size": 8}
GATES = np.full((1, 32), 0.004, np.float32), np.zeros((1, 32), np.uint8)
WEIGHTS = bytes_(np.int8, 1, 4, 32).astype(np.uint8) // 4, bytes_(np.int8, 1, 8, 32).astype(np.uint8) // 4
PROJECTED = bytes_(np.uint8, 2, 3, 16) // 2, bytes_(np.uint8, 16, 3 * HIDDEN) // 2
ROUTER = np.array([[2, -1, 1, 0], [0, 3, 1, -2], [1, 0, -1, 2], [-1, 1, 3, 0], [0.5, -0.5, 1.5, 2.5]], np.float32)
EXPERTS = {"activation_type": "swiglu", "k": 2, "normalize_routing_weights": 1, "swiglu_fusion": 1}
PACKED = [bytes_(np.uint8, 4, 32, 8), abs(real(4, 32)) / 8, bytes_(np.uint8, 4, 16, 8), abs(real(4, 16)) / 8]
GATED = [real(2, 3, 16), real(2, 3, 8), real(2, 3, 8)]
SHARED = {"kv_num_heads": 2, "q_num_heads": 4}

# operator, inputs, outputs, attributes: what test_microsoft.py's table has no row for
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    ("BiasAdd", [real(2, 6, 8), real(8), real(2, 6, 8)], 1, {}),
    ("BiasSplitGelu", [real(2, 3, 8), real(8)], 1, {}),
    ("DequantizeLinear", [*Q], 1, {}),
    ("DynamicQuantizeLSTM", [real(5, 1, 4), *WEIGHTS, real(1, 64), *[None] * 4, *GATES, *GATES], 3, LSTM),
    ("ExpandDims", [real(2, 3), I32(1)], 1, {}),
    ("GatherND", [real(4, 3), np.array([[1], [-1]])], 1, {}),
    ("Gelu", [real(2, 8)], 1, {}),
    ("GemmFastGelu", [real(3, 4), real(4, 5), real(5)], 1, {}),
    ("GroupNorm", [LAST, real(8), real(8)], 1, {"activation": 1, "groups": 2}),
    ("Inverse", [real(2, 3, 3) + 3 * np.eye(3, dtype=np.float32)], 1, {}),
    (
        "MatMulNBits",
        [real(2, 32), bytes_(np.uint8, 3, 2, 8), real(3, 2), bytes_(np.uint8, 3, 1)],
        1,
        {"K": 32, "N": 3, "bits": 4, "block_size": 16},
    ),
    ("MoE", [real(5, 8), ROUTER, real(4, 12, 8), real(4, 12), real(4, 8, 6), real(4, 8)], 1, EXPERTS),
    ("MulInteger", [BYTES, ZERO, BYTES, ZERO], 1, {}),
    ("QMoE", [real(5, 16), ROUTER, *PACKED[:2], real(4, 32), *PACKED[2:], real(4, 16)], 1, EXPERTS),
    ("CausalConvWithState", [real(2, 4, 5), real(4, 1, 3), real(4), real(2, 4, 4)], 2, {"dilation": 2}),
    ("LinearAttention", [*GATED, real(2, 2, 4, 4), -abs(real(2, 3, 2)), abs(real(2, 3, 2))], 2, SHARED),
    ("LinearAttentionGate", [real(2, 3, 4), real(4), -abs(real(4)), real(2, 3, 4)], 2, {}),
    ("NhwcConv", [LAST, real(4, 8, 3, 3), real(4)], 1, {"pads": (1, 1, 1, 1)}),
    ("NhwcFusedConv", [LAST, real(4, 8, 3, 3), real(4)], 1, {"activation": "Relu"}),
    ("NhwcMaxPool", [np.moveaxis(PIXELS, 1, -1).copy()], 1, {"kernel_shape": (2, 2)}),
    ("Pad", [real(2, 3), np.array([0, 1, 2, 0]), real(1)], 1, {}),
    (
        "QAttention",
        [*PROJECTED, real(3 * HIDDEN), SCALE, scalar(0.002), None, ZERO, ZERO],
        1,
        {"num_heads": HEADS},
    ),
    ("QLinearAdd", [*Q, *Q, *Q1], 1, {}),
    ("QLinearMul", [*Q, *Q, *Q1], 1, {}),
    ("QLinearAveragePool", [PIXELS, *Q1, *Q1], 1, {"kernel_shape": (2, 2)}),
    ("QLinearGlobalAveragePool", [PIXELS, *Q1, *Q1], 1, {}),
    ("QLinearConv", [PIXELS, *Q1, PIXELS[:, :, :3, :3].copy(), *Q1, scalar(1.0), ZERO, I32([5])], 1, {}),
    ("QLinearReduceMean", [*Q, *Q1], 1, {"axes": (1,), "keepdims": 1}),
    ("QLinearSigmoid", [*Q, scalar(0.005), ZERO], 1, {}),
    ("QLinearSoftmax", [*Q, scalar(0.005), ZERO], 1, {"axis": -1, "opset": 13}),
    ("QLinearWhere", [BYTES > 20, *Q, *Q, *Q1], 1, {}),
    ("QuantizeLinear", [real(3, 8), SCALE, scalar(3, np.int16)], 1, {}),
    ("Range", [scalar(1.0), scalar(9.0), scalar(2.0)], 1, {}),
    ("SkipGroupNorm", [LAST, real(8), real(8), LAST[::-1].copy(), real(8)], 2, {"activation": 0, "groups": 2}),
    ("SkipSimplifiedLayerNormalization", [real(2, 3, 8), real(2, 3, 8), real(8)], 1, {}),
    ("TransposeMatMul", [real(4, 3), real(4, 5)], 1, {"transA": 1}),
    ("Trilu", [real(3, 4), np.array(1)], 1, {"upper": 0}),
]

LEFT_OUT = {
    ("ConvStateReplay", "T"): "its offsets are in bytes: tests/ops/test_microsoft_ragged.py has float16",
    ("DecoderMaskedSelfAttention", "T"): "the order of its keys differs with the type: test_microsoft_decoding.py",
    **dict.fromkeys(
        [("PagedAttention", "T"), ("PagedAttention", "T_CACHE")],
        "a cache of another type than the queries is quantized, which is refused",
    ),
    **dict.fromkeys(
        [("DynamicSparseAttention", t) for t in ("T", "TQuery", "TValue", "TCache")],
        "queries, keys, values and caches are of one type here: tests/ops/test_microsoft_sparse.py",
    ),
    ("GatherBlockQuantized", "float"): "in onnxruntime's schema, but in none of its kernels",
    ("GatherBlockQuantized", "T1"): "packed and unpacked data differ in shape: test_microsoft.py has both",
    ("GroupQueryAttention", "T_CACHE"): "another type than the queries' needs scales: test_microsoft_caches.py",
    ("MatMulNBits", "T3"): "packed and real zero points differ in shape: test_microsoft.py has both",
    ("QMoE", "float8"): "weights and scales of quant_type fp8, which is refused",
    ("FusedGemm", "int"): "the row's activation makes fractions of integers",
    ("FusedGemm", "uint"): "the row's activation makes fractions of integers",
    **dict.fromkeys(
        [("GridSample", kind) for kind in ("int", "uint", "bool", "complex")],
        "the schema leaves the result of other than floating tensors open",
    ),
    ("MatMulInteger16", "uint"): "two unsigned matrices: test_microsoft_tensors.py; one is refused",
}
"""(operator, a type parameter or the beginning of a type's name) that the row cannot take, with the reason."""
SCHEMAS = {s.name: s for s in onnxruntime_state.get_all_operator_schema() if s.domain == MICROSOFT}
OTHERS = {
    **dict.fromkeys(("BeamSearch", "GreedySearch", "Sampling"), "their graphs: tests/ops/test_microsoft_generation.py"),
    "WhisperBeamSearch": "its graphs: tests/ops/test_microsoft_whisper.py",
    "MurmurHash3": "on the host: tests/ops/test_text.py",
    "Tokenizer": "strings alone: tests/ops/test_text.py",
    "SimplifiedLayerNormalization": "onnxruntime documents it in ONNX's own domain, where the types are tested",
}
FAMILIES: Any = (
    test_microsoft_blocks,
    test_microsoft_decoding,
    test_microsoft_packed,
    test_microsoft_ragged,
    test_microsoft_recurrent,
    test_microsoft_sparse,
    test_microsoft_streams,
    test_microsoft_tensors,
)
"""Files with tables of their own."""
CASES_AND_ROWS = [*CASES, *ROWS, *(row for file in FAMILIES for row in file.ROWS)]
TABLE = {name: (inputs, outputs, attributes) for name, inputs, outputs, attributes in reversed(CASES_AND_ROWS)}
AS_IT_IS = "as it is"
TOLERANCE = {"float16": 1e-2, "bfloat16": 6e-2}


def _variants(name: str) -> Iterator[tuple[str, list[Any]]]:
    """The row's inputs with one type parameter in each type that the schema allows it."""
    inputs, schema = TABLE[name][0], SCHEMAS[name]
    yield AS_IT_IS, inputs
    for constraint in schema.type_constraints:
        parameter, last = constraint.type_param_str, len(schema.inputs) - 1
        places = [p for p, x in enumerate(inputs) if x is not None and _type(schema.inputs[min(p, last)]) == parameter]
        kind = np.bool_ if not places else inputs[places[0]].dtype
        for word in (t[len("tensor(") : -1] for t in constraint.allowed_type_strs):
            excused = any(o == name and (t == parameter or word.startswith(t)) for o, t in LEFT_OUT)
            if places and not excused and word != "string" and DTYPES[word] != kind:
                dtype = DTYPES[word]
                yield word, [_converted(x, dtype) if p in places else x for p, x in enumerate(inputs)]


def _type(formal: Any) -> str:
    return getattr(formal, "typeStr", None) or formal.type_str


def _converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same numbers, for integers such as both types have."""
    if x.dtype.kind in "iu" and not is_float(dtype):
        x = x % (8 if dtype.name.endswith("int4") else 64)
    return (abs(x) if dtype.name.startswith("uint") else x).astype(dtype)


def _call(name: str, inputs: list[Any]) -> tuple[Callable[..., Any], tuple[dict[int, Any]]]:
    return traced_call((name, inputs, *TABLE[name][1:]))


def _in_types_of_the_row(names: list[str], variants: dict[tuple[str, str], list[Any]]) -> dict[tuple[str, str], Any]:
    """The results of all variants with their inputs in the types of the row: one program, which takes one of each."""
    rows = {name: _call(name, TABLE[name][0]) for name in names}
    program = jax.jit(lambda operands: {name: rows[name][0](x) for name, x in operands.items()})
    results, others = {}, {}
    for some in zip_longest(*([key for key in variants if key[0] == name] for name in names)):
        operands = {name: traced for name, (_, (traced,)) in rows.items()}
        for key in filter(None, some):
            row = TABLE[key[0]][0]
            inputs = [x if x is None else np.real(x).astype(r.dtype) for x, r in zip(variants[key], row, strict=True)]
            traced = operands[key[0]]
            operands[key[0]] = {p: inputs[p] for p in traced}
            if not all(
                np.array_equal(x, r) for p, (x, r) in enumerate(zip(inputs, row, strict=True)) if p not in traced
            ):
                others[key] = _call(key[0], inputs)
        with compat.enable_x64():
            found = program(operands)
        results |= {key: found[key[0]] for key in some if key}
    return results | joined(others)


NAMES = [name for name in TABLE if name in SCHEMAS]
IN_BFLOAT16 = [name for name in NAMES if "bfloat16" in dict(_variants(name))]
PARTS = [pytest.param(NAMES[i::2], {AS_IT_IS, *DTYPES} - {"bfloat16"}, id=f"part {i + 1} of 2") for i in range(2)]
"""Several programs hold all operators: one of all would take much memory to compile."""
PARTS += [pytest.param(IN_BFLOAT16, {"bfloat16"}, id="bfloat16, beside float16", marks=pytest.mark.extended)]


@pytest.mark.parametrize(("names", "words"), PARTS)
def test_every_element_type(names: list[str], words: set[str], subtests: pytest.Subtests) -> None:
    variants = {(name, word): x for name in names for word, x in _variants(name) if word in words}
    plain = _in_types_of_the_row(names, variants)
    typed = plain | joined({key: _call(key[0], x) for key, x in variants.items() if key[1] != AS_IT_IS})
    for (name, word), inputs in variants.items():
        with subtests.test(msg=f"{name}: {word}"):
            results, expected = ([np.asarray(v) for v in found[name, word]] for found in (typed, plain))
            _compare(name, inputs, results, expected)


def _compare(name: str, inputs: list[Any], results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Compare results with onnxruntime's, or, where it has no kernel, with those of the same numbers in other types."""
    low, high = -np.inf, np.inf
    try:
        expected = onnxruntime_says(name, inputs, *TABLE[name][1:])
    except Exception:
        if all(y.dtype.kind not in "fc" and y.dtype != v.dtype for y, v in zip(results, expected, strict=True)):
            low, high = 0, min(limits(v.dtype)[1] for v in (results[0], expected[0]))  # where quantized ranges meet
    schema = SCHEMAS[name]
    tolerance = max(TOLERANCE.get(x.dtype.name, 2e-4) for x in (*inputs, *results) if x is not None)
    for formal, result, want in zip(schema.outputs, results, expected, strict=False):
        same = [x for x, f in zip(inputs, schema.inputs, strict=False) if _type(f) == _type(formal)]
        assert all(x is None or x.dtype == result.dtype for x in same)
        assert result.shape == want.shape
        wide = np.complex128 if result.dtype.kind == "c" else np.float64
        step = 1 if result.dtype.kind in "iu" else 0  # of quantized values one may round the other way
        a, b = (v.astype(wide) if wide is np.complex128 else v.astype(wide).clip(low, high) for v in (result, want))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=max(tolerance, step))


def test_every_operator_has_a_row() -> None:
    assert set(TABLE) | set(OTHERS) == set(onnx2jax.supported()[MICROSOFT])
    assert {name for name, _ in LEFT_OUT} <= set(TABLE)
