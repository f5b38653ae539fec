"""How far models computed in bfloat16 and float16 are from float32: a table.

    python -m benchmarks.accuracy FOLDER [--only NAME ...] [--largest BYTES]

FOLDER holds a folder for each model, with ``model.onnx`` and inputs as ``benchmarks.models.inputs`` finds them. Each
row gives, for one type, the largest difference of an output divided by that output's greatest magnitude, the same for
the mean difference, and in how many rows of the outputs [rows, classes] the greatest number is at the same place.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

import onnx2jax
from benchmarks.models import inputs
from onnx2jax.model.reports.table import table

DTYPES: Final = ("bfloat16", "float16")


class Accuracy(NamedTuple):
    """How far one set of outputs is from another.

    Attributes:
        largest, mean: differences, divided by the greatest magnitude of the output.
        agreement: the share of rows whose greatest number is at the same place; None without outputs of rank 2.
        shapes: whether all shapes are the same, and so all outputs compared.
    """

    largest: float
    mean: float
    agreement: float | None
    shapes: bool = True


def accuracy(theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> Accuracy:
    """How far ``ours`` is from ``theirs``, over all floating outputs; NaN or infinity in one alone is infinitely far.

    >>> accuracy([np.array([[1.0, 4.0]])], [np.array([[1.0, 3.0]])])
    Accuracy(largest=0.25, mean=0.125, agreement=1.0, shapes=True)
    """
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    alike = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if a.shape == b.shape and a.size]
    found = [_differences(a, b) for a, b in alike]
    rows = [(a.argmax(1) == b.argmax(1)).mean() for a, b in alike if a.ndim == 2 and a.shape[1] > 1]
    return Accuracy(
        max((d.max() for d in found), default=0.0),
        max((d.mean() for d in found), default=0.0),
        float(np.mean(rows)) if rows else None,
        len(alike) == sum(a.size > 0 for a, _ in pairs),
    )


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference = np.where(same, 0.0, np.abs(a - b))
    difference = np.where(np.isnan(difference), np.inf, difference)
    scale = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    return difference / scale if scale else difference


def measured(path: Path) -> Iterator[tuple[str, Accuracy]]:
    """For each type, how far a model computed in it is from float32."""
    model = onnx2jax.convert(path)
    feeds = inputs(path, model)
    feeds = {n: v.astype(object) if v.dtype.kind == "U" else v for n, v in feeds.items()}
    expected = model.run(None, feeds, rng=0)
    for dtype in DTYPES:
        yield dtype, accuracy(expected, onnx2jax.convert(path, dtype=dtype).run(None, feeds, rng=0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--largest", type=int, default=1 << 40, help="bytes of the largest file")
    given = parser.parse_args(arguments)
    rows = [("model", "dtype", "largest", "mean", "argmax", "note")]
    for path in sorted(given.folder.glob("*/model.onnx")):
        name = path.parent.name
        if (given.only and name not in given.only) or path.stat().st_size > given.largest:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for dtype, found in measured(path):
                    agreement = "" if found.agreement is None else f"{found.agreement:.1%}"
                    note = "" if found.shapes else "other shapes"
                    rows.append((name, dtype, f"{found.largest:.1e}", f"{found.mean:.1e}", agreement, note))
                    print("\t".join(rows[-1]), flush=True)
        except Exception as error:  # a table of all models says which one fails
            rows.append((name, "", "", "", "", f"{type(error).__name__}: {error}".split("\n")[0][:60]))
            print("\t".join(rows[-1]), flush=True)

    print(table(rows))


if __name__ == "__main__":
    main()
