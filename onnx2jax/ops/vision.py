"""Sampling, regions of interest and images: GridSample, AffineGrid, RoiAlign, MaxRoiPool, NonMaxSuppression, ..."""

from __future__ import annotations

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import dims
from .norm import wide_dtype
from .registry import Static, op


def sample(x, taps):
    """Sum of x (N, C, extents...) read at the taps of every axis, each a list of (index, weight), both (N, out...).

    An index outside the extent reads zero.
    """
    batch, channels, *extents = x.shape
    shape = taps[0][0][0].shape[1:]
    flat, total = x.reshape(batch, channels, -1), 0
    for corner in itertools.product(*taps):
        place, weight, inside = 0, 1, True
        for (index, share), n in zip(corner, extents, strict=True):
            inside = inside & (index >= 0) & (index < n)
            place, weight = place * n + jnp.clip(index, 0, n - 1), weight * share
        values = jax.vmap(lambda image, at: image[:, at])(flat, place.reshape(batch, -1))
        kept = jnp.where(inside, weight, 0).reshape(batch, 1, -1)
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


def _cubic_taps(coordinate, a=-0.75):
    low = lax.floor(coordinate)
    t = coordinate - low
    near = lambda s: ((a + 2) * s - (a + 3)) * s * s + 1  # noqa: E731
    far = lambda s: ((a * s - 5 * a) * s + 8 * a) * s - 4 * a  # noqa: E731
    return [(low - 1, far(t + 1)), (low, near(t)), (low + 1, near(1 - t)), (low + 2, far(2 - t))]


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


_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def _grid_sample(X, grid, align_corners, mode, padding_mode):
    mode = _MODES.get(mode, mode)
    if mode not in ("linear", "nearest", "cubic"):
        raise ValueError(f"mode ({mode!r}) is none of linear, nearest, cubic")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise ValueError(f"padding_mode ({padding_mode!r}) is none of zeros, border, reflection")
    X, grid = jnp.asarray(X), jnp.asarray(grid)
    extents = X.shape[2:]
    if grid.shape[-1] != len(extents):
        raise ValueError(f"the last axis of grid {grid.shape} must hold {len(extents)} coordinates for X {X.shape}")
    grid = grid.astype(wide_dtype(grid))
    taps = []
    for axis, n in enumerate(extents):
        normal = grid[..., len(extents) - 1 - axis]
        at = (normal + 1) / 2 * (n - 1) if align_corners else ((normal + 1) * n - 1) / 2
        if mode == "cubic":  # here it is the neighbours that are padded, not the coordinate
            neighbours = _cubic_taps(at)
            taps.append([(_index(_pad_coordinate(i, n, padding_mode, align_corners)), w) for i, w in neighbours])
            continue
        at = _pad_coordinate(at, n, padding_mode, align_corners)
        taps.append(linear_taps(at) if mode == "linear" else [(_index(jnp.round(at)), jnp.ones_like(at))])
    if mode == "nearest":
        return sample(X, taps)
    wide = wide_dtype(X, grid)
    return sample(X.astype(wide), taps).astype(X.dtype)


@op("GridSample", since=16, heavy=True)
def grid_sample_16(X, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    return _grid_sample(X, grid, align_corners, mode, padding_mode)


@op("GridSample", since=20, heavy=True)
def grid_sample(X, grid, *, align_corners=0, mode="linear", padding_mode="zeros"):
    return _grid_sample(X, grid, align_corners, mode, padding_mode)


@op("AffineGrid", since=20)
def affine_grid(theta, size: Static, *, align_corners=0):
    """Positions of an even grid over [-1, 1], innermost axis first, moved by each affine matrix."""
    _, _, *extents = dims(size)
    ticks = []
    for n in extents:
        steps = np.arange(n, dtype=np.float64)
        ticks.append(steps * 2 / max(n - 1, 1) - 1 if align_corners else (2 * steps + 1) / n - 1)
    position = np.stack([*np.meshgrid(*ticks, indexing="ij")[::-1], np.ones(extents)], axis=-1)
    theta = jnp.asarray(theta)
    wide = wide_dtype(theta)
    grid = jnp.einsum(
        "...k,nrk->n...r", jnp.asarray(position, wide), theta.astype(wide), precision=lax.Precision.HIGHEST
    )
    return grid.astype(theta.dtype)


def _roi_weights(start, length, bins, extent, per_bin, most):
    """What the samples of a region take from each cell of an axis: (sum, greatest, least, touched, outside).

    All but the last are (bins, extent): sums, maxima and minima over the samples of a bin of the linear weight of a
    cell, and whether any sample touches it; ``outside`` (bins,) tells of samples beyond the map, which read zero.
    """
    cell = jnp.arange(extent).astype(start.dtype)
    step = length / bins
    corner = start + jnp.arange(bins).astype(start.dtype) * step

    def visit(i, state):
        total, greatest, least, touched, outside = state
        at = corner + (i + 0.5).astype(start.dtype) * step / per_bin.astype(start.dtype)
        active = i < per_bin
        beyond = (at < -1) | (at > extent)
        at = jnp.clip(at, 0, extent - 1)[:, None]
        low = lax.floor(at)
        share = at - low
        last = low >= extent - 1  # both neighbours are the last cell, the second with weight zero
        is_low, is_high = cell == low, (cell == low + 1) | (last & (cell == low))
        reads = active & ~beyond[:, None] & (is_low | is_high)
        weight = jnp.where(is_low, 1 - share, share)
        total = total + jnp.where(reads, weight, 0)
        greatest = jnp.where(reads, jnp.maximum(greatest, weight), greatest)
        weight = jnp.where(last & is_low, 0, weight)
        least = jnp.where(reads, jnp.minimum(least, weight), least)
        return total, greatest, least, touched | reads, outside | (active & beyond)

    zeros = jnp.zeros((bins, extent), start.dtype)
    state = (zeros, zeros, zeros + jnp.inf, zeros > 0, jnp.zeros(bins, bool))
    total, greatest, least, touched, outside = lax.fori_loop(0, most, visit, state)
    return total / jnp.maximum(per_bin, 1).astype(start.dtype), greatest, least, touched, outside


def _roi_align(X, rois, batch_indices, mode, output_height, output_width, sampling_ratio, spatial_scale, half_pixel):
    """Every region is linear in the map along each axis, so two small weight matrices a region do the work.

    Regions are data here, not variables: no gradient flows to them.
    """
    if mode not in ("avg", "max"):
        raise ValueError(f"mode ({mode!r}) is neither avg nor max")
    X = jnp.asarray(X)
    wide = wide_dtype(X)
    shift = 0.5 if half_pixel else 0.0
    rois = lax.stop_gradient(jnp.asarray(rois).astype(wide)) * spatial_scale - shift
    corner, size = rois[:, :2][:, ::-1], (rois[:, 2:] - rois[:, :2])[:, ::-1]
    bins = (output_height, output_width)
    if not half_pixel:
        size = jnp.maximum(size, 1)
    if sampling_ratio > 0:
        counts, most = jnp.full(size.shape, sampling_ratio), sampling_ratio
    else:
        counts = jnp.ceil(size / jnp.asarray(bins, wide)).astype(jnp.int64)
        most = jnp.max(counts, initial=0)

    def region(arguments):
        at, length, count, image = arguments
        image = jnp.take(X, image, axis=0).astype(wide)
        rows, columns = (_roi_weights(at[k], length[k], bins[k], X.shape[2 + k], count[k], most) for k in range(2))
        if mode == "avg":
            part = jnp.einsum("chw,qw->chq", image, columns[0], precision=lax.Precision.HIGHEST)
            return jnp.einsum("ph,chq->cpq", rows[0], part, precision=lax.Precision.HIGHEST)
        return _roi_max(image, rows, columns)

    y = lax.map(region, (corner, size, counts, jnp.asarray(batch_indices)), batch_size=16)
    return y.astype(X.dtype)


def _roi_max(image, rows, columns):
    """The greatest product of a sample's weight and cell (ONNX takes the maximum before adding neighbours up)."""
    (_, top_h, low_h, seen_h, out_h), (_, top_w, low_w, seen_w, out_w) = rows, columns
    positive = jnp.max(image[:, :, None] * top_w, axis=3, initial=0)
    positive = jnp.max(positive[:, None] * top_h[:, :, None], axis=2, initial=0)
    far = jnp.inf
    shortfall = jnp.where(seen_w, jnp.maximum(-image, 0)[:, :, None] * jnp.where(seen_w, low_w, 0), far).min(axis=3)
    seen = seen_h[:, :, None]
    shortfall = jnp.where(seen, shortfall[:, None] * jnp.where(seen, low_h[:, :, None], 0), far).min(axis=2)
    zero = out_h[:, None] | out_w | ~jnp.isfinite(shortfall)
    return jnp.where(positive > 0, positive, jnp.where(zero, 0, -shortfall))


@op("RoiAlign", since=10, heavy=True)
def roi_align_10(
    X, rois, batch_indices, *, mode="avg", output_height=1, output_width=1, sampling_ratio=0, spatial_scale=1.0
):
    return _roi_align(X, rois, batch_indices, mode, output_height, output_width, sampling_ratio, spatial_scale, False)


@op("RoiAlign", since=16, heavy=True)
def roi_align(
    X, rois, batch_indices, *, coordinate_transformation_mode="half_pixel", mode="avg", output_height=1,
    output_width=1, sampling_ratio=0, spatial_scale=1.0,
):  # fmt: skip
    if coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise ValueError(
            f"coordinate_transformation_mode ({coordinate_transformation_mode!r}) is neither half_pixel nor "
            f"output_half_pixel"
        )
    half = coordinate_transformation_mode == "half_pixel"
    return _roi_align(X, rois, batch_indices, mode, output_height, output_width, sampling_ratio, spatial_scale, half)


@op("MaxRoiPool", heavy=True)
def max_roi_pool(X, rois, *, pooled_shape, spatial_scale=1.0):
    """The maximum of every bin of a region rounded to whole cells; an empty bin gives zero."""
    X = jnp.asarray(X)
    wide = wide_dtype(X)
    rois = lax.stop_gradient(jnp.asarray(rois).astype(wide))
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


@op("NonMaxSuppression", since=10)
def non_max_suppression(
    boxes: Static,
    scores: Static,
    max_output_boxes_per_class: Static = None,
    iou_threshold: Static = None,
    score_threshold: Static = None,
    *,
    center_point_box=0,
):
    """Greedy choice by score; a box goes when it overlaps a chosen one by more than the threshold."""
    limit, overlap = (0 if v is None or not v.size else v.item() for v in (max_output_boxes_per_class, iou_threshold))
    if center_point_box:
        half = boxes[..., 2:] / 2
        low, high = boxes[..., :2] - half, boxes[..., :2] + half
    else:
        low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    area = np.prod(high - low, axis=-1)
    chosen = []
    for image, label in np.ndindex(scores.shape[:2]):
        score = scores[image, label]
        order = np.argsort(-score, kind="stable")
        if score_threshold is not None and score_threshold.size:
            order = order[score[order] > score_threshold.item()]
        kept = 0
        while order.size and kept < limit:
            best, order = order[0], order[1:]
            chosen.append((image, label, best))
            kept += 1
            sides = np.minimum(high[image, order], high[image, best]) - np.maximum(low[image, order], low[image, best])
            common = np.prod(np.maximum(sides, 0), axis=-1)
            union = area[image, order] + area[image, best] - common
            order = order[~(np.divide(common, union, out=np.zeros_like(common), where=union > 0) > overlap)]
    return np.array(chosen, np.int64).reshape(-1, 3)


@op("ImageDecoder", since=20)
def image_decoder(encoded_stream: Static, *, pixel_format="RGB"):
    """Decode an image file to (height, width, channels); what cannot be decoded becomes an empty tensor."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise NotImplementedError("ImageDecoder needs the pillow package: pip install pillow") from error
    if pixel_format not in ("RGB", "BGR", "Grayscale"):
        raise ValueError(f"pixel_format ({pixel_format!r}) is none of RGB, BGR, Grayscale")
    try:
        image = Image.open(io.BytesIO(np.asarray(encoded_stream).tobytes()))
        pixels = np.asarray(image.convert("L" if pixel_format == "Grayscale" else "RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError):
        return np.zeros((0, 0, 1 if pixel_format == "Grayscale" else 3), np.uint8)
    if pixel_format == "Grayscale":
        return pixels[..., None]
    return np.ascontiguousarray(pixels[..., ::-1]) if pixel_format == "BGR" else pixels
