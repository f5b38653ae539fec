"""Values that stay in their file until they are needed.

A map of a file that somebody shortens ends the process when it is touched (SIGBUS). So values are only ever read from
the open file, and a file that was changed since it was opened is an error; a map stands for those that nobody has asked
for yet. What touches it all the same is code that reads ``Graph.initializers`` past ``load``.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..errors import ExternalDataError
from .immutable import empty, read_only

WORTH_WAITING: Final = 64 * 1024
"""From how many bytes on a tensor is read when it is needed, rather than at once."""

SAMPLE: Final = 1024
"""Bytes in one of the places of a file by which it is told from others."""


class File:
    """A file kept open as long as something of it may be read."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name
        self._lock = threading.Lock()
        status = os.fstat(descriptor)
        self.size, self.written = status.st_size, status.st_mtime_ns

    def __del__(self, close: Any = os.close) -> None:  # while Python ends, os may be gone
        close(self._descriptor)

    def mapped(self) -> np.ndarray:
        """The bytes of the file, not to be touched but by ``load``."""
        memory = _Map(self._descriptor, 0, access=mmap.ACCESS_READ)
        memory.file = self
        return np.frombuffer(memory, np.uint8)

    def read(self, start: int, nbytes: int) -> np.ndarray:
        """Bytes of the file, in memory of their own that JAX need not copy."""
        return self.read_runs([start], nbytes)

    def read_runs(self, starts: Sequence[int], nbytes: int) -> np.ndarray:
        """Runs of so many bytes each, one behind the other."""
        result = empty(len(starts) * nbytes)
        with self._lock, open(self._descriptor, "rb", buffering=0, closefd=False) as file:
            done = 0
            for i, start in enumerate(starts):
                file.seek(start)
                end = (i + 1) * nbytes
                while done < end and (count := file.readinto(result[done:end].data)):
                    done += count
            self._check(complete=done == result.size)
        return read_only(result)

    def sha1(self) -> str:
        """The checksum of the whole file."""
        with self._lock, open(self._descriptor, "rb", buffering=0, closefd=False) as file:
            file.seek(0)
            result = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
            self._check()
        return result

    def _check(self, complete: bool = True) -> None:
        """Refuse a file that is no longer what was opened, by size and time (whose clock ticks in milliseconds)."""
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.written) or not complete:
            raise ExternalDataError(
                f"{self._name!r} was changed after the model was converted: it has {status.st_size} bytes and had "
                f"{self.size}; convert the model again, and do not change its files meanwhile",
                rule="EX-10",
            )


class _Map(mmap.mmap):
    file: File


def load(array: Any, index: tuple[slice, ...] | None = None) -> Any:
    """An array, or bytes, with its values in memory: read now, where it is a view of a map.

    Args:
        array: the array.
        index: a slice of step 1 for each axis: gives the part there, of which nothing else is read.

    Raises:
        ExternalDataError: the file is no longer what it was.
    """
    if (memory := _map_of(array)) is None:
        return array if index is None else array[index]
    start = array.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    starts, shape = _runs(array, index or (slice(None),) * array.ndim)
    nbytes = math.prod(shape) * array.itemsize // max(len(starts), 1)
    return memory.file.read_runs([start + s for s in starts], nbytes).view(array.dtype).reshape(shape)


def _runs(array: np.ndarray, index: tuple[slice, ...]) -> tuple[list[int], list[int]]:
    """Where the runs of bytes begin that make a part of an array, counted from its first, and the shape of the part."""
    bounds = [part.indices(extent)[:2] for part, extent in zip(index, array.shape, strict=True)]
    shape = [end - first for first, end in bounds]
    last = max((i for i, n in enumerate(array.shape) if shape[i] != n), default=0)
    starts = np.zeros(1, np.int64)
    for i, (first, end) in enumerate(bounds[: last + 1]):
        places = np.arange(first, end) if i < last else np.array([first])
        starts = (starts[:, None] + places * array.strides[i]).ravel()
    return starts.tolist(), shape


def sample(data: Any) -> Any:
    """Bytes that are in memory; of those in a file, some from all over them: they tell the weights of one training from
    those of another."""
    if not waits(data):
        return data
    starts = np.linspace(0, max(data.size - SAMPLE, 0), 16).astype(np.int64).tolist()
    return b"".join(load(data, (slice(s, s + SAMPLE),)).tobytes() for s in starts)


def waits(array: Any) -> bool:
    """Whether the values of an array are still in a file."""
    return _map_of(array) is not None


def _map_of(array: Any) -> _Map | None:
    base = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, _Map) else None
