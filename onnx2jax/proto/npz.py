"""Writes npz files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np


def write(file: Any, arrays: Mapping[str, Any]) -> None:
    """Write arrays as ``np.savez`` does, but with reproducible bytes and any names (``np.savez`` reserves "file").

    Args:
        file: a path, or a binary file open for writing.
        arrays: name -> array of numbers, booleans or text.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(value), allow_pickle=False)
