"""``onnx2jax run model.onnx``: outputs for inputs from files, or random ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ..model.reports.special_values import first_special, holds
from ..progress import stage
from ..proto import npz
from .inputs import add_inputs, filled, input_values, sized, takes_images
from .terminal import (
    CommandError,
    add_command,
    add_computing,
    add_dims,
    add_rebatch,
    converted,
    dims,
    note,
    print_json,
    print_table,
    type_of,
)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(
        parser,
        _run,
        example="run model.onnx --input image=cat.png --output-dir results",
        json="print inputs and outputs as JSON, with values of outputs up to 1000 numbers",
    )
    add_inputs(parser)
    parser.add_argument(
        "--random",
        action="store_true",
        help="fill other inputs with random numbers: normal floats; integers 0 or 1, valid as masks and indices",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help="names of classes, one in each line, or JSON (default: the model's metadata, or config.json beside it)",
    )
    add_dims(parser)
    add_rebatch(parser)
    add_computing(parser)
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="save each output as DIR/NAME.npy")
    parser.add_argument("--output-file", type=Path, metavar="FILE.npz", help="save all outputs in one file")


MOST: int = 1000
"""The most elements of an output that are printed as JSON."""


def _run(arguments: argparse.Namespace) -> int:
    model = converted(arguments, dims=dims(arguments.dim), background_compile=True)
    feeds = input_values(model, arguments)
    absent = [v for v in model.inputs if v.name not in feeds]
    if absent and not arguments.random:
        raise CommandError(f"input {absent[0]} is missing: --input {absent[0].name}=FILE.npy, or --random")
    feeds = filled(model, feeds, arguments.seed)
    with stage("running"), sized(model, feeds):
        results = model.run(None, feeds)
    outputs = dict(zip((v.name for v in model.outputs), results, strict=True))
    if any(holds(v, "nan") for v in results) and (origin := first_special(model, feeds, 0, ["nan"])):
        note(origin)
    classes = _classes(model, outputs, arguments)
    written = _save(outputs, arguments.output_dir, arguments.output_file)
    if arguments.json:
        described = {n: {"type": type_of(x)} for n, x in feeds.items()}
        facts = {"inputs": described, "outputs": {n: _described(x) for n, x in outputs.items()}}
        more = {"classes": _plain(classes), "files": [str(file) for file in written]}
        print_json(facts | {key: found for key, found in more.items() if found})
    else:
        for title, values in (("inputs", feeds), ("outputs", outputs)):
            print_table(title, ("name", "type", "values"), [(n, type_of(x), _summary(x)) for n, x in values.items()])
        for name, samples in classes.items():
            for i, rows in enumerate(samples):
                title = f"largest scores of {name}" + f", sample {i + 1} of {len(outputs[name])}" * (len(samples) > 1)
                print_table(title, [*rows[0]], [tuple(map(_text, row.values())) for row in rows])
        if written:
            print(f"\nwrote {', '.join(map(str, written))}")
    return 0


def _classes(model: Any, outputs: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The best classes by output and sample: of an image, or of outputs that a file of labels fits."""
    if arguments.labels is None and not takes_images(arguments):
        return {}
    from .classes import best, labels_of

    labels = labels_of(arguments.model, model.metadata, arguments.labels)
    found = best(outputs, labels)
    if arguments.labels is None:  # those beside the model may be of something else
        return found or best(outputs, {})
    if not found:
        raise CommandError(f"--labels {arguments.labels} has {len(labels)} labels, and no output as many scores")
    return found


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _described(value: Any) -> dict[str, Any]:
    """An output in JSON types; NaN and infinities become strings."""
    if not isinstance(value, np.ndarray):
        return {"type": type_of(value), "values": _plain(value)}
    facts: dict[str, Any] = {"type": type_of(value)}
    return facts | ({"values": _plain(value.tolist())} if value.size <= MOST else {"summary": _summary(value)})


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
    arrays = {name: _storable(value) for name, value in outputs.items() if isinstance(value, np.ndarray)}
    written = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            # Quoted, names such as a/b:0 are valid file names on every system, and unique.
            written.append(folder / f"{quote(name, safe='')}.npy")
            np.save(written[-1], array)
    if file is not None:
        npz.write(file, arrays)
        written.append(file)
    left_out = [name for name in outputs if name not in arrays]
    if left_out and (folder or file):
        note(f"not saved, because not tensors: {', '.join(left_out)}")
    return written


def _storable(array: np.ndarray) -> np.ndarray:
    return array.astype(np.str_) if array.dtype == object else array
