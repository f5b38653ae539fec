"""Arrays by name in one file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np


def write(file: Any, arrays: Mapping[str, Any]) -> None:
    """What ``np.savez`` writes, the same bytes each time; but that takes names as keywords, and one may be "file".

    Args:
        file: a path, or a file that is open to write bytes.
        arrays: names to arrays, of numbers, booleans or text.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(value), allow_pickle=False)
