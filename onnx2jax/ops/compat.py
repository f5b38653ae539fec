"""Every use of a JAX interface that differs between releases."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax


def enable_x64() -> AbstractContextManager[Any]:
    """A scope in which 64-bit types exist; the process-wide setting stays as it is."""
    return jax.enable_x64(True)
