"""Compiled programs in a folder, for later processes: a program found there is neither traced nor compiled."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import ml_dtypes
import numpy as np

from .. import compat
from ..proto import atomic
from .cache_folder import VARIABLE
from .executable import Kept

DIGEST: Final = 32
"""Bytes of a SHA-256."""


class Entry(NamedTuple):
    """A place for one program: a file, and the digest of the whole key, which the file repeats."""

    path: Path
    key: bytes


class Store:
    """A folder of compiled programs, one per file: the digest of its key, a checksum, and the pickled program.

    The key is all that decides the program: what the graph computes, the types of parameters and inputs, the versions
    of this package, of JAX and NumPy, JAX's configuration, and the processor. The values of parameters are no part of
    it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __str__(self) -> str:
        source = f" (from {VARIABLE})" if os.environ.get(VARIABLE) == str(self.folder) else ""
        return f"{str(self.folder)!r}{source}"

    def path(self, *what: Any) -> Entry | None:
        """The entry for a program with this key; None where this process keeps no programs.

        Args:
            *what: bytes and texts.
        """
        if not _is_one_cpu() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return None  # a loaded program runs on the device that it was compiled for
        digest = hashlib.sha256()
        for part in (_surroundings(), repr(compat.configuration()), *what):
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
            digest.update(len(data).to_bytes(8, "little") + data)
        return Entry(self.folder / f"{digest.hexdigest()[:40]}.program", digest.digest())

    def read(self, entry: Entry, *, as_numpy: bool = False) -> Kept | None:
        """The entry's program, loaded for such a call; None where there is none, or none that can be used."""
        try:
            return _verified(entry).loaded(as_numpy)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as e:  # a damaged file can raise anything
            text = f"{entry.path.name} in cache_dir cannot be used and is recompiled: {e!r:.200}"
            warnings.warn(text, stacklevel=2)
            return None

    def write(self, entry: Entry, kept: Kept) -> None:
        """Keep a program; a warning says why where that fails."""
        try:
            data = pickle.dumps(kept)
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(entry.path) as file:
                file.write(entry.key + _checksum(entry.key + data) + data)
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as e:
            warnings.warn(f"no program can be kept in cache_dir {self}: {e}", stacklevel=2)


def _verified(entry: Entry) -> Kept:
    """The program in an entry's file, whose checksum and key are compared before anything is unpickled."""
    content = entry.path.read_bytes()
    key, checksum, data = content[:DIGEST], content[DIGEST : 2 * DIGEST], content[2 * DIGEST :]
    if checksum != _checksum(key + data):
        raise ValueError("it is damaged: its checksum differs")
    if key != entry.key:
        raise ValueError("it holds another program: the file was renamed")
    kept: Kept = pickle.loads(data)
    return kept


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_one_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1


@functools.cache
def _surroundings() -> str:
    """What compiled programs depend on: versions, the source of this package, the processor, XLA's flags."""
    root = str(Path(__file__).parents[1])
    source = sorted((name.removeprefix(root), s.st_size, s.st_mtime_ns) for name, s in _sources(root))
    # Ours is that of the source.
    versions = [version("jaxlib"), *(module.__version__ for module in (jax, np, ml_dtypes))]
    return repr((source, versions, _processor(), os.environ.get("XLA_FLAGS", "")))


def _sources(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """The Python files in a folder and below; pathlib would take 20 of the 70 ms of a small model's first call."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path, entry.stat()
            elif entry.is_dir():
                yield from _sources(entry.path)


def _processor() -> Sequence[str]:
    """The processor and its instruction sets, which compiled code relies on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = ("flags", "Features", "model name")
    return [platform.machine(), platform.processor(), *sorted({line for line in lines if line.startswith(fields)})]
