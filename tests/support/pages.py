"""Runs the code blocks of Markdown pages in order, in one namespace, and compares their output with the page."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onnx2jax.cli import _parser

from .helpers import ROOT

OWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINKED = {"changelog.md", "contributing.md"}
"""Symbolic links to files of the repository's root."""
SITE = sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in LINKED)
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?^```(?P<kind>\S*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
PRINTS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block: ``python``, ``sh`` with commands, or ``text`` with the output of the Python before it."""

    kind: str
    body: str
    line: int
    reason: str | None
    """The reason not to run it, from a comment before it: ``<!-- not run: the reason -->``."""


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    if 2 * len(found) != len(re.findall(r"^[ \t]*```", text, re.MULTILINE)):
        raise AssertionError(f"{page}: a fence is open, or stands indented, where nothing runs it")
    for m in found:
        yield Block(m["kind"], m["body"], text[: m.start("body")].count("\n"), m["reason"])


def run(page: Path) -> dict[str, Any]:
    """Run the blocks of a page; returns the namespace of its Python."""
    names: dict[str, Any] = {"__name__": "example"}
    printed = ""
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.reason:
            continue
        if block.kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * block.line + block.body, str(page), "exec"), names)
            printed = out.getvalue()
        elif block.kind == "text":
            if not doctest.OutputChecker().check_output(block.body, printed, PRINTS):
                raise AssertionError(f"{where} says\n{block.body}\nand the code before it prints\n{printed}")
        elif block.kind == "sh":
            for line in block.body.splitlines():
                check_command(line, where)
        else:
            raise AssertionError(f"{where}: a block is python, text or sh, not {block.kind!r}")
    return names


def check_command(line: str, where: str) -> None:
    """Check a command line against this package's parser, the Makefile, pyproject.toml, or a module."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
        del words[0]
    match words:
        case [] | ["cd" | "git", *_] | ["python3", "-m", "venv", _] | [".", "env/bin/activate"]:
            return
        case ["onnx2jax", *arguments] | ["python", "-m", "onnx2jax", *arguments]:
            _parser().parse_args(arguments)
        case ["make", *targets]:
            there = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            _check(where, {t for t in targets if "=" not in t} <= {*there}, line)
        case ["pip" | ".venv/bin/pip", "install", *names] | ["python", "-m", "pip", "install", *names]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            asked = {e for n in names if "[" in n for e in n[n.index("[") + 1 : n.index("]")].split(",")}
            _check(where, asked <= extras.keys(), line)
        case ["python", "-m", module, *_]:
            own = (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
            _check(where, own or module in ("http.server", "pip", "pytest", "uvicorn"), line)
        case [".venv/bin/pre-commit", "install"]:
            return
        case _:
            _check(where, False, line)


def _check(where: str, holds: bool, line: str) -> None:
    if not holds:
        raise AssertionError(f"{where}: nothing here takes the command {line!r}")
