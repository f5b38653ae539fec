"""The com.microsoft domain: floating-point operators fused by onnxruntime's optimizer and by exporters."""

from __future__ import annotations

import math
from inspect import Parameter
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..activation import gelu, selu, sigmoid, swish
from ..arrays import accumulator, axis_of, check_shape, widen, xp
from ..conv import conv_op
from ..indexing import BOUNDS, gather_nd, trilu
from ..linalg import gemm_wide, product, times
from ..norm import root, standardize
from ..pool import max_pool
from ..recurrent import BY_NAME, REQUIRED
from ..reduce import unique
from ..registry import MayBeEmpty, Static, op, taking
from ..shape import pad, range_, unsqueeze
from ..window import WINDOW
from . import microsoft, operands

ACTIVATION_NAMES = "activations: Clip, Selu and those of the recurrent operators"


def _fast_gelu(X, bias=None):
    """The tanh approximation of Gelu, of ``X + bias``."""
    return gelu(X if bias is None else X + bias, approximate="tanh")


@operands(X="batch tokens width", bias="width")
def _bias_split_gelu(X, bias):
    left, right = xp.split(X + bias, 2, axis=-1)
    return left * gelu(right)


EXPRESSIONS: dict[str, Any] = {
    "Gelu": lambda X: gelu(X),
    "FastGelu": operands(bias="width")(_fast_gelu),
    "BiasGelu": operands(B="width")(lambda A, B: gelu(A + B)),
    "QuickGelu": taking(alpha=1.702)(swish),
    "BiasSplitGelu": _bias_split_gelu,
    "BiasAdd": lambda X, bias, skip: X + bias + skip,
    "Inverse": lambda X: jnp.linalg.inv(jnp.asarray(X)),
}
for _name, _function in EXPRESSIONS.items():
    microsoft(_name, half="float32")(_function)
microsoft("Trilu")(lambda X, k=None, *, upper=1: trilu(X, k, upper=upper))
microsoft("GatherND", limits=BOUNDS)(lambda data, indices: gather_nd(data, indices))


@microsoft("ExpandDims")
def expand_dims(X, axis: Static):
    return unsqueeze(X, axis)


@microsoft("GemmFastGelu", product=True)
def gemm_fast_gelu(X, W, bias=None):
    return _fast_gelu(product(X, W, accumulator(X.dtype)), widen(bias)).astype(X.dtype)


@microsoft("FusedMatMul", product=True)
def fused_matmul(A, B, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """``alpha * A @ B``; transBatch moves the first axis after the batch, trans swaps the last two axes."""

    def transposed(x, batch, last):
        x = xp.moveaxis(x, 0, -2) if batch and x.ndim > 2 else x
        return xp.swapaxes(x, -1, -2) if last and x.ndim > 1 else x

    y = product(transposed(A, transBatchA, transA), transposed(B, transBatchB, transB), accumulator(A.dtype))
    return times(y, alpha).astype(A.dtype)


@microsoft("TransposeMatMul", product=True)
def transpose_matmul(A, B, *, alpha=1.0, transA=0, transB=0):
    return fused_matmul(A, B, alpha=alpha, transA=transA, transB=transB)


def _clipped(x, low, high):
    return x if low is None and high is None else xp.clip(x, low, high)


# name -> (function of x and up to two parameters, their defaults)
FUSED: dict[str, Any] = {"": (lambda x: x,)} | {name: row for name, row in BY_NAME.items() if REQUIRED not in row}
FUSED |= {"clip": (_clipped, None, None), "selu": (lambda x, a, g: selu(x, alpha=a, gamma=g), 1.6732632, 1.0507010)}


def activate(x, name, *parameters):
    """A fused activation of ``x`` by its ONNX name; None stands for the default of a parameter."""
    if name.lower() not in FUSED:
        raise NotImplementedError(
            f"the fused activation {name!r} is unsupported ({ACTIVATION_NAMES}); use a separate node"
        )
    function, *defaults = FUSED[name.lower()]
    return function(x, *(d if p is None else p for p, d in zip((*parameters, None, None), defaults, strict=False)))


@microsoft("FusedGemm", product=True, limits=ACTIVATION_NAMES)
def fused_gemm(
    A, B, C=None, *, activation="", activation_alpha=None, activation_beta=None, activation_gamma=None,
    alpha=1.0, beta=1.0, transA=0, transB=0,
):  # fmt: skip
    """Gemm followed by an activation."""
    y = gemm_wide(A, B, C, alpha, beta, transA, transB)
    second = activation_beta if activation_gamma is None else activation_gamma
    return activate(y, activation, activation_alpha, second).astype(A.dtype)


@microsoft("FusedConv", product=True, limits=ACTIVATION_NAMES)
@taking(**WINDOW, group=1)
def fused_conv(X, W, B=None, Z=None, *, activation="", activation_params=(), **attributes):
    """Conv, plus a residual Z, followed by an activation."""
    y = conv_op(X, W, B, **attributes)
    if Z is not None:
        check_shape("Z, which does not broadcast,", Z, *y.shape)
    return activate(y if Z is None else y + Z, activation, *activation_params)


def nhwc(function, x, *inputs, channels_last=1, **attributes):
    """A function of an NCHW image applied to an NHWC image (unless ``channels_last`` is 0)."""
    if not channels_last:
        return function(x, *inputs, **attributes)
    return xp.moveaxis(function(xp.moveaxis(x, -1, 1), *inputs, **attributes), 1, -1)


@microsoft("NhwcFusedConv", product=True, limits=ACTIVATION_NAMES)
@taking(**WINDOW, group=1, activation="", activation_params=())
def nhwc_fused_conv(X, W, B=None, Z=None, **attributes):
    Z = None if Z is None else xp.moveaxis(Z, -1, 1)
    return nhwc(fused_conv, X, W, B, Z, **attributes)


@microsoft("NhwcConv", product=True)
@taking(**WINDOW, group=1)
def nhwc_conv(X, W, B=None, **attributes):
    return nhwc(conv_op, X, W, B, **attributes)


@microsoft("NhwcMaxPool", heavy=True)
@taking(**WINDOW | {"kernel_shape": Parameter.empty, "ceil_mode": 0})
def nhwc_max_pool(x, **attributes):
    return nhwc(max_pool, x, **attributes)


EMBEDDED = dict.fromkeys(("input_ids", "segment_ids", "mask"), "batch tokens")
_SKIPPED = {"input": "batch tokens width|tokens width", "skip": "batch? tokens width|tokens width"}
_SKIPPED |= {"gamma": "width", "bias": "width"}


def skip_sum(input, skip, bias):
    return widen(input) + widen(skip) + (0 if bias is None else widen(bias))


@microsoft("SkipLayerNormalization", wide=True)
@operands(**_SKIPPED, beta="width")
def skip_layer_normalization(input, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """LayerNormalization of ``input + skip + bias``, and that sum."""
    total = skip_sum(input, skip, bias)
    y, mean, inverse = standardize(total, -1, epsilon)
    y = y * widen(gamma) if beta is None else y * widen(gamma) + widen(beta)
    return y.astype(input.dtype), mean, inverse, total.astype(input.dtype)


@microsoft("SkipSimplifiedLayerNormalization", wide=True, limits="the second output (mean) is never computed")
@operands(**_SKIPPED)
def skip_simplified_layer_normalization(input, skip, gamma, bias=None, *, epsilon=1e-12, n_outputs=1):
    """RMSNormalization of ``input + skip + bias``, and that sum; without a mean."""
    total = skip_sum(input, skip, bias)
    y, _, inverse = standardize(total, -1, epsilon, center=False)
    return ((y * widen(gamma)).astype(input.dtype), None, inverse, total.astype(input.dtype))[:n_outputs]


@microsoft("SimplifiedLayerNormalization", wide=True, limits="stash_type float32 or float64")
@op("SimplifiedLayerNormalization", wide=True, limits="onnxruntime's; stash_type float32 or float64")
def simplified_layer_normalization(X, scale, *, axis=-1, epsilon=1e-5, stash_type: Literal[1, 11] = 1):
    """RMSNormalization under onnxruntime's older name; the second output is the inverse standard deviation."""
    x = X.astype(np.float64 if stash_type == 11 or X.dtype == np.float64 else np.float32)
    y, _, inverse = standardize(x, tuple(range(axis_of(axis, x.ndim), x.ndim)), epsilon, center=False)
    return (y * scale.astype(x.dtype)).astype(scale.dtype), inverse


@microsoft("EmbedLayerNormalization")
@operands(**EMBEDDED, gamma="width", beta="width")
def embed_layer_normalization(
    input_ids, segment_ids: MayBeEmpty, word_embedding, position_embedding, segment_embedding: MayBeEmpty, gamma, beta,
    mask=None, position_ids=None, *, epsilon=1e-12, mask_index_type: Literal[None, 0, 1] = None,
):  # fmt: skip
    """(LayerNormalization of word, position and segment embeddings, number of unmasked tokens, sum of embeddings)."""
    del mask_index_type  # selects the content of the optional mask output
    positions = jnp.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    total = widen(jnp.asarray(word_embedding)[input_ids]) + widen(jnp.asarray(position_embedding)[positions])
    if segment_ids is not None:
        total = total + widen(jnp.asarray(segment_embedding)[segment_ids])
    y = standardize(total, -1, epsilon)[0] * widen(gamma) + widen(beta)
    count = jnp.zeros(input_ids.shape[0], np.int32) if mask is None else jnp.sum(mask == 1, axis=1, dtype=np.int32)
    return y.astype(gamma.dtype), count, total.astype(gamma.dtype)


def group_normalized(x, gamma, beta, activation, channels_last, epsilon, groups):
    x = widen(x) if channels_last else widen(xp.moveaxis(x, 1, -1))
    split = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), groups, x.shape[-1] // groups)
    y = standardize(split, (1, 3), epsilon)[0].reshape(x.shape) * widen(gamma) + widen(beta)
    y = y * sigmoid(y) if activation else y
    return y if channels_last else xp.moveaxis(y, -1, 1)


@microsoft("GroupNorm", wide=True)
def group_norm(X, gamma, beta, *, activation, channels_last=1, epsilon=1e-5, groups):
    """Normalization over groups of channels, followed by SiLU if activation=1."""
    return group_normalized(X, gamma, beta, activation, channels_last, epsilon, groups).astype(X.dtype)


@microsoft("SkipGroupNorm", wide=True)
def skip_group_norm(X, gamma, beta, skip, bias=None, *, activation, channels_last=1, epsilon=1e-5, groups):
    """GroupNorm of ``X + skip + bias``, and that sum."""

    def per_channel(p):  # [channels] or [batch, channels], shaped to broadcast against X
        p = p.reshape(-1, *(1,) * (X.ndim - 2), p.shape[-1]) if p.ndim < 3 else p
        return p if channels_last or p.shape[1:] == X.shape[1:] else xp.moveaxis(p, -1, 1)

    total = widen(X) + widen(per_channel(skip)) + (0 if bias is None else widen(per_channel(bias)))
    y = group_normalized(total, gamma, beta, activation, channels_last, epsilon, groups)
    return y.astype(X.dtype), total.astype(X.dtype)


@microsoft("CDist", heavy=True, wide=True, limits="metrics: sqeuclidean and euclidean")
@operands(A="rows width", B="others width")
def cdist(A, B, *, metric: Literal["sqeuclidean", "euclidean"] = "sqeuclidean"):
    """The distances between all rows of A and all rows of B."""
    square = ((jnp.asarray(A)[:, None] - B[None]) ** 2).sum(-1)
    return square if metric == "sqeuclidean" else root(square)


@microsoft("Unique", limits="data-dependent output shape")
@operands(x="size")
def ms_unique(x: Static):
    """(distinct elements in order of appearance, inverse indices, counts)."""
    y, _, inverse, counts = unique(x, sorted=0)
    return y, inverse, counts


@microsoft("Pad")
def ms_pad(data, pads: Static, value=None, *, mode="constant"):
    return pad(data, np.ravel(pads), None if value is None else value.reshape(()), mode=mode)


@microsoft("Range")
def ms_range(start: Static, limit: Static, delta: Static = None):
    return range_(*(v.reshape(()) for v in (start, limit, np.ones_like(start) if delta is None else delta)))
