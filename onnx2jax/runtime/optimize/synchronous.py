"""A program that runs in the thread of its caller: NumPy arrays in and out.

JAX hands a program of more than 1000 operations to a thread of XLA's, so that the caller goes on meanwhile. One who
wants NumPy arrays waits instead, and short programs take no longer than being handed over. So what was compiled is
loaded once more, on a CPU without such a thread; the weights lie there in the same memory.

Calls of an MLP of 784, 128 and 10 with one row, on 2 cores: 54 us before, 16 us after; loading takes 12 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ... import compat
from ..thresholds import SHORT

Synchronous = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def synchronous(lowered: Any, handed: Sequence[Any], code: Any = None) -> Synchronous | None:
    """The program with its first arguments, as a function of the others; None where it is long or cannot be loaded.

    Args:
        lowered: what ``jax.jit(...).lower`` gives for two lists of arrays, or a compiled function.
        handed: the first list, on the CPU that it was compiled for.
        code: what it was loaded from, if it was.
    """
    device = compat.synchronous_device()
    if device is None:
        return None
    is_new = hasattr(lowered, "compile")
    compiled = lowered.compile() if is_new else lowered
    cost = compiled.cost_analysis() or {}
    if max(cost.get("flops", 0), cost.get("bytes accessed", 0)) > SHORT:
        return None
    text = lowered.as_text() if is_new else ""
    if "callback" in text or "onednn" in text:  # into Python, which may wait for this thread; not to be written
        return None
    if compat.devices_of(compiled) != [device.id]:  # a program can be loaded on a device of the same number alone
        return None
    code = code or compat.dump_compiled(compiled)
    if code is None:
        return None
    program = compat.load_compiled(code, device)
    shared = [jax.device_put(np.asarray(v), device) for v in handed]

    def call(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(map(np.asarray, program(shared, leaves)))

    return call
