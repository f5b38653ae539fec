"""What the runtime decides by numbers, each with the measurement behind it (two cores, batch 1, medians)."""

from __future__ import annotations

from typing import Final

BY_VALUE: Final = 32
"""Inputs up to this many elements and rank 1 (shapes, axes, counts, scales) can be part of the compile key."""
MOST_VALUES: Final = 8
"""A Loop or If decided by an input that comes in more values than this runs on the host, where they cost nothing."""
MOST_SHAPES: Final = 8
"""A program inside a loop that meets more shapes than this runs on the host: its state grows with every trip."""
PATIENCE: Final = 64
"""Trips of a loop without heavy nodes that run on the host before the others are compiled."""
LARGEST_CONSTANT: Final = 4096
"""Known arrays with more elements than this are passed from program to program rather than compiled in."""
LARGEST_IN_SIGNATURE: Final = 4096
"""Bytes of a known operand up to which calls of a function are told apart by it; beyond, the body is traced anew."""
NESTED_JITS: Final = 16
"""Functions deeper than this are traced in place: a nested jit takes a dozen frames of Python's stack."""
LARGEST_ARRAY: Final = 2**43
"""Bytes of an array that no machine has; beyond, the model is at fault, and the node can be named."""
