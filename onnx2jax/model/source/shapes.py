"""Plain forms of operators that move elements: shapes, slices, gathers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

import numpy as np

from .forms import Form, NodeCall
from .values import Value, dtype_name, extent, extents, is_atom, number, packed, tuple_of

OPEN: Final = 2**31 - 1
"""Ends from here on mean the end of an axis."""


def reshape(call: NodeCall) -> str | None:
    shape = call.results[0].shape
    if shape is None:
        return None
    return f"{call.text(0)}.reshape({', '.join(extents(shape, inferred=True)) or '()'})"


def squeeze(call: NodeCall) -> str | None:
    axes = call.integers("axes", 1)
    if axes is None:
        return f"jnp.squeeze({call.text(0)})" if call.value(0).is_static else None
    return f"jnp.squeeze({call.text(0)}, {packed(axes)})"


def unsqueeze(call: NodeCall) -> str | None:
    axes, rank = call.integers("axes", 1), call.value(0).rank
    if axes is None:
        return None
    if rank is not None:
        new = sorted(a % (rank + len(axes)) for a in axes)
        index = ["None" if i in new else ":" for i in range(new[-1] + 1)]
        if new[0] >= rank and rank > 1:
            index = ["...", *["None"] * len(new)]
        if len(index) <= 4 and index.count(":") < 3:
            return f"{call.text(0)}[{', '.join(index)}]"
    return f"jnp.expand_dims({call.text(0)}, {packed(axes)})"


def transpose(call: NodeCall) -> str | None:
    perm = call.attribute("perm")
    if call.value(0).rank is None and perm is None:
        return None
    if perm is None or perm == tuple(range(len(perm)))[::-1]:
        return f"{call.text(0)}.T"
    return f"{call.text(0)}.transpose({', '.join(map(str, perm))})"


def concat(call: NodeCall) -> str:
    return f"jnp.concatenate([{', '.join(call.text(i) for i in range(len(call)))}], axis={call.attribute('axis', 1)})"


def split(call: NodeCall) -> str | None:
    axis, shape, count = call.attribute("axis", 0), call.value(0).shape, len(call.node.outputs)
    sizes = call.integers("split", 1)
    if count == 1 and len(sizes or (0,)) == 1 and (sizes is not None or not call.has(1)):
        return call.text(0)
    if sizes is None:
        length = shape[axis] if shape is not None else None
        if call.has(1) or not isinstance(length, int) or length % count:
            return None
    places = count if sizes is None or len({*sizes}) == 1 else tuple_of([*accumulate(sizes[:-1])])
    return f"jnp.split({call.text(0)}, {places}, axis={axis})"


def expand(call: NodeCall) -> str | None:
    shape = call.results[0].shape
    return f"jnp.broadcast_to({call.text(0)}, {tuple_of(extents(shape))})" if shape else None


def tile(call: NodeCall) -> str | None:
    repeats = call.value(1)
    if repeats.known is None or call.node.opset < 6:
        return None
    return f"jnp.tile({call.text(0)}, {repeats.sequence})"


def constant_of_shape(call: NodeCall) -> str | None:
    shape, value = call.results[0].shape, call.attribute("value")
    if shape is None:
        return None
    value = np.zeros((), np.float32) if value is None else np.reshape(value, ())
    text, kind = packed(extents(shape)), dtype_name(value.dtype)
    if value in (0, 1):
        return f"jnp.{'ones' if value else 'zeros'}({text}, {kind})"
    return f"jnp.full({text}, {number(value[()])}, {kind})"


def range_(call: NodeCall) -> str | None:
    values = [call.value(i).known for i in range(3)]
    if any(v is None or v.dtype.kind not in "iuO" for v in values):
        return None
    start, limit, delta = (extent(v.item()) for v in values if v is not None)
    bounds = [limit] if (start, delta) == ("0", "1") else [start, limit] if delta == "1" else [start, limit, delta]
    return f"np.arange({', '.join(bounds)})" if call.results[0].dtype == np.int64 else None


def pad(call: NodeCall) -> str | None:
    rank, mode, pads = call.value(0).rank, call.attribute("mode", "constant"), call.integers("pads", 1)
    axes = call.ints(3)
    if pads is None or rank is None or (call.has(3) and axes is None) or any(p < 0 for p in pads):
        return None
    padded = [a % rank for a in (range(rank) if axes is None else axes)]
    widths = [(0, 0)] * rank
    for i, axis in enumerate(padded):
        widths[axis] = (pads[i], pads[i + len(padded)])
    text = f"jnp.pad({call.text(0)}, {tuple_of(widths)}"
    if mode != "constant":
        return f'{text}, mode="{mode}")' if call.value(0).is_floating and mode in ("reflect", "edge") else None
    value: Any = call.scalar(2) if call.has(2) else np.float32(call.attribute("value", 0))
    if value is None:
        return None
    return f"{text})" if value == 0 else f"{text}, constant_values={number(value)})"


def slice_(call: NodeCall) -> str | None:
    """An index of slices: Python clamps ends as ONNX does where steps are positive."""
    x = call.value(0)
    starts: Any = call.integers("starts", 1) or _bounds(call.value(1))
    ends: Any = call.integers("ends", 2) or _bounds(call.value(2))
    axes: Any = call.integers("axes", 3)
    steps: Any = call.ints(4)
    if None in (starts, ends) or (call.has(3) and axes is None) or (call.has(4) and steps is None):
        return None
    axes = range(len(starts)) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if x.rank is None and any(a < 0 for a in axes):
        return None
    places = [a if x.rank is None else a % x.rank for a in axes]
    slices = [*map(_slice, starts, ends, steps)]
    if None in slices:
        return None
    index = {p: t for p, t in zip(places, slices, strict=True) if t and t != ":"}
    if not index:
        return call.text(0)
    if x.rank is not None and min(index) > 1 and max(index) == x.rank - 1:
        texts = ["...", *(index.get(i, ":") for i in range(min(index), x.rank))]
    else:
        texts = [index.get(i, ":") for i in range(max(index) + 1)]
    return f"{call.text(0)}[{', '.join(texts)}]"


def _bounds(value: Value) -> list[Any] | None:
    known = value.known
    return None if known is None or known.dtype.kind not in "iuO" else known.reshape(-1).tolist()


def _slice(start: Any, end: Any, step: int) -> str | None:
    if step < 0:
        opened = isinstance(start, int) and isinstance(end, int) and (start == -1 or start >= OPEN) and end <= -OPEN
        return ("::-1" if step == -1 else f"::{step}") if opened else None
    if not all(isinstance(d, int) or "-" not in str(d) for d in (start, end)):
        return None  # a negative one counts from the end
    first = "" if start == 0 and isinstance(start, int) else extent(start)
    last = "" if isinstance(end, int) and end >= OPEN else extent(end)
    colon = ":" if is_atom(first) and is_atom(last) else " : "
    text = f"{first}{colon}{last}".strip()
    return text if step == 1 else f"{text}:{step}"


def gather(call: NodeCall) -> str | None:
    axis, data, indices = call.attribute("axis", 0), call.value(0), call.value(1)
    single = call.scalar(1) if indices.rank == 0 else None
    if single is not None and (axis >= 0 or data.rank is not None):
        axis = axis % data.rank if data.rank is not None else axis
        if data.rank is None or axis < 3:
            return f"{call.text(0)}[{', '.join([*[':'] * axis, str(int(single))])}]"
        if axis == data.rank - 1:
            return f"{call.text(0)}[..., {int(single)}]"
    if data.known is not None and data.host and indices.host:
        return None
    # The operator's own mode: out-of-range indices read NaN.
    return f"jnp.take({call.text(0)}, {call.text(1)}, axis={axis})"


def global_pool(call: NodeCall) -> str | None:
    rank = call.value(0).rank
    if not call.is_float or rank is None or rank < 3:
        return None
    name = "mean" if "Average" in call.node.op_type else "max"
    return f"{call.text(0)}.{name}(axis={tuple_of(range(2, rank))}, keepdims=True)"


def trilu(call: NodeCall) -> str | None:
    k = call.scalar(1) if call.has(1) else 0
    if k is None or call.value(0).shape is None:
        return None
    name = "triu" if call.attribute("upper", 1) else "tril"
    return f"jnp.{name}({call.text(0)}{f', {int(k)}' if k else ''})"


MOVES: Final[dict[str, Form]] = {
    **dict.fromkeys(("Flatten", "Reshape"), reshape),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), global_pool),
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Expand": expand,
    "Gather": gather,
    "Pad": pad,
    "Range": range_,
    "Slice": slice_,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unsqueeze": unsqueeze,
}
"""Operators of ai.onnx with plain forms."""
