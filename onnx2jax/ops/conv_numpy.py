"""Convolution of NumPy arrays: of constants, and in calls that do not wait for a program to be compiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from .arrays import accumulator
from .window import Window, count_blocks, padded, taps

CACHED: Final = 2**20
"""Elements of the columns, or of the results of a depthwise convolution, that are computed at once."""
EXACT: Final = 2**53
"""float64, for which NumPy has fast products, holds integers up to this."""


def convolve_numpy(
    x: np.ndarray, w: np.ndarray, window: Window, groups: int, stretch: tuple[int, ...] = ()
) -> np.ndarray:
    """The convolution as products of the weights with columns, rows of the image after rows.

    Half precision is summed in float32 and rounded once; integers are summed exactly.

    Args:
        x: (N, C, spatial...).
        w: (O, C / groups, kernel...).
        window: its kernel, strides, padding and dilations.
        groups: the number of groups of channels.
        stretch: how far pixels are drawn apart before, zeros between them, along each axis; then strides are 1.
    """
    dtype, wide = x.dtype, accumulator(x.dtype)
    if dtype.kind in "iu":
        largest = _magnitude(x) * _magnitude(w) * math.prod(w.shape[1:])
        wide = np.dtype(np.float64) if largest <= EXACT else dtype
    form = partial(_transposed, stretch=stretch) if any(d > 1 for d in stretch) else _convolved
    y = form(x.astype(wide, copy=False), w.astype(wide, copy=False), window, groups)
    if dtype.kind in "iu" and wide != dtype:
        y = y.astype(np.int64)  # from which int32 wraps around, as sums of int32 do
    return y.astype(dtype, copy=False)


def _magnitude(x: np.ndarray) -> int:
    return max(int(x.max()), -int(x.min())) if x.size else 0


def _convolved(x: np.ndarray, w: np.ndarray, window: Window, groups: int) -> np.ndarray:
    x, window = padded(x, window), window.unpadded
    (outputs, depth), blocks = w.shape[:2], count_blocks(x.shape[2:], window)
    filters = w.reshape(groups, outputs // groups, math.prod(w.shape[1:]))
    product = _by_taps if depth == 1 and groups > 1 else _by_columns
    y = np.empty((x.shape[0], outputs, *blocks), x.dtype)
    for rows in _pieces(blocks, x.shape[0] * x.shape[1] * math.prod(window.kernel)):
        start, end = rows.start * window.strides[0], (rows.stop - 1) * window.strides[0] + window.spans[0]
        y[:, :, rows] = product(x[:, :, start:end], filters, window).reshape(y[:, :, rows].shape)
    return y


def _transposed(x: np.ndarray, w: np.ndarray, window: Window, groups: int, stretch: tuple[int, ...]) -> np.ndarray:
    """The products of pixels with every tap, added where they belong: zeros between pixels are not multiplied."""
    (outputs, depth), rows = w.shape[:2], zip(x.shape[2:], stretch, strict=True)
    image = [(n - 1) * d + 1 if n else 0 for n, d in rows]
    filters = w.reshape(groups, outputs // groups, depth, math.prod(window.kernel))
    pixels = x.reshape(x.shape[0], groups, depth, math.prod(x.shape[2:]))
    y = np.zeros((x.shape[0], outputs, *count_blocks(image, window)), x.dtype)
    for i, tap in enumerate(itertools.product(*map(range, window.kernel))):
        axes = zip(tap, window.dilations, window.pads, x.shape[2:], stretch, y.shape[2:], strict=True)
        met: list[Any] = [_met(before - t * d, n, apart, count) for t, d, (before, _), n, apart, count in axes]
        products = (filters[..., i] @ pixels).reshape(*y.shape[:2], *x.shape[2:])
        to: Any = (Ellipsis, *(s for _, s in met))
        of: Any = (Ellipsis, *(s for s, _ in met))
        y[to] += products[of]
    return y


def _met(start: int, pixels: int, apart: int, count: int) -> tuple[slice, slice]:
    """Of pixels ``apart``, the first at ``start``, those among ``count`` results, and these results."""
    first, last = max(-(start // apart), 0), min((count - 1 - start) // apart, pixels - 1)
    if last < first:
        return slice(0), slice(0)
    return slice(first, last + 1), slice(start + first * apart, start + last * apart + 1, apart)


def _pieces(blocks: list[int], width: int) -> Iterator[slice]:
    """Rows of results that are computed at once, where each pixel takes ``width`` elements."""
    step = max(CACHED // max(width * math.prod(blocks[1:]), 1), 1)
    for start in range(0, blocks[0], step):
        yield slice(start, min(start + step, blocks[0]))


def _by_columns(x: np.ndarray, filters: np.ndarray, window: Window) -> np.ndarray:
    """The filters (groups, O / groups, C / groups * taps) by the columns (N, groups, C / groups * taps, pixels)."""
    parts = list(taps(x, window))
    columns = parts[0] if len(parts) == 1 else np.stack(parts, 2)
    return filters @ columns.reshape(x.shape[0], *filters.shape[::2], math.prod(parts[0].shape[2:]))


def _by_taps(x: np.ndarray, filters: np.ndarray, window: Window) -> np.ndarray:
    """One channel a group: the sum of shifted images, each by a weight of the filters (groups, O / groups, taps)."""
    filters = filters.reshape(*filters.shape, *[1] * len(window.kernel))
    total = None
    for i, tap in enumerate(taps(x, window)):
        part = tap[:, :, None] * filters[:, :, i]
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None  # a kernel has at least one tap
    return total
