"""What tests ask of the package's modules, from one reading of each."""

from __future__ import annotations

import ast
from functools import cache
from typing import NamedTuple

from tests.support.house import imports, modules, tree


class Source(NamedTuple):
    """A module of the package."""

    text: str
    imports: frozenset[str]
    """Absolute names of modules, and of what is imported from them."""
    attributes: frozenset[str]
    """Names behind a dot."""
    strings: frozenset[str]
    """String constants except docstrings."""


@cache
def sources() -> dict[str, Source]:
    """Each module by its dotted name inside the package."""
    return {module: _source(module) for module in sorted(modules())}


def _source(module: str) -> Source:
    path = modules()[module]
    nodes = list(ast.walk(tree(path)))
    docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    constants = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings]
    return Source(
        path.read_text(encoding="utf-8"),
        frozenset(imports(module, path)),
        frozenset(n.attr for n in nodes if isinstance(n, ast.Attribute)),
        frozenset(c for c in constants if isinstance(c, str)),
    )
