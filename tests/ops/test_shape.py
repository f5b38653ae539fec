"""Shape and layout: symbolic extents, empty tensors, old forms, every type, what must be refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from onnx2jax import compat
from onnx2jax.ops import shape
from tests.support.branches import both
from tests.support.helpers import run_op

RNG = np.random.default_rng(0)


def ints(*values):
    return np.array(values, np.int64)


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_shape_arithmetic_exports_with_symbolic_extents():
    """Shape -> Gather -> ReduceProd -> Concat -> Reshape, Expand, Range and ConstantOfShape, without a number."""

    def call(x):
        shape = run_op("Shape", x)
        assert isinstance(shape, np.ndarray)
        rows = run_op("ReduceProd", run_op("Gather", shape, ints(0, 1)), keepdims=1)
        flat = run_op("Reshape", x, run_op("Concat", rows, ints(-1), axis=0))
        length = run_op("Gather", shape, np.array(1))
        steps = run_op("Range", np.array(0), length, np.array(1))
        zeros = run_op("ConstantOfShape", run_op("Slice", shape, ints(0), ints(2)))
        spread = run_op("Expand", np.ones((1, 1), np.float32), shape[:2])
        tail = run_op("Slice", x, ints(-1, 1), ints(-(2**63), 2**63 - 1), ints(2, 1), ints(-1, 1))
        return flat, steps, zeros, spread, tail

    from jax import export

    batch, length = export.symbolic_shape("batch, length", constraints=["length >= 2"])
    with compat.enable_x64():
        exported = export.export(jax.jit(call))(jax.ShapeDtypeStruct((batch, length, 6), jnp.float32))
        results = exported.call(jnp.ones((2, 5, 6), jnp.float32))
    assert [r.shape for r in results] == [(10, 6), (5,), (2, 5), (2, 5), (2, 4, 6)]


@pytest.mark.parametrize(
    ("shape", "target", "attributes", "expected"),
    [
        ((2, 3, 4), (0, -1), {}, (2, 12)),
        ((2, 3, 4), (4, 0, -1), {}, (4, 3, 2)),
        ((0, 3, 4), (0, -1), {}, (0, 12)),  # the copied empty extent cancels out
        ((0, 3), (3, 0), {"allowzero": 1}, (3, 0)),
        ((1,), (), {}, ()),
    ],
)
def test_reshape(shape, target, attributes, expected):
    assert both("Reshape", floats(*shape), ints(*target), **attributes).shape == expected


@pytest.mark.parametrize(
    ("shape", "target", "attributes"),
    [
        ((2, 3), (4, -1), {}),
        ((2, 3), (-1, -1), {}),
        ((0, 3), (0, -1), {"allowzero": 1}),
        ((2,), (1, 0), {}),
        ((2, 3), (2, 2), {}),
    ],
)
def test_reshape_rejects_invalid_shapes(shape, target, attributes):
    with pytest.raises(ValueError, match="shape"):
        run_op("Reshape", floats(*shape), ints(*target), **attributes)


def test_attributes_of_old_opsets():
    x = floats(1, 2, 1)
    np.testing.assert_array_equal(both("Reshape", x, opset=1, shape=(2, -1)), [[0], [1]])
    assert both("Squeeze", x, opset=1, axes=(0,)).shape == both("Squeeze", x, ints(-3)).shape == (2, 1)
    assert both("Squeeze", x).shape == (2,)
    assert (
        both("Unsqueeze", x, opset=11, axes=(-1, 0)).shape == both("Unsqueeze", x, ints(0, 4)).shape == (1, 1, 2, 1, 1)
    )
    assert both("Concat", floats(2, 2), floats(2, 1), opset=1, traced=(0, 1)).shape == (2, 3)  # along axis 1
    tiled = both("Tile", floats(2, 1), np.array(3, np.float32), np.array(1, np.float32), opset=1)  # counts as floats
    np.testing.assert_array_equal(tiled, both("Tile", floats(2, 1), ints(1, 3)))
    for opset, attributes in ((1, {"paddings": (1, 0, 0, 1)}), (2, {"pads": (1, 0, 0, 1)})):
        y = both("Pad", np.ones((1, 1), np.float16), opset=opset, value=2.0, **attributes)
        np.testing.assert_array_equal(y, np.array([[2, 2], [1, 2]], np.float16), strict=True)


@pytest.mark.parametrize(
    ("opset", "inputs", "attributes", "expected"),
    [
        (1, (), {}, [2, 2, 2]),
        (2, (), {"split": (1, 3, 2)}, [1, 3, 2]),
        (13, (ints(1, 0, 5),), {"axis": -1}, [1, 0, 5]),
        (13, (), {}, [2, 2, 2]),
        (18, (), {"num_outputs": 4}, [2, 2, 2, 0]),
        (18, (), {"num_outputs": 2}, [3, 3]),
    ],
)
def test_split(opset, inputs, attributes, expected):
    parts = both("Split", floats(6), *inputs, opset=opset, n_outputs=len(expected), **attributes)
    assert [len(p) for p in parts] == expected
    np.testing.assert_array_equal(np.concatenate(parts), floats(6))


def test_split_uneven():
    sizes = [len(p) for p in both("Split", floats(7), num_outputs=3, n_outputs=3)]
    assert sizes == [3, 3, 1]
    with pytest.raises(ValueError, match="evenly"):
        run_op("Split", floats(7), opset=13, n_outputs=3)
    with pytest.raises(ValueError, match="sum to the extent 7"):
        run_op("Split", floats(7), ints(3, 3), n_outputs=2)


@pytest.mark.parametrize(
    ("x", "pads", "mode", "expected"),
    [
        ([1, 2, 3], (1, 2), "constant", [0, 1, 2, 3, 0, 0]),
        ([1, 2, 3], (-1, 1), "constant", [2, 3, 0]),
        ([1, 2, 3], (2, 2), "reflect", [3, 2, 1, 2, 3, 2, 1]),
        ([1, 2, 3], (3, 1), "edge", [1, 1, 1, 1, 2, 3, 3]),
        ([1, 2, 3], (2, 4), "wrap", [2, 3, 1, 2, 3, 1, 2, 3, 1]),
        ([1, 2, 3], (-1, 2), "edge", [2, 3, 3, 3]),
        ([1, 2, 3, 4], (-1, 2), "wrap", [2, 3, 4, 2, 3]),  # cropped first
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.int4, ml_dtypes.uint2, object])
def test_pad(x, pads, mode, expected, dtype):
    if dtype is object:
        x, expected = (np.array([str(v) if v else "" for v in row], object) for row in (x, expected))
    else:
        x, expected = (np.array(row).astype(dtype) for row in (x, expected))
    np.testing.assert_array_equal(both("Pad", x, ints(*pads), mode=mode), expected)


def test_pad_value_and_axes():
    y = both("Pad", floats(1, 1, 1), ints(1, 0), np.float32([7]), ints(-2), traced=(0, 2))
    np.testing.assert_array_equal(y, np.float32([[[7], [0]]]), strict=True)
    with pytest.raises(ValueError, match="remove 3 elements"):
        run_op("Pad", floats(2), ints(-1, -2))
    with pytest.raises(ValueError, match="mode"):
        run_op("Pad", floats(2), ints(1, 1), mode="mirror")


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float8_e4m3fn, np.complex64, np.bool_])
def test_data_movement_supports_every_type(dtype):
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    assert both("Transpose", x).tolist() == x.T.tolist()
    assert both("Flatten", x, axis=0).shape == (1, 6)
    assert both("Expand", x, ints(2, 1, 1)).shape == (2, 2, 3)
    assert both("CenterCropPad", x, ints(1, 5)).tolist() == [[0, *x[0].tolist(), 0]]


def test_center_crop_pad_needs_an_extent_for_each_axis():
    for extents in (ints(), ints(2), ints(2, 3, 4), ints(2, -1)):
        with pytest.raises(ValueError, match="non-negative extent for each of the axes"):
            run_op("CenterCropPad", floats(2, 3), extents)


def test_extents_beside_zero_that_no_array_has():
    """NumPy counts the other extents of an empty array."""
    x, n = np.zeros((0, 1), np.float32), 2**62
    shape = ints(0, n)
    calls = {
        "Reshape": (x, shape), "Expand": (x, shape), "ConstantOfShape": (shape,), "Tile": (x, ints(1, n)),
        "Pad": (x, ints(0, 0, 0, n)),
    }  # fmt: skip
    for name, inputs in calls.items():
        attributes = {"allowzero": 1} if name == "Reshape" else {}
        for data in (x, jnp.asarray(x)):
            with pytest.raises(ValueError, match=r"no array has the shape|array is too big"):  # ours, and NumPy's
                run_op(name, *(data if v is x else v for v in inputs), **attributes)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_flatten_and_its_range(shape):
    x = floats(*shape)
    assert both("Flatten", x, axis=0).shape == (1, x.size)
    assert both("Flatten", x, axis=-x.ndim).shape == (1, x.size)
    with pytest.raises(ValueError, match="outside"):
        run_op("Flatten", x, axis=x.ndim + 1)


def test_depth_and_space_are_inverse():
    x = floats(1, 8, 2, 3)
    for mode in ("DCR", "CRD"):
        y = both("DepthToSpace", x, blocksize=2, mode=mode)
        np.testing.assert_array_equal(both("SpaceToDepth", y, blocksize=2, mode=mode), x)
    np.testing.assert_array_equal(
        both("DepthToSpace", x, opset=1, blocksize=2), both("DepthToSpace", x, blocksize=2, mode="DCR")
    )
    with pytest.raises(ValueError, match=r"(?s)DepthToSpace.*multiple of.*float32\[1, 6, 1, 1\]"):
        run_op("DepthToSpace", floats(1, 6, 1, 1), blocksize=2)


@pytest.mark.parametrize(
    ("attributes", "dtype", "expected"),
    [
        ({"value_float": 1.5}, np.float32, 1.5),
        ({"value_floats": (1.0, 2.0)}, np.float32, [1, 2]),
        ({"value_int": 2**62}, np.int64, 2**62),
        ({"value_ints": ()}, np.int64, []),
        ({"value_string": "a"}, object, "a"),
        ({"value_strings": ("a", "b")}, object, ["a", "b"]),
        ({"sparse_value": np.eye(2, dtype=np.int8)}, np.int8, [[1, 0], [0, 1]]),
    ],
)
def test_constant(attributes, dtype, expected):
    y = run_op("Constant", **attributes)
    np.testing.assert_array_equal(y, np.array(expected, dtype), strict=True)


def test_constant_needs_one_value():
    for attributes in ({}, {"value_int": 1, "value_float": 1.0}):
        with pytest.raises(ValueError, match="exactly one"):
            run_op("Constant", **attributes)


@pytest.mark.parametrize(
    ("start", "limit", "delta", "dtype", "expected"),
    [
        (10, 4, -2, np.int32, [10, 8, 6]),
        (4, 4, 1, np.int16, []),
        (4, 10, -1, np.int64, []),
        (2**62, 2**62 + 3, 2, np.int64, [2**62, 2**62 + 2]),
        (-(2**63), 2**63 - 1, 2**62, np.int64, [-(2**63), -(2**62), 0, 2**62]),
        (0, 1, 0.25, np.float32, [0, 0.25, 0.5, 0.75]),
        (2048, 2052, 1, np.float16, [2048, 2048, 2050, 2052]),  # computed in float32, rounded once
        (0, 0.3, 0.1, np.float32, [0, 0.1, 0.2, 0.3]),  # 0.3 of float32 is more than three steps of its 0.1
        (1, 0, -0.1, np.float64, 1 - np.arange(10) * 0.1),
    ],
)
def test_range(start, limit, delta, dtype, expected):
    y = run_op("Range", *(np.array(v, dtype) for v in (start, limit, delta)))
    np.testing.assert_array_equal(y, np.array(expected, dtype), strict=True)


def test_range_rejects_deltas_of_zero_and_what_is_not_finite():
    with pytest.raises(ValueError, match="delta"):
        run_op("Range", ints(0), ints(1), ints(0))
    for end in (np.nan, np.inf):
        with pytest.raises(ValueError, match="must be finite"):
            run_op("Range", *map(np.float32, (0, end, 1)))


def test_eye_like_takes_type_and_diagonal():
    x = np.zeros((2, 3), np.int8)
    np.testing.assert_array_equal(both("EyeLike", x, k=1), np.eye(2, 3, 1, np.int8), strict=True)
    assert run_op("EyeLike", x, dtype=16).dtype == ml_dtypes.bfloat16


def test_shape_is_sliced_like_a_list():
    x = np.zeros((2, 3, 4), np.float32)
    for attributes, expected in (({"start": -9, "end": 2}, [2, 3]), ({"start": 2, "end": 1}, []), ({"start": -1}, [4])):
        np.testing.assert_array_equal(both("Shape", x, **attributes), np.array(expected, np.int64), strict=True)
    np.testing.assert_array_equal(both("Size", np.zeros((2, 0))), np.int64(0), strict=True)


def test_identity_passes_sequences_and_nothing():
    sequence = [floats(2), floats(3)]
    assert [len(x) for x in run_op("Identity", sequence)] == [2, 3]


@pytest.mark.parametrize("axis", [0, 2, -1])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_])
def test_one_element_is_appended_on_a_tpu(axis, dtype):
    """A selection in place of a concatenation; NaN and infinity on the one side leave the other as it is."""
    many, one = [3, 2, 4, 5], [3, 2, 4, 5]
    many[axis], one[axis] = shape.TPU_APPENDED, 1
    a, b = (RNG.normal(size=s).astype(np.float32) for s in (many, one))
    if dtype not in (np.int8, np.bool_):
        a.flat[::3], b.flat[::2] = np.nan, np.inf
    a, b = (v.astype(dtype) for v in (a, b))
    y = shape._append(a, b, axis % 4)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(np.float32), np.concatenate((a, b), axis).astype(np.float32))
    traced = jax.jit(lambda a, b: run_op("Concat", a, b, axis=axis)).trace(a, b)
    concatenates = {p: "concatenate" in traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert concatenates == {"cpu": True, "cuda": True, "tpu": False}


@pytest.mark.parametrize(
    "shapes", [((2, 63, 4, 4), (2, 1, 4, 4)), ((2, 64, 4), (2, 1, 4)), ((2, 64, 4, 4), (2, 2, 4, 4))]
)
def test_other_concatenations_are_the_same_everywhere(shapes):
    traced = jax.jit(lambda *v: run_op("Concat", *v, axis=1)).trace(*(np.ones(s, np.float32) for s in shapes))
    assert "concatenate" in traced.lower(lowering_platforms=("tpu",)).as_text()
