"""Copies that XLA reads in place, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

ALIGNMENT: Final = 64
"""Bytes: XLA:CPU reads an array in place whose first element lies at a multiple of them, and copies any other."""
LARGE: Final = 1 << 24
"""Bytes from which a second copy costs more than aligning the first. A call with 40 MB: 47 ms unaligned, 16 aligned."""


def copied(array: np.ndarray) -> np.ndarray:
    """A copy of an array, of which XLA:CPU makes no second one."""
    if array.nbytes < LARGE or array.dtype.hasobject:
        return array.copy()
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, memory, -memory.ctypes.data % ALIGNMENT)
    np.copyto(copy, array)
    return copy


def trim_heap() -> None:
    """Return freed heap pages to the system: after compiling, glibc keeps up to 150 MB below blocks in use.

    Takes tens of milliseconds; does nothing with other C libraries.
    """
    if trim := _trim():
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
