"""What commands share: tables, types of values, extents on the command line, and its mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import InputNameError
from ..proto.types import TensorType


def print_table(title: str, headers: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """A table: rich's on a terminal that has it, plain columns in a pipe, where each row stays one line."""
    rows = list(rows)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*headers, title=escape(title), title_justify="left", header_style="bold")
            for row in rows:
                table.add_row(*map(escape, row))
            Console().print(table)
            return
    print(f"\n{title}")
    rows.insert(0, tuple(headers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class CommandError(Exception):
    """Something on the command line that argparse cannot see is wrong."""


def type_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return str(TensorType(value.dtype, value.shape))
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def dims(options: list[str]) -> dict[str, int]:
    """The extents of ``NAME=N`` options.

    Raises:
        InputNameError: one is of another form.
    """
    found = {}
    for option in options:
        name, equals, value = option.rpartition("=")
        if not (name and equals and value.isdecimal()):
            raise InputNameError(f"--dim {option}: expected NAME=N, a name and a whole number")
        found[name] = int(value)
    return found
