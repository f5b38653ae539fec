"""How far models computed in bfloat16 and float16 are from float32: writes docs/precision.md and docs/precision.json.

    python -m benchmarks.accuracy FOLDER [--only NAME ...] [--largest BYTES]

FOLDER holds a folder for each model, with ``model.onnx`` and inputs as ``benchmarks.models.inputs`` finds them. Each
row gives, for one type, the largest difference of an output divided by that output's greatest magnitude, the same for
the mean difference, and in how many rows of the outputs [rows, classes] the greatest number is at the same place. Rows
of models that are not in FOLDER, or not named, are kept.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import onnx2jax
from benchmarks.models import inputs

DTYPES: Final = ("bfloat16", "float16")
BOUNDS: Final = {"bfloat16": 0.05, "float16": 0.01}
"""The largest differences, as parts of the output's greatest magnitude, that need no reason."""
DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
PAGE, KEPT = DOCS / "precision.md", DOCS / "precision.json"

Rows = dict[str, dict[str, Any]]

HEAD: Final = """Written by `python -m benchmarks.accuracy FOLDER`. Each row runs a file with float32 or packed weights
in float32 and with `convert(..., dtype="bfloat16")` and `"float16"`, on the same inputs on a CPU. The number is the
largest difference of any output from float32's, relative to that output's largest magnitude. *argmax* is the share of
rows of outputs [rows, classes] with the same argmax. Bold numbers are above {bfloat16} in bfloat16 or {float16} in
float16; the last column explains them. For more digits than float32 has, `dtype="float64"` computes a file in double
([Convert and call](guides/convert.md#in-float64-or-float32))."""

REASONS: Final[Mapping[str, str]] = {
    "basic_pitch": "a logarithm of the spectrum's quiet bins, below 1e-6 of the loudest, where the rounded audio is a "
    "noise floor: rounding the audio alone moves float32 by 0.16 and 0.047",
    "basic_pitch_fp16": 'a file of float16, whose sums, root and logarithm dtype="float16" computes in float32',
    "ppocrv4_det": "a sigmoid of logits up to 103 is a threshold: the 0.1 % of pixels above the bound lie on edges of "
    "text, with logits below 6",
    "ppocrv4_rec": "a softmax at two undecided steps of 40, where the best two characters have 0.52 and 0.40, 0.50 and "
    "0.48",
    "silero_vad_16k_sequence": "one of 128 entries of the state hn: rounding in the encoder's convolutions reaches it "
    "through the LSTM's gates; the LSTM itself adds 0.004",
    "style_candy_coreml": "pixels less their mean, up to 151, are rounded to steps of a grey level in bfloat16, which "
    "instance normalization amplifies in white areas: rounding them alone moves float32 by 0.43 and 0.098",
    "yolox_nano": "mostly box offsets of cells without an object; convolution 1183 adds terms 13 times as large as "
    "their sum, which takes relative errors from 0.3 % to 1.5 %",
    "yolox_nano_int8_qdq": "8-bit codes flip in each layer: the first convolution times 1.000001 moves float32 by "
    "0.51, and onnxruntime differs by 0.52",
    "yunet_n_dynamic": "objectness is at most 0.03, and the relative error of a small sigmoid is the absolute error of "
    "its logit; boxes and keypoints are within 0.08",
    "yunet_s_640": "objectness is at most 0.02, and the relative error of a small sigmoid is the absolute error of its "
    "logit",
}
"""Why a model is above a bound."""


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
    """Measure models, keep their rows beside those of others, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--largest", type=int, default=1 << 40, help="bytes of the largest file")
    given = parser.parse_args(arguments)
    kept: Rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for path in sorted(given.folder.glob("*/model.onnx")):
        name = path.parent.name
        if (given.only and name not in given.only) or path.stat().st_size > given.largest:
            continue
        kept[name] = row(path)
        print(name, kept[name], flush=True)
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    PAGE.write_text("\n".join(lines(kept)) + "\n")


def row(path: Path) -> dict[str, Any]:
    """The accuracy of a model by type, or under "failed" why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {dtype: found._asdict() for dtype, found in measured(path)}
    except Exception as error:  # a table of all models says which one fails
        return {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def above(found: Mapping[str, Any]) -> list[str]:
    """The types in which a model is farther from float32 than BOUNDS."""
    return [d for d in DTYPES if "failed" not in found and not found[d]["largest"] <= BOUNDS[d]]


def lines(rows: Rows) -> Iterator[str]:
    """The page."""
    yield "# bfloat16 and float16"
    yield ""
    yield HEAD.format(**BOUNDS)
    yield ""
    compared = {n: r for n, r in rows.items() if "failed" not in r}
    within = {d: sum(d not in above(r) for r in compared.values()) for d in DTYPES}
    yield (
        f"Of {len(compared)} models that are compared, {within['bfloat16']} are within the bound in bfloat16 and "
        f"{within['float16']} in float16. Models without a row have not been measured."
    )
    yield ""
    yield f"| model | {' | '.join(f'{d} | argmax' for d in DTYPES)} | reason |"
    yield f"|{'---|' * (2 + 2 * len(DTYPES))}"
    for name, found in sorted(rows.items()):
        if "failed" in found:
            yield f"| {name} |{' |' * 2 * len(DTYPES)} {found['failed']} |"
            continue
        cells = [c for d in DTYPES for c in _cells(found[d], bold=d in above(found))]
        yield f"| {name} | {' | '.join(cells)} | {REASONS.get(name, '') if above(found) else ''} |"


def _cells(found: Mapping[str, Any], *, bold: bool) -> tuple[str, str]:
    agreement = "" if found["agreement"] is None else f"{found['agreement']:.1%}"
    largest = f"{found['largest']:.1e}"
    return f"**{largest}**" if bold else largest, agreement if found["shapes"] else "other shapes"


if __name__ == "__main__":
    main()
