"""Docstrings on their way to the site: doctests and indented code become fenced blocks of Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)


def as_markdown(text: str) -> str:
    """A docstring with its examples in fences.

    >>> print(as_markdown("Twice.\\n\\n>>> 2 * 2\\n4"))
    Twice.
    <BLANKLINE>
    ```pycon
    >>> 2 * 2
    4
    ```
    """
    fenced = DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", re.sub(r" *# doctest: .*", "", text))
    return re.sub(r"::$", ":", fenced, flags=re.MULTILINE)


class Markdown(griffe.Extension):
    """What mkdocstrings calls for each object of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite its docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
