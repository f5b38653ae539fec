"""Tables for people at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


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
