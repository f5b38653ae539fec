"""How a convolution is lowered: one table of rules by shapes, dtypes and target, which all others ask.

A rule is the name of a form and a condition; the first that applies decides, and "native" is
``lax.conv_general_dilated``. Forms are functions beside those who ask:

    target                  asked by                                    forms in
    tpu, cuda               Conv and its relatives                      conv.py
    cpu                     Conv on a CPU, and layout assignment        conv_cpu.py
    onednn                  layout assignment, where it may call it     jaxpr/passes/cpu/conv_lowering.py
    training                layout assignment of a training step        jaxpr/passes/cpu/train_conv.py
    int8                    quantised operators, and dequantize         quant.py
    jaxlib 0.10, ...        the vote on XLA:CPU's library               jaxpr/passes/cpu/conv_lowering.py

Thresholds, with what they were measured on, are in limits.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from .. import limits
from .window import Window, count_blocks


class Problem:
    """A convolution by its shapes.

    Attributes:
        dtype, batch, extents: of the image.
        outputs: channels of the result.
        channels: of the image, in each group.
        window, groups: of the convolution.
        stretch: the dilation of the image, zeros between its pixels; () without.
        batches: groups that the batch is divided into, as in gradients of weights; ``batch`` is then the result's.
        blocks: extents of the result; unknown if the image is dilated.
        taps: elements of the kernel.
        summands: elements of a window, over all channels.
        pixels: of the result, in the batch.
        is_plain: whether there are no groups, and ``stretch`` was not given.
        is_static: whether no extent is a symbol of jax.export.
        is_exact: whether it is of integers, for whose sums there are only products.
    """

    def __init__(
        self, dtype: Any, image: Sequence[Any], weights: Sequence[Any], window: Window, groups: int = 1,
        stretch: tuple[int, ...] = (), batches: int = 1, blocks: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """``image`` is (N, spatial...), and ``weights`` (O, C / groups, kernel...)."""
        (self.batch, *self.extents), (self.outputs, self.channels, *_) = image, weights
        self.dtype, self.window, self.groups, self.stretch, self.batches = dtype, window, groups, stretch, batches
        self.is_plain, self.is_apart = groups == 1 and not stretch, any(d > 1 for d in stretch)
        self.blocks = blocks or ([] if self.is_apart else count_blocks(self.extents, window))
        self.taps, self.pixels = math.prod(window.kernel), self.batch * math.prod(self.blocks)
        self.summands = self.taps * self.channels
        self.products = self.pixels * self.outputs * self.summands
        self.is_unpadded = not any(map(any, window.pads))
        self.is_static = all(isinstance(n, int) for n in (*image, *window.kernel))
        self.is_exact = jnp.issubdtype(dtype, jnp.integer) and dtype != np.int8

    @property
    def pack(self) -> int:
        """How many neighbours along the last axis become channels, so that XLA has enough; a multiple of the stride."""
        stride, most, few = self.window.strides[-1], max(self.channels, self.outputs), limits.CONV_FEW_CHANNELS
        if self.window.dilations[-1] > 1 or self.window.kernel[-1] == 1:
            return 1
        if self.dtype == np.int8:
            sizes, least = (stride << i for i in range(8)), limits.CONV_PACK_INT8
            enough = (n for n in sizes if n * self.channels >= least and n // stride * self.outputs > few)
            return next(enough) if self.channels < few else 1
        is_packed = self.dtype == np.float32 and stride == 1 and most <= few
        return next(n for n in (2, 4, 8, 16, 32) if n * most > few) if is_packed else 1


Rule = tuple[str, Callable[[Problem], Any]]


def lowering(problem: Problem, target: str) -> str:
    """The name of the form in which a target computes a convolution fastest."""
    return next((name for name, applies in RULES[target] if applies(problem)), "native")


# ------------------------------------------------------------------------------------------------------ conditions


def _is_patches(p: Problem) -> bool:
    """Windows side by side over an image of few channels, as in the patch embedding of a vision transformer."""
    beside = p.window.strides == tuple(p.window.kernel) and {*p.window.dilations} <= {1} and p.is_unpadded
    return p.is_plain and p.channels < limits.CONV_FEW_INPUTS and p.is_static and beside and p.taps > 1


def _is_long_filter(p: Problem) -> bool:
    """Many taps along one axis of one channel, which overlap by most of them."""
    few = p.is_plain and p.is_static and p.channels == 1 and p.outputs <= limits.CONV_FEW_INPUTS
    if not few or p.taps < limits.CONV_LONG or p.taps not in p.window.kernel or {*p.window.dilations} != {1}:
        return False
    stride = p.window.strides[p.window.kernel.index(p.taps)]
    return math.prod(p.window.strides) == stride <= p.taps // (limits.CONV_LONG // 2)


def _is_few_filters(p: Problem) -> bool:
    """Few filters of many taps, or of many channels, over few images with rows and columns."""
    few, shrinks = limits.CONV_FEW_FILTERS, p.outputs * min(p.window.kernel, default=0) <= p.channels
    if not p.is_plain or len(p.extents) != 2 or not p.is_static or p.outputs > few or min(p.blocks) < few:
        return False
    return 0 < p.batch <= (few if p.taps >= limits.CONV_LONG else few // 2 if shrinks and p.taps > 1 else 0)


def _is_depthwise(p: Problem) -> bool:
    return p.groups > 1 and p.channels == 1 and p.taps <= limits.UNROLLED_TAPS


def _is_small_group(p: Problem) -> bool:
    """Groups whose columns stay in the cache."""
    if p.groups == 1 or p.is_exact or not p.is_static or p.taps > limits.UNROLLED_TAPS:
        return False
    few = p.channels <= limits.CONV_GROUP_CHANNELS or p.pixels * p.channels <= limits.CONV_GROUP_SIZE
    return (few or p.groups > limits.UNROLLED_TAPS) and p.pixels * p.summands * p.groups <= limits.CONV_GROUP_COLUMNS


def _is_narrow(p: Problem) -> bool:
    """Images of few channels, for which XLA:CPU has no fast kernel."""
    least = limits.CONV_PACKED_INT8_PRODUCTS if p.dtype == np.int8 else limits.CONV_PACKED_PRODUCTS
    return p.is_static and p.products >= least and p.pack > 1


def _is_column(p: Problem) -> bool:
    """Small windows, or fewer pixels than channels."""
    is_int8 = p.dtype == np.int8
    most, few = (limits.CONV_INT8_WINDOW, limits.CONV_INT8_PIXELS) if is_int8 else (limits.CONV_WINDOW, p.outputs)
    return p.taps <= limits.UNROLLED_TAPS and ((p.is_static and p.pixels <= few) or p.summands <= most)


def _is_tiled(p: Problem) -> bool:
    """3x3 over images of many channels that the cache holds."""
    if not p.is_static or p.dtype != np.float32 or p.window != ((3, 3), (1, 1), p.window.pads, (1, 1)):
        return False
    large = min(p.blocks) >= limits.WINOGRAD_SIDE and math.prod(p.blocks) <= limits.WINOGRAD_PIXELS
    return large and min(p.outputs, p.channels) >= limits.WINOGRAD_CHANNELS and p.products >= limits.WINOGRAD_PRODUCTS


def has_onednn(p: Problem) -> bool:
    """Images that oneDNN may compute."""
    is_image = len(p.extents) == 2 and {*p.window.dilations} == {1} and not p.is_apart
    return is_image and p.groups == p.batches == 1 and p.dtype in (np.float32, np.int8)


def _is_narrow_for_onednn(p: Problem) -> bool:
    most, least = limits.ONEDNN_OF_MORE if p.taps > 1 else limits.ONEDNN_OF_ONE_ELEMENT
    if not has_onednn(p) or p.dtype == np.int8:
        return has_onednn(p) and p.taps > 1 and p.summands <= limits.CONV_INT8_WINDOW and p.pixels >= least
    if p.channels <= most and p.pixels >= least and p.outputs >= limits.CONV_FEW_CHANNELS:
        return True
    return p.taps > 1 and p.outputs <= limits.ONEDNN_FEW_OUTPUTS and p.products >= limits.ONEDNN_FEW_OUTPUTS_PRODUCTS


def _is_exact_in_int8(p: Problem) -> bool:
    """Sums that int32 holds, of channels for which there is a fast kernel."""
    many = max(p.outputs, p.channels) > limits.CONV_FEW_CHANNELS
    return many and p.groups == 1 and 0 < p.summands <= limits.MAX_SUMMANDS


def _is_of_weights(p: Problem) -> bool:
    """Sums over more pixels than there are results, as the gradient of a weight."""
    results, is_plain = math.prod(p.blocks), p.groups == 1 and {*p.window.strides, *p.stretch} <= {1}
    return is_plain and results <= limits.UNROLLED_TAPS and results < p.taps


_CPU: Final[tuple[Rule, ...]] = (
    ("transposed", lambda p: p.is_apart),
    ("depthwise", _is_depthwise),
    ("columns", _is_small_group),
    ("piecewise", lambda p: 1 < p.groups <= limits.UNROLLED_TAPS and not p.is_exact),
    ("native", lambda p: p.groups > 1 and not p.is_exact),
    ("pointwise", lambda p: p.groups == p.taps == 1),
    ("columns", lambda p: p.is_exact),
    ("packed", _is_narrow),
    ("columns", _is_column),
    ("tiled", _is_tiled),
)
RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "tpu": (("patches", _is_patches), ("toeplitz", _is_long_filter), ("rows", _is_few_filters)),
    "cuda": (
        ("patches", _is_patches),
        ("depthwise", lambda p: not p.stretch and _is_depthwise(p) and p.outputs == p.groups),
        ("pointwise", lambda p: p.is_plain and {*p.window.kernel, *p.window.strides} == {1} and p.is_unpadded),
    ),
    "int8": (("integers", _is_exact_in_int8),),
    "cpu": _CPU,
    "onednn": (
        ("onednn", _is_narrow_for_onednn),
        *_CPU,
        ("onednn", lambda p: has_onednn(p) and p.dtype == np.float32 and p.products >= limits.ONEDNN_PRODUCTS),
    ),
    "training": (
        ("depthwise weights", lambda p: p.batches > p.batch == 1 and not p.outputs % p.batches and _is_of_weights(p)),
        ("weights", lambda p: p.batches == 1 and _is_of_weights(p) and math.prod(p.blocks) == 1),
        ("depthwise apart", lambda p: p.is_apart and _is_depthwise(p)),
        ("pointwise apart", lambda p: p.is_apart and p.groups == p.taps == max(p.window.strides) == 1),
    ),
    "jaxlib 0.10": (
        ("eigen", lambda p: p.products >= limits.EIGEN_LARGE or max(p.window.kernel, default=0) >= limits.EIGEN_LONG),
    ),
    "jaxlib 0.11": (("eigen", lambda p: p.products <= limits.EIGEN_SMALL),),
    "jaxlib 0.12": (
        ("eigen", lambda p: p.products <= limits.EIGEN_SMALL or math.prod(p.blocks) == max(p.blocks, default=1)),
    ),
}
"""Target -> its rules, the first of which that applies decides."""
