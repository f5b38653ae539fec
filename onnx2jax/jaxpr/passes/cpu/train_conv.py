"""Convolutions of a step of training, forward and backward, of images that are channels last.

JAX writes the gradient of a weight as a convolution with batch and channels in each other's place, whose kernel is the
gradient of the result, and the gradient of an image as one of a dilated image. XLA:CPU has fast kernels for dense
ones (3x3 with 32 channels of 16x16 pixels: 2.3 ms for the weight, by products for each of 9 taps 4.1, by one product of
columns 5.6). Not so for these, in milliseconds of one core, 8 images of 28x28:

    1x1, 96 channels to 24, the weight           1.8    a product                             0.5
    3x3 depthwise, 96 channels, the image       17      shifted multiply-adds                 0.4
                                the weight      14      sums of shifted products              1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ....limits import TRAINING_GROUPS, TRAINING_PIXELS, TRAINING_ROWS
from ....ops.arrays import accumulator
from ....ops.conv_cpu import convolve, depthwise, product
from ....ops.conv_rules import Problem, lowering
from ....ops.window import Window, taps
from ...axis_orders import OrderedArray, permuted
from ...program import Equation, Program, is_convolution
from .layout_assignment import Rule, channels_last, traced


def _rule(equation: Equation, operands: Sequence[OrderedArray]) -> list[OrderedArray] | None:
    (x, w), params, aval = operands, equation.params, equation.outputs[0].aval
    if not _can_lower(equation) or 0 in (*x.shape, *w.shape, *aval.shape):
        return None
    (image, kernel, result), problem = params["dimension_numbers"], equation.convolution
    how = lowering(problem, "training")
    if how in ("weights", "depthwise weights"):
        is_depthwise, blocks = how != "weights", permuted(aval.shape, result[2:])
        pair = x.within((image[1], *image[2:], image[0])), w.within((kernel[1], *kernel[2:], kernel[0]))
        y = traced(_of_weights, (problem.window, blocks, is_depthwise, aval.dtype), *pair)
        ends = (result[0], result[1]) if is_depthwise else (result[1], result[0])
        return [OrderedArray(y, (*result[2:], *ends), aval=aval)]
    pair = x.within((image[0], *image[2:], image[1])), w.within(tuple(kernel))
    fixed = problem.window, problem.groups, problem.batches, problem.stretch, aval.dtype
    y = traced(_of_images, fixed, *pair)
    return [OrderedArray(y, (result[0], *result[2:], result[1]), aval=aval)]


def _can_lower(equation: Equation) -> bool:
    """Whether it is a convolution of floating numbers."""
    types = {np.dtype(t) for t in (np.float32, np.float16, jnp.bfloat16)}
    return is_convolution(equation) and equation.inputs[0].aval.dtype in types


def _of_weights(x: Any, g: Any, window: Window, blocks: tuple[int, ...], is_depthwise: bool, dtype: Any) -> Any:
    """(blocks..., O, C) of x (N, spatial..., C) and g (N, kernel..., O); (blocks..., 1, O) where it is depthwise.

    O first, as ONNX stores weights: they are updated without a transpose.

    For each block the pixels of x that meet those of g there.
    """
    x, g = (v.astype(accumulator(v.dtype)) for v in (x, g))
    if is_depthwise and x.shape[-1] != g.shape[-1]:
        x = jnp.repeat(x, g.shape[-1] // x.shape[-1], axis=-1)
    ones = (1,) * len(blocks)
    met = taps(x, Window(blocks, window.dilations, window.pads, ones), axis=1)
    sums = [_summed(part, g) if is_depthwise else _rows(part, g) for part in met]
    y = jnp.stack(sums) if len(sums) > 1 else sums[0]
    return lax.reshape(y, (*blocks, *((1, g.shape[-1]) if is_depthwise else y.shape[-2:]))).astype(dtype)


def _rows(x: Any, g: Any) -> Any:
    """(O, C), summed over pixels."""
    x, g = (lax.reshape(v, (math.prod(v.shape[:-1]), v.shape[-1])) for v in (x, g))
    return lax.dot_general(g, x, (((0,), (0,)), ((), ())))


def _summed(x: Any, g: Any) -> Any:
    """(C,), the sum of x * g over pixels."""
    y = lax.reshape(x * g, (math.prod(x.shape[:-1]), x.shape[-1]))
    while (count := y.shape[0]) >= TRAINING_ROWS:
        quarter = -(-count // 4)
        y = lax.pad(y, np.zeros((), y.dtype), ((0, 4 * quarter - count, 0), (0, 0, 0)))
        y = functools.reduce(lax.add, (y[i * quarter : (i + 1) * quarter] for i in range(4)))
    return y.sum(0)


def _of_images(x: Any, w: Any, window: Window, groups: int, batches: int, stretch: tuple[int, ...], dtype: Any) -> Any:
    """As ``_convolved``; of several batches each has its own part of w's results."""
    x, w = (v.astype(accumulator(v.dtype)) for v in (x, w))
    pieces = zip(jnp.split(x, batches), jnp.split(w, batches), strict=True)
    results = [_convolved(a, b, window, groups, stretch) for a, b in pieces]
    return lax.concatenate(results, x.ndim - 1).astype(dtype)


def _convolved(x: Any, w: Any, window: Window, groups: int, stretch: tuple[int, ...]) -> Any:
    """x (N, spatial..., C), dilated, by w (O, C / groups, kernel...)."""
    how = lowering(Problem(x.dtype, x.shape[:-1], w.shape, window, groups, stretch), "training")
    if how == "depthwise apart":
        return depthwise(_apart(x, window, stretch), w, window.unpadded, groups)
    if how == "pointwise apart":
        return _apart(product(x, lax.reshape(w, w.shape[:2])), window, stretch)  # products first, zeros between them
    return convolve(x, w, window, groups, stretch)


def _apart(x: Any, window: Window, stretch: tuple[int, ...]) -> Any:
    """The image padded, zeros between its pixels."""
    around = [(*pads, d - 1) for pads, d in zip(window.pads, stretch, strict=True)]
    return lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), *around, (0, 0, 0)))


def assign_layouts(program: Program) -> Program:
    """A training step, channels last; what is computed of its state element by element keeps the state's layout."""
    return channels_last(program, _chosen, _can_lower, stays=program.parameters)


def pays(program: Program) -> bool:
    """Whether ``assign_layouts`` gains for a program with convolutions, and reaches all of them.

    It does not reach those in what the backward pass recomputes, and in loops.
    """
    flat = program.inlined()
    if any(p.any(is_convolution) for e in flat.equations for p in e.inner):
        return False
    return _chosen([*filter(_can_lower, flat.equations)]) is not None


def _chosen(convolutions: Sequence[Equation]) -> Rule | None:
    """The rule if a kernel is depthwise, or most weights meet many pixels: then reordering them costs little beside."""
    few = many = 0
    for equation in convolutions:
        problem = equation.convolution
        if max(problem.groups, problem.batches) >= TRAINING_GROUPS:
            return _rule
        if equation.params["dimension_numbers"].lhs_spec[0] != 0:
            continue  # the gradient of weights, which takes channels for images
        weights, is_many = problem.outputs * problem.summands, problem.pixels > TRAINING_PIXELS
        few, many = few + weights * (not is_many), many + weights * is_many
    return _rule if convolutions and few <= many else None
