"""Products with weights of 2, 4 and 8 bits, which stay packed in memory: they are unpacked on the way.

A weight [out, in] comes as bytes [out, blocks, size], low bits first, with a scale for each block, and a zero point.
Its bytes are turned to [size, blocks, out]: numbers for neighbouring outputs are neighbours, and a CPU takes several at
a time. That depends on weights alone and is done once for a model (see runtime/optimize/prepare.py). Unpacking, which
takes eight times the memory, would be too, if it did not wait for the input.

4 bits in blocks of 32, one row, ms on 2 cores beside other work (in brackets: by a float32 weight):

    768 -> 3072    a loop over the bytes of the blocks 0.20 (0.23)    unpacked, then a product 0.7    as it lies 1.9
    2048 -> 8192                                       1.15 (2.5)                               28
    768 -> 50304                                       3.8 (11)

Of many rows, a product with what has been unpacked is faster, a piece at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import accumulator, wide
from .linalg import product

FEW: Final = 4
"""Rows up to this many are taken one by one."""
LARGEST: Final = 1 << 23
"""Numbers of a weight that one loop takes: so the sums of its blocks stay in the processor's cache."""
PIECE: Final = 1 << 21
"""Numbers of a weight that are unpacked at a time."""


def packed_product(x, packed, scales, zero_points, bits, spread=False):
    """x times the transpose of a packed weight.

    Args:
        x: float[rows, in].
        packed: uint8[out, blocks, size].
        scales: float[out, blocks].
        zero_points: float or uint8[out, blocks]; None for the middle of the range.
        bits: 2, 4 or 8.
        spread: whether the model lies on several devices; there, waiting for x would be an exchange.

    Returns:
        [rows, out] of the type in which sums of x are kept: float32 for halves.
    """
    (out, blocks, size), per, work = packed.shape, 8 // bits, accumulator(x.dtype)
    x = jnp.pad(x, ((0, 0), (0, blocks * size * per - x.shape[1])))
    pieces = -(-out // max(1, LARGEST // max(1, x.shape[1])))
    width = -(-out // pieces)
    results, rows_of = [], partial(_rows, spread=spread)
    for start in range(0, out, width):
        some = slice(start, start + width)
        own = packed[some], scales[some], None if zero_points is None else zero_points[some]
        lanes, scale, zero = (None if v is None else jnp.asarray(v).transpose() for v in own)
        scale = scale.astype(work)
        zero = np.full((1, 1), 2 ** (bits - 1), work) if zero is None else zero.astype(work)
        inputs = x.reshape(-1, blocks, size, per).transpose(0, 2, 3, 1)
        rows = inputs.shape[0]
        if isinstance(rows, int) and rows <= FEW:  # and no symbol of jax.export
            results.append(lax.platform_dependent(inputs, lanes, scale, zero, cpu=_row_by_row, default=rows_of))
        else:
            results.append(rows_of(inputs, lanes, scale, zero))
    return jnp.concatenate(results, axis=1)


def _nothing(x):
    """0, which no compiler knows: uint8.

    What is computed with it waits for x. Otherwise unpacked weights would be prepared once (see
    runtime/optimize/prepare.py), or XLA would unpack those of all products first: 471 MB for a decoder of 173.
    """
    return (jnp.tanh(jnp.sum(wide(x.reshape(-1)[:1]))) > 2).astype(np.uint8)


def divided_product(x, weight, bits, shards):
    """``packed_product`` of a weight that lies on several devices: each multiplies the blocks, or rows, that it has."""
    axis = int(shards.along == "in")
    if shards.parts == 1 or weight[0].shape[axis] % shards.parts:
        return packed_product(x, *weight, bits, shards.spread)

    def parts(a):
        return jnp.moveaxis(a.reshape(*a.shape[:axis], shards.parts, -1, *a.shape[axis + 1 :]), axis, 0)

    own = jax.tree.map(parts, jax.tree.map(jnp.asarray, weight))
    if axis == 0:
        y = jax.vmap(lambda w: packed_product(x, *w, bits, shards.spread))(own)
        return jnp.moveaxis(y, 0, 1).reshape(x.shape[0], -1)
    width = weight[0].shape[1] * weight[0].shape[2] * 8 // bits
    inputs = parts(jnp.pad(x, ((0, 0), (0, width - x.shape[1]))))
    return jax.vmap(lambda x, w: packed_product(x, *w, bits, shards.spread))(inputs, own).sum(axis=0)


def _row_by_row(x, lanes, scale, zero):
    """x [rows, size, per, blocks] by bytes [size, blocks, out]: [rows, out]."""
    x = wide(x)
    if len(x) == 1:
        return _one_row(x[0], lanes, scale, zero)[None]
    return lax.map(lambda row: _one_row(row, lanes, scale, zero), x)


def _one_row(x, lanes, scale, zero):
    """x [size, per, blocks] by bytes [size, blocks, out]: [out]."""

    per = x.shape[1]
    bits = 8 // per

    def add(total, byte):  # numbers stacked here would be stored before they are used
        numbers, inputs = byte
        each = ((numbers >> np.uint8(k * bits)) & np.uint8(2**bits - 1) for k in range(per))
        return sum((v.astype(np.int32).astype(x.dtype) * inputs[k, :, None] for k, v in enumerate(each)), total), None

    total, _ = lax.scan(add, jnp.zeros(lanes.shape[1:], x.dtype), (lanes, x))
    return jnp.sum((total - zero * jnp.sum(x, axis=(0, 1))[:, None]) * scale, axis=0)


def _rows(x, lanes, scale, zero, spread):
    """x [rows, size, per, blocks] by bytes [size, blocks, out]: [rows, out]."""
    rows, size, per, blocks = x.shape
    bits, inputs = 8 // per, x.reshape(rows, size * per * blocks)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]

    def some(of, nothing):
        numbers = (lanes[:, None, :, of] >> (shifts + nothing)) & np.uint8(2**bits - 1)
        numbers = numbers.astype(np.int32).astype(scale.dtype)
        weight = (numbers - (zero if zero.shape[1] == 1 else zero[:, of])) * scale[:, of]
        return product(inputs, weight.reshape(size * per * blocks, -1).astype(x.dtype), scale.dtype)

    width, results = max(1, PIECE // max(1, size * blocks * per)), [x]
    for start in range(0, lanes.shape[2], width):
        nothing = np.uint8(0) if spread else _nothing(results[-1])  # one piece after another
        results.append(some(slice(start, start + width), nothing))
    return jnp.concatenate(results[1:], axis=1)
