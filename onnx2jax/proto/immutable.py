"""Immutable arrays, whose memory cannot be written at all; a read-only view of writable memory is not immutable."""

from __future__ import annotations

import mmap
import sys
from typing import Any, Final

import numpy as np

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
