"""Whether a model with another batch size is right: several batches at once against each of them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from ..errors import RebatchError

TIMES: Final = 3
"""How many batches the check runs at once."""


@dataclass(frozen=True)
class Place:
    """Where the batch is in a value: an axis, and how many blocks of samples lie on that axis (rows of one axis that
    was merged with those before it)."""

    axis: int
    blocks: int = 1


def drawn(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Random inputs: normal numbers, and integers 0 and 1."""
    rng = np.random.default_rng(0)

    def one(value: jax.ShapeDtypeStruct) -> np.ndarray:
        integers = np.dtype(value.dtype).kind in "biu"
        numbers = rng.integers(0, 2, value.shape) if integers else rng.normal(size=value.shape)
        return np.asarray(numbers).astype(value.dtype)

    return {n: one(v) for n, v in shapes.items()}


def part(value: Any, place: Place | None, i: int) -> np.ndarray:
    """What belongs to the i-th of the batches."""
    value = np.asarray(value)
    if place is None:
        return value
    shape, axis, blocks = value.shape, place.axis, place.blocks
    split = value.reshape(*shape[:axis], blocks, TIMES, shape[axis] // blocks // TIMES, *shape[axis + 1 :])
    return split.take(i, axis + 1).reshape(*shape[:axis], shape[axis] // TIMES, *shape[axis + 1 :])


def compare(
    together: Sequence[Any], apart: Sequence[Sequence[Any]], places: Sequence[Place | None], changes: Sequence[str]
) -> None:
    """Compare outputs.

    Args:
        together: those of all batches at once.
        apart: those of each batch.
        places: where the batch is in each output.
        changes: what was changed, for the message.

    Raises:
        RebatchError: they differ, or nothing tells the batches apart.
    """
    for i, results in enumerate(apart):
        for k, (every, wanted, place) in enumerate(zip(together, results, places, strict=True)):
            if not _alike(part(every, place, i), np.asarray(wanted)):
                raise RebatchError(
                    f"with {'; '.join(changes) or 'no node changed'}, output {k} of {TIMES} batches at once is not "
                    "that of each alone, so nothing was changed. The samples of a batch influence each other, or the "
                    "batch is on another axis: convert(..., rebatch={'input name': axis})"
                )
    if all(np.array_equal(a, b, equal_nan=_floating(a)) for a, b in zip(*map(_arrays, apart[:2]), strict=True)):
        raise RebatchError(
            "the model gives the same for different random inputs, so that nothing shows whether the repair is right"
        )


def _arrays(results: Sequence[Any]) -> list[np.ndarray]:
    return list(map(np.asarray, results))


def _floating(value: np.ndarray) -> bool:
    return value.dtype.kind == "f"


def _alike(found: np.ndarray, wanted: np.ndarray) -> bool:
    if found.shape != wanted.shape or not _floating(found):
        return np.array_equal(found, wanted)
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    rtol = 1e-3 if found.dtype.itemsize > 2 else 2e-2
    return np.allclose(found, wanted, rtol=rtol, atol=rtol / 10 * largest, equal_nan=True)
