"""Inputs from the command line: array files, test data, images, texts, or random numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np

from .. import compat
from ..errors import InputShapeError, InputTypeError, ModelError, OperatorError, did_you_mean
from ..generation.files import tokenizer_beside
from ..model.calls.dims import named_dims, variables
from ..model.reports.sample_inputs import sample_extents, sample_inputs
from ..model.reports.samples import data_sets, read_value, read_values
from ..model.reports.summary import larger_sizes
from ..progress import stage
from ..proto.files import path_of
from ..proto.types import TensorType, ValueInfo
from .parser import Arguments, CommandError, Parser, pair, whole
from .terminal import flags, note

IMAGES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
CHANNELS: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Number of channels -> Pillow's mode."""
RANGES: Final = {
    "NominalRange_0_255": (0.0, 255.0),
    "Normalized_0_1": (0.0, 1.0),
    "Normalized_1_1": (-1.0, 1.0),
    "NominalRange_16_235": (16.0, 235.0),
}
"""Image.NominalPixelRange of a model's metadata -> the numbers for black and white."""
FLAGS: Final = ("pixels", "bgr", "mean", "std")


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
    parser.add_argument(
        "--seed",
        type=whole,
        default=0,
        help="of random numbers for inputs without a value: normal floats, integers 0 or 1; attention masks are ones, "
        "a decoder's positions and lengths agree with its caches (default: %(default)s)",
    )


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
    """The feeds, with samples for missing inputs; dimension variables keep the extents of given inputs."""
    extents = say_extents(model, feeds)
    try:
        return sample_inputs(model, feeds, seed, extents)
    except InputTypeError as e:
        absent = [v.name for v in model.inputs if v.name not in feeds]
        options = flags("--input", dict.fromkeys(absent[:3], "FILE.npy"))
        raise CommandError(f"{e}; pass arrays with {options}") from None


def say_extents(model: Any, feeds: Mapping[str, Any]) -> dict[str, int]:
    """The extents of dimension variables of inputs that are not given; names them, and the flags that choose others."""
    extents = sample_extents(model, feeds)
    given = {d for v in named_dims(model.inputs) if v.name in feeds for d in v.shape or ()}
    free = [d for d in variables(v for v in named_dims(model.inputs) if v.name not in feeds) if d not in given]
    if free:
        ones = ", ".join(d for d in free if d not in extents)
        inferred = ", ".join(f"{d}={extents[d]}" for d in free if d in extents)
        extents_of = {"taken as 1": ones, "inferred": inferred}
        said = "; ".join(f"{how}: {names}" for how, names in extents_of.items() if names)
        note(f"{said}; other sizes: {flags('--dim', dict.fromkeys(free, 'SIZE'))}")
    return extents


@contextmanager
def sized(model: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """If a call fails on extents of 1 of inputs without values, name flags with which it succeeds."""
    try:
        yield
    except (OperatorError, InputShapeError) as e:
        if "bytes of memory" not in str(e):  # of which larger extents need more
            with stage("trying larger extents"):
                sizes = larger_sizes(model, values, sample_extents(model, values), {})
            if sizes:
                e.add_note(f"extents of 1 may be too small: {flags('--dim', sizes)}")
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


def add_images(parser: Parser) -> None:
    """Add the options that ``image`` reads."""
    parser.add_argument(
        "--pixels",
        type=_range,
        metavar="LOW,HIGH",
        help="for images: the numbers for black and white, such as 0,255 or =-1,1 (default: those of the model's "
        "metadata, else 0,1)",
    )
    parser.add_switch("--bgr", "for images: channels in the order blue, green, red")
    for name, what in (("mean", "subtracted from"), ("std", "by which are divided")):
        parser.add_argument(
            f"--{name}", type=_numbers, metavar="A,B,C", help=f"for images: {what} these pixels, by channel"
        )


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.5,0.5,0.5") from None


def _range(text: str) -> list[float]:
    numbers = _numbers(text)
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers such as 0,255")
    return numbers


def image(info: ValueInfo, path: Path, arguments: Arguments, metadata: Mapping[str, str]) -> np.ndarray:
    """An image in the input's declared layout and size: [1, c, h, w], [1, h, w, c], or without the batch axis."""
    images = compat.optional("PIL.Image", "image")
    shape = info.shape or ()
    if not isinstance(info.type, TensorType) or len(shape) not in (2, 3, 4):
        raise CommandError(f"input {info} takes no image: it needs 2 to 4 axes")
    is_plane = len(shape) == 2
    inner = (*shape, 1) if is_plane else shape[-3:]
    places = [2] if is_plane else [i for i, d in enumerate(inner) if d in CHANNELS]
    if not places:
        raise CommandError(f"input {info} declares no axis of 1, 3 or 4 channels; pass the image as .npy")
    if {0, 2} <= {*places}:
        raise CommandError(f"input {info} may be channels first or last: {path} is ambiguous; pass the image as .npy")
    axis = 0 if 0 in places else places[-1]
    count = int(inner[axis] or 1)
    height, width = (d for i, d in enumerate(inner) if i != axis)
    try:
        picture = images.open(path).convert(CHANNELS[count])
    except images.UnidentifiedImageError:
        raise CommandError(f"{path} is not a readable image") from None
    size = tuple(d if isinstance(d, int) else n for d, n in zip((width, height), picture.size, strict=True))
    pixels = np.asarray(picture if picture.size == size else picture.resize(size)).reshape(size[1], size[0], count)
    pixels, scale = _as_numbers(pixels, info.type.dtype, arguments, metadata)
    layout = "height, width" if is_plane else "channels first" if axis == 0 else "channels last"
    note(
        f"{info.name}: {path.name}, {picture.width} x {picture.height}, as {size[0]} x {size[1]} pixels of {count} "
        f"channel{'s' * (count > 1)} ({layout}), {scale}"
    )
    pixels = np.moveaxis(pixels, 2, axis).astype(info.type.dtype)
    return pixels[..., 0] if is_plane else pixels[(None,) * (len(shape) - 3)]


def _as_numbers(
    pixels: np.ndarray, dtype: np.dtype, arguments: Arguments, metadata: Mapping[str, str]
) -> tuple[np.ndarray, str]:
    """Bytes [h, w, c] in RGB as the numbers of a model's pixels, and what they are in words."""
    count, words = pixels.shape[2], ""
    if count > 1 and (arguments.bgr or metadata.get("Image.BitmapPixelFormat", "").startswith("Bgr")):
        pixels, words = pixels[..., [2, 1, 0, *range(3, count)]], ", blue first"
    if dtype.kind in "iu":
        if scaling := [flag for flag in image_options(arguments) if flag != "--bgr"]:
            raise CommandError(f"{scaling[0]} is for inputs of floats; the pixels of {dtype} are 0 to 255")
        return pixels, f"0 to 255{words}"
    low, high = arguments.pixels or RANGES.get(metadata.get("Image.NominalPixelRange", ""), (0.0, 1.0))
    for name, numbers in (("mean", arguments.mean), ("std", arguments.std)):
        if numbers is not None and len(numbers) not in (1, count):
            raise CommandError(f"--{name} has {len(numbers)} numbers, and the image {count} channels")
    normalised = ", normalised by --mean and --std" if arguments.mean or arguments.std else ""
    scaled = low + pixels / 255 * (high - low)
    scaled = (scaled - (arguments.mean or [0.0])) / (arguments.std or [1.0])
    return scaled, f"scaled to {low:g} to {high:g}{words}{normalised}"


def image_options(arguments: Arguments) -> list[str]:
    """The options for images that the command line has."""
    return [f"--{n}" for n in FLAGS if getattr(arguments, n) not in (None, False)]
