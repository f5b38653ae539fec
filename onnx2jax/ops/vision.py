"""Sampling, regions of interest and images: GridSample, AffineGrid, RoiAlign, MaxRoiPool, NonMaxSuppression, ..."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import check_shape, dims, xp
from .norm import wide_dtype
from .registry import Static, op, taking
from .resize import cubic, hat

Kernel = Literal["linear", "nearest", "cubic"]
Kernel16 = Literal["bilinear", "nearest", "bicubic"]
Padding = Literal["zeros", "border", "reflection"]
RoiCoordinates = Literal["half_pixel", "output_half_pixel"]


def sample(x, taps):
    """Sum of x (N, C, extents...) read at the taps of every axis, each a list of (index, weight), both (N, out...).

    An index outside the extent reads zero.
    """
    batch, channels, *extents = x.shape
    shape = taps[0][0][0].shape[1:]
    count, flat, total = math.prod(shape), x.reshape(batch, channels, math.prod(extents)), 0
    for corner in itertools.product(*taps):
        place, weight, inside = 0, 1, True
        for (index, share), n in zip(corner, extents, strict=True):
            inside = inside & (index >= 0) & (index < n)
            place, weight = place * n + jnp.clip(index, 0, n - 1), weight * share
        values = jax.vmap(lambda image, at: image[:, at])(flat, place.reshape(batch, count))
        kept = jnp.where(inside, weight, 0).reshape(batch, 1, count)
        total = total + values * kept.astype(x.dtype)
    return total.reshape(batch, channels, *shape)


def _index(coordinate):
    """Truncated to int32; what no image reaches becomes -2 (NaN and infinities included)."""
    return jnp.where(jnp.abs(coordinate) < 2.0**30, coordinate, -2).astype(jnp.int32)


def linear_taps(coordinate):
    """The two neighbours of a coordinate and their shares."""
    low = lax.floor(coordinate)
    share = coordinate - low
    return [(_index(low), 1 - share), (_index(low) + 1, share)]


def sample_linear(x, coordinates):
    """N-linear interpolation of x (N, C, extents...) at one coordinate array (N, out...) an axis; zero outside."""
    return sample(x, [linear_taps(c) for c in coordinates])


def _cubic_taps(coordinate):
    low = lax.floor(coordinate)
    return [(low + k, cubic(coordinate - low - k)) for k in (-1, 0, 1, 2)]


def _pad_coordinate(coordinate, n, padding_mode, align_corners):
    """Bring a coordinate into [0, n - 1] as the padding mode says; zeros leaves it where it is."""
    if padding_mode == "zeros":
        return coordinate
    if padding_mode == "reflection":
        low, span = (0.0, n - 1) if align_corners else (-0.5, n)
        if span == 0:
            return jnp.zeros_like(coordinate)
        away = jnp.abs(coordinate - low) % (2 * span)
        coordinate = jnp.minimum(away, 2 * span - away) + low
    return jnp.clip(coordinate, 0, n - 1)


@op("GridSample", since=20, heavy=True, limits="no strings, although the schema lists them")
def grid_sample(X, grid, *, align_corners=0, mode: Kernel = "linear", padding_mode: Padding = "zeros"):
    """GridSample: the image read at normalised positions, innermost axis first."""
    X, grid = jnp.asarray(X), jnp.asarray(grid)
    extents = X.shape[2:]
    check_shape("grid", grid, X.shape[0], *["extent"] * len(extents), len(extents))
    grid = grid.astype(wide_dtype(grid))

    def taps(n, normal):
        at = (normal + 1) / 2 * (n - 1) if align_corners else ((normal + 1) * n - 1) / 2
        if mode == "cubic":  # here it is the neighbours that are padded, not the coordinate
            return [(_index(_pad_coordinate(i, n, padding_mode, align_corners)), w) for i, w in _cubic_taps(at)]
        at = _pad_coordinate(at, n, padding_mode, align_corners)
        return linear_taps(at) if mode == "linear" else [(_index(jnp.round(at)), jnp.ones_like(at))]

    wide = X.dtype if mode == "nearest" else wide_dtype(X, grid)
    return sample(X.astype(wide), [taps(n, grid[..., -1 - k]) for k, n in enumerate(extents)]).astype(X.dtype)


@op("GridSample", since=16)
def grid_sample_16(X, grid, *, align_corners=0, mode: Kernel16 = "bilinear", padding_mode: Padding = "zeros"):
    kernel: Any = mode.removeprefix("bi")
    return grid_sample(X, grid, align_corners=align_corners, mode=kernel, padding_mode=padding_mode)


@op("AffineGrid", since=20, half="float32")
def affine_grid(theta, size: Static, *, align_corners=0):
    """Positions of an even grid over [-1, 1], innermost axis first, moved by each affine matrix."""
    _, _, *extents = dims(size)
    ticks = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in extents]
    position = np.stack([*np.meshgrid(*ticks, indexing="ij")[::-1], np.ones(extents)], axis=-1)
    return jnp.einsum("...k,nrk->n...r", position.astype(theta.dtype), theta, precision=lax.Precision.HIGHEST)


@op("RoiAlign", since=16, half="float32", heavy=True)
def roi_align(
    X, rois, batch_indices, *, coordinate_transformation_mode: RoiCoordinates = "half_pixel",
    mode: Literal["avg", "max"] = "avg", output_height=1, output_width=1, sampling_ratio=0, spatial_scale=1.0,
):  # fmt: skip
    """Every region is linear in the map along each axis, so two small weight matrices a region do the work.

    Regions are data here, not variables: no gradient flows to them.
    """
    check_shape("X", X, "batch", "channels", "height", "width")
    check_shape("rois", rois, "regions", 4)
    check_shape("batch_indices", batch_indices, rois.shape[0])
    half_pixel = coordinate_transformation_mode == "half_pixel"
    X, kind, bins, extents = jnp.asarray(X), jnp.finfo(X.dtype), (output_height, output_width), X.shape[2:]
    rois = lax.stop_gradient(jnp.asarray(rois)) * spatial_scale - (0.5 if half_pixel else 0.0)
    corners, sizes = rois[:, 1::-1], (rois[:, 2:] - rois[:, :2])[:, ::-1]
    sizes = sizes if half_pixel else jnp.maximum(sizes, 1)
    if sampling_ratio > 0:
        counts, most = jnp.full(sizes.shape, sampling_ratio), sampling_ratio
    else:
        counts = jnp.ceil(sizes / np.array(bins, X.dtype)).astype(jnp.int64)
        most = jnp.max(counts, initial=0)

    def region(arguments):
        corner, size, count, image = arguments
        image = jnp.take(X, image, axis=0)

        def samples(k, i):
            """Sample i of each bin along axis k: where it is, and whether on the map; off it, it reads zero."""
            step = size[k] / bins[k]
            shift = (i.astype(X.dtype) + 0.5) / count[k].astype(X.dtype)
            away = step * (np.arange(bins[k], dtype=X.dtype) + shift)
            # XLA computes this anew for cells and for weights; a multiply-add fused in one alone differs at an edge.
            at = corner[k] + lax.reduce_precision(away, kind.nexp, kind.nmant - 1)
            return jnp.clip(at, 0, extents[k] - 1), (at >= -1) & (at <= extents[k])

        def mean_weights(k):
            def add(i, total):
                at, inside = samples(k, i)
                weights = hat(at[:, None] - jnp.arange(extents[k]).astype(X.dtype))
                return total + jnp.where(((i < count[k]) & inside)[:, None], weights, 0)

            total = lax.fori_loop(0, most, add, jnp.zeros((bins[k], extents[k]), X.dtype))
            return total / jnp.maximum(count[k], 1).astype(X.dtype)

        if mode == "avg":
            part = jnp.einsum("chw,qw->chq", image, mean_weights(1), precision=lax.Precision.HIGHEST)
            return jnp.einsum("ph,chq->cpq", mean_weights(0), part, precision=lax.Precision.HIGHEST)
        flat = image.reshape(len(image), -1)

        def choose(k, best):
            """Keep the greatest product of a cell and its weight (ONNX does not add the neighbours up before)."""
            i, j = k // most, k % most
            (top, in_rows), (left, in_columns) = samples(0, i), samples(1, j)
            for (row, high), (column, wide_) in itertools.product(linear_taps(top), linear_taps(left)):
                cell = jnp.minimum(row, extents[0] - 1)[:, None] * extents[1] + jnp.minimum(column, extents[1] - 1)
                weight = jnp.where(in_rows[:, None] & in_columns, high[:, None] * wide_, 0)
                value = lax.stop_gradient(flat)[:, cell] * weight
                better = (i < count[0]) & (j < count[1]) & ((value > best[0]) | jnp.isnan(value))
                best = [jnp.where(better, new, old) for new, old in zip((value, weight, cell), best, strict=True)]
            return best

        zeros = jnp.zeros((len(image), *bins), X.dtype)
        best = lax.fori_loop(0, most * most, choose, [zeros - jnp.inf, zeros, zeros.astype(jnp.int32)])
        return jnp.take_along_axis(flat, best[2].reshape(len(image), -1), axis=1).reshape(zeros.shape) * best[1]

    return lax.map(region, (corners, sizes, counts, jnp.asarray(batch_indices)), batch_size=16)


@op("RoiAlign", since=10, half="float32")
@taking(output_height=1, output_width=1, sampling_ratio=0, spatial_scale=1.0)
def roi_align_10(X, rois, batch_indices, *, mode: Literal["avg", "max"] = "avg", **attributes):
    how: dict[str, Any] = {"coordinate_transformation_mode": "output_half_pixel", "mode": mode}
    return roi_align(X, rois, batch_indices, **how, **attributes)


@op("MaxRoiPool", half="float32", heavy=True, unsharded=True)
def max_roi_pool(X, rois, *, pooled_shape, spatial_scale=1.0):
    """The maximum of every bin of a region rounded to whole cells; an empty bin gives zero."""
    check_shape("X", X, "batch", "channels", "height", "width")
    check_shape("rois", rois, "regions", 5)
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
    """Boxes [..., 4] as [5, ...]: the least corner, the greatest, the area."""
    boxes = boxes.transpose(boxes.ndim - 1, *range(boxes.ndim - 1))
    first, second = boxes[:2], boxes[2:]
    if center_point_box:
        low, high = first - second / 2, first + second / 2
    else:
        low, high = xp.minimum(first, second), xp.maximum(first, second)
    sides = high - low
    return xp.concatenate([low, high, sides[:1] * sides[1:]])


def overlap(a, b, threshold):
    """Whether what two boxes have in common is more than this share of what they cover together."""
    sides = xp.maximum(xp.minimum(a[2:4], b[2:4]) - xp.maximum(a[:2], b[:2]), 0)
    common = sides[0] * sides[1]
    return common / (a[4] + b[4] - common) > threshold  # of two without an area it is NaN, which is not more


_BLOCK = 64
"""Boxes compared with each other at once: of more, many are gone already; fewer take more calls of NumPy."""

_LATER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)
"""For each box of a block those that come later."""


def _greedy(boxes, threshold, limit):
    """The places of the boxes kept, of boxes [5, N] in the order of their scores."""
    kept, alive = np.zeros(0, np.int64), np.arange(boxes.shape[1])
    while alive.size and kept.size < limit:
        size = min(_BLOCK, 2 * (limit - kept.size))  # the first of a block stays, and most others do
        block, alive = alive[:size], alive[size:]
        some, gone = boxes.take(block, 1), np.zeros(block.size, bool)
        hits = overlap(some[:, :, None], some[:, None], threshold) & _LATER[: block.size, : block.size]
        for i in hits.any(1).nonzero()[0].tolist():
            if not gone[i]:
                gone |= hits[i]
        kept = np.concatenate([kept, block[~gone]])
        if alive.size and kept.size < limit:
            alive = alive[~overlap(some[:, ~gone, None], boxes.take(alive, 1)[:, None], threshold).any(0)]
    return kept[:limit]


@op("NonMaxSuppression", since=10, limits="its output's shape depends on data; not differentiable")
def non_max_suppression(
    boxes: Static, scores: Static, max_output_boxes_per_class: Static = None, iou_threshold: Static = None,
    score_threshold: Static = None, *, center_point_box=0,
):  # fmt: skip
    """Greedy choice by score; a box goes when it overlaps a chosen one by more than the threshold."""
    check_shape("boxes", boxes, "images", "boxes", 4)
    check_shape("scores", scores, boxes.shape[0], "classes", boxes.shape[1])
    given = max_output_boxes_per_class, iou_threshold
    limit, threshold = (0 if v is None or not v.size else max(v.item(), 0) for v in given)
    boxes = corners(boxes, center_point_box)
    able = np.ones(scores.shape, bool)
    if score_threshold is not None and score_threshold.size:
        able = scores > score_threshold.item()
    chosen = [np.zeros((0, 3), np.int64)]
    for image, label in np.argwhere(able.any(2)).tolist():
        order = able[image, label].nonzero()[0]
        order = order[(-scores[image, label].take(order)).argsort(kind="stable")]
        kept = order.take(_greedy(boxes[:, image].take(order, 1), threshold, limit))
        chosen.append(np.empty((kept.size, 3), np.int64))
        chosen[-1][:, 0], chosen[-1][:, 1], chosen[-1][:, 2] = image, label, kept
    return np.concatenate(chosen)


@op("ImageDecoder", since=20, limits="needs the extra `image` (pillow), and decodes what pillow does")
def image_decoder(encoded_stream: Static, *, pixel_format: Literal["RGB", "BGR", "Grayscale"] = "RGB"):
    """Decode an image file to (height, width, channels); what cannot be decoded becomes an empty tensor."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise NotImplementedError("ImageDecoder needs the pillow package: pip install pillow") from error
    grey = pixel_format == "Grayscale"
    try:
        image = Image.open(io.BytesIO(np.asarray(encoded_stream).tobytes()))
        pixels = np.atleast_3d(np.asarray(image.convert("L" if grey else "RGB")))
    except (UnidentifiedImageError, OSError, SyntaxError):
        pixels = np.zeros((0, 0, 1 if grey else 3), np.uint8)
    return np.ascontiguousarray(pixels[..., ::-1]) if pixel_format == "BGR" else pixels
