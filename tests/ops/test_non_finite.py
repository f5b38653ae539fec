"""NaN and infinities reach those results alone that read them: 0 * NaN is not 0 where a zero means "not read"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from onnx2jax import compat
from tests.support.helpers import run_op

RNG = np.random.default_rng(3)


def spreads(function: Callable[[Any], Any], x: np.ndarray, cell: tuple[int, ...], reach: int) -> list[float]:
    """The values that, in one cell of x, change results which do not depend on the cells up to ``reach`` around it."""
    around = x.copy()
    around[tuple(slice(max(i - reach, 0), i + reach + 1) for i in cell)] += 1000
    inputs = [x, around]
    for value in (np.nan, np.inf, -np.inf):
        inputs.append(x.copy())
        inputs[-1][cell] = value
    with compat.enable_x64():
        plain, changed, *found = np.asarray(jax.jit(lambda xs: lax.map(function, xs))(np.stack(inputs)))
    independent = plain == changed
    assert independent.any()
    pairs = zip((np.nan, np.inf, -np.inf), found, strict=True)
    return [value for value, y in pairs if not np.array_equal(y[independent], plain[independent])]


def resized(sizes: tuple[int, int], mode: str, **attributes: Any) -> Callable[[Any], Any]:
    return lambda x: run_op("Resize", x, None, None, np.array([1, *sizes]), mode=mode, **attributes)


@pytest.mark.parametrize("sizes", [(22, 14), (33, 8), (5, 3), (11, 14)])
@pytest.mark.parametrize(
    ("mode", "attributes"),
    [
        ("linear", {}),
        ("linear", {"coordinate_transformation_mode": "align_corners"}),
        ("cubic", {"exclude_outside": 1}),
        ("linear", {"antialias": 1, "coordinate_transformation_mode": "asymmetric"}),
    ],
)
def test_resize(sizes: tuple[int, int], mode: str, attributes: dict[str, Any]) -> None:
    """A neighbour of weight 0 still counts, as in other implementations, so a pixel reaches one further."""
    x = RNG.standard_normal((2, 11, 7)).astype(np.float32)
    assert not spreads(resized(sizes, mode, **attributes), x, (1, 5, 3), 2)
    edge = RNG.standard_normal((2, 11, 7)).astype(np.float32)
    assert not spreads(resized(sizes, mode, **attributes), edge, (0, 10, 6), 2)


CELL = 1, 1, 6, 5
IMAGES = RNG.standard_normal((2, 2, 8, 9)).astype(np.float32)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, sampling_ratio: int) -> None:
    rois = np.array([[0, 0, 3, 3], [2.1, 3.2, 8.3, 7.4], [-9, -9, -5, -5], [4, 4, 4, 4]] * 2, np.float32)
    attributes: dict[str, Any] = {"mode": mode, "output_height": 3, "output_width": 2, "sampling_ratio": sampling_ratio}

    def pooled(x: Any) -> Any:
        return run_op("RoiAlign", x, rois, np.array([1, 1, 1, 1, 0, 0, 0, 0]), **attributes)

    assert not spreads(pooled, IMAGES, CELL, 1)
    assert not spreads(pooled, IMAGES, (1, 0, 0, 0), 1)  # which samples outside the image would read


GRID = RNG.uniform(-1.6, 1.6, (2, 6, 7, 2)).astype(np.float32)
FIRST, LAST = (1, 1, 0, 0), (1, 1, 7, 8)
"""The pixels that indices outside the image are clamped to."""


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
def test_grid_sample(mode: str, padding_mode: str) -> None:
    def sampled(x: Any) -> Any:
        return run_op("GridSample", x, GRID, mode=mode, padding_mode=padding_mode)

    assert not any(spreads(sampled, IMAGES, cell, 0) for cell in (CELL, FIRST, LAST))


def test_deform_conv() -> None:
    weights, offset = RNG.standard_normal((3, 2, 3, 3)), RNG.uniform(-2, 2, (2, 18, 8, 9))

    def convolved(x: Any) -> Any:
        return run_op("DeformConv", x, weights.astype(np.float32), offset.astype(np.float32), pads=[1, 1, 1, 1])

    assert not any(spreads(convolved, IMAGES, cell, 0) for cell in (CELL, FIRST, LAST))


def test_crop_and_resize() -> None:
    rois = np.array([[0.1, 0.2, 0.5, 0.9], [-1, -1, 2, 2]], np.float32)

    def cropped(x: Any) -> Any:
        size = np.array([4, 5], np.int32)
        return run_op("CropAndResize", x, rois, np.array([1, 1], np.int32), size, domain="com.microsoft")

    assert not any(spreads(cropped, IMAGES, cell, 0) for cell in (CELL, FIRST, LAST))
