"""``onnx2jax run model.onnx``: outputs for inputs from files, or random ones."""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ..errors import InputTypeError
from ..model.convert import convert
from ..model.samples import random_value
from ..proto.types import TensorType, ValueInfo
from .terminal import CommandError, print_table, type_of


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    run = commands.add_parser("run", help="run a model on files or random numbers")
    run.set_defaults(command=_run)
    run.add_argument("model", type=Path)
    run.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input's value; FILE.npz alone gives several; repeatable",
    )
    run.add_argument(
        "--random",
        action="store_true",
        help="fill the other inputs: normal floats; integers 0 or 1, which serve as masks and as indices",
    )
    run.add_argument("--seed", type=int, default=0, help="of --random (default: %(default)s)")
    run.add_argument(
        "--dim", action="append", default=[], metavar="NAME=N", help="a free dimension (default: 1); repeatable"
    )
    run.add_argument("--output-dir", type=Path, metavar="DIR", help="save each output as DIR/NAME.npy")
    run.add_argument("--output-file", type=Path, metavar="FILE.npz", help="save all outputs in one file")


def _run(arguments: argparse.Namespace) -> int:
    dims = {name: _count(name, value) for name, value in _pairs("--dim", arguments.dim)}
    model = convert(arguments.model, dim_overrides=dims)
    feeds = _files(arguments.input, {v.name: v for v in model.inputs} | dict(model.optional))
    absent = [v for v in model.inputs if v.name not in feeds]
    if absent and not arguments.random:
        raise CommandError(f"input {absent[0]} is not given: --input {absent[0].name}=FILE.npy, or --random")
    rng = np.random.default_rng(arguments.seed)
    feeds |= {v.name: _random(v, rng) for v in absent}
    outputs = dict(zip((v.name for v in model.outputs), model.run(None, feeds), strict=True))
    for title, values in (("inputs", feeds), ("outputs", outputs)):
        print_table(title, ("name", "type", "values"), [(n, type_of(x), _summary(x)) for n, x in values.items()])
    _save(outputs, arguments.output_dir, arguments.output_file)
    return 0


def _pairs(option: str, values: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in values:
        name, equals, value = text.rpartition("=")
        if not (name and equals and value):
            raise CommandError(f"{option} {text}: expected NAME=VALUE")
        yield name, value


def _count(name: str, value: str) -> int:
    if not value.isdecimal():
        raise CommandError(f"--dim {name}={value}: {value!r} is not a whole number")
    return int(value)


def _files(options: Iterable[str], declared: dict[str, ValueInfo]) -> dict[str, Any]:
    """The arrays of ``NAME=FILE.npy`` and ``FILE.npz`` options."""
    feeds: dict[str, Any] = {}
    for option in options:
        if "=" not in option and option.endswith(".npz"):
            with _load(option) as arrays:
                feeds |= {name: arrays[name] for name in arrays.files}
        else:
            ((name, path),) = _pairs("--input", [option])
            feeds[name] = _load(path)
    unknown = [name for name in feeds if name not in declared]
    if unknown:
        raise CommandError(f"the model has no input {unknown[0]!r}; it has {', '.join(map(repr, declared)) or 'none'}")
    return {name: _as_declared(array, declared[name]) for name, array in feeds.items()}


def _load(path: str) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except ValueError as error:
        raise CommandError(f"{path} is no .npy or .npz file that can be read: {error}") from None


def _as_declared(array: np.ndarray, info: ValueInfo) -> np.ndarray:
    """Undo what .npy files do to types NumPy does not know: text is fixed-width there, bfloat16 raw bytes."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "V" and isinstance(info.type, TensorType):
        return array.view(info.type.dtype)
    return array


def _random(info: ValueInfo, rng: np.random.Generator) -> np.ndarray:
    try:
        return random_value(info, rng)
    except InputTypeError as e:
        raise CommandError(f"{e}; give it with --input {info.name}=FILE.npy") from None


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


def _save(outputs: dict[str, Any], folder: Path | None, file: Path | None) -> None:
    arrays = {name: _storable(value) for name, value in outputs.items() if isinstance(value, np.ndarray)}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            # An output may be called a/b:0; quoted, it is a file name on every system, and still unique.
            np.save(folder / f"{quote(name, safe='')}.npy", array)
    if file is not None:
        # What np.savez writes; but that takes names as keywords, and an output may be called "file".
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
    left_out = [name for name in outputs if name not in arrays]
    if left_out and (folder or file):
        print(f"not saved, being no tensors: {', '.join(left_out)}", file=sys.stderr)


def _storable(array: np.ndarray) -> np.ndarray:
    return array.astype(np.str_) if array.dtype == object else array
