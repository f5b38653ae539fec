"""Faults that can be planted in the package, as replacements of text, and copies of a tree to plant them in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
FILES: Final = ("planted.toml", "reverted.toml")
LEFT_OUT: Final = "tests/planted"
"""No part of a copy: it would find that its own fault no longer applies."""
SHARED: Final = ("bin", "include", "lib", "lib64", "share", "pyvenv.cfg")
"""Entries of ``.venv`` that a copy has as links; caches and records are its own."""


@dataclass(frozen=True)
class Fault:
    """A fault: texts that occur once in a file, and the wrong ones in their place.

    Attributes:
        name: unique.
        file: the source file, relative to the tree.
        kind: such as "wrong axis"; "revert" if an old fault comes back.
        what: what goes wrong for a user.
        fixes: the subject of the commit that fixed it; empty for planted faults.
        changes: pairs of the right text and the wrong one.
    """

    name: str
    file: str
    kind: str
    what: str
    fixes: str
    changes: tuple[tuple[str, str], ...]

    @property
    def room(self) -> str:
        """The package: ``ops``; for modules of the face, ``face``."""
        first = Path(self.file).parts[1].removesuffix(".py")
        rooms = {"errors": "ground", "compat": "ground", "session": "face", "backend": "face", "cli": "face"}
        return rooms.get(first, first)

    def text(self, tree: Path) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: it does not apply to the tree.
        """
        path = tree / self.file
        if not path.is_file():
            raise ValueError(f"there is no {self.file}")
        text = path.read_text(encoding="utf-8")
        for old, new in self.changes:
            if (times := text.count(old)) != 1:
                raise ValueError(f"{times} times in {self.file}, not once: {old!r:.100}")
            text = text.replace(old, new)
        compile(text, self.file, "exec")  # a SyntaxError is a ValueError of ours
        return text

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """The tree has the fault inside; its time of change tells Python to compile the file again."""
        path = tree / self.file
        wrong, right, status = self.text(tree), path.read_bytes(), path.stat()
        path.write_text(wrong, encoding="utf-8")
        try:
            yield
        finally:
            path.write_bytes(right)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def load(folder: Path = HERE) -> list[Fault]:
    """All faults, in the order of the files.

    >>> load()[0].file.startswith("onnx2jax/")
    True
    """
    found = []
    for row in (row for name in FILES for row in tomllib.loads((folder / name).read_text(encoding="utf-8"))["fault"]):
        texts = [[v] if isinstance(v, str) else v for v in (row.pop("old"), row.pop("new"))]
        found.append(Fault(changes=tuple(zip(*texts, strict=True)), **{"kind": "revert", "fixes": "", **row}))
    return found


def problems(faults: list[Fault], tree: Path) -> dict[str, str]:
    """Faults that do not apply to a tree, each with the reason; and names that two faults have."""
    found = {}
    seen = set[str]()
    for fault in faults:
        if fault.name in seen:
            found[fault.name] = "two faults have this name"
        seen.add(fault.name)
        try:
            fault.text(tree)
        except (ValueError, SyntaxError) as error:
            found[fault.name] = str(error)
    return found


@contextmanager
def copied(tree: Path) -> Iterator[Path]:
    """A temporary copy of a tree: tracked and new files without LEFT_OUT, and links to its Python environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=tree, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "tree"
        for name in filter(None, dict.fromkeys(names)):
            source, target = tree / name, copy / name
            if name.startswith(LEFT_OUT) or not (source.exists() or source.is_symlink()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        (copy / ".venv").mkdir()
        for name in SHARED:
            if (source := tree / ".venv" / name).exists():
                (copy / ".venv" / name).symlink_to(source)
        _check_imports(copy)
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """The environment in which a copy is tested: processes that tests start import the copy, too."""
    own = {
        "PYTHONPATH": str(copy),
        "PYTHONPYCACHEPREFIX": str(copy / ".venv" / ".pycache"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".venv" / ".hypothesis"),
    }
    return {**os.environ, **own}


def _check_imports(copy: Path) -> None:
    """Raise unless the copy's package is imported, from any folder."""
    script = "import onnx2jax; print(onnx2jax.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=copy.parent, env=environment(copy), capture_output=True, text=True
    )
    if not done.stdout.startswith(f"{copy}/"):
        raise RuntimeError(f"{copy} is not what is imported, but {done.stdout}{done.stderr}")
