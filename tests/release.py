"""Builds a release and proves it: ``python -m tests.release``, or ``make release``. Uploads nothing.

1. Builds the source distribution, and the wheel from it, twice; both builds have to be equal byte by byte.
2. Checks the metadata, and that links of README.md that stay in the repository lead to files.
3. Installs the wheel in an empty environment on each Python of this machine, and runs README's Python from there.

Needs a Python with the ``test`` extra. The files are left in ``dist/``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Final

from tests.versions import ROOT, pythons

DIST: Final = ROOT / "dist"
PLACEHOLDER: Final = "https://example.org/onnx2jax"
"""The address in pyproject.toml until the repository has one; uploading with it would publish dead links."""
EPOCH: Final = "1767225600"
"""The time stamp of files in archives, 2026-01-01, so that builds are equal."""
EXAMPLES: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINKS: Final = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


class ReleaseError(Exception):
    """The release must not be published."""


def build(folder: Path) -> dict[str, str]:
    """Build source distribution and wheel into a folder; returns their SHA-256 by file name."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def metadata(wheel: Path) -> Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def problems(found: Message) -> Iterator[str]:
    """What is wrong with the metadata."""
    for field in ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type"):
        if not found[field]:
            yield f"the metadata has no {field}"
    if found["Description-Content-Type"] and not found["Description-Content-Type"].startswith("text/markdown"):
        yield "the description is not Markdown"
    if not found.get_all("Project-URL"):
        yield "the metadata has no Project-URL"


def dead_links(page: Path) -> list[str]:
    """Links of a page to files that do not exist."""
    return [link for link in LINKS.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]


def try_readme(name: str, python: str, wheel: Path) -> None:
    """Install the wheel in an empty environment, and run README's Python there.

    Raises:
        ReleaseError: installing or an example fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        example = home / "readme.py"
        example.write_text("\n".join(EXAMPLES.findall((ROOT / "README.md").read_text(encoding="utf-8"))))
        program = str(home / "venv" / "bin" / "python")
        for command in (
            [python, "-m", "venv", "--without-pip", str(home / "venv")],
            [python, "-m", "pip", "--python", program, "install", "--quiet", str(wheel)],
            [program, "-I", str(example)],
        ):
            done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ReleaseError(f"Python {name}: {' '.join(command)}\n{done.stderr}")


def main() -> int:
    """Build and prove; the exit status is 1 where the release must not be published."""
    shutil.rmtree(DIST, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as again:
            first, second = build(DIST), build(Path(again))
        if first != second:
            raise ReleaseError(f"two builds differ: {first} and {second}")
        (wheel,) = DIST.glob("*.whl")
        found = [*problems(metadata(wheel)), *(f"README.md links to {link}" for link in dead_links(ROOT / "README.md"))]
        if found:
            raise ReleaseError("\n".join(found))
        for name, python in pythons().items():
            try_readme(name, python, wheel)
            print(f"Python {name}: README runs from the wheel", flush=True)
    except ReleaseError as e:
        print(e, file=sys.stderr)
        return 1
    for name, digest in first.items():
        print(f"{digest}  dist/{name}")
    if PLACEHOLDER in str(metadata(wheel)):
        print("before uploading, replace the placeholder of project.urls in pyproject.toml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
