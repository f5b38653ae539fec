"""Sampling, regions of interest, suppression and image files, where the official cases are silent."""

from __future__ import annotations

import io
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx2jax import compat
from tests.support.helpers import run_op

RNG = np.random.default_rng(9)
IMAGE = RNG.standard_normal((1, 2, 4, 5)).astype(np.float32)


def line(*values):
    return np.array(values, np.float32).reshape(1, 1, 1, -1)


def at(*positions):
    """A grid for a one-row image: the row's middle, the given columns."""
    return np.array([[[[x, 0] for x in positions]]], np.float32)


@pytest.mark.parametrize(("align_corners", "mode"), [(0, "bilinear"), (1, "bicubic"), (0, "nearest"), (1, "linear")])
def test_identity_grid_returns_the_image(align_corners, mode):
    theta = np.array([[[1, 0, 0], [0, 1, 0]]], np.float32)
    grid = run_op("AffineGrid", theta, np.array([1, 2, 4, 5]), align_corners=align_corners)
    opset = 16 if mode.startswith("bi") else 22
    got = run_op("GridSample", IMAGE, grid, align_corners=align_corners, mode=mode, opset=opset)
    np.testing.assert_allclose(got, IMAGE, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("padding_mode", "mode", "expected"),
    [
        ("zeros", "linear", [0.5, 0, 0, 2]),
        ("border", "linear", [1, 1, 4, 4]),
        ("reflection", "linear", [1, 2, 3, 4]),
        ("zeros", "nearest", [1, 0, 0, 4]),
        ("reflection", "nearest", [1, 2, 3, 4]),
    ],
)
def test_outside_the_image(padding_mode, mode, expected):
    """Half a cell, one and a half beyond the left edge; the same beyond the right."""
    grid = at(-1, -1.75, 1.75, 1) if mode == "linear" else at(-0.999, -1.75, 1.75, 0.999)
    got = run_op("GridSample", line(1, 2, 3, 4), grid, padding_mode=padding_mode, mode=mode)
    np.testing.assert_allclose(np.ravel(got), expected, rtol=1e-4)


def test_nearest_rounds_half_to_even():
    got = run_op("GridSample", line(1, 2, 3), at(-0.5, 0.5), mode="nearest", align_corners=1)
    assert np.ravel(got).tolist() == [1, 3]


def test_nearest_rounds_before_it_reflects():
    """2 is pixel 5.5 of four: rounded to 6, which is pixel 1 reflected; 5.5 reflected is 1.5, which rounds to 2."""
    got = run_op("GridSample", line(1, 2, 3, 4), at(2.0), mode="nearest", padding_mode="reflection")
    assert np.ravel(got).tolist() == [2]


def test_nan_positions_read_zero():
    got = run_op("GridSample", line(1, 2, 3), at(np.nan, np.inf, -np.inf), mode="nearest")
    assert np.ravel(got).tolist() == [0, 0, 0]


ROIS = np.array([[0, 0, 4, 3], [1, 0.5, 2, 3.5], [-2, -2, 9, 8]], np.float32)
WHICH = np.zeros(3, np.int64)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("opset", [10, 16])
def test_adaptive_sampling_of_traced_regions(mode, opset):
    attributes: Any = {"mode": mode, "output_height": 2, "output_width": 2, "opset": opset}
    traced = run_op("RoiAlign", IMAGE, ROIS, WHICH, jit=True, **attributes)
    np.testing.assert_allclose(traced, run_op("RoiAlign", IMAGE, ROIS, WHICH, **attributes), rtol=1e-5)


def test_regions_of_no_channels() -> None:
    for mode in ("avg", "max"):
        y = run_op("RoiAlign", IMAGE[:, :0], ROIS, WHICH, mode=mode, output_height=2)
        assert y.shape == (len(ROIS), 0, 2, 1)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_the_derivative_of_adaptive_sampling(mode):
    """A constant image pools to itself, so that the derivative of every output adds up to one (for the average)."""
    attributes: Any = {"mode": mode, "output_height": 2, "output_width": 2}
    inside = ROIS[:2] / 2
    loss = jax.jit(lambda x, rois: run_op("RoiAlign", x, rois, WHICH[:2], **attributes).sum())
    grad = jax.grad(loss)(jnp.ones_like(IMAGE), inside)
    if mode == "avg":
        np.testing.assert_allclose(grad.sum(), 2 * 2 * 4, rtol=1e-5)
    assert np.isfinite(grad).all() and np.abs(grad).sum() > 0


@pytest.mark.parametrize("opset", [10, 16])
def test_roi_align_of_a_linear_image_is_exact(opset):
    """Opset 10 knows no half pixel."""
    plane = np.broadcast_to(np.arange(8, dtype=np.float32), (1, 1, 8, 8))
    got = run_op("RoiAlign", plane, np.array([[2, 2, 6, 6]], np.float32), WHICH[:1], opset=opset)
    np.testing.assert_allclose(np.ravel(got), [4.0 if opset == 10 else 3.5])


def test_max_roi_pool_with_empty_bins():
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4) - 20
    rois = np.array([[0, 0, 0, 3, 3], [0, 1, 1, 1, 1], [0, 9, 9, 9, 9]], np.float32)
    got = np.asarray(run_op("MaxRoiPool", x, rois, pooled_shape=[2, 2]))
    assert got[:, 0].reshape(3, 4).tolist() == [[-15, -13, -7, -5], [-15] * 4, [0] * 4]


BOXES = np.array([[[0, 0, 1, 1], [1, 1, 0, 0.1], [0, 2, 1, 3], [0, 2, 1, 2]]], np.float32)
SCORES = np.array([[[0.5, 0.75, 0.5, 0.25]]], np.float32)


@pytest.mark.parametrize(
    ("optional", "expected"),
    [
        ((), []),
        ((np.array([9]),), [1, 2, 3]),  # by default any overlap suppresses
        ((np.array(9), np.array([0.95], np.float32)), [1, 0, 2, 3]),
        ((np.array(2), np.array(0.95, np.float32)), [1, 0]),
        ((np.array(9), None, np.array([0.25], np.float32)), [1, 2]),
    ],
)
@pytest.mark.parametrize("opset", [10, 11])
def test_suppression(optional, expected, opset):
    got = run_op("NonMaxSuppression", BOXES, SCORES, *optional, opset=opset)
    assert got.dtype == np.int64
    assert got.shape == (len(expected), 3)
    assert got[:, 2].tolist() == expected


@pytest.mark.parametrize("limit", [1, 5, 64, 65, 300])
def test_suppression_of_many_boxes_compares_each_with_all_kept(limit):
    """More boxes than are looked at together, beside one comparison after the other."""
    rng = np.random.default_rng(limit)
    low = rng.uniform(0, 20, (300, 2))
    boxes = np.concatenate([low, low + rng.uniform(1, 4, (300, 2))], 1).astype(np.float32)
    scores = rng.permutation(300).astype(np.float32)

    def overlap(a, b):
        sides = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
        areas = np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2])
        return sides.prod() / (areas - sides.prod())

    kept: list[int] = []
    for i in np.argsort(-scores):
        if len(kept) < limit and all(overlap(boxes[i], boxes[k]) <= 0.2 for k in kept):
            kept.append(i)
    got = run_op("NonMaxSuppression", boxes[None], scores[None, None], np.array(limit), np.float32(0.2), opset=11)
    assert got[:, 2].tolist() == kept


def _file(mode, kind):
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new(mode, (3, 2), 255 if mode == "L" else None).save(stream, kind)
    return np.frombuffer(stream.getvalue(), np.uint8)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK"])
@pytest.mark.parametrize(("pixel_format", "channels"), [("RGB", 3), ("BGR", 3), ("Grayscale", 1)])
def test_image_decoder_converts_channels(mode, pixel_format, channels):
    got = run_op("ImageDecoder", _file(mode, "TIFF"), pixel_format=pixel_format)
    assert (got.shape, got.dtype) == ((2, 3, channels), np.uint8)


def test_invalid_images_decode_to_empty_arrays():
    for stream in (_file("RGB", "PNG")[:40], np.zeros(9, np.uint8), np.zeros(0, np.uint8)):
        assert run_op("ImageDecoder", stream).size == 0


def test_images_need_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"needs the extra image .*pip install"):
        run_op("ImageDecoder", np.zeros(9, np.uint8))


def test_volumes_are_sampled_along_three_axes():
    x = np.arange(8.0).reshape(1, 1, 2, 2, 2)
    grid = np.array([[[[[1.0, -1, 1], [0, 0, 0]]]]])  # innermost axis first
    with compat.enable_x64():
        assert np.ravel(run_op("GridSample", x, grid, align_corners=1)).tolist() == [5, 3.5]
