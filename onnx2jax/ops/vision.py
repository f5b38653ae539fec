"""Sampling, regions of interest and images: GridSample, AffineGrid, RoiAlign, MaxRoiPool, NonMaxSuppression..."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..limits import LARGEST_TRACED
from .arrays import check_room, check_shape, dims, xp
from .norm import wide_dtype
from .registry import Static, op, taking
from .resize import cubic, hat
from .traced import unfolded

Kernel = Literal["linear", "nearest", "cubic"]
Kernel16 = Literal["bilinear", "nearest", "bicubic"]
Padding = Literal["zeros", "border", "reflection"]
RoiCoordinates = Literal["half_pixel", "output_half_pixel"]


def sample(x, taps):
    """The weighted sum (N, C, out...) of x (N, C, extents...) over the taps of every axis.

    Each axis has a list of taps (index, weight), both (N, out...). An index out of range reads zero.
    """
    batch, channels, *extents = x.shape
    shape = taps[0][0][0].shape[1:]
    count, flat, total = math.prod(shape), x.reshape(batch, channels, math.prod(extents)), 0
    for corner in itertools.product(*taps):
        position, weight, inside = 0, 1, True
        for (index, share), n in zip(corner, extents, strict=True):
            inside = inside & (index >= 0) & (index < n)
            position, weight = position * n + jnp.clip(index, 0, n - 1), weight * share
        values = jax.vmap(lambda image, index: image[:, index])(flat, position.reshape(batch, count))
        weight, inside = (v.reshape(batch, 1, count) for v in (weight, inside))
        # both: what is outside may have a weight of NaN, and the pixel read in its place may be infinite
        total = total + jnp.where(inside, values, 0) * jnp.where(inside, weight, 0).astype(x.dtype)
    return total.reshape(batch, channels, *shape)


def _index(coordinate):
    """A coordinate truncated to int32; NaN, infinities and anything beyond an image become -2."""
    return jnp.where(jnp.abs(coordinate) < 2.0**30, coordinate, -2).astype(jnp.int32)


def linear_taps(coordinate):
    """The two neighbours of a coordinate and their weights."""
    low = lax.floor(coordinate)
    share = coordinate - low
    return [(_index(low), 1 - share), (_index(low) + 1, share)]


def sample_linear(x, coordinates):
    """N-linear interpolation of x (N, C, extents...) at one coordinate array (N, out...) per axis; zero outside."""
    return sample(x, [linear_taps(c) for c in coordinates])


def _pad_coordinate(coordinate, n, padding_mode, align_corners):
    """A coordinate moved into [0, n - 1] by the padding mode; "zeros" leaves it unchanged."""
    if padding_mode == "zeros":
        return coordinate
    if padding_mode == "reflection":
        low, span = (0.0, n - 1) if align_corners else (-0.5, n)
        if span == 0:
            return jnp.zeros_like(coordinate)
        distance = jnp.abs(coordinate - low) % (2 * span)
        coordinate = jnp.minimum(distance, 2 * span - distance) + low
    return jnp.clip(coordinate, 0, n - 1)


@op("GridSample", since=20, heavy=True, exact=("grid",), limits="strings, although in the schema, are unsupported")
def grid_sample(X, grid, *, align_corners=0, mode: Kernel = "linear", padding_mode: Padding = "zeros"):
    """GridSample: the image sampled at normalised coordinates, innermost axis first."""
    X, grid = jnp.asarray(X), jnp.asarray(unfolded(grid))
    extents = X.shape[2:]
    check_shape("grid", grid, X.shape[0], *["extent"] * len(extents), len(extents))
    grid = grid.astype(wide_dtype(grid))

    def taps(n, normal):
        x = (normal + 1) / 2 * (n - 1) if align_corners else ((normal + 1) * n - 1) / 2
        padded = functools.partial(_pad_coordinate, n=n, padding_mode=padding_mode, align_corners=align_corners)
        if mode == "cubic":  # pads the neighbours instead of the coordinate
            low = lax.floor(x)
            return [(_index(padded(low + k)), cubic(x - low - k)) for k in (-1, 0, 1, 2)]
        if mode == "nearest":  # rounded before it is reflected, which decides ties
            return [(_index(padded(jnp.round(x))), jnp.ones_like(x))]
        return linear_taps(padded(x))

    work = X.dtype if mode == "nearest" else wide_dtype(X, grid)
    return sample(X.astype(work), [taps(n, grid[..., -1 - k]) for k, n in enumerate(extents)]).astype(X.dtype)


@op("GridSample", since=16)
def grid_sample_16(X, grid, *, align_corners=0, mode: Kernel16 = "bilinear", padding_mode: Padding = "zeros"):
    kernel: Any = mode.removeprefix("bi")
    return grid_sample(X, grid, align_corners=align_corners, mode=kernel, padding_mode=padding_mode)


@op("AffineGrid", since=20, half="float32")
def affine_grid(theta, size: Static, *, align_corners=0):
    """A uniform grid over [-1, 1], innermost axis first, transformed by each affine matrix."""
    _, _, *extents = dims(size)
    check_room((*extents, len(extents) + 1), np.float64)
    ticks = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in extents]
    position = np.stack([*np.meshgrid(*ticks, indexing="ij")[::-1], np.ones(extents)], axis=-1)
    return jnp.einsum("...k,nrk->n...r", position.astype(theta.dtype), theta, precision=lax.Precision.HIGHEST)


class _RoiBins(NamedTuple):
    """The bins of one of RoiAlign's regions, and the samples of each; pairs are (height, width).

    Attributes:
        corner: the corner of the region with the smaller coordinates, in cells [2].
        size: its extents in cells [2].
        count: the number of samples of a bin along each axis [2].
        shape: the number of bins along each axis.
        extents: of the feature map.
        ratio: the attribute sampling_ratio.
        most: samples of a bin to visit along each axis: at least those inside the map.
    """

    corner: Any
    size: Any
    count: Any
    shape: tuple[int, int]
    extents: tuple[int, int]
    ratio: int
    most: Any

    def sample(self, k, i):
        """Sample i of each bin along axis k: (coordinate, whether inside the map); outside it reads zero."""
        size, info = self.size[k], jnp.finfo(self.size.dtype)
        offset = size / self.shape[k] * (np.arange(self.shape[k], dtype=info.dtype) + (i + 0.5) / self.count[k])
        # XLA recomputes this for cells and for weights; a multiply-add fused in only one of them differs at edges.
        x = self.corner[k] + lax.reduce_precision(offset, info.nexp, info.nmant - 1)
        return jnp.clip(x, 0, self.extents[k] - 1), (x >= -1) & (x <= self.extents[k])

    def visited(self, k, i):
        """Samples as above, i counted from the first that may be inside; a loop over all of a wide box may not end."""
        count, i = self.count[k], i.astype(self.size.dtype)
        if self.ratio <= 0:
            step = self.size[k] / self.shape[k]
            before = (-1 - self.corner[k] - step * np.arange(self.shape[k], dtype=i.dtype)) / step * count - 0.5
            i = i + jnp.clip(jnp.floor(before) - 1, 0, jnp.maximum(count - 1, 0))
        x, inside = self.sample(k, i)
        return x, inside & (i < count)

    def mean_weights(self, k):
        """The weight of each cell along axis k in the mean of each bin [bins, extent]."""

        def add(i, total):
            x, counts = self.visited(k, i)
            weights = hat(x[:, None] - jnp.arange(self.extents[k]).astype(x.dtype))
            return total + jnp.where(counts[:, None], weights, 0)

        total = lax.fori_loop(0, self.most, add, jnp.zeros((self.shape[k], self.extents[k]), self.size.dtype))
        return total / jnp.maximum(self.count[k], 1)

    def fold(self, cells, combine, initial):
        """A loop over the samples of each bin, which combines (product, weight, cell) of what each one reads.

        ``cells`` [channels, height * width] are those of the map.
        """
        height, width = self.extents

        def visit(i, j, state):
            (top, rows), (left, columns) = self.visited(0, i), self.visited(1, j)
            counts = rows[:, None] & columns
            for (row, high), (column, wide) in itertools.product(linear_taps(top), linear_taps(left)):
                cell = jnp.minimum(row, height - 1)[:, None] * width + jnp.minimum(column, width - 1)
                weight = jnp.where(counts, high[:, None] * wide, 0)
                state = combine(state, (jnp.where(counts, cells[:, cell], 0) * weight, weight, cell), counts)
            return state

        loop = functools.partial(lax.fori_loop, 0, self.most)
        return loop(lambda i, state: loop(functools.partial(visit, i), state), initial)


def _mean_by_products(bins, image):
    """The mean of each bin [channels, bins...] of an image [channels, height, width], which has to be finite."""
    part = jnp.einsum("chw,qw->chq", image, bins.mean_weights(1), precision=lax.Precision.HIGHEST)
    return jnp.einsum("ph,chq->cpq", bins.mean_weights(0), part, precision=lax.Precision.HIGHEST)


def _mean_by_samples(bins, image):
    """The mean of each bin [channels, bins...], which reads no cells but its own."""
    number, zeros = jnp.maximum(bins.count.prod(), 1), jnp.zeros((len(image), *bins.shape), image.dtype)
    cells = lax.stop_gradient(image).reshape(len(image), math.prod(bins.extents))
    return bins.fold(cells, lambda total, new, counts: total + jnp.where(counts, new[0] / number, 0), zeros)


def _greatest(bins, image):
    """The greatest product of a cell and its weight: ONNX takes the maximum before adding neighbours."""

    def choose(best, new, counts):
        better = counts & ((new[0] > best[0]) | jnp.isnan(new[0]))
        return [jnp.where(better, a, b) for a, b in zip(new, best, strict=True)]

    cells, zeros = image.reshape(len(image), math.prod(bins.extents)), jnp.zeros((len(image), *bins.shape), image.dtype)
    rows, columns = (bins.sample(k, 0)[1] & bins.sample(k, bins.count[k] - 1)[1] for k in (0, 1))
    least = jnp.where(rows[:, None] & columns, -jnp.inf, zeros)  # samples outside are zeros
    best, weight, cell = bins.fold(lax.stop_gradient(cells), choose, [least, zeros, zeros.astype(jnp.int32)])
    best = jnp.where((bins.count > 0).all(), best, 0)
    y = jnp.take_along_axis(cells, cell.reshape(len(image), math.prod(bins.shape)), axis=1).reshape(zeros.shape)
    return jnp.where(jnp.isfinite(best) & jnp.isfinite(y), y * weight, best)


MOST_SAMPLES = 4096
"""A loop over its square does not end within minutes. Models sample up to 16 times; 0 adapts to the region."""


@op("RoiAlign", since=16, half="float32", heavy=True, exact=("rois",))
def roi_align(
    X, rois, batch_indices, *, coordinate_transformation_mode: RoiCoordinates = "half_pixel",
    mode: Literal["avg", "max"] = "avg", output_height=1, output_width=1, sampling_ratio=0, spatial_scale=1.0,
):  # fmt: skip
    """RoiAlign: each region is linear in the feature map along each axis, so it is two small matrix products.

    Their zeros would carry NaN and infinities to all bins: beside such cells, bins are summed sample by sample. No
    gradient flows to the regions.
    """
    check_shape("X", X, "batch", "channels", "height", "width")
    check_shape("rois", rois, "regions", 4)
    check_shape("batch_indices", batch_indices, rois.shape[0])
    if sampling_ratio > MOST_SAMPLES:
        raise ValueError(
            f"sampling_ratio ({sampling_ratio}) must not exceed {MOST_SAMPLES} samples along an axis of a bin"
        )
    check_room((rois.shape[0], X.shape[1], output_height, output_width), X.dtype, LARGEST_TRACED)
    half_pixel = coordinate_transformation_mode == "half_pixel"
    X, bins = jnp.asarray(X), (output_height, output_width)
    rois = lax.stop_gradient(jnp.asarray(rois)) * spatial_scale - (0.5 if half_pixel else 0.0)
    corners, sizes = rois[:, 1::-1], (rois[:, 2:] - rois[:, :2])[:, ::-1]
    sizes = sizes if half_pixel else jnp.maximum(sizes, 1)
    if sampling_ratio > 0:
        counts, most = jnp.full(sizes.shape, sampling_ratio, X.dtype), sampling_ratio
    else:
        counts = jnp.maximum(jnp.ceil(sizes / np.array(bins, X.dtype)), 0)
        counts = jnp.where(jnp.isfinite(counts), counts, 0)
        # Two samples of a bin are at least half a cell apart, so no more than these are inside the map.
        most = jnp.minimum(counts.max(initial=0), 2 * max(X.shape[2:]) + 5).astype(jnp.int32)

    def over_regions(pool, X):
        def pooled(region):
            *sides, index = region
            return pool(_RoiBins(*sides, bins, X.shape[2:], sampling_ratio, most), jnp.take(X, index, axis=0))

        return lax.map(pooled, (corners, sizes, counts, jnp.asarray(batch_indices)), batch_size=16)

    if mode == "max":
        return over_regions(_greatest, X)
    finite = jnp.isfinite(X)
    y = over_regions(_mean_by_products, jnp.where(finite, X, 0))
    exact = lax.cond(finite.all(), lambda: jnp.zeros_like(y), lambda: over_regions(_mean_by_samples, X))
    return jnp.where(jnp.isfinite(exact), y, exact)


@op("RoiAlign", since=10, half="float32")
@taking(output_height=1, output_width=1, sampling_ratio=0, spatial_scale=1.0)
def roi_align_10(X, rois, batch_indices, *, mode: Literal["avg", "max"] = "avg", **options):
    return roi_align(X, rois, batch_indices, coordinate_transformation_mode="output_half_pixel", mode=mode, **options)


@op("MaxRoiPool", half="float32", heavy=True, unsharded=True, exact=("rois",))
def max_roi_pool(X, rois, *, pooled_shape, spatial_scale=1.0):
    """The maximum of every bin of a region rounded to integer cells; an empty bin yields zero."""
    check_shape("X", X, "batch", "channels", "height", "width")
    check_shape("rois", rois, "regions", 5)
    if len(pooled_shape) != 2:
        raise ValueError(f"pooled_shape ({pooled_shape}) must be a height and a width")
    check_room((rois.shape[0], X.shape[1], *pooled_shape), X.dtype, LARGEST_TRACED)
    X, rois = jnp.asarray(X), lax.stop_gradient(jnp.asarray(rois))
    edges = lax.round(rois[:, 1:] * spatial_scale, lax.RoundingMethod.AWAY_FROM_ZERO).astype(jnp.int64)

    def inside(start, end, bins, extent):
        length, i = jnp.maximum(end - start + 1, 1), jnp.arange(bins)
        first, last = i * length // bins + start, -(-(i + 1) * length // bins) + start
        cell = jnp.arange(extent)
        return (cell >= first[:, None]) & (cell < last[:, None])

    def region(arguments):
        image, (left, top, right, bottom) = arguments
        rows = inside(top, bottom, pooled_shape[0], X.shape[2])
        columns = inside(left, right, pooled_shape[1], X.shape[3])
        least = jnp.array(-jnp.inf, X.dtype)
        part = jnp.where(columns, jnp.take(X, image, axis=0)[:, :, None], least).max(axis=3)
        part = jnp.where(rows[:, :, None], part[:, None], least).max(axis=2)
        return jnp.where(rows.any(1)[:, None] & columns.any(1), part, 0)

    return lax.map(region, (rois[:, 0].astype(jnp.int32), edges), batch_size=16)


def corners(boxes, center_point_box):
    """Boxes [..., 4] as [5, ...]: the lower corner (2), the upper corner (2), the area."""
    boxes = boxes.transpose(boxes.ndim - 1, *range(boxes.ndim - 1))
    first, second = boxes[:2], boxes[2:]
    if center_point_box:
        low, high = first - second / 2, first + second / 2
    else:
        low, high = xp.minimum(first, second), xp.maximum(first, second)
    sides = high - low
    return xp.concatenate([low, high, sides[:1] * sides[1:]])


def overlap(a, b, threshold):
    """Whether the intersection over union (IoU) of two boxes exceeds the threshold."""
    sides = xp.maximum(xp.minimum(a[2:4], b[2:4]) - xp.maximum(a[:2], b[:2]), 0)
    common = sides[0] * sides[1]
    return common / (a[4] + b[4] - common) > threshold  # NaN > threshold is False for two empty boxes


_BLOCK = 64
"""Boxes compared pairwise at once: larger blocks compare suppressed boxes, smaller ones need more NumPy calls."""

_LATER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)
"""[i, j] is true for j after i."""


def _greedy(boxes, threshold, limit):
    """Indices of the boxes kept by greedy suppression; ``boxes`` [5, N] are sorted by score."""
    kept, left = np.zeros(0, np.int64), np.arange(boxes.shape[1])
    while left.size and kept.size < limit:
        size = max(_BLOCK, limit - kept.size)  # those behind may never be looked at
        alive, left = left[:size], left[size:]
        if kept.size:
            alive = _others(alive, boxes.take(kept, 1), boxes, threshold)
        while alive.size and kept.size < limit:
            size = min(_BLOCK, 2 * (limit - kept.size))  # most boxes of a block are usually kept
            block, alive = alive[:size], alive[size:]
            candidates, suppressed = boxes.take(block, 1), np.zeros(block.size, bool)
            hits = overlap(candidates[:, :, None], candidates[:, None], threshold) & _LATER[: block.size, : block.size]
            for i in hits.any(1).nonzero()[0].tolist():
                if not suppressed[i]:
                    suppressed |= hits[i]
            kept = np.concatenate([kept, block[~suppressed]])
            if alive.size and kept.size < limit:
                alive = _others(alive, candidates[:, ~suppressed], boxes, threshold)
    return kept[:limit]


def _others(indices, kept, boxes, threshold):
    """The indices of boxes that overlap with none of the kept boxes [5, M]."""
    return indices[~overlap(kept[:, :, None], boxes.take(indices, 1)[:, None], threshold).any(0)]


@op("NonMaxSuppression", since=10, exact=("boxes", "scores"), limits="data-dependent output shape; not differentiable")
def non_max_suppression(
    boxes: Static, scores: Static, max_output_boxes_per_class: Static = None, iou_threshold: Static = None,
    score_threshold: Static = None, *, center_point_box=0,
):  # fmt: skip
    """Indices [n, 3] of (image, class, box), greedy by score; drops boxes whose IoU with a kept one exceeds a limit."""
    check_shape("boxes", boxes, "images", "boxes", 4)
    check_shape("scores", scores, boxes.shape[0], "classes", boxes.shape[1])
    limits = max_output_boxes_per_class, iou_threshold
    limit, threshold = (0 if v is None or not v.size else max(v.item(), 0) for v in limits)
    boxes = corners(boxes, center_point_box)
    candidates = np.ones(scores.shape, bool)
    if score_threshold is not None and score_threshold.size:
        candidates = scores > score_threshold.item()
    chosen = [np.zeros((0, 3), np.int64)]
    for image, label in np.argwhere(candidates.any(2)).tolist():
        order = candidates[image, label].nonzero()[0]
        order = order[(-scores[image, label].take(order)).argsort(kind="stable")]
        kept = order.take(_greedy(boxes[:, image].take(order, 1), threshold, limit))
        chosen.append(np.empty((kept.size, 3), np.int64))
        chosen[-1][:, 0], chosen[-1][:, 1], chosen[-1][:, 2] = image, label, kept
    return np.concatenate(chosen)


def pillow():
    """The module PIL.Image."""
    compat.optional("PIL", "image")
    return importlib.import_module("PIL.Image")


@op(
    "ImageDecoder", since=20, extra="image",
    limits="needs the extra `image` (pillow); decodes the formats pillow supports",
)  # fmt: skip
def image_decoder(encoded_stream: Static, *, pixel_format: Literal["RGB", "BGR", "Grayscale"] = "RGB"):
    """An encoded image as [height, width, channels]; an empty tensor if it cannot be decoded."""
    grey, images = pixel_format == "Grayscale", pillow()
    try:
        image = images.open(io.BytesIO(np.asarray(encoded_stream).tobytes()))
        pixels = np.atleast_3d(np.asarray(image.convert("L" if grey else "RGB")))
    except (OSError, SyntaxError):
        pixels = np.zeros((0, 0, 1 if grey else 3), np.uint8)
    return np.ascontiguousarray(pixels[..., ::-1]) if pixel_format == "BGR" else pixels
