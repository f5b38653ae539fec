"""Fixes for arrays that do not fit a model's inputs, as the ends of messages: axes that lack or moved, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...proto.types import TensorType, ValueInfo
from .dims import named_dims


def of_rank(name: str, wanted: Sequence[Any], shape: Sequence[Any]) -> str:
    """The fix for an array that lacks one axis, that of a column or of the batch, and for a number.

    >>> of_rank("age", (None, 1), (6,))
    '; as a column: np.asarray(age)[:, None]'
    >>> of_rank("image", ("batch", 3, 8, 8), (3, 8, 8))
    '; as a batch of one: image[None]'
    >>> of_rank("age", (None, 1), ())
    '; as one row: np.full((1, 1), age)'
    """
    if not shape:
        ones = tuple(d if isinstance(d, int) else 1 for d in wanted)
        return f"; as one row: np.full({ones}, {name})" if set(ones) == {1} else ""
    if len(wanted) == 2 and _fits(wanted, (*shape, 1)):
        return f"; as a column: np.asarray({name})[:, None]"
    return f"; as a batch of one: {name}[None]" if _fits(wanted, (1, *shape)) else ""


def of_extents(name: str, wanted: Sequence[Any], shape: Sequence[Any]) -> str:
    """The fix for images, sounds or volumes whose channels are on another axis.

    >>> of_extents("image", ("batch", 3, "h", "w"), (2, 48, 160, 3))
    '; if the channels are last, move them: np.moveaxis(image, -1, 1)'
    """
    for where, source, target in (("last", -1, 1), ("first", 1, -1)):
        axes = list(shape)
        if len(axes) > 2:
            axes.insert(target % len(axes), axes.pop(source))
        if len(axes) > 2 and _fits(wanted, axes):
            return f"; if the channels are {where}, move them: np.moveaxis({name}, {source}, {target})"
    return ""


def of_options(
    inputs: Sequence[ValueInfo], rebatch: bool | Mapping[str, int], name: str, wanted: Sequence[Any], axis: int
) -> str:
    """The fix for another extent, by an option of ``convert`` that fixed it or could free it.

    Args:
        inputs: the inputs without ``dims=``.
        rebatch: as given to ``convert``.
        name: the input.
        wanted: its declared shape.
        axis: the axis whose extent differs.
    """
    free = next((v.shape for v in named_dims(inputs) if v.name == name), None) or wanted
    if len(free) == len(wanted) and isinstance(free[axis], str):
        return f"; dims= fixes {free[axis]!r}: for other extents convert without it"
    if axis or len(wanted) < 2 or rebatch is True:
        return ""
    axes = {**rebatch, name: 0} if rebatch else True
    return f"; for other batch sizes: convert(..., rebatch={axes})"


def of_table(inputs: Sequence[ValueInfo], values: Iterable[Any]) -> str:
    """The fix for a table of pandas or polars that was given as one input, and has columns of the inputs' names."""
    table = next((v for v in values if hasattr(v, "columns") and hasattr(v, "to_numpy")), None)
    columns = () if table is None else {*map(str, table.columns)}
    arrays = [
        f"{v.name!r}: table[{[v.name] if len(v.shape or ()) == 2 else v.name!r}].to_numpy().astype({kind.dtype.name!r})"
        for v in inputs
        if v.name in columns and isinstance(kind := v.type, TensorType)
    ]
    return (
        f"; a table is one input, and its columns are given as several: model({{{', '.join(arrays)}}})"
        if arrays
        else ""
    )


def _fits(wanted: Sequence[Any], shape: Sequence[Any]) -> bool:
    """Whether an array of this shape fits, as far as extents are numbers."""
    pairs = zip(wanted, shape, strict=False)
    return len(wanted) == len(shape) and all(w == h for w, h in pairs if isinstance(w, int) and isinstance(h, int))
