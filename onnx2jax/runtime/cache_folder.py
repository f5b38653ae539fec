"""The folder of compiled programs: which it is, who may write it, and its size."""

from __future__ import annotations

import os
import stat
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..proto.files import path_of

VARIABLE: Final = "ONNX2JAX_CACHE_DIR"
"""The environment variable with the folder of models whose ``cache_dir`` is left out; empty for none."""
SUFFIX: Final = ".program"
MAX_BYTES: Final = 2 << 30
"""Bytes of a folder beyond which the least recently used programs are deleted."""
STALE: Final = 24 * 3600
"""Seconds after which a file that a killed process left unfinished is deleted."""


def folder(cache_dir: str | os.PathLike[str] | bool | None) -> Path | None:
    """The folder that ``convert(cache_dir=)`` means; None for none.

    True is that of the environment variable, and the user's own where that is not set.
    """
    if cache_dir is True:
        named = os.environ.get(VARIABLE)
        cache_dir = users_folder() if named is None else named or None
    return None if cache_dir is None or cache_dir is False else path_of(cache_dir)


def users_folder(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path | None:
    """The folder ``onnx2jax`` in the user's folder of caches, as the platform defines it; None without a home.

    >>> users_folder({"XDG_CACHE_HOME": "/var/caches"}, "linux").as_posix()
    '/var/caches/onnx2jax'
    """
    try:
        if platform == "win32":
            base = Path(environment.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(environment.get("XDG_CACHE_HOME", ""))
            base = base if base.is_absolute() else Path.home() / ".cache"  # the rule: ignore relative paths
    except RuntimeError:  # the user has no home
        return None
    return base / "onnx2jax"


def is_users(folder: Path) -> bool:
    """Whether a folder is the one for models without ``cache_dir`` and without the environment variable."""
    return VARIABLE not in os.environ and folder == users_folder()


def is_private(folder: Path) -> bool:
    """Whether only this user can write the folder, which is created if it does not exist.

    A folder that others can write, or that is another user's, is refused with a warning: its programs are executed.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False  # a home that cannot be written, as in some containers
    if not hasattr(os, "geteuid"):
        return True  # Windows: a user's folders are private
    if status.st_uid != os.geteuid():
        problem = f"belongs to another user ({status.st_uid})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return True
    if folder not in _refused:
        _refused.add(folder)
        warnings.warn(
            f"{str(folder)!r} {problem}, so programs are neither loaded from it nor stored in it: chmod 700 it, name "
            f"another folder by {VARIABLE}, or use none: {VARIABLE}=",
            stacklevel=2,
        )
    return False


_refused: set[Path] = set()
"""Folders of which a warning has been issued."""


class Contents(NamedTuple):
    """The programs of a folder.

    Attributes:
        entries: time of last use, bytes and path of each, the least recently used first.
        unfinished: files of writes that did not end.
    """

    entries: list[tuple[float, int, str]]
    unfinished: list[tuple[float, str]]

    @property
    def bytes(self) -> int:
        """The size of all programs."""
        return sum(size for _, size, _ in self.entries)


def contents(folder: Path) -> Contents:
    """The programs of a folder; none if it does not exist."""
    entries, unfinished = [], []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):  # another process deleted it
                if file.name.endswith(SUFFIX):
                    status = file.stat()
                    entries.append((status.st_mtime, status.st_size, file.path))
                elif file.name.startswith(".") and file.name.endswith(".tmp"):
                    unfinished.append((file.stat().st_mtime, file.path))
    return Contents(sorted(entries), unfinished)


def trim(folder: Path, limit: int = MAX_BYTES) -> None:
    """Delete the least recently used programs beyond the limit, and what killed processes left unfinished."""
    before = contents(folder)
    excess = before.bytes - limit
    doomed = [path for used, path in before.unfinished if used < time.time() - STALE]
    for _, size, path in before.entries:
        if excess <= 0:
            break
        doomed.append(path)
        excess -= size
    for path in doomed:
        with suppress(OSError):
            Path(path).unlink()


def clear(folder: Path) -> Contents:
    """Delete all programs of a folder, and return what there was."""
    cleared = contents(folder)
    for path in (*(path for _, _, path in cleared.entries), *(path for _, path in cleared.unfinished)):
        Path(path).unlink(missing_ok=True)
    return cleared
