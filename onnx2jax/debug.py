"""ONNX2JAX_DEBUG, a level: 1 prints nodes as they run, 2 the path each call takes, 3 the program after each pass."""

from __future__ import annotations

import os
import sys

VARIABLE = "ONNX2JAX_DEBUG"


def level() -> int:
    """The level that the environment asks for; 0 when it asks for none."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def emit(text: str) -> None:
    """Print a line, or several, to stderr."""
    print(f"onnx2jax: {text}", file=sys.stderr, flush=True)
