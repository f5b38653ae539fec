"""Compiled programs in a folder, for the next process: it neither traces nor compiles what it finds there."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from .. import compat
from ..proto import atomic
from .optimize.executable import Kept


class Store:
    """A folder of compiled programs, each in a file whose name says all that it was made from.

    That is: what the graph computes, the types of weights and inputs, the versions of this package, of JAX and NumPy,
    how JAX is configured, and the processor. The values of weights are no part of it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, *what: Any) -> Path | None:
        """Where a program made from this is kept; None where programs of this process are not.

        Args:
            *what: bytes and texts.
        """
        if not _is_one_cpu() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return None  # a program that was read runs on the device that it was compiled for
        digest = hashlib.sha256()
        for part in (_surroundings(), repr(compat.configuration()), *what):
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
            digest.update(len(data).to_bytes(8, "little") + data)
        return self.folder / f"{digest.hexdigest()[:40]}.program"

    def read(self, path: Path) -> Kept | None:
        """The program kept there; None where there is none, or none that can be used."""
        if not path.exists():
            return None
        try:
            kept: Kept = pickle.loads(path.read_bytes())
            return kept.loaded()
        except Exception as e:  # whatever a damaged file comes to
            text = f"{path.name} in cache_dir cannot be used and is made anew: {e!r:.200}"
            warnings.warn(text, stacklevel=2)
            return None

    def write(self, path: Path, kept: Kept) -> None:
        """Keep a program."""
        data = pickle.dumps(kept)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(path) as file:
                file.write(data)
        except OSError as e:
            warnings.warn(f"no program can be kept in cache_dir {str(self.folder)!r}: {e}", stacklevel=2)


def _is_one_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1


@functools.cache
def _surroundings() -> str:
    """What programs depend on beside themselves: versions, the source of this package, the processor, XLA's flags."""
    root = Path(__file__).parents[1]
    files = [(str(p.relative_to(root)), p.stat()) for p in sorted(root.rglob("*.py"))]
    source = [(name, s.st_size, s.st_mtime_ns) for name, s in files]
    versions = [version(name) for name in ("onnx2jax", "jax", "jaxlib", "numpy", "ml_dtypes")]
    return repr((source, versions, _processor(), os.environ.get("XLA_FLAGS", "")))


def _processor() -> Sequence[str]:
    """The processor and what it can do, which compiled code relies on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("flags", "Features", "model name")
    return [platform.machine(), platform.processor(), *sorted({line for line in lines if line.startswith(kinds)})]
