"""3x3 convolutions by Winograd's minimal filtering: fewer products, a few more sums.

An image is cut into tiles of ``size`` + 2 pixels a side, which overlap by two. With the matrices B, G and A of Toom and
Cook the results of a tile x and a kernel w are ``A.T @ ((B.T @ x @ B) * (G @ w @ G.T)) @ A``, so each channel of a tile
of 4x4 results costs 36 products rather than 144. What stands around the products has few equations, each on whole
axes: written tile by tile ResNet-50 compiled for 10 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from .window import Window, count_blocks

SIZE: Final = 4
"""Results along a side of a tile. Tiles of 2 gain little: 28x28 pixels of 128 channels take 2.6 ms plain, 1.9 by tiles
of 2, and 1.5 by tiles of 4."""
POINTS: Final = (0.0, 0.75, -0.75, 1.5, -1.5)
"""Where the polynomials are evaluated, beside infinity. The largest error over the largest value, against float64, is
2e-6 for 128 channels; with 0, 1, -1, 2, -2 it is 8e-6, and 5e-7 for a plain convolution."""


def winograd(x: Any, w: Any, window: Window, _groups: int) -> Any:
    """The convolution of x (N, H, W, C) with w (O, C, 3, 3), of strides and dilations 1."""
    w = lax.transpose(w, (2, 3, 1, 0))
    after, filtering, before = matrices(POINTS)
    batch, size, side = x.shape[0], SIZE, SIZE + 2
    height, width = count_blocks(x.shape[1:3], window)
    down, across = -(-height // size), -(-width // size)
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *_whole_tiles(x, window, (down, across)), (0, 0, 0)])
    # Tiles of `size` rows; a tile's last two are the first of the next one
    rows = lax.reshape(x, (batch, down + 1, size, (across + 1) * size, x.shape[-1]))
    parts = [rows[:, :down, i] for i in range(size)] + [rows[:, 1:, i] for i in range(2)]
    columns = lax.reshape(_times(before, parts), (side, batch * down, across + 1, size, x.shape[-1]))
    parts = [columns[:, :, :across, i] for i in range(size)] + [columns[:, :, 1:, i] for i in range(2)]
    tiles = batch * down * across
    transformed = lax.reshape(_times(before, parts), (side * side, tiles, x.shape[-1]))
    kernels = _times(filtering, [_times(filtering, [w[i, j] for i in range(3)]) for j in range(3)])
    kernels = lax.reshape(kernels, (side * side, *w.shape[2:]))
    products = lax.dot_general(transformed, kernels, (((2,), (1,)), ((0,), (0,))))
    products = lax.reshape(products, (side, side, tiles, w.shape[-1]))
    y = _times(after, [products[i] for i in range(side)])
    y = _times(after, [y[:, i] for i in range(side)])
    y = lax.reshape(y, (size, size, batch, down, across, w.shape[-1]))
    y = lax.reshape(lax.transpose(y, (2, 3, 0, 4, 1, 5)), (batch, down * size, across * size, w.shape[-1]))
    return y[:, :height, :width]


def _whole_tiles(x: Any, window: Window, tiles: Sequence[int]) -> list[tuple[int, int, int]]:
    """The padding of height and width, up to one tile more than there are."""
    extents = zip(x.shape[1:3], window.pads, tiles, strict=True)
    return [(before, (count + 1) * SIZE - n - before, 0) for n, (before, _), count in extents]


def _times(matrix: np.ndarray, parts: Sequence[Any]) -> Any:
    """A matrix by a vector of arrays, as one array with a new first axis."""
    rows = []
    for factors in matrix:
        terms = [part if f == 1 else part * part.dtype.type(f) for f, part in zip(factors, parts, strict=True) if f]
        rows.append(functools.reduce(jnp.add, terms))
    return jnp.stack(rows)


@functools.cache
def matrices(points: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A.T (n - 1, n + 1), G (n + 1, 3) and B.T (n + 1, n + 1) for n points and infinity.

    Row i of G evaluates the kernel at point i, over the product of that point's distances from the others; a row of B.T
    is the polynomial whose zeros are the other points. The last rows stand for infinity.
    """
    size = len(points) - 1
    others = [[q for q in points if q != p] for p in points]
    distances = [math.prod(p - q for q in rest) for p, rest in zip(points, others, strict=True)]
    filtering = [[p**j / d for j in range(3)] for p, d in zip(points, distances, strict=True)]
    before = [[*np.poly(rest)[::-1], 0.0] for rest in others]
    after = [[*(p**i for p in points), float(i == size - 1)] for i in range(size)]
    return np.array(after), np.array([*filtering, [0.0, 0.0, 1.0]]), np.array([*before, np.poly(points)[::-1]])
