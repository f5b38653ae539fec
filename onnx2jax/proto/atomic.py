"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file to write that takes its place at the end; when something fails, what was there stays."""
    with replacements(path) as new, beside(path, new) as file:
        yield file


@contextmanager
def replacements(path: Path) -> Iterator[dict[Path, Path]]:
    """Takes where each file goes -> where ``beside`` writes it, and puts all into their places at the end."""
    new: dict[Path, Path] = {}
    try:
        yield new
        _replace(path, new)
    finally:
        for temporary in new.values():
            temporary.unlink(missing_ok=True)


@contextmanager
def beside(final: Path, new: dict[Path, Path]) -> Iterator[Any]:
    """A file to write, in the folder where it is to replace another, safe on the disk at the end."""
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))
    new[final] = temporary = _temporary(final)
    try:
        opened = temporary.open("xb+")
    except OSError as e:
        e.filename = str(final)  # nobody asked for the other
        raise
    with opened as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.copymode(final, temporary)


def _temporary(final: Path) -> Path:
    return final.with_name(f".{secrets.token_hex(8)}.tmp")


def _replace(path: Path, new: Mapping[Path, Path]) -> None:
    """Put the new files into their places, or leave all as it was.

    A model alone is exchanged in one step. With a data file, the old data leaves first and the new comes last: who
    looks meanwhile, or after a power cut, finds a model without data, never a model with another one's.
    """
    data = [final for final in new if final != path]
    old = {final: _temporary(final) for final in [*data, *([path] if data else [])] if os.path.lexists(final)}
    existed = os.path.lexists(path)
    try:
        for final in data:
            if final in old:
                os.replace(final, old[final])
        if path in old:
            shutil.copy2(path, old[path], follow_symlinks=False)
        for final in (path, *data):
            os.replace(new[final], final)
    except BaseException:
        for final, saved in reversed(old.items()):
            if os.path.lexists(saved):
                os.replace(saved, final)
        if not existed:
            path.unlink(missing_ok=True)
        raise
    for saved in old.values():
        saved.unlink()
    if os.name != "nt":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
