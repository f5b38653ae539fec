"""``onnx2jax run model.onnx``: outputs for inputs from files, or random ones; the best classes of a classifier."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import jax.numpy as jnp
import numpy as np

from ..model.reports.comparison import described
from ..model.reports.special_values import first_special, holds
from ..progress import stage
from ..proto import atomic
from .inputs import add_inputs, filled, input_values, sized, takes_images
from .parser import Arguments, CommandError, Parser, as_npz, as_path, converted
from .terminal import Table, flags, note, print_result, with_flags


def add_run(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "run model.onnx --input image=cat.png --output-dir results",
        json="print inputs and outputs as JSON, with values of outputs up to 1000 numbers",
    )
    add_inputs(parser)
    parser.add_switch("--random", "fill other inputs with random numbers, as --seed says")
    parser.add_argument(
        "--labels",
        type=as_path,
        metavar="FILE",
        help="names of classes, one in each line, or JSON (default: the model's metadata, or config.json beside it)",
    )
    parser.add_dims()
    parser.add_rebatch()
    parser.add_computing()
    parser.add_argument("--output-dir", type=as_path, metavar="DIR", help="save each output as DIR/NAME.npy")
    parser.add_argument("--output-file", type=as_npz, metavar="FILE.npz", help="save all outputs in one file")


MOST: int = 1000
"""The most elements of an output that are printed as JSON."""


def do_run(arguments: Arguments) -> None:
    model = converted(arguments, background_compile=True)
    values = input_values(model, arguments)
    absent = [v for v in model.inputs if v.name not in values]
    if absent and not arguments.random:
        fix = flags("--input", {absent[0].name: "FILE.npy"})
        raise CommandError(f"input {absent[0]} is missing: {fix}, or --random")
    feeds = filled(model, values, arguments.seed)
    with stage("running"), sized(model, values):
        results = model.run(None, feeds)
    outputs = dict(zip((v.name for v in model.outputs), results, strict=True))
    if any(holds(v, "nan") for v in results) and (origin := first_special(model, feeds, 0, ["nan"])):
        note(with_flags(origin))
    classes = _classes(model, outputs, arguments)
    files = list(map(str, _save(outputs, arguments.output_dir, arguments.output_file)))
    inputs = {n: {"type": described(x)} for n, x in feeds.items()}
    facts: dict[str, Any] = {"inputs": inputs, "outputs": {n: _output_facts(x) for n, x in outputs.items()}}
    if classes:
        facts["classes"] = _plain(classes)
    if files:
        facts["files"] = files
    parts: list[Table | str] = [
        Table(title, ("name", "type", "values"), ((n, described(x), _summary(x)) for n, x in arrays.items()))
        for title, arrays in (("inputs", feeds), ("outputs", outputs))
    ]
    for name, samples in classes.items():
        for i, rows in enumerate(samples):
            title = f"largest scores of {name}" + f", sample {i + 1} of {len(outputs[name])}" * (len(samples) > 1)
            parts.append(Table(title, [*rows[0]], [tuple(map(_text, row.values())) for row in rows]))
    if files:
        parts.append(f"\nwrote {', '.join(files)}")
    print_result(arguments, facts, *parts)


def _classes(model: Any, outputs: dict[str, Any], arguments: Arguments) -> dict[str, Any]:
    """The best classes by output and sample: of an image, or of outputs that a file of labels fits."""
    if arguments.labels is None and not takes_images(arguments):
        return {}
    labels = labels_of(arguments.model, model.metadata, arguments.labels)
    classes = best(outputs, labels)
    if arguments.labels is None:  # those beside the model may be of something else
        return classes or best(outputs, {})
    if not classes:
        raise CommandError(f"--labels {arguments.labels} has {len(labels)} labels, and no output as many scores")
    return classes


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _output_facts(value: Any) -> dict[str, Any]:
    """An output in JSON types; NaN and infinities become strings."""
    if isinstance(value, np.ndarray) and value.size > MOST:
        return {"type": described(value), "summary": _summary(value)}
    return {"type": described(value), "values": _plain(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    odd = isinstance(value, complex | bytes) or (isinstance(value, float) and not np.isfinite(value))
    return str(value) if odd or not isinstance(value, str | int | float | bool | None) else value


def _summary(value: Any) -> str:
    if not isinstance(value, np.ndarray) or not value.size or value.dtype == object or value.dtype.kind == "c":
        text = str(value.ravel()[:4].tolist() if isinstance(value, np.ndarray) else value)
        return text if len(text) <= 60 else text[:57] + "..."
    numbers = value.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    parts = [
        f"{what} {f(finite):.6g}" for what, f in (("min", np.min), ("mean", np.mean), ("max", np.max)) if finite.size
    ]
    odd = [f"{n} {what}" for what, n in (("nan", np.isnan(numbers).sum()), ("inf", np.isinf(numbers).sum())) if n]
    return "  ".join(parts + odd)


def _save(outputs: dict[str, Any], folder: Path | None, file: Path | None) -> list[Path]:
    """The files that were written."""
    arrays = {
        name: value.astype(np.str_) if value.dtype == object else value
        for name, value in outputs.items()
        if isinstance(value, np.ndarray)
    }
    written = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            # Quoted, names such as a/b:0 are valid file names on every system, and unique.
            written.append(folder / f"{quote(name, safe='')}.npy")
            np.save(written[-1], array)
    if file is not None:
        with atomic.replacing(file) as opened:
            atomic.write_npz(opened, arrays)
        written.append(file)
    left_out = [name for name in outputs if name not in arrays]
    if left_out and (folder or file):
        note(f"not saved, because not tensors: {', '.join(left_out)}")
    return written


BEST: Final = 5
"""Classes that are shown of each sample."""
SAMPLES: Final = 4
"""Samples of a batch whose classes are shown."""
KEYS: Final = ("names", "labels", "classes", "class_names", "id2label")
"""Metadata in which exporters write labels: Ultralytics' names, and others."""


def labels_of(model: Path, metadata: Mapping[str, str], file: Path | None) -> dict[int, str]:
    """The labels by class: of a file, else of a model's metadata, or of config.json beside it; empty if there are none.

    Raises:
        CommandError: the file has none.
    """
    if file is not None:
        text = file.read_text(encoding="utf-8", errors="replace")
        if labels := _labels(_parsed(text) if file.suffix == ".json" else text.splitlines()):
            return labels
        raise CommandError(f"--labels {file}: expected a label in each line, or JSON: a list, or labels by number")
    for key in KEYS:
        if labels := _labels(_parsed(metadata.get(key, ""))):
            return labels
    for config in (model.parent / "config.json", model.parent.parent / "config.json"):  # as optimum writes it
        if config.is_file() and isinstance(facts := _parsed(config.read_text(encoding="utf-8")), dict):
            return _labels(facts.get("id2label"))
    return {}


def _parsed(text: str) -> Any:
    """JSON, or a Python literal; None for other texts."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _labels(names: Any) -> dict[int, str]:
    """Labels by class, of a list of them, or of labels by number, as text too; empty for anything else.

    >>> _labels({"0": "cat", "1": ["n02", "dog"]})
    {0: 'cat', 1: 'n02 dog'}
    """
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(str(k).isdecimal() for k in names):
        return {}
    return {int(k): " ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in names.items()}


def best(outputs: Mapping[str, Any], labels: Mapping[int, str]) -> dict[str, list[list[dict[str, Any]]]]:
    """The classes with the greatest scores, by output and sample; outputs that are no scores are left out.

    Scores are floats of [batch, classes] or [batch, classes, 1, 1], of as many classes as labels; without labels, of
    one sample in one output: a detector has several.
    """
    scores = {n: v for n, v in outputs.items() if _is_scores(v, len(labels))}
    if not labels and len(scores) > 1:
        return {}
    return {n: [_of_sample(row.ravel(), labels) for row in v.astype(np.float64)[:SAMPLES]] for n, v in scores.items()}


def _is_scores(value: Any, classes: int) -> bool:
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 4) or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    batch, count, *others = value.shape
    return {*others} <= {1} and batch > 0 and (count == classes if classes else batch == 1 < count)


def _of_sample(scores: np.ndarray, labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """The best classes of a sample; of scores that are no probabilities also their softmax."""
    rows = []
    for i in np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:BEST].tolist():
        label = {"label": labels.get(i, "")} if labels else {}
        rows.append({"class": i, **label, "score": float(scores[i])})
    if np.isfinite(scores).all() and (scores.min() < 0 or scores.max() > 1):
        powers = np.exp(scores - scores.max())
        rows = [row | {"softmax": float(powers[row["class"]] / powers.sum())} for row in rows]
    return rows
