"""Memory that is no longer used, given back to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any


def give_back() -> None:
    """Give the system what has been freed: glibc keeps it where something in use lies behind, 150 MB after compiling.

    It takes some tens of milliseconds, and does nothing beside other libraries of C.
    """
    if trim := _trim():
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
