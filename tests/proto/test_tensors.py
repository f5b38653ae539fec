"""Tensors in every encoding (rules TD-01 to TD-17, TY-01 to TY-13)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx2jax.errors import ModelError
from onnx2jax.proto.messages import SparseTensorProto, TensorProto
from onnx2jax.proto.tensors import from_array, to_array, to_dense
from onnx2jax.proto.types import ELEMENT_TYPES, STRING, to_code, to_dtype
from tests.support.violations import every_case

NUMERIC = [code for code in ELEMENT_TYPES if code != STRING]
ONNX = [code for code in NUMERIC if code <= 26]
"""Those that the onnx package knows."""
NAMES = {code: row.name for code, row in ELEMENT_TYPES.items()}


def values(code: int, count: int = 5) -> np.ndarray:
    """Elements that together set every bit."""
    row = ELEMENT_TYPES[code]
    rng = np.random.default_rng(code)
    if row.name == "BOOL":
        return rng.integers(0, 2, count).astype(bool)
    if row.bits < 8:
        return to_array(TensorProto(data_type=code, dims=[count], raw_data=rng.bytes(-(-count * row.bits // 8))))
    return np.frombuffer(rng.bytes(count * row.dtype.itemsize), row.dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def written(code: int) -> TensorProto:
    return TensorProto(**from_array(values(code), "x"))


def test_raw_data_and_the_writer_are_inverse() -> None:
    assert [NAMES[code] for code in NUMERIC if not same_bits(to_array(written(code)), values(code))] == []


def test_raw_data_matches_the_onnx_package() -> None:
    theirs = {c: numpy_helper.to_array(onnx.TensorProto.FromString(written(c).SerializeToString())) for c in ONNX}
    assert [NAMES[code] for code in ONNX if not same_bits(to_array(written(code)), theirs[code])] == []


def test_typed_fields_match_the_onnx_package() -> None:
    with every_case() as case:
        for code in ONNX:
            array = np.array([0, 1, 1, 0, 1] if NAMES[code] == "BOOL" else [1, 2, 0, 1, 2]).astype(to_dtype(code))
            theirs = helper.make_tensor("x", code, [5], array)
            with case(NAMES[code]):
                assert not theirs.HasField("raw_data")
                ours = to_array(TensorProto.FromString(theirs.SerializeToString()))
                assert same_bits(ours, numpy_helper.to_array(theirs))


def test_half_precision_in_int32_data_is_a_bit_pattern() -> None:
    assert to_array(TensorProto(data_type=10, dims=[1], int32_data=[0x3C00]))[0] == np.float16(1)
    assert to_array(TensorProto(data_type=16, dims=[1], int32_data=[0x3F80]))[0] == ml_dtypes.bfloat16(1)
    assert to_array(TensorProto(data_type=17, dims=[1], int32_data=[0x38]))[0] == ml_dtypes.float8_e4m3fn(1)


def test_four_bit_entries_are_packed_bytes_low_nibble_first() -> None:
    tensor = TensorProto(data_type=22, dims=[3], int32_data=[0xF1, 0x08])
    np.testing.assert_array_equal(to_array(tensor).astype(np.int8), [1, -1, -8])


def test_two_bit_values_are_sign_extended() -> None:
    tensor = TensorProto(data_type=26, dims=[4], raw_data=bytes([0b11_10_01_00]))
    np.testing.assert_array_equal(to_array(tensor).astype(np.int8), [0, 1, -2, -1])


def test_negative_small_integers_are_kept_by_value() -> None:
    np.testing.assert_array_equal(to_array(TensorProto(data_type=3, dims=[2], int32_data=[-1, -128])), [-1, -128])


def test_uint32_is_stored_in_uint64_data() -> None:
    np.testing.assert_array_equal(to_array(TensorProto(data_type=12, dims=[1], uint64_data=[2**32 - 1])), [2**32 - 1])


def test_any_nonzero_byte_is_true() -> None:
    np.testing.assert_array_equal(to_array(TensorProto(data_type=9, dims=[3], raw_data=b"\x00\x02\xff")), [0, 1, 1])


def test_complex_numbers_are_pairs() -> None:
    np.testing.assert_array_equal(to_array(TensorProto(data_type=14, dims=[1], float_data=[1, 2])), [1 + 2j])


def test_strings_are_decoded_and_survive_bad_utf8() -> None:
    tensor = TensorProto(data_type=STRING, dims=[2], string_data=["ü".encode(), b"\xff"])
    array = to_array(tensor)
    assert array[0] == "ü"
    assert list(TensorProto(**from_array(array)).string_data) == [b"\xc3\xbc", b"\xff"]


def test_scalar_and_vector_of_one_differ() -> None:
    assert to_array(TensorProto(data_type=1, float_data=[1])).shape == ()
    assert to_array(TensorProto(data_type=1, dims=[1], float_data=[1])).shape == (1,)


def test_zero_size_keeps_its_shape() -> None:
    assert to_array(TensorProto(data_type=1, dims=[5, 0])).shape == (5, 0)


def test_both_wire_forms_of_repeated_numbers_are_read() -> None:
    packed = b"\x22\x08" + np.float32([1, 2]).tobytes()
    unpacked = b"".join(b"\x25" + np.float32(v).tobytes() for v in (1, 2))
    for data in (packed, unpacked):
        tensor = TensorProto.FromString(b"\x08\x02\x10\x01" + data)
        np.testing.assert_array_equal(to_array(tensor), [1, 2])


def test_raw_data_is_not_copied_twice() -> None:
    array = to_array(TensorProto(data_type=1, dims=[4], raw_data=bytes(16)))
    assert isinstance(array.base, np.ndarray | bytes) and not array.flags.writeable


BROKEN = {
    "unknown element type": (TensorProto(data_type=99, dims=[1], raw_data=b"0"), "element type 99"),
    "undefined element type": (TensorProto(dims=[0]), "element type 0"),
    "negative extent": (TensorProto(data_type=1, dims=[-1]), "negative extent"),
    "too little raw data": (TensorProto(data_type=1, dims=[2], raw_data=bytes(4)), "needs 8 bytes of raw_data"),
    "too much raw data": (TensorProto(data_type=1, dims=[1], raw_data=bytes(8)), "needs 4 bytes of raw_data"),
    "too few entries": (TensorProto(data_type=1, dims=[2], float_data=[1]), "needs 2 entries of float_data"),
    "no data": (TensorProto(data_type=7, dims=[2]), "needs 2 entries of int64_data"),
    "huge extents": (TensorProto(data_type=1, dims=[2**62, 4], raw_data=b""), "needs"),
    "raw strings": (TensorProto(data_type=STRING, dims=[1], raw_data=b"a"), "string_data"),
    "segment": (TensorProto(data_type=1, segment=TensorProto.Segment(begin=0)), "segment"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensor_is_refused(case: str) -> None:
    tensor, message = BROKEN[case]
    with pytest.raises(ModelError, match=message):
        to_array(tensor)


def sparse(dims: list[int], array: list[float], indices: object) -> object:
    return SparseTensorProto(
        dims=dims, values=TensorProto(**from_array(np.float32(array), "s")), indices=TensorProto(**from_array(indices))
    )


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]], ids=["linear", "coordinates"])
def test_sparse_tensors(indices: list[Any]) -> None:
    dense = to_dense(sparse([2, 3], [1, 2], np.array(indices)))
    np.testing.assert_array_equal(dense, [[0, 1, 0], [0, 0, 2]])


@pytest.mark.parametrize("indices", [[1, 6], [-1, 2], [5, 1], [1, 1], [1], [[0, 1, 0], [1, 2, 0]], [[0, 3], [1, 0]]])
def test_bad_sparse_indices_are_refused(indices: list[int]) -> None:
    with pytest.raises(ModelError, match="rule GR-11"):
        to_dense(sparse([2, 3], [1, 2], np.array(indices)))


def test_codes_and_dtypes_are_inverse() -> None:
    assert all(to_code(to_dtype(code)) == code for code in ELEMENT_TYPES)
    assert to_code(np.array(["a"]).dtype) == STRING
    with pytest.raises(ValueError, match="no element type"):
        to_code(np.dtype("datetime64[s]"))
