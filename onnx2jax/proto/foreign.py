"""Says what a file is that is no ONNX model, and a path that leads to none, and how to get a model from it."""

from __future__ import annotations

import errno
import io
import os
import re
import zipfile
from pathlib import Path
from typing import Final

from ..errors import did_you_mean

HEAD: Final = 512
"""Bytes at the beginning of a file that tell its format."""
DECODERS: Final = ("model.onnx", "decoder_with_past_model.onnx", "decoder_model_merged.onnx")
"""Exporters' names of a decoder's step file in a folder; the first that is found is used."""
_COMPRESSED: Final = "compressed by {}; decompress it, or pass {}.open(path).read()"
"""By the format, and Python's module for it."""
_TORCH: Final = "load it in PyTorch, and export it: torch.onnx.export(model, inputs, 'model.onnx')"
_PICKLE: Final = f"a pickle, as torch.save and scikit-learn write; {_TORCH}, or skl2onnx.to_onnx(model, inputs)"
_KERAS: Final = "load it in Keras, and export it: model.export('model.onnx', format='onnx')"
_TENSORFLOW: Final = "python -m tf2onnx.convert --{} {} --output model.onnx"
_TRANSFORMERS: Final = "optimum-cli export onnx --model {} folder"
_MAGIC: Final = (
    (rb"\x1f\x8b", _COMPRESSED.format("gzip", "gzip")),
    (rb"BZh", _COMPRESSED.format("bzip2", "bz2")),
    (rb"\xfd7zXZ\0", _COMPRESSED.format("xz", "lzma")),
    (rb"version https://git-lfs", "a Git LFS pointer; fetch the real file with 'git lfs pull'"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd; decompress it first: zstd -d"),
    (rb".{257}ustar", "a tar archive; unpack it, and pass the .onnx file inside"),
    (rb"7z\xbc\xaf", "a 7z archive; unpack it, and pass the .onnx file inside"),
    (rb"\x93NUMPY", "a NumPy array (.npy)"),
    (rb".{4}ORTM", "in onnxruntime's own format; convert the .onnx file it was made from"),
    (rb"GGUF", "a GGUF file of llama.cpp; export the original checkpoint: " + _TRANSFORMERS.format("NAME")),
    (rb".{4}TFL3", "a TensorFlow Lite model; convert it first: " + _TENSORFLOW.format("tflite", "FILE")),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes; " + _KERAS),
    (rb"\x80[\x02-\x05]", _PICKLE),
    (rb"(?i)\s*<(!doctype|html)", "an HTML page, perhaps of a failed download"),
    (rb"\s*(<\?xml.*?>\s*)?<net\b", "a model of OpenVINO, which has no way back to ONNX; export the original model"),
)
"""A pattern of the first bytes, and what the file is."""
_CORE_ML: Final = "a Core ML model, which has no way back to ONNX; export the original model"
_TENSORRT: Final = "a TensorRT engine, for one kind of GPU alone; convert the .onnx file it was made from"
_SUFFIXES: Final = {
    **dict.fromkeys((".engine", ".plan", ".trt"), _TENSORRT),
    ".mlmodel": _CORE_ML,
    ".pdmodel": "a Paddle model; convert it first: paddle2onnx --model_filename FILE --save_file model.onnx",
    ".pb": "perhaps a TensorFlow graph; convert it first: " + _TENSORFLOW.format("saved-model", "FOLDER"),
}
_WEIGHTS: Final = "weights without a graph; export the model they belong to: "


def foreign(data: bytes, label: str = "") -> str:
    """The probable format of data that is no ONNX model, and what to do; empty if unknown.

    >>> foreign(b"GGUF\\x03")[:20]
    'it is a GGUF file of'
    """
    head = data[:HEAD]
    if not data:
        return "it is empty"
    if b"ONNXOPSET" in head[:64]:
        return "it is an operator set document"
    if head.startswith(b"PK\x03\x04"):
        return f"it is {_archive(data)}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < max(len(data), 1 << 27):
        return f"it is a safetensors file, {_WEIGHTS}{_TRANSFORMERS.format('NAME')}"
    for pattern, what in _MAGIC:
        if re.match(pattern, head, re.DOTALL):
            return f"it is {what}"
    if text := _beginning(head):
        return f"it is text, not protobuf: {text!r}; is it the answer of a failed download?"
    suffix = Path(label.rstrip("'")).suffix.lower()  # a label is: file 'path'
    return f"it is {_SUFFIXES[suffix]}" if suffix in _SUFFIXES else ""


def _beginning(head: bytes) -> str:
    """The first line of a text; empty if the bytes are no text.

    >>> _beginning(b"Not Found"), _beginning(b"\\x08\\x07")
    ('Not Found', '')
    """
    text = head.decode("utf-8", "replace")
    is_text = "\ufffd" not in text[:-1] and all(c.isprintable() or c.isspace() for c in text)
    return text.strip().partition("\n")[0][:60] if is_text else ""


def _archive(data: bytes) -> str:
    """What a zip archive is."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except zipfile.BadZipFile:  # or its beginning alone
        return f"a zip archive, of PyTorch perhaps; {_TORCH}"
    models = [n for n in names if n.endswith(".onnx")]
    if models:
        return f"a zip archive with {models[0]}; unpack it, or pass zipfile.ZipFile(path).open({models[0]!r})"
    if any(n.endswith((".weights.h5", "keras_metadata.pb")) for n in names):
        return f"a Keras model; {_KERAS}"
    if any(n.endswith(("data.pkl", "archive_format")) for n in names):
        return f"a PyTorch file; {_TORCH}"
    if names and all(n.endswith(".npy") for n in names):
        return "a NumPy archive (.npz)"
    return "a zip archive without an .onnx file"


def folder_error(folder: Path) -> IsADirectoryError:
    """The error about a folder in place of a file, which says what is in it."""
    models = [str(p.relative_to(folder)) for pattern in ("*.onnx", "*/*.onnx") for p in sorted(folder.glob(pattern))]
    if not models:
        return IsADirectoryError(f"{str(folder)!r} is {without_model(folder)}")
    listed = f"{', '.join(models[:5])}{', ...' * (len(models) > 5)}"
    one = "choose one: " if len(models) > 1 else ""
    decoder = next((folder / m for m in models if Path(m).name in DECODERS), None)
    text = f", or onnx2jax.decoder({str(decoder.parent)!r}) to generate text" if decoder else ""
    return IsADirectoryError(
        f"{str(folder)!r} is a folder, which has {listed}: {one}convert({str(decoder or folder / models[0])!r}){text}"
    )


def without_model(folder: Path) -> str:
    """What a folder without an .onnx file is, and what to do."""
    if (folder / "saved_model.pb").is_file():
        return f"a TensorFlow SavedModel; convert it first: {_TENSORFLOW.format('saved-model', folder)}"
    if folder.suffix == ".mlpackage":
        return _CORE_ML
    if any(p for pattern in ("*.safetensors", "pytorch_model*.bin") for p in folder.glob(pattern)):
        return f"a folder of weights without a graph; export it: {_TRANSFORMERS.format(folder)}"
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
    if text == "-":
        return ": standard input is not read; write it to a file, and pass its path"
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
            f"or export it by {_TRANSFORMERS.format(text)}, and pass the file or folder"
        )
    return ""
