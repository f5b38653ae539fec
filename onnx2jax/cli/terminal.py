"""Shared by commands: what they print, times, and advice of errors in words of the command line."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from textwrap import indent
from typing import Any, Final, NamedTuple

from .. import progress
from ..model.reports.table import table
from ..proto.types import ValueInfo
from .parser import Arguments


class Table(NamedTuple):
    """A table of a command's result; rows may be computed when it is printed."""

    title: str
    headers: Sequence[str]
    rows: Iterable[Sequence[str]]

    def print(self) -> None:
        """Print it: with rich on a terminal, if installed; elsewhere plain columns, one line per row."""
        rows = list(self.rows)
        with suppress(ImportError):
            if sys.stdout.isatty():
                from rich.console import Console
                from rich.markup import escape
                from rich.table import Column
                from rich.table import Table as Grid

                grid = Grid(*(Column(h, overflow="fold") for h in self.headers), header_style="bold")
                for row in rows:
                    grid.add_row(*map(escape, row))
                console = Console()
                console.print(escape(self.title), style="italic")
                console.print(grid)
                return
        print(f"\n{self.title}")
        print(indent(table([self.headers, *rows], width=sys.maxsize), "  "))


def print_result(arguments: Arguments, facts: Any, *parts: Table | object) -> None:
    """Print a command's result: the facts with ``--json``, else the parts, or without parts the facts themselves.

    Facts have ``to_json``, or types of JSON.
    """
    if arguments.json:
        print(facts.to_json() if hasattr(facts, "to_json") else json.dumps(facts, indent=2))
        return
    for part in parts or [facts]:
        if isinstance(part, Table):
            part.print()
        else:
            print(part)


_FLAGS: Final = {
    r"verify\(against='(\w+)'\)": r"--against \1",
    r"(?:convert\(\.\.\., external_data_dir='folder'\)|(?<=ass )external_data_dir)": "--external-data-dir FOLDER",
    r"export\((?:\.\.\., )?platforms=\['?(.*?)'?\]\)": r"--platforms \1",
    r"export\(\.\.\., weights='inside'\)": "--weights inside",
    r"format='jax' keeps": "--format jax keeps",
    r"convert\(\.\.\., dtype='(\w+)'\)": r"--dtype \1",
    r"convert\(\.\.\., static=\{'(\w+)': value\}\)": r"--static \1=VALUE",
    r"convert\(\.\.\., rebatch=True\)": "--rebatch",
    r"convert\(\.\.\., rebatch=\{'input name': axis\}\)": "--batch-axis NAME=AXIS",
    r"convert\(\.\.\., rebatch=\{'input': axis, ('.*?'): axis\}\)": r"--batch-axis INPUT=AXIS --batch-axis \1=AXIS",
    r"convert\(\.\.\., rebatch=\{('.*?'): axis, \.\.\.\}\)": r"--batch-axis \1=AXIS",
    r"to_source\(folder, overwrite=True\)": "--overwrite",
    r"(convert\(\.\.\., )?follow_links=True(?(1)\))": "--follow-links",
    r"(convert\(\.\.\., )?allow_newer_opset=True(?(1)\))": "--allow-newer-opset",
    r"convert\(('.*?')\)": r"pass \1",
    r"onnx2jax\.decoder\(('.*?')\) to generate text": r"\1 to onnx2jax generate",
    r"read it first: open\(('.*?'), 'rb'\)\.read\(\)": r"copy it first: cat \1 > model.onnx",
    r", or pass (gzip|bz2|lzma|zipfile)\..*": "",
    r"temperature 0 takes": "--temperature 0 takes",
}
"""Advice in Python, as a pattern -> the same as flags."""


def flags(option: str, values: Mapping[str, object]) -> str:
    """Words of the command line that give an option a value for each name, quoted for a shell.

    >>> flags("--dim", {"n": 2, "past + n": 3})
    "--dim n=2 --dim 'past + n=3'"
    """
    return " ".join(f"{option} {shlex.quote(f'{name}={value}')}" for name, value in values.items())


def with_flags(message: str, options: Container[str] | None = None) -> str:
    """A message whose advice in Python is given as flags, where a command has them among its options.

    >>> with_flags("Try model.summary(dims={'batch': 64}), or verify(against='reference')")
    'Try --dim batch=64, or --against reference'
    >>> with_flags("export(..., format='stablehlo', dims={'n': 1, 'm': 1}) or export(..., platforms=['tpu'])")
    '--dim n=1 --dim m=1 or --platforms tpu'
    >>> with_flags("fix it: convert(..., static={'s': value})", ["--dim"])
    "fix it: convert(..., static={'s': value})"
    >>> with_flags("for other batch sizes: convert(..., rebatch=True)", ["--dim"])
    'for other batch sizes: onnx2jax run ... --rebatch'
    >>> with_flags("a folder: convert('a/model.onnx'), or onnx2jax.decoder('a') to generate text")
    "a folder: pass 'a/model.onnx', or 'a' to onnx2jax generate"
    """

    def sizes(advice: re.Match[str]) -> str:
        return flags("--dim", ast.literal_eval(advice[1]))

    message = re.sub(r"(?:model\.summary|export)\((?:\.\.\., format='stablehlo', )?dims=(\{.*?\})\)", sizes, message)
    for python, words in _FLAGS.items():
        if options is None or not words.startswith("--") or words.split()[0] in options:
            message = re.sub(python, words, message)
        elif words.startswith(("--rebatch", "--batch-axis")):
            message = re.sub(python, f"onnx2jax run ... {words}", message)
    return message


def with_files(message: str, files: Iterable[str]) -> str:
    """A message whose advice to convert an input is a command that converts its file, one of ``--input``.

    >>> with_files("Convert it: x.astype('float32')", ["x=a.npy"])[:24]
    'Convert it: python -c "i'
    """

    def command(advice: re.Match[str]) -> str:
        name, dtype = advice.groups()
        for path in (f.removeprefix(f"{name}=") for f in files if f.startswith(f"{name}=") or f.endswith(".npz")):
            old = f"np.load({path!r})"
            save, new = "save", f"{old}.astype({dtype!r})"
            if path.endswith(".npz"):
                save, new = "savez", f"**{{**{old}, {name!r}: {old}[{name!r}].astype({dtype!r})}}"
            return f'Convert it: python -c "import ml_dtypes, numpy as np; np.{save}({path!r}, {new})"'
        return advice[0]

    return re.sub(r"Convert it: (.+?)\.astype\('(\w+)'\)", command, message)


def note(text: str) -> None:
    """Print a remark on standard error."""
    progress.erase()
    print(text, file=sys.stderr)


@contextmanager
def noted_warnings(options: Container[str]) -> Iterator[None]:
    """Prints each warning once, as a remark; Python would add the source line that issued it.

    Args:
        options: those of the command, see ``with_flags``.
    """

    def show(message: Warning | str, *_args: Any, **_named: Any) -> None:
        text = with_flags(f"warning: {message}", options)
        if text not in shown:
            shown.add(text)
            note(text)

    shown, before = set[str](), warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``work``, and the seconds that it took."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def declaration(info: ValueInfo) -> dict[str, Any]:
    """An input or output in JSON types: its name, its type and, if its rank is known, its shape."""
    shape = {} if info.shape is None else {"shape": list(info.shape)}
    return {"name": info.name, "type": str(info.type or "undeclared"), **shape}
