"""Products with weights of 2, 4 and 8 bits, which stay packed in memory: they are unpacked on the way.

Their numbers are integers, or small floating ones that are looked up by the bits of their codes.

A weight [out, in] comes as bytes [out, blocks, size], low bits first, with a scale for each block, and a zero point.
Its bytes are turned to words of 32 bits, [words, blocks, out]: numbers for neighbouring outputs are neighbours, and a
CPU takes several at a time. This is hoisted. Unpacking, which takes eight times the memory, is made
dependent on the input, so that it is part of each product (see ``dependent``).

4 bits in blocks of 32, one row, ms on 2 cores beside other work (in brackets: by a float32 weight):

    768 -> 3072    a loop over the bytes of the blocks 0.20 (0.23)    unpacked, then a product 0.7    as stored 1.9
    2048 -> 8192                                       1.15 (2.5)                               28
    768 -> 50304                                       3.8 (11)

What bounds it is the unpacking, 3 GB/s, and not memory (20). Processor time of one core, ms, and what was tried:

                                                            768 -> 2688    2688 -> 768    768 -> 256
    a loop over the bytes of the blocks                     0.27           0.28           0.050
    a loop over words of 4 bytes, the sums as long (kept)   0.23           0.24           0.043
    over two words at a time                                0.32           0.33           0.053
    over the blocks, whose words are summed in one piece    0.29           0.30           0.039
    onnxruntime's kernel                                    0.17           0.24           0.016

Slower, too: no loop but one sum over all words (XLA:CPU stores what each unpacks to: 0.5 to 0.8), masks in place of
shifts, numbers made floating by writing them into a mantissa, blocks four at a time. The loop over words with a loop
over blocks in place of the last sum takes 0.22, 0.22, 0.040, but leaves it to one thread.

More rows are multiplied by what has been unpacked, a piece at a time: up to 64 rows in panels of 64 columns, behind
each other in memory and few enough to stay in the processor's cache. Processor time of one core, ms:

    rows                       8       16      32
    panels (kept), 768x2688    0.71    1.2     2.0
    pieces of 2 million        1.6     2.0     2.8
    row by row                 1.1     2.2     4.2

768 x 10688, 8 rows: 2.8 rather than 7.0; pieces of 512K in place of 256K: 2.7, panels of 32 or 128 columns the same.

On accelerators the bytes are read as stored, and XLA unpacks them on the way into the product where it can; on CUDA
few rows are no product (``PACKED_ADDED_ROWS``). Bytes that kernels move for each byte of 1024 x 2816 in 4 bits, and
thousands of cycles of a TPU v5e, rows of bfloat16:

                                                 v5e: 1 row    8 rows       512 rows     H100: 1, 8, 512 rows
    low bits of a block before high ones (TPU)   1.3, 76       3.4, 50      12, 207      1.3, 9.8, 15
    a product for each number of a byte          1.3, 64       9.5, 102     28, 363      1.3, 9.6, 32
    numbers as they are counted (CUDA)           1.3, 76       41, 596      47, 842      1.3, 9.8, 14
    words, as on a CPU                           57, 458       25, 185      44, 488      21, 14, 38
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..limits import (
    PACKED_ADDED_ROWS,
    PACKED_LOOP,
    PACKED_MANY_PRODUCT,
    PACKED_MANY_ROWS,
    PACKED_PANEL_ROWS,
    PACKED_PRODUCT,
    PACKED_SINGLE_ROWS,
)
from .arrays import accumulator, widen
from .linalg import product

PIECE: Final = 1 << 21
"""Numbers of a weight that are unpacked at a time."""
COLUMNS: Final = 64
"""Columns of a panel."""
PANELS: Final = 1 << 18
"""Numbers that are unpacked to panels at a time."""


def integer(codes, dtype):
    """Integers without sign as numbers of a floating type."""
    return codes.astype(np.int32).astype(dtype)


def float8(codes, dtype):
    """Bytes of E4M3 as numbers of a wider type."""
    return lax.bitcast_convert_type(codes.astype(np.uint8), jnp.float8_e4m3fn).astype(dtype)


def looked_up(table):
    """Codes of 4 bits as the numbers that a table has for them, without reading memory: the half of it by each bit."""

    def values(codes, dtype):
        rows = list(np.asarray(table, dtype))
        for bit in range(4):
            odd = (codes >> codes.dtype.type(bit)) & codes.dtype.type(1) != 0
            rows = [jnp.where(odd, b, a) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return rows[0]

    return values


def packed_product(x, packed, scales, zero_points, bits, spread=False, value=integer):
    """x times the transpose of a packed weight. Layers of equal shapes share a trace: until a decoder of 1.1
    billion parameters is ready, 4.4 of 32 s.

    Args:
        x: float[rows, in].
        packed: uint8[out, blocks, size].
        scales: float[out, blocks], or as float8.
        zero_points: float or uint8[out, blocks]; None for the middle of the range, or of what are no integers.
        bits: 2, 4 or 8.
        spread: whether the model is on several devices; there, waiting for x would be communication.
        value: the numbers that codes stand for, before their scale, in a floating type.

    Returns:
        [rows, out] of the type in which sums of x are kept: float32 for halves.
    """
    return _packed_product(x, packed, scales, zero_points, bits, spread, value, compat.platform())


@partial(jax.jit, static_argnames=("bits", "spread", "value", "platform"))
def _packed_product(x, packed, scales, zero_points, bits, spread, value, platform):  # noqa: ARG001  (decides the trace)
    (out, blocks, size), per, work = packed.shape, 8 // bits, accumulator(x.dtype)
    if 0 in (out, blocks, size):
        return jnp.zeros((x.shape[0], out), work)
    x = jnp.pad(x, ((0, 0), (0, blocks * size * per - x.shape[1])))
    options: dict[str, Any] = {"bits": bits, "spread": spread, "value": value}
    rows = x.shape[0] if isinstance(x.shape[0], int) else 0  # a symbol of jax.export
    few, most = 0 < rows <= PACKED_ADDED_ROWS, PACKED_MANY_PRODUCT if rows >= PACKED_MANY_ROWS else PACKED_PRODUCT
    width = out if few or spread else max(1, most // x.shape[1])
    return compat.platform_dependent(
        x, packed, scales, zero_points, cpu=partial(_in_words, **options),
        cuda=partial(_as_stored, width=width, by=_added if few else _multiplied, axis=3, **options),
        default=partial(_as_stored, width=out, by=_multiplied, axis=2, **options),
    )  # fmt: skip


def _as_stored(x, packed, scales, zero_points, *, width, by, axis, bits, spread, value):
    """``packed_product`` on an accelerator.

    ``width`` columns are unpacked at a time, and multiplied ``by`` a function of inputs and weights. Numbers of a byte
    are neighbours if their ``axis`` is 3; if it is 2, those in the low bits of a block's bytes go before higher ones.
    """
    (out, blocks, size), per, work = packed.shape, 8 // bits, accumulator(x.dtype)
    inputs = jnp.moveaxis(x.reshape(-1, blocks, size, per), 3, axis).reshape(-1, blocks * per * size)
    zero = np.full((out, blocks), 2 ** (bits - 1), work) if zero_points is None and value is integer else zero_points
    shifts, results = np.expand_dims(np.arange(0, 8, bits, dtype=np.uint8), tuple(range(1, 4 - axis))), [inputs]
    for start in range(0, out, width):
        some = slice(start, start + width)
        codes, scale = packed, scales
        if not spread:  # nothing is unpacked before the input is known, and one piece after another
            codes, scale, _ = lax.optimization_barrier((packed, scales, results[-1]))
        shift = None if zero is None else zero[some, :, None, None].astype(work)
        lanes, scale = jnp.expand_dims(codes[some], axis), scale[some, :, None, None].astype(work)
        weight = _unpacked(lanes, scale, shift, shifts, value)
        results.append(by(inputs, weight.reshape(-1, inputs.shape[1])))
    return jnp.concatenate(results[1:], axis=1)


def _multiplied(inputs, weight):
    """Rows by the transpose of a weight, which is rounded to their type."""
    weight = weight.astype(inputs.dtype)
    return lax.dot_general(inputs, weight, (((1,), (1,)), ((), ())), preferred_element_type=accumulator(inputs.dtype))


def _added(inputs, weight):
    """The same as a sum for each row: XLA adds them all up in one kernel, and stores no weight."""
    return jnp.stack([jnp.sum(weight * row.astype(weight.dtype), axis=1) for row in inputs])


def _in_words(x, packed, scales, zero_points, *, bits, spread, value):
    """``packed_product`` on a CPU."""
    (out, blocks, size), per, work = packed.shape, 8 // bits, accumulator(x.dtype)
    if size % 4 == 0:  # words of 32 bits
        packed = lax.bitcast_convert_type(jnp.asarray(packed).reshape(out, blocks, -1, 4), np.uint32)
    pieces = -(-out // max(1, PACKED_LOOP // max(1, x.shape[1])))
    width = out if pieces == 1 else -(-out // pieces // COLUMNS) * COLUMNS
    results, rows_of = [], partial(_rows, value=value, spread=spread)
    for start in range(0, out, width):
        some = slice(start, start + width)
        parts = packed[some], scales[some], None if zero_points is None else zero_points[some]
        lanes, scale, zero = (None if v is None else jnp.asarray(v).transpose() for v in parts)
        scale = (scale if scale.dtype.itemsize > 1 or spread else dependent(scale, x)).astype(work)
        if value is integer:
            zero = np.full((1, 1), 2 ** (bits - 1), work) if zero is None else zero.astype(work)
        inputs = x.reshape(-1, blocks, lanes.shape[0], size * per // lanes.shape[0]).transpose(0, 2, 3, 1)
        rows = inputs.shape[0]
        by = rows_of
        if isinstance(rows, int) and rows <= PACKED_SINGLE_ROWS:  # and no symbol of jax.export
            by = partial(_row_by_row, value=value)
        elif isinstance(rows, int) and rows <= PACKED_PANEL_ROWS and lanes.shape[2] % COLUMNS == 0 and not spread:
            by = partial(_in_panels, value=value)
        results.append(by(inputs, lanes, scale, zero))
    return jnp.concatenate(results, axis=1)


def dependent(a, x):
    """Numbers of 8 bits, or integers, with a data dependency on x: nothing is computed from them before x is known.

    ``lax.optimization_barrier`` states the same, but XLA:CPU drops it before it schedules and unpacks all weights
    first: six [1024, 1024] of 4 bits take 26 MB of temporary memory beside 128 rows rather than 7.
    """
    zero = jnp.tanh(jnp.sum(widen(x.reshape(-1)[:1]))) > 2  # which no compiler knows
    if jnp.issubdtype(a.dtype, jnp.integer):
        return a + zero.astype(a.dtype)
    return lax.bitcast_convert_type(dependent(lax.bitcast_convert_type(a, np.uint8), x), a.dtype)


def divided_product(x, weight, bits, shards):
    """``packed_product`` of a sharded weight: each device multiplies its shard of the blocks, or rows."""
    axis = int(shards.along == "in")
    if shards.parts == 1 or weight[0].shape[axis] % shards.parts:
        return packed_product(x, *weight, bits, shards.spread)

    def parts(a):
        return jnp.moveaxis(a.reshape(*a.shape[:axis], shards.parts, -1, *a.shape[axis + 1 :]), axis, 0)

    weights = jax.tree.map(parts, jax.tree.map(jnp.asarray, weight))
    if axis == 0:
        y = jax.vmap(lambda w: packed_product(x, *w, bits, shards.spread))(weights)
        return jnp.moveaxis(y, 0, 1).reshape(x.shape[0], -1)
    width = weight[0].shape[1] * weight[0].shape[2] * 8 // bits
    inputs = parts(jnp.pad(x, ((0, 0), (0, width - x.shape[1]))))
    return jax.vmap(lambda x, w: packed_product(x, *w, bits, shards.spread))(inputs, weights).sum(axis=0)


def _row_by_row(x, lanes, scale, zero, value):
    """x [rows, words, per, blocks] by words [words, blocks, out]: [rows, out]."""
    x = widen(x)
    if len(x) == 1:
        return _one_row(x[0], lanes, scale, zero, value)[None]
    return lax.map(lambda row: _one_row(row, lanes, scale, zero, value), x)


def _one_row(x, lanes, scale, zero, value):
    """x [words, per, blocks] by words [words, blocks, out]: [out]."""
    per, kind = x.shape[1], lanes.dtype.type
    bits = 8 * lanes.dtype.itemsize // per

    def add(total, word):  # numbers stacked here would be stored before they are used
        numbers, inputs = word
        each = ((numbers >> kind(k * bits)) & kind(2**bits - 1) for k in range(per))
        return sum((value(v, x.dtype) * inputs[k, :, None] for k, v in enumerate(each)), total), None

    total, _ = lax.scan(add, jnp.zeros(lanes.shape[1:], x.dtype), (lanes, x))
    total = total if zero is None else total - zero * jnp.sum(x, axis=(0, 1))[:, None]
    return jnp.sum(total * scale, axis=0)


def _shifts(lanes, per):
    """By how many bits each of the numbers in a word is shifted: [per, 1, 1]."""
    bits = 8 * lanes.dtype.itemsize
    return np.arange(0, bits, bits // per, dtype=lanes.dtype)[:, None, None]


def _unpacked(lanes, scale, zero, shifts, value):
    """The weight of words, which have an axis of extent 1 where ``shifts`` has that of the numbers in a word."""
    bits = 8 * lanes.dtype.itemsize // shifts.size
    numbers = value((lanes >> shifts) & lanes.dtype.type(2**bits - 1), scale.dtype)
    return (numbers if zero is None else numbers - zero) * scale


def _in_panels(x, lanes, scale, zero, value):
    """``_rows`` of some rows, a few panels of ``COLUMNS`` columns at a time."""
    rows, size, per, blocks = x.shape
    total, panels = size * per * blocks, lanes.shape[2] // COLUMNS
    count = next(n for n in range(min(max(1, PANELS // (total * COLUMNS)), panels), 0, -1) if panels % n == 0)
    inputs = jnp.broadcast_to(x.reshape(rows, total), (count, rows, total))
    shifts = dependent(_shifts(lanes, per), x)

    def some(start):
        of = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=count * COLUMNS)
        shift = zero if zero is None or zero.shape[1] == 1 else of(zero, axis=1)
        weight = _unpacked(of(lanes, axis=2)[:, None], of(scale, axis=1), shift, shifts, value).astype(x.dtype)
        weight = weight.reshape(total, count, COLUMNS).transpose(1, 0, 2)
        return lax.dot_general(inputs, weight, (((2,), (1,)), ((0,), (0,))), preferred_element_type=scale.dtype)

    y = lax.map(some, np.arange(0, lanes.shape[2], count * COLUMNS, dtype=np.int32))
    return y.transpose(2, 0, 1, 3).reshape(rows, -1)


def _rows(x, lanes, scale, zero, value, spread):
    """x [rows, words, per, blocks] by words [words, blocks, out]: [rows, out]."""
    rows, size, per, blocks = x.shape
    inputs = x.reshape(rows, size * per * blocks)

    def some(of, shifts):
        shift = zero if zero is None or zero.shape[1] == 1 else zero[:, of]
        weight = _unpacked(lanes[:, None, :, of], scale[:, of], shift, shifts, value)
        return product(inputs, weight.reshape(size * per * blocks, -1).astype(x.dtype), scale.dtype)

    width, results = max(1, PIECE // max(1, size * blocks * per)), [x]
    for start in range(0, lanes.shape[2], width):
        shifts = _shifts(lanes, per)
        shifts = shifts if spread else dependent(shifts, results[-1])  # one piece after another
        results.append(some(slice(start, start + width), shifts))
    return jnp.concatenate(results[1:], axis=1)
