"""XLA's emitters of fusions: the older ones, which tests/conftest.py selects because they compile faster, have faults.

They turn casts that round to zero into NaN where a type has no negative zero (8-bit FNUZ), and end the process where
they pad an array of a type of fewer than 8 bits. Tests of such types compile with the newer ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import numpy as np

from onnx2jax.jaxpr import pipeline

_OLDER: Final = "--xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
NEWER: Final = {"xla_cpu_use_fusion_emitters": True} if _OLDER else {}
"""Compiler options."""


def needs_newer(value: Any) -> bool:
    """Whether a value is an array of a floating type of 8 bits, or of a type of fewer."""
    return isinstance(value, np.ndarray) and value.dtype.itemsize == 1 and value.dtype.kind == "V"


@contextmanager
def newer(wanted: bool = True) -> Iterator[None]:
    """A scope in which models compile with NEWER, where that is wanted."""
    usual = pipeline.compiler_options
    options = NEWER if wanted else {}
    with mock.patch.object(pipeline, "compiler_options", lambda *args: {**(usual(*args) or {}), **options} or None):
        yield
