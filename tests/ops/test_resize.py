"""Resize and Upsample: old opsets, coordinates, rounding, element types, regions, derivatives, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import onnx2jax
from tests.support.branches import both
from tests.support.helpers import run_op


def row(*values, dtype=np.float32):
    return np.array(values, dtype)


LINE = row(0, 1, 2, 3)


@pytest.mark.parametrize(
    ("scale", "mode", "expected"),
    [
        (0.6, "nearest", [0, 2]),  # opset 10 rounds up when it shrinks
        (0.5, "nearest", [0, 2]),
        (2.0, "nearest", [0, 0, 1, 1, 2, 2, 3, 3]),
        (1.6, "nearest", [0, 0, 1, 1, 2, 3]),  # and down when it grows
        (2.0, "linear", [0, 0.5, 1, 1.5, 2, 2.5, 3, 3]),
    ],
)
def test_resize_before_opset_11(scale, mode, expected):
    np.testing.assert_allclose(both("Resize", LINE, row(scale), opset=10, mode=mode), expected, rtol=1e-5)


def test_every_form_of_upsample():
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    for mode, old in (("nearest", "nearest"), ("linear", "bilinear")):
        first = run_op("Upsample", x, opset=1, mode=old, height_scale=2.0, width_scale=3.0)
        assert first.shape == (1, 1, 4, 6)
        np.testing.assert_array_equal(run_op("Upsample", x, opset=7, mode=mode, scales=[1.0, 1.0, 2.0, 3.0]), first)
        np.testing.assert_array_equal(run_op("Upsample", x, row(1, 1, 2, 3), opset=9, mode=mode), first)
    with pytest.raises(Exception, match="Resize"):
        run_op("Upsample", x, row(1, 1, 2, 3), opset=10)


@pytest.mark.parametrize(
    ("nearest_mode", "expected"),
    [
        ("round_prefer_floor", [0, 2]),
        ("round_prefer_ceil", [1, 3]),
        ("floor", [0, 2]),
        ("ceil", [1, 3]),
    ],
)
def test_halfway_between_neighbours(nearest_mode, expected):
    got = both("Resize", LINE, None, row(0.5), nearest_mode=nearest_mode)
    assert got.tolist() == expected


@pytest.mark.parametrize(
    ("mode", "sizes", "expected"),
    [
        ("half_pixel", 2, [0.5, 2.5]),
        ("pytorch_half_pixel", 1, [0]),
        ("half_pixel", 1, [1.5]),
        ("align_corners", 3, [0, 1.5, 3]),
        ("align_corners", 1, [0]),
        ("asymmetric", 2, [0, 2]),
        ("half_pixel_symmetric", 2, [0.5, 2.5]),
    ],
)
def test_coordinate_transformation_modes(mode, sizes, expected):
    got = run_op("Resize", LINE, None, None, np.array([sizes]), mode="linear", coordinate_transformation_mode=mode)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_half_pixel_symmetric_centres_fractional_extents():
    """4 x 0.6 gives two elements of 1 / 0.6 each; symmetric they lie around the middle."""
    got = run_op("Resize", LINE, None, row(0.6), mode="linear", coordinate_transformation_mode="half_pixel_symmetric")
    np.testing.assert_allclose(got.sum(), 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("region", "sizes", "mode", "expected"),
    [
        ((0, 1), 4, "linear", [0, 1, 2, 3]),
        ((1, 0), 4, "nearest", [3, 2, 1, 0]),
        ((0.5, 2.0), 4, "linear", [1.5, 3, 9, 9]),
        ((-0.5, 0.5), 3, "nearest", [9, 0, 1]),
        ((1, 2), 4, "cubic", [3, 9, 9, 9]),
    ],
)
def test_crop_and_resize_extrapolates_outside_the_image(region, sizes, mode, expected):
    got = run_op(
        "Resize", LINE, row(*region), None, np.array([sizes]), mode=mode, exclude_outside=int(mode == "cubic"),
        coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=9.0,
    )  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_roi_scales_the_output_extent():
    got = run_op(
        "Resize", LINE, row(0, 0.5), row(2), mode="nearest", coordinate_transformation_mode="tf_crop_and_resize"
    )
    assert got.shape == (4,)


@pytest.mark.parametrize(
    ("policy", "expected"), [("stretch", (5, 12)), ("not_larger", (5, 8)), ("not_smaller", (8, 12))]
)
def test_aspect_ratio(policy, expected):
    x = np.zeros((4, 1, 6), np.float32)
    got = run_op("Resize", x, None, None, np.array([12, 5]), axes=[-1, 0], keep_aspect_ratio_policy=policy, opset=18)
    assert (got.shape[0], got.shape[2]) == expected


@pytest.mark.parametrize("values", [np.array(["a", "b"], object), np.array([True, False]), np.array([1j, 2])])
def test_nearest_supports_every_element_type(values):
    got = run_op("Resize", values, None, row(2))
    np.testing.assert_array_equal(got, np.repeat(values, 2))
    assert got.dtype == values.dtype


@pytest.mark.parametrize(
    ("values", "mode", "attributes", "expected"),
    [
        (row(0, 255, dtype=np.uint8), "linear", {}, [0, 63, 191, 255]),
        (row(-7, 0, dtype=np.int8), "linear", {}, [-7, -5, -1, 0]),
        (row(2**30, 2**30 + 4, dtype=np.int32), "linear", {}, [2**30, 2**30 + 1, 2**30 + 3, 2**30 + 4]),
        (row(0, 255, dtype=np.uint8), "cubic", {}, [0, 57, 197, 255]),  # what overshoots is cut off
    ],
)
def test_integer_results_truncate(values, mode, attributes, expected):
    got = run_op("Resize", values, None, row(2), mode=mode, **attributes)
    assert got.dtype == values.dtype
    assert got.tolist() == expected


@pytest.mark.parametrize("n", [4, 300])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_both_axes_agree(mode, n):
    """Along either axis, of few elements or many."""
    x = np.random.default_rng(0).standard_normal((n, n))
    sizes = np.array([n + 3, n + 3])
    got = run_op("Resize", jnp.asarray(x), None, None, sizes, mode=mode)
    np.testing.assert_allclose(got.T, run_op("Resize", jnp.asarray(x.T), None, None, sizes, mode=mode), atol=1e-5)


@pytest.mark.parametrize(("exclude_outside", "expected"), [(0, 5 / 8), (1, 5 / 7)])
def test_antialiasing_averages_all_source_pixels(exclude_outside, expected):
    """Weights 1, 3, 3, 1: the first lies outside, and either repeats the edge or goes."""
    got = run_op("Resize", LINE, None, row(0.5), mode="linear", antialias=1, exclude_outside=exclude_outside)
    np.testing.assert_allclose(got, [expected, 3 - expected], rtol=1e-5)


@pytest.mark.parametrize("antialias", [0, 1])
def test_an_extent_may_become_zero(antialias):
    x, sizes = np.ones((2, 3), np.float32), np.array([0, 3])
    assert run_op("Resize", x, None, None, sizes, mode="linear", antialias=antialias).shape == (0, 3)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_gradients_scatter_to_the_pixels_read(mode):
    grad = jax.grad(lambda x: run_op("Resize", x, None, row(2.5), mode=mode).sum())(jnp.asarray(LINE))
    np.testing.assert_allclose(grad.sum(), 10, rtol=1e-5)


@pytest.mark.parametrize(("sizes", "scatters"), [((16, 24), False), ((4, 2), False), ((13, 5), True)])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_gradients_leave_no_scatter_that_xla_folds(mode, sizes, scatters):
    """By slices where the ratio is whole; a scatter of a constant cotangent took XLA seconds to fold."""
    loss = jax.grad(lambda x: run_op("Resize", x, None, None, np.array(sizes), mode=mode).sum())
    text = str(jax.make_jaxpr(loss)(jnp.ones((8, 6))))
    assert ("scatter" in text) == (scatters or mode == "nearest")
    assert text.count("optimization_barrier") >= text.count("= scatter")


@pytest.mark.parametrize("n", [40, 41, 10])
def test_antialiasing_of_many_neighbours_as_by_a_product(n):
    """Slices, gathers, or a loop over more neighbours than are unrolled: each with its derivative."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 400)))

    @jax.jit
    def line(x):
        return run_op("Resize", x, None, None, np.array([n]), mode="linear", antialias=1, axes=[1])

    matrix = line(jnp.eye(400)).T  # row i: the weights of result i
    np.testing.assert_allclose(line(x), x @ matrix.T, rtol=1e-4, atol=1e-5)
    slopes = jax.jit(jax.grad(lambda x: line(x)[0].sum()))(x)
    np.testing.assert_allclose(slopes[0], matrix.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "attributes", "words"),
    [
        ((None, row(2), np.array([3])), {}, "exactly one"),
        ((None, row(2, 2)), {}, "axes"),
        ((None, row(2)), {"mode": "area"}, "linear"),
        ((None, row(2)), {"coordinate_transformation_mode": "tf_crop_and_resize"}, "roi"),
        ((None, row(2)), {"coordinate_transformation_mode": "corner"}, "half_pixel"),
        ((None, row(2)), {"antialias": 1}, "antialias"),
    ],
)
def test_errors_list_the_valid_modes(inputs, attributes, words):
    with pytest.raises(ValueError, match=words):
        run_op("Resize", LINE, *inputs, **attributes)


def corners(first: float, second: float) -> onnx.ModelProto:
    """Two nodes in a row that keep the corners where they are."""
    how = 'coordinate_transformation_mode="align_corners", mode="linear"'
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18]>
        g (float[n] x) => (float[m] z) <float[1] a = {{{first}}}, float[1] b = {{{second}}}> {{
            y = Resize <{how}> (x, , a)
            z = Resize <{how}> (y, , b)
        }}""")


def test_align_corners_with_a_fractional_extent_warns_once():
    """The official cases want it so; onnxruntime and PyTorch align the corners of what there is."""
    model = onnx2jax.convert(corners(0.5, 1.5))
    with pytest.warns(
        onnx2jax.errors.DeviationWarning, match=r"'y' \(Resize.*7 \* 0.5 to 3.*give the node sizes"
    ) as caught:
        model(np.zeros(7, np.float32))
        model(np.zeros(9, np.float32))
    assert len(caught) == 1


@pytest.mark.parametrize("n", [1, 2, 6])
def test_align_corners_with_an_integer_extent_does_not_warn(n):
    whole = onnx2jax.convert(corners(0.5 if n % 2 == 0 else 1.5, 3.0))
    np.testing.assert_array_equal(whole(np.ones(n, np.float32)), np.ones(max(n // 2, 1) * 3))
