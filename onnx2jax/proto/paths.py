"""Paths that users give."""

from __future__ import annotations

import os
from pathlib import Path


def path_of(path: str | os.PathLike[str]) -> Path:
    """A path as a user gives it, to read or to write: a leading ``~`` is the user's home, ``~name`` another user's.

    >>> path_of("~/model.onnx") == Path.home() / "model.onnx", path_of("./~").as_posix()
    (True, '~')
    """
    return Path(os.path.expanduser(os.fsdecode(path)))
