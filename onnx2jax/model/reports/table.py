"""Formats rows of text as a table that fits a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import chain, zip_longest

GAP = "  "


def table(rows: Sequence[Sequence[str]], width: int = 100) -> str:
    """The rows in aligned columns; cells that are too long for their column wrap.

    >>> print(table([("stage", "why"), ("host", "what it does here")], width=18))
    stage  why
    host   what it
           does here
    """
    widths = [max(map(len, "\n".join(column).split("\n"))) for column in zip(*rows, strict=True)]
    while sum(widths) > width - len(GAP) * (len(widths) - 1):
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        columns = zip(row, widths, strict=True)
        cells = ([textwrap.wrap(line, max(w, 1)) for line in cell.split("\n")] for cell, w in columns)
        for parts in zip_longest(*map(chain.from_iterable, cells), fillvalue=""):
            lines.append(GAP.join(map(str.ljust, parts, widths)).rstrip())
    return "\n".join(lines)
