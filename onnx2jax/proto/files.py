"""Reads a ModelProto from a path, bytes, an open file, or an onnx.ModelProto.

``skeleton`` reads a large file without the data of its large initializers, which stays in the file. Parsed whole, a
model of 400 MB is in memory three times before a device has it: as the bytes of the file, in the message, and as the
Python bytes of its fields.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from google.protobuf.message import DecodeError

from ..errors import ModelError
from .foreign import HEAD, folder_error, foreign, missing_error
from .mapped import LAZY_BYTES, Detached, File
from .messages import ModelProto, TensorProto

_LIMIT = 2**31 - 1
_WHOLE = "; onnx.helper.make_model(graph) makes a model of a graph"


def path_of(path: str | os.PathLike[str]) -> Path:
    """A path as a user gives it, to read or to write: a leading ``~`` is the user's home, ``~name`` another user's.

    >>> path_of("~/model.onnx") == Path.home() / "model.onnx", path_of("./~").as_posix()
    (True, '~')
    """
    return Path(os.path.expanduser(os.fsdecode(path)))


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

    Others are rejected: reading a FIFO would wait for its writer, and a device may have no end.

    Raises:
        ModelError: it is no regular file, or larger than protobuf allows.
        IsADirectoryError: it is a folder.
        FileNotFoundError: there is none.
    """
    location = path_of(path)
    if os.path.isdir(location):
        raise folder_error(location)
    if not os.path.lexists(location):
        raise missing_error(path)
    descriptor = os.open(location, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModelError(f"{label} is no regular file; read it first: open({str(path)!r}, 'rb').read()")
        if (size := os.fstat(descriptor).st_size) > _LIMIT:
            raise _too_large(size, file.read(HEAD), label)
        return file.read()


def label_of(path: str | os.PathLike[str]) -> tuple[str, Path]:
    """A file's label for messages, and its folder."""
    location = path_of(path)
    return f"file {str(location)!r}", location.parent


def parse(data: bytes, label: str) -> Any:
    """Parse a ModelProto.

    Raises:
        ModelError: the bytes are not a ModelProto.
    """
    if len(data) > _LIMIT:
        raise _too_large(len(data), data[:HEAD], label)
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


LARGE_FILE: Final = 2**22
"""Files of at least this many bytes are read as a skeleton, and stay open."""

# Field numbers: of ModelProto, of GraphProto, and two of TensorProto.
GRAPH, INITIALIZER, RAW_DATA, EXTERNAL_DATA = 7, 5, 9, 13
# Wire types.
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5


def skeleton(path: Path) -> tuple[bytes, Detached] | None:
    """A serialized ModelProto without the data of large initializers, and that data, detached and lazy.

    None if the file is small, or cannot be read in parts. As with external data, it is an error to change the file
    before the data is read.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or not LARGE_FILE <= status.st_size < 2**31:
        return None
    with path.open("rb") as stream:
        file = File(os.dup(stream.fileno()), path.name)
        reader = _Reader(stream, file.mapped())
        try:
            return reader.model(file.size), reader.detached
        except _Unreadable:
            return None


class _Unreadable(Exception):
    """The file cannot be read in parts; protobuf has to parse it."""


class _Reader:
    """Reads a serialized ModelProto from front to back, and skips the data of large initializers."""

    def __init__(self, stream: BinaryIO, memory: np.ndarray) -> None:
        """``memory`` maps the file, for lazy arrays."""
        self.detached = Detached()
        self._stream, self._memory = stream, memory
        self._position = 0

    def model(self, end: int) -> bytes:
        return self._message(end, GRAPH, lambda end: self._message(end, INITIALIZER, self._tensor))

    def _message(self, end: int, inner: int, read: Callable[[int], bytes]) -> bytes:
        """A message up to ``end``, whose fields of number ``inner`` are messages that ``read`` reads."""
        return b"".join(
            _field(inner, read(self._position + size)) if number == inner else head + self._bytes(size)
            for number, head, size in self._fields(end)
        )

    def _tensor(self, end: int) -> bytes:
        rest: list[bytes] = []
        data: list[bytes | np.ndarray] = []
        for number, head, size in self._fields(end):
            if number == EXTERNAL_DATA:
                raise _Unreadable  # data in two places, which the importer reports
            if number == RAW_DATA:
                data.append(self._skip(size) if size >= LAZY_BYTES else self._bytes(size))
            else:
                rest.append(head + self._bytes(size))
        if len(data) > 1:
            raise _Unreadable  # a repeated field, of which the last counts
        tensor = TensorProto()
        for content in data:
            if isinstance(content, bytes):
                tensor.raw_data = content
            else:
                self.detached.add(tensor, content)
        return b"".join(rest) + tensor.SerializeToString()

    def _skip(self, size: int) -> np.ndarray:
        """Skip the next bytes, and return them as a lazy array."""
        start, self._position = self._position, self._position + size
        self._stream.seek(self._position)
        return self._memory[start : self._position]

    def _fields(self, end: int) -> Iterator[tuple[int, bytes, int]]:
        """For each field up to ``end``: its number, the bytes before its content, and the size of its content.

        The caller reads the content next. The number is 0 for fields that are neither bytes nor messages.
        """
        while self._position < end:
            tag, head = self._varint()
            number, kind = tag >> 3, tag & 7
            if kind == VARINT:
                head, size = head + self._varint()[1], 0
            elif kind == LENGTH:
                size, more = self._varint()
                head += more
            elif kind in (EIGHT_BYTES, FOUR_BYTES):
                size = 8 if kind == EIGHT_BYTES else 4
            else:
                raise _Unreadable  # a group, which ONNX does not use
            if self._position + size > end:
                raise _Unreadable  # truncated, which protobuf reports
            yield number if kind == LENGTH else 0, head, size

    def _varint(self) -> tuple[int, bytes]:
        """A number, and its encoded bytes."""
        value, read = 0, b""
        while len(read) < 10:
            byte = self._bytes(1)
            value |= (byte[0] & 0x7F) << 7 * len(read)
            read += byte
            if byte[0] < 0x80:
                return value, read
        raise _Unreadable

    def _bytes(self, size: int) -> bytes:
        content = self._stream.read(size)
        if len(content) < size:
            raise _Unreadable
        self._position += size
        return content


def _field(number: int, content: bytes) -> bytes:
    """A serialized length-delimited field."""
    size, head = len(content), [number << 3 | LENGTH]
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + content
