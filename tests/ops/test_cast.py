"""Facts about conversions that the official suite does not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e8m0fnu, int4, uint4

from tests.ops.test_elementwise import both, f32
from tests.support.helpers import run_op

INF, NAN = np.inf, np.nan

FLOAT_TO_INTEGER = [  # what x86, and so onnxruntime, gives where ONNX leaves it open
    (np.int8, 3, [3.9, -3.9, 300, -200, NAN, 1e10], [3, -3, 44, 56, 0, 0]),
    (np.uint8, 2, [3.9, -3.9, 300, -200, NAN, INF], [3, 253, 44, 56, 0, 0]),
    (np.int32, 6, [-3.9, 3e9, -3e9, NAN, INF], [-3] + [-(2**31)] * 4),
    (np.uint32, 12, [3e9, -5], [3_000_000_000, 2**32 - 5]),
    (np.int64, 7, [3e9, 1e19, -INF, NAN], [3_000_000_000] + [-(2**63)] * 3),
    (np.uint64, 13, [1e19, -5, NAN, 1e20], [10**19, 2**64 - 5, 2**63, 0]),
    (np.bool_, 9, [0.0, -0.0, 0.1, NAN], [False, False, True, True]),
    (int4, 22, [7.9, 8, -9], [7, -8, 7]),
]


@pytest.mark.parametrize(("dtype", "to", "values", "want"), FLOAT_TO_INTEGER)
def test_float_to_integer(dtype: Any, to: Any, values: Any, want: Any) -> None:
    got = both("Cast", np.array(values), to=to)
    assert got.dtype == dtype and got.astype(object).tolist() == want


def test_integers_wrap() -> None:
    assert both("Cast", np.array([200, -129, 70000]), to=3).tolist() == [-56, 127, 112]
    assert both("Cast", np.array([-1], np.int8), to=13).tolist() == [2**64 - 1]
    assert both("Cast", np.array([-1, 7], int4), to=21).astype(int).tolist() == [15, 7]
    assert both("Cast", np.array([15], uint4), to=22).astype(int).tolist() == [-1]
    assert both("Cast", np.array([70000]), to=10).tolist() == [INF]


def test_float8_saturates_by_default() -> None:
    x = np.array([449.0, 1e6, -INF, NAN])
    assert both("Cast", x, to=17).astype(float).tolist()[:3] == [448, 448, -448]
    assert np.isnan(both("Cast", x, to=17, saturate=0).astype(float)).tolist() == [False, True, True, True]
    assert both("Cast", x, to=19, saturate=0).astype(float).tolist()[1:3] == [INF, -INF]
    assert both("Cast", np.array([1000, 3]), to=17).astype(float).tolist() == [448, 3]
    assert both("CastLike", f32([1e6]), np.zeros(1, float8_e4m3fn), opset=19).astype(float) == 448


E8M0 = [
    ({}, [0.0, 0.124, 1.1, 3.0, 3e38, INF], [2.0**-127, 0.125, 2, 4, 2.0**127, 2.0**127]),
    ({"round_mode": "down"}, [1.9, 3.0], [1, 2]),
    ({"round_mode": "nearest"}, [1.4, 1.5, 3.1], [1, 2, 4]),
    ({"round_mode": "nearest", "saturate": 0}, [1.5, 0.0, 1e-45, 3.4e38, INF], [2, NAN, NAN, NAN, NAN]),
    ({}, [-1.0, NAN], [NAN, NAN]),
]


@pytest.mark.parametrize(("settings", "values", "want"), E8M0)
def test_float8e8m0_round_modes(settings: Any, values: Any, want: Any) -> None:
    got = both("Cast", f32(values), to=24, **settings)
    assert got.dtype == float8_e8m0fnu
    np.testing.assert_array_equal(got.astype(np.float32), f32(want))


def test_float8e8m0_rejects_unknown_round_modes() -> None:
    with pytest.raises(ValueError, match="round_mode"):
        run_op("Cast", f32([1]), to=24, round_mode="sideways")


def test_opset_1_takes_type_names() -> None:
    assert both("Cast", f32([1.5]), opset=1, to="INT64").tolist() == [1]
    with pytest.raises(ValueError, match="FLOTE"):
        run_op("Cast", f32([1]), opset=1, to="FLOTE")


def strings(*values: Any) -> Any:
    return np.array(values, object)


def test_strings_to_numbers() -> None:
    floats = run_op("Cast", strings("3.14", "1e-5", "1E8", "+INF", "inf", "-Inf", "nan"), to=1)
    np.testing.assert_array_equal(floats, f32([3.14, 1e-5, 1e8, INF, INF, -INF, NAN]))
    assert run_op("Cast", strings("100.5", "9007199254740993", "-7"), to=7).tolist() == [100, 2**53 + 1, -7]
    assert run_op("Cast", strings("18446744073709551615"), to=13).tolist() == [2**64 - 1]
    assert run_op("Cast", strings("0", "1", "True", "false"), to=9).tolist() == [False, True, True, False]
    assert run_op("Cast", strings("1.06"), to=16).dtype == bfloat16
    for text, to in [("Hello", 1), ("9223372036854775808", 7), ("inf", 7)]:
        with pytest.raises(ValueError, match="Cast from STRING"):
            run_op("Cast", strings(text), to=to)


def test_numbers_to_strings_are_plain() -> None:
    x = f32([1, 0.1, -2.5, 1e20, 1e-7, NAN, INF, -INF])
    want = ["1", "0.1", "-2.5", "1" + "0" * 20, "0.0000001", "NaN", "INF", "-INF"]
    assert run_op("Cast", x, to=8).tolist() == want
    assert run_op("Cast", np.array([1 / 3]), to=8).tolist() == ["0.3333333333333333"]
    assert run_op("Cast", np.array([[True], [False]]), to=8).tolist() == [["1"], ["0"]]
    assert run_op("CastLike", np.array([-3]), strings("x"), opset=15).tolist() == ["-3"]
    with pytest.raises(TypeError, match="no strings"):
        run_op("Cast", x, to=8, jit=True)


def test_float6_requires_constant_values() -> None:
    assert run_op("Cast", f32([1.3, 99]), to=27).astype(float).tolist() == [1.25, 7.5]
    with pytest.raises(TypeError, match="float6"):
        run_op("Cast", f32([1]), to=27, jit=True)


BITS = [
    (f32([1.0, -0.0]), 12, [0x3F800000, 0x80000000]),
    (np.array([0x3FF0000000000000], np.uint64), 11, [1.0]),
    (np.array([-1, 3], int4), 21, [15, 3]),
    (np.array([0, 1], np.uint8), 9, [False, True]),
    (np.array([True, False]), 3, [1, 0]),
    (np.array([1.0], np.complex64), 7, [0x3F800000]),
    (np.array([0x3F800000], np.int64), 14, [1.0]),
]


@pytest.mark.parametrize(("x", "to", "want"), BITS)
def test_bitcast(x: Any, to: Any, want: Any) -> None:
    known = run_op("BitCast", x, to=to)
    traced = np.asarray(run_op("BitCast", x, to=to, jit=True))
    assert known.dtype == traced.dtype and known.tolist() == traced.tolist() == want


def test_bitcast_rejects_other_widths() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        run_op("BitCast", f32([1]), to=7)
