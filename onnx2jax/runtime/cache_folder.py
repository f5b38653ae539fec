"""The folder of compiled programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "ONNX2JAX_CACHE_DIR"
"""The environment variable with the folder of models whose ``cache_dir`` is left out."""


def folder(cache_dir: str | os.PathLike[str] | bool | None) -> Path | None:
    """The folder that ``convert(cache_dir=)`` means: True is that of the environment variable, if it is set."""
    if cache_dir is True:
        cache_dir = os.environ.get(VARIABLE) or None
    return None if cache_dir is None or cache_dir is False else Path(cache_dir)
