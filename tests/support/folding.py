"""Operands for operators that fold: elementwise, reductions, shapes, indexing. tests/tables/folding.py has the rest.

A case draws ``(inputs, attributes)`` for an operator; None among the inputs is an absent one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from onnx2jax.proto.types import ELEMENT_TYPES, to_dtype
from tests.support.drawing import (
    SIDES,
    SOME,
    Case,
    Draw,
    axis,
    broadcast_shapes,
    dtype_of,
    indices,
    is_float,
    shapes,
    values,
    vector,
)


def unary(low: int = 0, **options: st.SearchStrategy[Any]) -> Case:
    def case(draw: Draw, types: list[np.dtype]) -> Any:
        x = values(draw, dtype_of(draw, types), draw(shapes(low)))
        return (x,), {k: draw(v) for k, v in options.items() if draw(st.booleans())}

    return case


def along(low: int = 1, sides: st.SearchStrategy[int] = SIDES, **options: st.SearchStrategy[Any]) -> Case:
    """One input, an axis, and flags."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        x = values(draw, dtype_of(draw, types), draw(shapes(low, sides=sides)))
        return (x,), {"axis": axis(draw, x.ndim), **{k: draw(v) for k, v in options.items()}}

    return case


def broadcasting(count: int = 2, **options: st.SearchStrategy[Any]) -> Case:
    def case(draw: Draw, types: list[np.dtype]) -> Any:
        dtype = dtype_of(draw, types)
        drawn = broadcast_shapes(draw, draw(shapes()), count)
        return [values(draw, dtype, s) for s in drawn], {k: draw(v) for k, v in options.items()}

    return case


def variadic(draw: Draw, types: list[np.dtype]) -> Any:
    return broadcasting(draw(st.integers(1, 4)))(draw, types)


def power(draw: Draw, types: list[np.dtype]) -> Any:
    (x, y), _ = broadcasting()(draw, types)
    kind = dtype_of(draw, types)
    return (x, values(draw, kind, y.shape, 0 if kind.kind in "iu" else None)), {}


def unidirectional(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    cut = draw(st.integers(0, x.ndim))
    return (x, values(draw, x.dtype, tuple(draw(st.sampled_from([1, n])) for n in x.shape[cut:]))), {}


def where(draw: Draw, types: list[np.dtype]) -> Any:
    del types
    dtypes = [row.dtype for row in ELEMENT_TYPES.values() if row.dtype != object and row.bits != 6]
    (c, x, y), _ = broadcasting(3)(draw, [dtype_of(draw, dtypes)])
    return (values(draw, bool, c.shape), x, y), {}


def clip(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    lows = [-1, None, None] if draw(st.booleans()) else [-1]  # among extremes, a scalar is always NaN
    given = [draw(st.sampled_from([True, True, False])) for _ in range(2)]
    bounds = [values(draw, x.dtype, (), draw(st.sampled_from(lows))) if g else None for g in given]
    return (x, *bounds), {}


def cast(draw: Draw, types: list[np.dtype]) -> Any:
    codes = [code for code, row in ELEMENT_TYPES.items() if row.dtype in types and row.dtype.kind != "c"]
    x = values(draw, dtype_of(draw, [d for d in types if d.kind != "c"]), draw(shapes()))
    return (x,), {"to": draw(st.sampled_from(codes)), "saturate": draw(st.integers(0, 1))}


def cast_like(draw: Draw, types: list[np.dtype]) -> Any:
    (x,), attributes = cast(draw, types)
    return (x, np.zeros(1, to_dtype(attributes["to"]))), {"saturate": attributes["saturate"]}


def bit_cast(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    bits = {row.dtype: row.bits for row in ELEMENT_TYPES.values()}
    same = [c for c, row in ELEMENT_TYPES.items() if row.bits == bits[x.dtype] and row.dtype in types and c != 9]
    return (x,), {"to": draw(st.sampled_from(same))}


def reduction(fits: bool = True) -> Case:
    """Sums of integers fit their type (``fits``); extremes need not."""

    def case(draw: Draw, types: list[np.dtype]) -> Any:
        dtype = dtype_of(draw, types)
        low = 0 if fits and dtype.kind in "iu" else None
        flags = {k: draw(st.integers(0, 1)) for k in ("keepdims", "noop_with_empty_axes")}
        if draw.empty:
            return (values(draw, dtype, (0, *draw(shapes(sides=SOME))), low), vector(0)), flags
        x = values(draw, dtype, draw(shapes()), low)
        chosen = draw(st.lists(st.integers(0, x.ndim - 1), unique=True)) if x.ndim else []
        axes = vector(*(a - x.ndim * draw(st.integers(0, 1)) for a in chosen)) if draw(st.booleans()) else None
        return (x, axes), flags

    return case


def cumulative(draw: Draw, types: list[np.dtype]) -> Any:
    dtype = dtype_of(draw, types)
    x = values(draw, dtype, draw(shapes(1)), None if is_float(dtype) else -2)
    flags = {k: draw(st.integers(0, 1)) for k in ("exclusive", "reverse")}
    return (x, np.array(axis(draw, x.ndim), draw(st.sampled_from([np.int32, np.int64])))), flags


def top_k(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1)))
    a = axis(draw, x.ndim)
    least = 0 if draw.empty else min(1, x.shape[a])
    return (x, vector(draw(st.integers(least, x.shape[a])))), {
        "axis": a,
        "largest": draw(st.sampled_from([1, 0])),
        "n_outputs": 2,
    }


def reshape(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    target = list(draw(st.permutations(x.shape)))
    if x.size and target and draw(st.booleans()):
        target[draw(st.integers(0, len(target) - 1))] = -1
    return (x, vector(*target)), {"allowzero": 1}


def transpose(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    return (x,), {"perm": draw(st.permutations(tuple(range(x.ndim))))} if x.ndim and draw(st.booleans()) else {}


def flatten(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    return (x,), {"axis": draw(st.integers(-x.ndim, x.ndim))}


def concat(draw: Draw, types: list[np.dtype]) -> Any:
    dtype, shape = dtype_of(draw, types), draw(shapes(1))
    a = axis(draw, len(shape))
    extents = draw(st.lists(SIDES, min_size=1, max_size=3))
    parts = [tuple(n if i == a % len(shape) else m for i, m in enumerate(shape)) for n in extents]
    return [values(draw, dtype, s) for s in parts], {"axis": a}


def squeeze(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    axes = draw(st.lists(st.sampled_from(ones), unique=True)) if ones else []
    return (x, vector(*axes) if axes else None), {}


def unsqueeze(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(high=3)))
    return (x, vector(*draw(st.lists(st.integers(0, x.ndim), min_size=1, max_size=1)), -1)), {}


def split(draw: Draw, types: list[np.dtype]) -> Any:
    parts = draw(st.lists(SIDES, min_size=1, max_size=3))
    (x, *_), attributes = concat(draw, types)
    a = attributes["axis"]
    shape = [sum(parts) if i == a % x.ndim else n for i, n in enumerate(x.shape)]
    return (values(draw, x.dtype, tuple(shape)), vector(*parts)), {"axis": a, "n_outputs": len(parts)}


def expand(draw: Draw, types: list[np.dtype]) -> Any:
    x, y = broadcasting()(draw, [dtype_of(draw, types)])[0]
    return (x, vector(*y.shape)), {}


def tile(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes()))
    return (x, vector(*(draw(st.integers(0, 3)) for _ in x.shape))), {}


def slice_(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1)))
    ends = st.sampled_from([-(2**63), -9, -2, -1, 0, 1, 2, 9, 2**63 - 1])
    chosen = draw(st.lists(st.integers(0, x.ndim - 1), unique=True, min_size=1))
    starts, stops = (vector(*(draw(ends) for _ in chosen)) for _ in range(2))
    steps = vector(*(draw(st.sampled_from([-3, -1, 1, 2])) for _ in chosen))
    return (x, starts, stops, vector(*chosen), steps), {}


def pad(draw: Draw, types: list[np.dtype]) -> Any:
    mode = draw(st.sampled_from(["constant", "constant", "reflect", "edge", "wrap"]))
    sides = SIDES if mode == "constant" else st.integers(2, 4)
    x = values(draw, dtype_of(draw, types), draw(shapes(1, sides=sides)))
    pads = vector(
        *(draw(st.integers(0, 3)) if n and mode == "constant" else draw(st.integers(0, 1)) for n in x.shape * 2)
    )
    if mode == "constant" and all(n > 2 for n in x.shape):
        pads[0] = -1
    value = values(draw, x.dtype, (), 1) if mode == "constant" and draw(st.booleans()) else None
    return (x, pads, value), {"mode": mode}


def blocks(squares: bool) -> Case:
    def case(draw: Draw, types: list[np.dtype]) -> Any:
        n, c, h, w = (draw(SIDES) for _ in range(4))
        shape = (n, 4 * c, h, w) if squares else (n, c, 2 * h, 2 * w)
        x = values(draw, dtype_of(draw, types), shape)
        return (x,), {"blocksize": 2, "mode": draw(st.sampled_from(["DCR", "CRD"]))}

    return case


def trilu(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(2)))
    return (x, np.array(draw(st.integers(-4, 4)))), {"upper": draw(st.integers(0, 1))}


def center_crop_pad(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1)))
    return (x, vector(*(draw(st.integers(0, 6)) for _ in x.shape))), {}


def reverse_sequence(draw: Draw, types: list[np.dtype]) -> Any:
    shape = draw(shapes(2, 4, SOME))
    x, time = values(draw, dtype_of(draw, types), shape), draw(st.integers(0, 1))
    lengths = vector(*(draw(st.integers(0, shape[time])) for _ in range(shape[1 - time])))
    return (x, lengths), {"time_axis": time, "batch_axis": 1 - time}


def gather(draw: Draw, types: list[np.dtype]) -> Any:
    x, kind = values(draw, dtype_of(draw, types), draw(shapes(1))), draw(st.sampled_from([np.int32, np.int64]))
    a = axis(draw, x.ndim)
    shape = draw(shapes(high=3)) if x.shape[a] else (0,)
    return (x, indices(draw, max(x.shape[a], 1), shape, kind)), {"axis": a}


def gather_elements(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1, sides=SOME)))
    a = axis(draw, x.ndim)
    shape = tuple(draw(SIDES) if i == a % x.ndim else draw(st.sampled_from([n, 1])) for i, n in enumerate(x.shape))
    return (x, indices(draw, x.shape[a], shape)), {"axis": a}


def scatter_elements(draw: Draw, types: list[np.dtype]) -> Any:
    (x, at), attributes = gather_elements(draw, types)
    numeric = x.dtype.kind in "fiu" or x.dtype.name in ("bfloat16",)
    reduction = draw.turn(["max", "add", "min", "mul", "none"] if numeric else ["none"])
    if reduction == "none":  # of duplicates any may win
        at = at[(slice(1),) * at.ndim]
    low = -1 if reduction in ("add", "mul") else None
    x, updates = values(draw, x.dtype, x.shape, low, 1), values(draw, x.dtype, at.shape, low, 1)
    return (x, at, updates), {**attributes, "reduction": reduction}


def gather_nd(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1, sides=SOME)))
    depth, lead = draw(st.integers(1, x.ndim)), draw(shapes(high=2))
    at = np.stack([indices(draw, n, lead) for n in x.shape[:depth]], -1)
    return (x, at), {}


def scatter_nd(draw: Draw, types: list[np.dtype]) -> Any:
    (x, at), _ = gather_nd(draw, types)
    numeric = x.dtype.kind in "fiu" or x.dtype.name in ("bfloat16",)
    reduction = draw.turn(["max", "add", "min", "mul", "none"] if numeric else ["none"])
    at = at.reshape(-1, at.shape[-1])[:1] if reduction == "none" else at
    low = -1 if reduction in ("add", "mul") else None
    x = values(draw, x.dtype, x.shape, low, 1)
    updates = values(draw, x.dtype, (*at.shape[:-1], *x.shape[at.shape[-1] :]), low, 1)
    return (x, at, updates), {"reduction": reduction}


def one_hot(draw: Draw, types: list[np.dtype]) -> Any:
    del types
    places = indices(draw, 6, draw(shapes(high=3)), draw(st.sampled_from([np.int32, np.int64])))
    kind = dtype_of(draw, [to_dtype(c) for c in (1, 6, 7, 10, 11)])
    a = draw(st.integers(-places.ndim - 1, places.ndim))
    return (places, np.array(draw(st.integers(1, 4))), values(draw, kind, (2,), 0)), {"axis": a}


def compress(draw: Draw, types: list[np.dtype]) -> Any:
    x = values(draw, dtype_of(draw, types), draw(shapes(1)))
    a = draw(st.one_of(st.none(), st.integers(-x.ndim, x.ndim - 1)))
    extent = x.size if a is None else x.shape[a]
    keep = values(draw, bool, (draw(st.integers(0, extent)),))
    return (x, keep), {} if a is None else {"axis": a}


def tensor_scatter(draw: Draw, types: list[np.dtype]) -> Any:
    batch, room, length = draw(SOME), 4, draw(st.integers(1, 3))
    dtype = dtype_of(draw, types)
    cache, update = values(draw, dtype, (batch, 2, room, 2)), values(draw, dtype, (batch, 2, length, 2))
    mode = draw(st.sampled_from(["linear", "circular"]))
    return (cache, update, vector(*(draw(st.integers(0, room - length)) for _ in range(batch)))), {"mode": mode}
