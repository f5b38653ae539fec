"""What commands share: their help, tables, signs of life, extents on the command line, and its mistakes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..proto.types import TensorType

STATUSES: Final = {0: "done", 1: "the model or the data is at fault", 2: "the command line is"}
"""What exit statuses say, in every command."""


class CommandError(Exception):
    """Something on the command line that argparse cannot see is wrong."""


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    *,
    example: str,
    statuses: dict[int, str] | None = None,
    json: str | None = "print everything as JSON",
) -> argparse.ArgumentParser:
    """A command's parser, whose help ends with an example and what the exit statuses say.

    Args:
        commands: where argparse keeps commands.
        run: what the command does; it returns the exit status.
        statuses: what they say beyond, or instead of, STATUSES.
        json: the help of ``--json``; None for a command that has none.
    """
    said = "\n".join(f"  {status}  {what}" for status, what in {**STATUSES, **(statuses or {})}.items())
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=f"example:\n  onnx2jax {example}\n\nexit status:\n{said}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    if json is not None:
        parser.add_argument("--json", action="store_true", help=json)
    return parser


def whole(text: str) -> int:
    """An option's whole number that is not negative, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def add_dims(parser: argparse.ArgumentParser, help: str = "a free dimension; 1 where it is not given") -> None:
    """``--dim NAME=SIZE``, which ``dims`` reads."""
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help=f"{help}; repeatable")


def dims(options: Iterable[str]) -> dict[str, int]:
    """The extents of ``NAME=SIZE`` options.

    Raises:
        CommandError: one is of another form.
    """
    return {name: _size(name, text) for name, text in pairs("--dim", options, "SIZE")}


def extents(options: Iterable[str]) -> dict[str, int | str]:
    """The same where SIZE may be an expression of other dimensions: ``total=past+sequence``."""
    found = pairs("--dim", options, "SIZE")
    return {name: int(text) if text.isdecimal() else text for name, text in found}


def _size(name: str, text: str) -> int:
    if not text.isdecimal():
        raise CommandError(f"--dim {name}={text}: {text!r} is not a whole number")
    return int(text)


def pairs(option: str, values: Iterable[str], what: str, *, first: bool = False) -> Iterator[tuple[str, str]]:
    """The names and values of ``NAME=...`` options; the last ``=`` divides, or the first.

    Raises:
        CommandError: one is of another form.
    """
    for text in values:
        name, equals, value = text.partition("=") if first else text.rpartition("=")
        if not (name and equals and value):
            raise CommandError(f"{option} {text}: expected NAME={what}")
        yield name, value


def print_table(title: str, headers: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """A table: rich's on a terminal that has it, plain columns in a pipe, where each row stays one line."""
    rows = list(rows)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Column, Table
        except ImportError:
            pass
        else:
            table = Table(*(Column(h, overflow="fold") for h in headers), header_style="bold")
            for row in rows:
                table.add_row(*map(escape, row))
            console = Console()
            console.print(escape(title), style="italic")
            console.print(table)
            return
    print(f"\n{title}")
    rows.insert(0, tuple(headers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=2))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A sign of life on the error stream while something takes long: on a terminal that has rich."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
        except ImportError:
            print(f"{what} ...", file=sys.stderr)
        else:
            with Console(stderr=True).status(what):
                yield
            return
    yield


def loading(model: Path) -> Any:
    """``working`` while a model is read."""
    return working(f"loading {model.name}")


def note(text: str) -> None:
    """A remark beside the results."""
    print(text, file=sys.stderr)


def type_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return str(TensorType(value.dtype, value.shape))
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
