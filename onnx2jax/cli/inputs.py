"""Inputs from the command line: array files, test data, images, texts, or random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..errors import InputShapeError, InputTypeError, ModelError, OperatorError, did_you_mean
from ..generation.files import tokenizer_beside
from ..model.caches import step_extents
from ..model.calls.dims import named_dims, variables, with_dims
from ..model.reports.samples import data_sets, random_values, read_value, read_values
from ..model.reports.summary import larger_sizes
from ..progress import stage
from ..proto.files import path_of
from ..proto.types import TensorType, ValueInfo
from .images import IMAGES, add_images, image, image_options
from .parser import Arguments, CommandError, Parser, pair, whole
from .terminal import note


def add_inputs(parser: Parser) -> None:
    """Add the options that ``input_values`` reads."""
    parser.add_repeatable(
        "--input",
        "NAME=FILE",
        "an input's value: .npy, .pb (a TensorProto), .txt (a text in each line), or an image; "
        "FILE.npz, or a folder with input_0.pb, alone gives several",
    )
    parser.add_pairs(
        "--text",
        "NAME=TEXT",
        "a text; its tokens by tokenizer.json beside the model where the input is of integers, "
        "with attention_mask and token_type_ids",
        first=True,
    )
    add_images(parser)
    parser.add_argument("--seed", type=whole, default=0, help="of random numbers (default: %(default)s)")


def input_values(model: Any, arguments: Arguments) -> dict[str, Any]:
    """The values that the options give, by input.

    Raises:
        CommandError: the model has no input of that name, or a file does not fit its input.
    """
    declared = {v.name: v for v in model.inputs} | dict(model.optional)
    if (options := image_options(arguments)) and not takes_images(arguments):
        raise CommandError(f"{options[0]} is for images, and no --input is one")
    feeds = _files(model, declared, arguments)
    for name, text in arguments.text:
        feeds |= _text(_known(name, declared), text, declared.keys() - feeds.keys(), arguments.model)
    return feeds


def takes_images(arguments: Arguments) -> bool:
    """Whether an input of the command line is an image."""
    return any(Path(text).suffix.lower() in IMAGES for text in arguments.input)


def filled(model: Any, feeds: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The feeds, with random numbers for missing inputs; dimension variables keep the extents of given inputs."""
    declared = named_dims(model.inputs)
    extents = {
        d: n
        for v in declared
        if v.name in feeds
        for d, n in zip(v.shape or (), np.shape(feeds[v.name]), strict=False)
        if isinstance(d, str)
    }
    absent = [v for v in with_dims(declared, extents) if v.name not in feeds]
    say_sizes(absent)
    try:
        return {**feeds, **random_values(absent, np.random.default_rng(seed))}
    except InputTypeError as e:
        options = " ".join(f"--input {v.name}=FILE.npy" for v in absent[:3])
        raise CommandError(f"{e}; pass arrays with {options}") from None


def say_sizes(inputs: Iterable[ValueInfo]) -> None:
    """Name the dimensions of inputs that are taken as 1, and the flags that choose others."""
    if names := variables(inputs):
        note(f"taken as 1: {', '.join(names)}; other sizes: {' '.join(f'--dim {n}=SIZE' for n in names)}")


@contextmanager
def sized(model: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """If a call fails on extents of 1 of inputs without values, name flags with which it succeeds."""
    try:
        yield
    except (OperatorError, InputShapeError) as e:
        if "bytes of memory" not in str(e):  # of which larger extents need more
            with stage("trying larger extents"):
                sizes = larger_sizes(model, values, {}, step_extents(model, {}))
            if sizes:
                flags = " ".join(f"--dim {name}={size}" for name, size in sizes.items())
                e.add_note(f"extents of 1 may be too small: {flags}")
        raise


def _known(name: str, declared: Mapping[str, ValueInfo]) -> ValueInfo:
    if name not in declared:
        names = ", ".join(map(repr, declared)) or "none"
        raise CommandError(f"the model has no input {name!r}; it has {names}{did_you_mean(name, declared)}")
    return declared[name]


def _files(model: Any, declared: Mapping[str, ValueInfo], arguments: Arguments) -> dict[str, Any]:
    feeds: dict[str, Any] = {}
    for option in arguments.input:
        if "=" not in option and path_of(option).is_dir():
            free = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
            folders = data_sets(option)
            if not folders:
                raise CommandError(f"--input {option}: the folder has no input_0.pb, and no test_data_set_0")
            feeds |= read_values(folders[0], "input", free)
        elif "=" not in option and path_of(option).suffix and not path_of(option).exists():
            raise CommandError(f"--input {option}: there is no such file; expected NAME=FILE, FILE.npz or a folder")
        elif "=" not in option and option.endswith(".npz"):
            arrays = load(option)
            if isinstance(arrays, np.ndarray):
                raise CommandError(f"{option} contains one unnamed array: --input NAME={option}")
            feeds |= {n: _as_declared(array, _known(n, declared)) for n, array in arrays.items()}
        else:
            name, path = pair("--input", "NAME=FILE", option)
            feeds[name] = _file(_known(name, declared), path_of(path), arguments, model.metadata)
    return feeds


def _file(info: ValueInfo, path: Path, arguments: Arguments, metadata: Mapping[str, str]) -> Any:
    kind = path.suffix.lower()
    if kind == ".pb":
        try:
            return read_value(info, path)[1]
        except ModelError as e:
            raise CommandError(str(e)) from None
    if kind == ".txt":
        if not isinstance(info.type, TensorType) or info.type.dtype != object:
            raise CommandError(f"input {info} does not take the texts of {path}: it is not a tensor of strings")
        return _texts(info, path.read_text(encoding="utf-8").splitlines())
    if kind in IMAGES:
        return image(info, path, arguments, metadata)
    array = load(path)
    if not isinstance(array, np.ndarray):
        raise CommandError(f"{path} contains named arrays: pass them all by --input {path}")
    return _as_declared(array, info)


def load(path: str | Path) -> Any:
    """The array of a .npy file, or the arrays of an .npz file by name.

    Raises:
        CommandError: the file is neither.
    """
    try:
        with path_of(path).open("rb") as file:  # NumPy leaves the file open if an .npz file is damaged
            if (begins := file.peek(6)) and not begins.startswith((b"\x93NUMPY", b"PK")):
                raise ValueError("it has the header of neither")  # NumPy's own message is about pickles
            arrays = np.load(file, allow_pickle=False)
            return arrays if isinstance(arrays, np.ndarray) else {n: arrays[n] for n in arrays.files}
    except (ValueError, EOFError, BadZipFile) as error:
        raise CommandError(f"{path} is not a readable .npy or .npz file: {error}") from None


def _as_declared(array: np.ndarray, info: ValueInfo) -> np.ndarray:
    """Restore types that .npy files do not store: strings are fixed-width there, bfloat16 is raw bytes."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "V" and isinstance(info.type, TensorType):
        return array.view(info.type.dtype)
    return array


def _texts(info: ValueInfo, texts: list[str]) -> np.ndarray:
    """Texts in the declared shape, which they must fill: [n], [n, 1], [1, n] or []."""
    array = np.array(texts, object)
    shape = info.shape
    if shape is None:
        return array
    first_free = next((i for i, d in enumerate(shape) if not isinstance(d, int)), None)
    sizes = [d if isinstance(d, int) else len(texts) if i == first_free else 1 for i, d in enumerate(shape)]
    if math.prod(sizes) != len(texts):
        raise CommandError(f"input {info} does not take {len(texts)} texts")
    return array.reshape(sizes)


def _text(info: ValueInfo, text: str, free: Iterable[str], model: Path) -> dict[str, Any]:
    """A text as an input of strings, or its tokens with their masks as inputs of integers."""
    if not isinstance(info.type, TensorType) or info.type.dtype.kind not in "iuO":
        raise CommandError(f"input {info} takes no text: its type is neither string nor integer")
    if info.type.dtype == object:
        return {info.name: _texts(info, [text])}
    encoding = tokenizer_beside(model).encode(text)
    rows = {info.name: encoding.ids}
    for name, row in (("attention_mask", encoding.attention_mask), ("token_type_ids", encoding.type_ids)):
        if name in free:
            rows.setdefault(name, row)
    return {n: np.array(row, info.type.dtype)[(None,) * (len(info.shape or (0, 0)) - 1)] for n, row in rows.items()}
