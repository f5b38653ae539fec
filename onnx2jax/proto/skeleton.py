"""A large file without the bytes of its large initializers: protobuf parses the rest, those stay in the file.

Parsed whole, a model of 400 MB lies in memory three times before a device has it: as the bytes of the file, in the
message, and as the bytes that Python is given of that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from .apart import Apart
from .mapped import WORTH_WAITING, File
from .messages import TensorProto

LARGE_FILE: Final = 2**22
"""Bytes from which on a file is read in parts, and kept open."""

# Fields: of ModelProto, of GraphProto, and two of TensorProto.
GRAPH, INITIALIZER, RAW_DATA, EXTERNAL_DATA = 7, 5, 9, 13
# Wire types of protobuf.
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5


def skeleton(path: str | os.PathLike[str]) -> tuple[bytes, Apart] | None:
    """The bytes of a ModelProto, and those of tensors that lie apart from it, from a file.

    None where the file is small, or has to be parsed whole to be understood. As with external data, values are read
    when they are needed, and a file that was changed meanwhile is an error.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or not LARGE_FILE <= status.st_size < 2**31:
        return None
    with Path(path).open("rb") as stream:
        file = File(os.dup(stream.fileno()), Path(path).name)
        parts = _Parts(stream, file.mapped())
        try:
            return parts.model(file.size), parts.apart
        except _Whole:
            return None


class _Whole(Exception):
    """The file has to be parsed whole."""


class _Parts:
    """A file as it is read from the front: what protobuf is to parse is put together, large bytes are left behind."""

    def __init__(self, stream: BinaryIO, memory: np.ndarray) -> None:
        """``memory`` maps the file, for what is left behind."""
        self.apart = Apart()
        self._stream, self._memory = stream, memory
        self._place = 0

    def model(self, end: int) -> bytes:
        return b"".join(
            _field(GRAPH, self._graph(self._place + size)) if number == GRAPH else head + self._bytes(size)
            for number, head, size in self._fields(end)
        )

    def _graph(self, end: int) -> bytes:
        return b"".join(
            _field(INITIALIZER, self._tensor(self._place + size)) if number == INITIALIZER else head + self._bytes(size)
            for number, head, size in self._fields(end)
        )

    def _tensor(self, end: int) -> bytes:
        rest: list[bytes] = []
        data: list[bytes | np.ndarray] = []
        for number, head, size in self._fields(end):
            if number == EXTERNAL_DATA:
                raise _Whole  # data in two places is for others to refuse
            if number == RAW_DATA:
                data.append(self._left(size) if size >= WORTH_WAITING else self._bytes(size))
            else:
                rest.append(head + self._bytes(size))
        if len(data) > 1:
            raise _Whole  # of a field that comes twice the last counts
        tensor = TensorProto()
        for found in data:
            if isinstance(found, bytes):
                tensor.raw_data = found
            else:
                self.apart.add(tensor, found)
        return b"".join(rest) + tensor.SerializeToString()

    def _left(self, size: int) -> np.ndarray:
        """The next bytes, which stay in the file."""
        start, self._place = self._place, self._place + size
        self._stream.seek(self._place)
        return self._memory[start : self._place]

    def _fields(self, end: int) -> Iterator[tuple[int, bytes, int]]:
        """For each field up to ``end`` its number, the bytes before its content, and the size of that, to be read next.

        The number is 0 for fields of other types than bytes and messages: nobody here asks for those.
        """
        while self._place < end:
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
                raise _Whole  # groups, which ONNX has none of
            if self._place + size > end:
                raise _Whole  # broken, as protobuf will say
            yield number if kind == LENGTH else 0, head, size

    def _varint(self) -> tuple[int, bytes]:
        """A number, and the bytes that it is written in."""
        value, read = 0, b""
        while len(read) < 10:
            byte = self._bytes(1)
            value |= (byte[0] & 0x7F) << 7 * len(read)
            read += byte
            if byte[0] < 0x80:
                return value, read
        raise _Whole

    def _bytes(self, size: int) -> bytes:
        found = self._stream.read(size)
        if len(found) < size:
            raise _Whole
        self._place += size
        return found


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes as protobuf writes it."""
    size, head = len(content), [number << 3 | LENGTH]
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + content
