"""Rules TD: how tensors are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onnx2jax
from onnx2jax.errors import ModelError
from onnx2jax.proto.messages import TensorProto
from onnx2jax.proto.tensors import from_array, to_array
from tests.conformance.test_types import stored
from tests.support.cases import F, clean, parse, refused, refused_when_strict, rule, rules_of, run, same


@rule("TD-01")
def test_data_is_stored_once() -> None:
    refused(stored(1, [2]), "TD-13", match="TD-13", error=ModelError)
    # onnxruntime and the reference evaluator silently prefer raw_data.
    refused(stored(1, [1], raw_data=bytes(4), float_data=[1]), "TD-01", match="TD-01", error=ModelError)
    refused(stored(1, [0], float_data=[1]), "TD-13", error=ModelError)


@rule("TD-02")
def test_the_last_axis_is_the_fastest() -> None:
    same(clean(stored(1, [2, 3], float_data=range(6))), [[0, 1, 2], [3, 4, 5]])


@rule("TD-03")
def test_raw_data_is_little_endian() -> None:
    same(clean(stored(5, [2], raw_data=b"\x01\x00\x00\x80")), np.int16([1, -32768]))
    same(clean(stored(1, [1], raw_data=b"\x00\x00\x80\x3f")), F([1]))
    same(clean(stored(7, [1], raw_data=b"\x00\x01" + bytes(6))), [256])


FIELDS: dict[str, tuple[int, Any]] = {
    "float_data": (1, [1.5, -2]),
    "double_data": (11, [1.5, -2]),
    "int64_data": (7, [2**40, -1]),
    "uint64_data": (13, [2**63, 1]),
    "string_data": (8, [b"a", b""]),
    "int32_data": (6, [-5, 5]),
}


@rule("TD-04")
@pytest.mark.parametrize("field", FIELDS)
def test_each_type_has_its_field(field: str) -> None:
    code, values = FIELDS[field]
    expected = ["a", ""] if field == "string_data" else values
    (result,) = onnx2jax.convert(stored(code, [2], **{field: values})).run(None, {})
    assert result.tolist() == expected
    if field == "uint64_data":
        assert clean(stored(12, [1], uint64_data=[2**32 - 1])) == 2**32 - 1


@rule("TD-04")
@pytest.mark.parametrize(
    ("code", "data"), [(10, {"float_data": [1]}), (12, {"int32_data": [1]}), (7, {"int32_data": [1]})]
)
def test_the_field_of_another_type_is_refused(code: int, data: Any) -> None:
    refused(stored(code, [1], **data), "TD-13", error=ModelError)


@rule("TD-05")
def test_small_integers_are_stored_by_value() -> None:
    same(clean(stored(3, [2], int32_data=[-1, 127])), np.int8([-1, 127]))
    same(clean(stored(2, [2], int32_data=[255, 1])), np.uint8([255, 1]))
    same(clean(stored(4, [1], int32_data=[65535])), np.uint16([65535]))
    same(refused_when_strict(stored(2, [1], int32_data=[256]), "TD-05")(), [0])  # others wrap too


@rule("TD-06")
@pytest.mark.parametrize(("code", "pattern"), [(10, 0x3C00), (16, 0x3F80), (17, 0x38), (19, 0x3C), (24, 127)])
def test_small_floats_in_int32_data_are_bit_patterns(code: int, pattern: int) -> None:
    same(run(stored(code, [1], int32_data=[pattern])).astype(F), [1])


@rule("TD-07", "TD-08")
def test_four_bit_values_are_packed_two_to_a_byte() -> None:
    same(run(stored(22, [5], int32_data=[0x21, 0x43, 0x05])).astype(int), [1, 2, 3, 4, 5])
    # Eight to an entry passes the checker of the onnx package, but is undefined.
    refused(stored(22, [8], int32_data=[0x76543210]), "TD-13", error=ModelError)


@rule("TD-12")
def test_strings_are_stored_in_string_data_only() -> None:
    refused(stored(8, [1], raw_data=b"a"), "TD-12", error=ModelError)
    external = stored(8, [1])
    external.graph.initializer[0].data_location = 1
    external.graph.initializer[0].external_data.add(key="location", value="f")
    refused(external, "TD-12", error=ModelError)  # the checker misses this one


@rule("TD-13")
@pytest.mark.parametrize(
    ("dims", "data"), [([3], {"float_data": [1, 2]}), ([1], {"float_data": [1, 2]}), ([1], {"raw_data": bytes(8)})]
)
def test_the_number_of_elements_has_to_match_the_dims(dims: list[int], data: Any) -> None:
    refused(stored(1, dims, **data), "TD-13", error=ModelError)  # the checker accepts surplus


@rule("TD-14")
def test_segments_are_refused() -> None:
    proto = stored(1, [2], float_data=[1, 2])
    proto.graph.initializer[0].segment.begin, proto.graph.initializer[0].segment.end = 0, 2
    refused(proto, "TD-14", match="join it", error=ModelError)  # onnxruntime ignores it


@rule("TD-15")
def test_both_wire_forms_of_repeated_numbers_are_read() -> None:
    packed = b"\x22\x08" + F([1, 2]).tobytes()
    unpacked = b"".join(b"\x25" + F(v).tobytes() for v in (1, 2))
    for dims in (b"\x08\x02", b"\x0a\x01\x02"):
        for data in (packed, unpacked):
            message = dims + b"\x10\x01" + data
            same(to_array(TensorProto.FromString(message)), F([1, 2]))
            model = stored(1, [2])  # and in a file
            model.graph.initializer[0].Clear()
            file = model.SerializeToString()
            named = message + b"\x42\x01w"
            assert file.count(b"\x2a\x00") == 1
            graph = model.graph.SerializeToString().replace(b"\x2a\x00", b"\x2a" + bytes([len(named)]) + named)
            model.ClearField("graph")
            same(run(model.SerializeToString() + b"\x3a" + bytes([len(graph)]) + graph), [1, 2])


@rule("TD-03")
def test_the_byte_order_of_the_host_does_not_matter() -> None:
    for kind in ("f4", "i2", "f8", "c8", "u8"):
        numbers = np.array([1, 2, 258], kind)
        assert from_array(numbers.astype(">" + kind))["raw_data"] == numbers.astype("<" + kind).tobytes()


@rule("TD-16")
def test_weights_are_arguments_not_literals() -> None:
    proto = parse("g (float[1, 1000] x) => (float[1, 1000] y) { y = MatMul (x, w) }")
    proto.graph.initializer.add(name="w", data_type=1, dims=[1000, 1000], raw_data=bytes(4_000_000))
    m = onnx2jax.convert(proto)
    text = jax.jit(m.apply).lower(m.params, np.zeros((1, 1000), F)).as_text()
    assert len(text) < 10_000


@rule("TD-17")
def test_small_types_keep_their_name() -> None:
    proto = parse("g () => (int4[5] w, float[5] y) { y = Cast <to = 1> (w) }")
    proto.graph.initializer.add(name="w", data_type=22, dims=[5], raw_data=b"\x21\x8f\x07")
    w, y = onnx2jax.convert(proto)()
    assert w.dtype == jnp.int4
    same(y, [1, 2, -1, -8, 7])
    assert rules_of(proto) == set()
