"""ONNX2JAX_DEBUG, a level: 1 prints nodes as they run, 2 the path each call takes, 3 the program after each pass."""

from __future__ import annotations

import os
import sys
from typing import Any

VARIABLE = "ONNX2JAX_DEBUG"
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
"""The dict behind os.environ, whose own lookup takes 0.6 us, 1 % of a small model's call and more."""
_KEY: Any = VARIABLE if _ENVIRONMENT is os.environ else os.environ.encodekey(VARIABLE)


def level() -> int:
    """The level that the environment asks for now; 0 when it asks for none. Every call and evaluation reads it."""
    text = _ENVIRONMENT.get(_KEY)
    return int(text) if text and text.isdigit() else 0


def emit(text: str) -> None:
    """Print a line, or several, to stderr."""
    print(f"onnx2jax: {text}", file=sys.stderr, flush=True)
