"""The com.microsoft domain: softmax, dropout, Fourier transforms, sampling and windows."""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..activation import softmax
from ..arrays import axis_of, check_room, check_shape, dims, xp
from ..cast import is_float
from ..conv import conv_transpose
from ..indexing import BOUNDS, gather
from ..norm import dropout
from ..registry import Static, taking
from ..signal import to_parts
from ..vision import Kernel16, Padding, grid_sample_16, sample, sample_linear
from ..window import WINDOW
from . import microsoft, operands
from .fused import ACTIVATION_NAMES, activate, fused_matmul

microsoft("SampleOp", wide=True)(lambda X: X)


@microsoft("BiasSoftmax", half="float32", wide=True)
def bias_softmax(data, bias, *, axis=1, is_inner_broadcast):
    """Softmax of ``data + bias`` over the axes from ``axis`` on; bias broadcasts over leading or inner axes."""
    axis = axis_of(axis, data.ndim)
    extents = list(zip(data.shape, (1,) * (data.ndim - bias.ndim) + bias.shape, strict=True))
    repeated = [b != n for n, b in extents[:axis] if n != 1]
    if repeated != sorted(repeated, reverse=not is_inner_broadcast) or any(b != n for n, b in extents[axis:]):
        raise ValueError(
            f"with is_inner_broadcast={is_inner_broadcast}, bias {bias.shape} may only broadcast over "
            f"{'inner' if is_inner_broadcast else 'leading'} axes of data {data.shape} before axis {axis}"
        )
    return softmax(data + bias, axes=tuple(range(axis, data.ndim)))


DRAWS = "training draws from the caller's PRNG key, or from the key of `seed`"


@microsoft("BiasDropout", half="float32", limits=DRAWS)
def bias_dropout(data, bias, residual=None, ratio=None, training_mode: Static = None, *, seed=None, rng):
    """(dropout of ``data + bias`` plus the residual, mask of kept elements)."""
    if bias.shape not in (data.shape, data.shape[-1:]):
        raise ValueError(f"bias {bias.shape} must have the shape of data {data.shape} or of its last axis")
    y, mask = dropout(data + bias, ratio, training_mode, seed=seed, rng=rng)
    return y if residual is None else y + residual, mask


def with_bitmask(function):
    """A dropout whose mask is a vector of uint32, 32 elements each, lowest bit first, padded with zeros."""

    @functools.wraps(function)
    def masked(*inputs, **attributes):
        y, mask = function(*inputs, **attributes)
        bits = jnp.pad(mask.reshape(-1), (0, -mask.size % 32)).reshape(-1, 32)
        return y, jnp.sum(bits.astype(np.uint32) << np.arange(32, dtype=np.uint32), axis=1, dtype=np.uint32)

    return masked


microsoft("BitmaskBiasDropout", half="float32", limits=DRAWS)(with_bitmask(bias_dropout))
microsoft("BitmaskDropout", limits=DRAWS)(with_bitmask(dropout))


@microsoft("IsAllFinite")
def is_all_finite(*input, isinf_only=0, isnan_only=0):
    """Whether no tensor contains an infinity or NaN (or only infinities, or only NaN, are tested)."""
    if isinf_only and isnan_only:
        raise ValueError("isinf_only and isnan_only must not both be 1: to test both, leave both 0")
    bad = xp.isinf if isinf_only else xp.isnan if isnan_only else lambda x: ~xp.isfinite(x)
    return ~xp.any(xp.stack([xp.any(bad(x)) for x in input]))


def _complex(x):
    check_shape("a complex tensor", x.reshape(-1, *x.shape[-1:]), "elements", 2)
    return lax.complex(x[..., 0], x[..., 1])


_PAIRS = "complex numbers are pairs in the last axis"
_ONE = f"{_PAIRS}; one-dimensional, one-sided, not normalized"
_complex_op = functools.partial(microsoft, half="float32", limits=_PAIRS)
_complex_op("ComplexMul")(lambda A, B: to_parts(_complex(A) * _complex(B)))
_complex_op("ComplexMulConj")(lambda A, B: to_parts(_complex(A) * _complex(B).conj()))


@microsoft("Rfft", half="float32", heavy=True, wide=True, limits=_ONE)
def rfft(X, *, normalized: Literal[0] = 0, onesided: Literal[1] = 1, signal_ndim: Literal[1] = 1):
    """The Fourier transform of real signals of even length: [..., n] -> [..., n / 2 + 1, 2]."""
    del normalized, onesided, signal_ndim
    if X.shape[-1] % 2:
        raise ValueError(f"the signal length ({X.shape[-1]}) must be even")
    return to_parts(jnp.fft.rfft(jnp.asarray(X)))


@microsoft("Irfft", half="float32", heavy=True, wide=True, limits=_ONE)
def irfft(X, *, normalized: Literal[0] = 0, onesided: Literal[1] = 1, signal_ndim: Literal[1]):
    """The inverse of Rfft: [..., n / 2 + 1, 2] -> [..., n]."""
    del normalized, onesided, signal_ndim
    return jnp.fft.irfft(_complex(jnp.asarray(X)))


_FLOATING = "floating-point tensors only: the schema does not define other results"


@microsoft("GridSample", heavy=True, exact=("Grid",), limits=_FLOATING)
def ms_grid_sample(X, Grid, *, align_corners=0, mode: Kernel16 = "bilinear", padding_mode: Padding = "zeros"):
    """GridSample of opset 16."""
    if not is_float(X.dtype):
        raise NotImplementedError(f"X of {X.dtype} is unsupported; Cast it to float first")
    return grid_sample_16(X, Grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@microsoft("CropAndResize", half="float32", heavy=True, exact=("rois", "crop_size"))
@operands(X="batch channels height width", rois="regions 4", batch_indices="regions", crop_size="2")
def crop_and_resize(
    X, rois, batch_indices, crop_size: Static,
    *, extrapolation_value=0.0, mode: Literal["bilinear", "nearest"] = "bilinear",
):  # fmt: skip
    """Regions of images, with corners in [0, 1], resized to one size with aligned corners."""
    if min(sizes := dims(crop_size)) < 1 or len(sizes) != 2:
        raise ValueError(f"crop_size ({sizes}) must be a positive height and width")
    check_room((rois.shape[0], X.shape[1], *sizes), X.dtype)
    X = jnp.asarray(X)

    def coordinates(first, last, count, extent):
        if count == 1:
            return jnp.reshape((first + last) / 2 * (extent - 1), 1)
        steps = np.arange(count, dtype=X.dtype)
        return first * (extent - 1) + steps * ((last - first) * (extent - 1) / (count - 1))

    def region(arguments):
        image, roi = arguments
        axes = [coordinates(roi[k], roi[k + 2], n, X.shape[2 + k]) for k, n in enumerate(sizes)]
        inside = [(at >= 0) & (at <= extent - 1) for at, extent in zip(axes, X.shape[2:], strict=True)]
        y, x = (jnp.broadcast_to(at, (1, *map(len, axes))) for at in (axes[0][:, None], axes[1]))
        nearest = [[(jnp.floor(at + 0.5).astype(np.int32), jnp.ones_like(at))] for at in (y, x)]
        image = jnp.take(X, image, axis=0)[None]
        crop = sample_linear(image, [y, x]) if mode == "bilinear" else sample(image, nearest)
        return jnp.where(inside[0][:, None] & inside[1], crop[0], extrapolation_value)

    return lax.map(region, (jnp.asarray(batch_indices), lax.stop_gradient(jnp.asarray(rois))), batch_size=16)


@microsoft("ConvTransposeWithDynamicPads", product=True)
@operands(Pads="pads")
@taking(**{name: value for name, value in WINDOW.items() if name != "pads"}, group=1, output_padding=None)
def conv_transpose_with_dynamic_pads(X, W, Pads: Static = None, B=None, **attributes):
    """ConvTranspose whose pads are an input."""
    return conv_transpose(X, W, B, pads=None if Pads is None else dims(Pads), **attributes)


@microsoft("UnfoldTensor")
def unfold_tensor(input, *, dim=-1, size, step=1):
    """Windows of ``size`` elements along one axis, ``step`` apart, as a new last axis."""
    dim = axis_of(dim, input.ndim)
    if size > input.shape[dim]:
        raise ValueError(f"size ({size}) exceeds an axis of extent {input.shape[dim]}")
    index = np.arange(0, input.shape[dim] - size + 1, step)[:, None] + np.arange(size)
    return xp.moveaxis(xp.take(input, index, axis=dim), dim + 1, -1)


_FREQUENCY = "scale_grad_by_freq is unsupported"


@microsoft("TorchEmbedding", limits=f"{_FREQUENCY}; {BOUNDS}")
def torch_embedding(weight, indices, padding_idx=None, scale_grad_by_freq: Static = None):
    """Rows of an embedding table; the row padding_idx receives no gradient."""
    if scale_grad_by_freq is not None and scale_grad_by_freq.item():
        raise NotImplementedError(f"{_FREQUENCY}; remove it or set it to false")
    rows = gather(weight, indices, axis=0)
    if padding_idx is None or not is_float(weight.dtype):
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


@microsoft("FusedMatMulActivation", product=True, limits=f"{ACTIVATION_NAMES}; activation_axis is unsupported")
@taking(alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0)
def fused_matmul_activation(
    A, B, *, activation, activation_alpha=None, activation_axis: Literal[None] = None, activation_beta=None,
    activation_gamma=None, **attributes,
):  # fmt: skip
    """FusedMatMul followed by an activation."""
    del activation_axis
    y = jnp.asarray(fused_matmul(A, B, **attributes))
    return activate(y, activation, activation_alpha, activation_beta if activation_gamma is None else activation_gamma)


@microsoft("DynamicTimeWarping", limits="ties prefer the diagonal move, then the move down")
def dynamic_time_warping(input: Static):
    """The path [2, steps] of lowest cost through a matrix, from its first to its last element."""
    if input.ndim not in (2, 3) or input.shape[:-2] not in ((), (1,)) or not input.size:
        raise ValueError(f"input must have the shape [M, N] or [1, M, N] and not be empty (it has {input.shape})")
    cost = input.reshape(input.shape[-2:])
    rows, columns = cost.shape
    total, moves = np.full((rows + 1, columns + 1), np.inf, cost.dtype), np.zeros((rows + 1, columns + 1), np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):  # elements of one antidiagonal are independent
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        before = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        moves[i, j], total[i, j] = before.argmin(0), cost[i - 1, j - 1] + before.min(0)
    cell, path = (rows, columns), []
    while cell != (0, 0):
        path.append(cell)
        cell = cell[0] - (moves[cell] != 2), cell[1] - (moves[cell] != 1)
    return np.array(path[::-1], np.int32).T - np.int32(1)
