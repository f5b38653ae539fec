"""Inline dispatch: a short program runs in its caller's thread, with NumPy arrays in and out.

JAX dispatches programs of more than 1000 operations to a thread of XLA's, so that the caller continues meanwhile. A
caller who wants NumPy arrays waits for them, and switching threads takes as long as a short program. So the executable
is loaded a second time, on a CPU client with synchronous dispatch; parameters share their memory with the first.

Calls of an MLP of 784, 128 and 10 with one row, on 2 cores: 54 us before, 16 us after; loading takes 12 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import compat
from ..limits import INLINE_CODE, SHORT
from .program_cache import Store

Synchronous = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def synchronous(
    lowered: Any, hoisted: Sequence[Any], code: Any = None, store: Store | None = None
) -> Synchronous | None:
    """The program bound to its hoisted arguments; None where it is long or cannot be loaded.

    Args:
        lowered: a function of two lists of arrays, lowered or compiled.
        hoisted: the first list, on the CPU that the function was compiled for.
        code: the serialized executable that it was loaded from, if it was.
        store: keeps the executable.
    """
    device = compat.synchronous_device()
    if device is None or compat.has_narrow_arguments(lowered):
        return None
    compiled = lowered
    if hasattr(lowered, "compile"):
        if compat.calls_process(lowered.as_text()):  # into Python, which may wait for this thread
            return None
        kept = None if store is None else store.compiled(lowered)
        compiled, code = (lowered.compile(), code) if kept is None else kept
    if not is_short(compiled) or (code := code or compat.dump_compiled(compiled)) is None or not is_small(code):
        return None
    return bound(compat.load_compiled(code, device), hoisted)


def is_short(compiled: Any) -> bool:
    """Whether a compiled program is short, and can be loaded for calls in their own thread."""
    device = compat.synchronous_device()
    if device is None:
        return False
    cost = compat.cost_analysis(compiled)
    takes_little = max(cost.get("flops", 0), cost.get("bytes accessed", 0)) <= SHORT
    # A program can be loaded on a device of the same number alone.
    return takes_little and compat.devices_of(compiled) == [device.id]


def is_small(code: Any) -> bool:
    """Whether serialized code is loaded soon enough for what that saves."""
    return len(code[0]) <= INLINE_CODE


def bound(loaded: Any, hoisted: Sequence[Any]) -> Synchronous:
    """A program that was loaded on the synchronous CPU, bound to its hoisted arguments."""
    device, program = compat.synchronous_device(), compat.unwrapped(loaded)
    shared = jax.device_put(list(map(np.asarray, hoisted)), device)

    def call(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(map(np.asarray, program(shared, leaves)))

    return call
