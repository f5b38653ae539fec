"""Reads a ModelProto from a path, bytes, an open file, or an onnx.ModelProto."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ..errors import ModelError
from .messages import ModelProto

_LIMIT = 2**31 - 1
_WHOLE = "; onnx.helper.make_model(graph) makes a model of a graph"


def read_model(source: Any) -> Any:
    """Parse a model: a path, the bytes of a file, an open binary file, or a ModelProto of the onnx package.

    Raises:
        ModelError: the source is not an ONNX model, or no regular file.
        FileNotFoundError: the file does not exist.
        TypeError: ``source`` is none of these.
    """
    data, label, _ = read_bytes(source)
    return parse(data, label)


def read_bytes(source: Any) -> tuple[bytes, str, Path | None]:
    """The bytes of a source, its label for messages, and its folder if it has one."""
    folder: Path | None = None
    if isinstance(source, str | os.PathLike):
        label, folder = label_of(source)
        data = read_regular(source, label)
    elif isinstance(source, bytes | bytearray | memoryview):
        label, data = "the bytes given", bytes(source)
    elif hasattr(source, "SerializeToString"):
        kind = type(source).__name__
        if kind.endswith("Proto") and kind not in ("ModelProto", "OperatorSetProto"):
            raise TypeError(f"a model is a path, bytes, a binary file or an onnx.ModelProto, not onnx.{kind}{_WHOLE}")
        label, data = f"the {kind} given", source.SerializeToString()
    elif hasattr(source, "read"):
        label, data = "the file given", source.read()
        name = getattr(source, "name", None)
        folder = Path(name).parent if isinstance(name, str) else None
        if not isinstance(data, bytes):
            raise TypeError("the file given is open in text mode; open it with mode 'rb'")
    else:
        raise TypeError(
            "a model is a path, bytes, a binary file or an onnx.ModelProto, "
            f"not {type(source).__name__} ({source!r:.80})"
        )
    return data, label, folder


def read_regular(path: str | os.PathLike[str], label: str) -> bytes:
    """The bytes of a regular file.

    Others are refused: reading a FIFO would wait for its writer, and a device may have no end.

    Raises:
        ModelError: it is no regular file.
        IsADirectoryError: it is a folder.
    """
    if os.path.isdir(path):
        models = sorted(p.name for p in Path(path).glob("*.onnx"))
        held = f"has {', '.join(models[:5])}{', ...' * (len(models) > 5)}" if models else "has no .onnx file"
        fix = f"convert({os.path.join(path, models[0])!r}), or " if models else ""
        raise IsADirectoryError(
            f"{str(path)!r} is a folder, which {held}: {fix}onnx2jax.decoder(folder) for a decoder's"
        )
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModelError(f"{label} is no regular file; read it first: convert(data)")
        return file.read()


def label_of(path: str | os.PathLike[str]) -> tuple[str, Path]:
    """A file's label for messages, and its folder."""
    return f"file {str(Path(path))!r}", Path(path).parent


def parse(data: bytes, label: str) -> Any:
    """Parse a ModelProto.

    Raises:
        ModelError: the bytes are not a ModelProto.
    """
    if len(data) > _LIMIT:
        raise ModelError(f"{label} has {len(data)} bytes, protobuf's limit is 2 GiB; save it with external data")
    try:
        model = ModelProto.FromString(data)
    except DecodeError:
        raise ModelError(f"{label} is not an ONNX model: {_guess(data) or _broken(data)}") from None
    if not model.HasField("graph") or not model.HasField("ir_version"):
        missing, rule = ("graph", "MV-04") if model.HasField("ir_version") else ("ir_version", "MV-01")
        guess = _guess(data)
        raise ModelError(f"{label} is not an ONNX model: {guess or f'it has no {missing}'}", rule=() if guess else rule)
    return model


def _broken(data: bytes) -> str:
    if data[:1] == b"\x08":  # the tag of ir_version, the first field of a model
        return f"it starts like one, but its {len(data):,} bytes do not parse to the end; was the copy complete?"
    return "its bytes are not a protobuf message"


def _guess(data: bytes) -> str:
    """The probable format of a file that is not a model; empty if unknown."""
    head = data[:64]
    if not data:
        return "it is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; fetch the real file with 'git lfs pull'"
    if b"ONNXOPSET" in head:
        return "it is an operator set document"
    if head.startswith(b"PK\x03\x04"):
        return "it is a zip archive (a PyTorch checkpoint, for instance); export it to ONNX first"
    if head.startswith(b"\x93NUMPY"):
        return "it is a NumPy array (.npy)"
    if head[4:8] == b"ORTM":
        return "it is in onnxruntime's own format; convert the .onnx file it was made from"
    if head.lstrip().startswith((b"<", b"{")):
        return "it is text, not protobuf"
    return ""
