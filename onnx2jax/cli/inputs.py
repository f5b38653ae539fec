"""Inputs on the command line: files of arrays, test data, images, texts, or random numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np

from .. import compat
from ..errors import InputTypeError, ModelError
from ..generation.files import tokenizer
from ..model.reports.samples import data_sets, random_value, read_value, read_values
from ..proto.types import TensorType, ValueInfo
from .terminal import CommandError, pairs, whole

IMAGES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
CHANNELS: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""What Pillow calls images of so many channels."""


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """The options that ``given`` reads."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="an input's value: .npy, .pb (a TensorProto), .txt (a text in each line), or an image; "
        "FILE.npz, or a folder with input_0.pb, alone gives several; repeatable",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="a text; its tokens by tokenizer.json beside the model where the input is of integers, "
        "with attention_mask and token_type_ids; repeatable",
    )
    for name, what in (("mean", "subtracted from"), ("std", "by which are divided")):
        parser.add_argument(
            f"--{name}", type=_numbers, metavar="A,B,C", help=f"for images: {what} pixels of 0 to 1, by channel"
        )
    parser.add_argument("--seed", type=whole, default=0, help="of random numbers (default: %(default)s)")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0.5,0.5,0.5") from None


def given(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options say, by input.

    Raises:
        CommandError: the model has no such input, or a file cannot be read as one.
    """
    declared = {v.name: v for v in model.inputs} | dict(model.optional)
    feeds = _files(model, declared, arguments)
    for name, text in pairs("--text", arguments.text, "TEXT", first=True):
        known = _known(name, declared)
        feeds |= _text(known, text, declared.keys() - feeds.keys(), arguments.model)
    return feeds


def filled(model: Any, feeds: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The feeds, with random numbers for the inputs that are missing. A dimension that has an extent keeps it."""
    rng = np.random.default_rng(seed)
    declared = {v.name: v for v in model.inputs}
    met = {
        d: n
        for name, value in feeds.items()
        if name in declared
        for d, n in zip(declared[name].shape or (), np.shape(value), strict=False)
        if isinstance(d, str)
    }
    absent = [v for v in model.inputs if v.name not in feeds]
    return {**feeds, **{v.name: _random(v, met, rng) for v in absent}}


def _random(info: ValueInfo, met: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    if info.shape is not None:
        info = info.reshaped([met.get(d, d) if isinstance(d, str) else d for d in info.shape])
    try:
        return random_value(info, rng)
    except InputTypeError as e:
        raise CommandError(f"{e}; give it with --input {info.name}=FILE.npy") from None


def _known(name: str, declared: Mapping[str, ValueInfo]) -> ValueInfo:
    if name not in declared:
        raise CommandError(f"the model has no input {name!r}; it has {', '.join(map(repr, declared)) or 'none'}")
    return declared[name]


def _files(model: Any, declared: Mapping[str, ValueInfo], arguments: argparse.Namespace) -> dict[str, Any]:
    feeds: dict[str, Any] = {}
    for option in arguments.input:
        if "=" not in option and Path(option).is_dir():
            free = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
            folders = data_sets(option)
            if not folders:
                raise CommandError(f"--input {option}: the folder has no input_0.pb, and no test_data_set_0")
            feeds |= read_values(folders[0], "input", free)
        elif "=" not in option and option.endswith(".npz"):
            arrays = load(option)
            if isinstance(arrays, np.ndarray):
                raise CommandError(f"{option} holds one array without a name: --input NAME={option}")
            feeds |= {n: _as_declared(array, _known(n, declared)) for n, array in arrays.items()}
        else:
            ((name, path),) = pairs("--input", [option], "FILE")
            feeds[name] = _file(_known(name, declared), Path(path), arguments)
    return feeds


def _file(info: ValueInfo, path: Path, arguments: argparse.Namespace) -> Any:
    kind = path.suffix.lower()
    if kind == ".pb":
        try:
            return read_value(info, path)
        except ModelError as e:
            raise CommandError(str(e)) from None
    if kind == ".txt":
        if not isinstance(info.type, TensorType) or info.type.dtype != object:
            raise CommandError(f"input {info} does not take the texts of {path}: it is no tensor of strings")
        return _texts(info, path.read_text(encoding="utf-8").splitlines())
    if kind in IMAGES:
        return _image(info, path, arguments.mean, arguments.std)
    array = load(path)
    if not isinstance(array, np.ndarray):
        raise CommandError(f"{path} holds arrays with names of their own: --input {path} alone gives them all")
    return _as_declared(array, info)


def load(path: str | Path) -> Any:
    """The array of a .npy file, or those of an .npz file by name.

    Raises:
        CommandError: it is none.
    """
    try:
        with open(path, "rb") as file:  # which NumPy leaves open where a .npz file is damaged
            if (begins := file.peek(6)) and not begins.startswith((b"\x93NUMPY", b"PK")):
                raise ValueError("it begins as neither")  # NumPy would speak of pickles
            arrays = np.load(file, allow_pickle=False)
            return arrays if isinstance(arrays, np.ndarray) else {n: arrays[n] for n in arrays.files}
    except (ValueError, EOFError, BadZipFile) as error:
        raise CommandError(f"{path} is no .npy or .npz file that can be read: {error}") from None


def _as_declared(array: np.ndarray, info: ValueInfo) -> np.ndarray:
    """Undo what .npy files do to types NumPy does not know: text is fixed-width there, bfloat16 raw bytes."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "V" and isinstance(info.type, TensorType):
        return array.view(info.type.dtype)
    return array


def _texts(info: ValueInfo, texts: list[str]) -> np.ndarray:
    """Texts in the shape that is declared, where they fill it: [n], [n, 1], [1, n] or []."""
    array = np.array(texts, object)
    shape = info.shape
    if shape is None:
        return array
    free = [i for i, d in enumerate(shape) if not isinstance(d, int)]
    sizes = [d if isinstance(d, int) else 1 for d in shape]
    if free:
        sizes[free[0]] = len(texts)
    if int(np.prod(sizes)) != len(texts):
        raise CommandError(f"input {info} does not take {len(texts)} texts")
    return array.reshape(sizes)


def _text(info: ValueInfo, text: str, free: Iterable[str], model: Path) -> dict[str, Any]:
    """A text as an input, or as the inputs that tell of its tokens."""
    if not isinstance(info.type, TensorType) or info.type.dtype.kind not in "iuO":
        raise CommandError(f"input {info} takes no text: it is neither of strings nor of tokens")
    if info.type.dtype == object:
        return {info.name: _texts(info, [text])}
    said = tokenizer(model).encode(text)
    found = {info.name: said.ids}
    others = {"attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    found |= {n: getattr(said, field) for n, field in others.items() if n in free and n != info.name}
    return {n: np.array(v, info.type.dtype)[(None,) * (len(info.shape or (0, 0)) - 1)] for n, v in found.items()}


def _image(info: ValueInfo, path: Path, mean: list[float] | None, std: list[float] | None) -> np.ndarray:
    """An image in the layout and size that the input declares: [1, c, h, w], [1, h, w, c], or without the first."""
    images = compat.optional("PIL.Image", "image")
    shape = info.shape or ()
    if not isinstance(info.type, TensorType) or len(shape) not in (2, 3, 4):
        raise CommandError(f"input {info} takes no image, which has 2 to 4 axes")
    inner = shape[-3:]
    places = [i for i, d in enumerate(inner) if d in CHANNELS] if len(inner) == 3 else []
    if len(inner) == 3 and not places:
        raise CommandError(f"input {info} does not say which axis is that of channels; give it as .npy")
    axis = None if len(inner) == 2 else (0 if 0 in places else places[-1])
    count = 1 if axis is None else int(inner[axis] or 1)
    height, width = (d for i, d in enumerate(inner) if i != axis)
    try:
        image = images.open(path).convert(CHANNELS[count])
    except images.UnidentifiedImageError:
        raise CommandError(f"{path} is no image that can be read") from None
    size = (width if isinstance(width, int) else image.width, height if isinstance(height, int) else image.height)
    pixels = np.asarray(image if image.size == size else image.resize(size)).reshape(size[1], size[0], count)
    dtype = info.type.dtype
    if dtype.kind not in "iu":
        scaled = pixels / 255
        for name, numbers in (("mean", mean), ("std", std)):
            if numbers is not None and len(numbers) not in (1, count):
                raise CommandError(f"--{name} has {len(numbers)} numbers, and the image {count} channels")
        pixels = (scaled - (mean or [0.0])) / (std or [1.0])
    if axis is None:
        pixels = pixels[..., 0]
    elif axis != 2:
        pixels = np.moveaxis(pixels, 2, axis)
    return pixels.astype(dtype)[(None,) * (len(shape) - len(inner))]
