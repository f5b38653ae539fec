"""Paths that users give, and errors about those that lead to no model, which say how to get one."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

from ..errors import did_you_mean

TENSORFLOW: Final = "python -m tf2onnx.convert --{} {} --output model.onnx"
TRANSFORMERS: Final = "optimum-cli export onnx --model {} folder"
CORE_ML: Final = "a Core ML model, which has no way back to ONNX; export the original model"


def path_of(given: str | os.PathLike[str]) -> Path:
    """A path as a user gives it, to read or to write: a leading ``~`` is the user's home, ``~name`` another user's.

    >>> path_of("~/model.onnx") == Path.home() / "model.onnx", path_of("./~").as_posix()
    (True, '~')
    """
    return Path(os.path.expanduser(os.fsdecode(given)))


def folder_error(folder: Path) -> IsADirectoryError:
    """The error about a folder in place of a file, which says what is in it."""
    models = [str(p.relative_to(folder)) for pattern in ("*.onnx", "*/*.onnx") for p in sorted(folder.glob(pattern))]
    if not models:
        return IsADirectoryError(f"{str(folder)!r} is {without_model(folder)}")
    listed = f"{', '.join(models[:5])}{', ...' * (len(models) > 5)}"
    return IsADirectoryError(
        f"{str(folder)!r} is a folder, which has {listed}: convert({str(folder / models[0])!r}), or "
        "onnx2jax.decoder(folder) for a decoder's"
    )


def without_model(folder: Path) -> str:
    """What a folder without an .onnx file is, and what to do."""
    if (folder / "saved_model.pb").is_file():
        return f"a TensorFlow SavedModel; convert it first: {TENSORFLOW.format('saved-model', folder)}"
    if folder.suffix == ".mlpackage":
        return CORE_ML
    if any(p for pattern in ("*.safetensors", "pytorch_model*.bin") for p in folder.glob(pattern)):
        return f"a folder of weights without a graph; export it: {TRANSFORMERS.format(folder)}"
    return "a folder, which has no .onnx file; pass the path of the file"


def missing_error(path: str | os.PathLike[str]) -> FileNotFoundError:
    """The error about a path that leads to no file, which says what it may be instead."""
    text = os.path.expanduser(os.fsdecode(path))
    return FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}{_meant(text)}", text)


def _meant(text: str) -> str:
    """What a missing path may be, as the end of a message; empty if unknown.

    >>> _meant("https://example.org/model.onnx")
    ': it is a URL, and nothing is downloaded; download the file, and pass its path'
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", text):
        if text.startswith("file:"):
            return f": it is a URL; pass the path, {re.sub('^file:/*', '/', text)!r}"
        return ": it is a URL, and nothing is downloaded; download the file, and pass its path"
    missing = text
    while (folder := os.path.dirname(missing)) not in ("", missing) and not os.path.lexists(folder):
        missing = folder
    files = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    if missing != text:
        files = [n for n in files if os.path.isdir(os.path.join(folder, n))]
    if near := did_you_mean(os.path.basename(missing), files, 0.8):  # .onnx alone makes names alike
        return near if missing == text else f": there is no folder {missing!r}{near}"
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", text) and not os.path.splitext(text)[1].startswith((".onnx", ".ort")):
        return (
            f"; nothing is downloaded: fetch a model of Hugging Face's hub by hf download {text} --local-dir folder, "
            f"or export it by {TRANSFORMERS.format(text)}, and pass the file or folder"
        )
    return ""
