"""NaN and infinities reach those results alone that read them: 0 * NaN is not 0 where a zero means "not read"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from jax import lax

from tests.support.helpers import run_op
from tests.support.joined import joined

RNG = np.random.default_rng(3)
NON_FINITE = np.nan, np.inf, -np.inf
Case = tuple[Callable[[Any], Any], np.ndarray, tuple[int, ...], int]
"""A function, its operand, a cell of it, and how far results around the cell may read it with weight 0."""


def spread(cases: Mapping[Any, Case]) -> list[tuple[Any, float]]:
    """The cases, and the values that in the cell change a result which does not depend on it."""
    calls = {}
    for name, (function, x, cell, reach) in cases.items():
        operands = np.stack([x] * (2 + len(NON_FINITE)))
        operands[1][tuple(slice(max(i - reach, 0), i + reach + 1) for i in cell)] += 1000
        for operand, value in zip(operands[2:], NON_FINITE, strict=True):
            operand[cell] = value
        calls[name] = (lambda xs, f=function: lax.map(f, xs)), (operands,)
    found = []
    for name, results in joined(calls).items():
        plain, changed, *others = np.asarray(results)
        independent = plain == changed
        assert independent.any()
        close = [np.isclose(y, plain, rtol=1e-5, atol=1e-6)[independent].all() for y in others]  # by another form
        found += [(name, v) for v, is_close in zip(NON_FINITE, close, strict=True) if not is_close]
    return found


def test_resize() -> None:
    """A neighbour of weight 0 is multiplied, as in other implementations, so a pixel reaches one further."""
    x = RNG.standard_normal((2, 11, 7)).astype(np.float32)
    modes: dict[str, dict[str, Any]] = {
        "linear": {"mode": "linear"},
        "aligned": {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        "cubic": {"mode": "cubic", "exclude_outside": 1},
        "antialias": {"mode": "linear", "antialias": 1, "coordinate_transformation_mode": "asymmetric"},
    }

    def resized(sizes: tuple[int, int], mode: str) -> Callable[[Any], Any]:
        return lambda x: run_op("Resize", x, None, None, np.array([2, *sizes]), **modes[mode])

    names = product([(22, 14), (33, 8), (5, 3), (11, 14)], modes, [(1, 5, 3), (0, 10, 6)])
    assert not spread({name: (resized(*name[:2]), x, name[2], 2) for name in names})


IMAGES = RNG.standard_normal((2, 2, 8, 9)).astype(np.float32)
INNER, FIRST, LAST = (1, 1, 6, 5), (1, 1, 0, 0), (1, 1, 7, 8)
"""Cells; indices outside the image are clamped to the last two."""


def test_roi_align() -> None:
    rois = np.array([[0, 0, 3, 3], [2.1, 3.2, 8.3, 7.4], [-9, -9, -5, -5], [4, 4, 4, 4]] * 2, np.float32)

    def pooled(mode: str, ratio: int) -> Callable[[Any], Any]:
        attributes: dict[str, Any] = {"mode": mode, "output_height": 3, "output_width": 2, "sampling_ratio": ratio}
        return lambda x: run_op("RoiAlign", x, rois, np.array([1, 1, 1, 1, 0, 0, 0, 0]), **attributes)

    names = product(["avg", "max"], [0, 2], [INNER, FIRST])
    assert not spread({name: (pooled(*name[:2]), IMAGES, name[2], 1) for name in names})


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_of_wide_boxes_ends(mode: str) -> None:
    """The number of samples follows from the width of a box, which may be traced; no more are visited than matter."""
    widths = np.float32([2, 40, 1e9, np.inf, np.nan])
    rois = np.stack([np.zeros(5), np.zeros(5), widths, np.full(5, 2)], 1).astype(np.float32)
    attributes: dict[str, Any] = {"mode": mode, "output_height": 2, "output_width": 2, "sampling_ratio": 0}
    y = run_op("RoiAlign", np.ones((1, 1, 4, 4), np.float32), rois, np.zeros(5, np.int64), jit=True, **attributes)
    # of 20 samples in each half of a box of 40 the first five are inside, the fifth on the edge; the others are zeros
    wide = {"avg": [5 / 20, 0, 5 / 20, 0], "max": [1, 0, 1, 0]}[mode]
    got = np.asarray(y).reshape(5, 4)
    np.testing.assert_allclose(got[:2], [[1] * 4, wide], rtol=1e-6)
    assert (abs(got[2] - (0 if mode == "avg" else wide)) < 1e-6).all() and (got[3:] == 0).all()


def test_sampled_pixels() -> None:
    """Samples outside the image are zero, whatever the pixel is that is read in their place."""
    grid = RNG.uniform(-1.6, 1.6, (2, 6, 7, 2)).astype(np.float32)
    weights, offset = (RNG.uniform(-2, 2, s).astype(np.float32) for s in ((3, 2, 3, 3), (2, 18, 8, 9)))
    rois = np.array([[0.1, 0.2, 0.5, 0.9], [-1, -1, 2, 2]], np.float32)
    crops = rois, np.array([1, 1]), np.array([4, 5], np.int32)

    def sampled(mode: str, padding: str) -> Callable[[Any], Any]:
        return lambda x: run_op("GridSample", x, grid, mode=mode, padding_mode=padding)

    functions: dict[Any, Callable[[Any], Any]] = {
        "DeformConv": lambda x: run_op("DeformConv", x, weights, offset, pads=[1, 1, 1, 1]),
        "CropAndResize": lambda x: run_op("CropAndResize", x, *crops, domain="com.microsoft"),
        **{name: sampled(*name) for name in product(["linear", "nearest", "cubic"], ["zeros", "border"])},
    }
    names = product(functions, [INNER, FIRST, LAST])
    assert not spread({name: (functions[name[0]], IMAGES, name[1], 0) for name in names})
