"""Reads a ModelProto from a path, bytes, an open file, or an onnx.ModelProto."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ..errors import ModelError
from .formats import folder_error, foreign, missing_error
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
        ModelError: it is no regular file, or larger than protobuf allows.
        IsADirectoryError: it is a folder.
        FileNotFoundError: there is none.
    """
    if os.path.isdir(path):
        raise folder_error(path)
    if not os.path.lexists(path):
        raise missing_error(path)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModelError(f"{label} is no regular file; read it first: convert(data)")
        if (size := os.fstat(descriptor).st_size) > _LIMIT:
            raise _too_large(size, file.read(512), label)
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
        raise _too_large(len(data), data[:512], label)
    try:
        model = ModelProto.FromString(data)
    except DecodeError:
        raise ModelError(f"{label} is not an ONNX model: {foreign(data, label) or _broken(data)}") from None
    if not model.HasField("graph") or not model.HasField("ir_version"):
        missing, rule = ("graph", "MV-04") if model.HasField("ir_version") else ("ir_version", "MV-01")
        guess = foreign(data, label)
        raise ModelError(f"{label} is not an ONNX model: {guess or f'it has no {missing}'}", rule=() if guess else rule)
    return model


def _too_large(size: int, head: bytes, label: str) -> ModelError:
    if guess := foreign(head, label):
        return ModelError(f"{label} is not an ONNX model: {guess}")
    return ModelError(f"{label} has {size} bytes, protobuf's limit is 2 GiB; save it with external data")


def _broken(data: bytes) -> str:
    if data[:1] == b"\x08":  # the tag of ir_version, the first field of a model
        return f"it starts like one, but its {len(data):,} bytes do not parse to the end; was the copy complete?"
    return "its bytes are not a protobuf message"
