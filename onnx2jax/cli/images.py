"""Images from the command line: an input's layout and size, and the numbers that its model takes as pixels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from .. import compat
from ..proto.types import TensorType, ValueInfo
from .parser import Arguments, CommandError, Parser
from .terminal import note

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
