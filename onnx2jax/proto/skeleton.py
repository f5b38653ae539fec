"""Reads a large file without the data of its large initializers, which stays in the file.

Parsed completely, a model of 400 MB is in memory three times before a device has it: as the bytes of the file, in the
message, and as the Python bytes of its fields.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from .mapped import LAZY_BYTES, Detached, File
from .messages import TensorProto

LARGE_FILE: Final = 2**22
"""Files of at least this many bytes are read as a skeleton, and stay open."""

# Field numbers: of ModelProto, of GraphProto, and two of TensorProto.
GRAPH, INITIALIZER, RAW_DATA, EXTERNAL_DATA = 7, 5, 9, 13
# Wire types.
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5


def skeleton(path: str | os.PathLike[str]) -> tuple[bytes, Detached] | None:
    """A serialized ModelProto without the data of large initializers, and that data, detached and lazy.

    None if the file is small, or cannot be read in parts. As with external data, it is an error to change the file
    before the data is read.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or not LARGE_FILE <= status.st_size < 2**31:
        return None
    with Path(path).open("rb") as stream:
        file = File(os.dup(stream.fileno()), Path(path).name)
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
        return b"".join(
            _field(GRAPH, self._graph(self._position + size)) if number == GRAPH else head + self._bytes(size)
            for number, head, size in self._fields(end)
        )

    def _graph(self, end: int) -> bytes:
        return b"".join(
            _field(INITIALIZER, self._tensor(self._position + size))
            if number == INITIALIZER
            else head + self._bytes(size)
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
        for found in data:
            if isinstance(found, bytes):
                tensor.raw_data = found
            else:
                self.detached.add(tensor, found)
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
        found = self._stream.read(size)
        if len(found) < size:
            raise _Unreadable
        self._position += size
        return found


def _field(number: int, content: bytes) -> bytes:
    """A serialized length-delimited field."""
    size, head = len(content), [number << 3 | LENGTH]
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + content
