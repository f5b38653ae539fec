"""Thresholds, each with the measurement behind it: ``python benchmarks/thresholds.py``.

The figures are medians on two Intel cores. A program of 20 light nodes compiles in 31 ms, and its nodes take 0.25 ms
one after the other on the host, so compiling pays after some 130 runs: the first four thresholds follow from that.
"""

from __future__ import annotations

import os
from typing import Final


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 2**43


MACHINE_MEMORY: Final = _machine_memory()
"""Bytes of memory of this machine; 8 TiB where the system does not say."""

BY_VALUE: Final = 32
"""Elements of an input of rank 1 or less (shapes, axes, counts, scales) up to which calls may specialise on its value.
Larger ones are data, which hardly repeat, and 31 ms for each would never pay."""
MOST_VALUES: Final = 8
"""Values of an input on which a Loop or If specialises before it runs on the host: 8 take a quarter second."""
MOST_SHAPES: Final = 8
"""Shapes for which a program inside a loop is compiled before it runs on the host: its state grows with every trip."""
PATIENCE: Final = 64
"""Trips of a loop without heavy nodes that run on the host before the others are compiled: 64 trips of 20 nodes take
16 ms, half of what compiling takes, and most loops end before."""
MOST_FUSED: Final = 800
"""Light nodes in a row in one program: XLA fuses them into one kernel, for which it takes time and memory that grow
with the square of their number (1000 additions 2.4 s, 500 0.7 s), and fails beyond 2000."""
MOST_COMPILED: Final = 2500
"""Nodes in one program: 5000 mixed ones (products, softmax, reductions, elementwise) take 28 s of processor time in one
program, 13 in two, 9 in four (AMD EPYC with AVX-512, jax 0.10). Each program more costs its dispatch, 20 us a call."""
LARGEST_CONSTANT: Final = 4096
"""Known arrays with more elements than this are passed from program to program rather than compiled in. Up to 32 768
compile in the time that an argument takes (13 to 15 ms); a million in 56 ms against 19."""
LARGEST_IN_SIGNATURE: Final = 4096
"""Bytes of a known operand up to which its value is part of a function's signature, in 1.6 us; 65 536 would take 16 us
for each call in the graph. Beyond, the body is traced anew."""
NESTED_JITS: Final = 16
"""Functions deeper than this are traced in place: a nested jit takes a dozen of the 1000 frames of Python's stack."""
LARGEST_ARRAY: Final = MACHINE_MEMORY
"""Bytes of an array on the host: beyond them the node can be named, and NumPy would fill them for hours."""
LARGEST_TRACED: Final = 16 * MACHINE_MEMORY
"""Bytes of an array in a program: XLA never materialises some that are larger than the memory, as it fuses them into a
reduction. On a mesh each process has a part."""
MOST_GROWTH: Final = 8
"""Bytes of hoisted values per byte of the parameters they depend on, at most: biases broadcast to whole images would
take 38 MB in place of 3.6 for MobileNetV2. int4 weights as float32 take 8 times their bytes."""
SMALL_GROWTH: Final = 65_536
"""Bytes of hoisted values to which that limit does not apply."""
SHORT: Final = 100_000_000
"""FLOPs, or bytes read and written, up to which a program runs in the thread of a caller who waits for NumPy arrays
(1 ms): that saves 40 us a call; loading the program for it takes 12 ms and more."""
SMALL_PROGRAM: Final = 14
"""Microseconds of NumPy calls up to which a program runs in NumPy, for a caller who wants NumPy arrays: the dispatch
of a compiled program takes as long."""
AN_ARRAY: Final = 0.4
"""Microseconds of dispatch for each array."""
MOST_CANCELLED: Final = 2.0**12
"""By which a sum may exceed what is left of it, and the weights: of (y + c) - c, which rounds y, nothing is left."""
