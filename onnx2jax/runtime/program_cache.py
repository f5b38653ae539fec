"""Compiled programs in a folder, for later processes.

A program on a single CPU is found by what its graph computes, and neither traced nor compiled. Others, such as those of
meshes, GPUs and training steps, are found by what they are lowered to: they are traced, but not compiled.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jax
import ml_dtypes
import numpy as np

from .. import compat
from ..proto import atomic
from .cache_folder import SUFFIX, VARIABLE, is_private, is_users, trim
from .cache_folder import folder as named_folder

if TYPE_CHECKING:
    from ..jaxpr.passes.any.hoist_params import SplitProgram

T = TypeVar("T")
DIGEST: Final = 32
"""Bytes of a SHA-256."""


class Entry(NamedTuple):
    """A place for one program: a file, and the digest of the whole key, which the file repeats."""

    path: Path
    key: bytes


@dataclass(frozen=True)
class Kept:
    """The picklable state of an Executable, for another process.

    Attributes:
        results: the pytree of its results, with integers in place of arrays.
        split: its hoisted steps.
        code: the executable as JAX serializes it; None where it is part of another program.
        is_inline: whether calls with NumPy arrays run it in their own thread.
        compiled: the executable as a function, once it is loaded: for such calls where ``is_inline``.
    """

    results: Any
    split: SplitProgram | None
    code: Any
    is_inline: bool = False
    compiled: Any = None

    def loaded(self, as_numpy: bool) -> Kept:
        """The same with ``code``, if it has any, loaded for calls with NumPy arrays or with JAX's."""
        if self.code is None:
            return self
        is_inline = self.is_inline and as_numpy
        devices = [compat.synchronous_device()] if is_inline else []
        return replace(self, is_inline=is_inline, compiled=compat.load_compiled(self.code, *devices))


class Compiled(NamedTuple):
    """A compiled function.

    Attributes:
        function: as ``Lowered.compile`` returns it.
        code: its serialized form; None if JAX cannot serialize it.
    """

    function: Any
    code: Any


class Store:
    """A folder of compiled programs, one per file: the digest of its key, a checksum, and the pickled program.

    The key is all that decides the program: what the graph computes, or what it is lowered to; the types of parameters
    and inputs, the versions of this package, of JAX and NumPy, JAX's configuration, and the processor. The values of
    parameters are no part of it.

    Attributes:
        is_users: the folder is the user's own, which nobody asked for: programs are stored where that changes nothing
            else, and a folder that cannot be written is no reason for a warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_users = is_users(folder)

    def __str__(self) -> str:
        source = f" (from {VARIABLE})" if VARIABLE in os.environ and self.folder == named_folder(True) else ""
        return f"{str(self.folder)!r}{source}"

    @classmethod
    def of(cls, folder: Path | None) -> Store | None:
        """The store of ``convert(cache_dir=)``; None for none."""
        return None if folder is None else cls(folder)

    def path(self, *what: Any) -> Entry | None:
        """The entry for a program of a single CPU with this key; None where this process keeps none.

        Args:
            *what: bytes and texts.
        """
        return self._entry(*what) if _is_one_cpu() else None  # a loaded program runs on the device it was compiled for

    def _entry(self, *what: Any) -> Entry | None:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return None
        if self.is_users and (compat.keeps_programs() or not is_private(self.folder)):
            return None
        digest = hashlib.sha256()
        for part in (_surroundings(), repr(compat.configuration()), compat.process_options(), *what):
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
            digest.update(len(data).to_bytes(8, "little") + data)
        return Entry(self.folder / f"{digest.hexdigest()[:40]}{SUFFIX}", digest.digest())

    def read(self, entry: Entry, *, as_numpy: bool = False) -> Kept | None:
        """The entry's program, loaded for such a call; None where there is none, or none that can be used."""
        return self._read(entry, lambda kept: kept.loaded(as_numpy))

    def compiled(self, lowered: Any) -> Compiled | None:
        """A lowered function compiled, or loaded if a process has compiled an equal one; None if it cannot be kept.

        Its text decides, constants and shardings included, with the devices; not the graph that it came from.
        """
        if compat.has_narrow_arguments(lowered) or (key := compat.lowered_key(lowered)) is None:
            return None
        if (entry := self._entry("lowered", *key)) is None:
            return None
        devices, trees = compat.lowered_devices(lowered), (jax.tree.structure(lowered.args_info), lowered.out_tree)

        def loaded(code: bytes) -> Compiled:
            return Compiled(compat.load_compiled((code, *trees), *devices), (code, *trees))

        if stored := self._read(entry, loaded):
            return stored
        compiled = lowered.compile()
        if (dumped := compat.dump_compiled(compiled)) is not None:
            self.write(entry, dumped[0])
        return Compiled(compiled, dumped)

    def _read(self, entry: Entry, loaded: Callable[[Any], T]) -> T | None:
        """What ``loaded`` makes of the entry's content; None where there is none, or none that can be used."""
        try:
            content = loaded(_verified(entry))
            with suppress(OSError):  # a folder that this user may only read
                os.utime(entry.path)  # the time of its last use
            return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as e:  # a damaged file can raise anything
            text = f"{entry.path.name} in cache_dir cannot be used and is recompiled: {e!r:.200}"
            warnings.warn(text, stacklevel=2)
            return None

    def write(self, entry: Entry, kept: Kept | bytes) -> None:
        """Keep a program; a warning says why where that fails."""
        try:
            data = pickle.dumps(kept)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic.replacing(entry.path, durable=False) as file:  # a damaged one is compiled again
                file.write(entry.key + _checksum(entry.key + data) + data)
            trim(self.folder)
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as e:
            if self.is_users and isinstance(e, OSError):
                return
            warnings.warn(f"no program can be kept in cache_dir {self}: {e}", stacklevel=2)


def load_or_compile(lowered: Any, store: Store | None) -> Any:
    """A lowered function compiled; loaded from a store where that is possible."""
    stored = None if store is None else store.compiled(lowered)
    return lowered.compile() if stored is None else stored.function


def _verified(entry: Entry) -> Any:
    """The program in an entry's file, whose checksum and key are compared before anything is unpickled."""
    content = entry.path.read_bytes()
    key, checksum, data = content[:DIGEST], content[DIGEST : 2 * DIGEST], content[2 * DIGEST :]
    if checksum != _checksum(key + data):
        raise ValueError("it is damaged: its checksum differs")
    if key != entry.key:
        raise ValueError("it holds another program: the file was renamed")
    return pickle.loads(data)


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_one_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1


@functools.cache
def _surroundings() -> str:
    """What compiled programs depend on: versions, the source of this package, the processor, XLA's flags and threads.

    Of each source file the name, size and times: installing another sets the time of change, whatever the others say.
    """
    root = str(Path(__file__).parents[1])
    source = sorted((name.removeprefix(root), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in _sources(root))
    # Ours is that of the source.
    versions = [sys.version, version("jaxlib"), *(module.__version__ for module in (jax, np, ml_dtypes))]
    environment = [os.environ.get(name, "") for name in ("XLA_FLAGS", "NPROC", "LIBTPU_INIT_ARGS")]
    return repr((source, versions, _processor(), environment))


def _sources(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """The Python files in a folder and below; pathlib would take 20 of the 70 ms of a small model's first call."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path, entry.stat()
            elif entry.is_dir():
                yield from _sources(entry.path)


def _processor() -> Sequence[str]:
    """The processor and its instruction sets, which compiled code relies on, and the number of cores it is split for.

    Where the system does not list the instruction sets, the name of the machine stands for them.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = ("flags", "Features", "model name")
    machine = [
        platform.system(),
        platform.machine(),
        platform.processor(),
        "" if lines else platform.node(),
        str(compat.cores()),
    ]
    return [*machine, *sorted({line for line in lines if line.startswith(fields)})]
