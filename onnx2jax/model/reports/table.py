"""Formats rows of text as a table that fits a terminal, and what its cells show: numbers with units, long names."""

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


def scaled(number: float, units: Sequence[str]) -> str:
    """A number with three significant digits and a unit; each unit is a thousand of the one before.

    >>> scaled(0.5, (" us", " ms")), scaled(25600, (" us", " ms")), scaled(9e9, (" us", " ms"))
    ('0.5 us', '25.6 ms', '9e+06 ms')
    """
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"


def clipped(text: str, most: int) -> str:
    """A text of at most so many letters, the others at its end as one.

    >>> clipped("a long name", 7)
    'a long…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
