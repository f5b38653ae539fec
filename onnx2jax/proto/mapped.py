"""Arrays that cannot be written, and tensor data outside its message: lazy arrays, and detached bytes.

A lazy array stays in its file until needed. It is a view of a memory map, but only a placeholder: ``load`` reads its
values from the open file and raises if that has changed since. Reading the map itself would end the process (SIGBUS) if
the file was truncated, so every reader of ``Graph.initializers`` has to go through ``load``.

The memory of an immutable array cannot be written at all; a read-only view of writable memory is not immutable.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..errors import ExternalDataError

LAZY_BYTES: Final = 64 * 1024
"""Tensors of at least this many bytes are lazy."""

SAMPLE: Final = 1024
"""Bytes of one sample of a file, for a digest."""


class File:
    """A file that stays open as long as a lazy array refers to it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name
        self._lock = threading.Lock()
        status = os.fstat(descriptor)
        self.size: int = status.st_size
        self.written: int = status.st_mtime_ns

    def __del__(self, close: Any = os.close) -> None:  # at interpreter shutdown the module os may be gone
        close(self._descriptor)

    def mapped(self) -> np.ndarray:
        """The bytes of the file as a lazy array."""
        memory = _Map(self._descriptor, 0, access=mmap.ACCESS_READ)
        memory.file = self
        return np.frombuffer(memory, np.uint8)

    def read_runs(self, starts: Sequence[int], nbytes: int) -> np.ndarray:
        """The runs of ``nbytes`` bytes at each of the offsets, concatenated in memory that JAX uses without a copy."""
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

    @cached_property
    def sha1(self) -> str:
        """The SHA1 checksum of the whole file."""
        with self._lock, open(self._descriptor, "rb", buffering=0, closefd=False) as file:
            file.seek(0)
            result = hashlib.file_digest(file, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()
            self._check()
        return result

    def _check(self, complete: bool = True) -> None:
        """Raise if size or modification time differ from those at opening (times have millisecond resolution)."""
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
    """The array, or bytes, with its values in memory; reads them if it is lazy.

    Args:
        array: an array, or bytes.
        index: a slice of step 1 for each axis; only this part is read and returned.

    Raises:
        ExternalDataError: the file has changed since it was opened.
    """
    if (memory := _map_of(array)) is None:
        return array if index is None else array[index]
    start = array.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    starts, shape = _runs(array, index or (slice(None),) * array.ndim)
    nbytes = math.prod(shape) * array.itemsize // max(len(starts), 1)
    return memory.file.read_runs([start + s for s in starts], nbytes).view(array.dtype).reshape(shape)


def _runs(array: np.ndarray, index: tuple[slice, ...]) -> tuple[list[int], list[int]]:
    """Offsets of the contiguous runs that make up ``array[index]``, and its shape."""
    bounds = [part.indices(extent)[:2] for part, extent in zip(index, array.shape, strict=True)]
    shape = [end - first for first, end in bounds]
    last = max((i for i, n in enumerate(array.shape) if shape[i] != n), default=0)
    starts = np.zeros(1, np.int64)
    for i, (first, end) in enumerate(bounds[: last + 1]):
        indices = np.arange(first, end) if i < last else np.array([first])
        starts = (starts[:, None] + indices * array.strides[i]).ravel()
    return starts.tolist(), shape


def sample(data: Any) -> Any:
    """All of the bytes if they are in memory; samples of them if they are lazy, enough to distinguish checkpoints."""
    if not is_lazy(data):
        return data
    starts = np.linspace(0, max(data.size - SAMPLE, 0), 16).astype(np.int64).tolist()
    return b"".join(load(data, (slice(s, s + SAMPLE),)).tobytes() for s in starts)


def is_lazy(array: Any) -> bool:
    """Whether the values of an array are still in its file."""
    return _map_of(array) is not None


def _map_of(array: Any) -> _Map | None:
    base = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, _Map) else None


class Detached:
    """Detached bytes of tensors, in the layout of raw_data.

    The last entry of the ``external_data`` of such a tensor is an index into them, under a key that no file has.
    """

    def __init__(self, other: Detached | None = None) -> None:
        """Copies the entries of ``other``, so that its tensors are valid here, too."""
        self._data: list[Any] = list(other._data) if other else []
        self._key: str = other._key if other else f"detached {secrets.token_hex(8)}"

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the bytes themselves rather than their place in a file."""
        return vars(self) | {"_data": list(map(load, self._data))}

    def digest(self, *others: bytes) -> str:
        """A checksum of ``sample`` of the bytes, and of the messages to which they belong."""
        result = hashlib.sha256()
        for data in (*(o.replace(self._key.encode(), b"") for o in others), *map(sample, self._data)):
            result.update(data)
        return result.hexdigest()

    def add(self, tensor: Any, data: Any) -> None:
        """Set the detached bytes of a tensor without data; an array may be lazy."""
        tensor.external_data.add(key=self._key, value=str(len(self._data)))
        self._data.append(data)

    def get(self, tensor: Any) -> Any:
        """The detached bytes of a tensor, as they were added; None if it has none."""
        entries = tensor.external_data
        return self._data[int(entries[-1].value)] if entries and entries[-1].key == self._key else None

    def take(self, tensor: Any) -> Any:
        """Like ``get``, and removes them from the tensor."""
        data = self.get(tensor)
        if data is not None:
            del tensor.external_data[-1]
        return data

    def attach(self, tensor: Any) -> None:
        """Move the detached bytes of a tensor into its message."""
        if (data := self.take(tensor)) is not None:
            tensor.raw_data = bytes(load(data))


ALIGNMENT: Final = 64
"""Alignment in bytes of memory that JAX uses without a copy."""


class _Owned(np.ndarray):
    """Memory without writable references outside this package."""


def is_immutable(buffer: Any) -> bool:
    """Whether the memory of an array or buffer is immutable, judged by the object that owns it.

    Immutable owners are ``bytes``, a ``jax.Array``, a map opened with ``mmap.ACCESS_READ``, and memory from ``owned``.
    A caller's array is not, even with ``flags.writeable`` off, because other views of it may be writable.

    >>> is_immutable(np.frombuffer(b"abcd", np.uint8))
    True
    >>> is_immutable(memoryview(bytearray(4)).toreadonly())
    False
    """
    owner = buffer
    while isinstance(owner, np.ndarray | memoryview) and not isinstance(owner, _Owned):
        owner = owner.base if isinstance(owner, np.ndarray) and owner.base is not None else getattr(owner, "obj", None)
    if isinstance(owner, mmap.mmap):
        return memoryview(owner).readonly
    jax_array = getattr(sys.modules.get("jax"), "Array", _Owned)  # this package works without jax
    return isinstance(owner, (bytes, _Owned, jax_array))


def owned(array: np.ndarray) -> np.ndarray:
    """An immutable array with these values: the array itself if it is immutable, else a copy.

    >>> array = np.zeros(2)
    >>> frozen = owned(array[:])
    >>> array[:] = 1
    >>> frozen.tolist()
    [0.0, 0.0]
    """
    if is_immutable(array) and not array.flags.writeable:
        return array
    copy = _Owned(array.shape, array.dtype) if array.dtype.hasobject else empty(array.nbytes).view(array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return read_only(copy)


def empty(nbytes: int) -> np.ndarray:
    """Aligned memory of ``nbytes`` bytes, to be filled and then made immutable by ``read_only``."""
    memory = _Owned(nbytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + nbytes]


def read_only(memory: np.ndarray) -> np.ndarray:
    """The memory as an ordinary array that cannot be made writable, because its owner is read-only, too."""
    array = memory.view(np.ndarray)
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner.flags.writeable = False
        owner = owner.base
    return array
