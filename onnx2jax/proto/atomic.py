"""Atomic replacement of files: complete or not at all, whenever the process ends."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

Write = Callable[[Any], object]
"""Writes the content of a file to a binary stream."""


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Any]:
    """A binary file to write, which replaces ``path`` once it is on disk; an error leaves ``path`` unchanged.

    Its folder is created if it does not exist.

    Without ``durable`` nothing waits for the disk, and after a power failure the file may be damaged.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with suppress(FileExistsError):  # then opening says that it is no folder
            path.parent.mkdir(parents=True, exist_ok=True)
        opened = temporary.open("xb+")
    except OSError as e:
        e.filename = str(path)  # the file that the caller knows
        raise
    try:
        with opened as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        _sync(path.parent)


def replace_all(index: Path, data: Mapping[Path, Write], describe: Callable[[Mapping[Path, Path]], bytes]) -> None:
    """Replace a file that refers to data files, such as a model with external data, together with these.

    Whenever the process ends, the index on disk refers to complete data files: the old ones or the new ones. So data
    that replaces a file is first written under a provisional name (see ``is_provisional``), and an index that refers
    to it replaces the old one. Then a copy replaces the old data, and an index that refers to the copy the first index.

    Args:
        index: the file that refers to the others, in the same folder.
        data: data file -> the function that writes it.
        describe: returns the content of the index, given the path where each data file is.
    """
    placed = {
        path: path.with_name(f"{path.name}.{secrets.token_hex(4)}") if os.path.lexists(path) else path for path in data
    }
    with ExitStack() as undo:
        for path, write in data.items():
            with replacing(placed[path]) as file:
                write(file)
            undo.callback(placed[path].unlink)
        with replacing(index) as file:
            file.write(describe(placed))
        undo.pop_all()
    provisional = {path: temporary for path, temporary in placed.items() if temporary != path}
    if not provisional:
        return
    try:
        for path, temporary in provisional.items():
            with temporary.open("rb") as source, replacing(path) as file:
                shutil.copyfileobj(source, file, 2**20)
        with replacing(index) as file:
            file.write(describe({path: path for path in data}))
    except OSError as e:
        names = ", ".join(repr(temporary.name) for temporary in provisional.values())
        warnings.warn(f"{str(index)!r} is written, but its data stays in {names}: {e}", stacklevel=2)
        return
    for temporary in provisional.values():
        temporary.unlink()


def is_provisional(name: str, final: str) -> bool:
    """Whether ``name`` is a provisional name that ``replace_all`` gives to the data file ``final``.

    >>> is_provisional("m.onnx.data.0123abcd", "m.onnx.data")
    True
    """
    return re.fullmatch(re.escape(final) + r"\.[0-9a-f]{8}", name) is not None


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_npz(file: Any, arrays: Mapping[str, Any]) -> None:
    """Write arrays as ``np.savez`` does, but with reproducible bytes and any names (``np.savez`` reserves "file").

    Args:
        file: a path, or a binary file open for writing.
        arrays: name -> array of numbers, booleans or text.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(value), allow_pickle=False)
